"""Limits on loads, which operations and partitions share evenly.

A load within a load runs in the outer one's slot. If it queued for a slot of its own, all slots could be held by
loads that wait for loads in the queue. For the same reason a flight leaves the queue, and runs without a slot, as soon
as a load that holds one waits for it, directly or through others (`skip_queue`). So no load that holds a slot
ever waits for one, and every slot is given back. Nor is such a flight refused.

The queue consists of lines, one for each operation or partition. The line that holds the fewest slots is served first,
and among equals they take turns. When a bounded queue is full, the longest line gives way, as in Stochastic Fairness
Queueing (McKenney, INFOCOM 1990). So a crowd of one line fills no queue for the others.

`asyncio.Semaphore` has no lines, and lacks two things besides. A waiter that leaves its queue early is searched for in
all of it, so 10,000 callers that hang up at once stall the loop. And a waiter leaves it only by a slot or a
cancellation.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

from .._operations.operation import Operation
from .._operations.options import AdaptiveLimit, MaxLoads
from .flight import Flight
from .learnt import LearntLimit
from .lines import Line, Place, RankedLines
from .slot_request import SlotRequest
from .waiting import skip_queue

_MOST_ADAPTIVE = 256  # limiters that are kept for what they have learnt


class Limiter:
    """A number of slots for loads.

    Args:
        max_loads: How many slots there are, or between which bounds their number is learnt.
        wider: Another limiter, of which each load needs a slot too.
        max_queued: How many loads may wait for a slot; `None` sets no limit.
        queue_timeout: Seconds that each may wait, here and at the wider one, unless its operation says otherwise;
            `None` sets no limit.
        owner: What it limits, for errors.
        is_partitioned: Whether its lines are partitions of one operation; otherwise they are operations.
    """

    __slots__ = (
        "__weakref__",
        "_adaptive",
        "_by_held",
        "_by_length",
        "_is_partitioned",
        "_lines",
        "_max_loads",
        "_max_queued",
        "_owner",
        "_queued",
        "_taken",
        "queue_timeout",
        "wider",
    )

    def __init__(
        self,
        max_loads: MaxLoads,
        wider: "Limiter | None" = None,
        *,
        max_queued: int | None = None,
        queue_timeout: float | None = None,
        owner: str = "the guard",
        is_partitioned: bool = False,
    ) -> None:
        self._adaptive = LearntLimit(max_loads) if isinstance(max_loads, AdaptiveLimit) else None
        self._max_loads = max_loads.min if isinstance(max_loads, AdaptiveLimit) else max_loads
        self.wider = wider
        self._max_queued = max_queued
        self.queue_timeout = queue_timeout
        self._owner = owner
        self._is_partitioned = is_partitioned
        self._taken = 0
        self._queued = 0
        self._lines: dict[str, Line] = {}  # those that hold a slot, or wait for one
        # The lines that wait, by the slots that they hold, and by their lengths. Between two steps there is no slot
        # that one of them may have: a newcomer that finds one overtakes no other load.
        self._by_held = RankedLines()
        self._by_length = RankedLines()

    @asynccontextmanager
    async def slot(
        self, flight: Flight[Any], operation: Operation | None = None, partition: str | None = None
    ) -> AsyncGenerator[None]:
        """Let the block run when it is the turn of *flight*; call it in that flight's own task.

        Args:
            flight: The flight that loads in the block.
            operation: Whose load it is, for its line and its limits.
            partition: Its partition of the operation.

        Raises:
            Overloaded: too many loads wait, or this one has waited for too long.
        """
        held: list[tuple[Limiter, Line]] = []
        try:
            await self._take_all(SlotRequest(flight, operation, partition, self._timeout_of(operation)), held)
            skipped_queue = flight.skips_queue
            skip_queue(flight)
            began_at = flight.loop.time()
            has_failed = True
            try:
                yield
                has_failed = False
            finally:
                flight.skips_queue = skipped_queue  # should it load again, it queues again
                duration = flight.loop.time() - began_at
                for limiter, _ in held:
                    limiter.learn(duration, has_failed=has_failed)
        finally:
            for limiter, line in held:
                limiter.give_back(line)

    def learn(self, duration: float, *, has_failed: bool) -> None:
        """Adapt the number of slots, if it adapts, to a load that took *duration* seconds."""
        if self._adaptive is not None:
            self._adaptive.note(duration, self._taken, has_failed=has_failed)
            self._max_loads = self._adaptive.slots

    @property
    def _slots(self) -> str:
        return f"{self._max_loads} slots of {self._owner}"

    def _timeout_of(self, operation: Operation | None) -> float | None:
        if operation is not None and operation.policy.queue_timeout is not None:
            return operation.policy.queue_timeout
        return self.queue_timeout if self.wider is None else self.wider.queue_timeout

    async def _take_all(self, request: SlotRequest, held: "list[tuple[Limiter, Line]]") -> None:
        """Wait for all slots that the load needs, and add them to *held*."""
        limiter: Limiter | None = self  # the narrower first: its queue takes no slots of the wider
        try:
            while limiter is not None and not request.flight.skips_queue:
                line = await limiter.take(request)
                if line is not None:
                    held.append((limiter, line))
                limiter = limiter.wider
        finally:
            request.end_waiting()

    async def take(self, request: SlotRequest) -> Line | None:
        """Wait for a slot; return the line that has it, or `None` if the flight is to run without.

        Raises:
            Overloaded: too many loads wait, or this one has waited for too long.
        """
        name = request.partition if self._is_partitioned else request.name
        line = self._lines.get(name)
        if line is None:
            line = Line(name)
        if not line.waiting and self._has_slot_for(line):
            self._hold(line)
            return line
        place = request.begin_waiting(self._slots)
        if self._max_queued is not None:
            self._make_room(line, request, self._max_queued)
        self._enter(line, place)
        try:
            outcome = await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.result() is True:  # the slot came in the very tick of the cancellation
                self.give_back(line)
            raise
        finally:
            if place in line.waiting:
                self._leave(line, place)
        if isinstance(outcome, str) and not request.flight.skips_queue:  # else a load with a slot waits for it by now
            raise request.refuse(outcome)
        return line if outcome is True else None

    def _has_slot_for(self, line: Line) -> bool:
        """Whether a slot is free that *line* may have.

        A partition may hold as many slots as are free beside. So one whose loads hang has half of the slots, two have
        a third each, and there is always one for another: "Dynamic Queue Length Thresholds for Shared-Memory Packet
        Switches" (Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).
        """
        return self._max_loads - self._taken > (line.held if self._is_partitioned else 0)

    def _make_room(self, line: Line, request: SlotRequest, max_queued: int) -> None:
        """Let another load wait in *line*, if need be in place of the newest of the longest line.

        Raises:
            Overloaded: *line* is the longest, or would be.
        """
        why = f"{self._queued} loads wait for the {self._slots}, and max_queued={max_queued} allows no more"
        while self._queued >= max_queued:
            longest = self._by_length.highest()
            if longest is None or len(longest.waiting) <= len(line.waiting) + 1:
                raise request.refuse(why)
            place = next(reversed(longest.waiting))
            self._leave(longest, place)
            if not place.done():  # else it left in this very tick
                place.set_result(why)

    def give_back(self, line: Line) -> None:
        """Hand a slot of *line* to the next in the queue; a newcomer cannot get there before."""
        self._set_held(line, line.held - 1)
        self._taken -= 1
        self._hand_out()
        self._forget_if_empty(line)

    def _hand_out(self) -> None:
        """Give the free slots to the lines that may have them."""
        line = self._by_held.lowest()
        while line is not None and self._has_slot_for(line):
            place = next(iter(line.waiting))
            self._leave(line, place)
            if not place.done():  # else it left in this very tick
                self._hold(line)
                place.set_result(True)
            line = self._by_held.lowest()

    def _hold(self, line: Line) -> None:
        self._lines[line.name] = line
        self._taken += 1
        self._set_held(line, line.held + 1)

    def _set_held(self, line: Line, held: int) -> None:
        if line.waiting:
            self._by_held.remove(line, line.held)
            self._by_held.add(line, held)
        line.held = held

    def _enter(self, line: Line, place: Place) -> None:
        """Let *place* be the last of *line*."""
        self._lines[line.name] = line
        if line.waiting:
            self._by_length.remove(line, len(line.waiting))
        else:
            self._by_held.add(line, line.held)
        line.waiting[place] = None
        self._by_length.add(line, len(line.waiting))
        self._queued += 1

    def _leave(self, line: Line, place: Place) -> None:
        """Take *place* out of *line*."""
        self._by_length.remove(line, len(line.waiting))
        del line.waiting[place]
        if line.waiting:
            self._by_length.add(line, len(line.waiting))
        else:
            self._by_held.remove(line, line.held)
        self._queued -= 1
        self._forget_if_empty(line)

    def _forget_if_empty(self, line: Line) -> None:
        if not line.held and not line.waiting:
            self._lines.pop(line.name, None)

    @property
    def queue(self) -> tuple[int, int]:
        """How many loads wait for a slot, and how many slots there are."""
        return self._queued, self._max_loads

    def __repr__(self) -> str:
        return f"<Limiter {self._taken} of {self._max_loads} taken, {self._queued} queued>"


class Limiters:
    """The limiters of one event loop: the guard's own, and one of each name that has a limit.

    A limiter lives as long as a load has a slot of it, or queues for one, because an idle one limits nothing. One that
    learns is kept, for what it has learnt.

    Args:
        max_loads: Of the guard; `None` sets no limit.
        max_queued: How many loads may wait for a slot of the guard; `None` sets no limit.
        queue_timeout: Seconds that a load may wait for its slots, unless its operation says otherwise; `None` sets no
            limit.
    """

    __slots__ = ("_adaptive", "_all", "_named")

    def __init__(
        self, max_loads: MaxLoads | None = None, max_queued: int | None = None, queue_timeout: float | None = None
    ) -> None:
        self._all: Limiter | None = None
        if max_loads is not None:
            self._all = Limiter(max_loads, max_queued=max_queued, queue_timeout=queue_timeout)
        self._named: WeakValueDictionary[tuple[Any, ...], Limiter] = WeakValueDictionary()
        self._adaptive: dict[tuple[Any, ...], Limiter] = {}

    def of_operation(self, operation: Operation, partition: str | None = None) -> Limiter | None:
        """Return the limiter of the loads of *operation*, or of its loads that have a partition."""
        policy = operation.policy
        if policy.max_loads is None:
            return self._all
        return self.of(operation.name, policy.max_loads, policy.max_queued, is_partitioned=partition is not None)

    def of(
        self, name: str, max_loads: MaxLoads | None, max_queued: int | None = None, *, is_partitioned: bool = False
    ) -> Limiter | None:
        """Return the limiter of the loads under *name* that has *max_loads* slots; `None` if there is no limit.

        `fetch` may be given other numbers for one name, and partitions for some of its calls. Each such set has a
        limiter of its own.
        """
        if max_loads is None:
            return self._all
        known_as = name, max_loads, max_queued, is_partitioned
        limiter = self._named.get(known_as)
        if limiter is None:
            bounds: Any = {"max_queued": max_queued, "is_partitioned": is_partitioned}
            limiter = self._named[known_as] = Limiter(max_loads, self._all, owner=name, **bounds)
            if isinstance(max_loads, AdaptiveLimit):
                if len(self._adaptive) >= _MOST_ADAPTIVE:
                    self._adaptive.clear()
                self._adaptive[known_as] = limiter
        return limiter

    def queues(self) -> Iterator[tuple[int, int]]:
        """Yield for each limiter how many loads wait for a slot, and how many slots there are."""
        return (limiter.queue for limiter in (self._all, *self._named.values()) if limiter is not None)
