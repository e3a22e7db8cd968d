"""Warmed up: cached menus expire under load, again and again.

    locust -f locustfiles/warmed_up.py --host http://127.0.0.1:8000 --headless -u 1000 -r 1000 -t 12

The run should last longer than the L2 TTL, so that it contains an expiry of both tiers.
"""

from connection import Connection
from load import MenuUser
from locust import events
from locust.env import Environment
from locust.runners import MasterRunner
from options import options_of


@events.test_start.add_listener
def warm_up(environment: Environment, **_: object) -> None:
    """Ask for each menu once before the users start; not part of the samples."""
    if isinstance(environment.runner, MasterRunner):
        return
    options = options_of(environment)
    connection = Connection(str(environment.host), WarmedUp.network_timeout)
    try:
        for restaurant_id in range(1, options.restaurants + 1):
            connection.get(options.path.format(restaurant_id=restaurant_id))
    finally:
        connection.close()


class WarmedUp(MenuUser):
    """Asks for menus that are cached already."""
