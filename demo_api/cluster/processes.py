"""The service's processes under test, on one Redis, Postgres and namespace."""

import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Final

from ..compare.processes import ChildError
from ..compare.service import START_TIMEOUT, Counts, Service, new_namespace, running_service
from ..servers import ServerError, ServerUrls
from .options import Fleet

# Requests per worker that are sent at once: workers share a port, and any of them may answer.
ASKERS: Final = 6


class Processes:
    """The running processes, counted together."""

    def __init__(self, services: Sequence[Service], workers: int, log: Path) -> None:
        self.urls = tuple(service.url for service in services)
        self._services = services
        self._workers = workers
        self._log = log

    def counts(self) -> Counts:
        """Return what all of them have counted so far.

        Raises:
            ChildError: If one of them does not answer.
        """
        return reduce(add, map(Counts.of, self._stats()))

    def redis_failures(self) -> int:
        """Return how often Redis failed or was skipped; the process then loads by itself."""
        guards = [stats["guard"] for stats in self._stats()]
        return sum(guard["l2_errors"] + guard["l2_skips"] for guard in guards)

    def _stats(self) -> list[dict[str, Any]]:
        return [stats for service in self._services for stats in self._stats_of(service)]

    def _stats_of(self, service: Service) -> list[dict[str, Any]]:
        """Ask until each worker has answered."""
        found: dict[int, dict[str, Any]] = {}
        give_up_at = time.monotonic() + START_TIMEOUT
        asked = 1 if self._workers == 1 else ASKERS * self._workers
        with ThreadPoolExecutor(asked) as askers:
            while len(found) < self._workers:
                if time.monotonic() > give_up_at:
                    raise ChildError(f"only {len(found)} of {self._workers} workers answer", self._log)
                for stats in askers.map(lambda _: Service(service.port).get("/stats"), range(asked)):
                    found[stats["process"]] = stats
        return list(found.values())


@contextmanager
def running_processes(fleet: Fleet, servers: ServerUrls, folder: Path, *, lease: bool) -> Generator[Processes]:
    """Run the processes within the block; they are ready when it begins.

    Args:
        fleet: The processes.
        servers: Where Redis and Postgres are.
        folder: Where their logs go.
        lease: Whether a process waits while another loads the same menu.

    Raises:
        ChildError: If one of them does not get ready.
        ServerError: If Redis does not answer.
    """
    variables = {**fleet.lives, "LEASE": str(lease), "NAMESPACE": new_namespace()}
    with ExitStack() as running:
        services: list[Service] = []
        for number in range(fleet.instances):
            log = folder / f"service-{number}.log"
            service = running_service("on", servers, log, variables, workers=fleet.workers)
            services.append(running.enter_context(service))
        if services[0].get("/readyz")["redis"] != "answers":
            raise ServerError("Redis does not answer, and the demonstration needs it; check REDIS_URL")
        yield Processes(services, fleet.workers, log)
