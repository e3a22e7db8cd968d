"""Flights that ask their store before they have a task: most of them find a value there, and never need one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import contextmanager, nullcontext
from contextvars import Context, ContextVar
from functools import partial
from inspect import CORO_CLOSED, getcoroutinestate
from typing import Any

import msgspec
import pytest
from inside import untyped
from leasing import LeasingDouble, Server
from stored import fingerprint_for
from waiting import eventually

from stampede_guard import Guard, LoadCancelled, RecursiveLoad, Scoreboard, coalesce, coalesce_many
from stampede_guard._flights.flight import Flight
from stampede_guard._flights.waiting import wait_one
from stampede_guard._l2.access import StoreAccess
from stampede_guard._l2.lease import Lease
from stampede_guard._l2.tier import Tier
from stampede_guard._loops import LoopState
from stampede_guard._stats import Counters, Stats
from stampede_guard.stores import AcquireRequest, AcquireResult, Refused, StoreOverloaded
from stampede_guard.stores._breaker import Breaker
from stampede_guard.stores._envelope import seal
from stampede_guard.testing import FaultStore, Gate, ManualClock

Pause = Callable[[], Awaitable[None]]

OP = "menu-7"
KEY = "sg1:{default:menu-7}"
THERE = "t" * 22
BOTH: dict[str, Any] = {"ttl": 60, "l2_ttl": 60, "jitter": 0, "returns": str}

tenant: ContextVar[str] = ContextVar("tenant", default="nobody")

pytestmark = pytest.mark.usefixtures("no_echoes")


class Store(LeasingDouble):
    """A store of which is known when it is asked, and when it answers.

    Attributes:
        later: Waited for by every request to acquire, after it took effect.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.later: Gate | None = None

    async def _acquire(self, request: AcquireRequest) -> AcquireResult:
        verdict = await super()._acquire(request)
        if self.later is not None:
            await self.later.passage()
        return verdict


class Process:
    """A guard over a store, and what was loaded in it.

    Attributes:
        loads: How many loads began.
        gate: Waited for by every load while it is set.
    """

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock()
        self.server = Server(self.clock)
        self.store = Store(self.server)
        self.guard = Guard(lambda: self.store, clock=self.clock, **options)
        self.loads = 0
        self.gate: Gate | None = None

    async def load(self) -> str:
        """Load."""
        self.loads += 1
        if self.gate is not None:
            await self.gate.passage()
        return "loaded"

    def put(
        self,
        payload: bytes = b"stored",
        op: str = OP,
        *,
        marks: tuple[bytes, ...] = (b"mark-000000",),
        returns: Any = str,
    ) -> None:
        """Store a value of *op* as another process would have, before anybody's mark was changed."""
        everybody = "sg1:{default:}:t"
        self.server.marks.setdefault(everybody, b"mark-000000")
        envelope = seal(f"default:{op}", payload, THERE, None, marks, fingerprint_for(returns))
        self.server.values[f"sg1:{{default:{op}}}"] = envelope, self.clock() + 60

    def ask(self, op: str = OP, **options: Any) -> asyncio.Task[Any]:
        """Begin a call."""
        return asyncio.create_task(self.guard.fetch(op, self.load, **(BOTH | options)))

    async def looking(self, gate: Gate, **options: Any) -> asyncio.Task[Any]:
        """Begin a call; return when its flight looks."""
        call = self.ask(**options)
        await gate.arrivals(1)
        assert self.flight.is_reading
        return call

    @property
    def site(self) -> LoopState:
        """What the guard has in this loop."""
        return self.guard._states.running()

    @property
    def tier(self) -> Tier:
        """What it has of its store."""
        tier = self.site.tier
        assert tier is not None
        return tier

    @property
    def breaker(self) -> Breaker:
        """The store's."""
        return self.tier.access.breaker("Leasing")

    @property
    def flight(self) -> Flight[Any]:
        """The only flight that is up."""
        (flight,) = self.site.board.up
        return flight

    @property
    def stats(self) -> Stats:
        """What the guard has counted."""
        return self.guard.stats()

    def is_at_rest(self) -> bool:
        """Whether nothing is left of whatever was asked."""
        board, tier = self.site.board, self.tier
        return not (board.up or board.flights or tier.upkeep or tier.access._in_use)


@pytest.fixture
async def process() -> AsyncIterator[Process]:
    """Return a process, which has nothing left to do when the test is over, and holds no right to load."""
    process = Process()
    async with process.guard:
        yield process
        await eventually(process.is_at_rest)
        assert (0, {}) == (process.stats.in_flight, process.server.leases)


@contextmanager
def watched_tasks() -> Generator[list[asyncio.Task[Any]]]:
    """Note the tasks that are made by way of the loop while the block runs."""
    loop = asyncio.get_running_loop()
    factory: Any = loop.get_task_factory()
    made: list[asyncio.Task[Any]] = []

    def make(loop: asyncio.AbstractEventLoop, run: Any, **options: Any) -> Any:
        task = asyncio.Task(run, loop=loop, **options) if factory is None else factory(loop, run, **options)
        made.append(task)
        return task

    loop.set_task_factory(make)
    try:
        yield made
    finally:
        loop.set_task_factory(factory)


# A value that is there


