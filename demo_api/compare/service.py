"""The service under test, in its own process with fresh caches."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from uuid import uuid4

from ..servers import HOST, ServerUrls, free_port
from .plan import PREBUILT
from .processes import ChildError, child

START_TIMEOUT: Final = 30.0
POLL_INTERVAL: Final = 0.05
ANSWER_TIMEOUT: Final = 20.0
REPOSITORY: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Counts:
    """The service's counts, at one moment or between two."""

    calls: int
    executions: int
    loads: int
    redis_reads: int
    postgres_queries: int

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> "Counts":
        """Return the counts in the service's `/stats`."""
        return cls(**{name: stats[name] for name in cls.__slots__})

    def __add__(self, other: "Counts") -> "Counts":
        """Return the counts of two processes together."""
        return Counts(*(getattr(self, name) + getattr(other, name) for name in Counts.__slots__))

    def since(self, earlier: "Counts") -> "Counts":
        """Return what was counted after *earlier*."""
        return Counts(
            calls=self.calls - earlier.calls,
            executions=self.executions - earlier.executions,
            loads=self.loads - earlier.loads,
            redis_reads=self.redis_reads - earlier.redis_reads,
            postgres_queries=self.postgres_queries - earlier.postgres_queries,
        )


class Service:
    """A running service."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://{HOST}:{port}"
        self.urls = (self.url,)
        self._connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_TIMEOUT)

    def counts(self) -> Counts:
        """Return what the service has counted so far."""
        return Counts.of(self.get("/stats"))

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON at *path*.

        Raises:
            OSError: If the service does not answer with status 200.
        """
        try:
            self._connection.request("GET", path)
            with self._connection.getresponse() as answer:
                body = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"no answer from {self.url}{path}: {error!r}") from error
        finally:
            # The service might close a connection that is kept alive just before the next request.
            self._connection.close()
        if answer.status != http.client.OK:
            raise ConnectionError(f"{self.url}{path} answered with status {answer.status}")
        parsed: dict[str, Any] = json.loads(body)
        return parsed


def new_namespace() -> str:
    """Return an unused namespace: its L2 is empty, and other namespaces stay as they are."""
    return f"compare-{uuid4().hex}"


@contextmanager
def running_service(
    mode: str, servers: ServerUrls, log: Path, variables: Mapping[str, str] = MappingProxyType({}), *, workers: int = 1
) -> Generator[Service]:
    """Run the service in *mode* within the block; it is ready when the block begins.

    Args:
        mode: `off`, `aiocache`, `on`, or `prebuilt`, for which the guard does not matter.
        servers: Where Redis and Postgres are.
        log: The file that gets what the service prints.
        variables: Further settings of the service, as environment variables.
        workers: In how many processes it runs.

    Raises:
        ChildError: If the service does not get ready.
    """
    port = free_port()
    environment = os.environ | {
        "GUARD": "on" if mode == PREBUILT else mode,
        "CEILING_FIRST": str(mode == PREBUILT),
        "HTTP_CACHING": "False",  # aiocache tells no ages: all modes send the same headers
        "REDIS_URL": servers.redis,
        "DATABASE_URL": servers.postgres,
        "NAMESPACE": new_namespace(),
        **variables,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
    }
    command = [
        sys.executable,
        "-m",
        "demo_api",
        "serve",
        "--host",
        HOST,
        "--port",
        str(port),
        "--workers",
        str(workers),
    ]
    with child(command, environment=environment, log=log, stop_signal=signal.SIGTERM) as process:
        service = Service(port)
        _wait_until_ready(service, process, log)
        yield service


def _wait_until_ready(service: Service, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT
    while time.monotonic() < give_up_at:
        if process.poll() is not None:
            raise ChildError(f"the service ended with code {process.returncode} while it started", log)
        try:
            service.get("/readyz")
        except OSError:
            time.sleep(POLL_INTERVAL)
        else:
            return
    raise ChildError(f"the service was not ready within {START_TIMEOUT:g} s", log)
