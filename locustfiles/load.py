"""The user of all scenarios: which menus it asks for, and when."""

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Protocol

import gevent
from connection import FAILURES, Connection
from gevent import GreenletExit
from gevent.pool import Group
from gevent.queue import SimpleQueue
from locust import FastHttpUser, task
from locust.exception import CatchResponseError, StopUser
from options import hosts_of, options_of
from run import run
from samples import Outcome

# A refused connection fails at once, so without a pause a restart would fill the run with errors.
PAUSE_AFTER_FAILURE = 0.05
BATCH = 1024
BURST = 100
OK = 200
GREETING = "/healthz"


class Reader(Protocol):
    """A connection through which a user reads menus."""

    def get(self, path: str) -> tuple[int, int]:
        """Return the status code of a GET and the bytes received."""
        ...

    def close(self) -> None:
        """Disconnect."""


class MenuUser(FastHttpUser):
    """Reads menus in a closed loop, or with `--rate` on a fixed timetable."""

    abstract = True
    network_timeout = 20.0
    connection_timeout = 20.0

    def on_start(self) -> None:
        """Choose the ids that this user asks for; they depend only on the seed and its number."""
        self._options = options_of(self.environment)
        worker = getattr(self.environment.runner, "worker_index", 0)
        self._paths = self._choose(random.Random(f"{self._options.seed}-{worker}-{run.next_user()}"))
        self._arrivals = Group()

    def on_stop(self) -> None:
        """Stop the requests of a user that is stopped half-way."""
        self._arrivals.kill()

    def weights(self) -> Sequence[float] | None:
        """Return how popular each restaurant is; `None` means that all are alike."""
        return None

    def connect(self) -> Reader:
        """Return a connection to the service, not yet opened."""
        hosts = hosts_of(self.environment)
        return Connection(hosts[run.next_connection() % len(hosts)], self.network_timeout)

    @task
    def read_menus(self) -> None:
        """Read menus until the run stops."""
        if self._options.rate:
            self._arrive_on_time(self._options.rate)
        else:
            self._ask_again_and_again()
        # Otherwise Locust would start this task again.
        raise StopUser

    def _choose(self, source: random.Random) -> Iterator[str]:
        options = self._options
        paths = [options.path.format(restaurant_id=id_) for id_ in range(1, options.restaurants + 1)]
        weights = self.weights()
        cumulative = list(itertools.accumulate(weights)) if weights else None
        while True:
            yield from source.choices(paths, cum_weights=cumulative, k=BATCH)

    def _ask_again_and_again(self) -> None:
        reader = self._connected()
        run.wait_for_start(self.environment)
        try:
            for path in self._paths:
                if run.is_stopping:
                    break
                self._read(reader, path, perf_counter())
        finally:
            reader.close()

    def _arrive_on_time(self, rate: float) -> None:
        # Taken in turn, so that none is idle for so long that the server closes it.
        readers: SimpleQueue[Reader] = SimpleQueue()
        for _ in range(self._options.connections):
            readers.put(self._connected())
        run.wait_for_start(self.environment)
        begun_at = perf_counter()
        for arrival, path in enumerate(self._paths):
            due_at = begun_at + arrival / rate
            ahead = due_at - perf_counter()
            # Overdue requests are sent at once, almost without letting other greenlets run:
            # otherwise a delayed generator would send fewer of them, just when the service is slow.
            if ahead > 0 or arrival % BURST == 0:
                gevent.sleep(max(ahead, 0))
            if run.is_over(due_at):
                break
            self._arrivals.spawn(self._read_with_one_of, readers, path, due_at)
        self._arrivals.join()

    def _connected(self) -> Reader:
        reader = self.connect()
        # Any answer shows that the connection is not only queued but accepted. If the service is
        # down, the first request fails, and is counted.
        with suppress(*FAILURES):
            reader.get(GREETING)
        return reader

    def _read_with_one_of(self, readers: SimpleQueue[Reader], path: str, due_at: float) -> None:
        try:
            reader = readers.get()
        except GreenletExit:
            # The run is over, and no connection has become free.
            run.samples.add(due_at, perf_counter() - due_at, Outcome.UNANSWERED)
            raise
        try:
            self._read(reader, path, due_at)
        finally:
            readers.put(reader)

    def _read(self, reader: Reader, path: str, due_at: float) -> None:
        size = 0
        error: Exception | None = None
        try:
            status, size = reader.get(path)
        except FAILURES as failure:
            error = failure
        except GreenletExit:
            run.samples.add(due_at, perf_counter() - due_at, Outcome.UNANSWERED)
            raise
        else:
            if status != OK:
                error = CatchResponseError(f"status {status}")
        self._report(due_at, size, error)
        if error is not None:
            gevent.sleep(PAUSE_AFTER_FAILURE)

    def _report(self, due_at: float, size: int, error: Exception | None) -> None:
        latency = perf_counter() - due_at
        run.samples.add(due_at, latency, Outcome.FAILED if error else Outcome.RIGHT)
        self.environment.events.request.fire(
            request_type="GET",
            name=self._options.path,
            response_time=latency * 1000,
            response_length=size,
            exception=error,
            context={},
        )