async def test_hit_needs_no_task(process: Process) -> None:
    """A value that the store has is answered with, kept and counted, and no task was made for its flight."""
    process.put()

    with watched_tasks() as tasks:
        answer = await process.guard.fetch(OP, process.load, **BOTH)
    entry = process.guard.peek(OP)

    assert ("stored", []) == (answer, [task.get_name() for task in tasks])
    assert entry is not None
    assert ("stored", ["acquire"], 1, 0) == (entry.value, process.store.asked[2:], process.store.looks, process.loads)
    assert (1, 0, 0, 1) == (
        process.stats.l2_hits,
        process.stats.l2_misses,
        process.stats.loads,
        process.stats.executions,
    )


async def test_hit_lands_in_the_step_in_which_it_is_told(process: Process) -> None:
    """Whoever delivers the answer has landed the flight by that."""
    process.put()
    landed: list[bool] = []
    gate = process.store.gate = Gate()
    call = await process.looking(gate)
    flight = process.flight
    process.store.after = lambda: landed.append(flight.landed)
    gate.open()

    assert ("stored", [True]) == (await call, landed)


async def test_callers_that_join_a_direct_read_are_answered(process: Process) -> None:
    """Who comes while a flight looks shares its answer; one who leaves disturbs nobody."""
    process.put()
    gate = process.store.gate = Gate()
    calls = [await process.looking(gate), *(process.ask() for _ in range(3))]
    await eventually(lambda: process.stats.joins == 3)
    calls[0].cancel()
    gate.open()

    assert ["stored"] * 3 == await asyncio.gather(*calls[1:])
    assert 1 == process.store.looks


class Recording:
    """A codec of text that tells whose context it runs in."""

    fingerprint = "text"

    def __init__(self) -> None:
        self.tenants: list[str] = []

    def encode(self, value: str) -> bytes:
        self.tenants.append(tenant.get())
        return value.encode()

    def decode(self, payload: bytes) -> str:
        self.tenants.append(tenant.get())
        return payload.decode()


@pytest.mark.parametrize("option", ["inherit_context", "vary", "neither"])
@pytest.mark.parametrize("is_there", [True, False])
async def test_contexts(option: str, is_there: bool, process: Process) -> None:
    """Whether its flight has a task or not: codec and loader see what they may of the caller's context."""
    if is_there:
        process.put(b"stored")
    codec = Recording()
    options: dict[str, Any] = {"inherit_context": {"inherit_context": True}, "vary": {"vary": [tenant]}}.get(option, {})
    loaders: list[str] = []

    @coalesce(OP, guard=process.guard, l2_ttl=60, codec=codec, **options)
    async def load() -> str:
        loaders.append(tenant.get())
        return "loaded"

    tenant.set("acme")
    process.put(b"stored", load.key()) if is_there else None
    await load()

    seen = {"nobody" if option == "neither" else "acme"}
    assert (set() if is_there else seen, seen) == ({*loaders}, {*codec.tenants})


async def test_isolated_values(process: Process) -> None:
    """With `isolate=True` everybody gets a value of their own, by a look too."""
    process.put(msgspec.msgpack.encode(["stored"]), returns=list[str])

    first, second = await asyncio.gather(*(process.ask(returns=list[str], isolate=True) for _ in range(2)))
    third = await process.ask(returns=list[str], isolate=True)

    assert (["stored"],) * 3 == (first, second, third)
    assert 3 == len({id(answer) for answer in (first, second, third)})
    assert 1 == process.store.looks


async def test_versioned_values(process: Process) -> None:
    """A value with a version is answered with, whatever its version: what is stored has been compared."""
    process.put(msgspec.msgpack.encode(7), returns=int)

    assert 7 == await process.ask(returns=int, version=int)
    assert (1, 0) == (process.store.looks, process.loads)


async def test_tracked_values() -> None:
    """What a look found is known by who stored it, as what was loaded is."""
    process = Process()
    process.store.capabilities = LeasingDouble.capabilities | {"tracking"}
    async with process.guard:
        process.put()
        await process.ask()
        tracking = process.site.tracking
        assert tracking is not None

        assert [(OP, THERE.encode())] == [*tracking._remembered.values()]


async def test_direct_read_that_was_overtaken_is_not_kept(process: Process) -> None:
    """A hit that is on its way when its op is invalidated answers who waited, and is remembered nowhere."""
    process.put()
    gate = process.store.later = Gate()
    call = await process.looking(gate)
    invalidation = asyncio.create_task(process.guard.invalidate(OP))
    await eventually(lambda: OP not in process.site.board.flights)
    gate.open()

    assert "stored" == await call
    await invalidation
    assert (None, {}) == (process.guard.peek(OP), process.server.values)


# A value that is not there


async def test_miss_begins_to_load_outside_the_delivery(process: Process) -> None:
    """The load has a task of its own, which begins after the step in which the answer came."""
    begun: list[tuple[int, bool]] = []
    gate = process.store.gate = Gate()
    call = await process.looking(gate)
    flight = process.flight
    process.store.after = lambda: begun.append((process.loads, flight.task is not None))
    load = process.gate = Gate()
    gate.open()
    await load.arrivals(1)
    names = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("load ")]
    load.open()

    assert ("loaded", [(0, False)], ["load menu-7"]) == (await call, begun, names)


