"""The live progress of a comparison."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .measurement import Measurement
from .plan import Run

# Seconds that booting the service and running Locust add to each run; corrected as runs finish.
OVERHEAD: Final = 4.0


class LiveProgress:
    """A bar: which run of how many, and the time left."""

    def __init__(self, runs: list[Run], console: Console) -> None:
        self._runs = runs
        self._console = console
        self._finished = 0
        self._overheads = [OVERHEAD]
        self._ended_at = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"), console=console
        )
        self._task = self._bar.add_task("starting the servers", total=self._seconds_of(self._runs), left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def booting(self, run: Run) -> None:
        """Show that the service is being started for *run*."""
        self._show(f"{self._position} {run.title}: booting the service")

    def running(self, run: Run) -> Callable[[], None]:
        """Show that *run* has begun; the returned function updates the time left."""
        return lambda: self._show(f"{self._position} {run.title}")

    def finished(self, measurement: Measurement) -> None:
        """Show the main figures of a run."""
        now = time.monotonic()
        self._overheads.append(now - self._ended_at - measurement.run.seconds)
        self._ended_at = now
        self._console.print(
            f"{self._position} {measurement.run.title}: {measurement.throughput:,.0f} requests/s,"
            f" p99 {measurement.p99:,.1f} ms, {measurement.counts.postgres_queries:,} Postgres queries"
        )
        self._finished += 1

    @property
    def _position(self) -> str:
        return f"run {self._finished + 1} of {len(self._runs)} ·"

    def _seconds_of(self, runs: list[Run]) -> float:
        return sum(run.seconds for run in runs) + len(runs) * sum(self._overheads) / len(self._overheads)

    def _show(self, what: str) -> None:
        elapsed = time.monotonic() - self._ended_at
        left = max(self._seconds_of(self._runs[self._finished :]) - elapsed, 0)
        done = self._seconds_of(self._runs) - left
        self._bar.update(self._task, description=what, completed=done, left=f"{left // 60:.0f}:{left % 60:02.0f} left")
