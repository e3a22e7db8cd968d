"""What a refresh promises: it shares no load that began before it, and leaves nothing older behind."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Unpack

import pytest
from inside import tier_of, untyped
from leasing import LeasingDouble, Server
from waiting import eventually

from stampede_guard import Guard, InvalidationPending, LoadCancelled, RecursiveLoad, coalesce, coalesce_many
from stampede_guard._bus import backplane
from stampede_guard._operations.operation import Operation
from stampede_guard._operations.options import Options
from stampede_guard._operations.policy import Policy
from stampede_guard.stores import AcquireResult
from stampede_guard.testing import FaultStore, Gate, ManualClock

Pause = Callable[[], Awaitable[None]]

OP = "menu-7"
KEY = "sg1:{default:menu-7}"


def plain(guard: Guard, **options: Unpack[Options]) -> Operation:
    """Return an operation of *guard*."""
    return guard._add_operation("menus", Policy.from_options(options), annotation=lambda: str)


@pytest.fixture
def store(clock: ManualClock) -> FaultStore:
    """Return an empty store."""
    return FaultStore(clock)


@pytest.fixture
async def guard(clock: ManualClock, store: FaultStore) -> AsyncIterator[Guard]:
    """Return an open guard with a plain store."""
    async with Guard(lambda: store, clock=clock) as guard:
        yield guard


class Database:
    """A row, and reads of it that each stop at a gate of their own after they have read.

    Attributes:
        reads: What was read, in order.
        most: How many reads there were at once, at most.
    """

    def __init__(self) -> None:
        self.row = "soup"
        self.gates = [Gate() for _ in range(9)]
        self.reads: list[str] = []
        self.most = 0
        self._now = 0

    async def read(self) -> str:
        row, gate = self.row, self.gates[len(self.reads)]
        self.reads.append(row)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await gate.passage()
        finally:
            self._now -= 1
        return row

    def open(self) -> None:
        """Let all reads pass."""
        for gate in self.gates:
            gate.open()


@pytest.mark.parametrize("options", [{}, {"l2_ttl": 60}], ids=["in memory", "stored"])
async def test_refresh_shares_no_load_that_has_begun(options: dict[str, Any], guard: Guard, pause: Pause) -> None:
    """Who refreshes after a write gets what was read after that; those who wait meanwhile share the next load."""
    operation, database = plain(guard, ttl=60, **options), Database()
    await_row = partial(guard._path.refresh, operation, OP, database.read)
    first = asyncio.create_task(await_row())
    await database.gates[0].arrivals(1)
    database.row = "salad"
    later = [asyncio.create_task(await_row()) for _ in range(3)]
    caller = asyncio.create_task(guard._path.get(operation, OP, database.read))
    await pause()
    database.open()

    assert ("soup", ["salad"] * 3, "salad") == (await first, await asyncio.gather(*later), await caller)
    assert (["soup", "salad"], 1) == (database.reads, database.most)
    assert "salad" == await guard._path.get(operation, OP, database.read)
    assert (2, 3, 0) == ((stats := guard.stats()).executions, stats.joins, stats.in_flight)


@pytest.mark.parametrize("options", [{}, {"l2_ttl": 60}], ids=["in memory", "stored"])
async def test_refresh_that_lands_before_the_next_is_no_step_back(
    options: dict[str, Any], guard: Guard, pause: Pause
) -> None:
    """Who has refreshed is not answered with what was there before, though another refresh waits, and then fails."""
    operation, database = plain(guard, ttl=60, **options), Database()
    database.gates[0].open()
    ask = partial(guard._path.get, operation, OP, database.read)
    await ask()
    database.row = "salad"
    first = asyncio.create_task(guard._path.refresh(operation, OP, database.read))
    await database.gates[1].arrivals(1)
    second = asyncio.create_task(guard._path.refresh(operation, OP, untyped(lambda: 1 / 0)))
    await pause()
    database.open()
    refreshed = await first
    with pytest.raises(ZeroDivisionError):
        await second

    assert ("salad", "salad") == (refreshed, await ask())


@pytest.mark.parametrize("on_abandon", ["finish", "cancel"])
async def test_next_refresh_keeps_nobody(on_abandon: Any, guard: Guard, pause: Pause) -> None:
    """A refresh that waits for its turn is no waiter of the one before: that is abandoned, or goes on, as ever."""
    operation, database = plain(guard, ttl=60, on_abandon=on_abandon), Database()
    first = asyncio.create_task(guard._path.refresh(operation, OP, database.read))
    await database.gates[0].arrivals(1)
    second = asyncio.create_task(guard._path.refresh(operation, OP, database.read))
    await pause()
    first.cancel()
    await pause()
    begun = len(database.reads)
    database.open()

    assert ("soup", 1 if on_abandon == "finish" else 2) == (await second, begun)


async def test_next_refresh_that_is_left(guard: Guard, pause: Pause) -> None:
    """A refresh whose callers leave before its turn never loads, if it is to be cancelled then."""
    operation, database = plain(guard, ttl=60, on_abandon="cancel"), Database()
    calls = []
    for _ in range(2):
        calls.append(asyncio.create_task(guard._path.refresh(operation, OP, database.read)))
        await database.gates[0].arrivals(1)
        await pause()
    calls[1].cancel()
    await pause()
    database.open()

    assert "soup" == await calls[0]
    await pause()
    assert (["soup"], 0) == (database.reads, guard.stats().in_flight)


async def test_refreshes_that_are_left_multiply_no_loads(guard: Guard, pause: Pause) -> None:
    """However many leave before their turn, the next waits for the one that loads, and is not beside it."""
    operation, database = plain(guard, ttl=60, on_abandon="cancel"), Database()
    first = asyncio.create_task(guard._path.refresh(operation, OP, database.read))
    await database.gates[0].arrivals(1)
    for _ in range(3):
        left = asyncio.create_task(guard._path.refresh(operation, OP, database.read))
        await pause()
        left.cancel()
        await pause()
    database.row = "salad"
    last = asyncio.create_task(guard._path.refresh(operation, OP, database.read))
    await pause()
    database.open()

    assert ("soup", "salad") == (await first, await last)
    assert (["soup", "salad"], 1) == (database.reads, database.most)


async def test_next_refresh_and_an_invalidation(guard: Guard, pause: Pause) -> None:
    """A refresh that was invalidated before its turn still answers, and is remembered: it read after that."""
    operation, database = plain(guard, ttl=60, l2_ttl=60), Database()
    calls = []
    for _ in range(2):
        calls.append(asyncio.create_task(guard._path.refresh(operation, OP, database.read)))
        await database.gates[0].arrivals(1)
        await pause()
    await guard._invalidator.invalidate(OP)
    database.row = "salad"
    database.open()

    assert ["soup", "salad"] == await asyncio.gather(*calls)
    assert "salad" == await guard._path.get(operation, OP, database.read)


async def test_shut_down_ends_the_refresh_that_waits(clock: ManualClock, pause: Pause) -> None:
    """Leaving a guard lets the running refresh and the next one land, or cancels both."""
    for drain_timeout in (5, 0):
        guard, database, calls = Guard(drain_timeout=drain_timeout, clock=clock), Database(), []
        operation = plain(guard)
        async with guard:
            for _ in range(2):
                calls.append(asyncio.create_task(guard._path.refresh(operation, OP, database.read)))
                await database.gates[0].arrivals(1)
                await pause()
            if drain_timeout:
                database.open()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)

        assert [str if drain_timeout else LoadCancelled] * 2 == [type(outcome) for outcome in outcomes]
        assert (2 if drain_timeout else 1) == len(database.reads)


async def test_circle_through_the_turns_of_refreshes(guard: Guard) -> None:
    """A load that waits for the next refresh of an op, whose present one waits for that load, is stopped."""
    operation, gate = plain(guard), Gate()

    async def load_menu() -> Any:
        await gate.passage()
        return await guard._path.get(operation, "dish", load_dish)

    async def load_dish() -> Any:
        return await guard._path.refresh(operation, OP, load_menu)

    first = asyncio.create_task(guard._path.refresh(operation, OP, load_menu))
    await gate.arrivals(1)
    dish = asyncio.create_task(guard._path.get(operation, "dish", load_dish))
    await eventually(lambda: guard.stats().in_flight == 3)
    gate.open()

    assert [RecursiveLoad] * 2 == [type(each) for each in await asyncio.gather(first, dish, return_exceptions=True)]


# A value that cannot be stored


class Process:
    """A guard of a fleet that shares a server, and its own way there."""

    def __init__(self, server: Server, **options: Any) -> None:
        self.store = LeasingDouble(server)
        self.guard = Guard(lambda: self.store, clock=server.clock, **options)
        self.database = Database()
        self.database.open()

    def operation(self, **options: Any) -> Operation:
        """Return an operation that both tiers remember."""
        chosen: Any = {"ttl": 60, "l2_ttl": 60, "jitter": 0} | options
        return plain(self.guard, **chosen)

    async def ask(self, **options: Any) -> str:
        """Call."""
        return await self.guard._path.get(self.operation(**options), OP, self.database.read)

    def refresh(self, row: str = "new", **options: Any) -> "asyncio.Task[str]":
        """Write, and begin a refresh."""
        self.database.row = row
        return asyncio.create_task(self.guard._path.refresh(self.operation(**options), OP, self.database.read))

    def remembered(self) -> str | None:
        """Return what is in memory."""
        entry = self.guard.peek(OP)
        return None if entry is None else entry.value


@pytest.fixture
async def fleet(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Process, Process]]:
    """Return two processes, of which the first does not store values of more than ten bytes; neither beats."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 3_600.0)
    here, there = Process(server, max_bytes=10), Process(server)
    async with here.guard, there.guard:
        for process in (here, there):
            process.database.row = "old"
        await there.ask()
        await here.ask()
        yield here, there


