import asyncio
import pickle
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any, Unpack

import pytest
from inside import untyped

from stampede_guard import (
    CannotEncode,
    ConfigurationError,
    Guard,
    GuardClosed,
    InvalidationPending,
    InvalidKey,
    LoadCancelled,
    LoadTimeout,
    RecursiveLoad,
    WaitTimeout,
    coalesce,
)
from stampede_guard._operations.operation import Operation
from stampede_guard._operations.options import Options
from stampede_guard._operations.policy import Policy
from stampede_guard.stores import Stored
from stampede_guard.testing import FaultStore, Gate, ManualClock

Pause = Callable[[], Awaitable[None]]
MakeLoop = Callable[[], asyncio.AbstractEventLoop]

OP = "menu-7"
NAMES: Any = ("", 7, None, ["menus"])  # that are none
BOTH: dict[str, Any] = {"ttl": 5, "l2_ttl": 10, "jitter": 0, "returns": str}


class Loader:
    """Loads "soup 1", "soup 2", …, each when it may."""

    def __init__(self) -> None:
        self.loads = 0
        self.gate: Gate | None = None

    async def __call__(self) -> str:
        self.loads += 1
        answer = f"soup {self.loads}"
        if self.gate is not None:
            await self.gate.passage()
        return answer


@pytest.fixture
def store(clock: ManualClock) -> FaultStore:
    """Return an empty store."""
    return FaultStore(clock)


@pytest.fixture
def load() -> Loader:
    """Return a loader."""
    return Loader()


@pytest.fixture
async def guard(clock: ManualClock, store: FaultStore) -> AsyncIterator[Guard]:
    """Return an open guard with a store."""
    async with Guard(lambda: store, clock=clock) as guard:
        yield guard


def plain(guard: Guard, **options: Unpack[Options]) -> Operation:
    """Return an operation of *guard*."""
    return guard._add_operation("menus", Policy.from_options(options), annotation=lambda: str)


# The data path


async def test_memory_answers_first(guard: Guard, load: Loader, store: FaultStore) -> None:
    """A fresh entry in memory is the answer; neither store nor loader is asked."""
    answers = [await guard.fetch(OP, load, **BOTH)]
    store.error = OSError("down")
    answers.append(await guard.fetch(OP, load, **BOTH))

    assert ["soup 1", "soup 1"] == answers
    assert (1, 1, 0) == (guard.stats().l1_hits, guard.stats().loads, guard.stats().l2_errors)


@pytest.mark.parametrize(
    ("seconds", "answer", "stats"), [(5, "soup 1", (1, 1, 1, 1)), (10, "soup 2", (0, 1, 2, 2))], ids=["store", "loader"]
)
async def test_store_answers_when_memory_does_not(  # noqa: PLR0917  # fixtures
    seconds: float, answer: str, stats: tuple[int, ...], guard: Guard, load: Loader, clock: ManualClock
) -> None:
    """When the entry in memory is gone, the store is read; when both let go, it is loaded. Memory has it again."""
    await guard.fetch(OP, load, **BOTH)
    clock.advance(seconds)
    answers = [await guard.fetch(OP, load, **BOTH) for _ in range(2)]

    now = guard.stats()
    assert [answer] * 2 == answers
    assert stats == (now.l2_hits, now.l1_hits, now.loads, now.l2_misses)


async def test_memory_keeps_nothing_longer_than_the_store(guard: Guard, load: Loader, clock: ManualClock) -> None:
    """An answer read from the store with a second left stays in memory for that second."""
    await guard.fetch(OP, load, **BOTH)
    clock.advance(9)
    late = await guard.fetch(OP, load, **BOTH)
    clock.advance(1)

    assert ("soup 1", "soup 2") == (late, await guard.fetch(OP, load, **BOTH))


async def test_without_ttl_nothing_stays_in_memory(guard: Guard, load: Loader, store: FaultStore) -> None:
    """With `l2_ttl` alone each call reads the store, with neither each call loads."""
    stored = [await guard.fetch(OP, load, l2_ttl=10, returns=str) for _ in range(2)]
    loaded = [await guard.fetch("soup-8", load) for _ in range(2)]

    assert ["soup 1", "soup 1"] == stored
    assert ["soup 2", "soup 3"] == loaded
    assert 1 == len(store.contents)


@pytest.mark.parametrize("answer", [None, 0, False, ""])
@pytest.mark.parametrize("isolate", [True, False])
async def test_falsy_answers_are_remembered(answer: object, guard: Guard, clock: ManualClock, *, isolate: bool) -> None:
    """`None` and its like come out of memory and store like any answer."""
    loads = []

    async def load_nothing() -> object:
        loads.append("load")
        return answer

    options: dict[str, Any] = {**BOTH, "returns": type(answer) if answer is not None else None, "isolate": isolate}
    answers = [await guard.fetch(OP, load_nothing, **options) for _ in range(2)]
    clock.advance(6)
    answers.append(await guard.fetch(OP, load_nothing, **options))

    assert [answer] * 3 == answers
    assert ["load"] == loads


async def test_isolated_answers_are_each_callers_own(guard: Guard, clock: ManualClock) -> None:
    """With `isolate=True` no caller sees what another did to the answer, wherever it comes from."""

    async def load_menu() -> list[str]:
        return ["soup"]

    options: dict[str, Any] = {**BOTH, "returns": list[str], "isolate": True}
    for advance in (0, 0, 5, 0, 10):
        clock.advance(advance)
        menu = await guard.fetch(OP, load_menu, **options)
        assert ["soup"] == menu
        menu.append("fly")

    assert (2, 2, 1) == (guard.stats().loads, guard.stats().l1_hits, guard.stats().l2_hits)


def assert_copies(menu: list[list[str]], *copies: list[list[str]]) -> None:
    """Check that all are equal to *menu*, and none has an object in common with it, or with another."""
    assert all(copy == menu for copy in copies)
    objects = [each for copy in (menu, *copies) for each in (copy, copy[0])]
    assert len(objects) == len({id(each) for each in objects})


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("is_kept", [False, True])
async def test_isolation_is_the_callers_own(*, is_kept: bool, first: bool) -> None:
    """A caller with `isolate` gets a copy however the answer was kept or is loaded; one without may get the thing."""
    guard, gate, menu = Guard(), Gate(), [["soup"]]

    async def load() -> list[list[str]]:
        await gate.passage()
        return menu

    def ask(*, isolate: bool) -> "asyncio.Task[list[list[str]]]":
        return asyncio.create_task(guard.fetch(OP, load, ttl=5, returns=list[list[str]], isolate=isolate))

    launched = ask(isolate=first)
    await gate.arrivals(1)
    if is_kept:
        gate.open()
        await launched
    calls = [ask(isolate=True), ask(isolate=True), ask(isolate=False)]
    gate.open()
    *copies, thing = await asyncio.gather(*calls)

    assert_copies(menu, *copies)
    assert (thing is menu) is not first


