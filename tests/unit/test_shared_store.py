"""Guards that share a store with leases, tags and a bus, as the processes of a service do."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from inside import tier_of
from leasing import LeasingDouble, Server
from waiting import eventually

from stampede_guard import (
    ConfigurationError,
    Guard,
    GuardClosed,
    InvalidationPending,
    LoadCancelled,
    _path,
    coalesce,
)
from stampede_guard.testing import FaultStore, Gate, ManualClock

Pause = Callable[[], Awaitable[None]]

OP = "menu-7"
KEY = "sg1:{default:menu-7}"
BOTH: dict[str, Any] = {"ttl": 60, "l2_ttl": 60, "jitter": 0, "returns": str}

pytestmark = pytest.mark.usefixtures("no_echoes")


class Loader:
    """Loads "soup 1", "soup 2", …, each when it may."""

    def __init__(self, dish: str = "soup") -> None:
        self.dish = dish
        self.loads = 0
        self.gate: Gate | None = None

    async def __call__(self) -> str:
        self.loads += 1
        answer = f"{self.dish} {self.loads}"
        if self.gate is not None:
            await self.gate.passage()
        return answer


class Process:
    """A guard, and its own way to the server."""

    def __init__(self, server: Server, **options: Any) -> None:
        self.store = LeasingDouble(server)
        self.guard = Guard(lambda: self.store, clock=server.clock, **options)

    def ask(self, load: Callable[[], Awaitable[str]], op: str = OP, **options: Any) -> asyncio.Task[str]:
        """Begin a call."""
        return asyncio.create_task(self.guard.fetch(op, load, **(BOTH | options)))

    def peek(self, op: str = OP) -> Any:
        """Return what this process remembers."""
        entry = self.guard.peek(op)
        return None if entry is None else entry.value

    @property
    def waits(self) -> int:
        """How many flights have waited for another process's load."""
        return self.guard.stats().l2_waits


@pytest.fixture
def load() -> Loader:
    """Return a loader."""
    return Loader()


@pytest.fixture(autouse=True, params=["at once", "concluded", "in a task"])
def _begins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store be asked before a flight has a task, with and without more to its answer, or after that."""
    monkeypatch.setattr(LeasingDouble, "begins", request.param != "in a task")
    monkeypatch.setattr(LeasingDouble, "has_more", request.param == "concluded")


@pytest.fixture
async def fleet(server: Server) -> AsyncIterator[tuple[Process, Process]]:
    """Return two processes of a service."""
    processes = Process(server), Process(server)
    async with AsyncExitStack() as open_guards:
        for process in processes:
            await open_guards.enter_async_context(process.guard)
        yield processes


# What a guard can do


async def test_capabilities_of_other_guards(clock: ManualClock) -> None:
    """A plain store can do none of it, nor can memory; of a closed guard nobody knows."""
    guard = Guard(lambda: FaultStore(clock), clock=clock)

    with pytest.raises(GuardClosed):
        _ = guard.capabilities
    async with guard:
        assert frozenset() == guard.capabilities
    assert frozenset() == Guard().capabilities


# One load per fleet


async def _times_out(*_: Any, **__: Any) -> bool:
    raise TimeoutError


async def waited_for(processes: list[Process], first: Gate, then: Gate, **options: Any) -> list[asyncio.Task[str]]:
    """Let the first process load, through one gate, and the others wait for it, who would load through another."""

    def ask(process: Process, gate: Gate) -> asyncio.Task[str]:
        async def load() -> str:
            await gate.passage()
            return "soup"

        return process.ask(load, **options)

    leader, *others = processes
    calls = [ask(leader, first)]
    await first.arrivals(1)
    calls += [ask(process, then) for process in others]
    await eventually(lambda: all(process.waits for process in others))
    return calls


@pytest.mark.parametrize("words", ["heard", "lost"])
@pytest.mark.parametrize("why", ["too long", "old version", "no answer"])
async def test_value_that_cannot_be_stored(
    why: str, words: str, server: Server, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes that wait for a load whose value is not stored load side by side, and leave nothing behind."""
    monkeypatch.setattr(_path, "_POLLS", (60.0, 60.0) if words == "heard" else (0.001, 0.002))
    server.is_mute = words == "lost"
    processes = [Process(server, max_bytes=1 if why == "too long" else 100) for _ in range(4)]
    first, then = Gate(), Gate()
    async with AsyncExitStack() as open_guards:
        for process in processes:
            await open_guards.enter_async_context(process.guard)
        await processes[0].guard.invalidate(OP, version=7)
        options = {"version": lambda _: 6} if why == "old version" else {}
        calls = await waited_for(processes, first, then, **options)
        if why == "no answer":
            monkeypatch.setattr(processes[0].store, "fill", _times_out)
        first.open()
        await then.arrivals(3)
        then.open()
        answers = [await call for call in calls]
        clock.advance(1.0)

        assert ["soup"] * 4 == answers
        assert ({}, None) == (server.values, server.lease_of(KEY))


