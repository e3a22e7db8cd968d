"""Loaders of many ids over a real server: what is there is not loaded, and a lease holds for each id."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from waiting import until

from stampede_guard import CoalescedMany, Guard, coalesce_many
from stampede_guard._l2.tier import key_of
from stampede_guard.testing import Gate

MakeGuard = Callable[..., Guard]


class Menus:
    """What the loaders of one process read from."""

    def __init__(self, guard: Guard, **options: Any) -> None:
        self.asked: list[list[int]] = []
        self.gate = Gate()
        self.gate.open()
        self.missing: set[int] = set()
        self.error: Exception | None = None
        self.word = "menu"
        self.load = self._loader(guard, {"l2_ttl": 60, **options})

    def _loader(self, guard: Guard, options: Any) -> CoalescedMany[int, str]:
        @coalesce_many("menu-{menu_id}", guard=guard, **options)
        async def load(menu_ids: list[int]) -> dict[int, str]:
            self.asked.append(menu_ids)
            word = self.word
            await self.gate.passage()
            if self.error is not None:
                raise self.error
            return {menu_id: f"{word} {menu_id}" for menu_id in menu_ids if menu_id not in self.missing}

        return load


async def test_only_what_redis_does_not_have_is_loaded(pair: tuple[Guard, Guard]) -> None:
    """Of a hundred ids, those that another process has loaded, missing ones included, are not in the one load."""
    mine, theirs = (Menus(guard) for guard in pair)
    theirs.missing = {7, 8}
    await theirs.load(range(40))

    answer = await mine.load(range(100))

    assert [menu_id for menu_id in range(100) if menu_id not in (7, 8)] == list(answer)
    assert [list(range(40, 100))] == mine.asked
    assert {} == await mine.load([7, 8])
    assert 1 == len(mine.asked)


async def test_each_id_has_a_key_of_its_own(make_guard: MakeGuard, namespace: str, admin: Redis) -> None:
    """What is stored, is stored by id; a missing one too."""
    async with make_guard() as guard:
        menus = Menus(guard)
        menus.missing = {2}
        await menus.load([1, 2])

    keys = [key_of(namespace, f"menu-{menu_id}") for menu_id in (1, 2, 3)]
    assert [1, 1, 0] == [await admin.exists(f"{key}:v") for key in keys]


async def test_nobody_waits_for_an_id_that_another_process_loads(pair: tuple[Guard, Guard]) -> None:
    """The batch goes without it; that id is answered by the other's load, once that is over."""
    mine, theirs = (Menus(guard) for guard in pair)
    theirs.gate = Gate()
    first = asyncio.create_task(theirs.load([3]))
    await theirs.gate.arrivals(1)
    theirs_loaded = asyncio.create_task(mine.load([1, 2, 3]))
    await until(lambda: mine.load.guard.stats().loads, "the others to be loaded")
    assert not theirs_loaded.done()
    theirs.gate.open()

    assert {3: "menu 3"} == await first
    assert {1: "menu 1", 2: "menu 2", 3: "menu 3"} == await theirs_loaded
    assert ([[1, 2]], [[3]]) == (mine.asked, theirs.asked)


async def test_an_id_that_the_other_process_failed_to_load(pair: tuple[Guard, Guard]) -> None:
    """Who waited for another process's load, which failed, loads after all, though the batch is gone."""
    mine, theirs = (Menus(guard) for guard in pair)
    theirs.gate, theirs.error = Gate(), LookupError()
    first = asyncio.create_task(theirs.load([3]))
    await theirs.gate.arrivals(1)
    second = asyncio.create_task(mine.load([1, 3]))
    await until(lambda: mine.load.guard.stats().loads, "the other to be loaded")
    theirs.gate.open()

    with pytest.raises(LookupError):
        await first
    assert {1: "menu 1", 3: "menu 3"} == await second
    assert [[1], [3]] == mine.asked


async def test_of_a_batch_what_is_invalidated_elsewhere_is_not_stored(pair: tuple[Guard, Guard]) -> None:
    """Another process invalidates one of the ids during the load: the others are stored, that one is not."""
    mine, theirs = (Menus(guard, ttl=60) for guard in pair)
    mine.word, mine.gate = "old", Gate()
    call = asyncio.create_task(mine.load([1, 2, 3]))
    await mine.gate.arrivals(1)
    await theirs.load.invalidate(2)
    mine.gate.open()

    assert {1: "old 1", 2: "old 2", 3: "old 3"} == await call
    assert {1: "old 1", 2: "menu 2", 3: "old 3"} == await theirs.load([1, 2, 3])
    assert [[2]] == theirs.asked
    assert {2: "menu 2"} == await mine.load([2])


async def test_several_are_invalidated_everywhere(pair: tuple[Guard, Guard]) -> None:
    """After `invalidate` of several ids no process answers with the old ones."""
    mine, theirs = (Menus(guard, ttl=60) for guard in pair)
    await mine.load([1, 2, 3])
    await theirs.load([1, 2, 3])
    mine.word = theirs.word = "new"
    await mine.load.invalidate(1, 3)

    assert {1: "new 1", 2: "menu 2", 3: "new 3"} == await mine.load([1, 2, 3])
    await until(lambda: all(theirs.load.peek(menu_id) is None for menu_id in (1, 3)), "the other process to hear of it")
    assert {1: "new 1", 2: "menu 2", 3: "new 3"} == await theirs.load([1, 2, 3])
    assert [] == theirs.asked


async def test_a_tag_forgets_the_missing_too(pair: tuple[Guard, Guard]) -> None:
    """Ids that have no value have tags all the same."""
    mine, theirs = (Menus(guard, tags=("menus", "menu:{menu_id}")) for guard in pair)
    mine.missing = {1}
    await mine.load([1, 2])
    await theirs.load.guard.invalidate_tag("menu:1")
    assert {1: "menu 1", 2: "menu 2"} == await theirs.load([1, 2])
    await mine.load.guard.invalidate_tag("menus")
    await theirs.load([1, 2])

    assert [[1], [1, 2]] == theirs.asked


async def test_a_refresh_reaches_the_other_process(pair: tuple[Guard, Guard]) -> None:
    """What is loaded anew replaces what is stored, in one load."""
    mine, theirs = (Menus(guard, ttl=60) for guard in pair)
    await mine.load([1, 2])
    mine.word = "new"

    assert {1: "new 1", 2: "new 2"} == await mine.load.refresh([1, 2])
    assert {1: "new 1", 2: "new 2"} == await theirs.load([1, 2])
    assert ([[1, 2], [1, 2]], []) == (mine.asked, theirs.asked)
