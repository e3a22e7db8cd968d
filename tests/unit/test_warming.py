"""Warm-ups: many calls by the ordinary path, so many at once, so many loads a second; errors do not end them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from inside import untyped
from leasing import LeasingDouble, Server
from waiting import eventually

from stampede_guard import ConfigurationError, Guard, WarmUp, coalesce, coalesce_many
from stampede_guard.testing import Gate, ManualClock

Pause = Callable[[], Awaitable[None]]
Logged = Callable[[], list[str]]


@pytest.fixture
def server(clock: ManualClock) -> Server:
    """Return an empty store, which all processes of a test share."""
    return Server(clock)


@pytest.fixture
async def guard(server: Server, clock: ManualClock) -> AsyncIterator[Guard]:
    """Return an open guard with that store."""
    async with Guard(lambda: LeasingDouble(server), clock=clock) as guard:
        yield guard


def loader_of(guard: Guard, loads: list[int], gate: Gate | None = None, **options: Any) -> Any:
    """Return a function that notes its loads; it waits at *gate*, and fails for 13."""
    chosen: Any = {"ttl": 60, **options}

    @coalesce("menu-{menu_id}", guard=guard, **chosen)
    async def load_menu(menu_id: int) -> int:
        loads.append(menu_id)
        if gate is not None:
            await gate.passage()
        if menu_id == 13:
            raise LookupError(menu_id)
        return menu_id

    return load_menu


async def test_each_call_ends_in_one_way(guard: Guard, logged: Logged) -> None:
    """Calls that memory has are found, the others load; those that fail, or cannot be made, stop nothing."""
    loads: list[int] = []
    seen: list[WarmUp] = []
    load_menu = loader_of(guard, loads)
    await load_menu(1)

    made = await guard.warm(load_menu, [1, 2, (3,), 13, (4, 5), 6], rate=None, concurrency=2, on_progress=seen.append)

    assert WarmUp(loaded=3, found=1, failed=2) == made == seen[-1]
    assert 6 == made.done
    assert sorted(each.done for each in seen) == [each.done for each in seen]
    assert [1, 2, 3, 13, 6] == loads
    assert [load_menu.peek(each) is not None for each in (1, 2, 3, 6)] == [True] * 4
    assert "menu-{menu_id}: 2 of 6 calls of a warm-up failed (LookupError, TypeError)" in logged()


async def test_two_processes_load_each_key_once(guard: Guard, server: Server, clock: ManualClock) -> None:
    """Processes that start together share the loads by their leases, and all end with all values in memory."""
    loads: list[int] = []
    async with Guard(lambda: LeasingDouble(server), clock=clock) as other:
        functions = [loader_of(each, loads, l2_ttl=60) for each in (guard, other)]
        both = zip((guard, other), functions, strict=True)
        made = await asyncio.gather(*(each.warm(function, range(20, 40), rate=None) for each, function in both))

        assert list(range(20, 40)) == sorted(loads)
        assert (20, 20, 0) == (sum(one.loaded for one in made), sum(one.found for one in made), made[0].failed)
        assert all(function.peek(key) is not None for function in functions for key in range(20, 40))


async def test_only_loads_use_up_the_rate(guard: Guard) -> None:
    """What memory or the store has is no load; after a load, the next call waits for its turn."""
    loads: list[int] = []
    load_menu = loader_of(guard, loads, l2_ttl=60)
    for menu_id in (1, 2):
        await load_menu(menu_id)
    guard._states.running().memory.drop(load_menu.key(2))
    seen: list[WarmUp] = []
    warming = asyncio.create_task(
        guard.warm(load_menu, [1, 2, 3, 4], rate=0.001, concurrency=1, on_progress=seen.append)
    )
    await eventually(lambda: 3 in loads and guard.stats().in_flight == 0)
    for _ in range(10):
        await asyncio.sleep(0)
    warming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await warming

    assert [1, 2, 3] == loads
    assert WarmUp(found=2) in seen


async def test_so_many_at_once(guard: Guard, pause: Pause) -> None:
    """No more calls than asked for are under way, and a warm-up that is cancelled leaves no task behind."""
    loads: list[int] = []
    gate = Gate()
    load_menu = loader_of(guard, loads, gate)
    warming = asyncio.create_task(guard.warm(load_menu, range(9), rate=None, concurrency=3))
    await gate.arrivals(3)
    await pause()
    assert 3 == len(loads)
    warming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await warming
    gate.open()

    await eventually(lambda: not [task for task in asyncio.all_tasks() if task.get_name() == "warm-up"])
    assert [0, 1, 2] == loads


async def test_ids_are_loaded_in_batches(guard: Guard) -> None:
    """A loader of many is called for full batches of the ids that are missing."""
    batches: list[list[int]] = []

    @coalesce_many("dish-{dish_id}", guard=guard, ttl=60, max_batch=3)
    async def load_dishes(dish_ids: list[int]) -> dict[int, int]:
        batches.append(sorted(dish_ids))
        return dict.fromkeys(dish_ids, 1)

    await load_dishes([1])
    made = await guard.warm(load_dishes, [0, 1, 2, 3, 3, 4, 5], rate=None, concurrency=1)

    assert WarmUp(loaded=5, found=1) == made
    assert [[0, 2], [1], [3, 4], [5]] == sorted(batches)


async def test_a_pause_after_a_failure_holds(clock: ManualClock) -> None:
    """What may not load at present is not loaded for a warm-up either."""
    loads: list[int] = []
    guard = Guard(clock=clock)
    load_menu = loader_of(guard, loads, error_backoff=30, stale_on=(LookupError,))
    with pytest.raises(LookupError):
        await load_menu(13)

    assert WarmUp(failed=1) == await guard.warm(load_menu, [13])
    assert [13] == loads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0}, "rate=0: give loads a second, more than zero, or None"),
        ({"rate": True}, "rate=True: give loads a second, more than zero, or None"),
        ({"concurrency": 0}, "concurrency=0: give a whole number above zero"),
        ({"function": len}, "warm: give a function that is decorated with this guard, not <built-in function len>"),
    ],
)
async def test_wrong_options(options: dict[str, Any], message: str, guard: Guard) -> None:
    """Each option has a rule."""
    given = {"function": loader_of(guard, []), **options}
    function = given.pop("function")
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        await guard.warm(untyped(function), [], **given)


async def test_what_keeps_nothing_cannot_be_warm(guard: Guard) -> None:
    """A function without a life, or of another guard, is refused."""
    with pytest.raises(ConfigurationError, match="without ttl= and l2_ttl= nothing is kept"):
        await guard.warm(loader_of(guard, [], ttl=None), [1])
    with pytest.raises(ConfigurationError, match="decorated with this guard"):
        await guard.warm(loader_of(Guard(), []), [1])
