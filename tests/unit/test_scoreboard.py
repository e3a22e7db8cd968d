import asyncio
import gc
import logging
import threading
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import pytest
from inside import timers_of, untyped
from loaders import returning
from task_factories import Done, at_once

from stampede_guard import (
    ConfigurationError,
    LoadCancelled,
    LoadTimeout,
    RecursiveLoad,
    Scoreboard,
    WaitTimeout,
    WrongLoop,
)
from stampede_guard._flights import scoreboard, waiting
from stampede_guard._flights.flight import Flight
from stampede_guard._flights.waiting import skip_queue, wait_one
from stampede_guard._memory.epochs import Lineage
from stampede_guard._stats import Counters
from stampede_guard.testing import Gate

Pause = Callable[[], Awaitable[None]]
MakeLoop = Callable[[], asyncio.AbstractEventLoop]

OP = "menu-7"


class Menu:
    """An answer that can be watched being forgotten."""


async def never() -> None:
    """Load for ever."""
    await asyncio.get_running_loop().create_future()


def gated(gate: Gate, answer: object = "soup") -> Callable[[], Awaitable[Any]]:
    """Return a load that ends when *gate* is opened."""

    async def load() -> object:
        await gate.passage()
        return answer

    return load


async def test_concurrent_calls_share_one_run() -> None:
    """Everybody who asks while a load runs gets its answer, the very object."""
    board, gate, answer = Scoreboard(), Gate(), Menu()

    calls = [asyncio.create_task(board.debounce(OP, gated(gate, answer))) for _ in range(50)]
    await gate.arrivals(1)
    gate.open()
    answers = await asyncio.gather(*calls)

    assert [answer] * 50 == answers
    assert 1 == gate.arrived


async def test_each_op_has_its_own_run() -> None:
    """Calls with different ops share nothing."""
    board, gate = Scoreboard(), Gate()

    calls = [asyncio.create_task(board.debounce(op, gated(gate, op))) for op in "abc"]
    await gate.arrivals(3)
    gate.open()

    assert ["a", "b", "c"] == await asyncio.gather(*calls)


async def test_nothing_is_remembered() -> None:
    """A call that comes after the answer runs the load again."""
    board = Scoreboard()
    answers = iter(["soup", "salad"])

    async def load() -> str:
        return next(answers)

    assert ["soup", "salad"] == [await board.debounce(OP, load), await board.debounce(OP, load)]


@pytest.mark.parametrize("answer", [None, False, 0, "", [], ()])
async def test_falsy_answers_are_answers(answer: object) -> None:
    """`None` and its like reach every waiter."""
    board, gate = Scoreboard(), Gate()

    calls = [asyncio.create_task(board.debounce(OP, gated(gate, answer))) for _ in range(2)]
    await gate.arrivals(1)
    gate.open()

    assert [answer, answer] == await asyncio.gather(*calls)


async def test_a_failure_is_shared_and_not_remembered() -> None:
    """Everybody who waits gets the load's error; whoever comes later loads anew."""
    board, gate = Scoreboard(), Gate()

    async def fail() -> str:
        await gate.passage()
        raise ValueError("no menu")

    calls = [asyncio.create_task(board.debounce(OP, fail)) for _ in range(3)]
    await gate.arrivals(1)
    gate.open()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)

    assert ["ValueError('no menu')"] * 3 == [repr(outcome) for outcome in outcomes]
    assert "soup" == await board.debounce(OP, gated(gate))


@pytest.mark.parametrize(("load", "error"), [(lambda: 7, TypeError), (lambda: 1 / 0, ZeroDivisionError)])
async def test_load_that_returns_no_awaitable(load: Any, error: type[Exception]) -> None:
    """A function that returns no awaitable fails as it would in an `await`; its own error is the load's error."""
    with pytest.raises(error, match=r"await|zero"):
        await Scoreboard().debounce(OP, load)


async def test_load_has_to_be_callable() -> None:
    """A coroutine instead of a function is refused, with the form that is meant."""
    load = never()

    with pytest.raises(ConfigurationError, match="lambda: fetch"):
        await Scoreboard().debounce(OP, untyped(load))
    load.close()