async def test_miss_asks_once(process: Process) -> None:
    """The right that the look brought is what is loaded and stored under: nothing is asked for a second time."""
    assert "loaded" == await process.ask()
    assert ["acquire", "fill"] == process.store.asked[2:]
    assert (0, 1, 1) == (process.stats.l2_hits, process.stats.l2_misses, process.stats.loads)
    assert KEY in process.server.values


@pytest.mark.parametrize("has_more", [True, False])
async def test_somebody_else_loads(has_more: bool, process: Process) -> None:
    """Told by a look that another process is loading, a flight waits for that."""
    process.store.has_more = has_more
    process.server.leases[KEY] = THERE, False, process.clock() + 60
    call = process.ask()
    await eventually(lambda: process.stats.l2_waits)
    process.put()
    process.server.leases.clear()
    process.server.publish(b"w" + OP.encode())

    assert ("stored", 0, 1) == (await call, process.loads, process.store.looks)


@pytest.mark.parametrize(
    ("payload", "options", "undecodable"),
    [
        (b"\xff", {}, 1),
        (b"stored", {"marks": (b"mark-other!",)}, 0),
        (b"x" * 101, {}, 1),
    ],
    ids=["undecodable", "marked otherwise", "larger than max_bytes"],
)
@pytest.mark.parametrize("begins", [True, False], ids=["begun", "in a task"])
async def test_value_that_will_not_do(payload: bytes, options: dict[str, Any], undecodable: int, begins: bool) -> None:
    """What the look cannot use is rejected, counted as in a task, and loaded anew."""
    process = Process(max_bytes=100)
    process.store.begins = begins
    process.put(payload, **options)
    async with process.guard:
        answer = await process.ask()
        counted = process.stats

        assert ("loaded", ["acquire", "acquire", "fill"]) == (answer, process.store.asked[2:])
        assert (undecodable, 1 - undecodable, 0) == (counted.l2_undecodable, counted.l2_misses, counted.l2_hits)
        assert "loaded" in str(process.server.values[KEY][0])


async def test_refresh_never_reads_directly(process: Process) -> None:
    """A refresh takes the right to load, whatever is stored."""
    process.put()

    @coalesce(OP, guard=process.guard, ttl=60, l2_ttl=60)
    async def load() -> str:
        return await process.load()

    assert ("loaded", 0) == (await load.refresh(), process.store.looks)


async def test_load_that_asks_for_itself(process: Process) -> None:
    """A circle is found out, though the flight had no task when it was launched."""

    async def ask() -> Any:
        return await process.guard.fetch(OP, ask, **BOTH)

    with pytest.raises(RecursiveLoad):
        await ask()
    assert 1 == process.store.looks


async def test_load_within_a_load_reads_directly(process: Process) -> None:
    """What a loader asks for is looked for too, and begins to load when it is not there."""

    async def ask() -> Any:
        return await process.ask("menu-8")

    assert "loaded" == await process.guard.fetch(OP, ask, **BOTH)
    assert 2 == process.store.looks


# When nothing can be begun


def failing_once(store: Store) -> Callable[[AcquireRequest], Any]:
    """Return a function that fails once in place of `store.acquire`, which takes a task from then on."""
    acquire = store.acquire

    def fail(_: AcquireRequest) -> None:
        store.begins = False
        store.acquire = acquire
        raise ConnectionError

    return fail


def fail_to_acquire(store: Store) -> None:
    """Let the first `acquire` fail."""
    untyped(store).acquire = failing_once(store)


def fail_to_find_the_node(store: Store) -> None:
    """Let the first `node_of` fail."""
    store.begins = False
    answers = iter([ConnectionError])
    node_of = store.node_of

    def fail(key: str) -> str:
        for error in answers:
            raise error
        return node_of(key)

    untyped(store).node_of = fail


FAILING_ONCE = {
    "it does not know who has the key": fail_to_acquire,
    "its node is unknown": fail_to_find_the_node,
}


@pytest.mark.parametrize(
    "why",
    [
        "the store begins nothing",
        "it does not know who has the key",
        "its node is unknown",
        "replicas",
        "an open breaker",
        "a bound",
    ],
)
async def test_flight_that_cannot_read_directly(why: str, process: Process) -> None:
    """Where a look would have to wait for something, the flight has a task from the first."""
    process.put()
    if why == "the store begins nothing":
        process.store.begins = False
    elif why in FAILING_ONCE:
        FAILING_ONCE[why](process.store)
    elif why == "replicas":
        process.store.has_replicas = True
    elif why == "an open breaker":
        process.breaker.trip("a test")
    else:
        process.tier.access = StoreAccess("Leasing", 1, process.clock)
        process.tier.access.reserve("Leasing")
    gate = process.store.gate = process.gate = Gate()
    call = process.ask()
    if why == "a bound":
        await eventually(lambda: process.tier.access._queue)
        process.tier.access.release("read", None)
    await gate.arrivals(1)
    flight = process.flight

    assert (False, True) == (flight.is_reading, flight.task is not None)
    gate.open()
    assert ("loaded" if why == "an open breaker" else "stored") == await call
    assert (0, int(why == "an open breaker")) == (process.store.looks, process.stats.l2_skips)


