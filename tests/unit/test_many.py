import asyncio
import copy
import gc
import pickle
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import ref

import pytest
from inside import untyped
from task_factories import at_once

from stampede_guard import (
    Coalesced,
    CoalescedMany,
    ConfigurationError,
    Guard,
    GuardClosed,
    InvalidationPending,
    InvalidKey,
    LoadCancelled,
    LoadTimeout,
    NotCoalescable,
    RecursiveLoad,
    WaitTimeout,
    WrongAnswer,
    coalesce,
    coalesce_many,
)
from stampede_guard.stores import Stored
from stampede_guard.testing import FaultStore, Gate, ManualClock

Pause = Callable[[], Awaitable[None]]

tenant: ContextVar[str] = ContextVar("tenant", default="nobody")
request_id: ContextVar[str] = ContextVar("request_id", default="none")


class Menus:
    """What loaders in these tests read from; remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.gate = Gate()
        self.gate.open()
        self.missing: set[int] = set()

    async def read(self, ids: list[int]) -> dict[int, str]:
        self.asked.append(list(ids))
        await self.gate.passage()
        return {menu_id: f"menu {menu_id}" for menu_id in ids if menu_id not in self.missing}


@pytest.fixture
def menus() -> Menus:
    """Return menus that nobody read yet."""
    return Menus()


@pytest.fixture
def guard() -> Guard:
    """Return a guard of the test's own."""
    return Guard(clock=ManualClock())


def loader_of(menus: Menus, guard: Guard, **options: Any) -> CoalescedMany[int, str]:
    """Return a loader of many menus that are remembered for a minute."""
    options.setdefault("ttl", 60)

    @coalesce_many("menu-{menu_id}", guard=guard, **options)
    async def load_menus(menu_ids: list[int]) -> dict[int, str]:
        return await menus.read(menu_ids)

    return load_menus


# ── What is loaded, and in which calls ───────────────────────────────────────────────────────────


async def test_only_the_rest_is_loaded(menus: Menus, guard: Guard) -> None:
    """What memory has is not loaded again, and what is missing there is loaded in one call."""
    load = loader_of(menus, guard)
    await load([1, 2])

    assert {3: "menu 3", 1: "menu 1", 4: "menu 4", 2: "menu 2"} == await load([3, 1, 4, 2])
    assert [[1, 2], [3, 4]] == menus.asked


async def test_the_answer_is_in_the_order_asked(menus: Menus, guard: Guard) -> None:
    """However they were found, values come in the order of the ids, each once."""
    load = loader_of(menus, guard)
    await load([2])
    menus.missing = {4}

    assert [3, 2, 1] == list(await load([3, 2, 3, 4, 1, 2]))
    assert [[2], [3, 4, 1]] == menus.asked


@pytest.mark.parametrize("ids", [[], (), iter([]), set(), {}])
async def test_of_no_ids_nothing_is_loaded(ids: Any, menus: Menus, guard: Guard) -> None:
    """An empty list is answered without the loader."""
    load = loader_of(menus, guard)

    assert {} == await load(ids)
    assert {} == await load.refresh(ids)
    assert [] == menus.asked


@pytest.mark.parametrize("kind", [tuple, iter, dict.fromkeys, set])
async def test_ids_may_be_anything_that_holds_some(
    kind: Callable[[list[int]], Any], menus: Menus, guard: Guard
) -> None:
    """Tuples, generators, dicts and sets will do as well."""
    assert {7: "menu 7", 8: "menu 8"} == await loader_of(menus, guard)(kind([7, 8]))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("123", "not '123'; for one there is .one"),
        (b"123", "not b'123'"),
        (7, "not 7"),
        (None, "not None"),
        ([1, [2, 3]], r"\[2, 3\] is no id"),
        ([1, object()], "of type builtins.object"),
        ([float("nan")], "NaN"),
    ],
)
async def test_what_is_no_id_is_refused(ids: Any, message: str, menus: Menus, guard: Guard) -> None:
    """One id, a text, or what cannot be part of a key is an error that names it; nothing is loaded."""
    load = loader_of(menus, guard)

    for ask in (load, load.refresh):
        with pytest.raises(InvalidKey, match=message):
            await ask(ids)
    assert [] == menus.asked


async def test_that_an_id_is_missing_is_remembered(menus: Menus, guard: Guard) -> None:
    """An id without a value is left out, and not loaded again until it is invalidated."""
    load = loader_of(menus, guard)
    menus.missing = {2}

    assert {1: "menu 1"} == await load([1, 2])
    assert {} == await load([2])
    assert await load.one(2) is None
    entry = load.peek(2)
    assert entry is not None
    assert entry.value is None
    assert [[1, 2]] == menus.asked

    menus.missing = set()
    await load.invalidate(2)
    assert {2: "menu 2"} == await load([2])


async def test_none_is_no_value(guard: Guard) -> None:
    """An id whose value is `None` is missing, as one that was left out."""

    @coalesce_many("menu-{menu_id}", guard=guard, ttl=60)
    async def load(menu_ids: list[int]) -> dict[int, str | None]:
        return dict.fromkeys(menu_ids, None) | {1: ""}

    assert {1: ""} == await load([1, 2])
    assert {1: ""} == await load.bypass([1, 2])
    assert await load.one(2) is None


async def test_single_calls_of_one_tick_gather(menus: Menus, guard: Guard) -> None:
    """Single calls that begin together are loaded together, with those for many."""
    load = loader_of(menus, guard)

    answers = await asyncio.gather(load.one(1), load.one(2), load([3, 4]), load.one(5), load.one(1), load([2, 6]))

    assert [
        "menu 1",
        "menu 2",
        {3: "menu 3", 4: "menu 4"},
        "menu 5",
        "menu 1",
        {2: "menu 2", 6: "menu 6"},
    ] == answers
    assert [[1, 2, 3, 4, 5, 6]] == [sorted(asked) for asked in menus.asked]


async def test_nothing_waits_for_a_batch_to_fill(menus: Menus, guard: Guard, pause: Pause) -> None:
    """A call of a later tick has a batch of its own, while the first is under way."""
    load = loader_of(menus, guard)
    menus.gate = Gate()
    first = asyncio.create_task(load.one(1))
    await menus.gate.arrivals(1)
    second = asyncio.create_task(load([1, 2]))
    await menus.gate.arrivals(2)
    menus.gate.open()

    assert "menu 1" == await first
    assert {1: "menu 1", 2: "menu 2"} == await second
    assert [[1], [2]] == menus.asked


