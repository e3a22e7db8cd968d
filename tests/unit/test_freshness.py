"""Old values: answers while a flight refreshes them, answers to errors, pauses."""

import asyncio
import logging
from itertools import pairwise
from typing import Any, Unpack

import pytest
from waiting import eventually, ticks

from stampede_guard import (
    Coalesced,
    ConfigurationError,
    Guard,
    Previous,
    RecentFailure,
    WaitTimeout,
    _freshness,
    coalesce,
    coalesce_many,
    previous,
)
from stampede_guard._flights.pauses import Pauses
from stampede_guard._operations.options import Options
from stampede_guard._operations.policy import Policy
from stampede_guard.testing import FaultStore, Gate, ManualClock


class Kitchen:
    """A loader whose loads are numbered, stop at gates if there are any, and fail while an error is set.

    Attributes:
        loads: How many loads have begun.
        error: What loads raise.
        gates: Where the next loads stop.
    """

    def __init__(self) -> None:
        self.loads = 0
        self.error: Exception | None = None
        self.gates: list[Gate] = []

    async def cook(self, menu_id: int) -> str:
        self.loads += 1
        number = self.loads
        await asyncio.sleep(0)  # an eager load that never suspends is over before an old value could be the answer
        if self.gates:
            await self.gates.pop(0).passage()
        if self.error is not None:
            raise self.error
        return f"dish {number}"


@pytest.fixture
def kitchen() -> Kitchen:
    """Return a kitchen."""
    return Kitchen()


def served(kitchen: Kitchen, clock: ManualClock, **options: Unpack[Options]) -> Coalesced[[int], str]:
    """Return the kitchen behind a guard in memory, without jitter."""
    given: Options = {"ttl": 10, "jitter": 0, **options}

    @coalesce("menu-{menu_id}", guard=Guard(clock=clock), **given)
    async def load(menu_id: int) -> str:
        return await kitchen.cook(menu_id)

    return load


async def test_stale_answers_at_once(kitchen: Kitchen, clock: ManualClock) -> None:
    """Past its life a value is the answer while one load replaces it."""
    load = served(kitchen, clock, stale=60)
    await load(7)
    clock.advance(11)
    gate = Gate()
    kitchen.gates = [gate]

    assert ["dish 1"] * 3 == [await load(7) for _ in range(3)]
    await gate.arrivals(1)
    gate.open()
    await eventually(lambda: not load.guard.stats().in_flight)

    assert "dish 2" == await load(7)
    assert (2, 3) == (kitchen.loads, load.guard.stats().stale)


async def test_end_of_the_stale_window(kitchen: Kitchen, clock: ManualClock) -> None:
    """Past the window callers wait for the load, also for one that began within it."""
    load = served(kitchen, clock, stale=60)
    await load(7)
    clock.advance(69)
    gate = Gate()
    kitchen.gates = [gate]
    assert "dish 1" == await load(7)
    clock.advance(1)

    waiting = asyncio.ensure_future(load(7))
    await gate.arrivals(1)
    assert not waiting.done()
    gate.open()

    assert "dish 2" == await waiting


async def test_stale_wait(kitchen: Kitchen, clock: ManualClock) -> None:
    """With `stale_wait` callers get the new value if it comes in time."""
    load = served(kitchen, clock, stale=60, stale_wait=5)
    await load(7)
    clock.advance(11)

    assert "dish 2" == await load(7)
    assert 0 == load.guard.stats().stale


async def test_stale_wait_that_is_over(kitchen: Kitchen, clock: ManualClock) -> None:
    """Else all of them get the old value after that time, and so do those that come later; the load goes on."""
    load = served(kitchen, clock, stale=60, stale_wait=0.001)
    await load(7)
    clock.advance(11)
    gate = Gate()
    kitchen.gates = [gate]

    assert ["dish 1"] * 3 == await asyncio.gather(*[load(7) for _ in range(3)])
    assert "dish 1" == await load(7)
    gate.open()
    await eventually(lambda: not load.guard.stats().in_flight)
    assert "dish 2" == await load(7)


