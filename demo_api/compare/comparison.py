"""The comparison: boot the service in each mode, and run the plan."""

import asyncio
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ..seeding import seed
from ..servers import ServerUrls, embedded_servers
from .load import generate
from .measurement import Measurement
from .options import Options
from .plan import PREBUILT, SHARE_OF_CEILING, Run, Shape, plan
from .service import running_service


class Watcher(Protocol):
    """Receives the progress of a comparison."""

    def booting(self, run: Run) -> None:
        """The service is being started for *run*."""

    def running(self, run: Run) -> Callable[[], None]:
        """A run begins; the returned function is called repeatedly until it ends."""
        ...

    def finished(self, measurement: Measurement) -> None:
        """A run has ended."""


class Comparison:
    """The finished runs of one comparison."""

    def __init__(self, options: Options) -> None:
        self.measurements: list[Measurement] = []
        self._options = options

    @property
    def rate(self) -> float:
        """The constant rate, in arrivals per second: a share of the ceiling that was measured."""
        ceiling = max(each.throughput for each in self.measurements if each.run.mode == PREBUILT)
        return round(ceiling * SHARE_OF_CEILING)

    def run(self, watcher: Watcher, folder: Path) -> None:
        """Run the plan; finished runs are in `measurements`, also after an interruption.

        Args:
            watcher: Told of the progress.
            folder: Where the logs of the processes go.

        Raises:
            ChildError: If the service or Locust fails.
            ServerError: If an embedded server cannot run here.
            DatabaseError: If Postgres cannot be reached.
        """
        with open_servers() as servers:
            for run in plan(self._options):
                watcher.booting(run)
                with running_service(run.mode, servers, folder / "service.log") as service:
                    rate = self.rate if run.shape is Shape.CONSTANT_RATE else 0.0
                    tick = watcher.running(run)
                    found = generate(run, service, self._options, rate=rate, folder=folder, tick=tick)
                self.measurements.append(found)
                watcher.finished(found)


@contextmanager
def open_servers() -> Generator[ServerUrls]:
    """Open the servers that `REDIS_URL` and `DATABASE_URL` name, or embedded ones; seed the menus."""
    redis, postgres = os.environ.get("REDIS_URL", ""), os.environ.get("DATABASE_URL", "")
    with embedded_servers(redis=not redis, postgres=not postgres) as own:
        servers = ServerUrls(redis=redis or own.redis, postgres=postgres or own.postgres)
        asyncio.run(seed(servers.postgres))
        yield servers
