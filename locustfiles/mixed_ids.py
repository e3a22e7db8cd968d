"""Mixed ids: random menus, and how many calls the loader was spared.

    locust -f locustfiles/mixed_ids.py --host http://127.0.0.1:8000 --restaurants 500 -u 1000 -r 1000 -t 60

The article's second experiment. Once a second it prints how often the guarded function was called
and how often it was executed, from the service's `/stats`.
"""

import json
import logging
from urllib.request import urlopen

import gevent
from load import MenuUser
from locust import events
from locust.env import Environment
from locust.runners import WorkerRunner

INTERVAL = 1.0
logger = logging.getLogger(__name__)


class Curve:
    """Calls and executions since the run began, printed while it goes on."""

    def __init__(self, host: str) -> None:
        """Begin at the current counts of the service at *host*."""
        self._url = f"{host}/stats"
        self._calls, self._executions = self._counts()
        self._greenlet = gevent.spawn(self._follow)

    def end(self) -> None:
        """Print the last line and stop."""
        self._greenlet.kill()
        self._print()

    def _follow(self) -> None:
        while True:
            gevent.sleep(INTERVAL)
            self._print()

    def _print(self) -> None:
        try:
            calls, executions = self._counts()
        except OSError as error:
            logger.warning("no answer from %s: %s", self._url, error)
            return
        calls, executions = calls - self._calls, executions - self._executions
        spared = 1 - executions / calls if calls else 0.0
        logger.info("%d calls, %d executions: %.2f %% spared", calls, executions, 100 * spared)

    def _counts(self) -> tuple[int, int]:
        with urlopen(self._url, timeout=10) as answer:  # noqa: S310  # a trusted URL, from --host
            stats = json.load(answer)
        return stats["calls"], stats["executions"]


curves: list[Curve] = []


@events.test_start.add_listener
def begin_curve(environment: Environment, **_: object) -> None:
    """Follow the counts from one process only: the master, or the only one."""
    if not isinstance(environment.runner, WorkerRunner):
        curves.append(Curve(str(environment.host)))


@events.test_stop.add_listener
def end_curve(**_: object) -> None:
    """Print the counts of the whole run."""
    while curves:
        curves.pop().end()


class MixedIds(MenuUser):
    """Asks for random menus, the same ones again and again."""