@pytest.mark.parametrize(
    "options", [{"load_timeout": 0}, {"wait_timeout": -1}, {"on_abandon": "ignore"}, {"load_timeout": "1"}]
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    """An option that breaks its rule is refused when the scoreboard is made."""
    (name,) = options

    with pytest.raises(ConfigurationError, match=name):
        Scoreboard(**options)


async def test_load_timeout_ends_the_load_for_everybody() -> None:
    """After `load_timeout` all who wait get `LoadTimeout`, the load is cancelled, and the op is free."""
    board, gate = Scoreboard(load_timeout=timedelta(milliseconds=1)), Gate()

    calls = [asyncio.create_task(board.debounce(OP, gated(gate))) for _ in range(3)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    gate.open()

    assert [LoadTimeout] * 3 == [type(outcome) for outcome in outcomes]
    assert "menu-7: the loader took longer than load_timeout=0.001 s" == str(outcomes[0])
    assert "soup" == await board.debounce(OP, gated(gate))


async def test_load_timeout_holds_for_a_load_that_ignores_it(pause: Pause) -> None:
    """Waiters get `LoadTimeout` even if the load swallows its cancellation; what it returns later is nobody's."""
    board, gate = Scoreboard(load_timeout=0.001), Gate()

    async def stubborn() -> str:
        try:
            await never()
        except asyncio.CancelledError:
            await gate.passage()
        return "late"

    with pytest.raises(LoadTimeout):
        await board.debounce(OP, stubborn)
    await gate.arrivals(1)
    newcomer = asyncio.create_task(board.debounce(OP, gated(gate)))
    await gate.arrivals(2)
    gate.open()

    assert "soup" == await newcomer
    await pause()
    assert set() == board.up


async def test_load_within_its_timeout() -> None:
    """Loads that end in time leave one timer for all of them, and none once the scoreboard is closed."""
    board = Scoreboard(load_timeout=60, wait_timeout=60)

    async def load() -> str:
        await asyncio.sleep(0)
        return "soup"

    assert ["soup"] * 3 == [await board.debounce(OP, load) for _ in range(3)]
    before = timers_of(asyncio.get_running_loop())
    await board.cancel_all()

    assert (1, []) == (len(before), timers_of(asyncio.get_running_loop()))


async def test_no_timeouts() -> None:
    """With `None` nothing is timed."""
    board = Scoreboard(load_timeout=None, wait_timeout=None)

    async def load() -> int:
        await asyncio.sleep(0)
        return len(untyped(asyncio.get_running_loop())._scheduled)

    assert 0 == await board.debounce(OP, load)


async def test_wait_timeout_is_one_waiters_own(pause: Pause) -> None:
    """Whoever waits too long gets `WaitTimeout`; the load goes on and answers those who come later."""
    board, gate = Scoreboard(wait_timeout=0.001), Gate()

    with pytest.raises(WaitTimeout, match=r"menu-7: no answer within wait_timeout=0\.001 s$") as raised:
        await board.debounce(OP, gated(gate))
    flight = board.current(OP)
    assert flight is not None
    newcomer = asyncio.create_task(wait_one(flight))
    await pause()
    gate.open()

    assert isinstance(raised.value, TimeoutError)
    assert "soup" == await newcomer
    assert 1 == gate.arrived


async def test_loader_sees_none_of_the_callers_context() -> None:
    """A shared load belongs to no caller, so it runs in a clean context."""
    tenant = ContextVar("tenant", default="nobody")
    tenant.set("me")

    async def load() -> str:
        return tenant.get()

    assert "nobody" == await Scoreboard().debounce(OP, load)


async def test_loader_is_nobodys_child() -> None:
    """The load runs in a task of its own, named after its op."""

    async def load() -> asyncio.Task[Any] | None:
        return asyncio.current_task()

    task = await Scoreboard().debounce(OP, load)

    assert asyncio.current_task() is not task
    assert "load menu-7" == untyped(task).get_name()


async def test_forgotten_flight_answers_those_who_waited() -> None:
    """After `forget` the next caller starts a second load; each load answers its own."""
    board, old, new = Scoreboard(), Gate(), Gate()

    first = asyncio.create_task(board.debounce(OP, gated(old, "old")))
    await old.arrivals(1)
    board.forget(OP)
    second = asyncio.create_task(board.debounce(OP, gated(new, "new")))
    await new.arrivals(1)
    old.open()
    answers = [await first]
    third = asyncio.create_task(board.debounce(OP, gated(new, "never asked")))
    await asyncio.sleep(0)
    new.open()
    answers += [await second, await third]

    assert ["old", "new", "new"] == answers


async def test_flights_of_a_function_defined_anew() -> None:
    """`forget_replaced` lets no caller join a flight whose function was defined anew, and leaves the others alone."""
    board, gate, lineage = Scoreboard(), Gate(), Lineage()
    calls = [asyncio.create_task(board.debounce(op, gate.passage)) for op in "abc"]
    await gate.arrivals(3)
    board.flights["a"].generation = lineage.generation
    lineage.start_generation()
    board.flights["b"].generation = lineage.generation

    board.forget_replaced()

    assert ["b", "c"] == sorted(board.flights)
    gate.open()
    await asyncio.gather(*calls)


async def test_forgetting_what_is_not_there() -> None:
    """`forget` of an op that nobody loads does nothing."""
    board = Scoreboard()

    board.forget(OP)
    board.forget_all()

    assert "<Scoreboard 0 flights>" == repr(board)


# Loads that wait for themselves


@pytest.mark.parametrize("has_task", [False, True], ids=["itself", "in a task of its own"])
async def test_load_that_asks_for_itself(has_task: bool) -> None:
    """A load that calls its own op, or waits for a task that does, gets an error instead of waiting for ever."""
    board = Scoreboard()

    async def load() -> Any:
        asking = board.debounce(OP, load)
        return await (asyncio.create_task(asking) if has_task else asking)

    with pytest.raises(RecursiveLoad, match=r"menu-7: its loader waits for itself$"):
        await board.debounce(OP, load)


async def test_load_that_asks_for_itself_through_another() -> None:
    """The call that would close the circle gets the error; its load's waiters get it as that load's failure."""
    board = Scoreboard()

    async def load(op: str, other: str) -> Any:
        return await board.debounce(other, lambda: load(other, op))

    with pytest.raises(RecursiveLoad, match=r"^(a: its loader .* through b|b: its loader .* through a)$"):
        await board.debounce("a", lambda: load("a", "b"))


async def test_two_loads_that_ask_for_each_other() -> None:
    """Also when two callers started the two halves of the circle: one load gets the error, and nobody hangs."""
    board, gate = Scoreboard(), Gate()

    async def load(other: str) -> Any:
        await gate.passage()
        return await board.debounce(other, never)

    calls = [asyncio.create_task(board.debounce(op, partial(load, other))) for op, other in ("ab", "ba")]
    await gate.arrivals(2)
    gate.open()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)

    assert [RecursiveLoad, RecursiveLoad] == [type(outcome) for outcome in outcomes]
    assert {"a: its loader waits for itself, through b"} == {str(outcome) for outcome in outcomes}


async def test_load_that_launches_itself_beside_itself() -> None:
    """A load that forgets its own flight and asks again is stopped, before it fills the memory."""
    board, runs = Scoreboard(), []

    async def load() -> Any:
        runs.append("run")
        board.forget(OP)
        return await board.debounce(OP, load)

    with pytest.raises(RecursiveLoad, match="menu-7: its loader calls itself"):
        await board.debounce(OP, load)
    assert ["run"] == runs


async def test_task_that_its_load_does_not_wait_for() -> None:
    """What a load starts and leaves alone closes no circle: not for itself, and not for an unrelated caller."""
    board, gate = Scoreboard(), Gate()
    started: list[asyncio.Task[Any]] = []

    async def load_a() -> str:
        started.append(asyncio.create_task(board.debounce("b", load_b)))
        await gate.passage()
        return "a"

    async def load_b() -> Any:
        return "b with " + await board.debounce("a", load_a)

    calls = [asyncio.create_task(board.debounce("a", load_a))]
    await gate.arrivals(1)
    calls.append(asyncio.create_task(board.debounce("b", load_b)))
    await asyncio.sleep(0)
    gate.open()

    assert ["a", "b with a", "b with a"] == await asyncio.gather(*calls, *started)


async def test_task_that_asks_for_the_load_that_started_it() -> None:
    """A task that is left alone may ask for the op of the load that started it, and gets the answer of that load."""
    board, gate = Scoreboard(), Gate()
    started: list[asyncio.Task[Any]] = []

    async def load() -> str:
        started.append(asyncio.create_task(board.debounce(OP, never)))
        await gate.passage()
        return "soup"

    call = asyncio.create_task(board.debounce(OP, load))
    await gate.arrivals(1)
    wait = next(iter(next(iter(board.up)).awaits.values()))
    gate.open()

    assert ["soup", "soup"] == await asyncio.gather(call, *started)
    assert wait.check is not None
    assert wait.check.cancelled()


async def test_task_that_launches_the_load_that_started_it_anew() -> None:
    """It may also load the op anew once that was forgotten."""
    board, gate = Scoreboard(), Gate()
    started: list[asyncio.Task[Any]] = []

    async def load() -> str:
        board.forget(OP)
        started.append(asyncio.create_task(board.debounce(OP, returning("new"))))
        await gate.passage()
        return "old"

    call = asyncio.create_task(board.debounce(OP, load))
    await gate.arrivals(1)
    gate.open()

    assert ["old", "new"] == [await call, *await asyncio.gather(*started)]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for circles often."""
    monkeypatch.setattr(waiting, "_CHECKS", (0.001, 0.002))


@pytest.mark.usefixtures("often")
async def test_load_that_waits_for_its_task_later() -> None:
    """A load that comes to wait for a task of its own later closes the circle then, and the task gets the error."""
    board, gate = Scoreboard(), Gate()

    async def load() -> Any:
        task = asyncio.create_task(board.debounce(OP, never))
        await gate.passage()
        return await task

    call = asyncio.create_task(board.debounce(OP, load))
    await gate.arrivals(1)
    gate.open()
    with pytest.raises(RecursiveLoad, match="menu-7: its loader waits for itself"):
        await call


@pytest.mark.usefixtures("often")
async def test_load_that_waits_for_its_task_by_an_event() -> None:
    """A circle that cannot be seen ends with the load's time."""
    board, event = Scoreboard(load_timeout=0.01), asyncio.Event()
    started: list[asyncio.Task[Any]] = []

    async def ask() -> None:
        try:
            await board.debounce(OP, never)
        finally:
            event.set()

    async def load() -> Any:
        started.append(asyncio.create_task(ask()))
        await event.wait()

    with pytest.raises(LoadTimeout):
        await board.debounce(OP, load)
    with pytest.raises(LoadTimeout):
        await started[0]


async def test_tasks_that_launch_each_other_without_end() -> None:
    """A load that launches itself by tasks that it may or may not wait for is stopped after a few."""
    board, gate, runs = Scoreboard(), Gate(), []
    started: list[asyncio.Task[Any]] = []

    async def load() -> None:
        runs.append("run")
        board.forget(OP)
        started.append(asyncio.create_task(board.debounce(OP, load)))
        await gate.passage()

    call = asyncio.create_task(board.debounce(OP, load))
    async with asyncio.timeout(20):
        while not any(task.done() for task in started):
            await asyncio.sleep(0)
    gate.open()
    await call
    outcomes = await asyncio.gather(*started, return_exceptions=True)

    assert 16 == len(runs)
    assert ["menu-7: its loader calls itself"] == [str(each) for each in outcomes if each is not None]


async def test_load_may_ask_for_the_same_twice() -> None:
    """Two sub-loads of one op at once are shared, and no circle."""
    board, gate = Scoreboard(), Gate()

    async def load() -> Any:
        return await asyncio.gather(*(board.debounce("part", gated(gate)) for _ in range(2)))

    call = asyncio.create_task(board.debounce(OP, load))
    await gate.arrivals(1)
    gate.open()

    assert ["soup", "soup"] == await call
    assert 1 == gate.arrived


async def test_same_op_on_another_scoreboard_is_no_circle() -> None:
    """Ops are a scoreboard's own: the load of one may ask another for what has the same name."""
    ours, theirs = Scoreboard(), Scoreboard()

    assert "soup" == await ours.debounce(OP, lambda: theirs.debounce(OP, returning("soup")))


async def test_load_that_no_longer_waits_is_no_part_of_a_circle(pause: Pause) -> None:
    """A load that gave up on a second one may be waited for by that."""
    board, second, first = Scoreboard(), Gate(), Gate()

    async def load_second() -> Any:
        await second.passage()
        return await board.debounce("first", never)

    async def load_first() -> str:
        part = asyncio.create_task(board.debounce("second", load_second))
        await second.arrivals(1)
        part.cancel()
        await asyncio.wait([part])
        await first.passage()
        return "soup"

    calls: list[asyncio.Task[str | None]] = [asyncio.create_task(board.debounce("first", load_first))]
    await first.arrivals(1)
    calls.append(asyncio.create_task(board.debounce("second", never)))
    second.open()
    await pause()
    first.open()

    assert ["soup", "soup"] == await asyncio.gather(*calls)


async def test_task_that_a_load_left_behind_may_ask_for_the_same_op(pause: Pause) -> None:
    """Once the load has landed, what it started may call the op again."""
    board, gate, started = Scoreboard(), Gate(), []

    async def refresh_later() -> Any:
        await gate.passage()
        return await board.debounce(OP, gated(gate, "later"))

    async def load() -> str:
        started.append(asyncio.create_task(refresh_later()))
        return "now"

    answers = [await board.debounce(OP, load)]
    await pause()
    gate.open()
    answers.append(await started[0])

    assert ["now", "later"] == answers


async def test_shared_sub_loads_are_looked_through_once(pause: Pause) -> None:
    """Among loads that share sub-loads, sixty levels deep, are 10¹² paths; the look for circles goes no path."""
    board, gates = Scoreboard(), [Gate() for _ in range(61)]

    async def load(number: int) -> int:
        if number < 2:
            await gates[number].passage()
            return number
        first = asyncio.create_task(board.debounce(f"f{number - 1}", lambda: load(number - 1)))
        await gates[number].passage()
        return await board.debounce(f"f{number - 2}", lambda: load(number - 2)) + await first

    call = asyncio.create_task(board.debounce("f60", lambda: load(60)))
    await gates[1].arrivals(1)
    for gate in gates[2:]:  # the deepest first, so that each look has the whole depth before it
        gate.open()
        await pause()
    for gate in gates[:2]:
        gate.open()

    assert 1_548_008_755_920 == await call
    assert 61 == board.stats().loads


# Event loops


def test_another_running_loop_is_refused(make_loop: MakeLoop) -> None:
    """While one loop loads an op, another gets an error that says what to do, and no foreign future."""
    board, here, there = Scoreboard(), make_loop(), make_loop()
    gate = Gate()

    call = here.create_task(board.debounce(OP, gated(gate)))
    here.run_until_complete(gate.arrivals(1))

    with pytest.raises(WrongLoop, match=r"menu-7: .*give each loop a Scoreboard, or use a Guard"):
        there.run_until_complete(board.debounce(OP, never))
    gate.open()
    assert "soup" == here.run_until_complete(call)


def test_child_of_a_fork_loads_for_itself(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this process was forked, flights of the parent's loops are neither joined, nor waited for, nor counted."""
    monkeypatch.setattr(scoreboard, "_all_boards", WeakSet())
    monkeypatch.setattr(scoreboard, "_left_behind", [])
    board, parents, childs = Scoreboard(), make_loop(), make_loop()
    gate, opened = Gate(), Gate()
    call = parents.create_task(board.debounce(OP, gated(gate)))
    parents.run_until_complete(gate.arrivals(1))

    scoreboard._disown_all()
    opened.open()

    assert 0 == board.stats().in_flight
    assert "salad" == childs.run_until_complete(board.debounce(OP, gated(opened, "salad")))
    childs.run_until_complete(board.drain(5))
    gate.open()
    parents.run_until_complete(call)


def test_loop_closed_over_a_load(make_loop: MakeLoop) -> None:
    """What a closed loop left up is written off; the next loop loads anew."""
    board, first, second = Scoreboard(), make_loop(), make_loop()
    gate = Gate()

    call = first.create_task(board.debounce(OP, gated(gate)))
    first.run_until_complete(gate.arrivals(1))
    (flight,) = board.up
    loader = flight.task
    first.close()
    answer = second.run_until_complete(board.debounce(OP, returning("soup")))

    assert ("soup", 0, set()) == (answer, board.stats().in_flight, board.up)
    for lost in map(untyped, (call, loader)):
        lost._log_destroy_pending = False
        lost.get_coro().close()


def no_more_tasks(*_: object, **__: object) -> Any:
    """Make no task."""
    raise RuntimeError("no more tasks")


@pytest.mark.parametrize(
    ("tasks", "load", "error"),
    [
        (no_more_tasks, lambda _: never, RuntimeError),
        (at_once, lambda board: board.cancel_all, LoadCancelled),
    ],
    ids=["the factory refuses", "it ends its own flight"],
)
async def test_load_that_does_not_start(tasks: Any, load: Any, error: type[Exception]) -> None:
    """A load that gets no task, or whose flight ends meanwhile, fails its caller, and leaves no flight."""
    board, loop = Scoreboard(), asyncio.get_running_loop()
    factory = loop.get_task_factory()

    loop.set_task_factory(tasks)
    with pytest.raises(error):
        await board.debounce(OP, load(board))
    loop.set_task_factory(factory)

    assert ({}, set(), 0) == (board.flights, board.up, board.stats().in_flight)


@pytest.mark.parametrize("is_eager", [False, True], ids=["as it is", "over when its task is created"])
async def test_immediate_load_leaves_nothing(is_eager: bool) -> None:
    """A load that never waits answers its caller, even one that lands before its caller waits; its flight is gone."""
    board, loop = Scoreboard(), asyncio.get_running_loop()
    factory = loop.get_task_factory()

    loop.set_task_factory(at_once if is_eager else factory)
    answer = await board.debounce(OP, returning("soup"))
    loop.set_task_factory(factory)

    assert ("soup", {}, set(), 0) == (answer, board.flights, board.up, board.stats().in_flight)


# When a load begins


@pytest.mark.parametrize("can", [True, False], ids=["at once", "later"])
async def test_load_begins_at_once_where_it_can(can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With eager tasks, which no factory has to make, a load that need not wait is over when it is launched.

    Before Python 3.12 it begins in the next iteration of the loop.
    """
    board, loop = Scoreboard(), asyncio.get_running_loop()
    factory = loop.get_task_factory()
    eager_task = (lambda load, **_: at_once(loop, load)) if can else None
    monkeypatch.setattr("stampede_guard._flights.flight._eager_task", eager_task)

    async def load(_: Flight[str]) -> str:
        return "soup"

    loop.set_task_factory(None)
    flight = board.launch(OP, load, Counters(), "finish")
    loop.set_task_factory(factory)

    assert can == flight.landed
    assert "soup" == await wait_one(flight)


async def test_loads_within_loads_do_not_pile_up(task_factory: str) -> None:
    """A chain of loads, each of which asks for the next at once, may be longer than the stack is deep."""
    board, length = Scoreboard(), 500 if task_factory == "lazy" else 20  # an eager factory has them within each other

    async def load(number: int) -> int:
        return number and 1 + await board.debounce(f"{number - 1}", partial(load, number - 1))

    assert length == await board.debounce("last", partial(load, length))


async def test_what_the_launching_caller_deals_with_is_not_the_loads(task_factory: str) -> None:
    """Whoever asks while they deal with an error does not make it the context of the load's error, which all get."""
    board = Scoreboard()

    async def fail() -> None:
        raise ValueError("no menu")

    async def ask() -> BaseException | None:
        try:
            raise KeyError("a secret of the caller")
        except KeyError:
            flight = board.launch(OP, lambda _: fail(), Counters(), "finish")
        with pytest.raises(ValueError, match="no menu") as caught:
            await wait_one(flight)
        return caught.value.__context__

    assert await ask() is None or task_factory == "eager"  # there it is the factory that begins the load


async def test_load_cancelled_before_it_began() -> None:
    """A load whose task is cancelled before its first step settles its waiters too."""
    board, loop = Scoreboard(), asyncio.get_running_loop()
    factory = loop.get_task_factory()

    loop.set_task_factory(lambda loop, load, **options: asyncio.Task(load, loop=loop, **options))
    flight = board.launch(OP, lambda _: never(), Counters(), "finish")
    loop.set_task_factory(factory)
    assert flight.task is not None
    flight.task.cancel()

    with pytest.raises(LoadCancelled, match="menu-7: the load was cancelled"):
        await wait_one(flight)
    assert ({}, set()) == (board.flights, board.up)


async def test_who_has_left_takes_no_room() -> None:
    """Callers that come and leave during a long load leave nothing behind, and the last one gets the answer."""
    board, gate = Scoreboard(), Gate()
    stays = asyncio.create_task(board.debounce("menu-7", gate.passage))
    await gate.arrivals(1)
    flight = board.current("menu-7")
    assert flight is not None

    for _ in range(10):
        callers = [asyncio.create_task(board.debounce("menu-7", gate.passage)) for _ in range(100)]
        await asyncio.sleep(0)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)

    assert len(flight._waiters) < 200
    assert "1 waiters" in repr(flight)
    gate.open()
    await stays


async def test_waiters_go_on_in_the_order_in_which_they_came() -> None:
    """First come, first served: also of the answer."""
    board, gate, served = Scoreboard(), Gate(), []

    async def call(number: int) -> None:
        await board.debounce(OP, gated(gate))
        served.append(number)

    calls = [asyncio.create_task(call(number)) for number in range(100)]
    await gate.arrivals(1)
    gate.open()
    await asyncio.gather(*calls)

    assert list(range(100)) == served


# Draining


async def test_drain_waits_also_for_what_is_launched_meanwhile() -> None:
    """Loads that a load launches while the scoreboard is drained are waited for too."""
    board, gate, landed = Scoreboard(), Gate(), []

    async def inner() -> None:
        await asyncio.sleep(0)
        landed.append("inner")

    async def outer() -> None:
        await gate.passage()
        board.launch("inner", lambda _: inner(), board._counters, "finish")

    call = asyncio.create_task(board.debounce(OP, outer))
    await gate.arrivals(1)
    draining = asyncio.create_task(board.drain(60))
    await asyncio.sleep(0)
    gate.open()
    await draining
    await call

    assert ["inner"] == landed


async def test_drain_waits_no_longer_than_it_may() -> None:
    """After its time `drain` returns, and lets the rest run on."""
    board = Scoreboard()
    call = asyncio.create_task(board.debounce(OP, never))
    await asyncio.sleep(0)

    await board.drain(0.001)

    assert not call.done()
    await board.cancel_all()
    with pytest.raises(LoadCancelled, match="menu-7: cancelled at shut-down"):
        await call


async def test_draining_nothing() -> None:
    """An idle scoreboard is drained and grounded at once."""
    board = Scoreboard()

    await board.drain(60)
    await board.cancel_all()

    assert set() == board.up


async def test_ground_lets_loads_clean_up() -> None:
    """A cancelled load may finish its clean-up before `cancel_all` returns."""
    board, done = Scoreboard(), []

    async def load() -> None:
        try:
            await never()
        finally:
            await asyncio.sleep(0)
            done.append("closed")

    call = asyncio.create_task(board.debounce(OP, load))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await board.cancel_all()

    assert ["closed"] == done
    with pytest.raises(LoadCancelled):
        await call


async def test_ground_reports_a_load_that_does_not_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, pause: Pause
) -> None:
    """Loads that ignore their cancellation are left behind, and counted in one line of the log."""
    monkeypatch.setattr("stampede_guard._flights.scoreboard._GRACE", 0.001)
    board, gate = Scoreboard(), Gate()

    async def stubborn() -> None:
        try:
            await never()
        except asyncio.CancelledError:
            await gate.passage()

    calls = [asyncio.create_task(board.debounce(op, stubborn)) for op in (OP, "menu-8")]
    await pause()
    with caplog.at_level(logging.WARNING):
        await board.cancel_all()

    assert ["2 loads ignore their cancellation; left behind at shut-down"] == caplog.messages
    for call in calls:
        with pytest.raises(LoadCancelled):
            await call
    gate.open()
    await pause()
    assert set() == board.up


# What is seen, and what is not kept


async def test_stats() -> None:
    """Calls are joins and executions; failures and what is up now are told apart."""
    board, gate = Scoreboard(), Gate()

    calls = [asyncio.create_task(board.debounce(OP, gated(gate))) for _ in range(3)]
    await gate.arrivals(1)
    up = board.stats()
    gate.open()
    await asyncio.gather(*calls)
    with pytest.raises(ZeroDivisionError):
        await board.debounce(OP, untyped(lambda: 1 / 0))
    idle = board.stats()

    assert (3, 1, 2, 1) == (up.calls, up.executions, up.joins, up.in_flight)
    assert (4, 2, 2, 1, 0) == (idle.calls, idle.executions, idle.loads, idle.failures, idle.in_flight)


async def test_reprs_tell_the_state() -> None:
    """A scoreboard and its flights say what is up."""
    board, gate = Scoreboard(), Gate()

    calls = [asyncio.create_task(board.debounce(OP, gated(gate))) for _ in range(2)]
    await gate.arrivals(1)
    flight = board.flights[OP]
    up = repr(board), repr(flight)
    gate.open()
    await asyncio.gather(*calls)

    assert ("<Scoreboard 1 flights>", "<Flight menu-7 2 waiters>") == up
    assert "<Flight menu-7 0 waiters, landed>" == repr(flight)


async def test_what_a_load_leaves_open_does_not_keep_its_answer(pause: Pause) -> None:
    """A connection opened by a load keeps the load's context for good, but neither the flight nor the answer."""
    board, gate, opened = Scoreboard(), Gate(), []

    async def load() -> Menu:
        opened.append(asyncio.create_task(gate.passage()))
        return Menu()

    answer = ref(await board.debounce(OP, load))
    await pause()
    gc.collect(1)

    assert answer() is None
    gate.open()
    await opened[0]


async def test_what_a_load_launches_does_not_keep_its_answer(pause: Pause) -> None:
    """A load that goes on after the one that launched it has landed keeps nothing of that."""
    board, gate = Scoreboard(), Gate()

    async def load() -> Menu:
        part = asyncio.create_task(board.debounce("part", gated(gate)))
        await gate.arrivals(1)
        part.cancel()
        await asyncio.wait([part])
        return Menu()

    answer = ref(await board.debounce(OP, load))
    await pause()
    gc.collect(1)

    assert answer() is None
    gate.open()
    await board.drain(60)


async def test_a_failure_makes_no_reference_cycle() -> None:
    """When the waiter has dealt with the error, it is gone at once, with every frame that its traceback held."""
    board = Scoreboard()

    class NoMenuError(Exception):
        pass

    async def fail() -> None:
        await asyncio.sleep(0)
        raise NoMenuError

    async def call() -> ref[NoMenuError]:
        try:
            await board.debounce(OP, fail)
        except NoMenuError as error:
            return ref(error)
        raise AssertionError

    gc.disable()
    try:
        error = await call()
        await asyncio.sleep(0)
        gone = error() is None
    finally:
        gc.enable()

    assert gone


# Flights that may not queue for a slot, because a load that holds one waits for them


async def test_without_limits_nothing_is_urgent() -> None:
    """Loads within loads, joined or launched, change nothing while nobody holds a slot."""
    board, urgent = Scoreboard(), []

    async def load(op: str, *parts: str) -> None:
        await asyncio.gather(*(board.debounce(part, partial(load, part)) for part in parts))
        flight = board.current(op)
        urgent.append(flight is not None and flight.skips_queue)

    await asyncio.gather(board.debounce("a", partial(load, "a", "b", "c")), board.debounce("c", partial(load, "c")))

    assert {False} == set(urgent)


async def test_urgency_reaches_all_that_is_waited_for(pause: Pause) -> None:
    """Through every way, each flight once, and whoever queues is let out; a flight beside them is left alone."""
    board, gate = Scoreboard(), Gate()

    async def load(*parts: str) -> None:
        await asyncio.gather(*(board.debounce(part, gated(gate)) for part in parts))

    calls = [asyncio.create_task(board.debounce(op, partial(load, "end"))) for op in ("left", "right")]
    await pause()
    calls.append(asyncio.create_task(board.debounce("start", partial(load, "left", "right"))))
    calls.append(asyncio.create_task(board.debounce("beside", partial(load, "other end"))))
    await pause()
    flights = {flight.op: flight for flight in board.up}
    place = flights["end"].queue_slot = asyncio.get_running_loop().create_future()
    skip_queue(flights["start"])
    urgent = sorted(op for op, flight in flights.items() if flight.skips_queue)
    skip_queue(flights["start"])
    gate.open()
    await asyncio.gather(*calls)

    assert ["end", "left", "right", "start"] == urgent
    assert place.result() is False


async def test_urgency_reaches_what_is_waited_for_later() -> None:
    """What an urgent load launches or joins is urgent from then on, until its task has ended."""
    board, gate, flights = Scoreboard(), Gate(), []

    def note(op: str) -> None:
        flight = board.current(op)
        assert flight is not None
        flights.append((op, flight, flight.skips_queue))

    async def load_part(op: str) -> None:
        await gate.passage()
        note(op)

    async def load() -> None:
        flight = board.current(OP)
        assert flight is not None
        skip_queue(flight)
        parts = [asyncio.create_task(board.debounce(op, partial(load_part, op))) for op in ("joined", "launched")]
        await gate.arrivals(2)
        note(OP)
        gate.open()
        await asyncio.gather(*parts)

    joined = asyncio.create_task(board.debounce("joined", partial(load_part, "joined")))
    await gate.arrivals(1)
    await asyncio.gather(joined, board.debounce(OP, load))
    await asyncio.sleep(0)

    assert {(OP, True), ("joined", True), ("launched", True)} == {(op, urgent) for op, _, urgent in flights}
    assert not any(flight.skips_queue for _, flight, _ in flights)


async def test_urgency_stays_in_its_event_loop() -> None:
    """A flight of another loop, which a load waits for from a thread, is not touched from this one."""
    board, theirs = Scoreboard(), Scoreboard()
    begun, end, urgent = threading.Event(), threading.Event(), []

    async def load_there() -> None:
        begun.set()
        await asyncio.to_thread(end.wait)
        flight = theirs.current("there")
        urgent.append(flight is not None and flight.skips_queue)

    async def load() -> None:
        await asyncio.to_thread(lambda: asyncio.run(theirs.debounce("there", load_there)))

    call = asyncio.create_task(board.debounce(OP, load))
    await asyncio.to_thread(begun.wait)
    flight = board.current(OP)
    assert flight is not None
    skip_queue(flight)
    here = (len(flight.awaits), flight.skips_queue)
    end.set()
    await call

    assert ((1, True), [False]) == (here, urgent)


async def test_forget_tagged() -> None:
    """What has the tag is joined no more; whoever waits for it is answered, and its landing disturbs no newer one."""
    board, gate = Scoreboard(), Gate()

    def launch(op: str, *tags: str) -> Flight[Any]:
        return board.launch(op, lambda _: gate.passage(), Counters(), "finish", tags=tags)

    flights = [launch("a", "soups", "hot"), launch("b", "hot"), launch("c")]
    board.forget_tagged("soups")
    board.forget_tagged("drinks")
    current = [board.current(op) for op in "abc"]
    newer = launch("a")
    gate.open()
    for flight in flights:
        await wait_one(flight)

    assert [None, *flights[1:]] == current
    assert await wait_one(newer) is None
    assert {} == board.flights


# Ends that the load itself does not see to

STOPS = pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])