async def test_a_thousand_ids_are_loaded_side_by_side(menus: Menus, guard: Guard) -> None:
    """No call of the loader has more than `max_batch` ids, and none waits for another."""
    load = loader_of(menus, guard, max_batch=100)
    menus.gate = Gate()
    call = asyncio.create_task(load(range(1000)))
    await menus.gate.arrivals(10)
    menus.gate.open()

    assert list(range(1000)) == list(await call)
    assert [100] * 10 == [len(asked) for asked in menus.asked]


async def test_max_wait_gathers_over_ticks(menus: Menus, guard: Guard, pause: Pause) -> None:
    """The first waits for others until the batch is full."""
    load = loader_of(menus, guard, max_wait=3600, max_batch=3)
    calls = []
    for menu_id in (1, 2, 3):
        assert [] == menus.asked
        calls.append(asyncio.create_task(load.one(menu_id)))
        await pause()

    assert ["menu 1", "menu 2", "menu 3"] == await asyncio.gather(*calls)
    assert [[1, 2, 3]] == menus.asked


async def test_max_wait_ends(menus: Menus, guard: Guard) -> None:
    """Nobody comes: after `max_wait` the batch goes as it is."""
    load = loader_of(menus, guard, max_wait=0.001)

    assert "menu 1" == await load.one(1)
    assert {2: "menu 2"} == await load([2])


async def test_a_disabled_guard_shares_nothing(menus: Menus, guard: Guard) -> None:
    """With `enabled=False` each call loads each id for itself, though different ones together."""
    guard.enabled = False
    load = loader_of(menus, guard, ttl=None)

    answers = await asyncio.gather(load([1, 2]), load([2, 3]), load.one(3))

    assert [{1: "menu 1", 2: "menu 2"}, {2: "menu 2", 3: "menu 3"}, "menu 3"] == answers
    assert [1, 2, 2, 3, 3] == sorted(menu_id for asked in menus.asked for menu_id in asked)


async def test_the_counters(menus: Menus, guard: Guard) -> None:
    """Calls are counted by id, and loads by calls of the loader."""
    load = loader_of(menus, guard, max_batch=2)
    await load([1, 2, 3])
    await asyncio.gather(load([1, 4]), load.one(4))

    stats = guard.stats().operations["menu-{menu_id}"]
    assert (6, 1, 1, 4, 3, 0) == (
        stats.calls,
        stats.l1_hits,
        stats.joins,
        stats.executions,
        stats.loads,
        stats.in_flight,
    )


# ── Failure ──────────────────────────────────────────────────────────────────────────────────────


async def test_an_error_is_that_of_its_batch(guard: Guard) -> None:
    """All ids of a batch whose load fails get an error of their own; those of other batches their values."""

    @coalesce_many("menu-{menu_id}", guard=guard, ttl=60, max_batch=2)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        if 3 in menu_ids:
            raise LookupError(3)
        return dict.fromkeys(menu_ids, "menu")

    answers = await asyncio.gather(*map(load.one, range(1, 7)), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, LookupError)]
    assert ["menu", "menu", *errors, "menu", "menu"] == answers
    assert 2 == len({id(error) for error in errors})

    with pytest.raises(LookupError):
        await load([1, 2, 3])
    assert {1: "menu", 2: "menu"} == await load([1, 2])
    assert 2 == guard.stats().failures - 1  # id 3 was asked for twice, id 4 once


async def test_an_error_does_not_wait_for_the_rest(menus: Menus, guard: Guard) -> None:
    """Once an id has failed, nobody waits for those that were asked for after it; they are loaded all the same."""
    menus.gate = Gate()

    @coalesce_many("menu-{menu_id}", guard=guard, ttl=60, max_batch=1)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        if menu_ids == [1]:
            raise LookupError(1)
        return await menus.read(menu_ids)

    with pytest.raises(LookupError):
        await load([1, 2])
    menus.gate.open()
    assert {2: "menu 2"} == await load([2])
    assert [[2]] == menus.asked


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([("menu", 7)], "the loader returned a list, not a mapping of ids"),
        (None, "the loader returned a NoneType"),
        ({"7": "menu"}, "the loader returned '7', which it was not asked for; it was asked for 7"),
        ({7: "menu", 8: "menu"}, "the loader returned 8"),
    ],
)
async def test_a_wrong_answer(answer: Any, message: str, guard: Guard) -> None:
    """What is not a mapping of the ids that were asked for is refused: nothing would be told from missing ids."""

    @coalesce_many("menu-{menu_id}", guard=guard, ttl=60)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        return answer

    with pytest.raises(WrongAnswer, match=message):
        await load([7])
    assert load.peek(7) is None


async def test_a_loader_that_hangs(guard: Guard) -> None:
    """After `load_timeout` each id ends with an error of its own, and the load is cancelled."""
    cancelled = asyncio.Event()

    @coalesce_many("menu-{menu_id}", guard=guard, load_timeout=0.01)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    answers = await asyncio.gather(load.one(1), load.one(2), load([3, 4]), return_exceptions=True)
    assert [LoadTimeout] * 3 == [type(answer) for answer in answers]
    assert [True, True, True] == ["menu-" in str(answer) for answer in answers]
    await cancelled.wait()


async def test_a_loader_that_is_cancelled(guard: Guard) -> None:
    """A loader that cancels itself is an error to who waits, and no cancellation."""

    @coalesce_many("menu-{menu_id}", guard=guard)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        raise asyncio.CancelledError

    with pytest.raises(LoadCancelled):
        await load([1, 2])


async def test_a_caller_that_does_not_wait_for_ever(menus: Menus, guard: Guard, pause: Pause) -> None:
    """After `wait_timeout` a caller gives up, and the load goes on."""
    load = loader_of(menus, guard, wait_timeout=0.01)
    menus.gate = Gate()
    with pytest.raises(WaitTimeout, match=r"menu-1: no answer within wait_timeout=0\.01 s"):
        await load([1, 2])
    menus.gate.open()
    await pause()

    assert {1: "menu 1", 2: "menu 2"} == await load([1, 2])
    assert [[1, 2]] == menus.asked


