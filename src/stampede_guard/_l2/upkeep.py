"""The leases of one event loop: renewed while flights hold them, released afterwards.

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
from functools import partial
from math import inf
from typing import TypeVar

from .._stats import Counters
from ..stores import LeasingStore
from .access import StoreAccess, StoreUnavailable

_RENEWALS = 4  # in the life of a lease: two may be lost, though each waits for others that are due soon
_GATHERING = 12  # a twelfth of a lease's life is the shortest time between two looks at what is due
LONGEST_LEASE = 10.0  # seconds; a lease that the event loop is late for grows up to that
_AT_ONCE = 128  # leases that one request renews or releases
_PAUSE = 0.2  # seconds until a release is repeated; twice as long after each answer
_LONGEST_DEBT = 60.0  # seconds for which a release is owed to a store that does not answer
_MOST = 10_000  # releases that are owed; the oldest is given up first, and its lease expires

_UNCOUNTED = Counters()  # for what is repeated: the first attempt was counted

T = TypeVar("T")


class HeldLease:
    """A flight's lease.

    Args:
        key: The op's.
        token: The flight's.
        length: Seconds that the lease lasts unless it is renewed.
        asked_at: When it was asked for: its life may have begun then.
        counters: Where outcomes are counted.
        on_lost: Called when the store says that the lease is gone, or another flight's.

    Attributes:
        due_at: When to renew it.
        ends_at: Until when it is certain to last, unless the store loses it.
    """

    __slots__ = ("counters", "due_at", "ends_at", "key", "length", "on_lost", "token")

    def __init__(  # noqa: PLR0917  # made by the lease alone
        self,
        key: str,
        token: str,
        length: float,
        asked_at: float,
        counters: Counters,
        on_lost: Callable[[], None],
    ) -> None:
        self.key = key
        self.token = token
        self.length = length
        self.due_at = asked_at + length / _RENEWALS
        self.ends_at = asked_at + length
        self.counters = counters
        self.on_lost = on_lost

    def postpone(self, now: float) -> None:
        """Be due again later: the renewal is being sent; for longer, if it is late, as the next one may be as late."""
        passed = now - (self.ends_at - self.length)
        if passed > self.length / 2:
            self.length = max(self.length, min(_RENEWALS * passed, LONGEST_LEASE))
        self.due_at = now + self.length / _RENEWALS


class OwedRelease:
    """A release that the store has not confirmed.

    Args:
        key: The op's.
        token: The flight's.
        length: Seconds that the lease lasts.
        message: What is published if another process waits.
        counters: Where the outcome of the first attempt is counted.
        is_sure: Whether the lease was granted for certain. A request that was not answered may be executed after the
            release.
        is_unstored: Whether there is a value that was not stored.
        owed_at: When the flight ended.
    """

    __slots__ = (
        "counters",
        "due_at",
        "ends_at",
        "is_sure",
        "is_unstored",
        "key",
        "length",
        "message",
        "owed_at",
        "pause",
        "token",
    )

    def __init__(  # noqa: PLR0917  # made by the lease alone
        self,
        key: str,
        token: str,
        length: float,
        message: bytes,
        counters: Counters,
        is_sure: bool,  # noqa: FBT001
        is_unstored: bool,  # noqa: FBT001
        owed_at: float,
    ) -> None:
        self.key = key
        self.token = token
        self.length = length
        self.message = message
        self.counters = counters
        self.is_sure = is_sure
        self.is_unstored = is_unstored
        self.owed_at = owed_at
        self.ends_at = owed_at + length
        self.pause = _PAUSE
        self.postpone(owed_at)

    def postpone(self, now: float) -> None:
        """Be due again later, should what is being sent not be enough."""
        self.due_at = now + self.pause
        self.pause *= 2

    def extend(self, now: float) -> None:
        """Note that the store has not answered by *now*: it may execute what it was asked before, at any time."""
        self.pause = _PAUSE
        self.postpone(now)
        if not self.is_sure:
            self.ends_at = min(now + self.length, self.owed_at + _LONGEST_DEBT)


class LeaseKeeper:
    """What is due for the leases of one event loop.

    Args:
        store: Where the leases are.
        asking: How it is asked.
        clock: Monotonic seconds.
        run: Runs a coroutine in a task that closing waits for.
    """

    def __init__(
        self,
        store: LeasingStore,
        asking: StoreAccess,
        clock: Callable[[], float],
        run: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        self._store = store
        self._asking = asking
        self._clock = clock
        self._run = run
        self._held: set[HeldLease] = set()
        self._owed: dict[str, OwedRelease] = {}  # by token, the oldest first
        self._due: dict[str, list[HeldLease | OwedRelease]] = {}  # by node: what its task sends next
        self._busy: set[str] = set()  # nodes that have a task
        self._timer_at = inf
        self._looked_at = -inf
        self._context = Context()  # or the timer would keep the context of the flight that it was first set for
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether no lease is held, and no release owed."""
        return not (self._held or self._owed)

    def hold(self, right: HeldLease) -> None:
        """Renew *right* until it is dropped."""
        self._held.add(right)
        self._expect(right)

    def drop(self, right: HeldLease) -> None:
        """Renew *right* no more."""
        self._held.discard(right)

    def owe(self, debt: OwedRelease, *, is_due: bool) -> None:
        """Release a lease, now or after a pause, and again until that is certain."""
        if self._is_closed:
            return
        if len(self._owed) >= _MOST:
            del self._owed[next(iter(self._owed))]
        self._owed[debt.token] = debt
        if is_due:
            self._send(debt)
        else:
            self._expect(debt)

    def close(self) -> None:
        """Try once more to release what is owed, in a task that closing waits for; set no timer any more."""
        self._is_closed = True
        self._timer_at = inf
        for debt in tuple(self._owed.values()):
            self._send(debt)

    def _expect(self, each: HeldLease | OwedRelease) -> None:
        """Look when *each* is due; but not so soon after the last look that every lease has a look of its own."""
        if each.due_at >= self._timer_at or self._is_closed:
            return
        at = self._timer_at = max(each.due_at, self._looked_at + each.length / _GATHERING)
        # The timer is not kept, as it holds the event loop. One that is too late by now finds that out.
        asyncio.get_running_loop().call_later(at - self._clock(), self._look, at, context=self._context)

    def _look(self, at: float) -> None:
        """Send what is due, and come back for the rest; without a rest no timer is left."""
        if at != self._timer_at:
            return
        self._timer_at = inf
        now = self._looked_at = self._clock()
        everything: list[HeldLease | OwedRelease] = [*self._held, *self._owed.values()]
        for each in everything:
            if each.due_at <= now:
                each.postpone(now)
                self._send(each)
        if everything:
            self._expect(min(everything, key=_due_at))

    def _send(self, each: HeldLease | OwedRelease) -> None:
        """Let *each* travel with all else that is due at its node in this iteration of the event loop."""
        node = self._store.node_of(each.key)
        self._due.setdefault(node, []).append(each)
        if node not in self._busy:
            self._busy.add(node)
            self._run(self._work(node))

    async def _work(self, node: str) -> None:
        """Renew and release what is due at *node*, all of it side by side, until nothing is."""
        try:
            await asyncio.sleep(0)  # an eager task begins inside `_send`, before all that is due has come
            while due := self._due.pop(node, None):
                rights = [each for each in due if isinstance(each, HeldLease) and each in self._held]
                debts = [each for each in due if isinstance(each, OwedRelease) and self._is_open(each)]
                requests = [self._renew(node, chunk) for chunk in _chunks(rights)]
                requests += [self._release(node, chunk) for chunk in _chunks(debts)]
                if len(requests) == 1:
                    await requests[0]  # without a task more
                else:
                    await asyncio.gather(*requests)
        finally:
            self._busy.discard(node)

    def _is_open(self, debt: OwedRelease) -> bool:
        """Return whether *debt* is still owed; forget it if no lease can be left."""
        if debt.ends_at <= self._clock():
            self._owed.pop(debt.token, None)
        return debt.token in self._owed

    async def _renew(self, node: str, rights: Sequence[HeldLease]) -> None:
        asked_at = self._clock()
        wanted = [(right.key, right.token, right.length) for right in rights]
        ask = partial(self._store.renew, wanted)
        try:
            answers = await self._asking.call("renew", node, ask, rights[0].counters, is_urgent=True)
        except StoreUnavailable:
            now = self._clock()
            for right in rights:  # they have some life left
                right.due_at = now + right.length / _GATHERING
                self._expect(right)
            return
        for right, (_, _, length), answer in zip(rights, wanted, answers, strict=True):
            if isinstance(answer, Exception):
                self._note_refusal("renew", answer, right.counters)
            elif answer:
                right.ends_at = asked_at + length
            elif right in self._held:
                self._held.discard(right)
                right.on_lost()

    async def _release(self, node: str, debts: Sequence[OwedRelease]) -> None:
        counters = debts[0].counters
        owed = [(debt.key, debt.token, debt.message, debt.is_unstored) for debt in debts]
        ask = partial(self._store.release, owed)
        try:
            answers = await self._asking.call("release", node, ask, counters, is_urgent=True)
        except StoreUnavailable:
            now = self._clock()
            for debt in debts:
                debt.extend(now)
        else:
            for debt, answer in zip(debts, answers, strict=True):
                if isinstance(answer, Exception):
                    self._note_refusal("release", answer, counters)
                elif answer or debt.is_sure:
                    self._owed.pop(debt.token, None)
        self._await_turns(debts)

    def _await_turns(self, debts: Sequence[OwedRelease]) -> None:
        """Come back for those of *debts* that are owed still."""
        for debt in debts:
            debt.counters = _UNCOUNTED
            if debt.token in self._owed:
                self._expect(debt)

    def _note_refusal(self, verb: str, refusal: Exception, counters: Counters) -> None:
        counters.l2_errors += 1
        self._asking.note_refusal(verb, str(refusal))


def _due_at(each: HeldLease | OwedRelease) -> float:
    return each.due_at


def _chunks(due: Sequence[T]) -> Iterator[Sequence[T]]:
    return (due[start : start + _AT_ONCE] for start in range(0, len(due), _AT_ONCE))
