"""Deadlines of one event loop's loads: one timer for each budget.

To arm and cancel a timer for each load costs more than the load's task. Loads that have one budget end in the order in
which they began. So one timer is enough for all of them, and it is armed again only when it fires: then for the
earliest deadline that is left. An idle scoreboard may keep a timer until that fires; closing cancels it.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Protocol
from weakref import ref

_MAX_BUDGETS = 64  # that a scoreboard remembers


class Timed(Protocol):
    """The part of a flight that deadlines use."""

    loop: asyncio.AbstractEventLoop

    def run_out(self, budget: float) -> None:
        """End: the *budget*, in seconds, is used up."""
        ...


class Deadlines:
    """The deadlines of the loads that have one budget.

    Args:
        loop: The event loop; held weakly, because a scoreboard may outlive it.
        budget: Seconds that each load has.
    """

    __slots__ = ("_budget", "_due", "_is_closed", "_timer", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, budget: float) -> None:
        self.loop = ref(loop)
        self._budget = budget
        self._due: dict[Timed, float] = {}  # in the order of their starts, and so in that of their ends
        self._timer: Callable[[], asyncio.TimerHandle | None] | None = None  # weak if it can be: it holds the loop
        self._is_closed = False

    def add(self, flight: Timed) -> None:
        """Start the time of *flight*."""
        loop = flight.loop
        due = self._due[flight] = loop.time() + self._budget
        if self._timer is None:
            self._arm(loop, due)

    def drop(self, flight: Timed) -> None:
        """Forget *flight*, which is over."""
        self._due.pop(flight, None)
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Cancel the timer, now or once the last load is over."""
        self._is_closed = True
        timer = None if self._timer is None else self._timer()
        if timer is not None and not self._due:
            timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        # A clean context, or the timer would keep that of the load that happened to arm it.
        timer = loop.call_at(due, self._end_due, loop, due, context=Context())
        try:
            self._timer = ref(timer)
        except TypeError:  # rloop's timers allow no weak references
            self._timer = lambda: timer

    def _end_due(self, loop: asyncio.AbstractEventLoop, instant: float) -> None:
        """End the flights that are due by *instant* or by now, and arm the timer for the first of the others."""
        self._timer = None
        now = max(loop.time(), instant)  # a timer may fire a little early
        over: list[Timed] = []
        for flight, due in self._due.items():  # one pass: taking the first of a dict again and again takes ever longer
            if due > now:
                self._arm(loop, due)
                break
            over.append(flight)
        for flight in over:
            del self._due[flight]
        for flight in over:
            flight.run_out(self._budget)

    def __repr__(self) -> str:
        return f"<Deadlines of {self._budget:g} s: {len(self._due)} flights>"


class Budgets:
    """The deadlines of a scoreboard, by budget."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: dict[float, Deadlines] = {}

    def of(self, loop: asyncio.AbstractEventLoop, budget: float) -> Deadlines:
        """Return the deadlines of the loads in *loop* that have *budget* seconds."""
        deadlines = self._all.get(budget)
        if deadlines is None or deadlines.loop() is not loop:
            if len(self._all) >= _MAX_BUDGETS:
                self.close(loop)
            deadlines = self._all[budget] = Deadlines(loop, budget)
        return deadlines

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Forget all budgets, and cancel the timers of *loop*; loads that still run keep their deadlines."""
        for deadlines in self._all.values():
            if deadlines.loop() is loop:  # another loop's timers are not this thread's to touch
                deadlines.close()
        self._all.clear()
