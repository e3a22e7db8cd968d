"""What `fresh` promises: the answer of a load that begins after the call, shared with all that may share it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from inside import new_leases
from leasing import LeasingDouble, Server
from waiting import eventually

from stampede_guard import Guard, InvalidationPending, coalesce, coalesce_many
from stampede_guard.testing import Gate, ManualClock

Pause = Callable[[], Awaitable[None]]

OLD, NEW = "soup", "salad"


class Database:
    """A row. Each read of it takes the row as it is when the read begins, and then stops at a gate of its own.

    Attributes:
        row: The row.
        reads: What was read, in order.
        gates: Of the reads.
    """

    def __init__(self) -> None:
        self.row = OLD
        self.reads: list[str] = []
        self.gates = [Gate() for _ in range(9)]

    async def read(self, _: int = 7) -> str:
        """Read the row."""
        row, gate = self.row, self.gates[len(self.reads)]
        self.reads.append(row)
        await gate.passage()
        return row

    def open(self) -> None:
        """Let all reads pass."""
        for gate in self.gates:
            gate.open()


class Process:
    """A guard over the store of all, and a function that reads the database through it."""

    def __init__(self, server: Server, clock: ManualClock, database: Database, **options: Any) -> None:
        max_loads = options.pop("max_loads", None)
        chosen: Any = {"ttl": 60, "l2_ttl": 60, "load_timeout": None, **options}
        self.store = LeasingDouble(server)
        self.guard = Guard(lambda: self.store, clock=clock, max_loads=max_loads)

        @coalesce("menu-{menu_id}", guard=self.guard, **chosen)
        async def load_menu(menu_id: int) -> str:
            return await database.read(menu_id)

        self.load_menu = load_menu


@pytest.fixture
def server(clock: ManualClock) -> Server:
    """Return an empty store, which all processes of a test share."""
    return Server(clock)


@pytest.fixture
def database() -> Database:
    """Return a database with the old row."""
    return Database()


@pytest.fixture
def process(server: Server, clock: ManualClock, database: Database) -> Callable[..., Process]:
    """Return what makes a process."""
    return lambda **options: Process(server, clock, database, **options)


@pytest.mark.parametrize("options", [{}, {"ttl": None}], ids=["both tiers", "stored only"])
async def test_a_load_that_has_begun_is_not_shared(
    options: dict[str, Any], process: Callable[..., Process], database: Database, pause: Pause
) -> None:
    """A write during a load is seen by callers of `fresh`, which share one load, and by all calls after that."""
    here = process(**options)
    async with here.guard:
        before = asyncio.create_task(here.load_menu(7))
        await database.gates[0].arrivals(1)
        database.row = NEW
        after = [asyncio.create_task(here.load_menu.fresh(7)) for _ in range(3)]
        await pause()
        joined = asyncio.create_task(here.load_menu(7))
        await pause()
        database.open()

        assert (OLD, [NEW] * 3, NEW) == (await before, await asyncio.gather(*after), await joined)
        assert NEW == await here.load_menu(7)
    first, *others = database.reads
    assert (OLD, {NEW}) == (first, set(others))
    assert len(others) <= 2  # an eager load begins within the first of the calls, and the others share the next


async def test_a_load_that_waits_for_its_turn_is_shared(
    process: Callable[..., Process], database: Database, pause: Pause
) -> None:
    """An ordinary load that queues for a slot reads after the call, so `fresh` shares it."""
    here = process(max_loads=1)
    async with here.guard:
        first = asyncio.create_task(here.load_menu(1))
        await database.gates[0].arrivals(1)
        queued = asyncio.create_task(here.load_menu(7))
        await pause()
        database.row = NEW
        fresh = asyncio.create_task(here.load_menu.fresh(7))
        await pause()
        database.open()

        assert (OLD, NEW, NEW) == (await first, await queued, await fresh)
    assert [OLD, NEW] == database.reads


async def test_a_load_that_may_answer_with_an_old_value_is_not_shared(pause: Pause, clock: ManualClock) -> None:
    """Where a failed load is answered with the old value, `fresh` shares no load of a call, and gets the error."""
    gate, guard, fails = Gate(), Guard(max_loads=1, clock=clock), False

    @coalesce("menu-{menu_id}", guard=guard, ttl=1, jitter=0, stale_if_error=60)
    async def load_menu(menu_id: int) -> str:
        await gate.passage()
        if fails:
            raise ConnectionError(menu_id)
        return OLD

    gate.open()
    await load_menu(7)
    gate = Gate()
    clock.advance(2)
    first = asyncio.create_task(load_menu(1))
    await gate.arrivals(1)
    fails = True
    calls = [first, asyncio.create_task(load_menu(7))]
    await pause()
    fresh = asyncio.create_task(load_menu.fresh(7))
    await pause()
    gate.open()

    with pytest.raises(ConnectionError):
        await fresh
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_shared_load_takes_no_value_from_the_store(
    process: Callable[..., Process],
    database: Database,
    pause: Pause,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load that `fresh` shares goes on to its loader, even if its lease has lapsed and the store has a value."""
    leases = new_leases(monkeypatch)
    here, there = process(max_loads=1), process()
    async with here.guard, there.guard:
        first = asyncio.create_task(here.load_menu(1))
        await database.gates[0].arrivals(1)
        queued = asyncio.create_task(here.load_menu(7))
        await eventually(lambda: len(leases) > 1 and leases[1].is_owned)
        other = asyncio.create_task(there.load_menu.fresh(7))
        await database.gates[1].arrivals(1)
        database.gates[1].open()
        database.row = NEW
        assert OLD == await other
        leases[1]._note_loss()
        fresh = asyncio.create_task(here.load_menu.fresh(7))
        await pause()
        database.open()

        assert (OLD, NEW, NEW) == (await first, await queued, await fresh)


