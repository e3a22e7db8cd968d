"""The scoreboard: at most one current flight per op.

Every waiter sleeps on a future of its own. `asyncio.shield(task)` would be shorter, but each
cancelled waiter then rescans the task's callback list: 16,000 clients that hang up at once
would stall the event loop for two seconds, not for a tenth of one. And the future carries no
result, only the wake-up: a result nobody came to fetch is nothing that asyncio could complain of.

After *singleflight* (golang.org/x/sync) and the debouncer of "Avoiding cache stampede at DoorDash".
"""

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from functools import partial
from math import inf
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast, final
from weakref import WeakSet, ref

from .._memory.epochs import Generation
from .._operations.options import Duration, OnAbandon
from .._operations.policy import Policy
from .._stats import Counters, Stats, snapshot
from ..errors import (
    ConfigurationError,
    LoadCancelled,
    LoadTimeout,
    RecursiveLoad,
    StampedeGuardError,
    WaitTimeout,
    WrongLoop,
)
from .awaited import is_awaited_by
from .deadlines import Budgets, Deadlines
from .failure import Failure

T = TypeVar("T")
Load = Callable[[], Awaitable[T]]

logger = logging.getLogger("stampede_guard")

_LANDED, _GAVE_UP = "landed", "gave up"  # what wakes a waiter; anything else says what circle it is part of
_FEW = 64  # waiters who have left, and are not worth the search
# What makes a task that begins inside its own creation, where Python can.
_eager_task: Callable[..., asyncio.Task[None]] | None = (
    partial(cast("Any", asyncio.Task), eager_start=True) if sys.version_info >= (3, 12) else None
)
_GRACE = 1.0  # seconds that a cancelled load gets for its clean-up when its scoreboard is drained

_LOOKS = (0.05, 1.0)  # seconds between looks whether a wait is part of a circle, first and longest
_DEPTH = 16  # loads of one op, each launched within the one before, that may be up at once

# The flight whose loader the running code belongs to; weak, since connections and tasks that a loader opens keep its
# context, and would keep the flight and its answer with it.
_current: ContextVar["ref[Flight[Any]] | None"] = ContextVar("stampede_guard_flight", default=None)


class Wait:
    """A call within a load that waits for another flight.

    Attributes:
        flight: That one.
        task: In which the call is made. The load itself need not wait for that task. `None` if it is the load itself
            that waits, for its turn.
        look: The timer of the next look for a circle.
    """

    __slots__ = ("flight", "look", "task")

    def __init__(self, flight: "Flight[Any]", task: "asyncio.Task[Any] | None") -> None:
        self.flight = flight
        self.task = task
        self.look: asyncio.TimerHandle | None = None


class DirectRead(Protocol[T]):
    """A store read that runs without a task. Creating a task is most of a flight's cost."""

    def start(self, flight: "Flight[T]", on_answer: Callable[[], None]) -> bool:
        """Send the request, and call *on_answer* once the reply is there; return whether that was possible at once."""
        ...

    def result(self, flight: "Flight[T]") -> tuple[T] | None:
        """Return the value that was read, in a tuple of one; `None` on a miss."""
        ...

    def close(self) -> None:
        """Give back what the read holds, since the flight has landed. Called again when the flight's task has ended."""