async def test_isolation_is_the_functions_own() -> None:
    """The same holds for decorated functions of one op: a joined refresh, a later call, and `peek`."""
    guard, gate, menu = Guard(), Gate(), [["soup"]]

    @coalesce(key=lambda: OP, guard=guard, ttl=5)
    async def shared() -> list[list[str]]:
        await gate.passage()
        return menu

    @coalesce(key=lambda: OP, guard=guard, ttl=5, isolate=True)
    async def own() -> list[list[str]]:
        return await shared.bypass()

    calls = [asyncio.create_task(each()) for each in (shared, own, own)]
    await gate.arrivals(1)
    gate.open()
    thing, *copies = await asyncio.gather(*calls)
    entry, kept = own.peek(), shared.peek()
    assert entry is not None
    assert kept is not None

    assert_copies(menu, *copies, entry.value, await own())
    assert [menu] * 3 == [thing, kept.value, await shared()]
    assert {id(menu)} == {id(thing), id(kept.value), id(await shared())}


async def test_isolated_call_of_what_cannot_be_copied(guard: Guard) -> None:
    """A caller with `isolate` of what another kept as it is gets an error when there is no copy; the other does not."""

    async def load() -> Any:
        return Lock()

    kept = await guard.fetch(OP, load, ttl=5)
    with pytest.raises(CannotEncode):
        await guard.fetch(OP, load, ttl=5, returns=str, isolate=True)
    assert kept is await guard.fetch(OP, load, ttl=5)


async def test_unreadable_answer_of_the_store_is_a_miss(guard: Guard, load: Loader) -> None:
    """What the store holds of another type, as another release stored it, is loaded anew and replaced."""

    async def load_menu() -> list[str]:
        return ["soup"]

    await guard.fetch(OP, load, l2_ttl=10, returns=str)
    menus = [await guard.fetch(OP, load_menu, l2_ttl=10, returns=list[str]) for _ in range(2)]

    assert [["soup"], ["soup"]] == menus
    assert (0, 1, 2) == (guard.stats().l2_undecodable, guard.stats().l2_hits, guard.stats().l2_misses)


async def test_answer_that_cannot_be_stored(guard: Guard, store: FaultStore, caplog: pytest.LogCaptureFixture) -> None:
    """What its codec cannot encode is the answer all the same; memory keeps it, the store does not; a log says so."""
    answers: list[Any] = [object()]

    async def load_wrong() -> str:
        return answers[-1]

    assert [*answers * 2] == [await guard.fetch(OP, load_wrong, **BOTH) for _ in range(2)]
    assert [*answers * 2] == [await guard.fetch(f"{OP}{number}", load_wrong, l2_ttl=60, returns=str) for number in "89"]
    assert (3, 3) == (guard.stats().l2_unstorable, guard.stats().loads)
    assert {} == store.contents
    logged = [record.message for record in caplog.records]
    assert [True, True] == ["the loader returned a builtins.object, which is not stored" in line for line in logged]


async def test_lives_vary_by_the_jitter(guard: Guard, load: Loader, store: FaultStore, clock: ManualClock) -> None:
    """By default lives differ by up to a tenth, so that what was filled together expires apart."""
    for number in range(200):
        await guard.fetch(f"menu-{number}", load, ttl=100, l2_ttl=1000, returns=str)
    lives = {until - clock() for _, until in store.contents.values()}
    memory = guard._states.running().memory
    shorter = {entry.fresh_until - clock() for op in memory._entries if (entry := memory.get(op))}

    assert len(lives) > 190
    for spread, middle in ((lives, 1000), (shorter, 100)):
        assert 0.90 * middle <= min(spread) < 0.95 * middle
        assert 1.05 * middle < max(spread) <= 1.10 * middle


async def test_timeouts_are_the_operations_own(guard: Guard, pause: Pause) -> None:
    """`load_timeout` ends a load for everybody, `wait_timeout` one caller's waiting."""
    gate = Gate()

    with pytest.raises(LoadTimeout, match=r"load_timeout=0\.001 s"):
        await guard.fetch(OP, gate.passage, load_timeout=timedelta(milliseconds=1))
    with pytest.raises(WaitTimeout, match=r"wait_timeout=0\.001 s"):
        await guard.fetch(OP, gate.passage, wait_timeout=0.001)
    gate.open()
    await pause()

    assert 0 == guard.stats().in_flight


async def test_loader_that_asks_for_itself(guard: Guard) -> None:
    """Whether it would join its own flight or launch another: a loader that asks for its own op gets an error."""

    async def ask() -> Any:
        return await guard.fetch(OP, ask)

    for enabled in (True, False):
        guard.enabled = enabled
        with pytest.raises(RecursiveLoad):
            await guard.fetch(OP, ask)
    assert 2 == guard.stats().loads


async def test_loader_may_invalidate_its_own_op(guard: Guard) -> None:
    """A loader that finds that its op has to go may say so; what it returns is not stored."""

    async def load_and_drop() -> str:
        await guard.invalidate(OP)
        return "soup"

    assert "soup" == await guard.fetch(OP, load_and_drop, **BOTH)
    assert (1, 0) == (guard.stats().overtaken, len(guard._states.running().memory))


# Contexts

tenant = ContextVar("tenant", default="nobody")


async def read_tenant() -> str:
    """Load the tenant that the loader sees."""
    return tenant.get()


async def test_loader_sees_no_caller(guard: Guard) -> None:
    """By default a loader runs in a clean context."""
    tenant.set("me")

    assert "nobody" == await guard.fetch(OP, read_tenant)


async def test_loader_may_inherit_the_context(guard: Guard) -> None:
    """With `inherit_context=True` it sees the launching caller's, in a copy."""
    tenant.set("me")

    async def rename() -> str:
        seen = tenant.get()
        tenant.set("loader")
        return seen

    assert "me" == await guard.fetch(OP, rename, inherit_context=True)
    assert "me" == tenant.get()


async def test_recursion_is_seen_through_an_inherited_context(guard: Guard) -> None:
    """A loader with its caller's context is still told from its caller."""

    async def ask() -> Any:
        return await guard.fetch(OP, ask, inherit_context=True)

    with pytest.raises(RecursiveLoad):
        await guard.fetch(OP, ask, inherit_context=True)


# fetch


@pytest.mark.parametrize("op", ["", 7, None, b"menu"])
async def test_fetch_checks_the_op(op: Any, guard: Guard, load: Loader) -> None:
    """An op id is a string with something in it."""
    with pytest.raises(InvalidKey, match="an op id is a string"):
        await guard.fetch(op, load)


