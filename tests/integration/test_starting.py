"""Processes that start, over a real server: they load each key once, and take what others call most."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from stampede_guard import Guard, coalesce
from stampede_guard._readiness import sharing
from stampede_guard._readiness.sharing import HotListKeeper
from stampede_guard.testing import Gate

MakeGuard = Callable[..., Guard]


def loader_of(guard: Guard, loads: list[int], gate: Gate | None = None) -> Any:
    """Return a function that notes its loads, and stops at *gate*."""

    @coalesce("menu-{menu_id}", guard=guard, ttl=60, l2_ttl=60, tags=("menu:{menu_id}",))
    async def load_menu(menu_id: int) -> int:
        loads.append(menu_id)
        number = len(loads)
        if gate is not None:
            await gate.passage()
        return number

    return load_menu


async def test_processes_that_warm_up_together_load_each_key_once(make_guard: MakeGuard) -> None:
    """All of them have all values in the end, and each was loaded once."""
    loads: list[int] = []
    async with make_guard() as first, make_guard() as second, make_guard() as third:
        functions = [loader_of(guard, loads) for guard in (first, second, third)]
        made = await asyncio.gather(
            *(function.guard.warm(function, range(40), rate=None, concurrency=20) for function in functions)
        )

        assert list(range(40)) == sorted(loads)
        assert (40, 80, 0) == tuple(
            sum(part) for part in zip(*((x.loaded, x.found, x.failed) for x in made), strict=True)
        )
        assert all(function.peek(key) is not None for function in functions for key in range(40))


async def test_a_process_that_starts_takes_the_hot_list(make_guard: MakeGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the hottest values before its first call, loads nothing, and hears of their invalidation."""
    monkeypatch.setattr(sharing, "_STEPS", 1)
    loads: list[int] = []
    async with make_guard() as old, make_guard() as new:
        before, after = loader_of(old, loads), loader_of(new, loads)
        keeper = HotListKeeper(old._states.running(), old._path, old._registry, 3)
        for key in range(9):
            await before(key)
        sampling = asyncio.create_task(keeper.sample())
        await asyncio.sleep(0)
        for key in range(9):
            for _ in range(key):
                await before(key)
        await sampling
        await keeper.store()

        assert 3 == await new.warm_hot()
        assert [key > 5 for key in range(9)] == [after.peek(key) is not None for key in range(9)]
        assert list(range(9)) == loads
        await old.invalidate_tag("menu:8")
        async with asyncio.timeout(10):
            while after.peek(8) is not None:
                await asyncio.sleep(0.005)


async def test_a_fresh_answer_overtakes_a_load_elsewhere(make_guard: MakeGuard) -> None:
    """A load that another process has begun is neither the answer of `fresh`, nor stored after it."""
    loads: list[int] = []
    gate = Gate()
    async with make_guard() as here, make_guard() as there:
        slow, quick = loader_of(there, loads, gate), loader_of(here, loads)
        begun = asyncio.create_task(slow(7))
        await gate.arrivals(1)

        assert 2 == await quick.fresh(7)
        gate.open()
        assert 1 == await begun
        assert 2 == await slow(7)