async def test_released_callers_do_not_count_as_present(kitchen: Kitchen, clock: ManualClock) -> None:
    """Callers that took the old value neither abandon the load nor keep it from being abandoned by later ones."""
    load = served(kitchen, clock, stale=10, stale_wait=0.001, on_abandon="cancel")
    await load(7)
    clock.advance(11)
    kitchen.gates = [Gate()]
    assert "dish 1" == await load(7)
    clock.advance(10)

    waiting = asyncio.ensure_future(load(7))
    await eventually(lambda: load.guard.stats().joins == 1)
    assert 1 == load.guard.stats().in_flight
    waiting.cancel()
    await asyncio.wait([waiting])

    assert (0, 1) == (load.guard.stats().in_flight, load.guard.stats().abandoned)


async def test_stale_if_error(kitchen: Kitchen, clock: ManualClock) -> None:
    """A load that fails because of unavailability is answered with the old value, within its window."""
    load = served(kitchen, clock, stale_if_error=60)
    await load(7)
    kitchen.error = ConnectionRefusedError()
    clock.advance(11)

    assert "dish 1" == await load(7)
    assert (2, 1, 1) == (kitchen.loads, load.guard.stats().failures, load.guard.stats().stale)
    clock.advance(60)
    with pytest.raises(ConnectionRefusedError):
        await load(7)


async def test_other_errors_are_no_unavailability(kitchen: Kitchen, clock: ManualClock) -> None:
    """An error that says that there is no such row reaches the caller, and begins no pause."""
    load = served(kitchen, clock, stale_if_error=60)
    await load(7)
    clock.advance(11)
    kitchen.error = LookupError("gone")

    for _ in range(2):
        with pytest.raises(LookupError, match="gone"):
            await load(7)
    assert 3 == kitchen.loads


async def test_stale_on(kitchen: Kitchen, clock: ManualClock) -> None:
    """`stale_on` says which errors count as unavailability."""
    load = served(kitchen, clock, stale_if_error=60, stale_on=LookupError)
    await load(7)
    clock.advance(11)
    kitchen.error = LookupError()

    assert "dish 1" == await load(7)


async def test_load_timeout_counts_as_unavailability(kitchen: Kitchen, clock: ManualClock) -> None:
    """A load that takes too long is answered with the old value too."""
    load = served(kitchen, clock, stale_if_error=60, load_timeout=0.1)
    await load(7)
    clock.advance(11)
    kitchen.gates = [Gate()]

    assert "dish 1" == await load(7)


async def test_pauses_grow(kitchen: Kitchen, clock: ManualClock) -> None:
    """Each failure makes the pause longer, up to the longest; within one the old value is the answer at once."""
    load = served(kitchen, clock, stale_if_error=600)
    await load(7)
    kitchen.error = OSError()
    clock.advance(11)
    begun: list[float] = []
    started_at = clock()
    for _ in range(1_800):
        before = kitchen.loads
        assert "dish 1" == await load(7)
        if kitchen.loads > before:
            begun.append(clock() - started_at)
        clock.advance(0.1)

    assert len(begun) in (9, 10, 11)
    gaps = [after - before for before, after in pairwise(begun)]
    assert all(low <= gap <= 1.1 * low + 0.2 for gap, low in zip(gaps, [1, 2, 4, 8, 16, 30, 30, 30, 30], strict=False))


async def test_success_ends_the_pauses(kitchen: Kitchen, clock: ManualClock) -> None:
    """After a success the next failure is the first again."""
    load = served(kitchen, clock, ttl=1, error_backoff=30)
    for error in (OSError(), OSError(), OSError(), None, OSError()):
        kitchen.error = error
        if error is None:
            assert "dish 4" == await load(7)
        else:
            with pytest.raises(OSError, match=r"^$"):
                await load(7)
        clock.advance(4.5)
    assert 5 == kitchen.loads


async def test_recent_failure(kitchen: Kitchen, clock: ManualClock) -> None:
    """Without an old value callers get an error made from the original one, each its own, and no load begins."""
    load = served(kitchen, clock, error_backoff=30)
    kitchen.error = ConnectionRefusedError("no Postgres")
    with pytest.raises(ConnectionRefusedError):
        await load(7)

    causes: list[BaseException | None] = []
    for _ in range(2):
        with pytest.raises(
            RecentFailure, match=r": the load failed with ConnectionRefusedError a moment ago; the"
        ) as got:
            await load(7)
        assert 1 <= got.value.retry_after <= 1.1
        causes.append(got.value.__cause__)
    assert ["no Postgres"] * 2 == [str(cause) for cause in causes]
    assert causes[0] is not causes[1]
    stats = load.guard.stats()
    assert (1, 2, 3) == (kitchen.loads, stats.recent_failures, stats.calls)


