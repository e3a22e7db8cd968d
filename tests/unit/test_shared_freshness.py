"""Old values in a store that several processes share: one refresh for all, one pause for all."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import pytest
from inside import backplane_of
from leasing import LeasingDouble, Server
from waiting import eventually

from stampede_guard import Answer, Guard, Previous, RecentFailure, coalesce, previous
from stampede_guard.testing import FaultStore, Gate, ManualClock

pytestmark = pytest.mark.usefixtures("no_echoes")


class Row:
    """What processes load: its loads are numbered, stop at a gate if there is one, and fail while an error is set."""

    def __init__(self) -> None:
        self.loads = 0
        self.error: Exception | None = None
        self.gate: Gate | None = None
        self.told: list[Previous | None] = []

    async def load(self) -> str:
        self.loads += 1
        number = self.loads
        self.told.append(previous())
        await asyncio.sleep(0)  # an eager load that never suspends is over before an old value could be the answer
        if self.gate is not None:
            await self.gate.passage()
        if self.error is not None:
            raise self.error
        return f"soup {number}"


class Process:
    """A guard with its own way to the server, and a function that reads the row through it."""

    def __init__(self, server: Server, row: Row, options: dict[str, Any]) -> None:
        self.store = LeasingDouble(server)
        self.guard = Guard(lambda: self.store, clock=server.clock)

        given: dict[str, Any] = {"l2_ttl": 10, "jitter": 0, **options}

        @coalesce("menu-{menu_id}", guard=self.guard, **given)
        async def load(menu_id: int) -> str:
            return await row.load()

        self.load = load

    @property
    def is_idle(self) -> bool:
        """Whether no flight is up."""
        return not self.guard.stats().in_flight


class Two(NamedTuple):
    """Two processes, and the row that both read."""

    a: Process
    b: Process
    row: Row

    async def rest(self) -> None:
        """Wait until no flight is up."""
        await eventually(lambda: self.a.is_idle and self.b.is_idle)


Start = Callable[..., Awaitable[Two]]


@pytest.fixture
async def start(server: Server) -> AsyncIterator[Start]:
    """Return what starts two processes whose functions have the options."""
    async with AsyncExitStack() as stack:

        async def begin(**options: Any) -> Two:
            row = Row()
            a, b = (Process(server, row, options) for _ in range(2))
            for each in (a, b):
                await stack.enter_async_context(each.guard)
            return Two(a, b, row)

        yield begin


@pytest.mark.parametrize("options", [{}, {"ttl": 2}], ids=["L2 alone", "both tiers"])
async def test_one_refresh_for_all(start: Start, clock: ManualClock, options: Any) -> None:
    """Past its life all processes answer with the old value at once, and one of them loads."""
    a, b, row = two = await start(stale=60, **options)
    await a.load(7)
    assert "soup 1" == await b.load(7)
    clock.advance(11)
    row.gate = Gate()

    for _ in range(3):
        assert ["soup 1", "soup 1"] == [await a.load(7), await b.load(7)]
    await row.gate.arrivals(1)
    row.gate.open()
    await two.rest()

    assert ["soup 2", "soup 2"] == [await a.load(7), await b.load(7)]
    assert 2 == row.loads


async def test_stale_window_of_a_store_ends(start: Start, clock: ManualClock) -> None:
    """Past the window callers wait for the load."""
    a, b, row = await start(stale=60)
    await a.load(7)
    clock.advance(70)

    assert "soup 2" == await b.load(7)
    assert 2 == row.loads


async def test_age_of_a_stored_value(start: Start, clock: ManualClock) -> None:
    """The age and the freshness of an answer are those of the load, whichever process it was."""
    a, b, _ = await start(ttl=100, stale=60)
    await a.load(7)
    clock.advance(4)
    answer = await b.load.answer(7)
    assert ("store", 4, 6, False) == (answer.source, answer.age, answer.fresh_for, answer.is_stale)


async def test_age_of_an_old_stored_value(start: Start, clock: ManualClock) -> None:
    """So are those of an old one."""
    a, b, row = two = await start(stale=60)
    await a.load(7)
    clock.advance(14)
    row.gate = Gate()

    answer: Answer[str] = await b.load.answer(7)

    assert ("soup 1", 14, 0, True) == (answer.value, answer.age, answer.fresh_for, answer.is_stale)
    row.gate.open()
    await two.rest()


@pytest.mark.parametrize("options", [{}, {"ttl": 2}], ids=["L2 alone", "both tiers"])
async def test_one_pause_for_all(start: Start, clock: ManualClock, options: Any) -> None:
    """Three minutes without a database cost few loads in the whole cluster, and no call fails."""
    a, b, row = await start(stale_if_error=3600, **options)
    await a.load(7)
    row.error = ConnectionRefusedError()
    clock.advance(11)

    for second in range(180):
        answers = await asyncio.gather(*[each.load(7) for each in (a, b, b, a)])
        assert ["soup 1"] * 4 == answers, second
        clock.advance(1)
    assert 7 <= row.loads - 1 <= 12

    row.error = None
    clock.advance(33)
    assert {"soup 1", f"soup {row.loads + 1}"} >= {await a.load(7), await b.load(7)}


async def test_recent_failure_of_another_process(start: Start, clock: ManualClock) -> None:
    """Without an old value the other process's callers get an error that names the type, and when to try again."""
    a, b, row = await start(error_backoff=30)
    row.error = ConnectionRefusedError()
    with pytest.raises(ConnectionRefusedError):
        await a.load(7)

    for _ in range(2):
        with pytest.raises(RecentFailure, match="ConnectionRefusedError") as got:
            await b.load(7)
        assert 0 < got.value.retry_after <= 1.1
        assert got.value.__cause__ is None
    assert 1 == row.loads
    row.error = None
    clock.advance(1.2)
    assert ["soup 2"] * 2 == [await b.load(7), await a.load(7)]


