"""What a guard keeps for each event loop: flights, memory, connections.

Futures and connections belong to the loop that made them, and `cachetools` is not thread-safe. So
nothing is shared between loops, except that an invalidation reaches all of them. A loop's state belongs to
the loop, and dies with it.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from contextvars import Context
from functools import partial
from itertools import count
from typing import Any, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakSet, ref

from ._bus.backplane import Backplane
from ._bus.tracking import Tracking
from ._flights.flight import Flight
from ._flights.limiter import Limiters
from ._flights.pauses import Pauses
from ._flights.scoreboard import Scoreboard
from ._l2.sender import Confirmation
from ._l2.tier import Tier
from ._memory.epochs import Epochs
from ._memory.l1 import Memory
from ._operations.limits import LoadLimits
from ._operations.operation import Operation
from ._operations.size_limits import SizeLimits
from ._stats import MemoryStats
from ._tokens import new_token
from .errors import ConfigurationError, GuardClosed
from .stores import KeysChanged, LeasingStore, Store

_NEWS = 65_536  # changes that a loop which does not run is told of one by one
_BUS_TIMEOUT = 1.0  # seconds that opening a guard waits for its bus
_ATTRIBUTE = "_stampede_guard_states"  # of event loops


class Change(NamedTuple):
    """What each event loop of a guard has to do. Equal ones need be made but once.

    Attributes:
        kind: Whether to forget an op, to let it be old, or to forget what has a tag, everything, or what is of
            operations that were defined anew.
        subject: The op, or the tag.
        version: The lowest version that is acceptable from now on.
        is_stored: Whether the loop's store has to be told too: each loop orders its own writes.
    """

    kind: Literal["op", "old", "tag", "all", "replaced"]
    subject: str = ""
    version: int | None = None
    is_stored: bool = False


class LoopState:
    """One event loop's part of a guard; the listener of its backplane.

    Attributes:
        loop: Weak reference to the loop.
        board: Its flights.
        memory: Its L1.
        tier: Its L2, if there is one.
        backplane: What it hears of other processes, if the store has a bus.
        tracking: What it hears of writes past the library, if the store was asked to tell.
        limits: How many loads may run at once.
        pauses: Of ops whose loads have failed.
        chores: Tasks that run until the guard is left, by name.
        clock: Monotonic seconds.
        epochs: The guard's.
        depth: How often the guard was entered here.
        news: Changes that other threads have left word of, and that are not made yet.
        is_told: Whether the loop will make them.
    """

    __slots__ = (
        "__weakref__",
        "backplane",
        "board",
        "chores",
        "clock",
        "depth",
        "epochs",
        "is_told",
        "limits",
        "loop",
        "memory",
        "news",
        "pauses",
        "tier",
        "tracking",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        memory: Memory,
        tier: Tier | None,
        epochs: Epochs,
        limits: Limiters,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loop = ref(loop)
        self.board = Scoreboard()
        self.memory = memory
        self.tier = tier
        self.backplane: Backplane | None = None
        self.tracking: Tracking | None = None
        if tier is not None and "tracking" in tier.capabilities:
            self.tracking = Tracking(tier, memory, self.on_invalidated, self.on_cleared)
        self.limits = limits
        self.clock = clock
        self.pauses = Pauses(clock)
        self.chores: dict[str, asyncio.Task[None]] = {}
        self.depth = 0
        self.news: dict[Change, None] = {}
        self.is_told = False
        self.epochs = epochs
        # Not a method: the memory must not keep the state alive.
        memory.on_trust_lost = partial(_doubt_flights, epochs, self.board)

    def forget(self, op: str) -> None:
        """Drop *op* from memory, and let its next caller start afresh."""
        self.memory.drop(op)
        self.board.forget(op)
        self.pauses.forget(op)

    def soften(self, op: str) -> None:
        """Let *op* be stale from now on, and its next caller start afresh."""
        self.memory.soften(op)
        self.board.forget(op)
        self.pauses.forget(op)

    def forget_tagged(self, tag: str) -> None:
        """Do so for every op that has *tag*."""
        self.memory.drop_tagged(tag)
        self.board.forget_tagged(tag)

    def forget_all(self) -> None:
        """Do so for every op."""
        self.memory.clear()
        self.board.forget_all()
        self.pauses.forget_all()

    def make(self, change: Change) -> Confirmation | None:
        """Make *change*; return what tells when the store has confirmed it, if that is told."""
        if change.kind == "op":
            self.forget(change.subject)
        elif change.kind == "old":
            self.soften(change.subject)
        elif change.kind == "tag":
            self.forget_tagged(change.subject)
        elif change.kind == "all":
            self.forget_all()
        else:
            self.board.forget_replaced()
        tier = self.tier
        if tier is not None and change.kind in ("op", "old"):  # perhaps it was refreshed, and a replica lags
            tier.recent.note(tier.key(change.subject))
        if tier is None or not change.is_stored:
            return None
        if change.kind in ("op", "old"):
            is_soft = change.kind == "old"
            return tier.send(tier.invalidation(change.subject, change.version, is_soft=is_soft))
        return tier.send(tier.tag_invalidation(change.subject))

    def on_invalidated(self, op: str) -> None:
        """Forget *op*, which another process invalidated; loads of it that are under way are not stored."""
        self.epochs.bump(op)
        self.forget(op)

    def on_softened(self, op: str) -> None:
        """Let *op* be old, as another process has made it; loads of it that are under way are not stored."""
        self.epochs.bump(op)
        self.soften(op)

    def on_tag_invalidated(self, tag: str) -> None:
        """Do so for every op that has *tag*."""
        self.epochs.bump_tag(tag)
        self.forget_tagged(tag)

    def on_cleared(self) -> None:
        """Do so for every op, as everything was invalidated, or may have been."""
        self.epochs.bump_all()
        self.forget_all()

    def on_keys_changed(self, changed: KeysChanged) -> None:
        """Check the entries of keys that some client has written or deleted."""
        if self.tracking is not None:
            self.tracking.on_keys_changed(changed)

    def on_alive(self, trusted_until: float) -> None:
        """Trust the bus until that instant."""
        self.memory.trust(trusted_until)

    def on_lost(self) -> None:
        """The bus connection is lost: forget what L1 holds."""
        self.memory.distrust()
        _doubt_flights(self.epochs, self.board)

    def joinable(self, op: str, *, is_refresh: bool = False, replaces: bool = False) -> Flight[Any] | None:
        """Return the flight of *op* that a new call may join; a refresh only one whose loader is still to be called.

        One that *replaces* what is older joins refreshes only; from then on the flight does so too.
        """
        flight = self.board.flights.get(op)
        if is_refresh:
            if flight is None or flight.loader_called:
                return None
            # The load of a call has to be certain, and its failure may not be answered with an old value.
            is_certain = flight.will_load and flight.old_values is None
            if not flight.is_refresh and (replaces or not is_certain):
                return None
            flight.must_load, flight.replaces = True, flight.replaces or replaces
            return flight
        if flight is None or self.memory.may_join(flight.joinable_until):
            return flight
        self.board.forget(op)
        return None

    def overtake(self, op: str) -> Flight[Any] | None:
        """Let no flight of *op* that is up be remembered or joined; return it if it is a refresh."""
        flight = self.board.flights.get(op)
        self.epochs.bump(op)
        self.board.forget(op)
        return None if flight is None or not flight.is_refresh else flight

    def check_able(self, what: str, capability: str) -> None:
        """Check that the store, if there is one, has a capability that *what* asks for.

        Raises:
            ConfigurationError: it has not.
        """
        if self.tier is not None and capability not in self.tier.capabilities:
            message = f"{what}: {capability} need a Redis store; this guard's {self.tier.store.name} has none"
            raise ConfigurationError(message)

    def check_all(self, operations: Iterable[Operation]) -> None:
        """Check that the store can do what *operations* ask for.

        Raises:
            ConfigurationError: it cannot.
        """
        for operation in operations:
            if operation.tags:
                self.check_able(operation.name, "tags")
            if operation.policy.version is not None:
                self.check_able(operation.name, "versions")

    async def open(self, operations: Iterable[Operation]) -> None:
        """Open the store's connections, if this is the first time that the guard is entered here.

        Raises:
            ConfigurationError: the store cannot do what *operations* ask for.
        """
        if self.depth == 1 and self.tier is not None:
            await self.tier.open()
            self.check_all(operations)
            if self.backplane is not None:
                await self.backplane.open(_BUS_TIMEOUT)

    async def aclose(self) -> None:
        """Cancel the flights, and close the connections."""
        for chore in self.chores.values():
            chore.cancel()
        try:
            if self.chores:
                await asyncio.wait(self.chores.values())
            await self.board.cancel_all()
        finally:
            if self.backplane is not None:
                await self.backplane.aclose()
            if self.tier is not None:
                await self.tier.aclose()


def _doubt_flights(epochs: Epochs, board: Scoreboard) -> None:
    """Let loads under way be neither remembered nor joined: no message tells whether they were overtaken."""
    epochs.bump_all()
    board.forget_all()


def store_maker(store: Any, max_bytes: int, **options: Any) -> Callable[[], Store | LeasingStore] | None:
    """Return what makes a store for each event loop, having checked what was given."""
    options = {name: option for name, option in options.items() if option is not None}
    if isinstance(store, str) or type(store).__module__.partition(".")[0] in ("redis", "pydantic", "pydantic_core"):
        from .stores.redis import redis_stores  # noqa: PLC0415  # redis-py is an extra

        return redis_stores(store, max_bytes=max_bytes, **options)
    for name in options:
        message = f"{name}= is for a store given by its URL; give it to the store itself"
        raise ConfigurationError(message)
    if store is not None and not callable(store):
        message = (
            f"the store is a {type(store).__name__}; give a URL as a str, a client of redis.asyncio, or what makes a "
            "store: lambda: AiocacheStore(cache)"
        )
        raise ConfigurationError(message)
    return cast("Callable[[], Store | LeasingStore] | None", store)


def make_loop_state(  # noqa: PLR0917  # a guard's options
    make_store: Callable[[], Store | LeasingStore] | None,
    epochs: Epochs,
    namespace: str,
    sizes: SizeLimits,
    limits: LoadLimits,
    clock: Callable[[], float],
) -> LoopState:
    """Return the running loop's part of a guard with these options; nothing is connected yet.

    Raises:
        ConfigurationError: the store does not read values as long as `max_bytes`.
    """
    instance = new_token()  # one for each: forked workers would take each other's messages for their own
    loop = asyncio.get_running_loop()
    tier, max_bytes = None, sizes.max_bytes
    if make_store is not None:
        store = make_store()
        readable = getattr(store, "max_bytes", max_bytes)  # not every store has a limit of its own
        if readable < max_bytes:
            message = (
                f"max_bytes={max_bytes:,}: the guard's {store.name} reads values of at most {readable:,} bytes; "
                "give the store that max_bytes= too"
            )
            raise ConfigurationError(message)
        tier = Tier(store, namespace, max_bytes, clock, instance)
    limiters = Limiters(limits.max_loads, limits.max_queued, limits.queue_timeout)
    memory = Memory(sizes.maxsize, clock, loop, sizes.max_size)
    state = LoopState(loop, memory, tier, epochs, limiters, clock=clock)
    if tier is not None and "backplane" in tier.capabilities:
        state.backplane = Backplane(tier, instance, state, clock)
    return state


def _no_state() -> None:
    """Stand for a weak reference to nothing."""


class LoopStates:
    """The states of one guard.

    Nothing here takes a lock: a signal handler that comes in the midst of it may call any of it again, and so may a
    child that was forked there. Each step on what threads share is one step of the interpreter.

    Args:
        make: Makes the running loop's.
        needs_entering: Whether a loop has one only after the guard was entered: it has a store.
        is_measured: Whether the bytes of their memories are known.
    """

    def __init__(self, make: Callable[[], LoopState], *, needs_entering: bool, is_measured: bool = False) -> None:
        self._make = make
        self._is_measured = is_measured
        self.needs_entering = needs_entering
        self._open: dict[int, ref[LoopState]] = {}
        self._numbers = count()
        self._last: Callable[[], LoopState | None] = _no_state  # weak: a state has to die with its loop
        _all_states.add(self)

    def running(self) -> LoopState:
        """Return the running loop's state.

        Raises:
            GuardClosed: the guard has to be entered first.
        """
        state = self.here()
        if state is None and self.needs_entering:
            message = (
                "this guard has a store, and is not open in the running event loop. Open it around its use:\n"
                "    async with guard:\n"
                "        ..."
            )
            raise GuardClosed(message)
        return self.get_or_make() if state is None else state

    def get_or_make(self) -> LoopState:
        """Return the running loop's state, a new one if it has none."""
        state = self.here()
        if state is None:
            state = self._make()
            self.add(state)
        return state

    def here(self) -> LoopState | None:
        """Return the running loop's state, if it has one.

        Raises:
            RuntimeError: no event loop is running.
        """
        loop = asyncio.get_running_loop()
        last = self._last()
        if last is not None and last.loop() is loop:
            return last
        state = _states_of(loop).get(self)
        if state is not None:
            self._last = ref(state)
        return state

    def add(self, state: LoopState) -> None:
        """Make *state* the running loop's."""
        known, number = self._open, next(self._numbers)
        known[number] = ref(state, lambda _: known.pop(number, None))
        _states_of(asyncio.get_running_loop())[self] = state
        self._last = ref(state)

    def remove(self, state: LoopState) -> bool:
        """Let go of *state*, unless the running loop has another by now; return whether it was let go."""
        states = _states_of(asyncio.get_running_loop())
        if states.get(self) is not state:
            return False
        del states[self]
        self._last = _no_state
        return True

    async def leave(self, state: LoopState, drain_timeout: float) -> None:
        """Leave the guard once: the last time, let flights land for *drain_timeout* seconds at most, and close."""
        state.depth -= 1
        if state.depth:
            return
        try:
            await state.board.drain(drain_timeout)
        finally:  # even if cancelled: no load runs on without its connections
            if not state.depth and self.remove(state):  # the guard was not entered again meanwhile
                # The caller may still hold it; it receives no invalidations, so no cache of arguments may use it.
                state.memory.clear()
                await state.aclose()

    def tell(self, change: Change) -> Confirmation | None:
        """Make *change* to the running loop's state now, and return what comes of it; to the others', when they run."""
        running = self.tell_others(change)
        state = None if running is None else self.here()
        return None if state is None else state.make(change)

    def tell_others(self, change: Change) -> asyncio.AbstractEventLoop | None:
        """Make *change* to the states of all loops but the running one, when they run; return the running one.

        Equal changes that a loop has not made yet are made once. One that has not run for so long that there are too
        many forgets everything instead.
        """
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        for state in self._living():
            loop = state.loop()
            if loop is not None and loop is not running and not loop.is_closed():
                self._leave_word(loop, state, change)
        return running

    def _living(self) -> list[LoopState]:
        return [state for known in self._open.copy().values() if (state := known()) is not None]

    def memory_stats(self) -> MemoryStats:
        """Return what the memories of all loops have."""
        stats = MemoryStats(is_measured=self._is_measured)
        for state in self._living():
            for share in state.memory.shares():
                stats.add(*share)
        return stats

    def _leave_word(self, loop: asyncio.AbstractEventLoop, state: LoopState, change: Change) -> None:
        news = state.news
        if len(news) >= _NEWS:
            is_stored = any(each.is_stored for each in (*news.copy(), change))
            news.clear()
            change = Change("all", is_stored=is_stored)
        news[change] = None  # before the look: else the loop could catch up between the two, and know nothing of it
        if state.is_told:
            return
        state.is_told = True
        try:
            loop.call_soon_threadsafe(self._catch_up, state, context=Context())
        except RuntimeError:  # closed since
            return
        except BaseException:  # a signal handler's: the next change has to try again
            state.is_told = False
            raise

    def _catch_up(self, state: LoopState) -> None:
        """Make the changes that came while the loop did something else."""
        state.is_told = False  # first: what comes from now on brings us here again
        is_open = self.here() is state
        while state.news:
            change, _ = state.news.popitem()
            if is_open:
                state.make(change)

    def disown(self) -> None:
        """Forget the states of loops that will never run here: this process was forked."""
        for state in self._living():
            state.memory.release_argument_caches()
        self._open.clear()
        self._last = _no_state


_all_states: "WeakSet[LoopStates]" = WeakSet()


def _states_of(loop: asyncio.AbstractEventLoop) -> "WeakKeyDictionary[LoopStates, LoopState]":
    """Return the states that *loop* has, of all guards.

    They are the loop's own: a guard that held them would hold their flights, whose tasks hold the loop. So a loop
    that is closed with a load up would never be let go of.
    """
    states: WeakKeyDictionary[LoopStates, LoopState] | None = getattr(loop, _ATTRIBUTE, None)
    if states is None:
        states = WeakKeyDictionary()
        setattr(loop, _ATTRIBUTE, states)
    return states


def _disown_all() -> None:
    for states in _all_states:
        states.disown()


if hasattr(os, "register_at_fork"):  # pragma: no branch  # not on Windows
    os.register_at_fork(after_in_child=_disown_all)