async def test_flight_whose_op_awaits_its_invalidation(process: Process) -> None:
    """While an invalidation is not confirmed no flight looks: it has to be sent first."""
    process.put()
    process.store.error = OSError("down")
    await process.guard.invalidate(OP, wait=False)
    await eventually(lambda: "invalidate" in process.store.asked)
    process.store.error = None

    assert ("loaded", 0) == (await process.ask(), process.store.looks)


async def test_slot_that_comes_with_a_cancellation(pause: Pause) -> None:
    """A caller that is cancelled in the very tick in which it gets a slot passes the slot on."""
    access = StoreAccess("Leasing", 1, ManualClock())
    access.reserve("Redis")

    async def read() -> None:
        """Answer at once."""

    late = asyncio.create_task(access.call("read", "Redis", read, Counters()))
    await pause()
    access.release("read", None)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late

    assert (0, None) == (access._in_use, await access.call("read", "Redis", read, Counters()))


async def test_questions_that_are_begun_are_bounded() -> None:
    """No more are begun than may ask at once, for each store; who is over gives way to another."""
    asking = StoreAccess("Leasing", 2, ManualClock())
    first, second = asking.reserve("Redis"), asking.reserve("Redis")

    assert first is second is asking.breaker("Redis")
    assert first is not None
    assert asking.reserve("Redis") is None
    asking.release("read", None)
    assert asking.reserve("Redis") is first
    first.trip("a test")
    asking.release("read", first)
    assert "closed" == first.state  # an answer is an answer
    asking.release("read", None)
    first.trip("a test")
    assert asking.reserve("Redis") is None
    assert 0 == asking._in_use


# Errors


class Outcome:
    """What a store in trouble made of some calls."""

    def __init__(self, process: Process) -> None:
        stats = process.stats
        self.errors, self.skips, self.misses = stats.l2_errors, stats.l2_skips, stats.l2_misses
        self.state = process.breaker.state
        self.asked = [what for what in process.store.asked if what in ("acquire", "release", "fill")]


@pytest.mark.parametrize("how", ["begun", "in a task"])
@pytest.mark.parametrize(
    ("error", "asked", "counted"),
    [
        (TimeoutError(), ["acquire", "release"], (1, 0)),
        (ConnectionResetError(), ["acquire", "acquire"], (1, 0)),
        (AttributeError("a driver's bug"), ["acquire", "acquire"], (1, 0)),
        (Refused("LOADING"), ["acquire"], (1, 0)),
        (StoreOverloaded(), ["acquire"], (0, 1)),
    ],
    ids=repr,
)
async def test_store_that_does_not_answer(
    error: Exception, asked: list[str], counted: tuple[int, int], how: str, process: Process
) -> None:
    """An error is counted once, asked about as often, and given back after, whether it came by a look or in a task."""
    process.store.begins = how == "begun"
    process.store.error = error
    process.store.after = lambda: setattr(process.store, "error", error)  # the look alone does not get through
    answer = await process.ask()
    await eventually(lambda: not process.tier.upkeep)
    # A release that fails counts for itself.
    releases = "release" in asked
    outcome = Outcome(process)
    process.store.error = None

    assert ("loaded", asked) == (answer, outcome.asked)
    assert (counted[0] + releases, counted[1], 0) == (outcome.errors, outcome.skips, outcome.misses)
    assert "closed" == outcome.state
    assert int(how == "begun") == process.store.looks


async def test_request_that_was_lost_is_repeated_under_another_token(process: Process) -> None:
    """A look that was lost with its connection is made up for in the flight's task, and loads nothing twice."""
    tokens: list[str] = []
    acquire = process.store._acquire

    async def lost(request: AcquireRequest) -> AcquireResult:
        tokens.append(request.token)
        verdict = await acquire(request)
        if len(tokens) == 1:
            raise ConnectionResetError
        return verdict

    process.store._acquire = lost
    answer = await process.ask()

    assert ("loaded", 2, 2, 0) == (answer, len(tokens), len(set(tokens)), process.stats.l2_errors)
    assert (KEY in process.server.values, 1) == (True, process.stats.l2_misses)


@pytest.mark.parametrize("how", ["begun", "in a task"])
async def test_breaker_opens_after_three(how: str, process: Process) -> None:
    """Three flights without an answer open the breaker; the next do not look, and are counted as skips."""
    process.store.begins = how == "begun"
    process.store.error = OSError("down")
    answers = [await process.ask(f"menu-{number}") for number in range(5)]
    outcome = Outcome(process)
    process.store.error = None

    assert ["loaded"] * 5 == answers
    assert (3, 2, "open") == (outcome.errors, outcome.skips, outcome.state)
    assert (["acquire"] * 6, 3 * (how == "begun")) == (outcome.asked, process.store.looks)


async def test_answer_closes_the_count_of_failures(process: Process) -> None:
    """A look that is answered is news of the node, as any other question: failures are counted in a row."""
    process.put()
    for number in range(4):
        process.store.error = OSError("down") if number != 2 else None
        await process.ask(OP if number == 2 else f"menu-{number}")
    outcome = Outcome(process)
    process.store.error = None

    assert (3, 0, "closed") == (outcome.errors, outcome.skips, outcome.state)


