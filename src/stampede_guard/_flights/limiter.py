"""How many loads may run at once, in one event loop; first come, first served.

A load within a load runs in the outer one's slot: if it queued for another, all slots could be held by
loads that wait for those in the queue. For the same reason a flight leaves the queue, and runs without
a slot, as soon as a load that holds one waits for it, itself or through others (`Flight.urge`). So
nobody who holds a slot ever waits for one, and every slot is given back.

`asyncio.Semaphore` lacks two things: whoever leaves its queue early searches all of it, so that 10,000
callers who hang up at once stall the loop; and it knows no way out but a slot or a cancellation.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol
from weakref import WeakValueDictionary


class Queueing(Protocol):
    """A flight, as far as it is known here."""

    loop: asyncio.AbstractEventLoop
    is_urgent: bool
    place: asyncio.Future[bool] | None

    def urge(self) -> None:
        """Let it, and whatever it waits for, queue no longer."""
        ...


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
        self._free = max_loads  # above zero only while nobody queues
        self._queue: OrderedDict[asyncio.Future[bool], None] = OrderedDict()  # a set that knows who came first

    @asynccontextmanager
    async def slot(self, flight: Queueing) -> AsyncGenerator[None]:
        """Let the block run when it is the turn of *flight*; call it in that flight's own task."""
        held: list[Limiter] = []
        limiter: Limiter | None = self  # the narrower first: its queue takes no slots of the wider
        try:
            while limiter is not None and not flight.is_urgent:
                if await limiter.take(flight):
                    held.append(limiter)
                limiter = limiter.wider
            was_urgent = flight.is_urgent
            flight.urge()
            try:
                yield
            finally:
                flight.is_urgent = was_urgent  # should it load again, it queues again
        finally:
            for limiter in held:
                limiter.give_back()

    async def take(self, flight: Queueing) -> bool:
        """Wait for a slot; return whether there is one, or *flight* is to run without."""
        if self._free:
            self._free -= 1
            return True
        place: asyncio.Future[bool]
        place = flight.place = flight.loop.create_future()
        self._queue[place] = None
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.result():  # the slot came in the very tick of the cancellation
                self.give_back()
            raise
        finally:
            self._queue.pop(place, None)

    def give_back(self) -> None:
        """Hand a slot to the first in the queue; a newcomer cannot get there before."""
        while self._queue:
            place, _ = self._queue.popitem(last=False)
            if not place.done():  # it has left in this very tick
                place.set_result(True)
                return
        self._free += 1

    def __repr__(self) -> str:
        return f"<Limiter {self._max_loads - self._free} of {self._max_loads} taken, {len(self._queue)} queued>"


class Limiters:
    """The limiters of one event loop: the guard's own, and one of each name that has a limit.

    A limiter lives as long as a load has a slot of it, or queues for one: an idle one limits nothing.

    Args:
        max_loads: Of the guard; `None` sets no limit.
    """

    __slots__ = ("_all", "_named")

    def __init__(self, max_loads: int | None = None) -> None:
        self._all = None if max_loads is None else Limiter(max_loads)
        self._named: WeakValueDictionary[tuple[str, int], Limiter] = WeakValueDictionary()

    def of(self, name: str, max_loads: int | None) -> Limiter | None:
        """Return what limits the loads under *name* to *max_loads*; `None` if nothing does.

        It is found by both: of two numbers under one name, which `fetch` may be given, neither widens the other.
        """
        if max_loads is None:
            return self._all
        limiter = self._named.get((name, max_loads))
        if limiter is None:
            limiter = self._named[name, max_loads] = Limiter(max_loads, self._all)
        return limiter
