"""L1 while its calls are counted.

A hit costs little more than a dict look-up, so no counter of each op has a place on its way. While a count runs, L1 is
of another class, and the argument caches are empty and learn nothing: so each call asks L1, and is seen. When no count
runs, there is nothing of this in the way of a call.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from .._speed.forms import ArgumentCache, Slot
from .l1 import Memory

_MOST = 65_536  # ops that one count tells apart


class CallCounter:
    """The calls of each op, bounded: when there are too many ops, those that were called once are forgotten.

    Attributes:
        calls: How many there were of each op.
    """

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def note(self, op: str) -> None:
        """Count a call of *op*."""
        known = self.calls.get(op)
        if known is None:
            if len(self.calls) >= _MOST:
                self.calls = {each: calls for each, calls in self.calls.items() if calls > 1}
            if len(self.calls) >= _MOST:
                return
            known = 0
        self.calls[op] = known + 1

    def top(self, number: int) -> list[tuple[str, int]]:
        """Return the *number* ops with the most calls, the most called first."""
        return sorted(self.calls.items(), key=lambda each: (-each[1], each[0]))[:number]


_running: "WeakKeyDictionary[Memory, list[CallCounter]]" = WeakKeyDictionary()


class CountedMemory(Memory):
    """The entries of one event loop, each look-up of which is counted."""

    __slots__ = ()

    def get(self, op: str) -> Slot | None:
        """Count a call, and do as before."""
        for counter in _running[self]:
            counter.note(op)
        return super().get(op)

    def note_in(self, cache: ArgumentCache, args: tuple[Any, ...], slot: Slot) -> None:
        """Let *cache* know nothing: what it answers is not seen here."""


@contextmanager
def counting(memory: Memory) -> Generator[CallCounter]:
    """Count the calls of each op of *memory* while the block runs. Several counts may run at once."""
    counter = CallCounter()
    counters = _running.setdefault(memory, [])
    counters.append(counter)
    memory.__class__ = CountedMemory
    memory.release_argument_caches()
    try:
        yield counter
    finally:
        counters.remove(counter)
        if not counters:
            memory.__class__ = Memory