async def test_invalidation_ends_a_pause(kitchen: Kitchen, clock: ManualClock) -> None:
    """An invalidation leaves neither an old value nor a pause."""
    load = served(kitchen, clock, stale_if_error=600)
    await load(7)
    clock.advance(11)
    kitchen.error = OSError()
    assert "dish 1" == await load(7)

    await load.invalidate(7)

    with pytest.raises(OSError, match=r"^$"):
        await load(7)
    assert 3 == kitchen.loads


async def test_no_old_value_after_an_invalidation(kitchen: Kitchen, clock: ManualClock) -> None:
    """A load that fails after an invalidation brings the old value back to no caller that comes after that."""
    load = served(kitchen, clock, stale_if_error=600)
    await load(7)
    clock.advance(11)
    gate = Gate()
    kitchen.gates = [gate]
    waiting = asyncio.ensure_future(load(7))
    await gate.arrivals(1)
    kitchen.error = OSError()

    await load.invalidate(7)
    gate.open()

    assert "dish 1" == await waiting
    with pytest.raises((OSError, RecentFailure)):
        await load(7)


async def test_failed_refresh_raises(kitchen: Kitchen, clock: ManualClock) -> None:
    """A caller that asks for a new value gets the error, not the old value."""
    load = served(kitchen, clock, stale_if_error=600)
    await load(7)
    kitchen.error = OSError()

    with pytest.raises(OSError, match=r"^$"):
        await load.refresh(7)
    assert "dish 1" == await load(7)


