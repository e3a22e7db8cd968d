"""The deadlines of one event loop's loads that may all take equally long: one timer for all of them.

A timer of its own for each load costs more than the load's task. But of loads with one budget the first to begin
is the first whose time is up, so it is enough to have the timer of that one; and a load that is over in the very
tick in which it began, as a test double's or a small query's answer from memory is, needs none.
"""

import asyncio
from contextvars import Context
from typing import Protocol
from weakref import ref

_KINDS = 64  # of budgets that a scoreboard remembers


class Timed(Protocol):
    """A flight, as far as it is known here."""

    loop: asyncio.AbstractEventLoop

    def run_out(self, budget: float) -> None:
        """End: the *budget*, in seconds, is used up."""
        ...


class Deadlines:
    """When whose time is up.

    Args:
        loop: The event loop; held weakly, as whoever keeps this may not keep the loop alive.
        budget: Seconds that each has.
    """

    __slots__ = ("_budget", "_context", "_due", "_is_looking", "_timer", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, budget: float) -> None:
        self.loop = ref(loop)
        self._budget = budget
        self._due: dict[Timed, float] = {}  # in the order in which they began, and so in that of their ends
        self._timer: asyncio.TimerHandle | None = None
        self._is_looking = False  # a look at what is due comes in the next iteration
        self._context = Context()  # or the timer would keep the context of the load that it was first set for

    def add(self, flight: Timed) -> None:
        """Let the time of *flight* begin."""
        loop = flight.loop
        self._due[flight] = loop.time() + self._budget
        if self._timer is None and not self._is_looking:
            self._is_looking = True
            loop.call_soon(self._look, loop, 0.0, context=self._context)

    def drop(self, flight: Timed) -> None:
        """Forget *flight*, which is over."""
        self._due.pop(flight, None)
        if self._timer is not None and not self._due:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop, instant: float) -> None:
        """End those whose time is up, at *instant* or since, and set the timer for the first of the others."""
        self._is_looking = False
        self._timer = None
        now = max(loop.time(), instant)  # a timer may come a little early
        over: list[Timed] = []
        for flight, due in self._due.items():  # once: to take the first of a dict again and again takes ever longer
            if due > now:
                self._timer = loop.call_at(due, self._look, loop, due, context=self._context)
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
            if len(self._all) >= _KINDS:
                self._all.clear()  # those in use live on by their timers and flights
            deadlines = self._all[budget] = Deadlines(loop, budget)
        return deadlines
