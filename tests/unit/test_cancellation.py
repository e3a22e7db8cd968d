"""Every way to leave: a caller that is cancelled, a caller that gives up, everybody at once."""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from inside import untyped

from stampede_guard import Guard, LoadCancelled, Scoreboard, WaitTimeout
from stampede_guard._flights.waiting import wait_one
from stampede_guard._operations.policy import Policy
from stampede_guard.testing import FaultStore, Gate, ManualClock

Pause = Callable[[], Awaitable[None]]
MakeLoop = Callable[[], asyncio.AbstractEventLoop]

OP = "menu-7"


async def never() -> None:
    """Load for ever."""
    await asyncio.get_running_loop().create_future()


class Loader:
    """A load that waits for a gate, and notes how it ended."""

    def __init__(self, answer: str = "soup") -> None:
        self.gate = Gate()
        self.ends: list[str] = []
        self._answer = answer

    async def __call__(self) -> str:
        try:
            await self.gate.passage()
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise
        self.ends.append("finished")
        return self._answer


def crowd(board: Scoreboard, load: Callable[[], Awaitable[Any]], size: int = 3) -> list[asyncio.Task[Any]]:
    """Return as many calls of one op."""
    return [asyncio.create_task(board.debounce(OP, load)) for _ in range(size)]


# One leaves


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("on_abandon", ["finish", "cancel"])
async def test_one_leaves(who: int, on_abandon: Any) -> None:
    """Whoever is cancelled, the caller that launched the load included, the others get their answer."""
    board, load = Scoreboard(on_abandon=on_abandon), Loader()

    calls = crowd(board, load)
    await load.gate.arrivals(1)
    calls[who].cancel()
    load.gate.open()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)

    assert asyncio.CancelledError is type(outcomes.pop(who))
    assert ["soup", "soup"] == outcomes
    assert ["finished"] == load.ends


async def test_launcher_leaves_before_its_load_began() -> None:
    """A load whose caller is cancelled in the tick of the call runs all the same, for who joined."""
    board, load = Scoreboard(), Loader()

    calls = crowd(board, load)
    await asyncio.sleep(0)
    calls[0].cancel()
    load.gate.open()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)

    assert ["soup", "soup"] == outcomes[1:]
    assert ["finished"] == load.ends


async def test_call_cancelled_before_it_began(task_factory: str) -> None:
    """A call that never ran launches nothing; an eager one has begun before it can be cancelled."""
    board = Scoreboard()

    call = asyncio.create_task(board.debounce(OP, never))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert (task_factory == "eager") == board.stats().executions
    await board.cancel_all()


async def test_cancellation_that_was_asked_for_before_the_wait() -> None:
    """A caller with a cancellation pending gets it at the wait, and the load goes on without it."""
    board, load = Scoreboard(), Loader()

    async def call() -> str:
        untyped(asyncio.current_task()).cancel()
        return await board.debounce(OP, load)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(call())
    other = asyncio.create_task(board.debounce(OP, load))
    await load.gate.arrivals(1)
    load.gate.open()

    assert "soup" == await other
    assert 1 == load.gate.arrived


async def test_a_callers_timeout_is_its_own() -> None:
    """`asyncio.timeout` around a call ends that call alone, as a `TimeoutError`."""
    board, load = Scoreboard(), Loader()

    other = asyncio.create_task(board.debounce(OP, load))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await board.debounce(OP, load)
    load.gate.open()

    assert "soup" == await other


async def test_a_task_group_that_fails_takes_its_own_callers_only() -> None:
    """When a group is cancelled because a sibling failed, callers outside it are not disturbed."""
    board, load = Scoreboard(), Loader()

    async def fail() -> None:
        await load.gate.arrivals(1)
        raise ValueError

    async def fail_together() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(board.debounce(OP, load))
            group.create_task(fail())

    other = asyncio.create_task(board.debounce(OP, load))
    with pytest.raises(ExceptionGroup):
        await fail_together()
    load.gate.open()

    assert "soup" == await other


# In the same tick


@pytest.mark.parametrize("ticks", range(8))
async def test_leaving_while_the_load_lands(ticks: int, pause: Pause) -> None:
    """However few ticks after the load's end one is cancelled, that one is cancelled or answered, the rest answered."""
    board, load = Scoreboard(), Loader()

    calls = crowd(board, load)
    await load.gate.arrivals(1)
    await pause()
    load.gate.open()
    for _ in range(ticks):
        await asyncio.sleep(0)
    was_answered = calls[1].done()
    calls[1].cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)

    assert ["soup", "soup"] == [outcomes[0], outcomes[2]]
    assert was_answered == (outcomes[1] == "soup")
    assert (set(), {}, 0) == (board.up, board.flights, board.stats().in_flight)


