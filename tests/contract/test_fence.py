"""What was loaded before an invalidation is never stored after it, whoever invalidates and whoever loads."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from inside import echoed, is_expecting, tier_of
from task_factories import in_force, pytest_generate_tests, task_factory
from waiting import until

from stampede_guard import ConfigurationError, Guard, coalesce
from stampede_guard._l2.tier import key_of
from stampede_guard.testing import Gate

__all__ = ("in_force", "pytest_generate_tests", "task_factory")

MakeGuard = Callable[..., Guard]
Pair = tuple[Guard, Guard]
Invalidate = Callable[[Guard], Awaitable[None]]

OP = "menu-7"
TAG = "menus"


async def by_op(guard: Guard) -> None:
    """Invalidate the op."""
    await guard.invalidate(OP)


async def by_tag(guard: Guard) -> None:
    """Invalidate its tag."""
    await guard.invalidate_tag(TAG)


async def by_clearing(guard: Guard) -> None:
    """Invalidate everything."""
    await guard.clear()


WHO = pytest.mark.parametrize("is_other", [False, True], ids=["same guard", "another guard"])
WAYS = pytest.mark.parametrize("invalidate", [by_op, by_tag, by_clearing])


class Table:
    """What a database has, behind a gate that reads pass after they have read."""

    def __init__(self, content: str | int, *, is_open: bool = True) -> None:
        self.content: Any = content
        self.gate = Gate()
        if is_open:
            self.gate.open()

    async def read(self) -> Any:
        """Read, and take one's time to come back with it."""
        content = self.content
        await self.gate.passage()
        return content


def ask(guard: Guard, table: Table, **options: Any) -> "asyncio.Task[Any]":
    """Begin a call that both tiers remember, and that has a tag."""
    options = {"ttl": 60, "l2_ttl": 60, "returns": str, "tags": (TAG,), **options}
    return asyncio.create_task(guard.fetch(OP, table.read, **options))


def ask_versioned(guard: Guard, table: Table, **options: Any) -> "asyncio.Task[Any]":
    """Begin such a call for a number that is its own version."""
    return ask(guard, table, returns=int, version=int, **options)


def refreshing(guard: Guard, table: Table, kind: type = str, **options: Any) -> Callable[[], Any]:
    """Return what refreshes the op."""

    async def load() -> Any:
        return await table.read()

    load.__annotations__["return"] = kind
    return coalesce(OP, guard=guard, ttl=60, l2_ttl=60, tags=(TAG,), **options)(load).refresh


def remembered(guard: Guard) -> Any:
    """Return what *guard* remembers."""
    entry = guard.peek(OP)
    return None if entry is None else entry.value


async def is_stored(guard: Guard) -> bool:
    """Return whether the store has a value of the op."""
    tier = tier_of(guard)
    return bool(await tier.store.stored_by(f"{key_of(guard._namespace, OP)}:v"))


@WAYS
@WHO
@pytest.mark.parametrize("is_refresh", [False, True], ids=["load", "refresh"])
async def test_load_in_flight_is_neither_stored_nor_remembered(
    is_refresh: bool, invalidate: Invalidate, is_other: bool, pair: Pair, make_guard: MakeGuard
) -> None:
    """The value that was read before goes to the callers that wait for it; no caller gets it afterwards."""
    first, second = pair
    table = Table("old", is_open=False)
    call = asyncio.create_task(refreshing(first, table)()) if is_refresh else ask(first, table)
    await table.gate.arrivals(1)
    table.content = "new"

    await invalidate(second if is_other else first)
    table.gate.open()

    assert await call == "old"
    await until(lambda: remembered(first) is None, "the word to arrive")
    assert 1 == first.stats().overtaken
    assert ["new", "new"] == [await ask(guard, table) for guard in pair]
    async with make_guard() as third:
        assert await ask(third, Table("not asked for")) == "new"


@WAYS
@WHO
async def test_unleased_load_in_flight_is_not_remembered(invalidate: Invalidate, is_other: bool, pair: Pair) -> None:
    """Who loads without the right to store remembers no more than who has it."""
    first, second = pair
    table = Table("old", is_open=False)
    calls = [ask(second, table)]
    await table.gate.arrivals(1)
    calls.append(ask(first, table, lease=False))
    await table.gate.arrivals(2)
    table.content = "new"

    await invalidate(second if is_other else first)
    await echoed(first)
    table.gate.open()

    assert ["old", "old"] == await asyncio.gather(*calls)
    assert remembered(first) is None
    assert await ask(first, table) == "new"


