"""L1: this process's memory, bounded, least recently used out first.

A `cachetools.TTLCache` has one TTL for all, and purges everything that expired together inside
the next insert. So the map is an `LRUCache`, and each entry knows when it stops being fresh.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from cachetools import LRUCache

from ._entry import Entry

UNTRUSTED_LIFE = 1.0  # seconds that an entry lives while nobody would tell us of its invalidation


class _Entries(LRUCache[str, Entry[Any]]):
    """Entries, and which of them have which tag."""

    def __init__(self, maxsize: int) -> None:
        super().__init__(maxsize)
        self._tags: dict[str, Sequence[str]] = {}
        self._tagged: dict[str, set[str]] = {}

    def note_tags(self, op: str, tags: Sequence[str]) -> None:
        """Note what invalidates *op*, which was just put in."""
        self._tags[op] = tags
        for tag in tags:
            self._tagged.setdefault(tag, set()).add(op)

    def tagged(self, tag: str) -> tuple[str, ...]:
        """Return the ops that have *tag*."""
        return tuple(self._tagged.get(tag, ()))

    def __delitem__(self, op: str) -> None:  # evictions come this way too
        super().__delitem__(op)
        for tag in self._tags.pop(op, ()):
            ops = self._tagged[tag]
            ops.discard(op)
            if not ops:
                del self._tagged[tag]


class Memory:
    """The entries of one event loop.

    Args:
        maxsize: How many entries are kept.
        clock: Monotonic seconds.

    Attributes:
        maxsize: As given.
        trusted_until: Instant up to which invalidations would have reached us; after that, everything is dropped,
            and what comes in lives for a second at most. For ever, where there is nobody to tell us.
    """

    __slots__ = ("_clock", "_entries", "_longest", "maxsize", "on_lapse", "trusted_until")

    def __init__(self, maxsize: int, clock: Callable[[], float]) -> None:
        self.maxsize = maxsize
        self._entries = _Entries(maxsize)
        self._clock = clock
        self._longest = inf
        self.trusted_until = inf
        self.on_lapse: Callable[[], object] = bool

    def get(self, op: str) -> Entry[Any] | None:
        """Return the fresh entry of *op*, or `None`."""
        try:
            entry = self._entries[op]
        except KeyError:
            return None
        now = self._clock()
        if now >= self.trusted_until:
            self._lapse()
            return None
        if now < entry.fresh_until:
            return entry
        del self._entries[op]
        return None

    def put(self, op: str, value: object, life: float, tags: Sequence[str] = ()) -> None:
        """Keep *value* for *life* seconds."""
        now = self._clock()
        if now >= self.trusted_until:
            self._lapse()
        self._entries.pop(op, None)  # with its tags
        self._entries[op] = Entry(value, now + min(life, self._longest))
        if tags:
            self._entries.note_tags(op, tags)

    def drop(self, op: str) -> None:
        """Forget *op*."""
        self._entries.pop(op, None)

    def drop_tagged(self, tag: str) -> None:
        """Forget every op that has *tag*."""
        for op in self._entries.tagged(tag):
            del self._entries[op]

    def clear(self) -> None:
        """Forget everything."""
        self._entries = _Entries(self.maxsize)

    def _lapse(self) -> None:
        self.distrust()
        self.on_lapse()

    def trust(self, until: float) -> None:
        """Believe that invalidations reach us, until that instant."""
        if self._clock() >= self.trusted_until:  # a silence that nobody noticed
            self._lapse()
        self._longest = inf
        self.trusted_until = until

    def distrust(self) -> None:
        """Forget everything, and keep what comes for no longer than a second, until there is trust again."""
        self.clear()
        self._longest = UNTRUSTED_LIFE
        self.trusted_until = inf

    def __contains__(self, op: str) -> bool:
        return op in self._entries

    def __len__(self) -> int:
        return len(self._entries)
