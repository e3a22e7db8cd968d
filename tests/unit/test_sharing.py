"""What the hot list does: a process that starts takes the values that others call most, and loads nothing."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from leasing import LeasingDouble, Server
from waiting import eventually

from stampede_guard import ConfigurationError, Guard, GuardClosed, coalesce, coalesce_many
from stampede_guard._readiness import sharing
from stampede_guard._readiness.sharing import HotListKeeper
from stampede_guard.testing import ManualClock


class Process:
    """A guard over the store of all, and functions that note their loads."""

    def __init__(self, server: Server, clock: ManualClock) -> None:
        self.store = LeasingDouble(server)
        self.guard = Guard(lambda: self.store, clock=clock)
        self.loads: list[object] = []

        @coalesce("menu-{menu_id}", guard=self.guard, ttl=60, l2_ttl=600, tags=("menus", "menu:{menu_id}"))
        async def load_menu(menu_id: int) -> list[int]:
            self.loads.append(menu_id)
            return [menu_id]

        @coalesce("own-{menu_id}", guard=self.guard, ttl=60, l2_ttl=600, isolate=True)
        async def load_own(menu_id: int) -> list[int]:
            self.loads.append(-menu_id)
            return [menu_id]

        @coalesce("local-{menu_id}", guard=self.guard, ttl=60)
        async def load_here(menu_id: int) -> int:
            return menu_id

        @coalesce_many("dish-{dish_id}", guard=self.guard, ttl=60, l2_ttl=600)
        async def load_dishes(dish_ids: list[int]) -> dict[int, str]:
            self.loads.append(dish_ids)
            return dict.fromkeys(dish_ids, "soup")

        self.load_menu, self.load_own, self.load_here, self.load_dishes = load_menu, load_own, load_here, load_dishes

    def keeper(self, limit: int = 10) -> HotListKeeper:
        """Return a keeper of the hot list, which does nothing by itself."""
        guard = self.guard
        return HotListKeeper(guard._states.running(), guard._path, guard._registry, limit)

    async def call(self) -> None:
        """Call some functions, some more often than others."""
        for _ in range(5):
            await self.load_menu(7)
        for _ in range(4):
            await self.load_dishes([1, 2])
        for _ in range(3):
            await self.load_own(8)
        for _ in range(9):
            await self.load_here(9)
        await self.guard.fetch("fetched", lambda: asyncio.sleep(0, "soup"), returns=str, ttl=60, l2_ttl=600)


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a sample take no longer than the calls of a test, which are made in one step of the loop."""
    monkeypatch.setattr(sharing, "_STEP", 0.001)
    monkeypatch.setattr(sharing, "_STEPS", 1)


@pytest.fixture
def process(clock: ManualClock) -> Callable[[], Process]:
    """Return what makes a process; all have one store."""
    server = Server(clock)
    return lambda: Process(server, clock)


async def share(process: Process, limit: int = 10) -> HotListKeeper:
    """Let *process* call, count that, and store its list."""
    keeper = process.keeper(limit)
    await process.call()
    sampling = asyncio.create_task(keeper.sample())
    await asyncio.sleep(0)
    await process.call()
    await sampling
    await keeper.store()
    return keeper


async def test_a_process_that_starts_takes_what_is_hot(process: Callable[[], Process]) -> None:
    """It has the values of functions that are stored in memory, with their tags, before its first call."""
    old, new = process(), process()
    async with old.guard, new.guard:
        await share(old)
        asked = len(new.store.asked)
        taken = await new.guard.warm_hot()

        assert 4 == taken
        assert [] == new.loads
        assert "fill" not in new.store.asked[asked:]
        assert new.load_own.peek(8) is not None
        before = new.guard.stats().executions
        assert ([7], {1: "soup", 2: "soup"}) == (await new.load_menu(7), await new.load_dishes([1, 2]))
        assert ([], before) == (new.loads, new.guard.stats().executions)
        await old.guard.invalidate_tag("menu:7")
        await eventually(lambda: new.load_menu.peek(7) is None)