async def test_value_that_can_be_stored_again(
    fleet: tuple[Process, Process], load: Loader, server: Server, clock: ManualClock
) -> None:
    """A second later the next flight has the right to store what it loads."""
    here, there = fleet
    server.leases[KEY] = "!", False, clock() + 1.0

    assert ("soup 1", {}) == (await here.ask(load, ttl=None), server.values)
    clock.advance(1.0)
    assert ("soup 2", "soup 2") == (await here.ask(load, ttl=None), await there.ask(load))


@pytest.mark.parametrize(("size", "remembered"), [(1, "soup 1"), (100, None)], ids=["too long", "of any age"])
async def test_version_that_nothing_was_compared_with(
    size: int, remembered: str | None, server: Server, load: Loader, clock: ManualClock
) -> None:
    """What a flight loads alone may be too old for any tier; if no flight could store it, memory has it a second."""
    process = Process(server, max_bytes=size)
    async with process.guard:
        server.leases[KEY] = "!", False, clock() + 1.0

        assert await process.ask(load, version=lambda _: 7) == "soup 1"
        assert remembered == process.peek()
        clock.advance(1.0)
        assert (None, {}) == (process.peek(), server.values)


async def test_word_that_was_lost(
    fleet: tuple[Process, Process], server: Server, load: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who hears nothing looks again after a while."""
    monkeypatch.setattr(_path, "_POLLS", (0.001, 0.002))
    here, there = fleet
    load.gate = Gate()
    first = here.ask(load)
    await load.gate.arrivals(1)
    second = there.ask(load)
    await eventually(lambda: there.store.asked.count("acquire") > 5)
    server.is_mute = True
    load.gate.open()

    assert ("soup 1", "soup 1", 1) == (await first, await second, load.loads)


async def test_blind(fleet: tuple[Process, Process], load: Loader, clock: ManualClock, server: Server) -> None:
    """Without an answer of the store a process loads, stores nothing, and remembers it for a second."""
    here, _ = fleet
    here.store.error = TimeoutError()
    answer = await here.ask(load)
    await eventually(lambda: "release" in here.store.asked)
    clock.advance(0.999)
    within = here.peek()
    clock.advance(0.001)

    assert ("soup 1", "soup 1", None, {}) == (answer, within, here.peek(), server.values)
    assert ["acquire", "release"] == here.store.asked[2:]  # the answer may be late, and a yes
    assert 0 == here.guard.stats().l2_misses


async def test_fill_that_is_not_answered(fleet: tuple[Process, Process], load: Loader, clock: ManualClock) -> None:
    """What may not have been stored is remembered for a second: nobody knows what another process loads."""
    here, _ = fleet
    load.gate = Gate()
    call = here.ask(load)
    await load.gate.arrivals(1)
    here.store.error = TimeoutError()
    load.gate.open()
    answer = await call
    clock.advance(0.999)
    within = here.peek()
    clock.advance(0.001)

    assert ("soup 1", "soup 1", None) == (answer, within, here.peek())


async def test_lease_is_renewed(fleet: tuple[Process, Process], load: Loader, clock: ManualClock) -> None:
    """A load that takes long keeps its right to."""
    here, _ = fleet
    load.gate = Gate()
    call = here.ask(load)
    await load.gate.arrivals(1)
    for number in range(1, 4):
        clock.advance(0.5)
        upkeep = tier_of(here.guard).leases
        upkeep._tick(upkeep._timer_at)
        await eventually(lambda number=number: here.store.asked.count("renew") == number)
    load.gate.open()

    assert ("soup 1", 0) == (await call, here.guard.stats().overtaken)


async def test_lease_length_is_learnt(fleet: tuple[Process, Process], clock: ManualClock, server: Server) -> None:
    """Where loads take long, leases last longer; what a lease has left is known to who waits."""
    here, _ = fleet
    lives: list[float] = []

    async def load_slowly() -> str:
        _, _, until = server.leases[KEY]
        lives.append(until - clock())
        clock.advance(10)
        return "soup"

    for _ in range(3):
        await here.ask(load_slowly)

    assert [2, 6, 10] == lives


async def test_load_that_is_cancelled_at_the_end(server: Server, load: Loader) -> None:
    """A process that goes down in the middle of a load gives its right back before its connections are closed."""
    process = Process(server, drain_timeout=0)
    gate = load.gate = Gate()
    async with process.guard:
        call = process.ask(load)
        await gate.arrivals(1)

    with pytest.raises(LoadCancelled):
        await call
    assert ("release", {}, True) == (process.store.asked[-1], server.leases, process.store.is_closed)


# Invalidations


@pytest.mark.parametrize("how", ["cut", "silence"])
async def test_load_from_before_the_bus_was_lost_is_not_joined(
    how: str, fleet: tuple[Process, Process], load: Loader, server: Server, clock: ManualClock
) -> None:
    """When the bus is lost, a load that was up answers those who wait; newcomers may not join it."""
    here, there = fleet
    load.gate = Gate()
    early = here.ask(load)
    await load.gate.arrivals(1)
    server.is_mute = True
    if how == "cut":
        for process in fleet:
            process.store.deaf = ConnectionError("gone")
        server.cut()
        await eventually(lambda: not server.inboxes)
    else:
        clock.advance(3)
    await there.guard.invalidate(OP)
    late = here.ask(load)
    await load.gate.arrivals(2)
    load.gate.open()

    assert ("soup 1", "soup 2") == (await early, await late)
    assert "soup 2" == here.peek()


async def test_load_without_a_bus_is_joined_for_a_second(
    fleet: tuple[Process, Process], load: Loader, server: Server, clock: ManualClock
) -> None:
    """While the bus is lost a load is joined for as long as its value would be kept; then Redis says who loads."""
    here, there = fleet
    for process in fleet:
        process.store.deaf = ConnectionError("gone")
    server.cut()
    await eventually(lambda: not server.inboxes)
    load.gate = Gate()
    calls = [here.ask(load)]
    await load.gate.arrivals(1)
    clock.advance(0.999)
    calls.append(here.ask(load))
    await eventually(lambda: here.guard.stats().joins == 1)
    await there.guard.invalidate(OP)
    clock.advance(0.001)
    calls.append(here.ask(load))
    await load.gate.arrivals(2)
    load.gate.open()

    assert ["soup 1", "soup 1", "soup 2"] == [await call for call in calls]


async def test_unconfirmed_invalidation_is_repeated(
    fleet: tuple[Process, Process], load: Loader, server: Server
) -> None:
    """What the store did not confirm is said again until it does, though nobody asks."""
    here, there = fleet
    for process in fleet:
        await process.ask(load)
    here.store.error = OSError("down")
    with pytest.raises(InvalidationPending):
        await here.guard.invalidate(OP)
    still = there.peek()
    here.store.error = None
    await tier_of(here.guard).repeat_invalidations()
    await eventually(lambda: there.peek() is None)

    assert ("soup 1", {}) == (still, server.values)


async def test_invalidation_without_waiting(fleet: tuple[Process, Process], load: Loader) -> None:
    """Without waiting nothing is raised, and what is local is done at once."""
    here, _ = fleet
    await here.ask(load)
    here.store.error = OSError("down")
    gate = here.store.gate = Gate()
    await here.guard.invalidate(OP, wait=False)
    at_once = here.peek()
    gate.open()

    assert at_once is None


# Tags


async def test_tags_of_a_decorated_function(fleet: tuple[Process, Process], load: Loader) -> None:
    """A function's tags are built from its arguments, for memory, flights and store alike."""
    here, _ = fleet

    @coalesce("menu-{menu}", guard=here.guard, ttl=60, l2_ttl=60, tags=("menu:{menu}", "menus"))
    async def load_menu(menu: int) -> str:
        return await load()

    answers = [await load_menu(7), await load_menu(8)]
    await here.guard.invalidate_tag(load_menu.tags(7)[0])
    answers += [await load_menu(7), await load_menu(8)]

    assert ("menu:7", "menus") == load_menu.tags(7)
    assert ["soup 1", "soup 2", "soup 3", "soup 2"] == answers


async def test_unconfirmed_tag(fleet: tuple[Process, Process], load: Loader) -> None:
    """A tag whose invalidation is not confirmed is told, and holds in this process; so does a clearing."""
    here, _ = fleet
    await here.ask(load, tags=("soups",))
    here.store.error = OSError("down")

    with pytest.raises(InvalidationPending, match=r"^soups: not confirmed by the store"):
        await here.guard.invalidate_tag("soups")
    with pytest.raises(InvalidationPending, match=r"^everything: not confirmed by the store"):
        await here.guard.clear()
    await here.guard.invalidate_tag("soups", wait=False)
    await here.guard.clear(wait=False)
    assert here.peek() is None


async def test_tags_over_a_plain_store(clock: ManualClock, load: Loader) -> None:
    """A store that cannot keep tags is no place for them: a caller that asks for one is told so, nothing is done."""
    async with Guard(lambda: FaultStore(clock), clock=clock) as guard:
        await guard.fetch("menu-8", load, ttl=60)
        for use, what in (
            (guard.fetch(OP, load, tags=("soups",)), rf"{OP}: tags=\('soups',\): tags"),
            (guard.fetch(OP, load, version=len), f"{OP}: version=: versions"),
            (guard.invalidate(OP, version=7), f"{OP}: version=7: versions"),
            (guard.invalidate_tag("soups"), "tag='soups': tags"),
            (guard.clear(), "clear: tags"),
        ):
            with pytest.raises(ConfigurationError, match=rf"^{what} need a Redis store; this guard's FaultStore has"):
                await use
        assert guard.peek("menu-8") is not None
    assert 1 == load.loads


async def test_after_commit_over_a_plain_store(clock: ManualClock) -> None:
    """What the store cannot do is refused in the block, where the transaction can still be rolled back."""
    async with Guard(lambda: FaultStore(clock), clock=clock) as guard, guard.after_commit(Connection()) as after:
        with pytest.raises(ConfigurationError, match="soups: tags need a Redis store"):
            after.invalidate_tag("soups")
        with pytest.raises(ConfigurationError, match=f"{OP}: versions need a Redis store"):
            after.invalidate(OP, version=7)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"tags": ("menus",)}, "tags"), ({"version": lambda _: 1}, "versions")],
    ids=["tags", "version"],
)
async def test_what_a_plain_store_cannot_do_is_found_at_entering(options: Any, what: str, clock: ManualClock) -> None:
    """An operation that asks for more than the store can is refused when the guard is entered, and nothing is left."""
    guard = Guard(lambda: FaultStore(clock), clock=clock)

    @coalesce("menu", guard=guard, l2_ttl=60, **options)
    async def load_menu() -> str:
        return "soup"

    with pytest.raises(
        ConfigurationError, match=rf"^menu: {what} need a Redis store; this guard's FaultStore has none"
    ):
        await guard.__aenter__()
    assert guard._states.here() is None
    assert "menu" == load_menu.key()