async def test_fetch_checks_the_load(guard: Guard, load: Loader) -> None:
    """A coroutine instead of a function is refused, with the form that is meant."""
    coroutine: Any = load()

    with pytest.raises(ConfigurationError, match="lambda: load"):
        await guard.fetch(OP, coroutine)
    coroutine.close()


@pytest.mark.parametrize("options", [{"ttl": 0}, {"ttl": [5]}, {"jitter": 2}, {"on_abandon": "ignore"}, {"tll": 5}])
async def test_fetch_checks_its_options(options: dict[str, Any], guard: Guard, load: Loader) -> None:
    """An option that breaks its rule is an error that names it, also if it has no hash."""
    (name,) = options

    with pytest.raises((ConfigurationError, TypeError), match=name):
        await guard.fetch(OP, load, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"l2_ttl": 10}, "codec="), *[({"name": name}, "^name=.*: give a string that is not empty$") for name in NAMES]],
)
async def test_fetch_needs_to_know_what_it_stores(
    options: dict[str, Any], message: str, guard: Guard, load: Loader
) -> None:
    """A value that is stored needs its type, or a codec; a name is a text, and not empty."""
    with pytest.raises(ConfigurationError, match=message):
        await guard.fetch(OP, load, **options)


async def test_fetch_needs_a_store_to_store(load: Loader) -> None:
    """`l2_ttl` is refused by a guard without a store."""
    with pytest.raises(ConfigurationError, match=r"l2_ttl= needs a guard with a store"):
        await Guard().fetch(OP, load, l2_ttl=10, returns=str)


@dataclass
class Shout:
    """A codec without a hash, as a dataclass is."""

    ending: str

    def encode(self, value: str) -> bytes:
        return (value + self.ending).encode()

    def decode(self, payload: bytes) -> str:
        return payload.decode().removesuffix(self.ending)


async def test_fetch_takes_codecs_without_a_hash(guard: Guard, load: Loader, store: FaultStore) -> None:
    """A codec that is a plain dataclass serves as well as any."""
    answers = [await guard.fetch(OP, load, l2_ttl=10, codec=Shout("!")) for _ in range(2)]

    assert ["soup 1", "soup 1"] == answers
    assert 1 == len(store.contents)


async def test_fetch_remembers_its_options(guard: Guard, load: Loader) -> None:
    """The same options are checked once; of very many sets a bounded number is remembered."""
    for ttl in range(1, 300):
        await guard.fetch(OP, load, ttl=ttl)
        await guard.fetch(OP, load, ttl=ttl)

    assert 299 - 256 == len(guard._fetches)
    assert {"fetch"} == set(guard.stats().operations)


@pytest.mark.parametrize(
    "differing",
    [
        pytest.param(lambda _: {"codec": Shout("!"), "isolate": True}, id="no hash"),
        pytest.param(lambda _: {"version": lambda _: 7}, id="another function each time"),
        pytest.param(lambda number: {"ttl": number + 1}, id="another number each time"),
    ],
)
async def test_limit_of_fetch_belongs_to_its_name(differing: Callable[[int], dict[str, Any]], pause: Pause) -> None:
    """However the other options differ, and whether they have a hash, calls under one name share one limit."""
    guard, gate = Guard(), Gate()
    running: dict[str, int] = {"menus": 0, "hours": 0}

    async def load(name: str) -> str:
        running[name] += 1
        await gate.passage()
        return name

    calls = [
        asyncio.ensure_future(
            guard.fetch(f"{name}-{number}", partial(load, name), name=name, max_loads=2, **differing(number))
        )
        for number in range(5)
        for name in ("menus", "hours")
    ]
    await pause()
    assert {"menus": 2, "hours": 2} == running
    gate.open()
    assert len(calls) == len(await asyncio.gather(*calls))
    assert {"menus": 5, "hours": 5} == {name: each.loads for name, each in guard.stats().operations.items()}


async def test_very_many_names_are_counted_together(load: Loader) -> None:
    """Names made of values fill no memory: after some thousands, the others share their counters."""
    guard = Guard()
    for number in range(4_100):
        guard._registry.counters_of(f"menu-{number}")
    await guard.fetch(OP, load, name="late")
    await guard.fetch("hours", load, name="later")

    assert 4_097 == len(guard.stats().operations)
    assert 2 == guard.stats().operations["others"].loads


# invalidate and refresh against loads in flight


async def test_invalidation_drops_both_tiers(guard: Guard, load: Loader, store: FaultStore) -> None:
    """After an invalidation the answer is loaded anew."""
    await guard.fetch(OP, load, **BOTH)
    await guard.invalidate(OP)
    left = {**store.contents}

    assert {} == left
    assert "soup 2" == await guard.fetch(OP, load, **BOTH)


async def test_invalidation_without_a_store(load: Loader) -> None:
    """A guard without a store forgets, and has nobody to ask."""
    guard = Guard()

    await guard.fetch(OP, load, ttl=60)
    await guard.invalidate(OP)

    assert "soup 2" == await guard.fetch(OP, load, ttl=60)


async def test_forgetting_in_this_process_alone(guard: Guard, load: Loader, store: FaultStore) -> None:
    """What no other process can have is forgotten without asking the store."""
    store.error = OSError("down")
    await guard.fetch(OP, load, ttl=60)

    guard._invalidator.forget(OP)

    assert "soup 2" == await guard.fetch(OP, load, ttl=60)


async def test_invalidation_works_before_anything_is_awaited(guard: Guard, load: Loader, store: FaultStore) -> None:
    """In this process the answer is gone when `invalidate` first waits, however long the store takes."""
    await guard.fetch(OP, load, ttl=60)
    store.gate = Gate()

    invalidation = asyncio.create_task(guard.invalidate(OP))
    await store.gate.arrivals(1)
    answer = await guard.fetch(OP, load, ttl=60)
    early = invalidation.done()
    store.gate.open()
    await invalidation

    assert ("soup 2", False) == (answer, early)


async def test_overtaken_load_answers_and_is_not_stored(guard: Guard, load: Loader, store: FaultStore) -> None:
    """A load that began before an invalidation answers those who waited; who comes later gets a later load's answer."""
    load.gate = Gate()

    early = asyncio.create_task(guard.fetch(OP, load, **BOTH))
    await load.gate.arrivals(1)
    await guard.invalidate(OP)
    late = asyncio.create_task(guard.fetch(OP, load, **BOTH))
    await load.gate.arrivals(2)
    load.gate.open()
    answers = [await early, await late, await guard.fetch(OP, load, **BOTH)]

    assert ["soup 1", "soup 2", "soup 2"] == answers
    assert (1, 2) == (guard.stats().overtaken, guard.stats().loads)
    assert [b"soup 2"] == [envelope[-6:] for envelope, _ in store.contents.values()]


