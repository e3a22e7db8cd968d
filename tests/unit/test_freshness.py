"""Old values: answers while a flight refreshes them, answers to errors, pauses."""

import asyncio
import logging
from itertools import pairwise
from typing import Any, Unpack

import pytest
from waiting import eventually

from stampede_guard import (
    Coalesced,
    ConfigurationError,
    Guard,
    Previous,
    RecentFailure,
    coalesce,
    coalesce_many,
    previous,
)
from stampede_guard._operations.options import Options
from stampede_guard.testing import Gate, ManualClock


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
    load = served(kitchen, clock, stale_if_error=60, load_timeout=0.001)
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