@pytest.mark.parametrize("why", ["an open breaker", "an invalidation that is refused"])
async def test_right_that_nobody_may_ask_about(why: str, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a look may have got is given back when its answer cannot be followed up; that counts as a skip."""
    process.store.has_more = True
    gate = process.store.later = Gate()
    call = await process.looking(gate)
    if why == "an open breaker":
        process.breaker.trip("a test")
    else:

        async def refuse(*_: object) -> None:
            raise Refused("READONLY")

        monkeypatch.setattr(process.store, "invalidate", refuse)
        process.tier.announce(process.tier.invalidation(OP))
    gate.open()
    answer = await call
    await eventually(lambda: not process.tier.upkeep)

    if why == "an open breaker":
        assert ("loaded", 2, 0, [KEY]) == (
            answer,
            process.stats.l2_skips,
            process.stats.l2_errors,
            [*process.server.leases],
        )
        process.server.leases.clear()  # as time does
    else:
        assert ("loaded", {}, True) == (answer, process.server.leases, "release" in process.store.asked)


# Flights that end while they look


@pytest.mark.parametrize("is_there", [True, False])
async def test_all_leave_during_a_direct_read(is_there: bool, process: Process) -> None:
    """It lands at once; its answer is heard all the same, and a right to load that it brings is given back."""
    if is_there:
        process.put()
    gate = process.store.later = Gate()
    call = await process.looking(gate, on_abandon="cancel")
    flight = process.flight
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    early = flight.landed, flight.is_over, process.stats.in_flight, process.guard._states.running().board.current(OP)
    gate.open()
    await eventually(process.is_at_rest)

    assert (True, False, 0, None) == early
    assert (True, 0, {}) == (flight.is_over, process.loads, process.server.leases)
    assert (0, 0, None) == (process.stats.l2_hits, process.stats.l2_misses, process.guard.peek(OP))
    assert (not is_there) == ("release" in process.store.asked)


async def test_error_that_comes_when_everybody_has_left(process: Process) -> None:
    """Nobody asks again for a flight that is over, but it is counted; a right that it may have got is given back."""
    gate = Gate()
    acquire = process.store._acquire

    async def lost(request: AcquireRequest) -> AcquireResult:
        await acquire(request)
        await gate.passage()
        raise ConnectionResetError

    process.store._acquire = lost
    call = await process.looking(gate, on_abandon="cancel")
    held = [*process.server.leases]
    call.cancel()
    gate.open()
    await eventually(process.is_at_rest)

    assert ([KEY], {}) == (held, process.server.leases)
    assert (["acquire", "release"], 1, 0) == (process.store.asked[2:], process.stats.l2_errors, process.loads)


async def test_newcomer_does_not_join_a_flight_that_was_left(process: Process) -> None:
    """Who comes while an abandoned flight still hears its answer has a flight of their own."""
    gate = process.store.gate = Gate()
    first = await process.looking(gate, on_abandon="cancel")
    first.cancel()
    await asyncio.wait([first])
    second = process.ask()
    await gate.arrivals(2)
    gate.open()

    assert ("loaded", 2, 1) == (await second, process.store.looks, process.loads)


def abort(flight: Flight[Any]) -> None:
    """End *flight*."""
    flight.abort(LoadCancelled("a test"))


@pytest.mark.parametrize("has_task", [False, True], ids=["before its task is made", "before its task's first step"])
async def test_flight_that_ends_right_after_the_answer(has_task: bool, process: Process) -> None:
    """However close behind the answer: nothing is loaded for nobody, and the right is given back."""
    gate = process.store.gate = Gate()
    call = await process.looking(gate)
    flight, loop = process.flight, asyncio.get_running_loop()
    process.gate = Gate()
    tasks: list[bool] = []

    def end() -> None:
        tasks.append(flight.task is not None)
        abort(flight)

    process.store.after = (lambda: loop.call_soon(end)) if has_task else end
    gate.open()
    with pytest.raises(LoadCancelled, match="a test"):
        await call
    await eventually(process.is_at_rest)

    assert ([has_task], {}, {}) == (tasks, process.server.leases, process.server.values)
    assert ["acquire", "release"] == process.store.asked[2:]


async def test_flight_that_ends_while_it_loads(process: Process) -> None:
    """A right that a look has brought is given back by whatever ends the load."""
    gate = process.gate = Gate()
    call = process.ask()
    await gate.arrivals(1)
    held = [*process.server.leases]
    abort(process.flight)
    with pytest.raises(LoadCancelled, match="a test"):
        await call
    await eventually(process.is_at_rest)

    assert ([KEY], {}) == (held, process.server.leases)


async def test_load_that_goes_on_after_its_flight(process: Process) -> None:
    """What a load that ignores its cancellation comes to is stored nowhere, and was not overtaken either."""
    gate = Gate()

    async def load() -> str:
        try:
            await gate.passage()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return "too late"

    call = asyncio.create_task(process.guard.fetch(OP, load, **BOTH))
    await gate.arrivals(1)
    abort(process.flight)
    with pytest.raises(LoadCancelled, match="a test"):
        await call
    await eventually(process.is_at_rest)

    assert (None, 0) == (process.guard.peek(OP), process.stats.overtaken)


@pytest.mark.parametrize("begins", [True, False], ids=["a look that is concluded", "in a task"])
async def test_request_that_is_cancelled(begins: bool, process: Process) -> None:
    """A right that was asked for, and whose answer nobody waited for, is given back."""
    process.store.begins, process.store.has_more = begins, True
    gate = process.store.later = Gate()
    if begins:
        process.store.later = None
        untyped(process.store).conclude = _held_up(gate)
    call = process.ask(on_abandon="cancel")
    await gate.arrivals(1)
    held = [*process.server.leases]
    call.cancel()
    await eventually(process.is_at_rest)

    assert ([KEY], {}, 0) == (held, process.server.leases, process.loads)
    assert ["acquire", "release"] == process.store.asked[2:]


def _held_up(gate: Gate) -> Callable[..., Awaitable[AcquireResult]]:
    async def conclude(_: object) -> AcquireResult:
        await gate.passage()
        raise AssertionError

    return conclude


async def test_request_that_is_cancelled_over_a_plain_store() -> None:
    """Where nobody gives rights, none is given back."""
    clock = ManualClock()
    store = FaultStore(clock)
    async with Guard(lambda: store, clock=clock) as guard:
        gate = store.gate = Gate()
        call = asyncio.create_task(guard.fetch(OP, never, on_abandon="cancel", **BOTH))
        await gate.arrivals(1)
        call.cancel()
        await eventually(lambda: not guard._states.running().board.up)
        tier = guard._states.running().tier

        assert tier is not None
        assert set() == tier.upkeep


async def never() -> str:
    """Load for ever."""
    return await asyncio.get_running_loop().create_future()


# Shut-down


@pytest.mark.parametrize("is_there", [True, False])
async def test_exit_waits_for_direct_reads(is_there: bool, pause: Pause) -> None:
    """A guard that is left waits for flights that look, and for the loads that follow; nothing remains."""
    process = Process()
    if is_there:
        process.put()
    await process.guard.__aenter__()
    site, gate = process.site, Gate()
    process.store.gate = gate
    call = await process.looking(gate)
    leaving = asyncio.create_task(process.guard.__aexit__(None, None, None))
    await pause()
    early = leaving.done()
    gate.open()
    await leaving

    assert (False, "stored" if is_there else "loaded") == (early, await call)
    assert (set(), {}, 0, {}) == (site.board.up, site.board.flights, process.stats.in_flight, process.server.leases)
    assert process.store.is_closed


async def test_exit_in_haste(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A guard that waits for nobody tells them so, and is left though an answer never comes; nothing remains."""
    monkeypatch.setattr("stampede_guard._flights.scoreboard._GRACE", 0.001)
    process = Process(drain_timeout=0)
    await process.guard.__aenter__()
    site, gate = process.site, Gate()
    process.store.gate = gate
    call = await process.looking(gate)
    await process.guard.__aexit__(None, None, None)
    left = [task for task in asyncio.all_tasks() if "menu-7" in task.get_name() or "lease" in task.get_name()]
    with pytest.raises(LoadCancelled, match="shut-down"):
        await call

    assert ([], set(), 0, 0) == (left, site.board.up, process.stats.in_flight, process.loads)
    assert ([], 0) == (caplog.messages, process.stats.l2_errors)


async def test_exit_in_haste_hears_the_answer_out(pause: Pause) -> None:
    """Who waits is told at once; and a right to load that the answer brings is there for another process."""
    process = Process(drain_timeout=0)
    await process.guard.__aenter__()
    site, gate = process.site, Gate()
    process.store.gate = gate
    call = await process.looking(gate)
    leaving = asyncio.create_task(process.guard.__aexit__(None, None, None))
    with pytest.raises(LoadCancelled, match="shut-down"):
        await call
    await pause()
    early = leaving.done()
    gate.open()
    await leaving

    assert (False, 0) == (early, process.loads)
    assert (set(), 0, {}) == (site.board.up, process.stats.in_flight, process.server.leases)


async def test_store_that_is_closed_under_a_direct_read(process: Process) -> None:
    """A flight whose question was cut ends, and begins nothing: its waiters are told."""
    gate = process.store.gate = Gate()
    call = await process.looking(gate)
    await process.store.aclose()

    with pytest.raises(LoadCancelled, match="menu-7: the load was cancelled with its request"):
        await call
    assert (0, 0) == (process.loads, process.stats.l2_errors)


async def test_lease_that_was_granted_to_a_cancelled_request(process: Process) -> None:
    """A request may be cancelled after it took effect, and its store may go on: its lease is released."""
    process.store.later = Gate()
    call = process.ask()
    await process.store.later.arrivals(1)
    held = [*process.server.leases]
    for task in process.store._under_way:
        task.cancel()
    with pytest.raises(LoadCancelled):
        await call
    is_owed = not process.tier.leases.is_idle
    process.tier.leases.close()
    await eventually(process.is_at_rest)

    assert ([KEY], True, {}) == (held, is_owed, process.server.leases)


async def test_request_that_is_cancelled_before_it_has_a_token(process: Process) -> None:
    """A request that asked for no lease owes no release."""
    request: asyncio.Future[AcquireResult] = asyncio.get_running_loop().create_future()
    untyped(process.store).acquire = lambda _: request
    call = process.ask()
    await eventually(lambda: process.site.board.up)
    request.cancel()
    with pytest.raises(LoadCancelled):
        await call

    assert process.tier.leases.is_idle


async def test_flight_that_ends_before_its_read_begins(process: Process) -> None:
    """The coroutine that a store has returned is closed if the flight's task never takes a step."""

    async def acquire() -> AcquireResult:
        raise AssertionError

    request = acquire()
    untyped(process.store).acquire = lambda _: request
    lease = Lease(process.tier, OP, (), 2, 60, Counters())

    assert not lease.start(lambda _: None)
    lease.release_soon()
    assert CORO_CLOSED == getcoroutinestate(request)


async def test_drain_waits_for_direct_reads(process: Process, pause: Pause) -> None:
    """Draining is over when the answer is there, however many wait for that; and no later than it may be."""
    process.put()
    gate = process.store.gate = Gate()
    call = await process.looking(gate)
    board = process.site.board
    await board.drain(0.001)
    draining = [asyncio.create_task(board.drain(60)) for _ in range(2)]
    await pause()
    early = [each.done() for each in draining]
    gate.open()
    await asyncio.gather(*draining)

    assert ([False, False], "stored", set()) == (early, await call, board.up)


# Trouble in the process


class ScriptedRead:
    """A direct read that is answered when the test says so.

    Args:
        seen: What it brings.
        error: What it raises instead.
    """

    def __init__(self, seen: tuple[str] | None = None, error: BaseException | None = None) -> None:
        self._seen = seen
        self._error = error
        self.answer: Callable[[object], object] = bool
        self.closed = 0

    def start(self, flight: Flight[str], on_answer: Callable[[object], None]) -> bool:
        self.answer = on_answer
        return True

    def result(self, flight: Flight[str]) -> tuple[str] | None:
        if self._error is not None:
            raise self._error
        return self._seen

    def close(self) -> None:
        self.closed += 1


def launch(
    board: Scoreboard, peek: ScriptedRead, load: Callable[..., Any] | None = None
) -> tuple[Flight[str], Counters]:
    """Launch a flight that looks."""
    counters = Counters()
    flight = board.launch(OP, load or (lambda _: never()), counters, "finish", context=Context(), direct_read=peek)
    assert (True, None) == (flight.is_reading, flight.task)
    return flight, counters


def is_clean(board: Scoreboard, flight: Flight[str], peek: ScriptedRead, counters: Counters, closed: int = 1) -> bool:
    """Whether nothing is left of *flight*, and its direct read was closed so many times."""
    left = board.up, board.flights, flight.task, flight.is_reading, peek.closed, counters.in_flight
    return left == (set(), {}, None, False, closed, 0)


async def test_direct_read_brings_the_value() -> None:
    """What it brings is the answer, and leaves nothing to be closed."""
    board, peek = Scoreboard(), ScriptedRead(("soup",))
    flight, counters = launch(board, peek)
    peek.answer(None)

    assert is_clean(board, flight, peek, counters, closed=0)
    assert "soup" == await wait_one(flight)


@pytest.mark.parametrize(
    ("raised", "stops", "error", "message"),
    [
        (ValueError("no menu"), False, ValueError, "no menu"),
        (asyncio.CancelledError(), False, LoadCancelled, "menu-7: the load was "),
        (GeneratorExit(), False, LoadCancelled, "menu-7: the load was "),
        (KeyboardInterrupt(), True, LoadCancelled, "menu-7: the load was ended by KeyboardInterrupt"),
        (SystemExit(), True, LoadCancelled, "menu-7: the load was ended by SystemExit"),
    ],
    ids=repr,
)
async def test_direct_read_that_fails(raised: BaseException, stops: bool, error: type[Exception], message: str) -> None:
    """Its error is the flight's, not that of what brought the answer; what stops the loop does so, too."""
    board, peek = Scoreboard(), ScriptedRead(error=raised)
    flight, counters = launch(board, peek)
    waiting = asyncio.create_task(wait_one(flight))
    await asyncio.sleep(0)
    with pytest.raises(type(raised)) if stops else nullcontext():
        peek.answer(None)

    assert is_clean(board, flight, peek, counters)
    with pytest.raises(error, match=message):
        await waiting


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
async def test_direct_read_that_cannot_even_begin(error: type[BaseException]) -> None:
    """That is the launching caller's error, and leaves no flight that would never land."""

    class Broken(ScriptedRead):
        def start(self, flight: Flight[str], on_answer: Callable[[object], None]) -> bool:
            raise error

    board, peek, counters = Scoreboard(), Broken(), Counters()
    with pytest.raises(error):
        board.launch(OP, lambda _: never(), counters, "finish", context=Context(), direct_read=peek)

    assert (set(), {}, 1, 0) == (board.up, board.flights, peek.closed, counters.in_flight)


async def test_codec_that_cancels_is_its_own_trouble(process: Process) -> None:
    """A codec that raises `CancelledError` ends its own flight, and no other whose answer came with it."""

    class Cancelling(Recording):
        def decode(self, payload: bytes) -> str:
            raise asyncio.CancelledError

    process.put(b"stored")
    with pytest.raises(LoadCancelled):
        await process.guard.fetch(OP, process.load, l2_ttl=60, codec=Cancelling())


@pytest.mark.parametrize("refusal", [RuntimeError, KeyboardInterrupt])
async def test_task_factory_that_refuses_after_a_direct_read(refusal: type[BaseException], pause: Pause) -> None:
    """Whoever waits is told, the loop hears of it, and nothing is left."""
    board, peek, loop = Scoreboard(), ScriptedRead(), asyncio.get_running_loop()
    flight, counters = launch(board, peek)
    waiting = asyncio.create_task(wait_one(flight))
    await pause()
    soon: list[Callable[[], None]] = []

    def refuse(*_: object, **__: object) -> Any:
        raise refusal("no more tasks")

    factory = loop.get_task_factory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_soon", lambda call, *args, **_: soon.append(partial(call, *args)))
        peek.answer(None)
    loop.set_task_factory(refuse)
    (begin,) = soon
    with pytest.raises(refusal, match="no more tasks"):
        begin()
    loop.set_task_factory(factory)

    assert is_clean(board, flight, peek, counters)
    with pytest.raises(LoadCancelled, match=f"ended by {refusal.__name__}"):
        await waiting


async def test_right_is_given_back_when_no_task_can_be_made(process: Process) -> None:
    """A right that a look has brought, and for which there is no task, is another's to have."""
    loop, complaints = asyncio.get_running_loop(), []
    complain: Any = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, complaint: complaints.append(str(complaint["exception"])))
    factory: Any = loop.get_task_factory()
    call = process.ask()
    await eventually(lambda: process.store.looks)

    def refuse(loop: asyncio.AbstractEventLoop, run: Any, **options: Any) -> Any:
        if "Flight" in run.__qualname__:
            raise RuntimeError("no more tasks")
        return asyncio.Task(run, loop=loop, **options) if factory is None else factory(loop, run, **options)

    loop.set_task_factory(refuse)
    with pytest.raises(LoadCancelled, match="ended by RuntimeError"):
        await call
    loop.set_task_factory(factory)
    loop.set_exception_handler(complain)
    await eventually(process.is_at_rest)

    assert (["no more tasks"], {}) == (complaints, process.server.leases)


