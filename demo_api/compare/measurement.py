"""The result of one run: raw samples, and the service's counts."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .plan import Run
from .service import Counts

Numbers = NDArray[np.float64]
PERCENTILES: Final = (50, 75, 90, 95, 99)


@dataclass(frozen=True)
class Samples:
    """A number for each request: when it was due, how many seconds it took, and how it ended.

    The outcome is 1 for a right answer, 0 for a failure, and -1 for a request without an answer at
    the end of the run. The latency of the latter is the time that it had waited by then.
    """

    due_at: Numbers
    latency: Numbers
    outcome: Numbers

    @classmethod
    def read(cls, path: Path) -> "Samples":
        """Read the samples that a locustfile recorded at *path*."""
        due_at, latency, outcome = np.fromfile(path).reshape(-1, 3).T
        return cls(due_at, latency, outcome)


@dataclass(frozen=True, slots=True)
class Moment:
    """The service's counts since the run began, *at* seconds after its first request."""

    at: float
    counts: Counts


@dataclass(frozen=True)
class Measurement:
    """One finished run."""

    run: Run
    restaurants: int
    samples: Samples
    counts: Counts
    curve: list[Moment]

    @property
    def requests(self) -> int:
        """How many requests were due."""
        return len(self.samples.latency)

    @cached_property
    def errors(self) -> int:
        """How many requests failed, or had another status than 200."""
        return int((self.samples.outcome == 0).sum())

    @cached_property
    def unanswered(self) -> int:
        """How many requests had no answer when the run was over."""
        return int((self.samples.outcome < 0).sum())

    @cached_property
    def duration(self) -> float:
        """Seconds from the first request to the last answer."""
        return float((self.samples.due_at + self.samples.latency).max() - self.samples.due_at.min())

    @property
    def throughput(self) -> float:
        """Right answers per second."""
        return (self.requests - self.errors - self.unanswered) / self.duration

    @cached_property
    def offset(self) -> Numbers:
        """Seconds from the first request to when each one was due."""
        offset: Numbers = self.samples.due_at - self.samples.due_at.min()
        return offset

    @cached_property
    def milliseconds(self) -> Numbers:
        """The latency of each request in milliseconds."""
        milliseconds: Numbers = self.samples.latency * 1000
        return milliseconds

    def percentile(self, percent: float) -> float:
        """Return the latency in milliseconds that *percent* of the requests did not exceed."""
        return float(np.percentile(self.milliseconds, percent))

    @property
    def p99(self) -> float:
        """The 99th percentile of the latency in milliseconds."""
        return self.percentile(99)