async def test_failures_are_logged_once(kitchen: Kitchen, clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """The log has one line when loads begin to fail, and one when they succeed again; neither has a key."""
    caplog.set_level(logging.INFO, "stampede_guard")
    load = served(kitchen, clock, error_backoff=30)
    for error in (OSError("secret"), OSError("secret"), None, None):
        kitchen.error = error
        if error is None:
            await load(7)
        else:
            with pytest.raises(OSError, match="secret"):
                await load(7)
        clock.advance(20)

    first, second = caplog.messages
    assert "menu-{menu_id}: a load failed (OSError); no load of that key begins for " in first
    assert "menu-{menu_id}: loads succeed again" == second


async def test_early_refresh(kitchen: Kitchen, clock: ManualClock) -> None:
    """With `early` a value is replaced before its life is over, and is the answer until it is."""
    load = served(kitchen, clock, early=1.0)
    load._operation.note_load(1.0)
    await load(7)
    gate = Gate()
    kitchen.gates = [gate]
    while not gate.arrived:
        assert "dish 1" == await load(7)
        clock.advance(0.01)
        await asyncio.sleep(0)

    assert "dish 1" == await load(7)
    gate.open()
    await eventually(lambda: not load.guard.stats().in_flight)
    assert "dish 2" == await load(7)


async def test_lives_as_functions_of_the_value(clock: ManualClock) -> None:
    """A life may depend on the value; `None` keeps nothing, not even the old value."""
    menus: list[str | None] = ["soup", "draft", "soup"]

    def life(menu: str) -> float | None:
        return None if menu == "draft" else 10

    @coalesce(guard=Guard(clock=clock), ttl=life, jitter=0, stale=600)
    async def load(menu_id: int) -> str | None:
        await asyncio.sleep(0)
        return menus.pop(0)

    assert ["soup", "soup"] == [await load(7), await load(7)]
    clock.advance(11)
    assert "soup" == await load(7)
    await eventually(lambda: not load.guard.stats().in_flight)
    assert "soup" == await load(7)
    assert [] == menus


@pytest.mark.parametrize("wrong", [0, -1, "5", 31 * 86_400, True])
async def test_wrong_lives(wrong: Any, clock: ManualClock) -> None:
    """What is no life is an error of the call, which names the operation, the option and what was returned."""

    @coalesce("menu-{menu_id}", guard=Guard(clock=clock), ttl=lambda _: wrong)
    async def load(menu_id: int) -> str:
        return "soup"

    with pytest.raises(ConfigurationError, match=r"^menu-\{menu_id\}: its ttl= function returned "):
        await load(7)


async def test_many(clock: ManualClock) -> None:
    """Ids are fresh, stale, or paused each for itself."""
    calls: list[list[int]] = []
    error: list[Exception] = []

    @coalesce_many("menu-{menu_id}", guard=Guard(clock=clock), ttl=10, jitter=0, stale=60)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        calls.append(menu_ids)
        await asyncio.sleep(0)
        if error:
            raise error[0]
        return {menu_id: f"dish {len(calls)}" for menu_id in menu_ids}

    await load([1, 2])
    clock.advance(11)
    assert {1: "dish 1", 2: "dish 1", 3: "dish 2"} == await load([1, 2, 3])
    assert {1: "dish 2", 2: "dish 2", 3: "dish 2"} == await load([1, 2, 3])
    clock.advance(11)
    error.append(OSError())
    assert {1: "dish 2", 2: "dish 2"} == await load([1, 2])
    await eventually(lambda: not load.guard.stats().in_flight)
    assert {1: "dish 2", 2: "dish 2"} == await load([1, 2])
    with pytest.raises(OSError, match=r"^$"):
        await load([1, 4])
    with pytest.raises(RecentFailure):
        await load([1, 4])
    assert [[1, 2], [1, 2, 3], [1, 2], [4]] == calls


async def test_fetch(kitchen: Kitchen, clock: ManualClock) -> None:
    """`fetch` has the same options."""
    guard = Guard(clock=clock)
    options: Options = {"ttl": 10, "jitter": 0, "stale": 60}
    assert "dish 1" == await guard.fetch("menu-7", lambda: kitchen.cook(7), **options)
    clock.advance(11)

    assert "dish 1" == await guard.fetch("menu-7", lambda: kitchen.cook(7), **options)
    await eventually(lambda: not guard.stats().in_flight)
    assert "dish 2" == await guard.fetch("menu-7", lambda: kitchen.cook(7), **options)


async def test_defaults_of_a_guard(kitchen: Kitchen, clock: ManualClock) -> None:
    """A guard's defaults hold for its operations that say nothing else."""
    guard = Guard(clock=clock, defaults={"ttl": 10, "jitter": 0, "stale": 60})

    @coalesce(guard=guard)
    async def stale(menu_id: int) -> str:
        return await kitchen.cook(menu_id)

    @coalesce(guard=guard, stale=None)
    async def fresh(menu_id: int) -> str:
        return await kitchen.cook(menu_id)

    assert ("dish 1", "dish 2") == (await stale(7), await fresh(7))
    clock.advance(11)

    assert ("dish 1", "dish 4") == (await stale(7), await fresh(7))


@pytest.mark.parametrize(
    ("defaults", "message"), [({"stale": 0}, "^stale=0: "), ({"tll": 5}, "^there is no option 'tll'")]
)
def test_wrong_defaults(defaults: Any, message: str) -> None:
    """A default that breaks its rule is refused where the guard is made."""
    with pytest.raises(ConfigurationError, match=message):
        Guard(defaults=defaults)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stale": 5}, "^stale=5: without ttl= or l2_ttl= no value is kept"),
        ({"stale_if_error": 5}, "^stale_if_error=5: without ttl= or l2_ttl= "),
        ({"early": 1}, "^early=1: without ttl= or l2_ttl= "),
        ({"ttl": 5, "early": 1, "stale": 5}, "^early=1 refreshes before a life is over, stale=5 after it: give one"),
        ({"ttl": 5, "stale_wait": 5}, "^stale_wait=5 .* it needs stale="),
        ({"ttl": 5, "stale": 5, "stale_wait": 2, "wait_timeout": 1}, "^stale_wait=2 is no less than wait_timeout=1: "),
        ({"ttl": 5, "stale_on": LookupError}, "^stale_on=.*LookupError.* needs stale_if_error="),
    ],
)
def test_contradictions(options: Any, message: str) -> None:
    """Options that contradict each other are refused at decoration, by an error that names both."""

    async def load() -> None: ...

    with pytest.raises(ConfigurationError, match=message):
        coalesce(**options)(load)


async def test_answer(kitchen: Kitchen, clock: ManualClock) -> None:
    """An answer comes with its source, its age and the seconds that it is fresh."""
    load = served(kitchen, clock, stale=60, stale_if_error=600)

    first = await load.answer(7)
    assert ("load", "dish 1", 0, 10) == (first.source, first.value, first.age, first.fresh_for)
    clock.advance(4)
    second = await load.answer(7)
    assert ("memory", "dish 1", 4, 6) == (second.source, second.value, second.age, second.fresh_for)
    clock.advance(8)
    third = await load.answer(7)
    assert ("memory", "dish 1", 12, 0) == (third.source, third.value, third.age, third.fresh_for)
    assert (60, 600) == (third.stale_for, third.error_for)
    assert [False, False, True] == [first.is_stale, second.is_stale, third.is_stale]


