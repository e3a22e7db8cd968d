"""The scoreboard: at most one current flight per op.

Every waiter sleeps on a future of its own. `asyncio.shield(task)` would be shorter, but each
cancelled waiter then rescans the task's callback list: 16,000 clients that hang up at once
would stall the event loop for two seconds, not for a tenth of one. And the future carries no
result, only the wake-up: a result nobody came to fetch is nothing that asyncio could complain of.

After *singleflight* (golang.org/x/sync) and the debouncer of "Avoiding cache stampede at DoorDash".
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any, Generic, TypeVar, cast, final
from weakref import ref

from ._failure import Failure
from ._policy import Duration, OnAbandon, Policy
from ._stats import Counters, Stats, snapshot
from .errors import ConfigurationError, LoadCancelled, LoadTimeout, RecursiveLoad, WaitTimeout, WrongLoop

T = TypeVar("T")
Load = Callable[[], Awaitable[T]]

logger = logging.getLogger("stampede_guard")

_LANDED, _GAVE_UP = "landed", "gave up"
_GRACE = 1.0  # seconds that a cancelled load gets for its clean-up when its scoreboard is drained

# The flight whose loader the running code belongs to; weak, since connections and tasks that a loader opens keep its
# context, and would keep the flight and its answer with it.
_current: ContextVar["ref[Flight[Any]] | None"] = ContextVar("stampede_guard_flight", default=None)


@final
class Flight(Generic[T]):
    """One running load and everyone waiting for it."""

    __slots__ = (
        "__weakref__",
        "_counters",
        "_failure",
        "_value",
        "_waiters",
        "_was_joined",
        "awaits",
        "board",
        "is_refresh",
        "is_urgent",
        "landed",
        "loop",
        "on_abandon",
        "op",
        "outer",
        "place",
        "tags",
        "task",
    )

    def __init__(self, board: "Scoreboard", op: str, counters: Counters, on_abandon: OnAbandon) -> None:
        self.op = op
        self.on_abandon: OnAbandon = on_abandon
        self.is_refresh = False
        self.tags: Sequence[str] = ()
        self.landed = False
        self.board = board
        self._counters = counters
        self.loop = asyncio.get_running_loop()
        self.task: asyncio.Task[T] | None = None
        self._waiters: set[asyncio.Future[str]] = set()
        self._was_joined = False
        self.outer = _current.get()  # the flight whose loader launched this one
        self.awaits: dict[object, Flight[Any]] = {}  # what this one's loader waits for, by the calls that wait
        self.place: asyncio.Future[bool] | None = None  # in a limiter's queue
        self.is_urgent = _is_urgent(self.outer)  # it holds a slot, or one that does waits for it: it may not queue
        self._value: T | None = None
        self._failure: Failure | None = None

    def take_off(self, load: Coroutine[Any, Any, T], context: Context) -> None:
        """Run *load* in a task of its own, so that it belongs to no caller."""
        self._counters.in_flight += 1
        context.run(_current.set, ref(self))
        try:
            self.task = self.loop.create_task(load, name=f"load {self.op}", context=context)
        except BaseException as error:  # a task factory that refuses, or an eager load that stops the loop
            load.close()
            self.board.retire(self)
            self._land(None, LoadCancelled(f"{self.op}: the load was ended by {type(error).__name__}"))
            raise
        if self.task.done():  # an eager task that never had to wait
            self._finish(self.task)
        else:
            self.task.add_done_callback(self._finish)

    async def wait(self, timeout: float | None = None) -> T:  # noqa: ASYNC109  # one waiter's, not the load's
        """Wait for the answer, at most *timeout* seconds; leaving disturbs nobody else.

        Raises:
            WaitTimeout: the time ran out.
            RecursiveLoad: the calling loader would wait for itself.
            LoadError: the flight ended without an answer.
            Exception: the loader's own error, an object of this waiter's own.
        """
        self._was_joined = True
        if not self.landed:
            inside = _still_up(_current.get())
            if inside is None:
                await self._sleep(timeout)
            else:
                with self._edge_from(inside):
                    await self._sleep(timeout)
        if self._failure is None:
            return cast("T", self._value)
        failure, is_last = self._failure, not self._waiters
        if is_last:
            self._failure = None  # or error, traceback, this frame and the flight would hold each other
        try:
            raise failure.for_waiter(is_last=is_last)
        finally:
            del failure

    async def _sleep(self, timeout: float | None) -> None:  # noqa: ASYNC109  # as above
        if _is_urgent(_current.get()):
            self.urge()
        waiter: asyncio.Future[str] = self.loop.create_future()
        self._waiters.add(waiter)
        timer = None if timeout is None else self.loop.call_later(timeout, _wake, waiter, _GAVE_UP)
        try:
            why = await waiter
        finally:
            self._waiters.discard(waiter)
            if timer is not None:
                timer.cancel()
            if not self._waiters and not self.landed and self.on_abandon == "cancel":
                self.abort(LoadCancelled(f"{self.op}: everybody who waited has left"))
        if why is _GAVE_UP:
            message = f"{self.op}: no answer within wait_timeout={timeout:g} s"
            raise WaitTimeout(message)

    def urge(self) -> None:
        """Let it, and whatever it waits for, queue no longer: somebody with a slot for loads waits for it."""
        ahead: list[Flight[Any]] = [self]
        while ahead:
            flight = ahead.pop()
            # Another loop's is left alone: its futures are not this thread's to touch.
            if flight.is_urgent or flight.loop is not self.loop:
                continue
            flight.is_urgent = True
            if flight.place is not None and not flight.place.done():
                flight.place.set_result(False)
            ahead += flight.awaits.values()

    @contextmanager
    def within(self, timeout: float | None) -> Generator[None]:
        """End the flight with `LoadTimeout` when the block takes longer than *timeout* seconds.

        The flight ends even if the load ignores its cancellation.
        """
        if timeout is None:
            yield
            return
        error = LoadTimeout(f"{self.op}: the loader took longer than load_timeout={timeout:g} s")
        timer = self.loop.call_later(timeout, self.abort, error)
        try:
            yield
        finally:
            timer.cancel()

    def abort(self, error: Exception) -> None:
        """Settle everybody with *error* and cancel the load.

        Off the board in the same step as the cancellation: a newcomer never joins a dying flight.
        """
        self._land(None, error)
        if self.task is not None:
            self.task.cancel()

    def strand(self) -> None:
        """Write off a flight whose event loop was closed over it: nobody is left to be told."""
        self._waiters.clear()
        self.board.retire(self)
        self._land(None, LoadCancelled(f"{self.op}: its event loop was closed"))

    def _finish(self, task: asyncio.Task[T]) -> None:
        """Settle everybody, whichever way the load ended."""
        self.board.retire(self)
        self.is_urgent = False  # what the load has left behind queues like everybody
        self.task = None  # it holds the error, whose traceback leads back here
        if task.cancelled():
            self._land(None, LoadCancelled(f"{self.op}: the load was cancelled"))
        elif (error := task.exception()) is None:
            self._land(task.result(), None)
        elif isinstance(error, Exception):
            self._land(None, error)
        else:  # KeyboardInterrupt and its like stop the loop; they are not the waiters' errors
            self._land(None, LoadCancelled(f"{self.op}: the load was ended by {type(error).__name__}"))

    def _land(self, value: T | None, error: Exception | None) -> None:
        if self.landed:
            return
        self.landed = True
        self.board.clear(self)
        self._counters.in_flight -= 1
        self._counters.abandoned += self._was_joined and not self._waiters
        self._value = value
        if error is not None:
            self._counters.failures += 1
            self._failure = Failure(error)
        for waiter in self._waiters:
            _wake(waiter, _LANDED)

    @contextmanager
    def _edge_from(self, inside: "Flight[Any]") -> Generator[None]:
        """Note that the load of *inside* waits for this flight, unless that would close a circle."""
        if self._leads_to(inside):
            message = f"{self.op}: its loader waits for itself" + ("" if inside is self else f", through {inside.op}")
            raise RecursiveLoad(message)
        call = object()
        inside.awaits[call] = self
        try:
            yield
        finally:
            del inside.awaits[call]

    def _leads_to(self, other: "Flight[Any]") -> bool:
        """Whether the load waits, directly or through others, for *other*."""
        ahead: list[Flight[Any]] = [self]
        seen = {self}  # loads that share sub-loads have exponentially many paths
        while ahead and other not in seen:
            new = set(ahead.pop().awaits.values()) - seen
            seen |= new
            ahead += new
        return other in seen

    def __repr__(self) -> str:
        return f"<Flight {self.op} {len(self._waiters)} waiters{', landed' if self.landed else ''}>"


def _still_up(flight: ref[Flight[Any]] | None) -> Flight[Any] | None:
    """Return the flight of the reference, unless it has landed: nobody waits for what runs on after that."""
    referent = None if flight is None else flight()
    return None if referent is None or referent.landed else referent


def _is_urgent(flight: ref[Flight[Any]] | None) -> bool:
    """Return whether the flight of the reference is urgent; one that was aborted still is, while it cleans up."""
    referent = None if flight is None else flight()
    return referent is not None and referent.is_urgent


def _wake(waiter: asyncio.Future[str], why: str) -> None:
    if not waiter.done():  # its caller was cancelled in this very tick
        waiter.set_result(why)


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
        self._policy = Policy.of({"load_timeout": load_timeout, "wait_timeout": wait_timeout, "on_abandon": on_abandon})
        self._counters = Counters()
        self._flights: dict[str, Flight[Any]] = {}
        self._up: set[Flight[Any]] = set()  # all that still run, the forgotten ones too

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
        flight = self.current(op)
        if flight is not None:
            self._counters.joins += 1
        else:
            flight = self.launch(op, lambda flight: self._run(flight, load), self._counters, self._policy.on_abandon)
        answer: T = await flight.wait(self._policy.wait_timeout)
        return answer

    async def _run(self, flight: Flight[T], load: Load[T]) -> T:
        with flight.within(self._policy.load_timeout):
            self._counters.loads += 1
            return await load()

    def current(self, op: str) -> Flight[Any] | None:
        """Return the current flight of *op*, or `None`.

        Not async, nor is `launch`: an await between the two would let two callers launch.

        Raises:
            WrongLoop: the flight is another running loop's.
        """
        flight = self._flights.get(op)
        if flight is None:
            return None
        if flight.loop is not asyncio.get_running_loop():
            if flight.loop.is_closed():
                flight.strand()
                return None
            message = f"{op}: another event loop is loading this; give each loop a Scoreboard, or use a Guard"
            raise WrongLoop(message)
        return flight

    def launch(  # made by the guard alone
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
    ) -> Flight[T]:
        """Start a flight; unless it *is_private*, callers that come meanwhile will join it.

        Raises:
            RecursiveLoad: the running code belongs to a load of *op*, which would go on to launch itself for ever.
        """
        self._check_recursion(op)
        counters.executions += 1
        flight: Flight[T] = Flight(self, op, counters, on_abandon)
        flight.is_refresh = is_refresh
        flight.tags = tags
        if not is_private:
            self._flights[op] = flight  # before take-off: an eager task may land inside its own creation
        self._up.add(flight)
        flight.take_off(load(flight), Context() if context is None else context)
        return flight

    def _check_recursion(self, op: str) -> None:
        flight = _still_up(_current.get())
        while flight is not None:
            if flight.op == op and flight.board is self:
                message = f"{op}: its loader calls itself"
                raise RecursiveLoad(message)
            flight = _still_up(flight.outer)

    def forget(self, op: str) -> None:
        """Let the next caller start afresh; whoever waits now still gets their answer."""
        self._flights.pop(op, None)

    def forget_tagged(self, tag: str) -> None:
        """Do so for every op whose flight has *tag*."""
        for flight in tuple(self._flights.values()):
            if tag in flight.tags:
                self.clear(flight)

    def forget_all(self) -> None:
        """Let every op's next caller start afresh."""
        self._flights.clear()

    def clear(self, flight: Flight[Any]) -> None:
        """Take *flight* off the board, if it is the current one: a newer one may have its place."""
        if self._flights.get(flight.op) is flight:
            del self._flights[flight.op]

    def retire(self, flight: Flight[Any]) -> None:
        """Let go of a flight whose task has ended."""
        self._up.discard(flight)

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109  # what is left then is no error
        """Wait at most *timeout* seconds for all flights to land, those launched meanwhile included."""
        deadline = asyncio.get_running_loop().time() + timeout
        while (tasks := self._tasks()) and (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(tasks, timeout=left)

    async def ground(self) -> None:
        """Cancel all flights; their waiters get `LoadCancelled` at once, their loads a second to clean up."""
        for flight in tuple(self._up):
            flight.abort(LoadCancelled(f"{flight.op}: cancelled at shut-down"))
        if tasks := self._tasks():
            await asyncio.wait(tasks, timeout=_GRACE)
        for flight in self._up:
            logger.warning("the load of %s ignores its cancellation; left behind at shut-down", flight.op)

    def _tasks(self) -> list[asyncio.Task[Any]]:
        return [flight.task for flight in self._up if flight.task is not None]

    def stats(self) -> Stats:
        """Return a snapshot of what was called, shared and run."""
        return snapshot(self._counters)

    def __repr__(self) -> str:
        return f"<Scoreboard {len(self._flights)} flights>"