async def test_expire(start: Start, clock: ManualClock) -> None:
    """An expired value is old in all processes, at once and in the store, and one of them replaces it."""
    a, b, row = two = await start(ttl=10, stale=60)
    assert ["soup 1", "soup 1"] == [await a.load(7), await b.load(7)]
    row.gate = Gate()

    await a.load.expire(7)
    await eventually(lambda: b.load.peek(7) is None)

    assert ["soup 1", "soup 1"] == [await a.load(7), await b.load(7)]
    assert (await b.load.answer(7)).is_stale
    row.gate.open()
    await two.rest()
    assert ["soup 2", "soup 2"] == [await a.load(7), await b.load(7)]
    assert 2 == row.loads


async def test_expire_during_a_load(start: Start) -> None:
    """A load that began before is not stored."""
    a, b, row = await start(stale=60)
    row.gate = Gate()
    waiting = asyncio.ensure_future(a.load(7))
    await row.gate.arrivals(1)

    await b.guard.expire("menu-{menu_id}", menu_id=7)
    row.gate.open()

    assert "soup 1" == await waiting
    assert "soup 2" == await b.load(7)


async def test_invalidation_removes_the_old_value(start: Start, clock: ManualClock) -> None:
    """After an invalidation no process answers with the old value, even if the load fails."""
    a, b, row = await start(ttl=10, stale_if_error=60)
    assert ["soup 1", "soup 1"] == [await a.load(7), await b.load(7)]
    clock.advance(11)
    await a.load.invalidate(7)
    await eventually(lambda: not len(backplane_of(b.guard)._wake_ups))
    row.error = OSError()

    for each in (a, b):
        with pytest.raises((OSError, RecentFailure)):
            await each.load(7)


async def test_value_that_is_not_kept_takes_the_old_ones_place(start: Start, clock: ManualClock) -> None:
    """A new value that is not to be stored drops the old one from the store."""
    a, b, _ = two = await start(l2_ttl=lambda dish: None if dish == "soup 2" else 10, stale=60)
    await a.load(7)
    clock.advance(11)
    assert "soup 1" == await a.load(7)
    await two.rest()

    assert "soup 3" == await b.load(7)