@pytest.mark.parametrize("options", [{"stale": 60, "stale_wait": 0.001}, {"stale_if_error": 60}])
async def test_stale_answer_of_a_flight(options: Any, kitchen: Kitchen, clock: ManualClock) -> None:
    """An old value that a flight gives to its callers comes with its own age."""
    load = served(kitchen, clock, **options)
    await load(7)
    clock.advance(11)
    gate = Gate()
    kitchen.gates, kitchen.error = [gate], OSError()

    waiting = asyncio.ensure_future(load.answer(7))
    await gate.arrivals(1)
    if "stale" not in options:
        gate.open()
    answer = await waiting

    assert ("dish 1", True, 11) == (answer.value, answer.is_stale, answer.age)
    gate.open()
    await eventually(lambda: not load.guard.stats().in_flight)
    clock.advance(0.5)
    paused = await load.answer(7)
    assert ("dish 1", True, 11.5) == (paused.value, paused.is_stale, paused.age)


async def test_answer_that_is_not_kept(clock: ManualClock) -> None:
    """An answer that no tier keeps is never fresh, and never stale."""

    @coalesce(guard=Guard(clock=clock))
    async def load(menu_id: int) -> str:
        return "soup"

    answer = await load.answer(7)

    assert ("soup", 0, 0, False) == (answer.value, answer.age, answer.fresh_for, answer.is_stale)
    assert "<Answer from load, age 0.0, fresh for 0.000 s>" == repr(answer)


@pytest.mark.parametrize("isolate", [False, True])
async def test_etag(isolate: bool, clock: ManualClock) -> None:
    """The entity tag tells values apart, and is the same for equal ones; bytes that are kept are not decoded."""
    decoded: list[bytes] = []

    class Text:
        def encode(self, value: str) -> bytes:
            return value.encode()

        def decode(self, payload: bytes) -> str:
            decoded.append(payload)
            return payload.decode()

    @coalesce(guard=Guard(clock=clock), ttl=10, isolate=isolate, codec=Text())
    async def load(menu_id: int) -> str:
        return "soup" if menu_id < 3 else "salad"

    tags = [(await load.answer(menu_id)).etag for menu_id in (1, 2, 3)]
    assert tags[0] == tags[1] != tags[2]
    assert [(tag or "")[0] for tag in tags] == ['"'] * 3
    decoded.clear()
    assert tags[0] == (await load.answer(1)).etag
    assert [] == decoded or not isolate


async def test_previous(clock: ManualClock) -> None:
    """A loader is told of the old value, in the background too, and a refresh of what memory has."""
    told: list[Previous | None] = []

    @coalesce(guard=Guard(clock=clock), ttl=10, jitter=0, stale=60, version=len)
    async def load(menu_id: int) -> str:
        last = previous()
        told.append(last)
        await asyncio.sleep(0)
        return "soup" if last is None else f"{last.value}!"

    assert previous() is None
    await load(7)
    clock.advance(3)
    await load.refresh(7)
    clock.advance(12)
    await load(7)
    await eventually(lambda: not load.guard.stats().in_flight)

    assert [None, ("soup", 3, 4), ("soup!", 12, 5)] == told
    assert "soup!!" == await load(7)


async def test_end_of_the_window_during_a_wait(kitchen: Kitchen, clock: ManualClock) -> None:
    """Callers that still wait when the window ends get the new value, not the old one when `stale_wait` is over."""
    load = served(kitchen, clock, stale=60, stale_wait=0.001)
    await load(7)
    clock.advance(69)
    gate = Gate()
    kitchen.gates = [gate]
    waiting = asyncio.ensure_future(load(7))
    await gate.arrivals(1)
    clock.advance(1)
    await asyncio.sleep(0.01)
    gate.open()

    assert "dish 2" == await waiting


