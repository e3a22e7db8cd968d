"""L1: the memory of one event loop, and its trust."""

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from typing import Any
from weakref import WeakSet, finalize, ref

from .._speed.forms import ArgumentCache, Slot, Validity
from .entries import Entries
from .epochs import EntryCounters, Generation
from .sizes import estimate
from .sweeper import Sweeper

_ENDLESS = Generation()
UNTRUSTED_TTL = 1.0  # seconds that an entry lives while no message would tell of its invalidation


class Memory:
    """The entries of one event loop.

    Args:
        maxsize: How many entries are kept.
        clock: Monotonic seconds.
        loop: The event loop; without one, argument caches answer nothing.

        max_size: How many bytes the entries have at most; `None` measures none.

    Attributes:
        maxsize: As given.
        max_size: As given.
        on_trust_lost: Called when `trusted_until` has passed.
    """

    __slots__ = (
        "__weakref__",
        "_caches",
        "_clock",
        "_entries",
        "_loop",
        "_max_ttl",
        "_sweeper",
        "_validity",
        "max_size",
        "maxsize",
        "on_trust_lost",
    )

    def __init__(
        self,
        maxsize: int,
        clock: Callable[[], float],
        loop: asyncio.AbstractEventLoop | None = None,
        max_size: int | None = None,
    ) -> None:
        self.maxsize = maxsize
        self.max_size = max_size
        self._clock = clock
        self._loop = None if loop is None else ref(loop)
        self._entries = Entries(maxsize, max_size)
        self._sweeper = Sweeper(self._entries, clock, self._loop)
        self._max_ttl = inf
        self._validity = Validity(clock, self._loop)
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
        if now >= slot.stale_until:  # it will never be an answer again
            self._entries.expire(op)
        elif slot.generation.is_over:
            self._entries.discard(op)
        return None

    def old(self, op: str) -> Slot | None:
        """Return the entry of *op* that is past its freshness and within its window, or `None`."""
        if self.get(op) is not None:  # this has dropped what is over
            return None
        slot = self._entries.slots.get(op)
        if slot is not None:
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
        now, life_ends_at = self._clock(), slot.fresh_until + self.margin(op)
        window = slot.stale_until - life_ends_at
        if window <= 0 or now >= slot.stale_until:
            self._entries.discard(op)
        elif now < life_ends_at:
            slot.fresh_until, slot.stale_until = now, now + window
            self._note(slot)
            self._entries.margins.pop(op, None)

    def margin(self, op: str) -> float:
        """Return the seconds by which the entry of *op* counts as old before its life is over."""
        return self._entries.margins.get(op, 0.0)

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

    def put(  # noqa: PLR0913, PLR0917  # what an entry consists of
        self,
        op: str,
        value: object,
        ttl: float,
        tags: Sequence[str] = (),
        generation: Generation = _ENDLESS,
        stale: float = 0.0,
        age: float = 0.0,
        size: int | None = None,
        max_share: float | None = None,
        margin: float = 0.0,
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
            size: Its bytes as it is encoded, if it is; else they are estimated, if bytes are limited.
            max_share: Fraction of the memory that the entries of its operation may take; `None` sets no limit.
            margin: Seconds at the beginning of these in which the value's life is not over.
        """
        if size is None:
            size = 0 if self.max_size is None else estimate(value)
        now = self._clock()
        if now >= self._validity.trusted_until:
            self._lose_trust()
        fresh_until = now + min(ttl, self._max_ttl)
        stale_until = fresh_until + max(stale, 0.0) if self._max_ttl == inf else fresh_until
        slot = Slot(value, fresh_until, generation, stale_until, now - age)
        self._entries.add(op, slot, tags, size, max_share)
        if margin and self._max_ttl == inf and op in self._entries.slots:
            self._entries.margins[op] = margin
        self._note(slot)

    def _note(self, slot: Slot) -> None:
        """Have *slot* swept when it is over."""
        if slot.stale_until < self._sweeper.due:
            self._sweeper.note(slot.stale_until)

    def origin_of(self, op: str) -> tuple[Generation | None, Sequence[str]]:
        """Return the generation that has loaded the entry of *op*, `None` without one, and its tags."""
        slot = self._entries.slots.get(op)
        return (None, ()) if slot is None else (slot.generation, self._entries.tags_of(op))

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
        self._sweeper.close()
        self._entries = Entries(self.maxsize, self.max_size)
        self._sweeper = Sweeper(self._entries, self._clock, self._loop)

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

    def shares(self) -> list[tuple[EntryCounters | None, int, int]]:
        """Return whose entries there are, how many, and their bytes if these are limited."""
        return [(counters, each.entries, each.size) for counters, each in self._entries.shares.copy().items()]

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
