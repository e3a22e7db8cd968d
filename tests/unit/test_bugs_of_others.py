"""Bugs that other caches with old values had: none of them is here.

Shown elsewhere, in `test_freshness.py` and `test_shared_freshness.py`:

- a refresh that bypasses the shared tier (FusionCache#651): `test_one_refresh_for_all`;
- a stuck refresh that disables expiry (caffeine#373, #175): `test_end_of_the_stale_window`;
- errors that do not extend the pause (nginx#1000): `test_pauses_grow`, `test_one_pause_for_all`;
- a second caller that waits although there is an old value (bentocache#103): `test_stale_answers_at_once`,
  `test_stale_answers_while_a_refresh_is_up`;
- an old value that the loader is not given (bentocache#116): `test_previous`, `test_previous_in_another_process`;
- options that mean something else than they say (bentocache#34, #110): `test_contradictions`;
- a window that is fixed at twice the life (streamlit#17009): `test_end_of_the_stale_window`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from leasing import LeasingDouble, Server
from waiting import eventually, ticks

from stampede_guard import Coalesced, Guard, RecentFailure, coalesce
from stampede_guard.testing import Gate, ManualClock

pytestmark = pytest.mark.usefixtures("no_echoes")


class Source:
    """What is loaded: the present version, after a gate if there is one; or an error."""

    def __init__(self) -> None:
        self.version = 1
        self.loads = 0
        self.error: Exception | None = None
        self.gate: Gate | None = None

    async def load(self) -> int:
        self.loads += 1
        version, error = self.version, self.error  # read before the wait
        if self.gate is not None:
            await self.gate.passage()
        if error is not None:
            raise error
        return version


class Fleet:
    """Two guards that share a store, and functions that read one source through them."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.source = Source()
        self.stores = [LeasingDouble(server) for _ in "ab"]
        self.guards = [Guard(lambda store=store: store, clock=server.clock) for store in self.stores]

    def functions(self, template: str = "row-{row_id}", **options: Any) -> list[Coalesced[[int], int]]:
        """Return the function of each guard, with these options."""
        given: dict[str, Any] = {"ttl": 10, "l2_ttl": 10, "jitter": 0, "stale": 60, **options}
        return [self._function(guard, template, given) for guard in self.guards]

    def _function(self, guard: Guard, template: str, options: dict[str, Any]) -> Coalesced[[int], int]:
        @coalesce(template, guard=guard, **options)
        async def load(row_id: int) -> int:
            return await self.source.load()

        return load

    async def rest(self) -> None:
        """Wait until no flight is up."""
        await eventually(lambda: not any(guard.stats().in_flight for guard in self.guards))


@pytest.fixture
async def fleet(server: Server) -> AsyncIterator[Fleet]:
    """Return two open guards."""
    made = Fleet(server)
    async with AsyncExitStack() as stack:
        for guard in made.guards:
            await stack.enter_async_context(guard)
        yield made


@pytest.mark.parametrize("by", [0, 1], ids=["here", "elsewhere"])
@pytest.mark.parametrize("options", [{}, {"stale_wait": 0.001}], ids=["at once", "after a wait"])
async def test_invalidation_during_a_refresh(fleet: Fleet, clock: ManualClock, by: int, options: Any) -> None:
    """What a refresh read before an invalidation is not kept, in any tier.

    FusionCache#628, #535; caffeine#193; after a soft time-out FusionCache#560.
    """
    loads = fleet.functions(**options)
    await loads[0](7)
    clock.advance(11)
    fleet.source.gate = Gate()
    assert 1 == await loads[0](7)
    await fleet.source.gate.arrivals(1)
    fleet.source.version = 2

    await loads[by].invalidate(7)
    await ticks(9)
    fleet.source.gate.open()
    await fleet.rest()

    assert [2, 2] == [await load(7) for load in loads]


@pytest.mark.parametrize("wrong", [LookupError("at once"), OSError("at once")])
async def test_loader_that_raises_before_it_awaits(fleet: Fleet, clock: ManualClock, wrong: Exception) -> None:
    """It leaves no key locked, in this process or another, and the refreshes go on (FusionCache#647; caffeine#1807)."""
    first, second = fleet.functions(l2_ttl=10)
    await first(7)
    clock.advance(11)
    fleet.source.error = wrong
    for _ in range(3):
        assert [1, 1] == [await first(7), await second(7)]
        await fleet.rest()
        clock.advance(5)
    assert 3 <= fleet.source.loads
    fleet.source.error, fleet.source.version = None, 2

    clock.advance(5)
    for load in (first, second):
        await load(7)
        await fleet.rest()
    assert [2, 2] == [await first(7), await second(7)]


