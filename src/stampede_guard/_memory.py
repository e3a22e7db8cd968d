"""L1: this process's memory, bounded, least recently used out first.

A `cachetools.TTLCache` has one TTL for all, and purges everything that expired together inside
the next insert. So the map is an `LRUCache`, and each entry knows when it stops being fresh.
"""

from collections.abc import Callable
from typing import Any

from cachetools import LRUCache

from ._entry import Entry


class Memory:
    """The entries of one event loop.

    Args:
        maxsize: How many entries are kept.
        clock: Monotonic seconds.
    """

    __slots__ = ("_clock", "_entries")

    def __init__(self, maxsize: int, clock: Callable[[], float]) -> None:
        self._entries: LRUCache[str, Entry[Any]] = LRUCache(maxsize)
        self._clock = clock

    def get(self, op: str) -> Entry[Any] | None:
        """Return the fresh entry of *op*, or `None`."""
        try:
            entry = self._entries[op]
        except KeyError:
            return None
        if self._clock() < entry.fresh_until:
            return entry
        del self._entries[op]
        return None

    def put(self, op: str, value: object, life: float) -> None:
        """Keep *value* for *life* seconds."""
        self._entries[op] = Entry(value, self._clock() + life)

    def drop(self, op: str) -> None:
        """Forget *op*."""
        self._entries.pop(op, None)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