async def test_a_caller_in_time_stops_its_timer(menus: Menus, guard: Guard) -> None:
    """A `wait_timeout` that is not reached changes nothing."""
    load = loader_of(menus, guard, wait_timeout=3600)

    assert {1: "menu 1", 2: "menu 2"} == await load([1, 2])


async def test_one_that_leaves_leaves_the_others(menus: Menus, guard: Guard) -> None:
    """A cancelled caller changes nothing for those who wait for the same ids, or for others of the batch."""
    load = loader_of(menus, guard, on_abandon="cancel")
    menus.gate = Gate()
    calls = [asyncio.create_task(load(ids)) for ids in ([1, 2], [2, 3], [1, 2, 3])]
    await menus.gate.arrivals(1)
    calls[0].cancel()
    calls[2].cancel()
    await asyncio.wait([calls[0], calls[2]])
    menus.gate.open()

    assert {2: "menu 2", 3: "menu 3"} == await calls[1]
    assert calls[0].cancelled()
    assert [[1, 2, 3]] == menus.asked


@pytest.mark.parametrize("is_last", [False, True])
async def test_the_last_to_leave_cancels_the_batch(guard: Guard, is_last: bool) -> None:
    """With `on_abandon="cancel"` the load is cancelled when nobody waits for any of its ids any more."""
    gate = Gate()
    ended: list[str] = []

    @coalesce_many("menu-{menu_id}", guard=guard, on_abandon="cancel")
    async def load(menu_ids: list[int]) -> dict[int, str]:
        try:
            await gate.passage()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        ended.append("finished")
        return dict.fromkeys(menu_ids, "menu")

    calls = [asyncio.create_task(load.one(1)), asyncio.create_task(load([2, 3]))]
    await gate.arrivals(1)
    for call in calls[: 1 + is_last]:
        call.cancel()
    await asyncio.wait(calls[: 1 + is_last])
    gate.open()
    await asyncio.wait(calls)
    while guard.stats().in_flight or not ended:
        await asyncio.sleep(0)

    assert ["cancelled" if is_last else "finished"] == ended


async def test_who_leaves_while_gathering_is_not_loaded_for(menus: Menus, guard: Guard, pause: Pause) -> None:
    """An id that nobody waits for any more is not in the batch when that goes."""
    load = loader_of(menus, guard, max_wait=3600, max_batch=3, on_abandon="cancel")
    leaver, stayer = asyncio.create_task(load.one(1)), asyncio.create_task(load.one(2))
    await pause()
    leaver.cancel()
    await pause()

    assert {3: "menu 3", 4: "menu 4"} == await load([3, 4])
    assert "menu 2" == await stayer
    assert [[2, 3, 4]] == menus.asked


async def test_a_batch_that_all_have_left_is_not_joined(menus: Menus, guard: Guard, pause: Pause) -> None:
    """Whoever comes after the last has left a batch that gathers begins another."""
    load = loader_of(menus, guard, max_wait=3600, max_batch=2, on_abandon="cancel")
    first = asyncio.create_task(load.one(1))
    await pause()
    first.cancel()
    await pause()
    others = [asyncio.create_task(load.one(menu_id)) for menu_id in (1, 2)]

    assert ["menu 1", "menu 2"] == await asyncio.gather(*others)
    assert [[1, 2]] == menus.asked