@pytest.mark.parametrize("ticks", range(8))
async def test_leaving_while_the_load_fails(ticks: int, pause: Pause) -> None:
    """The same with a load that fails: whoever stays gets the error, and nobody an answer."""
    board, gate = Scoreboard(), Gate()

    async def fail() -> None:
        await gate.passage()
        raise ValueError("no menu")

    calls = crowd(board, fail)
    await gate.arrivals(1)
    await pause()
    gate.open()
    for _ in range(ticks):
        await asyncio.sleep(0)
    was_answered = calls[2].done()
    calls[2].cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)

    assert ["ValueError('no menu')"] * 2 == [repr(outcome) for outcome in outcomes[:2]]
    assert (ValueError if was_answered else asyncio.CancelledError) is type(outcomes[2])


async def test_giving_up_while_the_load_lands(pause: Pause) -> None:
    """A waiter whose time ran out just before the load landed gave up; one whose time had not is answered."""
    board, load = Scoreboard(), Loader()
    flight = board.launch(OP, lambda _: load(), board._counters, "finish")

    hasty, patient = (asyncio.create_task(wait_one(flight, timeout)) for timeout in (0.000_001, 60))
    await pause()
    while not any(waiter.done() for waiter in flight._waiters) and len(flight._waiters) == 2:
        await asyncio.sleep(0)
    load.gate.open()

    assert "soup" == await patient
    with pytest.raises(WaitTimeout):
        await hasty


async def test_time_runs_out_in_the_tick_in_which_the_load_lands(monkeypatch: pytest.MonkeyPatch, pause: Pause) -> None:
    """A waiter that was told of the landing has its answer, though its time was up before it could look."""
    board, loop, clock = Scoreboard(wait_timeout=5), asyncio.get_running_loop(), ManualClock()
    monkeypatch.setattr(loop, "time", clock)
    landing = loop.create_future()

    call = asyncio.create_task(board.debounce(OP, lambda: landing))
    await pause()
    landing.set_result("soup")  # the load goes on in the next iteration, before the timers that are due then
    clock.advance(6)

    assert "soup" == await call


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_newcomer_as_the_last_one_leaves(is_first: bool, pause: Pause) -> None:
    """With "cancel": who joins before the last one is gone keeps the load; who comes after gets one of their own."""
    board, load = Scoreboard(on_abandon="cancel"), Loader()

    (leaver,) = crowd(board, load, 1)
    await load.gate.arrivals(1)
    await pause()
    if is_first:
        newcomer = asyncio.create_task(board.debounce(OP, load))
        leaver.cancel()
    else:
        leaver.cancel()
        newcomer = asyncio.create_task(board.debounce(OP, load))
    await pause()
    load.gate.open()

    assert "soup" == await newcomer
    assert board.stats().executions == load.gate.arrived == 1 + load.ends.count("cancelled")
    assert leaver.cancelled()


