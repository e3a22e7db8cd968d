"""Callers that join a flight which is up, and those that may not."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from threading import Thread
from typing import Any
from weakref import ref

import pytest
from waiting import ticks

from stampede_guard import Guard, RecursiveLoad, coalesce
from stampede_guard.testing import Gate

OP = "menu-7"

Change = Callable[[Guard, Any], Awaitable[object]]


class Kitchen:
    """A loader whose loads take until their gate is opened, and have numbers."""

    def __init__(self, guard: Guard, **options: Any) -> None:
        self.gate = Gate()
        self.loads = 0

        async def load(menu_id: int) -> str:
            self.loads += 1
            number = self.loads
            await self.gate.passage()
            return f"soup {number}"

        self.load: Any = coalesce("menu-{menu_id}", guard=guard, tags=("menus",), **options)(load)

    async def crowd(self, number: int = 5) -> list[asyncio.Task[str]]:
        """Return callers who all wait: for a new flight, or for one that is up."""
        tasks = [asyncio.create_task(self.load(7)) for _ in range(number)]
        await ticks(5)
        return tasks


@pytest.mark.parametrize("options", [{}, {"ttl": 60}, {"ttl": 60, "isolate": True}], ids=["alone", "kept", "isolated"])
async def test_all_of_a_crowd_are_counted(options: dict[str, Any]) -> None:
    """Each caller but the first is a join, however late it comes."""
    guard = Guard()
    kitchen = Kitchen(guard, **options)
    crowd = await kitchen.crowd()
    late = await kitchen.crowd()
    kitchen.gate.open()

    assert ["soup 1"] * 10 == [await task for task in crowd + late]
    stats = guard.stats()
    assert (10, 1, 9, 0) == (stats.calls, stats.executions, stats.joins, stats.l1_hits)


async def test_landed_flight_is_not_joined() -> None:
    """A flight that has landed answers no other caller, and its answer is not kept."""

    class Menu:
        pass

    gate = Gate()

    @coalesce("menu-{menu_id}", guard=Guard())
    async def load(menu_id: int) -> Menu:
        await gate.passage()
        return Menu()

    tasks = [asyncio.create_task(load(7)) for _ in range(3)]
    await ticks(5)
    gate.open()
    first = {id(menu) for menu in [await task for task in tasks]}
    gone = ref(tasks[0].result())
    tasks.clear()
    second = await load(7)
    await ticks(5)
    gc.collect()

    assert len(first) == 1
    assert isinstance(second, Menu)
    assert gone() is None
    assert (2, 2) == (load.guard.stats().executions, load.guard.stats().joins)


async def _by_op(guard: Guard, load: Any) -> None:
    await load.invalidate(7)


async def _by_tag(guard: Guard, load: Any) -> None:
    await guard.invalidate_tag("menus")


async def _by_clearing(guard: Guard, load: Any) -> None:
    await guard.clear()


async def _by_refresh(guard: Guard, load: Any) -> None:
    asyncio.create_task(load.refresh(7)).add_done_callback(lambda _: None)
    await ticks(5)


async def _by_disabling(guard: Guard, load: Any) -> None:
    guard.enabled = False


async def _by_rollout(guard: Guard, load: Any) -> None:
    guard.rollout = 0.0


@pytest.mark.parametrize("change", [_by_op, _by_tag, _by_clearing, _by_refresh, _by_disabling, _by_rollout])
async def test_newcomer_starts_afresh(change: Change) -> None:
    """A change that ends the sharing of a flight lets no other caller join it."""
    guard = Guard()
    kitchen = Kitchen(guard, ttl=60)
    crowd = await kitchen.crowd()

    await change(guard, kitchen.load)
    late = await kitchen.crowd(1)
    kitchen.gate.open()

    assert ["soup 1"] * 5 == [await task for task in crowd]
    assert [await task for task in late] == ["soup 2"]


async def test_sharing_can_be_resumed() -> None:
    """A guard that was disabled and enabled again shares what is launched from then on."""
    guard = Guard()
    kitchen = Kitchen(guard)
    guard.enabled = False
    alone = await kitchen.crowd(2)
    guard.enabled = True
    together = await kitchen.crowd(3)
    kitchen.gate.open()

    assert ["soup 1", "soup 2", *["soup 3"] * 3] == [await task for task in alone + together]


async def test_what_only_looks_alike_is_not_joined() -> None:
    """One and true have ops of their own, and so have flights."""
    gate, seen = Gate(), []

    @coalesce(guard=Guard())
    async def load(menu_id: object) -> object:
        seen.append(menu_id)
        await gate.passage()
        return menu_id

    tasks = [asyncio.create_task(load(menu_id)) for menu_id in (1, 1, 1, True, True, 1.0, "1")]
    await ticks(5)
    gate.open()

    assert [(1, int), (1, int), (1, int), (True, bool), (True, bool), (1.0, float), ("1", str)] == [
        (answer, type(answer)) for answer in [await task for task in tasks]
    ]
    assert 4 == len(seen)


async def test_loader_that_waits_for_itself_in_a_crowd() -> None:
    """A loader that calls itself while others wait for its flight fails, and does not wait for ever."""
    gate = Gate()

    @coalesce("menu-{menu_id}", guard=Guard())
    async def load(menu_id: int) -> str:
        await gate.passage()
        return await load(menu_id)

    tasks = [asyncio.create_task(load(7)) for _ in range(3)]
    await ticks(5)
    gate.open()

    for task in tasks:
        with pytest.raises(RecursiveLoad):
            await task


async def test_another_loop_has_flights_of_its_own() -> None:
    """A call in one loop does not join a flight of another loop."""
    kitchen = Kitchen(Guard())
    crowd = await kitchen.crowd()
    answers: list[str] = []

    async def elsewhere() -> None:
        kitchen.gate = Gate()
        kitchen.gate.open()
        answers.append(await kitchen.load(7))

    gate = kitchen.gate
    thread = Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    await asyncio.to_thread(thread.join)
    gate.open()

    assert (["soup 2"], ["soup 1"] * 5) == (answers, [await task for task in crowd])