@pytest.mark.parametrize("how", ["refresh", "fresh"])
async def test_stale_answers_while_a_refresh_is_up(how: str, kitchen: Kitchen, clock: ManualClock) -> None:
    """A call gets the old value at once while a refresh is up; the caller of the refresh does not."""
    load = served(kitchen, clock, stale=60)
    await load(7)
    clock.advance(11)
    gate = Gate()
    kitchen.gates = [gate]
    refresh = asyncio.ensure_future(getattr(load, how)(7))
    await gate.arrivals(1)

    assert "dish 1" == await asyncio.wait_for(load(7), 5)
    assert not refresh.done()
    gate.open()
    assert "dish 2" == await refresh


@pytest.mark.parametrize("leaves_first", [False, True])
@pytest.mark.parametrize("how", ["refresh", "fresh"])
async def test_failed_refresh_and_other_calls(
    how: str, leaves_first: bool, kitchen: Kitchen, clock: ManualClock
) -> None:
    """When a refresh fails, calls that joined it get the old value, and callers of the refresh its error."""
    load = served(kitchen, clock, stale_if_error=60)
    await load(7)
    clock.advance(11)
    gate = Gate()
    kitchen.gates, kitchen.error = [gate], OSError()
    calls = [load(7), getattr(load, how)(7)] if leaves_first else [load(7)]
    refresh = asyncio.ensure_future(getattr(load, how)(7))
    joined = [asyncio.ensure_future(call) for call in calls]
    await gate.arrivals(1)
    await ticks(3)
    gate.open()

    with pytest.raises(OSError, match=r"^$"):
        await refresh
    first, *others = await asyncio.gather(*joined, return_exceptions=True)
    assert "dish 1" == first
    assert all(isinstance(each, OSError) for each in others)


async def test_refresh_of_many_gets_no_old_value(clock: ManualClock) -> None:
    """A refresh of many ids waits for new values while calls get the old ones, and raises if there are none."""
    gates: list[Gate] = []
    error: list[Exception] = []

    @coalesce_many("menu-{menu_id}", guard=Guard(clock=clock), ttl=10, jitter=0, stale=60)
    async def load(menu_ids: list[int]) -> dict[int, int]:
        for gate in gates:
            await gate.passage()
        for each in error:
            raise each
        return dict.fromkeys(menu_ids, len(gates))

    await load([1, 2])
    clock.advance(11)
    for wrong in (None, OSError()):
        gates.append(Gate())
        error = [wrong] if wrong else []
        refresh = asyncio.ensure_future(load.refresh([1, 2]))
        await gates[0].arrivals(len(gates))
        if wrong is None:
            assert {1: 0, 2: 0} == await load([1, 2])
        for gate in gates:
            gate.open()
        if wrong is None:
            assert {1: 1, 2: 1} == await refresh
        else:
            with pytest.raises(OSError, match=r"^$"):
                await refresh


async def test_many_after_a_wait(clock: ManualClock) -> None:
    """When `stale_wait` is over, a call for many ids gets the old values."""
    gate = Gate()
    gate.open()

    @coalesce_many("menu-{menu_id}", guard=Guard(clock=clock), ttl=10, jitter=0, stale=60, stale_wait=0.001)
    async def load(menu_ids: list[int]) -> dict[int, float]:
        now = clock()
        await gate.passage()
        return dict.fromkeys(menu_ids, now)

    first = await load([1, 2])
    clock.advance(11)
    gate = Gate()

    assert first == await load([1, 2])
    gate.open()
    await eventually(lambda: not load.guard.stats().in_flight)
    assert first != await load([1, 2])


@pytest.mark.parametrize("many", [False, True])
async def test_time_out_of_a_waiter(many: bool, kitchen: Kitchen, clock: ManualClock) -> None:
    """A caller whose `wait_timeout` is over gets the old value, but for one that asks for a new value."""
    gate = Gate()
    options: Options = {"ttl": 10, "jitter": 0, "stale_if_error": 60, "wait_timeout": 0.1}

    @coalesce_many("many-{menu_id}", guard=Guard(clock=clock), **options)
    async def load_many(menu_ids: list[int]) -> dict[int, str]:
        return {menu_id: await kitchen.cook(menu_id) for menu_id in menu_ids}

    load = served(kitchen, clock, **options)
    one = load_many.one if many else load
    await one(7)
    clock.advance(11)
    kitchen.gates = [gate, gate]

    if many:
        assert {7: "dish 1"} == await load_many([7])
    answer = await one.answer(7)
    assert ("dish 1", True, 11) == (answer.value, answer.is_stale, answer.age)
    with pytest.raises(WaitTimeout):
        await one.refresh(7)
    clock.advance(60)
    with pytest.raises(WaitTimeout):
        await one(7)
    gate.open()
    await eventually(lambda: not one.guard.stats().in_flight)


