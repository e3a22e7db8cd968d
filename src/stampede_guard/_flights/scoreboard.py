"""The scoreboard: at most one current flight per op.

After *singleflight* (golang.org/x/sync) and the debouncer of "Avoiding cache stampede at DoorDash".
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextvars import Context
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet, ref

from .._operations.options import Duration, OnAbandon
from .._operations.policy import Policy
from .._stats import Counters, Stats, snapshot
from ..errors import ConfigurationError, LoadCancelled, RecursiveLoad, WrongLoop
from .deadlines import Budgets
from .flight import DirectRead, Flight, Interim, OldValues, current_flight
from .waiting import leads_to, wait_one, waits_for

T = TypeVar("T")
Load = Callable[[], Awaitable[T]]

logger = logging.getLogger("stampede_guard")

_GRACE = 1.0  # seconds that a cancelled load gets for its clean-up when its scoreboard is drained
_DEPTH = 16  # loads of one op, each launched within the one before, that may be up at once


class Scoreboard:
    """The bare debouncer: concurrent calls with one op share one run of the load. No caches.

    Belongs to the event loop in which it is used; after that loop was closed, another may use it.

    Args:
        load_timeout: Seconds after which a load is ended for all waiters; `None` sets no limit.
        wait_timeout: Seconds after which one waiter gives up alone; `None` sets no limit.
        on_abandon: `"finish"` lets a load go on when all waiters have left; `"cancel"` cancels it.

    Raises:
        ConfigurationError: an option breaks its rule.
    """

    def __init__(
        self,
        *,
        load_timeout: Duration | None = 30.0,
        wait_timeout: Duration | None = None,
        on_abandon: OnAbandon = "finish",
    ) -> None:
        self._policy = Policy.from_options(
            {"load_timeout": load_timeout, "wait_timeout": wait_timeout, "on_abandon": on_abandon}
        )
        self._counters = Counters()
        self.budgets = Budgets()
        self.flights: dict[str, Flight[Any]] = {}
        self.up: set[Flight[Any]] = set()  # all that still run, the forgotten ones too
        _all_boards.add(self)

    async def debounce(self, op: str, load: Load[T]) -> T:
        """Return what *load* returns, run once for all calls of *op* that come meanwhile.

        Cancelling this call does not affect other waiters. The load runs in a task and a clean context of its own.

        Raises:
            LoadTimeout: the load exceeded `load_timeout`.
            WaitTimeout: this call exceeded `wait_timeout`.
            LoadCancelled: the load was cancelled.
            RecursiveLoad: the load waits for itself.
            WrongLoop: another running event loop is loading *op*.
            Exception: the load's own error.
        """
        if not callable(load):
            message = f"{op}: give debounce a function that starts the load, as in `lambda: fetch(7)`, not {load!r}"
            raise ConfigurationError(message)
        flight: Flight[T] | None = self.current(op)
        if flight is not None:
            self._counters.joins += 1
        else:
            flight = self.launch(op, partial(self._run, load), self._counters, self._policy.on_abandon)
        return await wait_one(flight, self._policy.wait_timeout)

    async def _run(self, load: Load[T], flight: Flight[T]) -> T:
        flight.start_clock(self._policy.load_timeout)
        self._counters.loads += 1
        return await load()

    def current(self, op: str) -> Flight[Any] | None:
        """Return the current flight of *op*, or `None`.

        Not async, nor is `launch`: an await between the two would let two callers launch.

        Raises:
            WrongLoop: the flight is another running loop's.
        """
        flight = self.flights.get(op)
        if flight is None:
            return None
        if flight.loop is not asyncio.get_running_loop():
            if flight.loop.is_closed():
                flight.fail_closed_loop()
                return None
            message = f"{op}: another event loop is loading this; give each loop a Scoreboard, or use a Guard"
            raise WrongLoop(message)
        return flight

    def launch(  # noqa: PLR0913, PLR0917  # made by the guard alone
        self,
        op: str,
        load: Callable[[Flight[T]], Coroutine[Any, Any, T]],
        counters: Counters,
        on_abandon: OnAbandon,
        context: Context | None = None,
        tags: Sequence[str] = (),
        direct_read: DirectRead[T] | None = None,
        *,
        is_private: bool = False,
        is_refresh: bool = False,
        replaces: bool = False,
        after: Flight[Any] | None = None,
        old_values: OldValues[T] | None = None,
        interim: Interim | None = None,
    ) -> Flight[T]:
        """Start a flight; unless it *is_private*, callers that come meanwhile will join it.

        Its load waits until the flight *after* which it comes has landed. If it fails, *old_values* may return what
        it lands with. Callers get *interim* meanwhile.

        Raises:
            RecursiveLoad: the running code belongs to a load of *op*, which would go on to launch itself for ever.
        """
        outer, skips_queue = current_flight.get(), False
        if outer is not None and (running := outer()) is not None:
            self._check_recursion(op, running)
            skips_queue = running.skips_queue  # even if it was aborted, while it cleans up
        counters.executions += 1
        flight: Flight[T] = Flight(
            self,
            op,
            counters,
            on_abandon,
            outer,
            skips_queue,
            load,
            context,
            tags,
            direct_read,
            is_refresh,
            replaces,
        )
        flight.old_values = old_values
        if interim is not None:  # callers take that, so that no load waits for this one
            flight.interim, flight.skips_queue = interim, False
        if after is not None:
            flight.queue_behind(after)
        if not is_private:
            self.flights[op] = flight  # before the start: an eager task may land inside its own creation
        self.up.add(flight)
        flight.start()
        return flight

    def _check_recursion(self, op: str, inside: Flight[Any]) -> None:
        flight = None if inside.landed else inside
        number = 0
        while flight is not None:
            if flight.op == op and flight.board is self:
                number += 1
                waits = waits_for(inside, asyncio.current_task()) and leads_to(flight, inside, is_certain=True)
                if waits or number >= _DEPTH:
                    message = f"{op}: its loader calls itself"
                    raise RecursiveLoad(message)
            flight = _still_up(flight.outer)

    def forget(self, op: str) -> None:
        """Let the next caller start afresh; present waiters still get their answer."""
        self.flights.pop(op, None)

    def forget_tagged(self, tag: str) -> None:
        """Do so for every op whose flight has *tag*."""
        for flight in tuple(self.flights.values()):
            if tag in flight.tags:
                self.clear(flight)

    def forget_replaced(self) -> None:
        """Do so for every op whose flight belongs to a function that was defined anew."""
        for flight in tuple(self.flights.values()):
            if flight.generation is not None and flight.generation.is_over:
                self.clear(flight)

    def forget_all(self) -> None:
        """Let every op's next caller start afresh."""
        self.flights.clear()

    def clear(self, flight: Flight[Any], ahead: Flight[Any] | None = None) -> None:
        """Take *flight* off the board, if it is the current one: a newer one may have its place.

        If it was to begin after *ahead*, which is up, that is the current one again: new callers wait for it
        and do not load beside it.
        """
        if self.flights.get(flight.op) is flight:
            del self.flights[flight.op]
            if ahead is not None and not ahead.landed:
                self.flights[flight.op] = ahead

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109  # what is left then is no error
        """Wait at most *timeout* seconds for all flights to land, those launched meanwhile included."""
        deadline = asyncio.get_running_loop().time() + timeout
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            steps = self._next_steps()
            if not steps:
                return
            await asyncio.wait(steps, timeout=left)

    async def cancel_all(self) -> None:
        """Cancel all flights; their waiters get `LoadCancelled` at once, their loads a second to clean up."""
        for flight in tuple(self.up):
            flight.abort(LoadCancelled(f"{flight.op}: cancelled at shut-down"))
        if steps := self._next_steps():  # direct reads too: a reply may grant a lease, which other processes wait for
            await asyncio.wait(steps, timeout=_GRACE)
        # A direct read is over once the store replies, or its deadline passes.
        left = sum(not flight.is_reading for flight in self.up)
        if left:
            loads = "1 load ignores its" if left == 1 else f"{left:,} loads ignore their"
            logger.warning("%s cancellation; left behind at shut-down", loads)  # without keys, as all logs
        self.budgets.close(asyncio.get_running_loop())

    def _next_steps(self) -> list[asyncio.Future[None]]:
        """Return what the flights wait for; one whose task is being made has none."""
        steps: list[asyncio.Future[None]] = []
        for flight in self.up:
            if flight.task is not None:
                steps.append(flight.task)
            elif flight.is_reading:
                steps.append(flight.direct_read_done())
        return steps

    def overdue(self) -> Iterator[float]:
        """Yield for each load that runs on after its budget when that was used up, by the loop's clock."""
        return (flight.ran_out_at for flight in self.up if flight.ran_out_at is not None)

    def disown(self) -> None:
        """Forget flights that will never land here: this process was forked."""
        self.flights.clear()
        for flight in self.up:
            flight.disown()
        _left_behind.append(self.up)
        self.up = set()

    def stats(self) -> Stats:
        """Return a snapshot of what was called, shared and run."""
        return snapshot(self._counters)

    def __repr__(self) -> str:
        return f"<Scoreboard {len(self.flights)} flights>"


def _still_up(flight: ref[Flight[Any]] | None) -> Flight[Any] | None:
    """Return the flight of the reference, unless it has landed: code that runs on after that is not waited for."""
    referent = None if flight is None else flight()
    return None if referent is None or referent.landed else referent


_all_boards: "WeakSet[Scoreboard]" = WeakSet()
_left_behind: list[set[Flight[Any]]] = []  # kept: the end of their tasks would run clean-up that is the parent's


def _disown_all() -> None:
    for board in _all_boards:
        board.disown()


if hasattr(os, "register_at_fork"):  # pragma: no branch  # not on Windows
    os.register_at_fork(after_in_child=_disown_all)
