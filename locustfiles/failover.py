"""Failover: a primary under sentinels is killed, and a replica replaces it.

    locust -f locustfiles/failover.py
    locust -f locustfiles/failover.py --window 20 -u 200 -r 200

The scenario starts its own servers (a primary, two replicas, three sentinels) and service, and ends
by itself (see `interruption`). The service goes on answering, and finds the new primary.
"""

from collections.abc import Generator
from contextlib import contextmanager

from interruption import Fault, Interruption
from load import MenuUser
from locust.env import Environment

from demo_api.servers import wait_until
from demo_api.topologies import leads, valkey_sentinels

# Seconds that the sentinels may take to notice, to agree, and to promote a replica.
PATIENCE = 60.0


@contextmanager
def failover() -> Generator[Fault]:
    """Run Valkeys under sentinels; the fault kills their primary."""
    with valkey_sentinels() as valkeys:

        def happen(_: Environment) -> None:
            valkeys.primary.kill()
            wait_until(lambda: any(map(leads, valkeys.replicas)), "a replica to be promoted", deadline=PATIENCE)

        yield Fault(valkeys.url, happen)


Interruption(failover).register()


class Failover(MenuUser):
    """Asks for menus before, during and after the failover."""
