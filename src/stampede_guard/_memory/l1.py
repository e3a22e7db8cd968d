"""L1: the bounded memory of one event loop.

A `cachetools.TTLCache` has one TTL for all entries, and an insert removes all that expired together. So here each slot
has the instant up to which it is fresh. An `LRUCache` moves an entry at each hit. So here the map is a `FIFOCache`, a
hit sets a flag, and an eviction gives flagged entries a second chance: the "clock" algorithm of operating systems
(Corbató, "A Paging Experiment with the Multics System", 1968), which approximates least recently used.
"""

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from typing import Any
from weakref import WeakSet, finalize, ref

from cachetools import FIFOCache

from .._speed.forms import ArgumentCache, Slot, Validity
from .epochs import Generation

_MAX_SPARED = 16  # entries that one eviction spares because they were used
_ENDLESS = Generation()
UNTRUSTED_TTL = 1.0  # seconds that an entry lives while no message would tell of its invalidation


class _Entries(FIFOCache[str, Slot]):
    """The slots by op, and the ops by tag.

    Attributes:
        slots: The same slots in a plain dict: a look-up in a cache of `cachetools` costs a call or two.
    """

    def __init__(self, maxsize: int) -> None:
        super().__init__(maxsize)
        self.slots: dict[str, Slot] = {}
        self._tags: dict[str, Sequence[str]] = {}
        self._ops_by_tag: dict[str, set[str]] = {}
        self._removed: list[Slot] = []

    def add(self, op: str, slot: Slot, tags: Sequence[str]) -> None:
        """Store *slot* under *op*, in place of what was there."""
        self._remove(op)
        self[op] = self.slots[op] = slot
        if tags:
            # Two templates may produce the same tag.
            self._tags[op] = tags = tuple(dict.fromkeys(tags))
            for tag in tags:
                self._ops_by_tag.setdefault(tag, set()).add(op)
        self._clear_removed()

    def tagged(self, tag: str) -> tuple[str, ...]:
        """Return the ops that have *tag*."""
        return tuple(self._ops_by_tag.get(tag, ()))

    def discard(self, op: str) -> None:
        """Remove *op*, if it is there."""
        self._remove(op)
        self._clear_removed()

    def _remove(self, op: str) -> None:
        if op in self.slots:
            del self[op]
            self._unlink(op)

    def popitem(self) -> tuple[str, Slot]:
        """Evict the oldest entry; spare a few that were used since they were last spared."""
        op, slot = super().popitem()
        for _ in range(_MAX_SPARED):
            if not slot.used:
                break
            slot.used = False
            self[op] = slot
            op, slot = super().popitem()
        self._unlink(op)
        return op, slot

    def _unlink(self, op: str) -> None:
        self._removed.append(self.slots.pop(op))
        for tag in self._tags.pop(op, ()):
            ops = self._ops_by_tag[tag]
            ops.discard(op)
            if not ops:
                del self._ops_by_tag[tag]

    def _clear_removed(self) -> None:
        """Clear the removed slots. This comes last: the destructor of a value may read and write this memory."""
        while self._removed:
            self._removed.pop().clear()


