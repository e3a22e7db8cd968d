"""A fault in mid-run, and its effect on requests.

Such a scenario starts its own servers: a Postgres (or that of `DATABASE_URL`), a Redis that the
fault may break, and the service. So it needs no `--host`, runs without a web page, and ends by
itself. It reports the requests before, during and after the fault. Its exit code is 1 if a request
failed, or if the run was over before the fault was.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import gevent
from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import LocalRunner
from options import options_of
from run import run
from samples import Outcome

REPOSITORY = Path(__file__).parents[1]
# `locust -f` puts only the scenario's own folder on the path.
sys.path.append(str(REPOSITORY))

from demo_api.compare.processes import ChildError  # noqa: E402
from demo_api.compare.service import Counts, Service, running_service  # noqa: E402
from demo_api.servers import ServerError, ServerUrls, embedded_servers  # noqa: E402

# Short, so that Redis is asked often; the environment may say otherwise.
LIVES = {"L1_TTL": "0.5", "L2_TTL": "2"}
DEFAULTS = {"headless": True, "num_users": 50, "spawn_rate": 50.0, "window": 10.0, "stop_timeout": 20.0}
START_TIMEOUT = 120.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """A fault of the servers.

    Attributes:
        redis_url: Where the service finds Redis.
        happen: Breaks it, and returns when it is whole again.
    """

    redis_url: str
    happen: Callable[[Environment], None]


@dataclass
class Phase:
    """A part of the run, in seconds of `perf_counter`, and the service's counts at its begin."""

    name: str
    counts: Counts
    begun_at: float = field(default_factory=perf_counter)
    ended_at: float = inf


class Interruption:
    """A run with a fault in the middle."""

    def __init__(self, open_fault: Callable[[], AbstractContextManager[Fault]]) -> None:
        self._open_fault = open_fault
        self._stage = ExitStack()
        self._phases: list[Phase] = []

    def register(self) -> None:
        """Add the run's listeners to Locust."""
        # Locust's events have no types.
        hooks: Any = events
        hooks.init_command_line_parser.add_listener(self._add_options)
        hooks.init.add_listener(self._set_up)
        hooks.test_start.add_listener(self._begin)
        hooks.test_stop.add_listener(self._report)
        hooks.quitting.add_listener(self._tear_down)

    def _add_options(self, parser: LocustArgumentParser) -> None:
        parser.add_argument("--before", type=float, default=3.0, help="Seconds of load before the fault. [3]")
        parser.set_defaults(**DEFAULTS)

    def _set_up(self, environment: Environment, **_: object) -> None:
        if not isinstance(environment.runner, LocalRunner):
            sys.exit("this scenario breaks its own servers, so it runs in one process: leave out --processes")
        try:
            self._service, self._fault = self._stage.enter_context(_stage(self._open_fault))
        except (ServerError, ChildError) as error:
            sys.exit(str(error))
        environment.host = self._service.url

    def _begin(self, environment: Environment, **_: object) -> None:
        self._phases = []
        gevent.spawn(self._play, environment)

    def _play(self, environment: Environment) -> None:
        run.started.wait()
        self._enter("before")
        gevent.sleep(options_of(environment).before)
        self._enter("during")
        self._fault.happen(environment)
        self._enter("after")

    def _enter(self, name: str) -> None:
        phase = Phase(name, self._service.counts())
        if self._phases:
            self._phases[-1].ended_at = phase.begun_at
        self._phases.append(phase)
        logger.info("%s the fault", name)

    def _report(self, environment: Environment, **_: object) -> None:
        ended_by = self._service.counts()
        counts = [*(phase.counts for phase in self._phases[1:]), ended_by]
        for phase, at_its_end in zip(self._phases, counts, strict=True):
            print(_line(phase, at_its_end.since(phase.counts)))  # noqa: T201  # the result of the run
        failures = sum(outcome != Outcome.RIGHT for _, _, outcome in run.samples)
        print(f"failures = {failures} of {len(run.samples):,} requests")  # noqa: T201  # likewise
        if len(self._phases) < 3:
            print("the run was over before the fault: make --window longer")  # noqa: T201  # likewise
        if failures or len(self._phases) < 3:
            environment.process_exit_code = 1

    def _tear_down(self, **_: object) -> None:
        self._stage.close()


def _line(phase: Phase, counts: Counts) -> str:
    latencies = sorted(latency for due_at, latency, _ in run.samples if phase.begun_at <= due_at < phase.ended_at)
    p99 = f"{latencies[int(0.99 * len(latencies))] * 1000:.1f}" if latencies else "–"
    return (
        f"{phase.name:>6}: {len(latencies):,} requests, p99 {p99} ms, {counts.redis_reads:,} answers of Redis,"
        f" {counts.loads:,} loads"
    )


@contextmanager
def _stage(open_fault: Callable[[], AbstractContextManager[Fault]]) -> Generator[tuple[Service, Fault]]:
    """Run the servers and the service within the block."""
    given = os.environ.get("DATABASE_URL", "")
    lives = {name: os.environ.get(name) or life for name, life in LIVES.items()}
    with ExitStack() as running:
        postgres = given or running.enter_context(embedded_servers(redis=False)).postgres
        _seed(postgres)
        fault = running.enter_context(open_fault())
        folder = Path(running.enter_context(TemporaryDirectory()))
        servers = ServerUrls(redis=fault.redis_url, postgres=postgres)
        yield running.enter_context(running_service("on", servers, folder / "service.log", lives)), fault


def _seed(database_url: str) -> None:
    """Fill Postgres in a separate process, because gevent and asyncio do not share one well."""
    command = [sys.executable, "-m", "demo_api", "seed"]
    environment = {**os.environ, "DATABASE_URL": database_url}
    seeding = subprocess.run(  # noqa: S603  # our own
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=START_TIMEOUT, check=False
    )
    if seeding.returncode:
        raise ServerError(seeding.stderr.strip())