@WAYS
async def test_callers_after_an_invalidation_do_not_join(invalidate: Invalidate, pair: Pair) -> None:
    """Whoever calls after the invalidation gets what was read after it, though the old load is still under way."""
    first, second = pair
    table = Table("old", is_open=False)
    old = ask(first, table)
    await table.gate.arrivals(1)
    table.content = "new"
    await invalidate(first)

    if invalidate is by_op:
        calls = [ask(first, table)]
        await table.gate.arrivals(2)
        calls.append(ask(second, table))
        table.gate.open()
    else:  # the lease is the old load's until that is over
        calls = [ask(first, table), ask(second, table)]
        await until(lambda: all(is_expecting(guard, OP) for guard in pair), "both to wait")
        table.gate.open()

    assert await old == "old"
    assert ["new", "new"] == await asyncio.gather(*calls)
    assert remembered(first) == "new"


@pytest.mark.usefixtures("long_leases")
async def test_waiter_elsewhere_loads_at_once(make_guard: MakeGuard) -> None:
    """An invalidation wakes those who wait for the load that it makes worthless; one of them loads anew."""
    async with make_guard() as first, make_guard() as second, make_guard() as third:
        slow, table = Table("old", is_open=False), Table("new")
        old = ask(first, slow)
        await slow.gate.arrivals(1)
        call = ask(second, table)
        await until(lambda: is_expecting(second, OP), "the other to wait")

        await third.invalidate(OP)

        assert await call == "new"
        slow.gate.open()
        assert await old == "old"
        assert await ask(third, slow) == "new"