async def test_overtaken_read_of_the_store_is_not_remembered(load: Loader, clock: ManualClock) -> None:
    """An answer that the store gave before an invalidation is not put into memory after it."""

    class Slow(FaultStore):
        async def read(self, key: str) -> Stored | None:
            found = await super().read(key)
            await gate.passage()
            return found

    gate, store = Gate(), Slow(clock)
    gate.open()
    async with Guard(lambda: store, clock=clock) as guard:
        await guard.fetch(OP, load, **BOTH)
        clock.advance(5)
        gate = Gate()
        early = asyncio.create_task(guard.fetch(OP, load, **BOTH))
        await gate.arrivals(1)
        await guard.invalidate(OP)
        gate.open()
        answers = [await early, await guard.fetch(OP, load, **BOTH)]

    assert ["soup 1", "soup 2"] == answers


async def test_invalidation_during_the_fill(guard: Guard, load: Loader, store: FaultStore) -> None:
    """An invalidation that comes while a fill is on its way to the store is carried out after it."""
    load.gate = Gate()
    early = asyncio.create_task(guard.fetch(OP, load, **BOTH))
    await load.gate.arrivals(1)
    fill = store.gate = Gate()
    load.gate.open()
    await fill.arrivals(1)
    store.gate = None

    invalidation = asyncio.create_task(guard.invalidate(OP))
    await asyncio.sleep(0)
    late = asyncio.create_task(guard.fetch(OP, load, **BOTH))
    await asyncio.sleep(0)
    fill.open()

    assert ("soup 1", None, "soup 2") == (await early, await invalidation, await late)
    assert [b"soup 2"] == [envelope[-6:] for envelope, _ in store.contents.values()]


async def test_two_invalidations_are_two(guard: Guard, load: Loader, store: FaultStore, clock: ManualClock) -> None:
    """An invalidation that arrives while the store carries out an earlier one is carried out after it."""
    first, second = Gate(), Gate()
    store.gate = first
    one = asyncio.create_task(guard.invalidate(OP))
    await first.arrivals(1)
    store.gate = second
    two = asyncio.create_task(guard.invalidate(OP))
    await asyncio.sleep(0)

    first.open()
    await one
    reader = asyncio.create_task(guard.fetch(OP, load, **BOTH))
    await second.arrivals(1)
    waiting = two.done(), reader.done()
    second.open()
    await two

    assert ((False, False), "soup 1") == (waiting, await reader)


async def test_unconfirmed_invalidation(guard: Guard, load: Loader, store: FaultStore, clock: ManualClock) -> None:
    """When the store does not confirm, its old answer is not read; once it is back, the pending delete comes first."""
    await guard.fetch(OP, load, **BOTH)
    store.error = OSError("down")
    with pytest.raises(InvalidationPending, match=rf"^{OP}: not confirmed by the store; holds in this process"):
        await guard.invalidate(OP)
    answers = [await guard.fetch(OP, load, l2_ttl=10, returns=str)]
    store.error = None
    clock.advance(3)
    answers.append(await guard.fetch(OP, load, l2_ttl=10, returns=str))

    assert ["soup 2", "soup 3"] == answers


async def test_invalidation_gets_the_breaker_going(
    guard: Guard, load: Loader, store: FaultStore, clock: ManualClock, pause: Pause
) -> None:
    """An op that awaits its invalidation probes a dead store like any other: with one op alone it comes back too."""
    store.error = OSError("down")
    for _ in range(3):
        await guard.invalidate(OP, wait=False)
        await pause()
    await guard.fetch(OP, load, **BOTH)
    store.error = None
    skipped = guard.stats().l2_skips
    clock.advance(6)
    await guard.fetch(OP, load, **BOTH)

    assert skipped
    assert 1 == len(store.contents)


async def test_refresh_replaces_what_is_cached(guard: Guard, load: Loader, clock: ManualClock) -> None:
    """A refresh loads, whatever is cached, and fills both tiers."""
    operation = plain(guard, ttl=5, l2_ttl=10)
    await guard._path.get(operation, OP, load)
    refreshed = await guard._path.refresh(operation, OP, load)
    answers = [await guard._path.get(operation, OP, load)]
    clock.advance(6)
    answers.append(await guard._path.get(operation, OP, load))

    assert ("soup 2", ["soup 2", "soup 2"]) == (refreshed, answers)


async def test_refreshes_share_a_load(guard: Guard, load: Loader, pause: Pause) -> None:
    """Refreshes that come before the load of the first has begun share it, as those do that queue for a slot."""
    operation = plain(guard, max_loads=1)
    load.gate = Gate()
    other = asyncio.create_task(guard._path.refresh(operation, "menu-8", load))
    await load.gate.arrivals(1)

    calls = [asyncio.create_task(guard._path.refresh(operation, OP, load)) for _ in range(3)]
    await pause()
    load.gate.open()

    assert ["soup 1", "soup 2", "soup 2", "soup 2"] == await asyncio.gather(other, *calls)
    assert (2, 2) == (guard.stats().executions, guard.stats().joins)


async def test_refresh_overtakes_a_load(guard: Guard, load: Loader) -> None:
    """A load that was up before a refresh answers its own waiters, and is not stored, even if it lands last."""
    operation = plain(guard, ttl=60, l2_ttl=60)
    first = load.gate = Gate()
    early = asyncio.create_task(guard._path.get(operation, OP, load))
    await first.arrivals(1)
    load.gate = None
    refreshed = await guard._path.refresh(operation, OP, load)
    first.open()

    assert ("soup 1", "soup 2") == (await early, refreshed)
    assert "soup 2" == await guard._path.get(operation, OP, load)


async def test_refresh_overtakes_a_load_of_the_same_tick(guard: Guard, load: Loader) -> None:
    """A load that was only just launched is overtaken by a refresh like any other."""
    operation = plain(guard, ttl=60)
    gates = [Gate(), Gate()]

    async def load_nth(number: int) -> str:
        await gates[number].passage()
        return f"soup {number}"

    call = asyncio.create_task(guard._path.get(operation, OP, partial(load_nth, 0)))
    refresh = asyncio.create_task(guard._path.refresh(operation, OP, partial(load_nth, 1)))
    for gate in reversed(gates):
        await gate.arrivals(1)
        gate.open()
        await (refresh if gate is gates[1] else call)

    assert "soup 1" == await guard._path.get(operation, OP, load)


async def test_refresh_that_fails(guard: Guard, load: Loader) -> None:
    """When a refresh fails, its caller gets the error, and what was cached stays."""
    operation = plain(guard, ttl=60)
    await guard._path.get(operation, OP, load)

    with pytest.raises(ZeroDivisionError):
        await guard._path.refresh(operation, OP, untyped(lambda: 1 / 0))

    assert "soup 1" == await guard._path.get(operation, OP, load)