@final
class Flight(Generic[T]):
    """One running load and everyone waiting for it."""

    __slots__ = (
        "__weakref__",
        "_ahead",
        "_counters",
        "_deadlines",
        "_direct_read",
        "_eager",
        "_failure",
        "_has_begun",
        "_present",
        "_read_done",
        "_turn",
        "_value",
        "_waiters",
        "_was_joined",
        "awaits",
        "board",
        "confirmation",
        "generation",
        "is_over",
        "is_reading",
        "is_refresh",
        "joinable_until",
        "landed",
        "loader_called",
        "loop",
        "next_turn",
        "on_abandon",
        "on_settled",
        "op",
        "outer",
        "queue_slot",
        "skips_queue",
        "tags",
        "task",
        "waits_elsewhere",
    )

    def __init__(  # noqa: PLR0915  # all that there is to know of it
        self,
        board: "Scoreboard",
        op: str,
        counters: Counters,
        on_abandon: OnAbandon,
        outer: "ref[Flight[Any]] | None",
    ) -> None:
        self.op = op
        self.on_abandon: OnAbandon = on_abandon
        self.is_refresh = False
        self.confirmation: Any = None  # that what a refresh could not replace is gone
        self.loader_called = False  # what it reads may be older than a caller that comes now
        self._turn: asyncio.Future[None] | None = None  # done once the flight before this one has landed
        self._ahead: Flight[Any] | None = None  # that one, until then
        self.next_turn: asyncio.Future[None] | None = None  # the same of the flight behind this one
        self.waits_elsewhere = False  # it waits for a load in another process
        self.on_settled: Callable[[], object] | None = None  # called when it waits elsewhere, and when it is over
        self.tags: Sequence[str] = ()
        self.generation: Generation | None = None  # of the function that loads
        self.joinable_until = inf  # instant of its memory's clock
        self.landed = False
        self.is_over = False  # its task has ended; a load that ignores its cancellation goes on after the landing
        self.board = board
        self._counters = counters
        self.loop = asyncio.get_running_loop()
        self.task: asyncio.Task[None] | None = None
        self._eager: asyncio.Task[Any] | None = None  # the same, while that is being made
        self.is_reading = False  # its direct read has not ended; it has no task yet
        self._read_done: asyncio.Future[None] | None = None  # done once that has ended, if a shutdown waits for it
        self._has_begun = False
        self._deadlines: Deadlines | None = None  # while the loader's time runs
        # In the order in which they came; who leaves early is done, and counted out. A set of them would take ten
        # times the memory, and finding one in the list would take time.
        self._waiters: list[asyncio.Future[str]] = []
        self._present = 0
        self._was_joined = False
        self.outer = outer  # the flight whose loader launched this one
        self.awaits: dict[object, Wait] = {}  # what calls within this one's load wait for, by their waiters
        self.queue_slot: asyncio.Future[bool] | None = None  # in a limiter's queue
        # Set while it holds a slot, or a load that holds one waits for it.
        self.skips_queue = outer is not None and _skips_queue(outer)
        self._direct_read: DirectRead[T] | None = None
        self._value: Any = None
        self._failure: Failure | None = None

    def start(
        self, load: Callable[["Flight[T]"], Awaitable[T]], context: Context, direct_read: "DirectRead[T] | None" = None
    ) -> None:
        """Run *load* in a task of its own, so that it belongs to no caller, unless *direct_read* finds the value."""
        self._counters.in_flight += 1
        context.run(_current.set, ref(self))
        self._direct_read = direct_read
        run: Any = context.run
        try:
            is_reading = direct_read is not None and direct_read.start(
                self, partial(run, self._on_direct_read, direct_read, load, context)
            )
        except BaseException as error:
            self._finish(None, self._ended_by(error))
            raise
        self.is_reading = is_reading
        if not is_reading:
            try:
                self._begin(load, context)
            except (KeyboardInterrupt, SystemExit) as error:
                self.loop.call_soon(_stop, error)  # the loop, as a load does that has begun later; not this caller

    def _on_direct_read(
        self, direct_read: DirectRead[T], load: Callable[["Flight[T]"], Awaitable[T]], context: Context
    ) -> None:
        """Land with the value that was read.

        On a miss, schedule the load for the next loop iteration, so that it does not run inside the pipeline's task.
        """
        try:
            seen = direct_read.result(self)
        except BaseException as error:
            self._finish(None, error if isinstance(error, Exception) else self._ended_by(error))
            if isinstance(error, KeyboardInterrupt | SystemExit):  # as from a task; others came with this answer
                raise
        else:
            if seen is None:
                self.loop.call_soon(self._begin, load, context)
            else:
                self._finish(seen[0], None)

    def _begin(self, load: Callable[["Flight[T]"], Awaitable[T]], context: Context) -> None:
        if self.landed:  # aborted meanwhile
            self._finish(None, None)
            return
        run = self._run(load)
        try:
            self.task = self._new_task(run, context)
        except BaseException as error:  # a task factory that refuses, or an eager load that stops the loop
            run.close()
            self._finish(None, self._ended_by(error))
            raise
        self._eager = None
        if self.is_reading:
            self._end_read()
        if self.task.done():  # an eager task that never had to wait
            self._end(self.task)
        elif not self._has_begun:
            self.task.add_done_callback(self._end)

    def _new_task(self, run: Coroutine[Any, Any, None], context: Context) -> asyncio.Task[None]:
        """Return the task of the load, begun already where that can be: most of its price is the turn of the loop.

        It begins later within another load, as each would lie deeper in the stack; where an error is dealt with,
        which would become the context of whatever the load raises; and where a factory says how tasks are made.
        """
        loop, name = self.loop, f"load {self.op}"
        may_begin = self.outer is None and sys.exception() is None and loop.get_task_factory() is None
        if may_begin and _eager_task is not None:
            return _eager_task(run, loop=loop, name=name, context=context)
        return loop.create_task(run, name=name, context=context)

    async def _run(self, load: Callable[["Flight[T]"], Awaitable[T]]) -> None:
        """Run *load*, and wake all waiters in the task's last step; a done-callback would run one loop iteration later.

        A done-callback is attached only when that step may not run: before the task has started, and after a
        cancellation or a `BaseException`.
        """
        self._has_begun = True
        if self.task is None:
            self._eager = asyncio.current_task()
        else:
            self.task.remove_done_callback(self._end)
        try:
            value = await load(self)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the waiters'
            self._finish(None, error)
        except BaseException:
            if self.task is not None:
                self.task.add_done_callback(self._end)
            raise
        else:
            self._finish(value, None)

    def _end(self, task: asyncio.Task[None]) -> None:
        """Wake all waiters if the load did not: it was cancelled, perhaps before it began, or stops the loop."""
        self.task = None
        if self.is_over:
            return
        if task.cancelled():
            self._finish(None, LoadCancelled(f"{self.op}: the load was cancelled"))
        else:
            self._finish(None, self._ended_by(cast("BaseException", task.exception())))

    def _ended_by(self, error: BaseException) -> LoadCancelled:
        return LoadCancelled(f"{self.op}: the load was ended by {type(error).__name__}")

    def queue_behind(self, other: "Flight[Any]") -> None:
        """Let `turn` wait until *other* has landed; that makes no waiter of it, so *other* may be abandoned."""
        turn: asyncio.Future[None] = self.loop.create_future()
        self._turn = other.next_turn = turn
        self._ahead = other
        self.awaits = {turn: Wait(other, None)}

    @property
    def is_queued(self) -> bool:
        """Whether another flight has to land before this one begins."""
        return self._turn is not None

    async def turn(self) -> None:
        """Wait until the flight before this one has landed."""
        turn, self._turn = self._turn, None
        assert turn is not None
        try:
            await turn
        finally:
            self._ahead = None
            del self.awaits[turn]

    def direct_read_done(self) -> asyncio.Future[None]:
        """Return a future that completes when the direct read has ended: the flight has then landed, or has a task."""
        if self._read_done is None:
            self._read_done = self.loop.create_future()
        return self._read_done

    def _end_read(self) -> None:
        self.is_reading = False
        if self._read_done is not None and not self._read_done.done():
            self._read_done.set_result(None)

    async def wait(self, timeout: float | None = None) -> T:  # noqa: ASYNC109  # one waiter's, not the load's
        """Wait for the answer, at most *timeout* seconds; leaving disturbs nobody else.

        Raises:
            WaitTimeout: the time ran out.
            RecursiveLoad: the calling loader would wait for itself.
            LoadError: the flight ended without an answer.
            Exception: the loader's own error, an object of this waiter's own.
        """
        self._was_joined = True
        if not self.landed:  # all in one frame, and with few names in it: ten thousand waiters have as many of each
            current = _current.get()
            inside = None if current is None else self._waited_for_by(current)
            waiter: asyncio.Future[str] = self.loop.create_future()
            self._waiters.append(waiter)
            self._present += 1
            if inside is not None:
                inside.begin_wait(waiter, self)
            timer = None if timeout is None else self.loop.call_later(timeout, _wake, waiter, _GAVE_UP)
            try:
                if await waiter is not _LANDED:
                    raise self.without_answer(waiter, timeout)
            finally:
                if self._present:  # an answer has let go of them all
                    self._leave(waiter)
                if inside is not None:
                    inside.end_wait(waiter)
                if timer is not None:
                    timer.cancel()
        if self._failure is not None:
            raise self._failure_of_one()
        value: T = self._value
        return value

    def without_answer(self, waiter: asyncio.Future[str], timeout: float | None) -> StampedeGuardError:
        """Return the error of a *waiter* that was woken before the landing."""
        why = waiter.result()
        if why is _GAVE_UP:
            return WaitTimeout(f"{self.op}: no answer within wait_timeout={timeout:g} s")
        return RecursiveLoad(why)

    def join(self) -> asyncio.Future[str] | None:
        """Return a waiter, for a call that waits for several flights and leaves each; `None` if it has landed."""
        self._was_joined = True
        if self.landed:
            return None
        current = _current.get()
        if current is not None:
            self._waited_for_by(current)
        waiter: asyncio.Future[str] = self.loop.create_future()
        self._waiters.append(waiter)
        self._present += 1
        return waiter

    def leave(self, waiter: asyncio.Future[str]) -> None:
        """Let go of a waiter of `join`."""
        if self._present:
            self._leave(waiter)

    @property
    def has_failed(self) -> bool:
        """Whether it has landed with an error."""
        return self._failure is not None

    def answer(self) -> T:
        """Return what it has landed with, or raise it, for a waiter that has left."""
        if self._failure is not None:
            raise self._failure_of_one()
        value: T = self._value
        return value

    def _waited_for_by(self, current: "ref[Flight[Any]]") -> "Flight[Any] | None":
        """Return the flight whose load is about to wait for this one, if that is still up."""
        if _skips_queue(current):
            self.skip_queue()
        return _still_up(current)

    def begin_wait(self, waiter: asyncio.Future[str], flight: "Flight[Any]") -> None:
        """Note that a call within the load waits for *flight*; wake it if that would be a circle."""
        self.awaits[waiter] = Wait(flight, asyncio.current_task())
        self._look_for_circle(waiter)

    def end_wait(self, waiter: asyncio.Future[str]) -> None:
        """Note that it does no longer."""
        wait = self.awaits.pop(waiter)
        if wait.look is not None:
            wait.look.cancel()

    def _look_for_circle(self, waiter: asyncio.Future[str], pause: float = 0.0) -> None:
        """Wake *waiter* if the load waits for it, and what it waits for waits for the load.

        A task that the load has started need not be waited for, or not yet. So where that is not seen, there is
        another look later.
        """
        wait = self.awaits[waiter]
        flight = wait.flight
        if waiter.done() or not flight.leads_to(self):
            return
        if self.waits_for(wait.task) and flight.leads_to(self, is_certain=True):
            through = "" if flight is self else f", through {self.op}"
            waiter.set_result(f"{flight.op}: its loader waits for itself{through}")
        else:
            shortest, longest = _LOOKS
            later = min(max(2 * pause, shortest), longest)
            wait.look = self.loop.call_later(pause, self._look_for_circle, waiter, later)

    def waits_for(self, task: "asyncio.Task[Any] | None") -> bool:
        """Whether the load is seen to wait for *task*, or is that task."""
        own = self.task if self._eager is None else self._eager
        return task is not None and own is not None and is_awaited_by(task, own)

    def _leave(self, waiter: asyncio.Future[str]) -> None:
        self._present -= 1
        waiter.cancel()  # unless it is done: its place in the list is free
        if len(self._waiters) > 2 * self._present + _FEW:
            self._waiters = [each for each in self._waiters if not each.done()]
        if not self._present and not self.landed and self.on_abandon == "cancel":
            self.abort(LoadCancelled(f"{self.op}: everybody who waited has left"))

    def _failure_of_one(self) -> Exception:
        """Return the error for a waiter that has left the others."""
        failure, is_last = self._failure, not self._present
        assert failure is not None
        if is_last:
            self._failure = None  # or error, traceback, the waiter's frame and the flight would hold each other
        return failure.for_waiter(is_last=is_last)

    def note_waiting_elsewhere(self) -> None:
        """Note that it waits for a load in another process, so that a batch does not wait for it."""
        self.waits_elsewhere = True
        if self.on_settled is not None:
            self.on_settled()

    def skip_queue(self) -> None:
        """Take it, and all flights that it waits for, out of the limiters' queues.

        This is priority inheritance: a load that holds a slot waits for this flight.
        """
        ahead: list[Flight[Any]] = [self]
        while ahead:
            flight = ahead.pop()
            # Another loop's is left alone: its futures are not this thread's to touch.
            if flight.skips_queue or flight.loop is not self.loop:
                continue
            flight.skips_queue = True
            if flight.queue_slot is not None and not flight.queue_slot.done():
                flight.queue_slot.set_result(False)
            ahead += [wait.flight for wait in flight.awaits.values()]

    def start_clock(self, budget: float | None) -> None:
        """End the flight with `LoadTimeout` unless it is over, or the clock stopped, within *budget* seconds.

        The flight ends even if the load ignores its cancellation.
        """
        if budget is not None:
            self._deadlines = self.board.budgets.of(self.loop, budget)
            self._deadlines.add(self)

    def stop_clock(self) -> None:
        """Let the loader's time be over."""
        if self._deadlines is not None:
            self._deadlines.drop(self)
            self._deadlines = None

    def run_out(self, budget: float) -> None:
        """End: the load has taken longer than *budget* seconds."""
        self.abort(LoadTimeout(f"{self.op}: the loader took longer than load_timeout={budget:g} s"))

    def abort(self, error: Exception) -> None:
        """Wake all waiters with *error* and cancel the load.

        Off the board in the same step as the cancellation: a newcomer never joins a dying flight. Nor does another
        process wait for a load that ignores its cancellation.
        """
        self._land(None, error)
        if self.task is not None:
            self.task.cancel()
        if self._direct_read is not None and not self.is_reading:  # else once there is an answer
            self._direct_read.close()

    def fail_closed_loop(self) -> None:
        """Fail a flight whose event loop was closed; no waiter can be woken any more."""
        self._waiters, self._present, self.next_turn = [], 0, None
        self.board.discard(self)
        self._land(None, LoadCancelled(f"{self.op}: its event loop was closed"))

    def disown(self) -> None:
        """Count it no more: it is the parent's, of which this process was forked."""
        self._counters.in_flight -= not self.landed

    def _finish(self, value: T | None, error: Exception | None) -> None:
        """Wake all waiters: the load is over."""
        self.board.discard(self)
        self.is_over = True
        self.skips_queue = False  # tasks that the load has left behind queue like others
        self.task = self._eager = None  # it holds the load's frames, which hold this
        self._land(value, error)
        self.stop_clock()
        if self.is_reading:
            self._end_read()
        if self._direct_read is not None:
            self._direct_read.close()
        if self.on_settled is not None:
            self.on_settled()

    def _land(self, value: T | None, error: Exception | None) -> None:
        if self.landed:
            return
        self.landed = True
        self.board.clear(self, self._ahead)
        self._counters.in_flight -= 1
        waiters, self._waiters = self._waiters, []
        if self._was_joined and not self._present:
            self._counters.abandoned += 1
        if error is None:
            self._value = value
            self._present = 0  # nobody has to say that they leave
        else:
            self._counters.failures += 1
            self._failure = Failure(error)
        for waiter in waiters:
            if not waiter.done():  # its caller was cancelled in this very tick
                waiter.set_result(_LANDED)
        if self.next_turn is not None and not self.next_turn.done():  # cancelled with the flight behind
            self.next_turn.set_result(None)

    def leads_to(self, other: "Flight[Any]", *, is_certain: bool = False) -> bool:
        """Whether the load waits, directly or through others, for *other*; perhaps, or as far as is seen."""
        ahead: list[Flight[Any]] = [self]
        seen = {self}  # loads that share sub-loads have exponentially many paths
        while ahead and other not in seen:
            flight = ahead.pop()
            waits = () if flight.landed else flight.awaits.values()  # what runs on after that is not waited for
            new = {
                wait.flight for wait in waits if not is_certain or wait.task is None or flight.waits_for(wait.task)
            } - seen
            seen |= new
            ahead += new
        return other in seen

    def __repr__(self) -> str:
        return f"<Flight {self.op} {self._present} waiters{', landed' if self.landed else ''}>"