async def nothing_old_is_left(fleet: tuple[Process, Process], server: Server) -> None:
    """Check that both processes load anew, and find nothing in the store."""
    for process in fleet:
        await eventually(lambda: process.remembered() != "old")  # noqa: B023
        process.database.row = "newest"
    assert KEY not in server.values
    assert ("newest", "newest") == (await fleet[1].ask(), await fleet[1].ask(ttl=None))


async def _lost(here: Process, there: Process, server: Server) -> None:
    server.leases.clear()


async def _failing_refresh(here: Process, there: Process, server: Server) -> None:
    operation = there.operation()
    with pytest.raises(ZeroDivisionError):
        await there.guard._path.refresh(operation, OP, untyped(lambda: 1 / 0))
    await eventually(lambda: not server.leases)


async def _newer_version(here: Process, there: Process, server: Server) -> None:
    server.versions[KEY] = 9


async def _another_server(here: Process, there: Process, server: Server) -> None:
    here.store.generation += 1


@pytest.mark.parametrize(
    ("happens", "row", "options"),
    [
        (_lost, "new", {}),
        (_failing_refresh, "new", {}),
        (_newer_version, "new", {"version": len}),
        (_another_server, "new", {}),
        (None, "longer than ten bytes", {}),
    ],
    ids=["lease lost", "another's refresh that fails", "version", "failover", "too large"],
)
async def test_refresh_that_is_not_stored_leaves_nothing_older(
    happens: Any, row: str, options: Any, fleet: tuple[Process, Process], server: Server
) -> None:
    """When the value of a refresh is not stored, for any reason, the older one is gone when it returns, everywhere."""
    here, there = fleet
    here.database.gates[0] = Gate()
    refresh = here.refresh(row, **options)
    await here.database.gates[0].arrivals(1)
    if happens is not None:
        await happens(here, there, server)
    here.database.gates[0].open()

    assert row == await refresh
    await nothing_old_is_left(fleet, server)


