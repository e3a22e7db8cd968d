"""Epochs: a load that began before an invalidation may not be stored.

A flight takes the epoch of its op before it reads anything, and compares it before it stores. Without that, a value
read before an invalidation could be stored after it.
"""

from collections.abc import Sequence
from itertools import count
from typing import Protocol


class EntryCounters(Protocol):
    """The counters of an operation, as far as they count its entries in memory."""

    evictions: int
    expirations: int


class Generation:
    """One definition of a function. What is stored and loaded by it ends with it.

    Args:
        counters: Those of its operation, if its entries are counted.

    Attributes:
        is_over: Whether the function was defined anew.
        counters: As given.
    """

    __slots__ = ("counters", "is_over")

    def __init__(self, counters: EntryCounters | None = None) -> None:
        self.is_over = False
        self.counters = counters


class Lineage:
    """The generations of one function. Definitions of it that are alive share the last one.

    Args:
        counters: Those of the operation.

    Attributes:
        generation: The last.
    """

    __slots__ = ("generation",)

    def __init__(self, counters: EntryCounters | None = None) -> None:
        self.generation = Generation(counters)

    def start_generation(self, counters: EntryCounters | None = None) -> None:
        """End the last generation: none of its values is an answer any more, nor will be.

        Args:
            counters: Those of the operation that is defined next; by default those of the last one.
        """
        last = self.generation
        last.is_over = True
        self.generation = Generation(last.counters if counters is None else counters)


_MAX_OPS = 65_536
_TAG = "\0tag:"  # tags are counted among the ops, with a prefix that no op has


class Epochs:
    """The number of each op's last invalidation, bounded: when full, all ops move on together.

    Numbers come from one counter, because with `+= 1` two threads could count two invalidations as one.
    """

    __slots__ = ("_all", "_max_ops", "_numbers", "_ops")

    def __init__(self, max_ops: int = _MAX_OPS) -> None:
        self._all = 0
        self._ops: dict[str, int] = {}
        self._max_ops = max_ops
        self._numbers = count(1)

    def current(self, op: str, tags: Sequence[str] = ()) -> tuple[int, ...]:
        """Return the present epoch of *op* and of its tags, to be compared for equality only."""
        get = self._ops.get
        if not tags:
            return self._all, get(op, 0)
        return self._all, get(op, 0), *(get(_TAG + tag, 0) for tag in tags)

    def bump(self, op: str) -> None:
        """Begin a new epoch of *op*."""
        if len(self._ops) >= self._max_ops and op not in self._ops:
            self.bump_all()  # safe: running loads may not be stored, and nothing else changes
        self._ops[op] = next(self._numbers)

    def bump_tag(self, tag: str) -> None:
        """Begin a new epoch of every op that has *tag*."""
        self.bump(_TAG + tag)

    def bump_all(self) -> None:
        """Begin a new epoch of every op."""
        self._all = next(self._numbers)
        self._ops.clear()