@WAYS
@WHO
async def test_value_that_was_read_from_the_store_before_is_not_remembered(  # fixtures
    invalidate: Invalidate,
    is_other: bool,
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A value that is on its way from the store when the invalidation comes is not put into memory."""
    first, second = pair
    await ask(second, Table("old"))
    gate = Gate()
    store: Any = tier_of(first).store
    acquire = store.acquire

    async def later(pending: Any) -> Any:
        result = await pending
        await gate.passage()
        return result

    monkeypatch.setattr(store, "acquire", lambda request: asyncio.create_task(later(acquire(request))))
    call = ask(first, Table("not asked for"))
    await gate.arrivals(1)
    await invalidate(second if is_other else first)
    await echoed(first)
    gate.open()

    assert await call == "old"
    assert remembered(first) is None
    assert await ask(first, Table("new")) == "new"


@pytest.mark.parametrize("is_refresh", [False, True], ids=["load", "refresh"])
async def test_lagging_value_is_refused(is_refresh: bool, pair: Pair) -> None:
    """After `invalidate(version=3)` a 2 goes to whoever waits and no further; a 3 is stored and remembered."""
    first, second = pair
    table = Table(2)
    ask_once = refreshing(first, table, int, version=int) if is_refresh else lambda: ask_versioned(first, table)
    await second.invalidate(OP, version=3)

    assert [2, 2] == [await ask_once(), await ask_once()]
    assert remembered(first) is None
    assert (False, True) == (await is_stored(first), tier_of(first).leases.is_idle)
    assert first.stats().overtaken == 2

    table.content = 3
    assert await ask_once() == 3
    assert remembered(first) == 3
    assert await ask_versioned(second, Table(99)) == 3


async def test_lagging_value_is_refused_by_the_version_that_is_stored(pair: Pair) -> None:
    """A refresh from a replica that lags stores nothing, and leaves nothing: what was stored may be older too."""
    first, second = pair
    assert await ask_versioned(first, Table(5)) == 5

    assert await refreshing(second, Table(4), int, version=int)() == 4

    await until(lambda: remembered(first) is None, "the word to arrive")
    assert [4, 4, 5] == [await ask_versioned(guard, Table(row)) for guard, row in ((first, 4), (second, 4), (first, 5))]
    assert await ask_versioned(second, Table(99)) == 5
    assert tier_of(second).leases.is_idle


async def test_lagging_value_without_the_right_is_not_remembered(pair: Pair) -> None:
    """Nobody checks the version of a value that is not stored, so it is not trusted for long."""
    first, second = pair
    slow, table = Table(3, is_open=False), Table(2)
    await second.invalidate(OP, version=3)
    call = ask_versioned(first, slow)
    await slow.gate.arrivals(1)

    assert await ask_versioned(second, table, lease=False) == 2
    entry = second._states.running().memory.get(OP)

    assert entry is None or entry.fresh_until - second._clock() <= 1
    slow.gate.open()
    assert await call == 3


async def test_lowest_version_only_rises(pair: Pair) -> None:
    """An invalidation that names an older version, or none, leaves the lowest one as it is."""
    first, second = pair
    await first.invalidate(OP, version=7)
    await second.invalidate(OP, version=3)
    await second.invalidate(OP)

    assert await ask_versioned(second, Table(6)) == 6
    assert not await is_stored(first)
    assert await ask_versioned(second, Table(7)) == 7
    assert await is_stored(first)


async def test_operation_without_versions_does_not_mind_them(pair: Pair) -> None:
    """Where no version is taken, an invalidation with one is like any other."""
    first, second = pair
    await first.invalidate(OP, version=7)

    assert await ask(second, Table("soup")) == "soup"
    assert await is_stored(first)


@pytest.mark.parametrize(
    ("version", "error", "message"),
    [
        *[
            (lambda _, version=version: version, ConfigurationError, "fetch: its version= function returned version=")
            for version in (-1, 2**53, True, 1.0, "3", None)
        ],
        (int, ValueError, "invalid literal"),
    ],
)
async def test_bad_version_of_a_value_is_an_error(
    version: Any, error: type[Exception], message: str, pair: Pair
) -> None:
    """What `version=` returns has to be one, and what it raises is the call's error; nothing is left of either."""
    first, _ = pair

    with pytest.raises(error, match=message):
        await ask(first, Table("soup"), version=version)

    assert remembered(first) is None
    await until(lambda: tier_of(first).leases.is_idle, "the right to be given back")
    assert not await is_stored(first)


@pytest.mark.parametrize("version", [-1, 2**53, True, 1.0, "3"])
async def test_bad_version_of_an_invalidation_is_an_error(version: Any, pair: Pair) -> None:
    """`invalidate` refuses what is no version, and has done nothing then."""
    first, _ = pair
    await ask(first, Table("soup"))

    with pytest.raises(ConfigurationError, match="version="):
        await first.invalidate(OP, version=version)

    assert remembered(first) == "soup"


@WAYS
async def test_fence_holds_between_the_loops_of_one_guard(invalidate: Invalidate, make_guard: MakeGuard) -> None:
    """A load in one event loop is overtaken by an invalidation in another."""
    guard = make_guard()
    table = Table("old", is_open=False)
    async with guard:
        call = ask(guard, table)
        await table.gate.arrivals(1)
        table.content = "new"

        await asyncio.to_thread(asyncio.run, _once(guard, invalidate))
        table.gate.open()

        assert await call == "old"
        assert remembered(guard) is None
        assert await ask(guard, table) == "new"


async def _once(guard: Guard, action: Callable[[Guard], Awaitable[Any]]) -> Any:
    async with guard:
        return await action(guard)


async def test_refresh_reaches_the_other_loops_of_its_guard(make_guard: MakeGuard) -> None:
    """What a refresh in one event loop replaced is not given out by another loop of the same guard."""
    guard = make_guard()

    async def refresh(guard: Guard) -> Any:
        return await refreshing(guard, Table("new"))()

    async with guard:
        await ask(guard, Table("old"))
        await asyncio.to_thread(asyncio.run, _once(guard, refresh))

        await until(lambda: remembered(guard) is None, "the other loop to be told", deadline=2)
        assert await ask(guard, Table("not asked for")) == "new"


async def test_refresh_reaches_the_other_loops_of_a_guard_without_a_store() -> None:
    """So it is where there is no bus between them."""
    guard = Guard()
    answers = iter(["old", "new", "newer"])

    @coalesce(OP, guard=guard, ttl=60)
    async def load() -> str:
        return next(answers)

    await load()
    await asyncio.to_thread(asyncio.run, load.refresh())

    await until(lambda: remembered(guard) is None, "the other loop to be told", deadline=2)
    assert await load() == "newer"