async def test_wait_until_a_direct_read_is_over() -> None:
    """They share one future, which is done when there is a task."""
    board, peek = Scoreboard(), ScriptedRead()

    async def load(_: Flight[str]) -> str:
        return "soup"

    flight, _ = launch(board, peek, load)
    done = flight.direct_read_done()
    same = flight.direct_read_done()
    peek.answer(None)
    early = done.done()
    await done

    assert (True, False, "soup") == (same is done, early, await wait_one(flight))


# Flights that load together


async def test_batch_does_not_wait_for_a_hit_that_has_landed(process: Process, pause: Pause) -> None:
    """Of many ids, those that are not there are loaded in one call, once those that are have landed."""
    asked: list[list[int]] = []

    @coalesce_many("menu-{menu_id}", guard=process.guard, ttl=60, l2_ttl=60)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        asked.append(menu_ids)
        return dict.fromkeys(menu_ids, "loaded")

    await load([1, 2])
    process.site.memory.clear()
    asked.clear()
    late = Gate()
    acquire = process.store._acquire

    async def held_up(request: AcquireRequest) -> AcquireResult:
        if "menu-2}" in request.key:
            await late.passage()
        return await acquire(request)

    process.store._acquire = held_up
    call = asyncio.create_task(load([1, 3, 2, 4]))
    await eventually(lambda: {"sg1:{default:menu-3}", "sg1:{default:menu-4}"} <= process.server.leases.keys())
    await late.arrivals(1)
    await pause()
    early = [*asked]
    with watched_tasks() as tasks:
        late.open()
        answer = await call

    assert ([], [[3, 4]]) == (early, asked)
    assert dict.fromkeys([1, 3, 2, 4], "loaded") == answer
    assert [] == [task for task in tasks if "menu-2" in task.get_name()]


