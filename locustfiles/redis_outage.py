"""Redis outage: Redis is killed in mid-run, and comes back empty.

    locust -f locustfiles/redis_outage.py
    locust -f locustfiles/redis_outage.py --frozen --outage 5 --window 15 -u 200 -r 200

The scenario starts its own servers and service, and ends by itself (see `interruption`). The
service goes on answering, from its memory and from Postgres.
"""

from collections.abc import Generator
from contextlib import contextmanager

import gevent
from interruption import Fault, Interruption
from load import MenuUser
from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from options import options_of

from demo_api.servers import valkey_server


@events.init_command_line_parser.add_listener
def add_outage(parser: LocustArgumentParser) -> None:
    """Add the options that say how Redis fails."""
    parser.add_argument("--outage", type=float, default=3.0, help="Seconds for which Redis is away. [3]")
    parser.add_argument(
        "--frozen", action="store_true", help="Redis accepts connections and does not answer, instead of being gone."
    )


@contextmanager
def outage() -> Generator[Fault]:
    """Run a Valkey that will be away for some seconds."""
    with valkey_server() as valkey:

        def happen(environment: Environment) -> None:
            options = options_of(environment)
            begin, end = (valkey.freeze, valkey.thaw) if options.frozen else (valkey.kill, valkey.revive)
            begin()
            gevent.sleep(options.outage)
            end()

        yield Fault(valkey.url, happen)


Interruption(outage).register()


class RedisOutage(MenuUser):
    """Asks for menus before, during and after the outage."""