async def test_invalidation_overtakes_a_refresh(guard: Guard, load: Loader) -> None:
    """A refresh that began before an invalidation answers its callers, and is not stored; another one loads anew."""
    operation = plain(guard, ttl=60, l2_ttl=60)
    load.gate = Gate()
    early = asyncio.create_task(guard._path.refresh(operation, OP, load))
    await load.gate.arrivals(1)
    await guard.invalidate(OP)
    late = asyncio.create_task(guard._path.refresh(operation, OP, load))
    await load.gate.arrivals(2)
    load.gate.open()

    assert ["soup 1", "soup 2"] == [await early, await late]
    assert "soup 1" != await guard._path.get(operation, OP, load)


async def test_caller_joins_a_refresh(guard: Guard, load: Loader) -> None:
    """A call that finds nothing in memory waits for the refresh that is up."""
    operation = plain(guard)
    load.gate = Gate()

    refresh = asyncio.create_task(guard._path.refresh(operation, OP, load))
    await load.gate.arrivals(1)
    call = asyncio.create_task(guard._path.get(operation, OP, load))
    await asyncio.sleep(0)
    load.gate.open()

    assert ["soup 1", "soup 1"] == [await refresh, await call]


async def test_loader_that_refreshes_itself(guard: Guard) -> None:
    """A loader that refreshes its own op is stopped like one that calls it."""
    operation = plain(guard)

    async def ask() -> Any:
        return await guard._path.refresh(operation, OP, ask)

    with pytest.raises(RecursiveLoad):
        await guard._path.refresh(operation, OP, ask)
    assert 1 == guard.stats().loads


ANSWERS: list[str] = []
GATES: list[Gate] = []


DEFINITION = """
@coalesce("menu", guard=guard, ttl=60)
async def load_menu():
    answer = ANSWERS[-1]
    await GATES[-1].passage()
    return answer
"""


def define(guard: Guard) -> Callable[[], Awaitable[str]]:
    """Return a function, as a cell of a notebook that is run again and again does."""
    names: dict[str, Any] = {"__name__": __name__, "coalesce": coalesce, "guard": guard}
    names.update(ANSWERS=ANSWERS, GATES=GATES)
    exec(compile(DEFINITION, __file__, "exec"), names)  # noqa: S102  # compiled anew
    load: Callable[[], Awaitable[str]] = names["load_menu"]
    return load


async def test_function_defined_anew() -> None:
    """When a function is defined anew, what the old one left in memory, or has under way, is not the new one's."""
    guard, calls = Guard(), []
    ANSWERS.clear()
    GATES.clear()

    for answer in ("older", "old", "new"):
        ANSWERS.append(answer)
        GATES.append(Gate())
        load_menu = define(guard)
        calls.append(asyncio.ensure_future(load_menu()))
        await GATES[-1].arrivals(1)
        if answer == "older":
            GATES[-1].open()
            await calls[0]
    for gate in reversed(GATES):
        gate.open()
        await asyncio.wait(calls[GATES.index(gate) :])
    answers = await asyncio.gather(*calls, load_menu())

    assert ["older", "old", "new", "new"] == answers


# Long ops


async def test_long_op_that_is_spelt_out(guard: Guard) -> None:
    """A long op is the same whether it is spelt out, made of a template, or the key of a call."""

    @coalesce("search-{query}", guard=guard, ttl=600)
    async def search(query: str) -> str:
        return query[:1]

    query = "q" * 50_000
    for spelt in ((f"search-{query}",), ("search-{query}",), (search.key(query),)):
        values: Any = {"query": query} if "{" in spelt[0] else {}
        await search(query)
        found = guard.peek(*spelt, **values)
        fetched = await guard.fetch(search.key(query), lambda: search.bypass("other"), ttl=60)
        await guard.invalidate(*spelt, **values)

        assert found is not None
        assert ("q", "q") == (found.value, fetched)
        assert search.peek(query) is None
    assert "o" == await guard.fetch(f"search-{query}", lambda: search.bypass("other"), ttl=60)
    assert "o" == await search(query)


async def test_long_texts_are_not_kept(guard: Guard) -> None:
    """Calls with long arguments leave nothing as long behind, in no map of memory, and hits keep none either."""

    @coalesce(guard=guard, ttl=60)
    async def search(query: str) -> int:
        return len(query)

    queries = [f"{number:05}" * 10_000 for number in range(20)]
    await asyncio.gather(*(search(query) for query in queries for _ in range(3)))
    tracemalloc.start()
    for _ in range(3):
        for number in range(20, 60):
            await search(f"{number:05}" * 10_000)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert 60 == guard.stats().loads
    assert kept < 200_000  # and not 2 MB, as the arguments have


# peek


async def test_peek_tells_and_changes_nothing(guard: Guard, load: Loader, clock: ManualClock) -> None:
    """`peek` returns the fresh entry of this loop's memory, or `None`, and counts as no call."""
    operation = plain(guard, ttl=5, jitter=0)
    before = guard.peek(OP)
    await guard._path.get(operation, OP, load)
    entry = guard.peek(OP)
    clock.advance(5)

    assert before is guard.peek(OP) is None
    assert entry is not None
    assert ("soup 1", clock()) == (entry.value, entry.fresh_until)
    assert 1 == guard.stats().calls


async def test_peek_decodes_isolated_answers(guard: Guard, load: Loader) -> None:
    """Of isolated answers `peek` returns a copy too."""
    operation = plain(guard, ttl=5, isolate=True)
    await guard._path.get(operation, OP, load)

    entry = guard.peek(OP)
    assert entry is not None
    assert "soup 1" == entry.value


# enabled and rollout


async def test_disabled_guard_reads_through(guard: Guard, load: Loader, clock: ManualClock) -> None:
    """A disabled guard shares no flights, each miss is for itself; both tiers serve as ever."""
    guard.enabled = False
    load.gate = Gate()
    calls = [asyncio.create_task(guard.fetch(OP, load, **BOTH)) for _ in range(3)]
    await load.gate.arrivals(3)
    load.gate.open()
    answers = await asyncio.gather(*calls)
    hits = [await guard.fetch(OP, load, **BOTH)]
    clock.advance(6)
    hits.append(await guard.fetch(OP, load, **BOTH))

    assert ["soup 1", "soup 2", "soup 3"] == answers
    assert (3, 0, 1, 1) == tuple(getattr(guard.stats(), name) for name in ("loads", "joins", "l1_hits", "l2_hits"))
    assert set(hits) <= set(answers)
    assert "disabled" in repr(guard)


async def test_enabled_can_be_switched_while_loads_are_up(guard: Guard, load: Loader) -> None:
    """Who waits when the guard is switched off is answered; who comes then loads alone, and disturbs nobody."""
    load.gate = Gate()
    shared = [asyncio.create_task(guard.fetch(OP, load)) for _ in range(2)]
    await load.gate.arrivals(1)
    guard.enabled = False
    alone = asyncio.create_task(guard.fetch(OP, load))
    await load.gate.arrivals(2)
    guard.enabled = True
    shared.append(asyncio.create_task(guard.fetch(OP, load)))
    await asyncio.sleep(0)
    load.gate.open()

    assert ["soup 1"] * 3 == await asyncio.gather(*shared)
    assert "soup 2" == await alone