@pytest.mark.parametrize("is_up", [False, True], ids=["from the beginning", "at the fill"])
async def test_refresh_without_an_answer(is_up: bool, fleet: tuple[Process, Process], server: Server) -> None:
    """When the store hangs, a refresh raises with the value; nothing older is answered here, and later nowhere."""
    here, _ = fleet
    here.database.gates[0] = Gate()
    if not is_up:
        here.store.error = TimeoutError()
    refresh = here.refresh()
    await here.database.gates[0].arrivals(1)
    here.store.error = TimeoutError()
    here.database.gates[0].open()

    with pytest.raises(InvalidationPending, match=rf"^refreshed, but .*: {OP}: not confirmed by the store") as pending:
        await refresh
    assert ("new", True) == (pending.value.value, KEY in server.values)
    here.database.row = "newer"
    here.guard._states.running().memory.clear()
    assert "newer" == await here.ask(ttl=None)
    here.store.error = None
    await tier_of(here.guard).repeat_invalidations()
    await nothing_old_is_left(fleet, server)


async def test_refresh_is_followed_by_nothing_older_after_the_bus_was_lost(fleet: tuple[Process, Process]) -> None:
    """What began to read after a gap on the bus, and before the fill, is not remembered after the refresh."""
    here, _ = fleet
    here.database.gates[0] = Gate()
    refresh = here.refresh()
    await here.database.gates[0].arrivals(1)
    here.guard._states.running().on_cleared()
    late, acquire = Gate(), here.store.acquire

    async def answer_late(*args: Any) -> AcquireResult:
        verdict = await acquire(*args)
        await late.passage()
        return verdict

    untyped(here.store).acquire = answer_late
    call = asyncio.create_task(here.ask())
    await late.arrivals(1)
    here.database.gates[0].open()

    assert "new" == await refresh
    untyped(here.store).acquire = acquire
    assert "new" == await here.ask()
    late.open()
    assert ("old", "new") == (await call, here.remembered())


