import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from itertools import pairwise
from weakref import ref

import pytest
from inside import timers_of, untyped

from stampede_guard import Guard
from stampede_guard._memory import sweeper
from stampede_guard._memory.epochs import Generation
from stampede_guard._memory.l1 import Memory
from stampede_guard._memory.sweeper import STEP
from stampede_guard._stats import Counters
from stampede_guard.testing import ManualClock

Pause = Callable[[], Awaitable[None]]


@pytest.fixture
def memory(clock: ManualClock) -> Memory:
    """Return a memory without timers."""
    return Memory(10_000, clock)


def steps_of(memory: Memory) -> list[int]:
    """Make steps until a pass is over, and return how many entries there are after each."""
    lengths = []
    while True:
        pause = memory._sweeper.step()
        lengths.append(len(memory))
        if pause != sweeper._STEP_PAUSE:
            return lengths


def test_what_is_over_is_removed_untouched(memory: Memory, clock: ManualClock) -> None:
    """A pass removes what is past its window, and leaves what is fresh or old; the removed are counted."""
    counters = Counters()
    memory.put("over", "soup", 5, (), Generation(counters))
    memory.put("old", "soup", 5, stale=5)
    memory.put("fresh", "soup", 10)
    clock.advance(5)

    steps_of(memory)

    assert [False, True, True] == [op in memory for op in ("over", "old", "fresh")]
    assert 1 == counters.expirations


def test_steps_are_bounded(memory: Memory, clock: ManualClock) -> None:
    """A step looks at so many entries and no more, whether they are over or not."""
    for number in range(3 * STEP + 1):
        memory.put(f"menu-{number}", number, 5 if number % 2 else 60)
    clock.advance(5)

    lengths = steps_of(memory)

    assert 4 == len(lengths)
    assert 3 * STEP // 2 + 1 == lengths[-1]
    assert all(before - after <= STEP for before, after in pairwise(lengths))


@pytest.mark.parametrize(
    ("lives", "pause"), [([], None), ([60], 60.0), ([60, 7], 7.0), ([60, 0.2], 1.0), ([1e9], 3_600.0)]
)
def test_next_pass_begins_when_something_is_due(lives: list[float], pause: float | None, memory: Memory) -> None:
    """Before the first entry is over nothing is looked at; passes keep a distance, and a timer is not endless."""
    for number, life in enumerate(lives):
        memory.put(f"menu-{number}", "soup", life)

    assert pause == memory._sweeper.step()


def test_pass_finds_what_is_due_next(memory: Memory, clock: ManualClock) -> None:
    """After a pass the next one waits for the earliest entry that is left, or was put meanwhile."""
    for number in range(STEP):
        memory.put(f"menu-{number}", "soup", 50)
    memory.put("over", "soup", 5)
    clock.advance(5)
    first = memory._sweeper.step()
    memory.put("later", "soup", 30)
    memory.put("softened", "soup", 40, stale=20)
    memory.soften("softened")

    assert sweeper._STEP_PAUSE == first
    assert 20.0 == memory._sweeper.step()


def test_nothing_is_left(memory: Memory, clock: ManualClock) -> None:
    """When all entries are gone no further step is needed, whether they were swept or dropped."""
    memory.put("a", "soup", 5)
    clock.advance(5)
    swept = memory._sweeper.step()
    memory.put("b", "soup", 5)
    memory.drop("b")
    clock.advance(5)

    assert [None, None] == [swept, memory._sweeper.step()]


@pytest.mark.parametrize("do", ["drop", "clear", "put"])
def test_destructors_during_a_pass(do: str, memory: Memory, clock: ManualClock) -> None:
    """A value whose end drops or puts others, or empties memory, leaves the pass something to go by."""

    class Ending:
        def __del__(self) -> None:
            if do == "drop":
                memory.drop_tagged("others")
            elif do == "clear":
                memory.clear()
            else:
                memory.put("again", "soup", 60)

    for number in range(10):
        memory.put(f"menu-{number}", "soup", 60, ("others",))
    memory.put("ending", Ending(), 5)
    memory.put("last", "soup", 5)
    clock.advance(5)

    steps_of(memory)

    assert {"drop": 0, "clear": 0, "put": 11}[do] == len(memory)