async def test_disabled_refreshes_each_load(guard: Guard, load: Loader) -> None:
    """On a disabled guard refreshes share nothing either; the first does not stay."""
    operation = plain(guard, ttl=60, l2_ttl=60)
    guard.enabled = False
    load.gate = Gate()

    calls = [asyncio.create_task(guard._path.refresh(operation, OP, load)) for _ in range(2)]
    await load.gate.arrivals(2)
    load.gate.open()

    assert ["soup 1", "soup 2"] == await asyncio.gather(*calls)
    assert "soup 1" != await guard._path.get(operation, OP, load)


async def test_rollout_is_a_stable_fraction() -> None:
    """A quarter of the ops is shared, the same in every guard, and all of them again in a half."""
    ops = [f"menu-{number}" for number in range(4_000)]

    def shared(rollout: float) -> set[str]:
        guard = Guard(rollout=rollout)
        return {op for op in ops if guard._path._shares(op)}

    assert 900 < len(shared(0.25)) < 1_100
    assert shared(0.25) == shared(0.25) < shared(0.5) < shared(1) == set(ops)
    assert set() == shared(0)


async def test_rollout_decides_by_op(load: Loader) -> None:
    """In one guard some ops share their loads, and the others do not."""
    guard = Guard(rollout=0.5)
    load.gate = Gate()
    ops = [f"menu-{number}" for number in range(20)]

    calls = [asyncio.create_task(guard.fetch(op, load)) for op in ops for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    load.gate.open()
    await asyncio.gather(*calls)

    shared = sum(map(guard._path._shares, ops))
    assert 0 < shared < 20
    assert (shared, 40 - shared) == (guard.stats().joins, guard.stats().loads)


# Options


@pytest.mark.parametrize(
    "options",
    [
        {"namespace": ""},
        {"namespace": "a b"},
        {"namespace": "a:b"},
        {"namespace": "a{b"},
        {"namespace": 7},
        {"namespace": "x" * 101},
        {"maxsize": 0},
        {"max_bytes": 1.5},
        {"max_size": 0},
        {"max_size": "0.5B"},
        {"max_size": "256"},
        {"max_size": "much"},
        {"max_size": 1.5},
        {"max_size": True},
        {"rollout": 1.1},
        {"drain_timeout": -1},
        {"store": 7},
        {"store": "http://localhost"},
        {"deadline": 1},
        {"max_connections": 1},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    """An argument that breaks its rule is an error that names it, when the guard is made."""
    (name,) = options

    with pytest.raises(ConfigurationError, match=name):
        Guard(**options)


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (None, None),
        (7, 7),
        ("7B", 7),
        ("256MB", 256_000_000),
        (" 1.5 kb ", 1_500),
        ("2GiB", 2 << 30),
        ("1kib", 1 << 10),
        ("1TB", 10**12),
    ],
)
async def test_units_of_max_size(given: str | int | None, size: int | None) -> None:
    """Bytes come as a number or with a unit: powers of 1,000, and with an i of 1,024."""
    assert size == Guard(max_size=given)._states.running().memory.max_size


async def test_memory_shows_in_the_stats(clock: ManualClock) -> None:
    """The stats tell what memory has, what it gave up for other entries, and what it removed because it was over."""
    guard = Guard(maxsize=5, max_size="20kB", clock=clock)
    load = coalesce("menu-{number}", guard=guard, ttl=60, jitter=0, max_share=0.4)(returning_bytes)
    other = coalesce("hours-{number}", guard=guard, ttl=600)(returning_bytes)
    before = guard.stats()
    for number in range(3):
        await load(number)
        await other(number)
    clock.advance(60)
    menus = [load.peek(number) for number in range(3)]
    stats = guard.stats()

    assert (0, 0) == (before.entries, before.bytes)
    assert [None] * 3 == menus
    seen = {key: (each.entries, each.evictions, each.expirations) for key, each in stats.operations.items()}
    assert {"menu-{number}": (0, 1, 2), "hours-{number}": (3, 0, 0)} == seen
    assert (3, 1, 2) == (stats.entries, stats.evictions, stats.expirations)
    assert (stats.bytes or 0) > 3 * 1_000
    assert None is Guard().stats().bytes


async def returning_bytes(number: int) -> bytes:
    """Return a value of a kilobyte."""
    return bytes([number]) * 1_000


def test_options_of_a_store_by_url() -> None:
    """With a URL the store's options are the guard's; nothing is connected yet."""
    guard = Guard("redis://localhost:1", deadline=1, connect_timeout=timedelta(seconds=1), max_connections=1)

    assert guard.has_store
    assert "<Guard default with a store: <Stats 0 calls" in repr(guard)


def test_rollout_is_checked_when_it_is_set() -> None:
    """A later rollout is checked like the first."""
    guard = Guard()
    guard.rollout = 0.25

    with pytest.raises(ConfigurationError, match="rollout"):
        guard.rollout = 2
    assert 0.25 == guard.rollout


async def test_namespaces_keep_guards_apart(store: FaultStore, clock: ManualClock, load: Loader) -> None:
    """Two guards with one store and two namespaces share nothing."""
    answers = []
    for namespace in ("lunch", "dinner"):
        async with Guard(lambda: store, namespace=namespace, clock=clock) as guard:
            answers.append(await guard.fetch(OP, load, **BOTH))

    assert ["soup 1", "soup 2"] == answers


async def test_memory_is_bounded(load: Loader) -> None:
    """`maxsize` bounds the memory of each loop."""
    guard = Guard(maxsize=2)

    for number in range(5):
        await guard.fetch(f"menu-{number}", load, ttl=60)

    assert 2 == len(guard._states.running().memory)


# Lifecycle


async def test_closed_guard(store: FaultStore, clock: ManualClock, load: Loader) -> None:
    """A guard with a store says what to write when it is used before or after `async with`."""
    guard = Guard(lambda: store, clock=clock)

    for _ in range(2):
        for use in (guard.fetch(OP, load), guard.invalidate(OP), guard._path.refresh(plain(guard), OP, load)):
            with pytest.raises(GuardClosed, match="async with guard:"):
                await use
        with pytest.raises(GuardClosed):
            guard.peek(OP)
        async with guard:
            assert await guard.fetch(OP, load)


async def test_leaving_a_guard_that_was_not_entered(store: FaultStore, clock: ManualClock) -> None:
    """Leaving twice is the same mistake."""
    with pytest.raises(GuardClosed):
        await Guard(lambda: store, clock=clock).__aexit__(None, None, None)


async def test_guard_without_a_store_needs_no_entering(load: Loader) -> None:
    """A guard that has only memory works anywhere."""
    assert "soup 1" == await Guard().fetch(OP, load, ttl=60)


async def test_leaving_a_guard_without_a_store(load: Loader) -> None:
    """A guard that has only memory may be entered, to let its loads land on the way out; it forgets, and works on."""
    guard = Guard()
    load.gate = Gate()

    async with guard:
        call = asyncio.create_task(guard.fetch(OP, load, ttl=60))
        await load.gate.arrivals(1)
        asyncio.get_running_loop().call_soon(load.gate.open)

    assert call.done()
    assert ["soup 1", "soup 2"] == [await call, await guard.fetch(OP, load, ttl=60)]


async def test_entering_gives_the_guard(store: FaultStore, clock: ManualClock) -> None:
    """`async with Guard(…) as guard` names it."""
    async with Guard(lambda: store, clock=clock) as guard:
        assert isinstance(guard, Guard)


async def test_entering_twice(store: FaultStore, clock: ManualClock, load: Loader) -> None:
    """A guard stays open until everybody who entered it has left."""
    guard = Guard(lambda: store, clock=clock)

    async with guard:
        async with guard:
            pass
        assert await guard.fetch(OP, load)
    with pytest.raises(GuardClosed):
        await guard.fetch(OP, load)


async def test_entering_finds_mistakes(store: FaultStore, clock: ManualClock) -> None:
    """An annotation that was not defined at decoration has to be when the guard is entered."""
    guard = Guard(lambda: store, clock=clock)

    @coalesce("menu", guard=guard, l2_ttl=10)
    async def load_menu() -> "Missing":  # noqa: F821  # pyright: ignore[reportUndefinedVariable, reportUnknownParameterType]
        return None

    with pytest.raises(ConfigurationError, match="Missing"):
        await guard.__aenter__()
    assert load_menu.key() == "menu"
    assert guard._states.here() is None


async def test_dead_store_is_no_reason_not_to_start(guard: Guard, load: Loader, clock: ManualClock) -> None:
    """A guard whose store does not answer opens all the same, and asks it nothing for a while, nor fills it."""
    dead = FaultStore(clock)
    dead.error = OSError("down")

    async with Guard(lambda: dead, clock=clock) as lonely:
        answer = await lonely.fetch(OP, load, **BOTH)

    assert ("soup 1", 1) == (answer, lonely.stats().l2_skips)


async def test_leaving_waits_for_flights(store: FaultStore, clock: ManualClock, load: Loader) -> None:
    """Loads that are up when the guard is left land before its store is closed, those that they launch included."""
    guard = Guard(lambda: store, clock=clock)

    async def outer() -> str:
        await gate.passage()
        return await guard.fetch("inner", load, **BOTH)

    gate = Gate()
    async with guard:
        call = asyncio.create_task(guard.fetch(OP, outer, **BOTH))
        await gate.arrivals(1)
        asyncio.get_running_loop().call_soon(gate.open)

    assert "soup 1" == await call
    assert 2 == len(store.contents)


async def test_leaving_waits_no_longer_than_it_may(store: FaultStore, clock: ManualClock) -> None:
    """Loads that do not land in time are cancelled; their waiters are told."""
    guard, gate = Guard(lambda: store, clock=clock, drain_timeout=0), Gate()

    async with guard:
        call = asyncio.create_task(guard.fetch(OP, gate.passage))
        await gate.arrivals(1)

    with pytest.raises(LoadCancelled, match="shut-down"):
        await call


async def test_clean_up_of_a_cancelled_load_finds_the_guard_closed(store: FaultStore, clock: ManualClock) -> None:
    """What a load that is cancelled at shut-down still asks for is refused, and launches nothing."""
    guard, gate, refusals = Guard(lambda: store, clock=clock, drain_timeout=0), Gate(), []

    async def load_and_report() -> None:
        try:
            await gate.passage()
        finally:
            try:
                await guard.fetch("report", gate.passage)
            except GuardClosed:
                refusals.append("closed")

    async with guard:
        call = asyncio.create_task(guard.fetch(OP, load_and_report))
        await gate.arrivals(1)
    await asyncio.wait([call])

    assert isinstance(call.exception(), LoadCancelled)
    assert (["closed"], 0) == (refusals, guard.stats().in_flight)


async def test_entering_while_another_is_leaving(store: FaultStore, clock: ManualClock, load: Loader) -> None:
    """Who enters while the last one who left still waits for loads finds the guard open, and it stays so."""
    guard = Guard(lambda: store, clock=clock)
    load.gate = Gate()

    await guard.__aenter__()
    call = asyncio.create_task(guard.fetch(OP, load, **BOTH))
    await load.gate.arrivals(1)
    leaving = asyncio.create_task(guard.__aexit__(None, None, None))
    await asyncio.sleep(0)
    async with guard:
        load.gate.open()
        await leaving
        answers = [await call, await guard.fetch(OP, load, **BOTH)]

    assert ["soup 1", "soup 1"] == answers
    with pytest.raises(GuardClosed):
        await guard.fetch(OP, load)


async def test_leaving_while_another_is_leaving(store: FaultStore, clock: ManualClock, load: Loader) -> None:
    """Two who leave at once, the second entered meanwhile, close the store once, and not what was opened since."""
    closed = []

    class Store(FaultStore):
        async def aclose(self) -> None:
            closed.append("closed")

    guard = Guard(lambda: Store(clock), clock=clock)
    load.gate = Gate()
    await guard.__aenter__()
    call = asyncio.create_task(guard.fetch(OP, load))
    await load.gate.arrivals(1)
    first = asyncio.create_task(guard.__aexit__(None, None, None))
    await asyncio.sleep(0)
    await guard.__aenter__()
    second = asyncio.create_task(guard.__aexit__(None, None, None))
    await asyncio.sleep(0)
    load.gate.open()
    await asyncio.gather(first, second, call)

    assert ["closed"] == closed


# Event loops and threads


def test_each_loop_has_its_own_memory(make_loop: MakeLoop, load: Loader) -> None:
    """One guard serves a loop after the other, as in a test suite; nothing of the first loop is used in the second."""
    guard = Guard()

    answers = [make_loop().run_until_complete(guard.fetch(OP, load, ttl=60)) for _ in range(2)]

    assert ["soup 1", "soup 2"] == answers


def test_loops_load_at_the_same_time(make_loop: MakeLoop, load: Loader) -> None:
    """Two loops may load the same op, each for itself; neither waits for the other's future."""
    guard, gates = Guard(), []

    async def start() -> asyncio.Task[Any]:
        gate = Gate()
        gates.append(gate)
        call = asyncio.create_task(guard.fetch(OP, gate.passage))
        await gate.arrivals(1)
        return call

    loops = [make_loop(), make_loop()]
    calls = [loop.run_until_complete(start()) for loop in loops]
    for gate, loop, call in zip(gates, loops, calls, strict=True):
        loop.call_soon(gate.open)
        loop.run_until_complete(call)

    assert (2, 0) == (guard.stats().loads, guard.stats().joins)


def test_invalidation_reaches_the_other_loops(make_loop: MakeLoop, load: Loader) -> None:
    """What one loop invalidates is dropped by the others in their next iteration; their loads do not store it."""
    guard, here, there = Guard(), make_loop(), make_loop()

    there.run_until_complete(guard.fetch(OP, load, ttl=60))
    here.run_until_complete(guard.invalidate(OP))
    answers = [there.run_until_complete(_after_an_iteration(guard, load))]
    load.gate = Gate()
    call = there.create_task(guard.fetch("menu-8", load, ttl=60))
    there.run_until_complete(load.gate.arrivals(1))
    here.run_until_complete(guard.invalidate("menu-8"))
    load.gate.open()
    answers.append(there.run_until_complete(call))
    answers.append(there.run_until_complete(guard.fetch("menu-8", load, ttl=60)))

    assert ["soup 2", "soup 3", "soup 4"] == answers


async def _after_an_iteration(guard: Guard, load: Loader) -> str:
    await asyncio.sleep(0)
    return await guard.fetch(OP, load, ttl=60)


def test_refresh_reaches_the_other_loops(make_loop: MakeLoop, load: Loader) -> None:
    """What one loop refreshes the others load anew; what they had under way is not remembered."""
    guard, here, there = Guard(), make_loop(), make_loop()
    operation = plain(guard, ttl=60)

    there.run_until_complete(guard.fetch(OP, load, ttl=60))
    here.run_until_complete(guard._path.refresh(operation, OP, load))
    answers = [there.run_until_complete(_after_an_iteration(guard, load))]
    answers.append(here.run_until_complete(guard.fetch(OP, load, ttl=60)))

    assert ["soup 3", "soup 2"] == answers


def test_unconfirmed_invalidation_holds_in_every_loop(make_loop: MakeLoop, load: Loader, clock: ManualClock) -> None:
    """Until a loop's own delete is confirmed, it does not read the store either, whichever loop invalidated."""
    contents: dict[str, tuple[bytes, float]] = {}
    stores = []

    def make_store() -> FaultStore:
        store = FaultStore(clock)
        store.contents = contents
        stores.append(store)
        return store

    guard, here, there = Guard(make_store, clock=clock), make_loop(), make_loop()
    for loop in (here, there):
        loop.run_until_complete(guard.__aenter__())
    answers = [here.run_until_complete(guard.fetch(OP, load, l2_ttl=60, returns=str))]
    for store in stores:
        store.error = OSError("down")
    with pytest.raises(InvalidationPending):
        here.run_until_complete(guard.invalidate(OP))
    there.run_until_complete(asyncio.sleep(0))
    stores[1].error = None
    answers.append(there.run_until_complete(guard.fetch(OP, load, l2_ttl=60, returns=str)))
    for loop in (here, there):
        loop.run_until_complete(guard.__aexit__(None, None, None))

    assert ["soup 1", "soup 2"] == answers


def test_invalidation_of_a_loop_that_is_being_left(make_loop: MakeLoop, load: Loader, clock: ManualClock) -> None:
    """A loop that has left the guard by the time the invalidation reaches it asks its closed store nothing."""
    asked = []

    class Store(FaultStore):
        async def delete(self, key: str) -> None:
            asked.append(asyncio.get_running_loop())

    guard, here, there = Guard(lambda: Store(clock), clock=clock), make_loop(), make_loop()
    for loop in (here, there):
        loop.run_until_complete(guard.__aenter__())
    leaving = there.create_task(guard.__aexit__(None, None, None))
    here.run_until_complete(guard.invalidate(OP))
    there.run_until_complete(leaving)
    there.run_until_complete(asyncio.sleep(0))
    here.run_until_complete(guard.__aexit__(None, None, None))

    assert [here] == asked


def test_guard_is_closed_in_a_loop_that_did_not_enter_it(make_loop: MakeLoop, store: FaultStore, load: Loader) -> None:
    """A guard with a store is entered in each loop that uses it."""
    guard, here, there = Guard(lambda: store), make_loop(), make_loop()
    here.run_until_complete(guard.__aenter__())

    with pytest.raises(GuardClosed, match="not open in the running event loop"):
        there.run_until_complete(guard.fetch(OP, load))
    here.run_until_complete(guard.__aexit__(None, None, None))


def test_two_threads_with_a_loop_each() -> None:
    """Two threads call and invalidate at the same time: each call is answered with an answer of its own op."""
    guard, wrong = Guard(maxsize=50), []
    start = threading.Barrier(2, timeout=30)

    async def load_number(number: int) -> int:
        await asyncio.sleep(0)
        return number

    async def serve() -> None:
        start.wait()
        for turn in range(200):
            numbers = [(turn + step) % 70 for step in range(20)]
            calls = [guard.fetch(f"n-{number}", partial(load_number, number), ttl=60) for number in numbers]
            wrong.extend(
                [pair for pair in zip(numbers, await asyncio.gather(*calls), strict=True) if len(set(pair)) > 1]
            )
            await guard.invalidate(f"n-{turn % 70}")

    threads = [threading.Thread(target=asyncio.run, args=(serve(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [] == wrong
    assert 0 == guard.stats().in_flight


# Stats


async def test_stats_add_up(guard: Guard, load: Loader) -> None:
    """Calls are hits in memory, joins and executions; what each operation did stands under its name."""

    @coalesce("menu-{menu_id}", guard=guard, ttl=60)
    async def load_menu(menu_id: int) -> int:
        await gate.passage()
        return menu_id

    gate = Gate()
    calls = [asyncio.create_task(load_menu(7)) for _ in range(3)]
    await gate.arrivals(1)
    gate.open()
    await asyncio.gather(*calls, load_menu(8))
    await guard.fetch("soup", load)
    await load_menu(7)
    stats = guard.stats()

    assert (6, 1, 2, 3, 3) == (stats.calls, stats.l1_hits, stats.joins, stats.executions, stats.loads)
    assert {"menu-{menu_id}": 5, "fetch": 1} == {name: one.calls for name, one in stats.operations.items()}
    assert stats.calls == stats.l1_hits + stats.joins + stats.executions


def test_guard_is_not_pickled() -> None:
    """A guard is connections and flights, which no other process can have."""
    with pytest.raises(TypeError, match="a Guard cannot be pickled; make one in each process"):
        pickle.dumps(Guard())


async def test_default_clock_is_monotonic() -> None:
    """Without a clock of one's own the time is the monotonic one."""
    assert Guard()._clock is time.monotonic