async def test_what_the_store_can_do_is_no_mistake(server: Server) -> None:
    """Over a store that can, such operations are welcome."""
    process = Process(server)

    @coalesce("menu", guard=process.guard, l2_ttl=60, tags=("menus",), version=lambda _: 1)
    async def load_menu() -> str:
        return "soup"

    async with process.guard:
        assert "soup" == await load_menu()


# After a transaction


class Transaction:
    """A transaction that commits, or does not."""

    def __init__(self, connection: "Connection") -> None:
        self.connection = connection

    async def __aenter__(self) -> None:
        self.connection.is_open = True

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.connection.is_open = False
        self.connection.ended.append("rollback" if error else "commit")


class Connection:
    """As much of a connection as is used."""

    def __init__(self) -> None:
        self.is_open = False
        self.ended: list[str] = []

    def transaction(self) -> Transaction:
        return Transaction(self)

    def is_in_transaction(self) -> bool:
        return self.is_open


async def test_after_commit(fleet: tuple[Process, Process], load: Loader, server: Server) -> None:
    """What was noted within a transaction is invalidated when it has committed, and not before."""
    here, _ = fleet
    connection = Connection()
    for op in "abc":
        await here.ask(load, op, tags=("soups",) if op == "b" else ())

    async with here.guard.after_commit(connection) as after:
        after.invalidate("a", version=7)
        after.invalidate_tag("soups")
        within = [here.peek(op) for op in "abc"]

    assert (["commit"], ["soup 1", "soup 2", "soup 3"]) == (connection.ended, within)
    assert [None, None, "soup 3"] == [here.peek(op) for op in "abc"]
    assert {"sg1:{default:a}": 7} == server.lowest


