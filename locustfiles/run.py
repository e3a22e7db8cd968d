"""The current run of this process: its start, end and samples.

All users connect first and then start together. A server accepts connections far more slowly while
it answers requests: if users began at once, later ones would wait for seconds, and the first
latencies would measure the accepting instead of the caches.
"""

import gc
import itertools
from math import inf
from pathlib import Path
from time import perf_counter

import gevent
from gevent.event import Event
from locust import events
from locust.env import Environment
from locust.runners import LocalRunner, MasterRunner, WorkerRunner
from options import options_of
from samples import Samples


class Run:
    """What one process keeps for a run.

    Attributes:
        samples: The samples of its requests.
        started: Set once all users have connected, and the load begins.
    """

    def __init__(self) -> None:
        """Start before the first run."""
        self.samples = Samples()
        self._ends_at = inf
        self._users = itertools.count()
        self._connections = itertools.count()
        self.started = Event()
        self._users_ready = 0
        self._is_spawned = False

    def begin(self) -> None:
        """Forget the run before, and exclude all current objects from garbage collection."""
        self.samples.clear()
        self._ends_at = inf
        self._is_spawned = False
        self._users = itertools.count()
        self._users_ready = 0
        self.started.clear()
        gc.collect()
        gc.freeze()

    @property
    def is_stopping(self) -> bool:
        """Whether no more requests are to be sent."""
        return perf_counter() >= self._ends_at

    def is_over(self, due_at: float) -> bool:
        """Return whether the run has ended by *due_at*."""
        return due_at >= self._ends_at

    def stop(self) -> None:
        """End the run: requests that are due from now on are not sent."""
        self._ends_at = min(self._ends_at, perf_counter())

    def next_user(self) -> int:
        """Return the number of a new user: 0, 1, 2, …."""
        return next(self._users)

    def next_connection(self) -> int:
        """Return the number of a new connection: 0, 1, 2, …."""
        return next(self._connections)

    def wait_for_start(self, environment: Environment) -> None:
        """Count one more connected user of *environment*, and wait for the others."""
        self._users_ready += 1
        self._open_gate_if_ready(environment)
        self.started.wait()

    def all_spawned(self, environment: Environment) -> None:
        """Note that all users of *environment* have been spawned."""
        self._is_spawned = True
        self._open_gate_if_ready(environment)

    def _open_gate_if_ready(self, environment: Environment) -> None:
        assert environment.runner is not None
        if not self._is_spawned or self._users_ready < environment.runner.user_count or self.started.is_set():
            return
        self.started.set()
        window = options_of(environment).window
        if window:
            # An instant and not only a timer, which may fire late: each mode gets the same load.
            self._ends_at = perf_counter() + window
            gevent.spawn_later(window, self._end, environment)

    def _end(self, environment: Environment) -> None:
        # A worker waits until its master ends the run.
        if isinstance(environment.runner, LocalRunner):
            environment.runner.quit()


run = Run()


@events.test_start.add_listener
def begin(**_: object) -> None:
    """Get ready for a run."""
    run.begin()


@events.spawning_complete.add_listener
def all_spawned(**_: object) -> None:
    """Let the users start as soon as they have connected."""
    run.all_spawned(environments[0])


environments: list[Environment] = []


@events.init.add_listener
def remember(environment: Environment, **_: object) -> None:
    """Keep the environment, which Locust does not pass when the users are spawned."""
    environments[:] = [environment]


@events.test_stopping.add_listener
def stop(**_: object) -> None:
    """Send no more requests; those on their way are measured within Locust's `--stop-timeout`."""
    run.stop()


@events.test_stop.add_listener
def write_samples(environment: Environment, **_: object) -> None:
    """Write the samples if `--record` asks for them."""
    record = options_of(environment).record
    if record and not isinstance(environment.runner, MasterRunner):
        suffix = f".{environment.runner.worker_index}" if isinstance(environment.runner, WorkerRunner) else ""
        run.samples.write(Path(f"{record}{suffix}"))