def running_flight() -> Flight[Any] | None:
    """Return the flight whose loader the running code belongs to."""
    current = _current.get()
    return None if current is None else current()


def _still_up(flight: ref[Flight[Any]] | None) -> Flight[Any] | None:
    """Return the flight of the reference, unless it has landed: nobody waits for what runs on after that."""
    referent = None if flight is None else flight()
    return None if referent is None or referent.landed else referent


def _skips_queue(flight: ref[Flight[Any]]) -> bool:
    """Return whether the flight of the reference skips queues; an aborted one still does, while it cleans up."""
    referent = flight()
    return referent is not None and referent.skips_queue


def _stop(error: BaseException) -> NoReturn:
    raise error


def _wake(waiter: asyncio.Future[str], why: str) -> None:
    if not waiter.done():  # its caller was cancelled in this very tick
        waiter.set_result(why)


async def wait_all(flights: Sequence[Flight[Any]], timeout: float | None = None) -> list[Any]:  # noqa: ASYNC109
    """Wait for several as `Flight.wait` does for one; return their answers.

    Raises:
        Exception: the error of the first that failed, in their order; the others are left.
    """
    with _joined(flights) as joined:
        timer = None
        if timeout is not None:
            timer = asyncio.get_running_loop().call_later(timeout, _give_up, tuple(joined))
        try:
            for waiter, flight in joined.items():
                if await waiter is not _LANDED:
                    raise flight.without_answer(waiter, timeout)
                if flight.has_failed:
                    break
        finally:
            if timer is not None:
                timer.cancel()
    return [flight.answer() for flight in flights]


