"""The course of one flight, from its launch to its answer: the part of the data path that runs once per op.

Most flights that have a store find their value there. That takes no task: the store is asked in the call that
launches the flight, and its answer lands it. A task of its own is for what may wait more than once, and for the loader.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from random import random
from typing import Any, Literal, cast

from ._bus.backplane import Backplane
from ._flights.scoreboard import Flight
from ._l2.lease import Found, Lease, LeaseLapsed
from ._l2.tier import Tier
from ._loops import Change, LoopState, LoopStates
from ._memory.l1 import UNTRUSTED_TTL
from ._operations.operation import Operation

_POLLS = (0.025, 0.25)  # seconds between looks for another's load, first and longest, should its word be lost
_ASKS = 4  # times that a flight asks for the right to load, should it lose that before the load begins
_WAIT = 30.0  # seconds that another's loads are waited for when no load_timeout says how long a load may take


class LocalLoad:
    """The course of a flight whose operation has no L2.

    Args:
        sites: All of the guard's.
        site: The running loop's.
        operation: Whose flight it is.
        load: Runs the loader.
        epoch: Of the op, taken before anything is read.
        is_private: Whether nobody can join the flight.
    """

    __slots__ = ("_epoch", "_generation", "_is_private", "_load", "_operation", "_site", "_sites")

    def __init__(  # noqa: PLR0917  # made by the guard alone
        self,
        sites: LoopStates,
        site: LoopState,
        operation: Operation,
        load: Callable[[], Awaitable[Any]],
        epoch: tuple[int, ...],
        is_private: bool,  # noqa: FBT001
    ) -> None:
        self._sites = sites
        self._site = site
        self._operation = operation
        self._load = load
        self._epoch = epoch
        self._generation = operation.lineage.generation
        self._is_private = is_private

    async def fly(self, flight: Flight[Any]) -> Any:
        """Load; return what is kept for *flight*'s waiters."""
        if flight.is_queued:
            await self._queue(flight)
        operation = self._operation
        policy = operation.policy
        value = await self._run(flight, self._load)  # 5
        if policy.version is not None:
            operation.version_of(value)  # nothing is compared here, but what is no version is an error everywhere
        kept = operation.isolate_value(value, operation.encode(value)) if policy.isolate else value
        holds = self._still_holds(flight)
        if flight.is_refresh:
            self._replace(flight, is_told=self._site.backplane is None or operation.is_local)
        if holds:
            self._keep(flight, kept, None)  # 7
        elif not flight.landed:
            operation.counters.overtaken += 1
        return kept

    async def _queue(self, flight: Flight[Any]) -> None:
        """Wait until it is the turn of *flight*; the flight before it may store until then."""
        flight.note_waiting_elsewhere()
        await flight.turn()
        self._epoch = self._site.epochs.current(flight.op, flight.tags)  # nothing has been read yet

    async def _run(self, flight: Flight[Any], load: Callable[[], Awaitable[Any]]) -> Any:
        """Run the loader, when it is its turn, within its budget."""
        operation = self._operation
        policy = operation.policy
        flight.start_clock(policy.load_timeout)
        limiter = None if operation.is_batched else self._site.limits.of(operation.name, policy.max_loads)
        if limiter is None:
            self._begin_load(flight)
            value = await load()
        else:
            async with limiter.slot(flight):
                self._begin_load(flight)
                value = await load()
        flight.stop_clock()
        return value

    def _begin_load(self, flight: Flight[Any]) -> None:
        """Take note that the loader is about to run."""
        operation = self._operation
        operation.counters.loads += not operation.is_batched
        flight.loader_called = not operation.is_batched  # else the batch says when

    def _still_holds(self, flight: Flight[Any]) -> bool:
        """Whether what *flight* has may be stored: it has not ended, and nothing was invalidated since the epoch."""
        is_latest = self._site.epochs.current(flight.op, flight.tags) == self._epoch and not self._generation.is_over
        return is_latest and not flight.landed

    def _keep(self, flight: Flight[Any], kept: object, life: float | None) -> None:
        """Put into L1, for no longer than the store's copy has left."""
        policy = self._operation.policy
        if policy.ttl is not None:
            ttl = _spread(policy.ttl, policy.jitter)
            self._site.memory.put(
                flight.op, kept, ttl if life is None else min(ttl, life), flight.tags, self._generation
            )

    def _replace(self, flight: Flight[Any], *, is_told: bool) -> None:
        """Let nothing that is older than what a refresh has loaded be found anywhere.

        Args:
            flight: The refresh's.
            is_told: Whether the store has nothing older, and other processes know; if not, both will be told.
        """
        here, op = self._site, flight.op
        # What has read the older value in the store must not keep it in L1, nor be joined: also what began after an
        # invalidation, or after a gap on the bus, which overtook this refresh and left the store as it was.
        here.epochs.bump(op)
        here.memory.drop(op)
        current = here.board.flights.get(op)
        may_read_older = self._operation.policy.l2_ttl is not None
        if may_read_older and current is not None and not current.is_refresh:  # a refresh reads nothing in the store
            here.board.forget(op)
        self._sites.tell_others(Change("op", op, is_stored=not is_told))
        if not is_told and here.tier is not None:
            flight.confirmation = here.tier.send(here.tier.invalidation(op))