async def test_the_hottest_come_first(process: Callable[[], Process]) -> None:
    """Of more ops than the limit, those that are called most are stored and taken."""
    old, new = process(), process()
    async with old.guard, new.guard:
        await share(old, limit=3)
        keeper = new.keeper(limit=2)

        assert 2 == await keeper.take()
        assert ["menu-7", "dish-1"] == list(keeper.scores)
        assert [True, True, False, False] == [
            entry is not None
            for entry in (new.load_menu.peek(7), new.load_dishes.peek(1), new.load_dishes.peek(2), new.load_own.peek(8))
        ]


async def test_a_busy_process_counts_for_a_moment(
    process: Callable[[], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample ends when it has enough calls."""
    monkeypatch.setattr(sharing, "_STEPS", 1_000_000)
    monkeypatch.setattr(sharing, "_ENOUGH", 9)
    old = process()
    async with old.guard:
        keeper = await share(old)

    assert 10 == keeper.scores["local-9"] + 1


async def test_what_is_gone_is_left_out(process: Callable[[], Process]) -> None:
    """A value that the store has no more is not loaded; its lease is given back, and what memory has is not read."""
    old, new = process(), process()
    async with old.guard, new.guard:
        await share(old)
        await new.load_own(8)
        await old.load_menu.invalidate(7)

        assert 2 == await new.guard.warm_hot()
        await eventually(lambda: not old.store.server.leases)
        assert [] == new.loads


async def test_a_list_outlives_its_writer(process: Callable[[], Process]) -> None:
    """A process that has taken the list hands it on; with each sample older calls count for less."""
    old, new = process(), process()
    async with old.guard, new.guard:
        first = await share(old)
        keeper = new.keeper()
        await keeper.take()
        assert first.scores["menu-7"] == keeper.scores["menu-7"]
        await keeper.sample()
        assert 0 < keeper.scores["menu-7"] < first.scores["menu-7"]
        await keeper.store()

        assert 4 == await process_started(process())


async def process_started(process: Process) -> int:
    """Return how many values *process* takes when it starts."""
    async with process.guard:
        return await process.guard.warm_hot()


async def test_operations_that_are_unknown_are_skipped(process: Callable[[], Process], clock: ManualClock) -> None:
    """A release that has another function takes nothing for it, and without a list nothing is taken."""
    old = process()
    async with old.guard, Guard(lambda: LeasingDouble(old.store.server), clock=clock) as other:
        assert 0 == await other.warm_hot()
        await old.keeper().store()
        await share(old)

        assert 0 == await other.warm_hot()


async def test_a_store_that_fails_keeps_no_process_from_starting(process: Callable[[], Process]) -> None:
    """Without the store there is nothing to take, and no error."""
    old, new = process(), process()
    async with AsyncExitStack() as stack:
        for each in (old, new):
            await stack.enter_async_context(each.guard)
        await share(old)
        new.store.error = TimeoutError()

        assert 0 == await new.guard.warm_hot()
        new.store.error = None


async def test_the_list_is_kept_until_the_guard_is_left(
    process: Callable[[], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has taken the list goes on to sample and to store it, in one task, until it leaves."""
    monkeypatch.setattr(sharing, "_PAUSE", 0.001)
    old, new = process(), process()
    async with old.guard, new.guard:
        for _ in range(2):
            await old.guard.warm_hot()
        (chore,) = old.guard._states.running().chores.values()
        await old.call()
        keeper = new.keeper()
        while "menu-7" not in keeper.scores:
            await old.load_menu(7)
            await keeper.take()
            await asyncio.sleep(0)

    assert chore.cancelled()


@pytest.mark.parametrize(
    ("store", "limit", "error", "message"),
    [
        ("redis://localhost", 0, ConfigurationError, "limit=0: give a whole number above zero"),
        (None, 1, ConfigurationError, "warm_hot: the list is shared through the store; this guard has none"),
        ("redis://localhost", 1, GuardClosed, "this guard has a store, and is not open"),
    ],
)
async def test_wrong_uses(store: Any, limit: int, error: type[Exception], message: str) -> None:
    """The list needs a store, and an open guard."""
    with pytest.raises(error, match=f"^{message}"):
        await Guard(store).warm_hot(limit)
