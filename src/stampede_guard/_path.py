"""The data path: what one call goes through, top to bottom.

```
call   ─ 1 look up L1 ─ 2 join a flight, or launch one ─┐
flight ─ 3 read L2, or acquire the lease ─ 4 wait for another process ─ 5 load ─ 6 fill L2 ─ 7 put L1 ─ land
```
A decorated call enters at `lookup_or_launch`. Steps 1 and 2 are synchronous. A flight runs the others once, and belongs
to no caller. An operation without L2 has neither 3, 4 nor 6.

Most flights that have L2 find their value there. That needs no task: the launch sends the read, and its reply lands the
flight. A task is made for what may wait more than once: another process, a slot, the loader.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf
from random import random
from typing import Any, Literal, TypeVar, cast
from weakref import ref
from zlib import crc32

from ._bus.backplane import Backplane
from ._flights.flight import Flight
from ._flights.handover import first_to_succeed
from ._flights.pauses import FIRST_PAUSE
from ._flights.waiting import check_room, wait_all, wait_one
from ._freshness import (
    Freshness,
    OldValue,
    answer_in_pause,
    early_margin,
    last_in_memory,
    old_in_store,
    origin_in_memory,
    origin_of,
)
from ._keys.spec import MAX_OP_LENGTH
from ._l2.lease import Found, Lease, LeaseLapsed
from ._l2.tier import Tier
from ._loops import Change, LoopState, LoopStates
from ._memory.answer import Answer, Previous
from ._memory.entry import Entry
from ._memory.epochs import Generation
from ._memory.l1 import UNTRUSTED_TTL
from ._operations.operation import IsolatedValue, Operation, for_caller
from ._speed.forms import ArgumentCache, Slot
from ._stats import Counters
from .errors import Overloaded, RecentFailure, invalidation_pending
from .stores import LoadFailure

T = TypeVar("T")
FindT = TypeVar("FindT", bound=Callable[..., Any])
LoadT = TypeVar("LoadT", bound=Callable[[], Awaitable[Any]])

_POLLS = (0.025, 0.25)  # seconds between reads while another process loads, first and longest: a wake-up may be lost
_ASKS = 4  # times that a flight asks for the lease, should it lapse before the load begins
_WAIT = 30.0  # seconds that other processes' loads are waited for when no load_timeout says how long a load may take


@dataclass(slots=True, eq=False)
class DataPath:
    """Leads the calls of one guard to their answers."""

    _states: LoopStates
    enabled: bool  # flights are shared
    rollout: float  # fraction of all ops, always the same ones, whose flights are shared

    def make_lookup(
        self,
        operation: Operation,
        function: Callable[..., Awaitable[Any]],
        build_tags: Callable[..., Sequence[str]] | None,
        answers: ArgumentCache | None = None,
        flights: ArgumentCache | None = None,
        *,
        build_partition: Callable[..., str] | None = None,
    ) -> Callable[[str, Any, Any, Any], Any]:
        """Return steps 1 and 2 of each call of *function*: a closure, made once for each operation.

        It takes the op, the arguments as a tuple and a dict, and those under which *answers* may know the answer, and
        *flights* the flight, from now on. It returns what L1 keeps, fresh or old, or a flight. It is not async, which
        saves one coroutine frame for each waiter.
        """
        here, running, counters = self._states.here, self._states.running, operation.counters
        may_answer_old = operation.may_answer_old
        find: Any = self.old_or_flight if may_answer_old else self.join_or_launch
        launch: Any = find if may_answer_old else self.launch
        if build_partition is not None:
            find = partial(find, build_partition=build_partition)
            launch = partial(launch, build_partition=build_partition)

        def lookup_or_launch(op: str, args: Any, kwargs: Any, shown: Any) -> Any:
            state = here() or running()
            slot = state.memory.get(op)  # 1
            if slot is not None:
                counters.l1_hits += 1
                if answers is not None and len(op) < MAX_OP_LENGTH and slot.value.__class__ is not IsolatedValue:
                    state.memory.note_in(answers, shown, slot)
                return slot.value
            flight = state.board.flights.get(op)  # 2
            if (
                not self.enabled
                or self.rollout < 1
                or (may_answer_old and flight is not None and flight.interim is not None)
            ):
                return find(state, operation, op, function, args, kwargs, build_tags)
            if flight is None or not state.memory.may_join(flight.joinable_until):
                return launch(state, operation, op, function, args, kwargs, build_tags)
            if not flight.is_noted and flights is not None and len(op) < MAX_OP_LENGTH:
                flight.is_noted = True
                state.memory.note_in(flights, shown, Slot(ref(flight), flight.joinable_until))
            counters.joins += 1
            return flight

        return bounded(lookup_or_launch, operation)

    def make_rejoin(self, operation: Operation) -> "Callable[[ref[Flight[Any]]], Flight[Any] | None]":
        """Return what tells whether a call may join a flight that calls with the same arguments have joined."""
        counters, may_answer_old = operation.counters, operation.may_answer_old

        def rejoin(known: "ref[Flight[Any]]") -> Flight[Any] | None:
            flight = known()
            if (
                flight is None
                or (may_answer_old and flight.interim is not None)
                or not self.enabled
                or self.rollout < 1
                or flight.board.flights.get(flight.op) is not flight
            ):
                return None
            counters.joins += 1
            return flight

        return bounded(rejoin, operation)

    def peek(self, op: str, operation: Operation | None = None) -> Entry[Any] | None:
        """Return the fresh entry of *op*, with the value that a caller of *operation* gets; count nothing."""
        slot = self._states.running().memory.get(op)
        if slot is None:
            return None
        value = for_caller(slot.value) if operation is None else operation.for_caller(slot.value)
        return Entry(value, slot.fresh_until)

    async def answer(
        self,
        operation: Operation,
        op: str,
        load: Callable[[], Awaitable[T]],
        build_tags: Callable[[], Sequence[str]] | None = None,
        build_partition: Callable[[], str] | None = None,
    ) -> Answer[T]:
        """Return what `get` returns, with what is known of its freshness."""
        state = self._states.running()
        slot = state.memory.get(op)  # 1
        if slot is not None:
            operation.counters.l1_hits += 1
            return origin_in_memory(state, op, slot).answer(state, operation, op, slot.value)
        find = bounded(self._find, operation)
        found = find(state, operation, op, load, (), {}, build_tags, build_partition=build_partition)  # 2
        if isinstance(found, OldValue):
            return found.origin.answer(state, operation, op, found.kept)
        kept = await wait_one(found, operation.policy.wait_timeout)
        return origin_of(state, op, found, kept).answer(state, operation, op, kept)

    async def get(
        self,
        operation: Operation,
        op: str,
        load: Callable[[], Awaitable[T]],
        build_tags: Callable[[], Sequence[str]] | None = None,
        partition: str | None = None,
    ) -> T:
        """Return the answer for *op*, of a function that is not decorated."""
        place = None if partition is None else lambda: partition
        answer = self.make_lookup(operation, load, build_tags, build_partition=place)(op, (), {}, ())
        if isinstance(answer, Flight):
            answer = await wait_one(answer, operation.policy.wait_timeout)
        value: T = operation.for_caller(answer)
        return value

    async def get_many(  # noqa: PLR0917  # made for `coalesce_many`
        self,
        operation: Operation,
        ops: Sequence[str],
        make_load: Callable[[int], LoadT],
        on_launch: Callable[[LoadT, Flight[Any]], None],
        build_tags: Callable[[int], Sequence[str]],
        shape: Callable[[list[Any]], T],
        *,
        is_refresh: bool = False,
        replaces: bool = False,
    ) -> T:
        """Return what *shape* makes of the answers for *ops*, each as `get` or `refresh` would give it.

        All flights are launched before anything is awaited, so that they can load together. *make_load* and
        *build_tags* take a position in *ops*; *on_launch* is called with the load and the flight of each that is new.
        """
        state = self._states.running()
        answers: list[Any] = [None] * len(ops)
        flights: dict[int, Flight[Any]] = {}
        find: Any = self.old_or_flight
        if is_refresh or not operation.may_answer_old:
            find = partial(self.join_or_launch, is_refresh=is_refresh, replaces=replaces)
        find = bounded(find, operation)
        for position, op in enumerate(ops):
            slot = None if is_refresh else state.memory.get(op)  # 1
            if slot is not None:
                operation.counters.l1_hits += 1
                answers[position] = operation.for_caller(slot.value)
                continue
            load, tags = make_load(position), partial(build_tags, position)
            found = find(state, operation, op, load, (), {}, tags, on_launch=partial(on_launch, load))  # 2
            if found.__class__ is Flight:
                flights[position] = found
            else:
                answers[position] = operation.for_caller(found)
        if flights:
            landed = await wait_all(tuple(flights.values()), operation.policy.wait_timeout, takes_old=not is_refresh)
            for position, kept in zip(flights, landed, strict=True):
                answers[position] = operation.for_caller(kept)
        shaped = shape(answers)
        if replaces:
            await _check_replaced({ops[position]: flight for position, flight in flights.items()}, shaped)
        return shaped

    def take_stored(self, operation: Operation, op: str, tags: Sequence[str]) -> Flight[Any]:
        """Launch a flight that puts what L2 has of *op* into L1, and loads nothing.

        It lands with the value in a tuple of one, or with `None`. No caller joins it.
        """
        state = self._states.running()
        epoch, generation = state.epochs.current(op, tags), operation.lineage.generation
        lease = _make_lease(state, operation, op, tags)
        no_load: tuple[Any, Any, Any] = asyncio.sleep, (0,), {}
        is_shared = False
        steps = FlightLoad(self._states, state, operation, *no_load, lease, epoch, generation, is_shared, None, None)
        return state.board.launch(op, steps.take, operation.counters, "finish", tags=tags, is_private=True)

    def begin(
        self,
        operation: Operation,
        ops: Sequence[str],
        make_load: Callable[[int], LoadT],
        on_launch: Callable[[LoadT, Flight[Any]], None],
        build_tags: Callable[[int], Sequence[str]],
    ) -> list[Flight[Any] | Exception | None]:
        """Return for each of *ops* its flight, or why it may not load now, or `None` if L1 has it.

        The arguments are those of `get_many`.
        """
        state = self._states.running()
        begun: list[Flight[Any] | Exception | None] = []
        for position, op in enumerate(ops):
            if state.memory.get(op) is not None:
                begun.append(None)
            elif op not in state.board.flights and state.pauses.is_on(op):
                begun.append(state.pauses.error(op))
            else:
                load, tags = make_load(position), partial(build_tags, position)
                noting = partial(on_launch, load)
                begun.append(self.join_or_launch(state, operation, op, load, (), {}, tags, on_launch=noting))
        return begun

    async def refresh(
        self,
        operation: Operation,
        op: str,
        load: Callable[[], Awaitable[T]],
        build_tags: Callable[[], Sequence[str]] | None = None,
        *,
        replaces: bool = True,
        build_partition: Callable[[], str] | None = None,
    ) -> T:
        """Load now and replace what is cached, with what is read after this call.

        Flights that were up before answer their waiters, and are not remembered. A refresh whose load has
        begun is not joined: refreshes that come meanwhile share the next load, which begins when that one is over.
        When the load fails, what was cached stays. When its value cannot be stored, what was cached is invalidated.

        Unless it *replaces*: then any load that has not begun is shared, the value is stored like that of an ordinary
        load, other processes are told nothing, and what cannot be stored is the answer all the same.

        Raises:
            InvalidationPending: it could not be stored, nor has the store confirmed the invalidation (see
                `Guard.invalidate`); the error has the `value`.
        """
        state = self._states.running()
        how: Any = {"is_refresh": True, "replaces": replaces, "build_partition": build_partition}
        flight = bounded(self.join_or_launch, operation)(state, operation, op, load, (), {}, build_tags, **how)  # 2
        value: T = operation.for_caller(await wait_one(flight, operation.policy.wait_timeout, takes_old=False))
        if replaces:
            await _check_replaced({op: flight}, value)
        return value

    def old_or_flight(self, state: LoopState, operation: Operation, op: str, *call: Any, **how: Any) -> Any:
        """Return the old value that is the answer, or else the flight of *op*, as `join_or_launch` does."""
        found = self._find(state, operation, op, *call, **how)
        return found.kept if isinstance(found, OldValue) else found

    def _find(self, state: LoopState, operation: Operation, op: str, *call: Any, **how: Any) -> OldValue | Flight[Any]:
        """Do so; the old value comes with its instants.

        Raises:
            RecentFailure: a load failed a moment ago, and there is no old value.
        """
        if op not in state.board.flights and state.pauses.is_on(op):
            known = answer_in_pause(state, operation, op)
            if known is not None:
                return known
        flight = self.join_or_launch(state, operation, op, *call, **how)
        old: OldValue | None = flight.interim
        has_new = flight.landed and not flight.has_failed(takes_old=True)  # an eager load that never had to wait
        if old is None or has_new or state.clock() >= old.answers_until:
            return flight
        operation.counters.stale += 1
        return old

    def join_or_launch(
        self,
        state: LoopState,
        operation: Operation,
        op: str,
        *call: Any,
        is_refresh: bool = False,
        replaces: bool = False,
        on_launch: Callable[[Flight[Any]], None] | None = None,
        **how: Any,
    ) -> Flight[Any]:
        """Return the flight of *op* that this call waits for; call *on_launch* with it if it is a new one.

        The rest is for `launch`. Not async: an await between the look-up and the launch would let two callers launch.
        """
        is_shared = self._shares(op)
        flight = state.joinable(op, is_refresh=is_refresh, replaces=replaces) if is_shared else None
        if flight is not None:
            operation.counters.joins += 1
            return flight
        how |= {"is_shared": is_shared, "is_refresh": is_refresh, "replaces": replaces}
        flight = self.launch(state, operation, op, *call, **how)
        if on_launch is not None:
            on_launch(flight)
        return flight

    def launch(  # noqa: PLR0913, PLR0917  # what a flight has to know
        self,
        state: LoopState,
        operation: Operation,
        op: str,
        function: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        build_tags: Callable[..., Sequence[str]] | None,
        *,
        is_shared: bool = True,
        is_refresh: bool = False,
        replaces: bool = False,
        build_partition: Callable[..., str] | None = None,
    ) -> Flight[Any]:
        """Return a new flight of *op*, the current one if it *is_shared*."""
        tags = () if build_tags is None else build_tags(*args, **kwargs)
        before = state.overtake(op) if is_refresh else None
        # The epoch is taken before anything is read: an invalidation after the launch begins another one.
        epoch, generation, lease = state.epochs.current(op, tags), operation.lineage.generation, None
        policy, counters = operation.policy, operation.counters
        if policy.l2_ttl is not None:
            lease = _make_lease(state, operation, op, tags)
        freshness = None
        if operation.may_answer_old or is_refresh:
            freshness = Freshness(state, operation, last_in_memory(state, operation, op))
        steps = FlightLoad(
            self._states,
            state,
            operation,
            function,
            args,
            kwargs,
            lease,
            epoch,
            generation,
            is_shared,
            freshness,
            None if build_partition is None else build_partition(*args, **kwargs),
        )
        flight = state.board.launch(
            op,
            steps.run,
            counters,
            policy.on_abandon,
            operation.context(),
            tags,
            None if lease is None else steps,
            is_private=not is_shared,
            is_refresh=is_refresh,
            replaces=replaces,
            after=before if is_shared else None,
            old_values=None if freshness is None else steps,
            interim=None if freshness is None or is_refresh else freshness.at_once(),
        )
        flight.generation = generation
        flight.joinable_until = state.memory.joinable_until()
        if freshness is not None:
            freshness.offer(flight)
        return flight

    def _shares(self, op: str) -> bool:
        """Whether calls of *op* share flights: a stable choice, the same in every process."""
        if self.rollout >= 1 or not self.enabled:
            return self.enabled
        return crc32(op.encode("utf-8", "surrogatepass")) < self.rollout * 2**32

    def launch_batch(
        self, operation: Operation, op: str, is_ready: asyncio.Future[None], load: Callable[[], Awaitable[T]]
    ) -> Flight[T]:
        """Launch the flight of a batch: once it *is_ready* it loads, in a slot; it is cancelled when all have left.

        Only the flights of the batch's ids join it. They count for themselves, and L1 and L2 are theirs to read.
        """
        state = self._states.running()

        async def run(flight: Flight[T]) -> T:
            await is_ready
            limiter = state.limits.of_operation(operation)
            async with nullcontext() if limiter is None else limiter.slot(flight, operation):
                operation.counters.loads += 1
                return await load()

        return state.board.launch(op, run, Counters(), "cancel", operation.context(), is_private=True)


def _make_lease(state: LoopState, operation: Operation, op: str, tags: Sequence[str]) -> Lease:
    """Return the access to L2 of a flight of *op*."""
    tier = cast("Tier", state.tier)  # no l2_ttl without a store
    length, longest_ttl, fingerprint = operation.lease_length, operation.max_l2_ttl, operation.fingerprint(tags)
    if not operation.may_answer_old:
        return Lease(tier, op, tags, length, longest_ttl, operation.counters, fingerprint)
    windows = {"window": operation.policy.window, "margin": early_margin(state, operation, op)}
    return Lease(tier, op, tags, length, longest_ttl, operation.counters, fingerprint, **windows)


@dataclass(slots=True, eq=False)
class FlightLoad:
    """Steps 3 to 7: what one flight does to get its value."""

    _states: LoopStates
    _state: LoopState
    _operation: Operation
    _function: Callable[..., Awaitable[Any]]
    _args: tuple[Any, ...]
    _kwargs: Mapping[str, Any]
    _lease: Lease | None  # the flight's side of L2, if the operation has L2
    _epoch: tuple[int, ...]  # of the op and its tags
    _generation: Generation
    _is_shared: bool  # others can join the flight
    _freshness: Freshness | None  # the old value, if the operation may answer with one
    _partition: str | None  # of the operation, if its limit is shared between partitions
    _asks_left: int = _ASKS
    _began_at: float = 0.0
    _longest: float = inf  # seconds that L1 may keep what was loaded: few if L2 did not confirm it

    def start(self, flight: Flight[Any], on_answer: Callable[[object], None]) -> bool:
        """Send the read of L2 now, if nothing has to be waited for first; *on_answer* is called with the reply."""
        assert self._lease is not None
        return not flight.is_refresh and self._lease.start(on_answer)  # 3

    def result(self, flight: Flight[Any]) -> tuple[Any] | None:
        """Return what *flight* lands with in a tuple of one, if the reply has the value."""
        assert self._lease is not None
        found = self._lease.result(self._operation.decode)
        return None if found is None or flight.landed else (self._put_found(flight, found),)

    async def run(self, flight: Flight[Any]) -> Any:
        """Return what *flight* lands with, unless `result` has: the value that L2 has, or a new one."""
        if flight.is_queued:
            await self._wait_for_turn(flight)
        while True:
            found = None if self._lease is None else await self._read_or_acquire(flight, self._lease)  # 3, 4
            if found is not None:
                return self._put_found(flight, found)  # 7
            try:
                value = await self._call_loader(flight)  # 5
            except LeaseLapsed:
                flight.will_load = False
            else:
                lease = self._lease
                return self._keep(flight, value) if lease is None else await self._store(flight, lease, value)  # 6, 7

    async def _wait_for_turn(self, flight: Flight[Any]) -> None:
        """Wait until the refresh before *flight* has landed; it may store until then."""
        flight.note_waiting_elsewhere()
        await flight.turn()
        self._epoch = self._state.epochs.current(flight.op, flight.tags)  # nothing has been read yet

    async def _read_or_acquire(self, flight: Flight[Any], lease: Lease) -> Found | None:
        """Return what L2 has, perhaps after another process has loaded it; `None` if *flight* has to load."""
        operation, backplane = self._operation, self._state.backplane
        if flight.is_refresh:
            await lease.take_over(operation.decode)
            self._offer_stored(flight, lease)
            return None
        answer = await lease.acquire(operation.decode)  # 3
        self._offer_stored(flight, lease)
        if answer == "wait" and operation.policy.lease and self._is_shared and backplane is not None:
            operation.counters.l2_waits += 1
            flight.note_waiting_elsewhere()
            answer = await self._wait_for_other_process(flight, lease, backplane)  # 4
        if isinstance(answer, Found):
            return answer
        if self._freshness is not None:
            self._heed_pause(flight, lease, self._freshness, answer)
        if answer != "unavailable" and not lease.was_undecodable:
            operation.counters.l2_misses += 1
        return None

    def _offer_stored(self, flight: Flight[Any], lease: Lease) -> None:
        """Let callers of *flight*, and new ones, have the old value that L2 has, if it may be an answer."""
        if self._freshness is None or lease.old is None:
            return
        operation, state = self._operation, self._state
        old = old_in_store(state, operation, lease.old)
        self._freshness.offer(flight, old)
        is_younger = self._freshness.old is old
        if is_younger and not flight.is_refresh and operation.policy.ttl is not None and self._may_put(flight):
            now = state.clock()
            fresh = min(old.fresh_until - now, 0.0)
            how: Any = {"stale": old.kept_until - now - fresh, "age": now - old.born_at}
            how |= {"margin": max(old.fresh_until - now, 0.0)}
            how |= {"size": len(lease.old.payload), "max_share": operation.policy.max_share}
            state.memory.put(flight.op, old.kept, fresh, flight.tags, self._generation, **how)

    async def _wait_for_other_process(
        self, flight: Flight[Any], lease: Lease, backplane: Backplane
    ) -> Found | Literal["own", "wait", "alone", "backoff", "unavailable"]:
        """Wait until the value is there, or nothing to wait for; for no longer than a load may take."""
        operation = self._operation
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        # The wait and the load have one budget. So the wait ends while there is time for a load of ordinary length.
        flight.start_clock(operation.policy.load_timeout)
        budget = operation.policy.load_timeout or _WAIT
        longest = budget - min(budget / 2, operation.lease_length)
        polls = _polls()
        with backplane.expecting(flight.op) as wake_up:
            # Read again at once: the wake-up may have come between the first reply and now.
            while (answer := await lease.acquire(operation.decode)) == "wait":
                # A load with a slot waits for this flight. The other process may queue for a slot whose holder waits
                # for this process, and its lease is renewed as long as it queues.
                patience = min(longest, operation.lease_length) if flight.skips_queue else longest
                left = started_at + patience - loop.time()
                if left <= 0:
                    break
                await wake_up.wait(min(next(polls), max(lease.left, _POLLS[0] / 2), left))
        return answer

    async def _call_loader(self, flight: Flight[Any]) -> Any:
        """Run the loader, in a slot if loads are limited, and within its budget."""
        operation, policy = self._operation, self._operation.policy
        flight.start_clock(policy.load_timeout)
        flight.will_load = True
        limiter = None if operation.is_batched else self._state.limits.of_operation(operation, self._partition)
        if limiter is None:
            self._begin_load(flight)
            value = await self._run_loader()
        else:
            async with limiter.slot(flight, operation, self._partition):
                self._begin_load(flight)
                value = await self._run_loader()
        if self._lease is not None or policy.early is not None:  # how long leases have to be, and how early a refresh
            operation.note_load(self._state.clock() - self._began_at)
        flight.stop_clock()
        return value

    def _begin_load(self, flight: Flight[Any]) -> None:
        """Note that the loader is about to run, or raise `LeaseLapsed` to have L2 read again."""
        operation = self._operation
        if self._lease is not None:
            self._asks_left -= 1
            if self._asks_left and not (flight.is_refresh or flight.must_load):
                self._lease.check()
        if self._lease is not None or operation.policy.early is not None:
            self._began_at = self._state.clock()
        operation.counters.loads += not operation.is_batched
        flight.loader_called = not operation.is_batched  # else the batch says when

    def _run_loader(self) -> Awaitable[Any]:
        """Run the loader; and once more beside it, if it takes too long."""
        after = self._operation.policy.handover_after
        if after is None:
            return self._function(*self._args, **self._kwargs)
        load = partial(self._function, *self._args, **self._kwargs)
        return first_to_succeed(load, after, self._note_handover)

    def _note_handover(self) -> None:
        self._operation.counters.loads += 1
        self._operation.counters.handovers += 1

    def _keep(self, flight: Flight[Any], value: Any) -> Any:
        """Put what was loaded into L1, the only tier; return what *flight* lands with."""
        operation, payload, kept = self._operation, None, value
        life = operation.life("ttl", value)
        if operation.policy.version is not None:
            operation.version_of(value)  # only to find out that it has none
        if operation.policy.isolate:
            payload = operation.encode(value)
            kept = operation.isolate_value(value, payload)
        self._put_latest(flight, kept, payload, life)
        return kept

    async def _store(self, flight: Flight[Any], lease: Lease, value: Any) -> Any:
        """Store what was loaded in both tiers, as far as it may be; return what *flight* lands with."""
        operation, now = self._operation, self._state.clock()
        life, l2_life = operation.life("ttl", value), operation.life("l2_ttl", value)
        payload, version = operation.encode(value), operation.version_of(value)
        kept = operation.isolate_value(value, payload) if operation.policy.isolate else value
        flight.origin = ("load", now, now + max(life or 0.0, l2_life or 0.0))
        is_latest = await self._fill(flight, lease, payload, l2_life, version)  # 6
        self._put_latest(flight, kept, payload, life, is_latest=is_latest)
        return kept

    async def _fill(
        self, flight: Flight[Any], lease: Lease, payload: bytes | None, life: float | None, version: int | None
    ) -> bool:
        """Store what was loaded, if that can be; return whether L2 knows of nothing later."""
        lease.replaces = flight.replaces
        if life is None:
            payload, life = None, 0.0
        operation, window = self._operation, self._operation.policy.window
        may_put = partial(self._may_put, flight)
        is_latest = await lease.fill(payload, life, version, may_put, operation.name, window=window)
        has_old = self._freshness is not None and self._freshness.old is not None
        if lease.is_owned and has_old and not flight.replaces:
            self._drop_old(flight)  # what was not stored must not be followed by what is older
        if lease.is_store_unavailable and self._state.backplane is not None:
            self._longest = UNTRUSTED_TTL
        return is_latest

    def _drop_old(self, flight: Flight[Any]) -> None:
        """Drop the old value from the store, in the background."""
        tier = cast("Tier", self._state.tier)
        tier.send(tier.invalidation(flight.op))

    def _put_found(self, flight: Flight[Any], found: Found) -> Any:
        """Put what L2 has into L1, and return what *flight* lands with."""
        operation = self._operation
        operation.counters.l2_hits += 1
        policy, now, longest = operation.policy, self._state.clock(), inf if found.life is None else found.life
        flight.origin = ("store", now - found.age, now + (found.life or 0.0))
        if self._freshness is not None:
            self._freshness.note_success(flight.op)
        kept = operation.isolate(found.payload) if policy.isolate else found.value
        if (policy.ttl is not None or self._state.tracking is not None) and self._may_put(flight):
            life = operation.life("ttl", found.value)
            left = {"longest": longest, "kept_left": longest + found.stale_for}
            self._put(flight, kept, found.payload, life, **left, age=found.age)  # 7
        return kept

    def _put_latest(
        self, flight: Flight[Any], kept: Any, payload: bytes | None, life: float | None, *, is_latest: bool = True
    ) -> None:
        """Put what was loaded into L1, unless something later is known."""
        if self._freshness is not None and not flight.landed:
            self._freshness.note_success(flight.op)
        may_put = is_latest and self._may_put(flight)  # asked before a refresh begins another epoch
        if flight.is_refresh:
            self._replace_older(flight)
        if may_put:
            self._put(flight, kept, payload, life, longest=self._longest, kept_left=self._longest)  # 7
        elif not flight.landed:
            self._operation.counters.overtaken += 1

    def _may_put(self, flight: Flight[Any]) -> bool:
        """Whether *flight* is still up, and nothing was invalidated since its epoch."""
        is_latest = self._state.epochs.current(flight.op, flight.tags) == self._epoch and not self._generation.is_over
        return is_latest and not flight.landed

    def _replace_older(self, flight: Flight[Any]) -> None:
        """Let nothing that is older than what a refresh has loaded be found anywhere."""
        here, op = self._state, flight.op
        # What has read the older value in the store must not keep it in L1, nor be joined: also what began after an
        # invalidation, or after a gap on the bus, which overtook this refresh and left the store as it was.
        here.epochs.bump(op)
        here.memory.drop(op)
        current = here.board.flights.get(op)
        if self._lease is not None and current is not None and not current.is_refresh:  # a refresh does not read L2
            here.board.forget(op)
        if not flight.replaces:
            return
        is_told = here.backplane is None or self._operation.is_local
        if self._lease is not None:
            is_told = self._lease.is_final  # the fill has replaced the older value, and said so on the bus
        self._states.tell_others(Change("op", op, is_stored=not is_told))
        if not is_told and here.tier is not None:
            flight.confirmation = here.tier.send(here.tier.invalidation(op))

    def _put(
        self,
        flight: Flight[Any],
        kept: object,
        payload: bytes | None,
        life: float | None,
        *,
        longest: float = inf,
        kept_left: float = inf,
        age: float = 0.0,
    ) -> None:
        """Put into L1, fresh for *life* seconds, or drop what is there if that is `None`.

        *payload* is the encoded value, if there is one. In L2 it is fresh for *longest* seconds, kept for *kept_left*.
        """
        state, operation = self._state, self._operation
        if life is None:
            state.memory.drop(flight.op)  # not what is older either
        else:
            fresh, stale, early = min(life, longest), 0.0, 0.0
            if operation.may_answer_old:
                early = min(operation.early_margin(), fresh / 2)
                fresh -= early
                stale = min(early + operation.policy.window, kept_left - fresh)
            size, share = None if payload is None else len(payload), operation.policy.max_share
            state.memory.put(flight.op, kept, fresh, flight.tags, self._generation, stale, age, size, share, early)
        if self._lease is not None and state.tracking is not None:
            state.tracking.remember(flight.op, self._lease.stored_by)

    def _heed_pause(self, flight: Flight[Any], lease: Lease, freshness: Freshness, answer: str) -> None:
        """Note the pause that L2 tells of.

        Raises:
            RecentFailure: that one is on; or the one that this process knows of, if L2 has not granted the load.
        """
        pauses = self._state.pauses
        if answer == "backoff":
            is_known = freshness.old is not None
            pauses.note_told(flight.op, lease.left, lease.paused_for, may_be_stored=is_known)
        is_granted = answer == "own" and lease.is_arbitrated
        if answer == "backoff" or (not is_granted and pauses.lasts(flight.op)):
            raise pauses.error(flight.op)

    async def take(self, flight: Flight[Any]) -> tuple[Any] | None:
        """Put what L2 has into L1, and return it in a tuple of one; a lease that was granted is given back."""
        lease = self._lease
        assert lease is not None
        try:
            answer = await lease.acquire(self._operation.decode)
        finally:
            self.close()
        return (self._put_found(flight, answer),) if isinstance(answer, Found) else None

    @property
    def old(self) -> OldValue | None:
        """The old value, if one is known."""
        return None if self._freshness is None else self._freshness.old

    def previous(self) -> Previous | None:
        """Return what the loader is told of the old value."""
        return None if self._freshness is None else self._freshness.previous()

    def replace_timeout(self, error: Exception) -> tuple[Any] | None:
        """Return the old value in a tuple of one, if a caller gets that in place of its own time-out."""
        policy = self._operation.policy
        old = self._freshness.rescuer() if self._freshness and isinstance(error, policy.stale_on) else None
        return None if old is None else (old.kept,)

    def rescue(self, flight: Flight[Any], error: Exception) -> tuple[Any] | None:
        """Return the old value in a tuple of one, if *flight* has failed with *error* and that is the answer then."""
        freshness = self._freshness
        assert freshness is not None
        policy, lease = self._operation.policy, self._lease
        if not isinstance(error, (*policy.stale_on, RecentFailure, Overloaded)):
            return None
        # Else another load has failed, or there was no slot: no load began.
        if flight.will_load and not isinstance(error, Overloaded):
            has_marker = may_be_stored = False
            if lease is not None and policy.longest_pause is not None:
                has_marker = lease.is_owned and lease.is_arbitrated
                may_be_stored = freshness.old is not None or lease.is_store_unavailable
                lease.failure = LoadFailure(FIRST_PAUSE, policy.longest_pause, type(error).__name__)
            freshness.note_failure(flight.op, error, has_marker=has_marker, may_be_stored=may_be_stored)
        # All that wait began before any invalidation, so that they may have what was true then.
        old = freshness.rescuer() if policy.may_answer_old else None
        if old is None:
            return None
        flight.origin = old.origin
        return (old.kept,)

    def close(self) -> None:
        """Release the lease, if it is still held: the flight has landed."""
        assert self._lease is not None
        self._lease.release_soon()


def bounded(find: FindT, operation: Operation) -> FindT:
    """Return *find*, with a check that the flight which it may return has room for a waiter, if that is limited."""
    max_waiters = operation.policy.max_waiters
    if max_waiters is None:
        return find

    def find_with_room(*call: Any, **how: Any) -> Any:
        found = find(*call, **how)
        if found.__class__ is Flight:
            check_room(found, max_waiters, operation.counters)
        return found

    return cast("FindT", find_with_room)


async def _check_replaced(refreshes: Mapping[str, Flight[Any]], value: object) -> None:
    """Make sure that what *refreshes* were to replace is gone.

    Raises:
        InvalidationPending: it may still be in the store; the error has their *value*.
    """
    sent = [(op, flight.confirmation) for op, flight in refreshes.items()]
    pending = [op for op, confirmation in sent if confirmation is not None and not await confirmation.wait()]
    if pending:
        raise invalidation_pending(pending, len(sent), "refreshed, but the older value may still be stored: ", value)


def _polls() -> Iterator[float]:
    """Yield the seconds until each next read, at random: processes that wait for one load must not read together."""
    pause, longest = _POLLS
    while True:
        yield pause * (1 - random() / 2)  # noqa: S311  # no secret
        pause = min(2 * pause, longest)