async def test_confirmed_refresh_is_said_again_after_a_failover(fleet: tuple[Process, Process], server: Server) -> None:
    """What a refresh stored may be lost with the server, and what it replaced come back: so that is invalidated."""
    here, _ = fleet
    old = server.values[KEY]
    assert "new" == await here.refresh()
    server.values[KEY] = old  # on the server that takes over
    here.store.generation += 1
    here.guard._states.running().memory.clear()

    here.database.row = "newest"
    assert "newest" == await here.ask()
    assert old != server.values[KEY]


async def test_callers_who_only_ask_get_the_answer(fleet: tuple[Process, Process]) -> None:
    """A caller who joins a refresh that cannot be stored gets its value, and no error."""
    here, _ = fleet
    here.database.gates[0] = Gate()
    refresh = here.refresh()
    await here.database.gates[0].arrivals(1)
    here.guard._states.running().memory.clear()
    call = asyncio.create_task(here.ask())
    await eventually(lambda: here.guard.stats().joins == 1)
    here.store.error = TimeoutError()
    here.database.gates[0].open()

    assert "new" == await call
    with pytest.raises(InvalidationPending):
        await refresh


async def test_refresh_of_many_without_an_answer(fleet: tuple[Process, Process]) -> None:
    """The error has the values of all ids, and names one of them."""
    here, _ = fleet

    @coalesce_many("menu-{menu_id}", guard=here.guard, l2_ttl=60)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        return {menu_id: "new" for menu_id in menu_ids if menu_id < 9}

    assert {7: "new"} == await load.refresh([7, 9])
    here.store.error = TimeoutError()
    with pytest.raises(InvalidationPending, match=r"2 of 2 invalidations, menu-7, menu-9: not confirmed") as pending:
        await load.refresh([7, 9])
    with pytest.raises(InvalidationPending, match=r"stored: menu-7: not confirmed"):
        await load.refresh([7])

    assert {7: "new"} == pending.value.value


async def test_refresh_of_what_is_in_memory_alone(fleet: tuple[Process, Process], server: Server) -> None:
    """Other processes that remember an op without L2 are told of a refresh, and who refreshes, whether they were."""
    here, there = fleet
    await there.ask(l2_ttl=None)
    assert "new" == await here.refresh(l2_ttl=None)
    await eventually(lambda: there.remembered() is None)
    here.store.error = TimeoutError()
    with pytest.raises(InvalidationPending) as pending:
        await here.refresh("newer", l2_ttl=None)

    assert ("newer", "newer") == (pending.value.value, here.remembered())


async def test_refresh_of_an_instances_own(fleet: tuple[Process, Process]) -> None:
    """What means nothing to other processes is nothing to tell them."""
    here, _ = fleet

    class Menus:
        @coalesce(guard=here.guard, ttl=60)
        async def load(self) -> str:
            return "new"

    here.store.asked.clear()

    assert "new" == await Menus().load.refresh()
    assert [] == here.store.asked


async def test_shut_down_before_the_invalidation_is_confirmed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who refreshes gets the value, though the guard is left before the store has said anything: it is heard out."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 3_600.0)
    here = Process(server, max_bytes=1, drain_timeout=0)
    async with here.guard:
        here.database.gates[0] = Gate()
        refresh = here.refresh()
        await here.database.gates[0].arrivals(1)
        here.store.gate = Gate()
        here.database.gates[0].open()
        await eventually(lambda: "invalidate" in here.store.asked)
        asyncio.get_running_loop().call_later(0.05, here.store.gate.open)

    assert "new" == await refresh
    assert KEY not in server.values