class Memory:
    """The entries of one event loop.

    Args:
        maxsize: How many entries are kept.
        clock: Monotonic seconds.
        loop: The event loop; without one, argument caches answer nothing.

    Attributes:
        maxsize: As given.
        on_trust_lost: Called when `trusted_until` has passed.
    """

    __slots__ = ("__weakref__", "_caches", "_clock", "_entries", "_max_ttl", "_validity", "maxsize", "on_trust_lost")

    def __init__(self, maxsize: int, clock: Callable[[], float], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.maxsize = maxsize
        self._entries = _Entries(maxsize)
        self._clock = clock
        self._max_ttl = inf
        self._validity = Validity(clock, None if loop is None else ref(loop))
        self._caches: WeakSet[ArgumentCache] = WeakSet()
        self.on_trust_lost: Callable[[], object] = bool
        # An argument cache lives as long as its function, and would keep values of a memory that is gone.
        finalize(self, _drop_all, self._caches).atexit = False

    @property
    def trusted_until(self) -> float:
        """Instant up to which all invalidations have been received; infinite where no message tells of any.

        After it everything is dropped, and new entries live for a second at most.
        """
        return self._validity.trusted_until

    def get(self, op: str) -> Slot | None:
        """Return the fresh entry of *op*, or `None`."""
        slot = self._entries.slots.get(op)
        if slot is None:
            return None
        now = self._clock()
        if now >= self._validity.trusted_until:
            self._lose_trust()
            return None
        if now < slot.fresh_until and not slot.generation.is_over:
            slot.used = True
            return slot
        if now >= slot.stale_until or slot.generation.is_over:
            self._entries.discard(op)
        return None

    def old(self, op: str) -> Slot | None:
        """Return the entry of *op* that is past its freshness and within its window, or `None`."""
        slot = self._entries.slots.get(op)
        if slot is None:
            return None
        now = self._clock()
        if now >= self._validity.trusted_until:
            self._lose_trust()
            return None
        if now >= slot.stale_until or slot.generation.is_over:
            self._entries.discard(op)
            return None
        if now < slot.fresh_until:
            return None
        slot.used = True
        return slot

    def slot_with(self, op: str, value: object) -> Slot | None:
        """Return the slot of *op* if it has this very *value*, fresh or old; nothing is dropped or counted."""
        slot = self._entries.slots.get(op)
        return slot if slot is not None and slot.value is value else None

    def soften(self, op: str) -> None:
        """Let the entry of *op* be old from now on, and begin its window; drop it if it has none."""
        slot = self._entries.slots.get(op)
        if slot is None:
            return
        now, window = self._clock(), slot.stale_until - slot.fresh_until
        if window <= 0 or now >= slot.stale_until:
            self._entries.discard(op)
        elif now < slot.fresh_until:
            slot.fresh_until, slot.stale_until = now, now + window

    def note_in(self, cache: ArgumentCache, args: tuple[Any, ...], slot: Slot) -> None:
        """Let *cache* answer calls with *args*, as long as *slot* is fresh and in this memory.

        An argument cache serves one event loop: the first that uses it, until that is closed.
        """
        if cache.validity is not self._validity:
            if cache.validity is not None and not _is_over(cache.validity):
                return
            cache.serve(self._validity)
            self._caches.add(cache)
        # Without effect if the loop of another thread was faster: then the cache serves that one.
        cache.note(args, slot, self._validity)

    def put(  # noqa: PLR0917  # what an entry consists of
        self,
        op: str,
        value: object,
        ttl: float,
        tags: Sequence[str] = (),
        generation: Generation = _ENDLESS,
        stale: float = 0.0,
        age: float = 0.0,
    ) -> None:
        """Store *value* in place of what was there.

        Args:
            op: The op id.
            value: Any object.
            ttl: Seconds for which the value is fresh.
            tags: What else it is invalidated by.
            generation: That of the function that loaded it; the entry ends with it.
            stale: Seconds after that in which it may be used as an old value; none without trust.
            age: Seconds since it came from its load; infinite where that is not known.
        """
        now = self._clock()
        if now >= self._validity.trusted_until:
            self._lose_trust()
        fresh_until = now + min(ttl, self._max_ttl)
        stale_until = fresh_until + stale if self._max_ttl == inf else fresh_until
        self._entries.add(op, Slot(value, fresh_until, generation, stale_until, now - age), tags)

    def drop(self, op: str) -> None:
        """Drop *op*."""
        self._entries.discard(op)

    def drop_tagged(self, tag: str) -> None:
        """Drop every op that has *tag*."""
        for op in self._entries.tagged(tag):
            self._entries.discard(op)

    def clear(self) -> None:
        """Drop everything."""
        _drop_all(self._caches)
        self._entries = _Entries(self.maxsize)

    def release_argument_caches(self) -> None:
        """Let argument caches serve other loops: this one never runs again."""
        _drop_all(self._caches)

    def _lose_trust(self) -> None:
        self.distrust()
        self.on_trust_lost()

    def joinable_until(self) -> float:
        """Return the instant up to which callers may join a load that begins now.

        Without trust no message tells whether the load was overtaken, so it may be joined for as long as its value
        would be stored.
        """
        return inf if self._max_ttl == inf else self._clock() + self._max_ttl

    def may_join(self, until: float) -> bool:
        """Whether a load that is joinable until the instant *until* may be joined now."""
        now = self._clock()
        if now >= self._validity.trusted_until:
            self._lose_trust()
            return False
        return now < until

    def trust(self, until: float) -> None:
        """Take it that all invalidations are received, up to the instant *until*."""
        if self._clock() >= self._validity.trusted_until:
            self._lose_trust()
        self._max_ttl = inf
        self._validity.trusted_until = until

    def distrust(self) -> None:
        """Drop everything, and store entries for a second at most until `trust` is called."""
        self.clear()
        self._max_ttl = UNTRUSTED_TTL
        self._validity.trusted_until = inf

    def __contains__(self, op: str) -> bool:
        return op in self._entries.slots

    def __len__(self) -> int:
        return len(self._entries.slots)


def _is_over(validity: Validity) -> bool:
    """Whether the event loop that *validity* belongs to never runs again."""
    loop = None if validity.loop is None else validity.loop()
    return loop is None or loop.is_closed()


def _drop_all(caches: WeakSet[ArgumentCache]) -> None:
    for cache in tuple(caches):
        caches.discard(cache)  # first: a destructor may make it serve again
        cache.drop()