@contextmanager
def _joined(flights: Sequence[Flight[Any]]) -> Generator[dict[Any, Flight[Any]]]:
    """Join those that are up, at once and not one after the other: what nobody has joined may be abandoned."""
    joined: dict[Any, Flight[Any]] = {}
    inside = _still_up(_current.get())
    try:
        for flight in flights:
            waiter = flight.join()
            if waiter is not None:
                joined[waiter] = flight
                if inside is not None:
                    inside.begin_wait(waiter, flight)
                    if waiter.done():
                        raise flight.without_answer(waiter, None)
        yield joined
    finally:
        for waiter, flight in joined.items():
            flight.leave(waiter)
            if inside is not None:
                inside.end_wait(waiter)


def _give_up(waiters: Sequence[asyncio.Future[str]]) -> None:
    for waiter in waiters:
        _wake(waiter, _GAVE_UP)


class Scoreboard:
    """The bare debouncer: concurrent calls with one op share one run of the load. No caches.

    Belongs to the event loop in which it is used; after that loop was closed, another may use it.

    Args:
        load_timeout: Seconds after which a load is ended for everybody; `None` sets no limit.
        wait_timeout: Seconds after which one waiter gives up alone; `None` sets no limit.
        on_abandon: `"finish"` lets a load go on when everybody has left; `"cancel"` cancels it.

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
        self._up: set[Flight[Any]] = set()  # all that still run, the forgotten ones too
        _all_boards.add(self)

    async def debounce(self, op: str, load: Load[T]) -> T:
        """Return what *load* returns, run once for all who ask for *op* meanwhile.

        Cancelling this call disturbs nobody else. The load runs in a task and a clean context of its own.

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
        return await flight.wait(self._policy.wait_timeout)

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

    def launch(  # noqa: PLR0913  # made by the guard alone
        self,
        op: str,
        load: Callable[[Flight[T]], Coroutine[Any, Any, T]],
        counters: Counters,
        on_abandon: OnAbandon,
        *,
        context: Context | None = None,
        tags: Sequence[str] = (),
        is_private: bool = False,
        is_refresh: bool = False,
        after: Flight[Any] | None = None,
        direct_read: DirectRead[T] | None = None,
    ) -> Flight[T]:
        """Start a flight; unless it *is_private*, callers that come meanwhile will join it.

        Its load waits until the flight *after* which it comes has landed.

        Raises:
            RecursiveLoad: the running code belongs to a load of *op*, which would go on to launch itself for ever.
        """
        outer = _current.get()
        if outer is not None:
            self._check_recursion(op, outer)
        counters.executions += 1
        flight: Flight[T] = Flight(self, op, counters, on_abandon, outer)
        flight.is_refresh = is_refresh
        flight.tags = tags
        if after is not None:
            flight.queue_behind(after)
        if not is_private:
            self.flights[op] = flight  # before the start: an eager task may land inside its own creation
        self._up.add(flight)
        flight.start(load, Context() if context is None else context, direct_read)
        return flight

    def _check_recursion(self, op: str, outer: "ref[Flight[Any]]") -> None:
        flight = inside = _still_up(outer)
        number = 0
        while inside is not None and flight is not None:
            if flight.op == op and flight.board is self:
                number += 1
                waits = inside.waits_for(asyncio.current_task()) and flight.leads_to(inside, is_certain=True)
                if waits or number >= _DEPTH:
                    message = f"{op}: its loader calls itself"
                    raise RecursiveLoad(message)
            flight = _still_up(flight.outer)

    def forget(self, op: str) -> None:
        """Let the next caller start afresh; whoever waits now still gets their answer."""
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

        If it was to begin after *ahead*, which is up, that is the current one again: who comes now waits for it, and
        does not load beside it.
        """
        if self.flights.get(flight.op) is flight:
            del self.flights[flight.op]
            if ahead is not None and not ahead.landed:
                self.flights[flight.op] = ahead

    def discard(self, flight: Flight[Any]) -> None:
        """Discard a flight whose task has ended."""
        self._up.discard(flight)

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
        for flight in tuple(self._up):
            flight.abort(LoadCancelled(f"{flight.op}: cancelled at shut-down"))
        if steps := self._next_steps():  # direct reads too: a reply may grant a lease, which other processes wait for
            await asyncio.wait(steps, timeout=_GRACE)
        for flight in self._up:
            if flight.is_reading:
                continue  # it is over once the store replies, or its deadline passes
            logger.warning("the load of %s ignores its cancellation; left behind at shut-down", flight.op)
        self.budgets.close(asyncio.get_running_loop())

    def _next_steps(self) -> list[asyncio.Future[None]]:
        """Return what the flights wait for; one whose task is being made has none."""
        steps: list[asyncio.Future[None]] = []
        for flight in self._up:
            if flight.task is not None:
                steps.append(flight.task)
            elif flight.is_reading:
                steps.append(flight.direct_read_done())
        return steps

    def disown(self) -> None:
        """Forget flights that will never land here: this process was forked."""
        self.flights.clear()
        for flight in self._up:
            flight.disown()
        _left_behind.append(self._up)
        self._up = set()

    def stats(self) -> Stats:
        """Return a snapshot of what was called, shared and run."""
        return snapshot(self._counters)

    def __repr__(self) -> str:
        return f"<Scoreboard {len(self.flights)} flights>"


_all_boards: "WeakSet[Scoreboard]" = WeakSet()
_left_behind: list[set[Flight[Any]]] = []  # kept: the end of their tasks would run clean-up that is the parent's


def _disown_all() -> None:
    for board in _all_boards:
        board.disown()


if hasattr(os, "register_at_fork"):  # pragma: no branch  # not on Windows
    os.register_at_fork(after_in_child=_disown_all)