async def test_a_newcomer_never_joins_a_dying_load() -> None:
    """With "cancel": the flight is off the board in the very step in which its load is cancelled."""
    board, stubborn, load = Scoreboard(on_abandon="cancel"), Gate(), Loader()

    async def linger() -> str:
        try:
            await never()
        except asyncio.CancelledError:
            await stubborn.passage()
        return "dying"

    (leaver,) = crowd(board, linger, 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaver.cancel()
    await stubborn.arrivals(1)
    newcomer = asyncio.create_task(board.debounce(OP, load))
    await load.gate.arrivals(1)
    stubborn.open()
    load.gate.open()

    assert "soup" == await newcomer


# Everybody leaves


@pytest.mark.parametrize(("on_abandon", "ends"), [("finish", []), ("cancel", ["cancelled"])])
async def test_everybody_leaves(on_abandon: Any, ends: list[str], pause: Pause) -> None:
    """When nobody waits any more, the load goes on by default, and is cancelled if asked for."""
    board, load = Scoreboard(on_abandon=on_abandon), Loader()

    calls = crowd(board, load)
    await load.gate.arrivals(1)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    await pause()
    left = [*load.ends]
    load.gate.open()
    await pause()

    assert ends == left
    assert ends or ["finished"] == load.ends
    assert (1, 0, set()) == (board.stats().abandoned, board.stats().in_flight, board.up)


async def test_everybody_leaves_and_somebody_comes() -> None:
    """By default a newcomer joins the load that everybody had left."""
    board, load = Scoreboard(), Loader()

    calls = crowd(board, load)
    await load.gate.arrivals(1)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    newcomer = asyncio.create_task(board.debounce(OP, load))
    await asyncio.sleep(0)
    load.gate.open()

    assert "soup" == await newcomer
    assert (1, 0) == (load.gate.arrived, board.stats().abandoned)


async def test_abandoned_load_is_stored(pause: Pause) -> None:
    """A load that everybody left is finished, and the next caller finds its answer in memory."""
    guard, load = Guard(), Loader()

    call = asyncio.create_task(guard.fetch(OP, load, ttl=60))
    await load.gate.arrivals(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    load.gate.open()
    await pause()

    assert "soup" == await guard.fetch(OP, load, ttl=60)
    assert (1, 1) == (guard.stats().loads, guard.stats().l1_hits)


async def test_abandoned_load_that_fails_is_silent(pause: Pause) -> None:
    """An error that nobody waits for is counted, and asyncio has nothing to complain of."""
    board, gate = Scoreboard(), Gate()

    async def fail() -> None:
        await gate.passage()
        raise ValueError

    (call,) = crowd(board, fail, 1)
    await gate.arrivals(1)
    call.cancel()
    await asyncio.wait([call])
    gate.open()
    await pause()
    gc.collect()  # an exception that was never retrieved would be complained of now

    assert 1 == board.stats().failures


async def test_the_last_one_gives_up() -> None:
    """A waiter whose time runs out has left too: with "cancel" the load ends with it."""
    board, load = Scoreboard(wait_timeout=0.001, on_abandon="cancel"), Loader()

    with pytest.raises(WaitTimeout, match=r" s$"):
        await board.debounce(OP, load)
    await board.drain(60)

    assert ["cancelled"] == load.ends


async def test_a_refused_circle_abandons_nothing() -> None:
    """A call that is refused because it would wait for itself was no waiter: with "cancel" it cancels nothing."""
    board, load = Scoreboard(on_abandon="cancel"), Loader()

    async def outer() -> object:
        inner = await asyncio.gather(board.debounce(OP, outer), return_exceptions=True)
        return type(inner[0]).__name__, await load()

    (call,) = crowd(board, outer, 1)
    await load.gate.arrivals(1)
    load.gate.open()

    assert ("RecursiveLoad", "soup") == await call


async def test_abandoned_while_it_fills_the_store(pause: Pause) -> None:
    """With "cancel" a load may be cancelled in the middle of its fill: nothing is stored in memory, the op is free."""
    clock = ManualClock()
    store = FaultStore(clock)
    guard, load = Guard(lambda: store, clock=clock), Loader()
    options: dict[str, Any] = {"ttl": 60, "l2_ttl": 60, "on_abandon": "cancel", "returns": str}

    async with guard:
        call = asyncio.create_task(guard.fetch(OP, load, **options))
        await load.gate.arrivals(1)
        store.gate = Gate()
        load.gate.open()
        await store.gate.arrivals(1)
        call.cancel()
        await asyncio.wait([call])
        store.gate = None
        await pause()
        stats, stored = guard.stats(), {**store.contents}
        answer = await guard.fetch(OP, load, **options)

    assert (0, 1, {}) == (stats.in_flight, stats.abandoned, stored)
    assert ("soup", 2) == (answer, load.gate.arrived)


# The load is cancelled, the caller is not


async def test_load_that_cancels_itself() -> None:
    """A load that raises `CancelledError` gives its waiters an ordinary error: none of them was cancelled."""
    board, gate = Scoreboard(), Gate()

    async def load() -> None:
        await gate.passage()
        raise asyncio.CancelledError

    async def call() -> int:
        with pytest.raises(LoadCancelled, match="menu-7: the load was cancelled"):
            await board.debounce(OP, load)
        return int(untyped(asyncio.current_task()).cancelling())

    calls = [asyncio.create_task(call()) for _ in range(3)]
    await gate.arrivals(1)
    gate.open()

    assert [0, 0, 0] == await asyncio.gather(*calls)


async def test_load_cancelled_from_outside() -> None:
    """Whoever finds the load's task and cancels it ends the load, and no caller."""
    board, load = Scoreboard(), Loader()

    calls = crowd(board, load)
    await load.gate.arrivals(1)
    (loader,) = (task for task in asyncio.all_tasks() if task.get_name() == "load menu-7")
    loader.cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)

    assert [LoadCancelled] * 3 == [type(outcome) for outcome in outcomes]


async def test_load_that_swallows_its_cancellation(pause: Pause) -> None:
    """What an abandoned load answers against its cancellation is not stored, nor counted as overtaken."""
    guard, gate = Guard(), Gate()

    async def stubborn() -> str:
        try:
            await gate.passage()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return "late"

    call = asyncio.create_task(guard.fetch(OP, stubborn, ttl=60, on_abandon="cancel"))
    await gate.arrivals(1)
    call.cancel()
    await asyncio.wait([call])
    await pause()
    gate.open()

    assert (0, 0) == (guard.stats().overtaken, guard.stats().in_flight)
    assert "late" == await guard.fetch(OP, stubborn, ttl=60)
    assert 2 == guard.stats().loads


# Beside the path


async def test_cancelled_refresh(pause: Pause) -> None:
    """A refresh goes on when the caller who asked for it has left."""
    clock = ManualClock()
    guard, load = Guard(clock=clock), Loader()
    operation = guard._add_operation("menus", Policy(ttl=60))

    call = asyncio.create_task(guard._path.refresh(operation, OP, load))
    await load.gate.arrivals(1)
    call.cancel()
    await asyncio.wait([call])
    load.gate.open()
    await pause()

    assert "soup" == await guard._path.get(operation, OP, load)
    assert 1 == guard.stats().loads


async def test_cancelled_invalidation() -> None:
    """An invalidation goes on when the caller who asked for it has left."""
    clock = ManualClock()
    store = FaultStore(clock)
    guard, load = Guard(lambda: store, clock=clock), Loader()
    load.gate.open()

    async with guard:
        await guard.fetch(OP, load, l2_ttl=60, returns=str)
        was_stored = len(store.contents)
        store.gate = Gate()
        call = asyncio.create_task(guard.invalidate(OP))
        await store.gate.arrivals(1)
        call.cancel()
        await asyncio.wait([call])
        store.gate.open()

    assert (1, {}) == (was_stored, store.contents)


async def test_cancelled_exit_leaves_no_load_behind() -> None:
    """A guard whose exit is cancelled cancels its loads, and closes its store after them."""
    clock, closed = ManualClock(), []

    class Store(FaultStore):
        async def aclose(self) -> None:
            closed.append([*load.ends])

    guard, load = Guard(lambda: Store(clock), clock=clock, drain_timeout=60), Loader()

    async def serve() -> None:
        async with guard:
            call.append(asyncio.create_task(guard.fetch(OP, load)))
            await load.gate.arrivals(1)

    call: list[asyncio.Task[str]] = []
    service = asyncio.create_task(serve())
    await load.gate.arrivals(1)
    await asyncio.sleep(0)
    service.cancel()
    await asyncio.wait([service])

    assert service.cancelled()
    assert [["cancelled"]] == closed
    with pytest.raises(LoadCancelled):
        await call[0]


async def test_cancelled_exit_closes_nothing_for_others() -> None:
    """Who is cancelled while leaving, when somebody else has entered meanwhile, leaves the guard open to them."""
    clock = ManualClock()
    guard, load = Guard(lambda: FaultStore(clock), clock=clock, drain_timeout=60), Loader()

    await guard.__aenter__()
    call = asyncio.create_task(guard.fetch(OP, load))
    await load.gate.arrivals(1)
    leaving = asyncio.create_task(guard.__aexit__(None, None, None))
    await asyncio.sleep(0)
    async with guard:
        leaving.cancel()
        await asyncio.wait([leaving])
        load.gate.open()
        answer = await call

    assert (True, "soup") == (leaving.cancelled(), answer)


async def test_cancelled_entry_leaves_the_guard_closed() -> None:
    """Whoever is cancelled while a guard opens its store has not entered it; its connections are closed again."""
    clock, closed = ManualClock(), []

    class Store(FaultStore):
        async def aclose(self) -> None:
            closed.append("closed")

    store = Store(clock)
    store.gate = Gate()
    guard = Guard(lambda: store, clock=clock)

    entry = asyncio.create_task(guard.__aenter__())
    await store.gate.arrivals(1)
    entry.cancel()
    await asyncio.wait([entry])

    assert ["closed"] == closed
    assert guard._states.here() is None


# Everybody at once


def calls_made(waiters: int, make_loop: MakeLoop) -> int:
    """Return how many functions are called when so many waiters are cancelled at once."""
    loop, board = make_loop(), Scoreboard()
    made = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    async def crowd() -> None:
        calls = [asyncio.create_task(board.debounce(OP, never)) for _ in range(waiters)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sys.setprofile(count)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        sys.setprofile(None)
        await board.cancel_all()

    loop.run_until_complete(crowd())
    return made


def test_mass_cancellation_is_linear(make_loop: MakeLoop) -> None:
    """Sixteen times the waiters cancelled at once make sixteen times the work, and no more."""
    few, many = calls_made(1_000, make_loop), calls_made(16_000, make_loop)

    assert many < 16.5 * few


def test_mass_cancellation_looks_at_no_other_waiter(make_loop: MakeLoop) -> None:
    """What C code does in loops is no call, so the waiters' set is checked: no waiter is ever compared to another."""
    compared = 0

    class Watched(asyncio.Future[str]):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

        __hash__ = asyncio.Future.__hash__

    loop, board = make_loop(), Scoreboard()
    loop.create_future = lambda: Watched(loop=loop)

    async def crowd() -> None:
        calls = [asyncio.create_task(board.debounce(OP, never)) for _ in range(1_000)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await board.cancel_all()

    loop.run_until_complete(crowd())

    assert 0 == compared