@pytest.mark.parametrize("ticks", range(6))
async def test_load_cancelled_from_outside_at_any_step(ticks: int) -> None:
    """Whoever cancels a load's task, and however early: all who wait are told, and nothing is left."""
    board, gate = Scoreboard(), Gate()
    calls = [asyncio.create_task(board.debounce(OP, gated(gate))) for _ in range(3)]
    while not board.up:
        await asyncio.sleep(0)
    (flight,) = board.up
    for _ in range(ticks):
        await asyncio.sleep(0)
    assert flight.task is not None
    flight.task.cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)

    assert ["LoadCancelled('menu-7: the load was cancelled')"] * 3 == [repr(outcome) for outcome in outcomes]
    assert (set(), {}, 0, None) == (board.up, board.flights, board.stats().in_flight, flight.task)


async def test_load_cancelled_while_nobody_waits() -> None:
    """So is nobody, without a complaint."""
    board = Scoreboard()
    flight = board.launch(OP, lambda _: never(), Counters(), "finish")
    assert flight.task is not None
    task = flight.task
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)

    assert (True, True, None, set()) == (flight.landed, flight.is_over, flight.task, board.up)


@STOPS
@pytest.mark.parametrize("ticks", [1, 3])
def test_load_that_stops_the_loop(stop: type[BaseException], ticks: int, make_loop: MakeLoop) -> None:
    """All who wait are told once the loop runs again, in whichever step of the load that was."""
    loop, board = make_loop(), Scoreboard()

    async def load() -> None:
        for _ in range(ticks):
            await asyncio.sleep(0)
        raise stop

    async def ask() -> list[Any]:
        return await asyncio.gather(*(board.debounce(OP, load) for _ in range(3)), return_exceptions=True)

    asking = loop.create_task(ask())
    with pytest.raises(stop):
        loop.run_until_complete(asking)
    early = asking.done()
    outcomes = loop.run_until_complete(asking)

    assert not early
    assert [f"LoadCancelled('menu-7: the load was ended by {stop.__name__}')"] * 3 == [repr(each) for each in outcomes]
    assert (set(), {}, 0) == (board.up, board.flights, board.stats().in_flight)


