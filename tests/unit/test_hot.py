"""What is called most: each call counts while a count runs, and at no other time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stampede_guard import ConfigurationError, Guard, GuardClosed, HotKey, coalesce, coalesce_many
from stampede_guard._memory import counted
from stampede_guard._memory.counted import CallCounter, counting
from stampede_guard._memory.l1 import Memory
from stampede_guard.testing import Gate, ManualClock

Pause = Callable[[], Awaitable[None]]

SOON = 0.001  # seconds: all calls of a test are made in one step of the loop, before any timer


async def test_each_call_counts(pause: Pause) -> None:
    """Hits, with plain arguments and others, count like joins, misses, and the ids of a loader of many."""
    guard, gate = Guard(), Gate()

    @coalesce("menu-{menu_id}", guard=guard, ttl=60)
    async def load_menu(menu_id: int | str) -> object:
        return menu_id

    @coalesce("slow-{menu_id}", guard=guard, ttl=60)
    async def load_slowly(menu_id: int) -> int:
        await gate.passage()
        return menu_id

    @coalesce_many("dish-{dish_id}", guard=guard, ttl=60)
    async def load_dishes(dish_ids: list[int]) -> dict[int, int]:
        return dict.fromkeys(dish_ids, 1)

    for _ in range(3):
        await load_menu(7)
    await load_dishes([1, 2])
    asking = asyncio.create_task(guard.hot(seconds=SOON))
    await asyncio.sleep(0)
    for _ in range(5):
        await load_menu(7)
    for _ in range(2):
        await load_menu("x y")
    slow = [asyncio.create_task(load_slowly(8)) for _ in range(4)]
    for _ in range(3):
        await load_dishes([1])
    await pause()
    gate.open()
    await asyncio.gather(*slow)

    assert [
        HotKey("menu-7", 5),
        HotKey("slow-8", 4),
        HotKey("dish-1", 3),
        HotKey(load_menu.key("x y"), 2),
    ] == await asking


async def test_nothing_is_left_of_a_count(clock: ManualClock) -> None:
    """After a count memory is what it was, and argument caches answer again."""
    guard = Guard(clock=clock)

    @coalesce("menu-{menu_id}", guard=guard, ttl=60)
    async def load_menu(menu_id: int) -> int:
        return menu_id

    await load_menu(7)
    memory = guard._states.running().memory
    with counting(memory) as outer:
        await load_menu(7)
        with counting(memory) as inner:
            await load_menu(7)
        assert type(memory) is not Memory
        await load_menu(7)
    for _ in range(2):
        await load_menu(7)

    assert type(memory) is Memory
    assert ({"menu-7": 3}, {"menu-7": 1}) == (outer.calls, inner.calls)
    assert 5 == guard.stats().l1_hits
    assert memory._caches


def test_a_count_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """When there are too many ops, those that were called once are forgotten; the others go on."""
    monkeypatch.setattr(counted, "_MOST", 3)
    counter = CallCounter()
    for op in ("a", "a", "b", "c", "d", "d", "e", "e", "f", "a"):
        counter.note(op)

    assert [("a", 3), ("d", 2)] == counter.top(2)
    assert {"a": 3, "d": 2, "e": 2} == counter.calls


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit=0: give a whole number above zero"),
        ({"seconds": 0}, "seconds=0: a duration is more than zero, and finite"),
    ],
)
async def test_wrong_options(options: dict[str, Any], message: str) -> None:
    """Each option has a rule."""
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        await Guard().hot(**options)


async def test_a_guard_with_a_store_has_to_be_open() -> None:
    """A guard that is not open has no calls to count."""
    with pytest.raises(GuardClosed):
        await Guard("redis://localhost").hot()