async def test_neither_a_stored_value_nor_another_load_is_the_answer(
    process: Callable[..., Process], server: Server, database: Database, pause: Pause
) -> None:
    """`fresh` takes neither what is stored nor what another process loads; nor does it empty that one's memory."""
    here, there = process(), process()
    database.gates[0].open()
    async with here.guard, there.guard:
        assert OLD == await there.load_menu(7)
        database.row = NEW
        said = len(server.published)
        fresh = asyncio.create_task(here.load_menu.fresh(7))
        await database.gates[1].arrivals(1)
        database.open()

        assert NEW == await fresh
        assert said == len(server.published)
        assert (NEW, OLD) == (await here.load_menu(7), await there.load_menu(7))
        await there.load_menu.invalidate(7)
        loading = asyncio.create_task(there.load_menu(7))
        await database.gates[2].arrivals(1)
        database.row = OLD

        assert (OLD, NEW) == (await here.load_menu.fresh(7), await loading)


async def test_a_value_that_is_not_stored_is_an_answer(process: Callable[..., Process], database: Database) -> None:
    """While the store fails, `fresh` answers, and `refresh` says that others may read the older value."""
    here = process()
    database.open()
    async with here.guard:
        await here.load_menu(7)
        database.row = NEW
        here.store.error = TimeoutError()

        assert NEW == await here.load_menu.fresh(7)
        with pytest.raises(InvalidationPending):
            await here.load_menu.refresh(7)
        here.store.error = None


async def test_a_refresh_that_shares_the_load_replaces(
    process: Callable[..., Process], database: Database, pause: Pause
) -> None:
    """A refresh may share a load that `fresh` has asked for; then other processes drop what they have."""
    here, there = process(), process()
    database.gates[0].open()
    async with here.guard, there.guard:
        await there.load_menu(7)
        begun = asyncio.create_task(here.load_menu.fresh(7))
        await database.gates[1].arrivals(1)
        database.row = NEW
        waiting = [asyncio.create_task(ask(7)) for ask in (here.load_menu.fresh, here.load_menu.refresh)]
        await pause()
        database.open()

        assert (OLD, [NEW, NEW]) == (await begun, await asyncio.gather(*waiting))
        await eventually(lambda: there.load_menu.peek(7) is None)
        assert NEW == await there.load_menu(7)
    assert [OLD, OLD, NEW] == database.reads


async def test_many_ids_are_loaded_together(pause: Pause) -> None:
    """`fresh` of a loader of many shares a batch that is still to be sent, and loads what is not in one."""
    gate, guard = Gate(), Guard(max_loads=1)
    asked: list[list[int]] = []

    @coalesce_many("dish-{dish_id}", guard=guard, ttl=60)
    async def load_dishes(dish_ids: list[int]) -> dict[int, str]:
        asked.append(dish_ids)
        await gate.passage()
        return dict.fromkeys(dish_ids, f"read {len(asked)}")

    first = asyncio.create_task(load_dishes([1]))
    await gate.arrivals(1)
    queued = asyncio.create_task(load_dishes([2, 3]))
    await pause()
    fresh = asyncio.create_task(load_dishes.fresh([1, 3]))
    await pause()
    gate.open()

    assert {1: "read 1"} == await first
    assert {2: "read 2", 3: "read 2"} == await queued
    assert {1: "read 3", 3: "read 2"} == await fresh
    assert {1: "read 3"} == await load_dishes([1])
    assert [[1], [2, 3], [1]] == asked