async def test_after_a_rollback(fleet: tuple[Process, Process], load: Loader) -> None:
    """What was noted within a transaction that is rolled back is dropped."""
    here, _ = fleet
    connection = Connection()
    await here.ask(load)

    async def fail() -> None:
        async with here.guard.after_commit(connection) as after:
            after.invalidate(OP)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await fail()

    assert (["rollback"], "soup 1") == (connection.ended, here.peek())


@pytest.mark.parametrize("version", [-1, 2**53, True, 1.5])
async def test_wrong_version_is_found_before_the_commit(version: Any, fleet: tuple[Process, Process]) -> None:
    """What could not be sent is refused while the transaction can still be rolled back."""
    here, _ = fleet
    connection = Connection()

    async with here.guard.after_commit(connection) as after:
        with pytest.raises(ConfigurationError, match=r"^version="):
            after.invalidate(OP, version=version)
    assert ["commit"] == connection.ended


# How many loads at once


@pytest.mark.parametrize("whose", ["guard", "operation"])
async def test_max_loads(whose: str, load: Loader, pause: Pause) -> None:
    """No more loads than allowed run at once; the others queue, and are run when it is their turn."""
    guard = Guard(max_loads=2 if whose == "guard" else None)
    options: dict[str, Any] = {} if whose == "guard" else {"max_loads": 2}
    gate = load.gate = Gate()
    calls = [asyncio.create_task(guard.fetch(f"menu-{number}", load, **options)) for number in range(5)]
    await pause()
    at_once = gate.arrived
    gate.open()
    answers = await asyncio.gather(*calls)

    assert (2, 5) == (at_once, len(set(answers)))