# L1 keeps its trust in the bus for the shorter life.
@pytest.mark.parametrize("options", [{"l2_ttl": 10}, {"ttl": 2, "l2_ttl": 2}], ids=["L2 alone", "both tiers"])
async def test_early_refresh_by_one_process(start: Start, clock: ManualClock, options: Any) -> None:
    """Before its life is over one process refreshes a value, and the others answer with it meanwhile."""
    a, b, row = two = await start(early=1.0, **options)
    for each in (a, b):
        each.load._operation.note_load(5.0)
    await a.load(7)
    clock.advance(0.95 * options["l2_ttl"])
    row.gate = Gate()

    assert ["soup 1", "soup 1"] == [await a.load(7), await b.load(7)]
    await row.gate.arrivals(1)
    row.gate.open()
    await two.rest()

    assert ["soup 2", "soup 2"] == [await b.load(7), await a.load(7)]


async def test_previous_in_another_process(start: Start, clock: ManualClock) -> None:
    """A loader is told of the old value that the store has; of a refresh, of the fresh one too."""
    a, b, row = two = await start(stale=60, version=len)
    await a.load(7)
    clock.advance(3)
    await b.load.refresh(7)
    clock.advance(12)
    await a.load(7)
    await two.rest()

    assert [None, ("soup 1", 3, 6), ("soup 2", 12, 6)] == row.told


@pytest.mark.parametrize("options", [{}, {"ttl": 5}], ids=["L2 alone", "both tiers"])
async def test_pauses_with_a_plain_store(clock: ManualClock, options: Any) -> None:
    """A plain store has no markers: pauses are the process's own, as long as others, and its old values answer."""
    row, store = Row(), FaultStore(clock)
    async with Guard(lambda: store, clock=clock) as guard:
        given: dict[str, Any] = {"l2_ttl": 10, "jitter": 0, "stale_if_error": 3600, **options}

        @coalesce("menu-{menu_id}", guard=guard, **given)
        async def load(menu_id: int) -> str:
            return await row.load()

        await load(7)
        row.error = ConnectionRefusedError()
        clock.advance(11)
        for _ in range(180):
            assert ["soup 1"] * 2 == [await load(7), await load(7)]
            clock.advance(1)
        assert 7 <= row.loads - 1 <= 12


async def test_pause_without_memory(start: Start, clock: ManualClock) -> None:
    """During a pause the old value is the answer, though it is in the store alone."""
    a, b, row = await start(stale_if_error=3600)
    await a.load(7)
    row.error = ConnectionRefusedError()
    clock.advance(11)

    assert ["soup 1"] * 6 == [await each.load(7) for each in (a, a, a, b, b, b)]
    assert 2 == row.loads


async def test_pause_while_the_store_is_down(start: Start, clock: ManualClock) -> None:
    """A process keeps to the pause that it knows of while it cannot ask whether that is over."""
    a, _, row = await start(error_backoff=30)
    row.error = ConnectionRefusedError()
    while row.loads < 3:
        with pytest.raises((ConnectionRefusedError, RecentFailure)):
            await a.load(7)
        clock.advance(1.2)
    a.store.error = ConnectionError("gone")

    for _ in range(3):
        with pytest.raises(RecentFailure):
            await a.load(7)
        clock.advance(0.9)
    assert 3 == row.loads


async def test_early_margin_is_shorter_than_a_life(start: Start, clock: ManualClock) -> None:
    """However long loads take, what was just stored is not due for a refresh."""
    a, b, row = await start(early=1.0)
    for each in (a, b):
        each.load._operation.note_load(1_000.0)
    for _ in range(3):
        assert ["soup 1"] * 2 == [await a.load(7), await b.load(7)]
        clock.advance(1)
    assert 1 == row.loads


async def test_stale_answers_while_a_refresh_reads_the_store(start: Start, clock: ManualClock) -> None:
    """A call gets the old value of the store while a refresh is up, which gets the new one."""
    a, _, row = await start(stale=60)
    await a.load(7)
    clock.advance(11)
    row.gate = Gate()
    refresh = asyncio.ensure_future(a.load.refresh(7))
    await row.gate.arrivals(1)

    assert "soup 1" == await asyncio.wait_for(a.load(7), 5)
    row.gate.open()
    assert "soup 2" == await refresh