@pytest.mark.parametrize("has_more", [True, False])
async def test_batch_goes_without_flights_that_wait_for_another_process(has_more: bool, process: Process) -> None:
    """An id that somebody else is loading, as its look has told, keeps nobody waiting."""
    asked: list[list[int]] = []
    process.store.has_more = has_more
    process.server.leases["sg1:{default:menu-2}"] = THERE, False, process.clock() + 60

    @coalesce_many("menu-{menu_id}", guard=process.guard, ttl=60, l2_ttl=60)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        asked.append(menu_ids)
        return dict.fromkeys(menu_ids, "loaded")

    call = asyncio.create_task(load([1, 2, 3]))
    await eventually(lambda: asked)
    process.server.leases.pop("sg1:{default:menu-2}")
    process.server.publish(b"wmenu-2")

    assert dict.fromkeys([1, 2, 3], "loaded") == await call
    assert [[1, 3], [2]] == asked


async def test_all_hits_of_many_need_no_task(process: Process) -> None:
    """When the store has them all, nothing is loaded, and no task made."""

    @coalesce_many("menu-{menu_id}", guard=process.guard, ttl=60, l2_ttl=60)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        return dict.fromkeys(menu_ids, "loaded")

    await load(range(20))
    process.site.memory.clear()
    before = process.stats.loads
    with watched_tasks() as tasks:
        await load(range(20))

    assert (before, []) == (process.stats.loads, [task.get_name() for task in tasks])
    assert 20 == process.stats.l2_hits