async def test_time_out_that_is_no_unavailability(kitchen: Kitchen, clock: ManualClock) -> None:
    """It does not if `stale_on` has no time-outs."""
    load = served(kitchen, clock, stale_if_error=60, stale_on=ConnectionError, wait_timeout=0.1)
    await load(7)
    clock.advance(11)
    gate = Gate()
    kitchen.gates = [gate]

    with pytest.raises(WaitTimeout):
        await load(7)
    gate.open()


async def test_late_success_ends_no_pause(kitchen: Kitchen, clock: ManualClock) -> None:
    """A load that ignores its cancellation and succeeds after its time does not end the pause."""
    load = served(kitchen, clock, stale_if_error=600, load_timeout=0.1)
    await load(7)
    clock.advance(11)
    gate = Gate()

    async def cook(menu_id: int) -> str:
        kitchen.loads += 1
        while True:
            try:
                await gate.passage()
            except asyncio.CancelledError:
                continue
            return "late"

    vars(kitchen)["cook"] = cook
    assert "dish 1" == await load(7)
    gate.open()
    await ticks(9)

    assert "dish 1" == await load(7)
    assert 2 == kitchen.loads


async def test_expire_of_what_is_refreshed_early(kitchen: Kitchen, clock: ManualClock) -> None:
    """With `early` alone there is no old value after `expire`; with `stale_if_error` it answers errors only."""
    for options in ({}, {"stale_if_error": 60}):
        kitchen.error = None
        load = served(kitchen, clock, early=1.0, **options)  # type: ignore[typeddict-item]
        load._operation.note_load(100.0)
        first = await load(7)
        clock.advance(2)
        await load.expire(7)
        second = await load(7)
        assert first != second
        clock.advance(7)  # it is due, and not over
        await load.expire(7)
        kitchen.error = OSError()
        if options:
            assert second == await load(7)
            clock.advance(60)
        with pytest.raises((OSError, RecentFailure)):
            await load(7)


async def test_value_that_stays_the_same(clock: ManualClock) -> None:
    """An answer that is loaded anew is no old one, though its value is the same object."""
    gate = Gate()

    @coalesce(guard=Guard(clock=clock), ttl=10, jitter=0, stale=60)
    async def load(menu_id: int) -> str:
        old: Any = previous()
        if old is None:
            return "soup"
        await gate.passage()
        return str(old.value)

    await load(7)
    clock.advance(69)
    await load(7)
    clock.advance(2)
    waiting = asyncio.ensure_future(load.answer(7))
    await gate.arrivals(1)
    gate.open()

    answer = await waiting
    assert ("soup", "load", False, 0) == (answer.value, answer.source, answer.is_stale, answer.age)


async def test_refreshes_within_a_load_take_slots(clock: ManualClock) -> None:
    """A load that holds a slot does not wait for the refreshes that it starts, so that they queue for slots."""
    guard = Guard(clock=clock, max_loads=1)
    gates: list[Gate] = []

    @coalesce("dish-{dish}", guard=guard, ttl=10, jitter=0, stale=60)
    async def load_dish(dish: int) -> int:
        for gate in gates:
            await gate.passage()
        return dish

    @coalesce(guard=guard)
    async def load_menu() -> list[int]:
        return [await load_dish(dish) for dish in range(4)]

    await load_menu()
    clock.advance(11)
    gates.append(Gate())

    assert [0, 1, 2, 3] == await load_menu()
    await ticks(9)
    assert 1 == gates[0].arrived
    gates[0].open()
    await eventually(lambda: not guard.stats().in_flight)
    assert 4 == gates[0].arrived