async def test_budget_counts_in_the_queue(load: Loader) -> None:
    """A load that is not even begun within its budget is ended like one that takes too long."""
    guard = Guard(max_loads=1)
    gate = load.gate = Gate()
    first = asyncio.create_task(guard.fetch("menu-7", load))
    await gate.arrivals(1)

    with pytest.raises(TimeoutError):
        await guard.fetch("menu-8", load, load_timeout=0.001)
    gate.open()

    assert ("soup 1", 1) == (await first, load.loads)


@pytest.mark.parametrize("max_loads", [0, -1, 1.5, True, "2"])
def test_wrong_max_loads(max_loads: Any) -> None:
    """A number of loads is a whole one above zero."""
    with pytest.raises(ConfigurationError, match=r"^max_loads="):
        Guard(max_loads=max_loads)


# Entering and leaving


async def test_bus_that_is_not_there(server: Server, load: Loader, clock: ManualClock) -> None:
    """A guard opens without its bus; until there is one nothing is remembered for longer than a second."""
    process = Process(server)
    process.store.deaf = OSError("down")

    async with process.guard:
        await process.ask(load)
        within = process.peek()
        clock.advance(1)

        assert ("soup 1", None) == (within, process.peek())
        assert "soup 1" == await process.ask(load)


async def test_bus_that_was_silent(fleet: tuple[Process, Process], load: Loader, clock: ManualClock) -> None:
    """After three seconds without a word what is in memory is trusted no more."""
    here, _ = fleet
    await here.ask(load)
    clock.advance(2.9)
    before = here.peek()
    clock.advance(0.1)

    assert ("soup 1", None) == (before, here.peek())


async def test_cancelled_at_the_door(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is cancelled while the guard waits for its bus is not in, and nothing is left of the attempt."""
    process, gate = Process(server), Gate()

    class Hanging:
        async def __aenter__(self) -> None:
            await gate.passage()

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(process.store, "listen", Hanging)
    entering = asyncio.create_task(process.guard.__aenter__())
    await gate.arrivals(1)
    entering.cancel()
    await asyncio.wait([entering])

    assert (True, True) == (entering.cancelled(), process.store.is_closed)
    assert process.guard._states.here() is None


async def test_leaving(server: Server) -> None:
    """A guard that was left listens no more."""
    process = Process(server)
    async with process.guard:
        within = len(server.inboxes)

    assert (1, 0, True) == (within, len(server.inboxes), process.store.is_closed)
