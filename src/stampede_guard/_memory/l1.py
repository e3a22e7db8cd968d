"""L1: this process's memory, bounded; what was not used for long goes first.

A `cachetools.TTLCache` has one TTL for all, and purges everything that expired together inside the next insert. So
each entry knows when it stops being fresh. And an `LRUCache` moves an entry at each hit. So the map is a `FIFOCache`,
a hit leaves a mark, and what has one when its turn to go comes gets a second chance: the "clock" of operating systems
(Corbató, "A Paging Experiment with the Multics System", 1968), which comes close to the order of use.
"""

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from typing import Any
from weakref import WeakSet, finalize, ref

from cachetools import FIFOCache

from .._speed.forms import ArgumentCache, Slot, Validity
from .epochs import Generation

_SPARED = 16  # entries that one eviction lets past, since they were used
_LASTING = Generation()
UNTRUSTED_TTL = 1.0  # seconds that an entry lives while nobody would tell us of its invalidation


class _Entries(FIFOCache[str, Slot]):
    """Entries, and which of them have which tag.

    Attributes:
        held: The same as a plain dict, to look things up in: a look-up in a cache of `cachetools` is a call or two.
    """

    def __init__(self, maxsize: int) -> None:
        super().__init__(maxsize)
        self.held: dict[str, Slot] = {}
        self._tags: dict[str, Sequence[str]] = {}
        self._tagged: dict[str, set[str]] = {}
        self._dead: list[Slot] = []  # taken out, and not let go of before the books are right

    def add(self, op: str, held: Slot, tags: Sequence[str]) -> None:
        """Keep *held*, in place of what was there, until it or one of its *tags* is invalidated."""
        self._take_out(op)
        self[op] = self.held[op] = held
        if tags:
            self._tags[op] = tags = tuple(dict.fromkeys(tags))  # two templates may have come to one tag
            for tag in tags:
                self._tagged.setdefault(tag, set()).add(op)
        self._let_go()

    def tagged(self, tag: str) -> tuple[str, ...]:
        """Return the ops that have *tag*."""
        return tuple(self._tagged.get(tag, ()))

    def discard(self, op: str) -> None:
        """Let *op* go, if it is there."""
        self._take_out(op)
        self._let_go()

    def _take_out(self, op: str) -> None:
        if op in self.held:
            del self[op]
            self._bury(op)

    def popitem(self) -> tuple[str, Slot]:
        """Make room: evict the oldest, but for those that were used since, a few at a time."""
        op, held = super().popitem()
        for _ in range(_SPARED):
            if not held.used:
                break
            held.used = False
            self[op] = held
            op, held = super().popitem()
        self._bury(op)
        return op, held

    def _bury(self, op: str) -> None:
        self._dead.append(self.held.pop(op))
        for tag in self._tags.pop(op, ()):
            ops = self._tagged[tag]
            ops.discard(op)
            if not ops:
                del self._tagged[tag]

    def _let_go(self) -> None:
        """Kill what was taken out: last, since the destructor of a value may read and write this very memory."""
        while self._dead:
            self._dead.pop().clear()


class Memory:
    """The entries of one event loop.

    Args:
        maxsize: How many entries are kept.
        clock: Monotonic seconds.
        loop: The event loop; without one, fronts are of no use.

    Attributes:
        maxsize: As given.
    """

    __slots__ = ("__weakref__", "_clock", "_entries", "_era", "_fronts", "_longest", "maxsize", "on_trust_lost")

    def __init__(self, maxsize: int, clock: Callable[[], float], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.maxsize = maxsize
        self._entries = _Entries(maxsize)
        self._clock = clock
        self._longest = inf
        self._era = Validity(clock, None if loop is None else ref(loop))
        self._fronts: WeakSet[ArgumentCache] = WeakSet()
        self.on_trust_lost: Callable[[], object] = bool
        # A front lives as long as its function, and would keep values of a memory that is gone.
        finalize(self, _drop_all, self._fronts).atexit = False

    @property
    def trusted_until(self) -> float:
        """Instant up to which invalidations would have reached us.

        After that, everything is dropped, and what comes in lives for a second at most. For ever, where there is
        nobody to tell us.
        """
        return self._era.trusted_until

    def get(self, op: str) -> Slot | None:
        """Return the fresh entry of *op*, or `None`."""
        held = self._entries.held.get(op)
        if held is None:
            return None
        now = self._clock()
        if now >= self._era.trusted_until:
            self._lapse()
            return None
        if now < held.fresh_until and not held.generation.is_over:
            held.used = True
            return held
        self._entries.discard(op)
        return None

    def note_in(self, front: ArgumentCache, args: tuple[Any, ...], held: Slot) -> None:
        """Let *front* answer calls with *args* by itself, as long as *held* is fresh and kept here.

        A front answers in one event loop: the first that asks, until that is over. The others do without.
        """
        if front.validity is not self._era:
            if front.validity is not None and not _is_over(front.validity):
                return
            front.serve(self._era)
            self._fronts.add(front)
        front.note(args, held, self._era)  # which has another by now, if another thread's loop asked too

    def put(
        self, op: str, value: object, life: float, tags: Sequence[str] = (), generation: Generation = _LASTING
    ) -> None:
        """Keep *value* for *life* seconds, or until its *generation* is over."""
        now = self._clock()
        if now >= self._era.trusted_until:
            self._lapse()
        self._entries.add(op, Slot(value, now + min(life, self._longest), generation), tags)

    def drop(self, op: str) -> None:
        """Forget *op*."""
        self._entries.discard(op)

    def drop_tagged(self, tag: str) -> None:
        """Forget every op that has *tag*."""
        for op in self._entries.tagged(tag):
            self._entries.discard(op)

    def clear(self) -> None:
        """Forget everything."""
        _drop_all(self._fronts)
        self._entries = _Entries(self.maxsize)

    def release_argument_caches(self) -> None:
        """Let fronts serve other loops: this one's will never run again."""
        _drop_all(self._fronts)

    def _lapse(self) -> None:
        self.distrust()
        self.on_trust_lost()

    def joinable_until(self) -> float:
        """Return the instant up to which callers may join a load that begins now.

        Without trust that is as long as its value would be kept: no message tells whether the load was overtaken.
        """
        return inf if self._longest == inf else self._clock() + self._longest

    def may_join(self, until: float) -> bool:
        """Whether a load that may be joined up to the instant *until* may be joined now."""
        now = self._clock()
        if now >= self._era.trusted_until:
            self._lapse()
            return False
        return now < until

    def trust(self, until: float) -> None:
        """Believe that invalidations reach us, until that instant."""
        if self._clock() >= self._era.trusted_until:  # a silence that nobody noticed
            self._lapse()
        self._longest = inf
        self._era.trusted_until = until

    def distrust(self) -> None:
        """Forget everything, and keep what comes for no longer than a second, until there is trust again."""
        self.clear()
        self._longest = UNTRUSTED_TTL
        self._era.trusted_until = inf

    def __contains__(self, op: str) -> bool:
        return op in self._entries.held

    def __len__(self) -> int:
        return len(self._entries.held)


def _is_over(validity: Validity) -> bool:
    """Whether the event loop that *validity* belongs to will never run again."""
    loop = None if validity.loop is None else validity.loop()
    return loop is None or loop.is_closed()


def _drop_all(fronts: WeakSet[ArgumentCache]) -> None:
    for front in tuple(fronts):
        fronts.discard(front)  # first: a destructor may have it serve again
        front.drop()