async def test_caller_that_leaves_as_others_are_released(kitchen: Kitchen, clock: ManualClock) -> None:
    """A caller that is cancelled in the tick of a release is counted out once, and abandons no load of others."""
    load = served(kitchen, clock, stale=10, stale_wait=3_600, on_abandon="cancel")
    await load(7)
    clock.advance(11)
    gate = Gate()
    kitchen.gates = [gate]
    waiting = asyncio.ensure_future(load(7))
    await gate.arrivals(1)
    flight = load.guard._states.running().board.flights[load.key(7)]
    hasty, patient = flight.join(), flight.join()
    assert hasty is not None
    assert patient is not None
    hasty.cancel()
    flight.release(flight.old_values.old)  # type: ignore[union-attr]
    later = flight.join()
    assert later is not None
    for waiter in (hasty, patient):
        flight.leave(waiter)

    assert (1, False, "dish 1") == (flight.present, flight.landed, await waiting)
    flight.leave(later)
    assert flight.landed


async def test_expire_of_many(clock: ManualClock) -> None:
    """Ids that are expired are old from now on, and those that are not stay fresh."""
    calls: list[list[int]] = []

    @coalesce_many("menu-{menu_id}", guard=Guard(clock=clock), ttl=10, stale=60)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        calls.append(menu_ids)
        await asyncio.sleep(0)
        return {menu_id: f"dish {len(calls)}" for menu_id in menu_ids}

    await load([1, 2])
    await load.expire(2)

    assert {1: "dish 1", 2: "dish 1"} == await load([1, 2])
    await eventually(lambda: not load.guard.stats().in_flight)
    assert {1: "dish 1", 2: "dish 2"} == await load([1, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttl": "5"}, r"^ttl='5': a life is a number of seconds, a timedelta, or a function of the value$"),
        ({"l2_ttl": True}, r"^l2_ttl=True: a life is a number"),
        ({"stale_on": "OSError"}, r"^stale_on='OSError': give a tuple of exception classes, such as "),
        ({"stale_on": ()}, r"^stale_on=\(\): give a tuple of exception classes"),
        ({"early": 0}, r"^early=0: give a finite number above zero$"),
    ],
)
def test_wrong_options(options: Any, message: str) -> None:
    """Each option has a rule, which its error names with the value."""
    with pytest.raises(ConfigurationError, match=message):
        Policy(**options)


async def test_many_pauses(clock: ManualClock) -> None:
    """The oldest of very many pauses is forgotten."""
    known = Pauses(clock)
    for number in range(4097):
        known.note_failure(f"op-{number}", OSError(), 30)

    assert [False, True, True] == [known.is_on(f"op-{number}") for number in (0, 1, 4096)]


async def test_log_of_keys_that_fail_beside_others(
    kitchen: Kitchen, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Some keys that fail while others do not are one state, with one line at its beginning and one at its end."""
    caplog.set_level(logging.INFO, "stampede_guard")
    load = served(kitchen, clock, ttl=1, error_backoff=1)
    for _ in range(3):
        for menu_id, error in ((1, OSError()), (2, None)):
            kitchen.error = error
            await asyncio.gather(load(menu_id), return_exceptions=True)
        clock.advance(3)
    await load(1)

    assert 2 == len(caplog.messages)


@pytest.mark.parametrize("stale_wait", [0.001, 0.002])
async def test_stale_wait_with_two_tiers(stale_wait: float, kitchen: Kitchen, clock: ManualClock) -> None:
    """The old value of the store, found after that of memory, does not begin the wait anew."""
    store = FaultStore(clock)
    async with Guard(lambda: store, clock=clock) as guard:
        options: Options = {"ttl": 1, "l2_ttl": 2, "jitter": 0, "stale": 60, "stale_wait": stale_wait}

        async def ask() -> str:
            return await guard.fetch("menu-7", lambda: kitchen.cook(7), returns=str, **options)

        await ask()
        clock.advance(5)
        kitchen.gates = [gate] = [Gate()]

        assert "dish 1" == await ask()
        gate.open()


@pytest.mark.parametrize(("room", "lines"), [(4096, [1, 2]), (1, [2, 2])])
async def test_log_when_the_last_key_succeeds(
    room: int,
    lines: list[int],
    kitchen: Kitchen,
    *,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loads succeed again when those of all keys do that are known to have failed."""
    monkeypatch.setattr(_freshness, "_FAILING", room)
    caplog.set_level(logging.INFO, "stampede_guard")
    load = served(kitchen, clock, error_backoff=1)
    kitchen.error = OSError()
    await asyncio.gather(load(1), load(2), return_exceptions=True)
    kitchen.error = None
    clock.advance(3)
    seen: list[int] = []
    for menu_id in (1, 2):
        await load(menu_id)
        seen.append(len(caplog.messages))

    assert lines == seen
