"""Raw samples of a run, since Locust keeps rounded latencies only.

The file is a row of native 64-bit floats, three for each request: the instant it was due
(`time.perf_counter` seconds, one clock for all processes of a machine), its latency in seconds, and
its outcome. `numpy.fromfile(path).reshape(-1, 3)` reads it.
"""

from array import array
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path


class Outcome(IntEnum):
    """How a request ended."""

    RIGHT = 1
    FAILED = 0
    # Without an answer when the run was over; the latency is the time that it had waited by then.
    UNANSWERED = -1


class Samples:
    """The samples of one generator process."""

    def __init__(self) -> None:
        """Start empty."""
        self._numbers = array("d")

    def __len__(self) -> int:
        """Return how many requests were sampled."""
        return len(self._numbers) // 3

    def __iter__(self) -> Iterator[tuple[float, float, float]]:
        """Yield when each request was due, its latency, and its outcome."""
        numbers = iter(self._numbers)
        return zip(numbers, numbers, numbers, strict=True)

    def add(self, due_at: float, latency: float, outcome: Outcome) -> None:
        """Add one request: when it was due, how many seconds it took, and how it ended."""
        self._numbers.extend((due_at, latency, outcome))

    def clear(self) -> None:
        """Forget the samples of an earlier run."""
        del self._numbers[:]

    def write(self, path: Path) -> None:
        """Write all samples to *path*."""
        with path.open("wb") as file:
            self._numbers.tofile(file)
