"""Renews the leases of one event loop, and releases them.

A lease is renewed from the moment at which it was asked for until its flight has filled or ended: while the flight
queues for a slot, loads, encodes and queues for its fill. One timer serves all leases, and one task for each server
sends what is due there, ahead of all other operations. So neither the number of leases nor a long queue delays a
renewal.

A release is owed until the store has confirmed it, or until no lease can be left: for the life of a lease after the
last moment at which the store may have granted it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextvars import Context
from dataclasses import InitVar, dataclass, field
from functools import partial
from math import inf
from typing import TypeVar

from .._stats import Counters
from ..stores import LeasingStore, LoadFailure, Release
from .access import StoreAccess, StoreUnavailable

_RENEWALS = 4  # in the life of a lease: two may be lost, though some are late, to be sent together with others
_MAX_TICKS = 12  # of the timer, in the life of a lease
LONGEST_LEASE = 10.0  # seconds up to which a lease grows, if the event loop is late for its renewals
_BATCH_SIZE = 128  # leases in one request
_FIRST_PAUSE = 0.2  # seconds until a release is repeated; twice as long after each answer
_LONGEST_DEBT = 60.0  # seconds for which a release is owed to a store that does not answer
_MAX_OWED = 10_000  # releases; beyond that, the oldest is dropped, and its lease expires

UNCOUNTED = Counters()  # of operations that belong to no call, and of those that are repeated

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class HeldLease:
    """A flight's lease.

    Attributes:
        key: The op's.
        token: The flight's.
        length: Seconds that the lease lasts unless it is renewed.
        asked_at: When it was asked for: its life may have begun then.
        counters: Where outcomes are counted.
        on_lost: Called when the store says that the lease is gone, or another flight's.
        due_at: When to renew it.
        ends_at: Until when it is certain to last, unless the store loses it.
    """

    key: str
    token: str
    length: float
    asked_at: InitVar[float]
    counters: Counters
    on_lost: Callable[[], None]
    due_at: float = field(init=False)
    ends_at: float = field(init=False)

    def __post_init__(self, asked_at: float) -> None:
        self.due_at = asked_at + self.length / _RENEWALS
        self.ends_at = asked_at + self.length

    def postpone(self, now: float) -> None:
        """Be due again later, because the renewal is being sent; make the lease longer if this renewal is late."""
        passed = now - (self.ends_at - self.length)
        if passed > self.length / 2:
            self.length = max(self.length, min(_RENEWALS * passed, LONGEST_LEASE))
        self.due_at = now + self.length / _RENEWALS


@dataclass(slots=True, eq=False)
class OwedRelease:
    """A release that the store has not confirmed.

    Attributes:
        key: The op's.
        token: The flight's.
        length: Seconds that the lease lasts.
        message: Published if another process waits.
        counters: Where the outcome of the first attempt is counted.
        is_sure: Whether the lease was certainly granted. A request that was not answered may be executed after the
            release.
        is_unstored: Whether a value was loaded and not stored.
        owed_at: When the flight ended.
        failure: The failure of the load.
        pause: Seconds until the next attempt.
        due_at: When to send it.
        ends_at: When no lease can be left.
    """

    key: str
    token: str
    length: float
    message: bytes
    counters: Counters
    is_sure: bool
    is_unstored: bool
    owed_at: float
    failure: LoadFailure | None = None
    pause: float = field(init=False, default=_FIRST_PAUSE)
    due_at: float = field(init=False)
    ends_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.ends_at = self.owed_at + self.length
        self.postpone(self.owed_at)

    def postpone(self, now: float) -> None:
        """Be due again later, in case the attempt that is being sent fails."""
        self.due_at = now + self.pause
        self.pause *= 2

    def extend(self, now: float) -> None:
        """Note that the store has not answered by *now*, and so may execute the earlier request at any time."""
        self.pause = _FIRST_PAUSE
        self.postpone(now)
        if not self.is_sure:
            self.ends_at = min(now + self.length, self.owed_at + _LONGEST_DEBT)


class LeaseKeeper:
    """Renews and releases the leases of one event loop.

    Args:
        store: Where the leases are.
        access: To the store.
        clock: Monotonic seconds.
        run: Runs a coroutine in a task that closing waits for.
    """

    def __init__(
        self,
        store: LeasingStore,
        access: StoreAccess,
        clock: Callable[[], float],
        run: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        self._store = store
        self._access = access
        self._clock = clock
        self._run = run
        self._held: set[HeldLease] = set()
        self._owed: dict[str, OwedRelease] = {}  # by token, the oldest first
        self._due: dict[str, list[HeldLease | OwedRelease]] = {}  # by node: what its task sends next
        self._busy: set[str] = set()  # nodes that have a task
        self._timer_at = inf
        self._ticked_at = -inf
        self._context = Context()  # an empty one, because the timer would keep the context of the first flight
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether no lease is held, and no release owed."""
        return not (self._held or self._owed)

    def hold(self, lease: HeldLease) -> None:
        """Renew *lease* until it is dropped."""
        self._held.add(lease)
        self._set_timer(lease)

    def drop(self, lease: HeldLease) -> None:
        """Renew *lease* no more."""
        self._held.discard(lease)

    def owe(self, release: OwedRelease, *, is_due: bool) -> None:
        """Send *release*, now or after a pause, and repeat it until no lease is left."""
        if self._is_closed:
            return
        if len(self._owed) >= _MAX_OWED:
            del self._owed[next(iter(self._owed))]
        self._owed[release.token] = release
        if is_due:
            self._send(release)
        else:
            self._set_timer(release)

    def close(self) -> None:
        """Send all owed releases once more, in a task that closing waits for; set no timer any more."""
        self._is_closed = True
        self._timer_at = inf
        for release in tuple(self._owed.values()):
            self._send(release)

    def _set_timer(self, each: HeldLease | OwedRelease) -> None:
        """Let the timer fire when *each* is due, but not so soon after the last time that each lease has its own."""
        if each.due_at >= self._timer_at or self._is_closed:
            return
        at = self._timer_at = max(each.due_at, self._ticked_at + each.length / _MAX_TICKS)
        # The handle is not kept, because it holds the event loop. A timer that has been replaced does nothing.
        asyncio.get_running_loop().call_later(at - self._clock(), self._tick, at, context=self._context)

    def _tick(self, at: float) -> None:
        """Send what is due, and set the timer again if anything is left."""
        if at != self._timer_at:
            return
        self._timer_at = inf
        now = self._ticked_at = self._clock()
        everything: list[HeldLease | OwedRelease] = [*self._held, *self._owed.values()]
        for each in everything:
            if each.due_at <= now:
                each.postpone(now)
                self._send(each)
        if everything:
            self._set_timer(min(everything, key=_due_at))

    def _send(self, each: HeldLease | OwedRelease) -> None:
        """Send *each* together with all that is due at its node in this iteration of the event loop."""
        node = self._store.node_of(each.key)
        self._due.setdefault(node, []).append(each)
        if node not in self._busy:
            self._busy.add(node)
            self._run(self._send_due(node))

    async def _send_due(self, node: str) -> None:
        """Renew and release all that is due at *node*, until nothing is."""
        try:
            await asyncio.sleep(0)  # an eager task begins inside `_send`, before the other leases are due
            while due := self._due.pop(node, None):
                leases = [each for each in due if isinstance(each, HeldLease) and each in self._held]
                releases = [each for each in due if isinstance(each, OwedRelease) and self._is_owed(each)]
                requests = [self._renew(node, batch) for batch in _batches(leases)]
                requests += [self._release(node, batch) for batch in _batches(releases)]
                if len(requests) == 1:
                    await requests[0]  # without another task
                else:
                    await asyncio.gather(*requests)
        finally:
            self._busy.discard(node)

    def _is_owed(self, release: OwedRelease) -> bool:
        """Return whether *release* is still owed; forget it if no lease can be left."""
        if release.ends_at <= self._clock():
            self._owed.pop(release.token, None)
        return release.token in self._owed

    async def _renew(self, node: str, leases: Sequence[HeldLease]) -> None:
        asked_at = self._clock()
        wanted = [(lease.key, lease.token, lease.length) for lease in leases]
        renew = partial(self._store.renew, wanted)
        try:
            answers = await self._access.call("renew", node, renew, leases[0].counters, is_urgent=True)
        except StoreUnavailable:
            now = self._clock()
            for lease in leases:  # it has not expired yet
                lease.due_at = now + lease.length / _MAX_TICKS
                self._set_timer(lease)
            return
        for lease, (_, _, length), answer in zip(leases, wanted, answers, strict=True):
            if isinstance(answer, Exception):
                self._note_refusal("renew", answer, lease.counters)
            elif answer:
                lease.ends_at = asked_at + length
            elif lease in self._held:
                self._held.discard(lease)
                lease.on_lost()

    async def _release(self, node: str, releases: Sequence[OwedRelease]) -> None:
        counters = releases[0].counters
        owed = [Release(each.key, each.token, each.message, each.is_unstored, each.failure) for each in releases]
        release = partial(self._store.release, owed)
        try:
            answers = await self._access.call("release", node, release, counters, is_urgent=True)
        except StoreUnavailable:
            now = self._clock()
            for each in releases:
                each.extend(now)
        else:
            for each, answer in zip(releases, answers, strict=True):
                if isinstance(answer, Exception):
                    self._note_refusal("release", answer, counters)
                elif answer or each.is_sure:
                    self._owed.pop(each.token, None)
        self._repeat(releases)

    def _repeat(self, releases: Sequence[OwedRelease]) -> None:
        """Set the timer for those of *releases* that are still owed."""
        for each in releases:
            each.counters = UNCOUNTED
            if each.token in self._owed:
                self._set_timer(each)

    def _note_refusal(self, verb: str, refusal: Exception, counters: Counters) -> None:
        counters.l2_errors += 1
        self._access.note_refusal(verb, str(refusal))


def _due_at(each: HeldLease | OwedRelease) -> float:
    return each.due_at


def _batches(due: Sequence[T]) -> Iterator[Sequence[T]]:
    return (due[start : start + _BATCH_SIZE] for start in range(0, len(due), _BATCH_SIZE))
