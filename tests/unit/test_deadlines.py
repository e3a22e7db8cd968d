import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextvars import Context, ContextVar
from weakref import ref

import pytest
from inside import timers_of, untyped

from stampede_guard import LoadTimeout, Scoreboard
from stampede_guard._flights.deadlines import Budgets, Deadlines
from stampede_guard.testing import Gate, ManualClock

Pause = Callable[[], Awaitable[None]]
MakeLoop = Callable[[], asyncio.AbstractEventLoop]


class Timed:
    """The part of a flight that deadlines use."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.get_running_loop()
        self.ended: list[float] = []

    def run_out(self, budget: float) -> None:
        self.ended.append(budget)


class StrongTimer:
    """A timer's handle without weak references."""

    __slots__ = ("_timer",)

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self._timer = timer

    def cancel(self) -> None:
        self._timer.cancel()


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """What the running loop takes the time from."""
    loop, clock = asyncio.get_running_loop(), ManualClock()
    monkeypatch.setattr(loop, "time", clock)
    return clock


def timers() -> list[float]:
    """Return when the running loop's timers are due."""
    return [timer.when() for timer in timers_of(asyncio.get_running_loop())]


async def test_each_ends_when_its_own_time_is_up(clock: ManualClock, pause: Pause) -> None:
    """Of loads that began one after the other, each is ended after its whole budget, and no sooner."""
    deadlines, flights, ended = Deadlines(asyncio.get_running_loop(), 10), [], []

    for _ in range(3):
        flights.append(Timed())
        deadlines.add(flights[-1])
        await pause()
        clock.advance(2)
    for seconds in (3.9, 0.2, 1.7, 0.2, 2):
        clock.advance(seconds)
        await pause()
        ended.append([[*flight.ended] for flight in flights])

    assert [
        [[], [], []],
        [[10], [], []],
        [[10], [], []],
        [[10], [10], []],
        [[10], [10], [10]],
    ] == ended
    assert [] == timers()


async def test_one_timer_for_all(clock: ManualClock, pause: Pause) -> None:
    """A hundred loads have one timer, which is that of the first."""
    deadlines = Deadlines(asyncio.get_running_loop(), 10)

    for _ in range(100):
        deadlines.add(Timed())
        await pause()
        clock.advance(0.01)

    assert [1_010.0] == timers()
    assert "<Deadlines of 10 s: 100 flights>" == repr(deadlines)


async def test_timer_of_a_load_that_is_over_goes_on_to_the_next(clock: ManualClock, pause: Pause) -> None:
    """When the first has ended in time, its timer ends nobody, and is set anew for the first that is left."""
    deadlines, flights = Deadlines(asyncio.get_running_loop(), 10), [Timed() for _ in range(3)]

    for flight in flights:
        deadlines.add(flight)
        clock.advance(1)
        await pause()
    deadlines.drop(flights[0])
    deadlines.drop(flights[1])
    clock.advance(8)
    await pause()

    assert [[], [], []] == [flight.ended for flight in flights]
    assert [1_012.0] == timers()


async def test_timer_is_armed_again_only_when_it_fires(clock: ManualClock, pause: Pause) -> None:
    """Loads that begin and end one after another cost one timer, which ends with the first idle budget."""
    deadlines, flights, seen = Deadlines(asyncio.get_running_loop(), 10), [Timed() for _ in range(5)], []

    for flight in flights[:4]:
        deadlines.add(flight)
        await pause()
        deadlines.drop(flight)
        clock.advance(2)
        seen.append(untyped(asyncio.get_running_loop())._scheduled[:])
    deadlines.add(flights[4])
    clock.advance(2)
    await pause()
    rearmed = timers()
    deadlines.drop(flights[4])
    clock.advance(8)
    await pause()

    assert [1_010.0] * 4 == [timer.when() for (timer,) in seen]
    assert ([1_018.0], []) == (rearmed, timers())
    assert [[]] * 5 == [flight.ended for flight in flights]


async def test_closing_cancels_the_timer_once_all_are_over(clock: ManualClock, pause: Pause) -> None:
    """A load that is still up keeps its deadline; after it no timer is left, and an idle one is cancelled at once."""
    deadlines, flights = Deadlines(asyncio.get_running_loop(), 10), [Timed(), Timed()]

    deadlines.close()
    for flight in flights:
        deadlines.add(flight)
    deadlines.drop(flights[0])
    deadlines.close()
    before = timers()
    deadlines.drop(flights[1])
    after = timers()
    deadlines.add(flights[1])
    clock.advance(10)
    await pause()

    assert ([1_010.0], [], []) == (before, after, timers())
    assert [[], [10]] == [flight.ended for flight in flights]