class StoredLoad(LocalLoad):
    """The course of a flight whose operation has an L2; the arguments are the same.

    Attributes:
        lease: What the flight holds of the store; set before it takes off.
    """

    __slots__ = ("_asks_left", "lease")
    lease: Lease

    def start(self, flight: Flight[Any], on_answer: Callable[[], None]) -> bool:
        """Ask the store for the value at once, if that is possible without waiting for anything."""
        return not flight.is_refresh and self.lease.start(on_answer)

    def result(self, flight: Flight[Any]) -> tuple[Any] | None:
        """Return the value if it was there."""
        found = self.lease.result(self._operation.decode)
        return None if found is None or flight.landed else (self._take(flight, found),)

    def close(self) -> None:
        """Give back the right to load, if it is still held."""
        self.lease.release_soon()

    async def fly(self, flight: Flight[Any]) -> Any:
        """Read L2 or load, and store; return what is kept for *flight*'s waiters."""
        if flight.is_queued:
            await self._queue(flight)
        self._asks_left = _ASKS
        while True:
            found = await self._find(flight)  # 3, 4
            if found is not None:
                return self._take(flight, found)
            try:
                kept, life, is_latest = await self._load_afresh(flight)
                break
            except LeaseLapsed:
                flight.stop_clock()
        holds = is_latest and self._still_holds(flight)
        if flight.is_refresh:
            self._replace(flight, is_told=self.lease.is_final)
        if holds:
            self._keep(flight, kept, life)  # 7
        elif not flight.landed:
            self._operation.counters.overtaken += 1
        return kept

    def _begin_load(self, flight: Flight[Any]) -> None:
        """Take note that the loader is about to run, or raise `LeaseLapsed` to have the store asked again."""
        self._asks_left -= 1
        if self._asks_left and not flight.is_refresh:
            self.lease.check()
        super()._begin_load(flight)

    def _take(self, flight: Flight[Any], found: Found) -> Any:
        """Return what is kept of what the store has."""
        operation = self._operation
        operation.counters.l2_hits += 1
        kept = operation.isolate(found.payload) if operation.policy.isolate else found.value
        if self._still_holds(flight):
            self._keep(flight, kept, found.life)  # 7
        return kept

    def _keep(self, flight: Flight[Any], kept: object, life: float | None) -> None:
        super()._keep(flight, kept, life)
        tracking = self._site.tracking
        if tracking is not None:
            tracking.remember(flight.op, self.lease.stored_by)

    async def _find(self, flight: Flight[Any]) -> Found | None:
        """Return what L2 has, waiting for whoever is loading it; `None` if it is this flight that has to load."""
        operation, lease, backplane = self._operation, self.lease, self._site.backplane
        counters = operation.counters
        if flight.is_refresh:
            await lease.take_over()
            return None
        answer = await lease.acquire(operation.decode)  # 3
        may_wait = operation.policy.lease and not self._is_private
        if answer == "wait" and may_wait and backplane is not None:
            counters.l2_waits += 1
            flight.note_waiting_elsewhere()
            answer = await self._await_other(backplane, flight)  # 4
        if isinstance(answer, Found):
            return answer
        if answer != "unavailable" and not lease.was_undecodable:
            counters.l2_misses += 1
        return None

    async def _await_other(
        self, backplane: Backplane, flight: Flight[Any]
    ) -> Found | Literal["own", "wait", "alone", "unavailable"]:
        """Wait until the op's value is there, or no load of it to wait for; for no longer than a load may take."""
        operation, lease = self._operation, self.lease
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        longest = operation.policy.load_timeout or _WAIT
        polls = _polls()
        with backplane.expecting(flight.op) as wake_up:
            # Asked again at once: the word may have come between the first answer and now.
            while (answer := await lease.acquire(operation.decode)) == "wait":
                # A load with a slot waits for this one. The other may queue for a slot that is held by a load which
                # waits for this process in its turn, and its lease is renewed as long as it queues.
                patience = min(longest, operation.lease_length) if flight.skips_queue else longest
                left = started_at + patience - loop.time()
                if left <= 0:
                    break
                await wake_up.wait(min(next(polls), max(lease.left, _POLLS[0] / 2), left))
        return answer

    async def _load_afresh(self, flight: Flight[Any]) -> tuple[Any, float | None, bool]:
        """Load and fill; return what is kept, for how long at most, and whether it is the latest that is known."""
        operation, lease = self._operation, self.lease
        policy = operation.policy
        value = await self._run(flight, self._timed)  # 5
        payload = operation.encode(value)
        version = operation.version_of(value)
        kept = operation.isolate_value(value, payload) if policy.isolate else value
        life = _spread(cast("float", policy.l2_ttl), policy.jitter)
        is_latest = await lease.fill(payload, life, version, partial(self._still_holds, flight))  # 6
        may_be_stale = lease.is_store_unavailable and self._site.backplane is not None
        return kept, UNTRUSTED_TTL if may_be_stale else None, is_latest

    async def _timed(self) -> Any:
        """Run the loader, and learn how long it takes: so are leases."""
        clock = cast("Tier", self._site.tier).clock
        started_at = clock()
        value = await self._load()
        self._operation.note_load(clock() - started_at)
        return value


def _polls() -> Iterator[float]:
    """Yield the seconds until each next look: a fleet that waits for one load must not look all together."""
    pause, longest = _POLLS
    while True:
        yield pause * (1 - random() / 2)  # noqa: S311  # no secret
        pause = min(2 * pause, longest)


def _spread(life: float, jitter: float) -> float:
    """Lengthen or shorten *life* at random, so that what was filled together does not expire together."""
    return life * (1 + jitter * (2 * random() - 1))  # noqa: S311  # no secret