@pytest.mark.parametrize("how", ["clear", "invalidate_tag", "invalidate"])
async def test_invalidation_and_old_values(fleet: Fleet, clock: ManualClock, how: str) -> None:
    """A failure after that brings no old value back (FusionCache#648), nor has a second key one (laravel#52847)."""
    loads = fleet.functions(stale_if_error=600, tags=["rows"])
    for load in loads:
        await load(7)
    clock.advance(11)
    fleet.source.error = OSError()
    if how == "clear":
        await fleet.guards[0].clear()
    elif how == "invalidate_tag":
        await fleet.guards[0].invalidate_tag("rows")
    else:
        await loads[0].invalidate(7)
        assert {} == fleet.server.values
    await ticks(9)

    for load in loads:
        with pytest.raises((OSError, RecentFailure)):
            await load(7)


async def test_process_that_dies_while_it_refreshes(fleet: Fleet, clock: ManualClock) -> None:
    """When its lease has expired, another process refreshes; until then callers get the old value (nginx#880, #342)."""
    first, _ = fleet.functions()
    await first(7)
    clock.advance(11)
    key = fleet.guards[0]._states.running().tier.key("row-7")  # type: ignore[union-attr]
    fleet.server.leases[key] = "t" * 22, False, clock() + 2  # of a process that is gone
    fleet.source.version = 2

    assert 1 == await first(7)
    assert 1 == fleet.source.loads
    clock.advance(2)
    await fleet.rest()
    assert (2, 2) == (await first(7), fleet.source.loads)


async def test_cold_key_with_stale(fleet: Fleet) -> None:
    """Without a value there is one load for all processes too (laravel#60920, #61289)."""
    loads = fleet.functions()
    fleet.source.gate = Gate()
    calls = [asyncio.ensure_future(load(7)) for load in loads * 3]
    await fleet.source.gate.arrivals(1)
    await ticks(9)
    fleet.source.gate.open()

    assert [1] * 6 == await asyncio.gather(*calls)
    assert 1 == fleet.source.loads


async def test_keys_that_share_a_tag(fleet: Fleet, clock: ManualClock) -> None:
    """They are refreshed side by side: a lease is named by the op (laravel#60626)."""
    one, _ = fleet.functions(tags=["rows"])
    two, _ = fleet.functions("other-{row_id}", tags=["rows"])
    for load in (one, two):
        await load(7)
    clock.advance(11)
    fleet.source.gate = Gate()

    assert [1, 1] == [await one(7), await two(7)]
    await fleet.source.gate.arrivals(2)
    fleet.source.gate.open()
    await fleet.rest()


async def test_refresh_and_the_life_of_the_new_value(fleet: Fleet, clock: ManualClock) -> None:
    """Readers of an old value change neither its window nor the life of the new one (rails#54229, #34918)."""
    first, second = fleet.functions()
    await first(7)
    clock.advance(69)
    fleet.source.gate = Gate()
    assert [1, 1] == [await first(7), await second(7)]
    clock.advance(1)
    waiting = asyncio.ensure_future(second(7))
    await ticks(9)
    assert not waiting.done()
    fleet.source.version = 3
    fleet.source.gate.open()
    await waiting
    await fleet.rest()

    fleet.source.gate = Gate()
    for seconds, is_stale in ((9, False), (1.01, True)):
        clock.advance(seconds)
        answers = [await load.answer(7) for load in (first, second)]
        assert [is_stale] * 2 == [answer.is_stale for answer in answers]
    fleet.source.gate.open()
    await fleet.rest()


async def test_leaving_while_a_refresh_is_up(server: Server, clock: ManualClock) -> None:
    """Leaving the guard waits for it, and its value is stored (cachified's `waitUntil`)."""
    fleet = Fleet(server)
    first, second = fleet.functions()
    async with fleet.guards[1]:
        async with fleet.guards[0]:
            await first(7)
            clock.advance(11)
            fleet.source.gate, fleet.source.version = Gate(), 2
            assert 1 == await first(7)
            await fleet.source.gate.arrivals(1)
            asyncio.get_running_loop().call_soon(fleet.source.gate.open)

        assert (2, 2) == (await second(7), fleet.source.loads)


async def test_invalidation_and_errors_in_memory(clock: ManualClock) -> None:
    """Without a store too, no refresh is kept that an invalidation overtook, and an error leaves no key locked."""
    source = Source()

    @coalesce("row-{row_id}", guard=Guard(clock=clock), ttl=10, jitter=0, stale=60)
    async def load(row_id: int) -> int:
        return await source.load()

    await load(7)
    clock.advance(11)
    source.gate = Gate()
    assert 1 == await load(7)
    await source.gate.arrivals(1)
    source.version = 2
    await load.invalidate(7)
    source.gate.open()
    await eventually(lambda: not load.guard.stats().in_flight)
    assert 2 == await load(7)

    clock.advance(11)
    source.error, source.gate = LookupError(), None
    for loads in (4, 5):
        assert 2 == await load(7)
        await eventually(lambda: not load.guard.stats().in_flight)
        assert loads == source.loads