async def test_timers_of_a_loop_that_allow_no_weak_references(
    clock: ManualClock, pause: Pause, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load in such an event loop, as rloop is, has its deadline, and closing cancels the timer."""
    loop, call_at = asyncio.get_running_loop(), asyncio.get_running_loop().call_at
    monkeypatch.setattr(loop, "call_at", lambda *args, **kwargs: StrongTimer(call_at(*args, **kwargs)))
    deadlines, late, quick = Deadlines(loop, 10), Timed(), Timed()

    deadlines.add(late)
    clock.advance(10)
    await pause()
    deadlines.add(quick)
    deadlines.drop(quick)
    deadlines.close()

    assert [10] == late.ended
    assert [] == quick.ended
    assert [] == timers()


async def test_timer_that_comes_a_little_early(clock: ManualClock, pause: Pause) -> None:
    """A loop's timers may fire within its clock's resolution before they are due: that is no reason to wait again."""
    deadlines, flight = Deadlines(asyncio.get_running_loop(), 10), Timed()
    untyped(asyncio.get_running_loop())._clock_resolution = 0.5

    deadlines.add(flight)
    await pause()
    clock.advance(9.75)
    await pause()

    assert [10] == flight.ended
    assert [] == timers()


async def test_timer_keeps_nobodys_context(clock: ManualClock, pause: Pause) -> None:
    """The timer that goes on from load to load does not keep the context of the first."""

    class Request:
        pass

    deadlines, variable = Deadlines(asyncio.get_running_loop(), 10), ContextVar[Request]("request")
    request = Request()
    context = Context()
    context.run(variable.set, request)
    gone = ref(request)

    context.run(deadlines.add, Timed())
    del request, context
    await pause()
    gc.collect()

    assert [1_010.0] == timers()
    assert gone() is None


async def test_each_budget_has_its_deadlines(clock: ManualClock, pause: Pause) -> None:
    """Loads with different budgets are timed apart; one that is over in time is not ended."""
    budgets, short, long, left = Budgets(), Timed(), Timed(), Timed()
    loop = asyncio.get_running_loop()

    budgets.of(loop, 1).add(short)
    budgets.of(loop, 5).add(long)
    budgets.of(loop, 1).add(left)
    await pause()
    budgets.of(loop, 1).drop(left)
    both = sorted(timers())
    clock.advance(2)
    await pause()
    one = timers()
    budgets.of(loop, 5).drop(long)
    budgets.close(loop)

    assert ([1_001.0, 1_005.0], [1_005.0], []) == (both, one, timers())
    assert ([1], [], []) == (short.ended, long.ended, left.ended)


async def test_budgets_without_number(clock: ManualClock, pause: Pause) -> None:
    """Whoever invents a budget for each load fills no memory, and each is ended all the same."""
    budgets, flights = Budgets(), [Timed() for _ in range(200)]

    for number, flight in enumerate(flights):
        budgets.of(flight.loop, 1 + number / 100).add(flight)
    await pause()
    clock.advance(10)
    await pause()

    assert len(budgets._all) <= 64
    assert [] == timers()
    assert [[1 + number / 100] for number in range(200)] == [flight.ended for flight in flights]


def test_each_loop_has_its_deadlines(make_loop: MakeLoop) -> None:
    """A loop never sets another's timers; and what is kept of budgets keeps no loop."""
    budgets, loops = Budgets(), [make_loop(), make_loop()]
    flights = [Timed(loop) for loop in loops]

    async def end(flight: Timed) -> None:
        budgets.of(flight.loop, 0.001).add(flight)
        while not flight.ended:
            await asyncio.sleep(0)

    for loop, flight in zip(loops, flights, strict=True):
        loop.run_until_complete(end(flight))

    assert [[0.001], [0.001]] == [flight.ended for flight in flights]
    assert [loops[1]] == [deadlines.loop() for deadlines in budgets._all.values()]
    budgets.of(loops[1], 1).add(Timed(loops[1]))
    budgets.close(loops[0])
    assert {} == budgets._all


def test_deadlines_outlive_no_loop() -> None:
    """A scoreboard that was used in a loop does not keep it."""
    board, loop = Scoreboard(), asyncio.new_event_loop()

    async def load() -> None:
        await asyncio.sleep(0)

    loop.run_until_complete(board.debounce("menu-7", load))
    loop.close()
    gone = ref(loop)
    del loop
    gc.collect()

    assert gone() is None
    assert board.stats().loads == 1


async def test_loads_of_one_scoreboard_share_the_timer(clock: ManualClock, pause: Pause) -> None:
    """Ten loads at once are one timer, each is ended when its time is up, and nothing is left."""
    board, gate, calls = Scoreboard(load_timeout=30), Gate(), []

    for number in range(10):
        calls.append(asyncio.create_task(board.debounce(f"menu-{number}", gate.passage)))
        await pause()
        clock.advance(1)
    timed = len(timers())
    clock.advance(21)  # 31 for the first, 30 for the second
    await pause()
    ended = [call.done() for call in calls]
    gate.open()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)

    await board.cancel_all()
    assert (1, [True] * 2 + [False] * 8) == (timed, ended)
    assert [LoadTimeout] * 2 + [type(None)] * 8 == [type(outcome) for outcome in outcomes]
    assert [] == timers()