# The timer


@pytest.fixture
async def ticking(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """What the running loop takes the time from."""
    loop, clock = asyncio.get_running_loop(), ManualClock()
    monkeypatch.setattr(loop, "time", clock)
    return clock


def timers() -> list[float]:
    """Return when the running loop's timers are due."""
    return [timer.when() for timer in timers_of(asyncio.get_running_loop())]


async def test_timer_runs_while_something_will_be_over(ticking: ManualClock, pause: Pause) -> None:
    """A timer is armed for the first entry's end, removes what is over, and is not armed again for nothing."""
    memory = Memory(10, ticking, asyncio.get_running_loop())
    seen = [timers()]
    memory.put("a", "soup", 5)
    memory.put("b", "soup", 60)
    memory.put("c", "soup", 3)
    seen.append(timers())
    for seconds in (3, 2, 55):
        ticking.advance(seconds)
        await pause()
        seen.append([*timers(), len(memory)])

    assert [[], [1_003.0], [1_005.0, 2], [1_060.0, 1], [0]] == seen


async def test_timer_that_fires_early(ticking: ManualClock, pause: Pause) -> None:
    """Where the memory's clock is behind the loop's, the timer is armed again."""
    clock = ManualClock()
    memory = Memory(10, clock, asyncio.get_running_loop())
    memory.put("a", "soup", 5)
    ticking.advance(5)
    await pause()

    assert ("a" in memory, [1_010.0]) == (True, timers())


@pytest.mark.parametrize("end", ["clear", "garbage", "guard"])
async def test_nothing_is_left_behind(end: str, ticking: ManualClock, pause: Pause) -> None:
    """A memory that is emptied, or whose guard is left, has no timer; one that is garbage is not kept by its timer."""
    if end == "guard":
        async with Guard(clock=ticking) as guard:
            memory = guard._states.running().memory
            memory.put("a", "soup", 5)
            armed = timers()
    else:
        memory = Memory(10, ticking, asyncio.get_running_loop())
        memory.put("a", "soup", 5)
        armed = timers()
    if end == "clear":
        memory.clear()
    if end == "garbage":
        gone = ref(memory)
        del memory
        gc.collect()
        assert gone() is None
        ticking.advance(5)
        await pause()

    assert ([1_005.0], []) == (armed, timers())


def test_closed_loop() -> None:
    """Values that come when the loop is over arm no timer, and are no error."""
    with asyncio.Runner() as runner:
        memory = Memory(10, ManualClock(), runner.get_loop())
    memory.put("a", "soup", 5)

    assert "a" in memory


async def test_timer_without_weak_references(ticking: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a loop's timers allow no weak references, they are kept, and cancelled all the same."""
    loop = asyncio.get_running_loop()
    arm = loop.call_later

    class Strong:
        __slots__ = ("cancel",)

        def __init__(self, timer: asyncio.TimerHandle) -> None:
            self.cancel = timer.cancel

    monkeypatch.setattr(loop, "call_later", lambda *args, **kwargs: Strong(arm(*args, **kwargs)))
    memory = Memory(10, ticking, loop)
    memory.put("a", "soup", 5)
    armed = timers()
    memory.clear()

    assert ([1_005.0], []) == (armed, timers())


async def test_timer_has_no_context_of_a_caller(ticking: ManualClock, pause: Pause) -> None:
    """The caller that happens to arm the timer is not what destructors see the context of."""
    variable = ContextVar("variable", default="clean")
    seen: list[str] = []

    class Ending:
        def __del__(self) -> None:
            seen.append(variable.get())

    memory = Memory(10, ticking, asyncio.get_running_loop())
    variable.set("a caller's")
    memory.put("a", Ending(), 5)
    ticking.advance(5)
    await pause()

    assert ["clean"] == seen
    assert None is untyped(memory._sweeper)._timer
