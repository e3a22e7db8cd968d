"""Limits on the loads of one event loop: first come, first served.

A load within a load runs in the outer one's slot. If it queued for a slot of its own, all slots could be held by
loads that wait for loads in the queue. For the same reason a flight leaves the queue, and runs without a slot, as soon
as a load that holds one waits for it, directly or through others (`skip_queue`). So no load that holds a slot
ever waits for one, and every slot is given back.

`asyncio.Semaphore` lacks two things. A waiter that leaves its queue early is searched for in all of it, so 10,000
callers that hang up at once stall the loop. And a waiter leaves it only by a slot or a cancellation.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

from .flight import Flight
from .waiting import skip_queue


class Limiter:
    """A number of slots for loads.

    Args:
        max_loads: How many slots there are.
        wider: Another limiter, of which each load needs a slot too.
    """

    __slots__ = ("__weakref__", "_free", "_max_loads", "_queue", "wider")

    def __init__(self, max_loads: int, wider: "Limiter | None" = None) -> None:
        self._max_loads = max_loads
        self.wider = wider
        self._free = max_loads  # above zero only while the queue is empty
        self._queue: OrderedDict[asyncio.Future[bool], None] = OrderedDict()  # a set in order of arrival

    @asynccontextmanager
    async def slot(self, flight: Flight[Any]) -> AsyncGenerator[None]:
        """Let the block run when it is the turn of *flight*; call it in that flight's own task."""
        held: list[Limiter] = []
        limiter: Limiter | None = self  # the narrower first: its queue takes no slots of the wider
        try:
            while limiter is not None and not flight.skips_queue:
                if await limiter.take(flight):
                    held.append(limiter)
                limiter = limiter.wider
            skipped_queue = flight.skips_queue
            skip_queue(flight)
            try:
                yield
            finally:
                flight.skips_queue = skipped_queue  # should it load again, it queues again
        finally:
            for limiter in held:
                limiter.give_back()

    async def take(self, flight: Flight[Any]) -> bool:
        """Wait for a slot; return whether there is one, or *flight* is to run without."""
        if self._free:
            self._free -= 1
            return True
        queue_slot: asyncio.Future[bool]
        queue_slot = flight.queue_slot = flight.loop.create_future()
        self._queue[queue_slot] = None
        try:
            return await queue_slot
        except asyncio.CancelledError:
            if not queue_slot.cancelled() and queue_slot.result():  # the slot came in the very tick of the cancellation
                self.give_back()
            raise
        finally:
            self._queue.pop(queue_slot, None)

    def give_back(self) -> None:
        """Hand a slot to the first in the queue; a newcomer cannot get there before."""
        while self._queue:
            queue_slot, _ = self._queue.popitem(last=False)
            if not queue_slot.done():  # it left in this very tick
                queue_slot.set_result(True)
                return
        self._free += 1

    @property
    def queue(self) -> tuple[int, int]:
        """How many loads wait for a slot, and how many slots there are."""
        return len(self._queue), self._max_loads

    def __repr__(self) -> str:
        return f"<Limiter {self._max_loads - self._free} of {self._max_loads} taken, {len(self._queue)} queued>"


class Limiters:
    """The limiters of one event loop: the guard's own, and one of each name that has a limit.

    A limiter lives as long as a load has a slot of it, or queues for one, because an idle one limits nothing.

    Args:
        max_loads: Of the guard; `None` sets no limit.
    """

    __slots__ = ("_all", "_named")

    def __init__(self, max_loads: int | None = None) -> None:
        self._all = None if max_loads is None else Limiter(max_loads)
        self._named: WeakValueDictionary[tuple[str, int], Limiter] = WeakValueDictionary()

    def of(self, name: str, max_loads: int | None) -> Limiter | None:
        """Return the limiter of the loads under *name* that has *max_loads* slots; `None` if there is no limit.

        Its key is the name and the number: `fetch` may be given two numbers for one name.
        """
        if max_loads is None:
            return self._all
        limiter = self._named.get((name, max_loads))
        if limiter is None:
            limiter = self._named[name, max_loads] = Limiter(max_loads, self._all)
        return limiter

    def queues(self) -> Iterator[tuple[int, int]]:
        """Yield for each limiter how many loads wait for a slot, and how many slots there are."""
        return (limiter.queue for limiter in (self._all, *self._named.values()) if limiter is not None)