@STOPS
def test_load_that_stops_the_loop_while_nobody_waits(stop: type[BaseException], make_loop: MakeLoop) -> None:
    """So does the flight end when nobody has to be told, without a complaint."""
    loop, board = make_loop(), Scoreboard()
    flights: list[Flight[None]] = []

    async def load(_: Flight[None]) -> None:
        await asyncio.sleep(0)
        raise stop

    async def launch() -> None:
        flights.append(board.launch(OP, load, Counters(), "finish"))
        for _ in range(5):
            await asyncio.sleep(0)

    launching = loop.create_task(launch())
    with pytest.raises(stop):
        loop.run_until_complete(launching)
    loop.run_until_complete(launching)

    assert [(True, True, None)] == [(flight.landed, flight.is_over, flight.task) for flight in flights]
    assert set() == board.up


class Rest:
    """What is left of a coroutine that has begun."""

    def __init__(self, run: Any, waited_for: Any) -> None:
        self._run = run
        self._waited_for = waited_for

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            yield self._waited_for
        except asyncio.CancelledError as error:
            self._run.throw(error)
        return (yield from self._run.__await__())


async def finish(rest: Rest) -> Any:
    """Do the rest."""
    return await rest


def eagerly(loop: asyncio.AbstractEventLoop, run: Any, **options: Any) -> Any:
    """Begin a task inside its own creation, on any Python."""
    try:
        waited_for = options["context"].run(run.send, None)
    except asyncio.CancelledError:
        future = Done(loop=loop)
        future.cancel()
        return future
    return asyncio.Task(finish(Rest(run, waited_for)), loop=loop, **options)


@pytest.mark.parametrize("how", ["itself, at once", "itself, later", "by another"])
async def test_load_that_began_in_its_creation_and_is_cancelled(how: str, pause: Pause) -> None:
    """Whether it comes to that in its first step or later: all who wait are told, and nothing is left."""
    board, loop = Scoreboard(), asyncio.get_running_loop()
    factory = loop.get_task_factory()

    async def load(_: Flight[None]) -> None:
        if how != "itself, at once":
            await asyncio.sleep(0)
        if how == "by another":
            await never()
        raise asyncio.CancelledError

    loop.set_task_factory(eagerly)
    flight = board.launch(OP, load, Counters(), "finish")
    loop.set_task_factory(factory)
    early = flight.landed
    if how == "by another":
        await pause()
        assert flight.task is not None
        flight.task.cancel()

    with pytest.raises(LoadCancelled, match="menu-7: the load was cancelled"):
        await wait_one(flight)
    assert (how == "itself, at once") == early
    assert (set(), {}, None) == (board.up, board.flights, flight.task)