async def test_a_loader_that_asks_itself(guard: Guard) -> None:
    """A loader that waits for one of its own ids is told, as one of a single id is; others it may ask for."""

    @coalesce_many("menu-{menu_id}", guard=guard)
    async def load(menu_ids: list[int]) -> dict[int, int]:
        below = await load([menu_id // 2 for menu_id in menu_ids if menu_id > 1])
        return {menu_id: 1 + below.get(menu_id // 2, 0) for menu_id in menu_ids}

    assert {64: 7} == await load([64])
    with pytest.raises(RecursiveLoad, match=r"menu-1: its loader waits for itself, through menu-2 \(batch\)"):
        await load([64, 3])  # which loads 1 beside 32, and will have it only when the chain below 32 has it

    @coalesce_many("circle-{menu_id}", guard=guard)
    async def circle(menu_ids: list[int]) -> dict[int, int]:
        return await circle([menu_id % 3 + 1 for menu_id in menu_ids])

    with pytest.raises(RecursiveLoad, match="circle-1: its loader waits for itself"):
        await circle([1])
    with pytest.raises(RecursiveLoad):
        await circle([1, 2])
    with pytest.raises(RecursiveLoad):
        await circle.one(1)


async def test_a_loader_that_refreshes_itself(guard: Guard) -> None:
    """A load that refreshes its own id does not do so for ever; nor without shared flights."""

    @coalesce_many("menu-{menu_id}", guard=guard)
    async def load(menu_ids: list[int]) -> dict[int, int]:
        return await load.refresh(menu_ids)

    with pytest.raises(RecursiveLoad):
        await load([1, 2])
    guard.enabled = False
    with pytest.raises(RecursiveLoad):
        await load([1, 2])


# ── Invalidation and refresh ─────────────────────────────────────────────────────────────────────


async def test_what_is_invalidated_during_the_load_is_not_stored(menus: Menus, guard: Guard) -> None:
    """Of a batch, the id that was invalidated meanwhile is answered and not remembered; the others are."""
    load = loader_of(menus, guard)
    menus.gate = Gate()
    call = asyncio.create_task(load([1, 2, 3]))
    await menus.gate.arrivals(1)
    await load.invalidate(2)
    menus.gate.open()

    assert {1: "menu 1", 2: "menu 2", 3: "menu 3"} == await call
    assert [True, False, True] == [load.peek(menu_id) is not None for menu_id in (1, 2, 3)]
    assert 1 == guard.stats().overtaken


async def test_after_an_invalidation_the_load_is_another(menus: Menus, guard: Guard) -> None:
    """Whoever asks after an invalidation does not wait for a load from before; even while that one gathers."""
    load = loader_of(menus, guard)
    menus.gate = Gate()
    before = asyncio.create_task(load([1, 2]))
    await menus.gate.arrivals(1)
    await load.invalidate(2)
    after = asyncio.create_task(load([1, 2]))
    await menus.gate.arrivals(2)
    menus.gate.open()
    await asyncio.gather(before, after)

    assert [[1, 2], [2]] == menus.asked
    assert load.peek(2) is not None


async def test_several_are_invalidated(menus: Menus, guard: Guard) -> None:
    """`invalidate` takes as many ids as there are."""
    load = loader_of(menus, guard)
    await load([1, 2, 3, 4])
    await load.invalidate(1, 3, 3)
    await load.invalidate()
    await load([1, 2, 3, 4])

    assert [[1, 2, 3, 4], [1, 3]] == menus.asked


async def test_equal_ids_are_invalidated_each(menus: Menus, guard: Guard) -> None:
    """Ids that are equal, and not the same, have an op each; when both are named, both are forgotten."""
    load, equal = loader_of(menus, guard), untyped(1.0)
    await load([1])
    await load([equal])
    await load.invalidate(1, equal)

    assert (None, None) == (load.peek(1), load.peek(equal))


async def test_tags_are_those_of_each_id(menus: Menus, guard: Guard) -> None:
    """A tag that names the id is that id's alone; others are everybody's."""
    load = loader_of(menus, guard, tags=("restaurant:{menu_id}", "menus"))
    assert ("restaurant:2", "menus") == load.tags(2) == load.one.tags(2)
    await load([1, 2])
    await guard.invalidate_tag("restaurant:2")
    await load([1, 2])
    await guard.invalidate_tag("menus")
    await load([1, 2])

    assert [[1, 2], [2], [1, 2]] == menus.asked


async def test_a_refresh_loads_and_replaces(guard: Guard) -> None:
    """`refresh` loads what is remembered, too; concurrent ones share the load, and when it fails all stays."""
    answers: Iterator[str] = iter(["old", "new"])

    @coalesce_many("menu-{menu_id}", guard=guard, ttl=60)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        answer = next(answers, None)
        if answer is None:
            raise LookupError
        return dict.fromkeys(menu_ids, answer)

    assert {1: "old", 2: "old"} == await load([1, 2])
    assert [{2: "new", 1: "new"}] * 2 == await asyncio.gather(load.refresh([2, 1]), load.refresh([2, 1]))
    with pytest.raises(LookupError):
        await load.refresh([1])
    assert {1: "new", 2: "new"} == await load([1, 2])


async def test_a_batch_that_nobody_waits_for_is_not_sent(menus: Menus, guard: Guard, pause: Pause) -> None:
    """When all have left while it gathered, there is no load when `max_wait` is over."""
    load = loader_of(menus, guard, max_wait=3600, on_abandon="cancel")
    call = asyncio.create_task(load([1, 2]))
    await pause()
    [window] = load._batches._windows().values()
    call.cancel()
    await pause()
    window._close()  # as after an hour
    await pause()

    assert ([], {}, 0) == (menus.asked, load._batches._windows(), guard.stats().loads)


async def test_what_is_found_as_it_is_launched_is_not_expected(menus: Menus, store: FaultStore) -> None:
    """An eager flight that the store answers at once has landed before anybody could expect it."""
    async with Guard(lambda: store) as guard:
        load = loader_of(menus, guard, l2_ttl=60)
        await load([1, 2])
        for menu_id in (1, 2):
            guard._invalidator.forget(load.key(menu_id))
        loop = asyncio.get_running_loop()
        factory = loop.get_task_factory()
        loop.set_task_factory(at_once)
        try:
            assert {1: "menu 1", 2: "menu 2"} == await load([1, 2])
        finally:
            loop.set_task_factory(factory)

    assert [[1, 2]] == menus.asked
    assert {} == load._batches._windows()


async def test_a_refresh_overtakes_a_load(menus: Menus, guard: Guard) -> None:
    """A load that was under way when the refresh began answers who waits, and does not replace what is newer."""
    words = iter(["old", "new"])
    gates = {"old": Gate(), "new": Gate()}

    @coalesce_many("menu-{menu_id}", guard=guard, ttl=60)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        word = next(words)
        await gates[word].passage()
        return dict.fromkeys(menu_ids, word)

    before = asyncio.create_task(load([1, 2]))
    await gates["old"].arrivals(1)
    refresh = asyncio.create_task(load.refresh([1]))
    await gates["new"].arrivals(1)
    gates["old"].open()

    assert {1: "old", 2: "old"} == await before
    assert load.peek(1) is None
    gates["new"].open()
    assert {1: "new"} == await refresh
    assert {1: "new", 2: "old"} == await load([1, 2])


# ── Limits ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("limits", [(1, None), (None, 1), (1, 1)])
async def test_a_limit_counts_calls_of_the_loader(menus: Menus, limits: tuple[int | None, int | None]) -> None:
    """With one slot, a batch of two runs in it, and the next one after it."""
    guard = Guard(max_loads=limits[0])
    load = loader_of(menus, guard, max_batch=2, max_loads=limits[1])
    menus.gate = Gate()
    call = asyncio.create_task(load([1, 2, 3, 4]))
    await menus.gate.arrivals(1)
    assert [[1, 2]] == menus.asked
    menus.gate.open()

    assert [1, 2, 3, 4] == list(await call)
    assert [[1, 2], [3, 4]] == menus.asked


async def test_a_load_within_a_load_does_not_queue(menus: Menus) -> None:
    """With one slot, a load that waits for a batch does not keep it from running."""
    guard = Guard(max_loads=1)
    load = loader_of(menus, guard)

    @coalesce("page", guard=guard)
    async def page() -> dict[int, str]:
        return await load([1, 2])

    assert {1: "menu 1", 2: "menu 2"} == await page()


# ── Context, loops, methods ──────────────────────────────────────────────────────────────────────


async def test_the_loader_sees_what_varies_and_no_more(guard: Guard) -> None:
    """Calls that differ in `vary` are loaded apart; the loader sees that variable, and none of the caller's others."""
    seen: list[tuple[list[int], str, str]] = []

    @coalesce_many("menu-{menu_id}", guard=guard, ttl=60, vary=(tenant,))
    async def load(menu_ids: list[int]) -> dict[int, str]:
        seen.append((menu_ids, tenant.get(), request_id.get()))
        return dict.fromkeys(menu_ids, tenant.get())

    async def ask(name: str, *ids: int) -> tuple[dict[int, str], str | None]:
        tenant.set(name)
        request_id.set(name)
        many, one = asyncio.create_task(load(ids[:2])), asyncio.create_task(load.one(ids[2]))
        return await many, await one

    answers = await asyncio.gather(ask("a", 1, 2, 3), ask("b", 4, 5, 6))
    assert [({1: "a", 2: "a"}, "a"), ({4: "b", 5: "b"}, "b")] == answers
    assert [([1, 2, 3], "a", "none"), ([4, 5, 6], "b", "none")] == sorted(seen)
    assert "menu-1@nobody" == load.key(1)


def test_each_loop_has_its_own_batches(make_loop: Callable[[], asyncio.AbstractEventLoop], menus: Menus) -> None:
    """Calls in two loops do not gather; a loop that was closed over a batch leaves nothing to the next."""
    load = loader_of(menus, Guard(), max_wait=3600, max_batch=2)

    async def ask(*ids: int) -> list[str | None]:
        return await asyncio.gather(*map(load.one, ids))

    first, second = make_loop(), make_loop()
    begun = [loop.create_task(ask(menu_id)) for loop, menu_id in ((first, 1), (second, 2))]
    for loop in (first, second):
        loop.run_until_complete(asyncio.sleep(0))
    assert ["menu 3"] == first.run_until_complete(ask(3))
    assert ["menu 4"] == second.run_until_complete(ask(4))
    assert [["menu 1"], ["menu 2"]] == [
        loop.run_until_complete(call) for loop, call in zip((first, second), begun, strict=True)
    ]
    assert [[1, 3], [2, 4]] == menus.asked


class Shop:
    """Has a loader among its methods."""

    guard = Guard()

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[list[int]] = []

    @coalesce_many("shop-menu-{menu_id}", guard=guard, ttl=60)
    async def load(self, menu_ids: list[int]) -> dict[int, str]:
        """Load for this shop."""
        self.asked.append(menu_ids)
        return {menu_id: f"{self.name} {menu_id}" for menu_id in menu_ids}

    @coalesce_many("named-{self.name}-{one_menu}", guard=guard, ttl=60)
    async def by_name(self, menu_ids: list[int]) -> dict[int, str]:
        """Load for all shops of this name."""
        return await self.load.bypass(menu_ids)


async def test_methods_are_those_of_their_instance() -> None:
    """Instances share neither answers nor batches, unless the key says so."""
    one, two = Shop("one"), Shop("two")

    answers = await asyncio.gather(one.load([1, 2]), two.load([2]), one.load.one(3), two.load.one(3))

    assert [{1: "one 1", 2: "one 2"}, {2: "two 2"}, "one 3", "two 3"] == answers
    assert ([[1, 2, 3]], [[2, 3]]) == (one.asked, two.asked)
    await one.load.invalidate(1, 2)
    assert (None, None) == (one.load.peek(1), one.load.peek(2))
    assert two.load.peek(2) is not None
    assert {4: "same 4"} == await Shop("same").by_name([4])
    assert "named-same-4" == Shop("same").by_name.key(4)
    assert Shop("same").by_name.peek(4) is not None
    assert "Load for this shop." == one.load.__doc__ == Shop.load.__doc__


async def test_instances_are_not_kept_alive(pause: Pause) -> None:
    """Nothing is left of an instance whose loads are over."""
    shop = Shop("one")
    await shop.load([1, 2])
    await pause()
    gone = ref(shop)
    del shop
    gc.collect()

    assert gone() is None


# ── Over a store ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Menu:
    """A value that has to be encoded."""

    menu_id: int
    version: int = 1


@pytest.fixture
def store() -> FaultStore:
    """Return a store in memory."""
    return FaultStore(ManualClock())


async def test_what_the_store_has_is_not_loaded(store: FaultStore) -> None:
    """Another guard finds values and missing ids in the store, and loads the rest in one call."""
    asked: list[list[int]] = []

    def loader(guard: Guard) -> CoalescedMany[int, Menu]:
        @coalesce_many("menu-{menu_id}", guard=guard, ttl=60, l2_ttl=300)
        async def load(menu_ids: list[int]) -> Mapping[int, Menu]:
            asked.append(menu_ids)
            return {menu_id: Menu(menu_id) for menu_id in menu_ids if menu_id != 2}

        return load

    async with Guard(lambda: store) as first:
        await loader(first)([1, 2])
    async with Guard(lambda: store) as second:
        load = loader(second)
        assert {1: Menu(1), 3: Menu(3), 4: Menu(4)} == await load([1, 2, 3, 4])
        assert {} == await load([2])
        assert {1: Menu(1)} == await load([1, 2])
        await load.invalidate(1, 2)
        assert {1: Menu(1)} == await load([1, 2])

    assert [[1, 2], [3, 4], [1, 2]] == asked


class SlowStore(FaultStore):
    """A store that does not answer for some keys."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.held: dict[str, Gate] = {}

    async def read(self, key: str) -> Stored | None:
        for part, gate in self.held.items():
            if part in key:
                await gate.passage()
        return await super().read(key)


@pytest.mark.parametrize("is_found", [False, True])
async def test_a_batch_waits_for_the_store(menus: Menus, is_found: bool, pause: Pause) -> None:
    """What is asked for together is loaded together, however the store takes its time, and found or not."""
    store = SlowStore()
    async with Guard(lambda: store) as guard:
        load = loader_of(menus, guard, l2_ttl=300)
        if is_found:
            await load([3])
            guard._invalidator.forget(load.key(3))
            menus.asked.clear()
        slow = store.held["menu-3"] = Gate()
        call = asyncio.create_task(load([1, 2, 3]))
        await slow.arrivals(1)
        await pause()
        assert [] == menus.asked
        slow.open()

        assert [1, 2, 3] == list(await call)
        assert [[1, 2] if is_found else [1, 2, 3]] == menus.asked


async def test_who_comes_while_a_batch_waits_has_another(menus: Menus, pause: Pause) -> None:
    """Those who come later do not wait for the store's answers to others."""
    store = SlowStore()
    slow = store.held["menu-3"] = Gate()
    async with Guard(lambda: store) as guard:
        load = loader_of(menus, guard, l2_ttl=300)
        call = asyncio.create_task(load([1, 3]))
        await slow.arrivals(1)
        await pause()

        assert {4: "menu 4", 5: "menu 5"} == await load([4, 5])
        assert "menu 6" == await load.one(6)
        slow.open()
        assert {1: "menu 1", 3: "menu 3"} == await call
        assert [[4, 5], [6], [1, 3]] == menus.asked


@pytest.mark.parametrize("annotation", [list[int], int, dict[int, object], dict, "Nowhere", "dict[int, Nowhere]"])
async def test_a_return_annotation_that_does_not_tell(annotation: Any, store: FaultStore) -> None:
    """What the values are has to be said by the annotation: at decoration, or when the guard is entered."""
    guard = Guard(lambda: store)

    async def load(menu_ids: list[int]) -> dict[int, Menu]:
        return {}

    load.__annotations__["return"] = annotation
    with pytest.raises(ConfigurationError, match="annotat"):  # noqa: PT012  # whichever comes first
        loader = coalesce_many("menu-{menu_id}", guard=guard, l2_ttl=60)(load)
        async with guard:
            assert loader


def test_a_return_annotation_that_is_not_there(store: FaultStore) -> None:
    """Without one, the values' type is not known."""
    with pytest.raises(ConfigurationError, match="annotate what it returns"):
        coalesce_many("menu-{menu_id}", guard=Guard(lambda: store), l2_ttl=60)(_unannotated)


async def _unannotated(menu_ids):  # noqa: ANN001, ANN202  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
    return {}


class MenuCodec:
    """A codec of a user's own; it knows nothing of `None`."""

    def encode(self, value: Menu) -> bytes:
        return str(value.menu_id).encode() if value.menu_id else b""

    def decode(self, payload: bytes) -> Menu:
        return Menu(int(payload or b"0"))


async def test_a_codec_of_ones_own_is_for_values(store: FaultStore) -> None:
    """A codec is not asked to encode that there is no value, even if values of its own are empty."""
    asked: list[int] = []

    for _ in range(2):
        async with Guard(lambda: store) as guard:

            @coalesce_many("menu-{menu_id}", guard=guard, l2_ttl=60, codec=MenuCodec())
            async def load(menu_ids: list[int]):  # noqa: ANN202
                asked.extend(menu_ids)
                return {menu_id: Menu(menu_id) for menu_id in menu_ids if menu_id != 2}

            assert {0: Menu(0), 1: Menu(1)} == await load([0, 1, 2])
            assert await load.one(2) is None
    assert [0, 1, 2] == asked


async def test_isolated_values_are_copies(guard: Guard) -> None:
    """With `isolate=True` each caller may change what they got."""

    @coalesce_many("menu-{menu_id}", guard=guard, ttl=60, isolate=True)
    async def load(menu_ids: list[int]) -> dict[int, list[int]]:
        return {menu_id: [menu_id] for menu_id in menu_ids if menu_id != 2}

    for _ in range(2):
        answer = await load([1, 2])
        assert {1: [1]} == answer
        answer[1].append(7)
    assert {1: "text"} == await coalesce_many("x-{x}", guard=guard, isolate=True)(_wrongly_annotated)([1])


async def _wrongly_annotated(ids: list[int]) -> dict[int, int]:
    return untyped(dict.fromkeys(ids, "text"))


async def test_a_missing_id_has_no_version(guard: Guard) -> None:
    """`version` is asked of values alone; that of a missing id is lower than all."""
    versions: list[Menu] = []

    def version_of(menu: Menu) -> int:
        versions.append(menu)
        return menu.version

    @coalesce_many("menu-{menu_id}", guard=guard, ttl=60, version=version_of)
    async def load(menu_ids: list[int]) -> dict[int, Menu]:
        return {menu_id: Menu(menu_id, 7) for menu_id in menu_ids if menu_id != 2}

    assert {1: Menu(1, 7)} == await load([1, 2])
    assert [Menu(1, 7)] == versions


async def test_the_store_has_to_confirm_every_invalidation(store: FaultStore) -> None:
    """Of several ids, those whose invalidation the store has not confirmed are named."""
    async with Guard(lambda: store) as guard:
        load = loader_of(Menus(), guard, l2_ttl=60)
        await load([1, 2])
        store.error = OSError("gone")
        with pytest.raises(InvalidationPending, match="menu-1, menu-2: not confirmed by the store"):
            await load.invalidate(1, 2)
        store.error = None


async def test_a_guard_that_is_not_open(menus: Menus, store: FaultStore) -> None:
    """Calls, refreshes and invalidations outside the guard are refused."""
    load = loader_of(menus, Guard(lambda: store), l2_ttl=60)
    for call in (load([1]), load.one(1), load.refresh([1]), load.invalidate(1, 2)):
        with pytest.raises(GuardClosed):
            await call


async def test_leaving_the_guard_waits_for_batches(menus: Menus, store: FaultStore, pause: Pause) -> None:
    """A load that is under way when the guard is left is finished, and stored."""
    guard = Guard(lambda: store)
    load = loader_of(menus, guard, l2_ttl=60)
    menus.gate = Gate()
    async with guard:
        call = asyncio.create_task(load([1, 2]))
        await menus.gate.arrivals(1)
        asyncio.get_running_loop().call_soon(menus.gate.open)

    assert {1: "menu 1", 2: "menu 2"} == await call
    assert 2 == len(store.contents)


async def test_leaving_the_guard_does_not_wait_for_ever(menus: Menus, store: FaultStore) -> None:
    """A batch that does not end is cancelled with all that wait for it."""
    guard = Guard(lambda: store, drain_timeout=0)
    load = loader_of(menus, guard, l2_ttl=60)
    menus.gate = Gate()
    async with guard:
        call = asyncio.create_task(load([1, 2]))
        await menus.gate.arrivals(1)

    with pytest.raises(LoadCancelled, match="shut-down"):
        await call
    assert {} == store.contents


# ── Decoration ───────────────────────────────────────────────────────────────────────────────────


@coalesce_many
async def bare(menu_ids: list[int]) -> dict[int, str]:
    """Load without options."""
    return {menu_id: str(menu_id) for menu_id in menu_ids}


async def test_bare() -> None:
    """Without options nothing is remembered, and keys are derived from the function's name and the id."""
    assert {1: "1", 2: "2"} == await bare([1, 2])
    assert bare.peek(1) is None
    assert f"{__name__}.bare.one(1)" == bare.key(1)
    assert bare.key(1) != bare.key(untyped("1"))
    assert "Load without options." == bare.__doc__ == bare.one.__doc__
    assert isinstance(bare.one, Coalesced)
    assert f"<coalesced {__name__}.bare>" == repr(bare)
    assert f"<coalesced {__name__}.bare.one>" == repr(bare.one)
    assert bare is pickle.loads(pickle.dumps(bare))  # noqa: S301
    assert bare.one is pickle.loads(pickle.dumps(bare.one))  # noqa: S301


async def test_bypass_is_for_one_caller_alone(menus: Menus, guard: Guard) -> None:
    """`bypass` calls the loader with what was asked for, and remembers nothing."""
    load = loader_of(menus, guard)
    menus.missing = {2}

    assert {3: "menu 3", 1: "menu 1"} == await load.bypass([3, 2, 1, 3])
    assert [[3, 2, 1]] == menus.asked
    assert load.peek(1) is None


async def test_bypass_calls_the_loader_as_it_may_be_called(menus: Menus, guard: Guard) -> None:
    """`bypass` calls the loader with at most `max_batch` ids, and for none of them not at all."""
    load = loader_of(menus, guard, max_batch=2)

    assert {} == await load.bypass([])
    assert [] == menus.asked
    assert [3, 1, 5, 4, 2] == list(await load.bypass(iter([3, 1, 5, 4, 2])))
    assert [[3, 1], [5, 4], [2]] == menus.asked


async def test_bypass_of_one_is_in_no_batch(menus: Menus, guard: Guard) -> None:
    """`one.bypass` has a load of its own beside a batch of the same tick, in the caller's context."""
    load = loader_of(menus, guard)
    menus.missing = {2}

    answers = await asyncio.gather(load.one(7), load.one.bypass(7), load.one(8), load.one.bypass(2))

    assert ["menu 7", "menu 7", "menu 8", None] == answers
    assert [[2], [7], [7, 8]] == sorted(menus.asked)
    assert load.peek(2) is None


async def test_bypass_of_a_method(guard: Guard) -> None:
    """Of a bound loader, `bypass` and `one.bypass` run for this instance."""

    class Shop:
        name = "shop"

        @coalesce_many("shop-{menu_id}", guard=guard)
        async def load(self, menu_ids: list[int]) -> dict[int, str]:
            return {menu_id: f"{self.name} {menu_id}" for menu_id in menu_ids}

    assert {7: "shop 7"} == await Shop().load.bypass([7])
    assert "shop 7" == await Shop().load.one.bypass(7)
    by_name: Any = Shop().load.one
    assert "shop 7" == await by_name.bypass(menu_id=7)


@pytest.mark.parametrize("answer", [None, [], {8: "menu"}])
async def test_bypass_of_a_loader_that_answers_wrongly(answer: Any, guard: Guard) -> None:
    """What the loader may not return is refused on every way."""

    @coalesce_many("menu-{menu_id}", guard=guard)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        return answer

    with pytest.raises(WrongAnswer):
        await load.bypass([7])
    with pytest.raises(WrongAnswer):
        await load.one.bypass(7)


@pytest.mark.parametrize("name", ["__call__", "refresh", "bypass", "key", "peek", "invalidate"])
@pytest.mark.parametrize("template", ["menu-{menu_id}", None])
async def test_what_is_no_id_is_no_single_id(template: Any, name: str, menus: Menus, guard: Guard) -> None:
    """What cannot be a key of a dict is refused for one id as for many, before anything is launched."""

    @coalesce_many(template, guard=guard, ttl=60)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        return await menus.read(menu_ids)

    ask: Any = getattr(load.one, name)
    with pytest.raises(InvalidKey, match=r"load\.one: \[7\] is no id: it cannot be a key of a dict"):
        await ask([7])
    assert (0, []) == (guard.stats().executions, menus.asked)


async def test_ids_that_are_equal_and_of_two_types(menus: Menus, guard: Guard) -> None:
    """Equal ids of two types are one in a call for many, and have an op, and a load, each when asked for alone."""

    @coalesce_many(guard=guard, ttl=60)
    async def load(menu_ids: list[float]) -> dict[float, str]:
        return {menu_id: f"menu {menu_id}" for menu_id in menu_ids}

    assert {1: "menu 1"} == await load([1, 1.0, True])
    assert ["menu 1", "menu 1.0"] == await asyncio.gather(load.one(1), load.one(1.0))


def test_method_in_the_store_is_told_what_it_may_pass(store: FaultStore) -> None:
    """A method whose ops mean something here alone is told of options that there are: `ignore` is none."""
    guard = Guard(lambda: store)

    class Shop:
        async def load(self, menu_ids: list[int]) -> dict[int, str]:
            return {}

        @coalesce_many(key=lambda self, menu_id: f"keyed-{menu_id}", guard=guard, l2_ttl=60)
        async def keyed(self, menu_ids: list[int]) -> dict[int, str]:
            return {}

    with pytest.raises(InvalidKey, match=r"Put {self.attribute} .*, or pass as key= a function of the instance and of"):
        coalesce_many("shop-{menu_id}", guard=guard, l2_ttl=60)(Shop.load)
    assert "keyed-7" == Shop().keyed.key(7)


async def test_a_loader_with_attributes_of_its_own(guard: Guard) -> None:
    """An attribute of the loader that is called like a method of the stand-in does not take its place."""

    async def load(menu_ids: list[int]) -> dict[int, str]:
        return dict.fromkeys(menu_ids, "menu")

    for name in ("key", "tags", "invalidate", "refresh", "peek", "bypass", "one", "_batches"):
        setattr(load, name, "the function's own")
    coalesced: Any = coalesce_many("menu-{menu_id}", guard=guard, ttl=60)(load)

    assert {7: "menu"} == await coalesced([7]) == await coalesced.refresh([7]) == await coalesced.bypass([7])
    assert ("menu", "menu-7", ()) == (await coalesced.one(7), coalesced.key(7), coalesced.tags(7))
    await coalesced.invalidate(7)
    assert coalesced.peek(7) is None


class Chain:
    """Keeps a bound loader among its attributes."""

    def __init__(self, city: str) -> None:
        self.city = city
        self.ask: Any = self.load

    @coalesce_many(ttl=60)
    async def load(self, menu_ids: list[int]) -> dict[int, str]:
        """Load menus of this city."""
        return {menu_id: f"{self.city} {menu_id}" for menu_id in menu_ids}


async def test_a_deep_copy_of_a_bound_loader() -> None:
    """A deep copy of an instance has the loader of that copy; a function is itself."""
    chain = Chain("Rome")
    twin = copy.deepcopy(chain)
    twin.city = "Turin"

    assert [{7: "Turin 7"}, {7: "Rome 7"}] == [await twin.ask([7]), await chain.ask([7])]
    assert ["Turin 8", {9: "Turin 9"}] == [await twin.ask.one(8), await twin.ask.bypass([9])]
    assert bare is copy.deepcopy(bare)


async def test_a_key_function(guard: Guard) -> None:
    """A key may be a function of one id."""

    @coalesce_many(key=lambda menu_id: f"menu/{menu_id % 10}", guard=guard)
    async def load(menu_ids: list[int]) -> dict[int, str]:
        return dict.fromkeys(menu_ids, "menu")

    assert "menu/7" == load.key(17)
    assert {17: "menu"} == await load([17])


async def test_a_key_by_an_attribute(guard: Guard) -> None:
    """A template may name an attribute of the id."""

    @coalesce_many("menu-{menu.menu_id}", guard=guard)
    async def load(menus: list[Menu]) -> dict[Menu, str]:
        return dict.fromkeys(menus, "menu")

    assert "menu-7" == load.key(Menu(7))
    assert {Menu(7): "menu"} == await load([Menu(7)])


def _plain(menu_ids: list[int]) -> dict[int, str]:
    return {}


async def _generator(menu_ids: list[int]) -> Any:
    yield {}


async def _two(menu_ids: list[int], lang: str) -> dict[int, str]:
    return {}


async def _none() -> dict[int, str]:
    return {}


async def _keyword(*, menu_ids: list[int]) -> dict[int, str]:
    return {}


async def _star(*menu_ids: int) -> dict[int, str]:
    return {}


async def _of_class(cls: type, menu_ids: list[int]) -> dict[int, str]:
    return {}


@pytest.mark.parametrize(
    "function",
    [_plain, _generator, Shop, _two, _none, _keyword, _star, _of_class, classmethod(_of_class), bare.one, 7],
)
def test_what_cannot_be_a_loader_of_many(function: Any) -> None:
    """Only an `async def` function of one list is one."""
    if function == 7:
        decorate: Any = coalesce_many()
        with pytest.raises(NotCoalescable, match="is a int"):
            decorate(function)
    else:
        with pytest.raises(NotCoalescable, match="@coalesce_many"):
            coalesce_many(function)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (classmethod(_of_class), r"is a class method: let it be a function, or an instance's method$"),
        (staticmethod(_star), r"is a static method: put @staticmethod above @coalesce_many$"),
        (staticmethod(_plain), r"is a static method: put @staticmethod above @coalesce_many$"),
    ],
)
@pytest.mark.parametrize("form", [coalesce_many, coalesce_many(ttl=5)], ids=["bare", "options"])
def test_methods_of_a_class_are_refused_with_the_way_out(form: Any, function: Any, message: str) -> None:
    """A class or static method below the decorator is refused, with what can be written instead."""
    with pytest.raises(NotCoalescable, match=rf"^@coalesce_many: \w+ {message}"):
        form(function)


async def test_a_static_method_above(guard: Guard) -> None:
    """`@staticmethod` above `@coalesce_many` makes a loader that the class and its instances share."""

    class Menus:
        @staticmethod
        @coalesce_many("menu-{menu_id}", guard=guard, ttl=60)
        async def load(menu_ids: list[int]) -> dict[int, str]:
            return dict.fromkeys(menu_ids, "menu")

    assert {7: "menu"} == await Menus.load([7]) == await Menus().load([7])
    assert "menu-7" == Menus.load.key(7)
    assert 1 == guard.stats().executions


@pytest.mark.parametrize("template", ["menu", "menu-{a}-{b}", "menu-{self.x}-{a}-{b}"])
def test_a_template_names_one_id(template: str, guard: Guard) -> None:
    """A template with no placeholder, or for more than the id, is refused."""
    with pytest.raises(InvalidKey, match="has to name one id"):
        coalesce_many(template, guard=guard)(_loader)


async def _loader(menu_ids: list[int]) -> dict[int, str]:
    return {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch=0"),
        ({"max_batch": 1.5}, "max_batch=1.5"),
        ({"max_wait": -1}, "max_wait=-1"),
        ({"max_wait": None}, "max_wait=None"),
        ({"inherit_context": True}, "name variables in vary="),
        ({"key": "x-{x}"}, "two keys"),
        ({"version": 7}, "version=7"),
        ({"codec": 7}, "codec=7"),
        ({"codec": MenuCodec}, "give an object with encode"),
        ({"guard": 7}, "guard=7"),
        ({"ttl": 0}, "ttl=0"),
        ({"ignore": ("x",)}, "there is no option 'ignore'"),
        ({"tll": 5}, "there is no option 'tll'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    """An option that breaks its rule is refused with its value, at decoration."""
    with pytest.raises(ConfigurationError, match=message):
        coalesce_many("menu-{menu_id}", **options)(_loader)


def test_two_loaders_may_not_have_the_same_ops(guard: Guard) -> None:
    """The ops of a loader of many are its own, as those of any function."""
    kept = coalesce_many("dish-{dish_id}", guard=guard)(_loader)
    with pytest.raises(InvalidKey, match="would share answers"):

        @coalesce("dish-{dish_id}", guard=guard)
        async def load(dish_id: int) -> None: ...

    assert "dish-1" == kept.key(1)
    closure = loader_of(Menus(), guard)
    with pytest.raises(InvalidKey, match="take variables from around them"):
        loader_of(Menus(), guard)
    assert closure
