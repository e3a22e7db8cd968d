"""Random loads within loads, joins and cancellations: nobody waits for ever, and the limits hold."""

import asyncio
from functools import partial
from typing import Any, NamedTuple

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import ticks

from stampede_guard import Overloaded, RecursiveLoad, Scoreboard
from stampede_guard._flights.flight import Flight
from stampede_guard._flights.limiter import Limiter, Limiters
from stampede_guard._flights.waiting import wait_one
from stampede_guard._operations.operation import Operation
from stampede_guard._operations.options import OnAbandon
from stampede_guard._operations.policy import Policy
from stampede_guard._stats import Counters

OPS = "abcdef"
PATIENCE = 2_000  # iterations of the loop in which everything has to have ended

OFTEN = settings(
    max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Recipe(NamedTuple):
    """What one op's load does: rounds of ops that it asks for at once, each after so many ticks."""

    rounds: list[tuple[int, list[str]]]
    on_abandon: OnAbandon


def operation(name: str, max_loads: int | None, max_queued: int | None) -> Operation:
    """Return an operation with these limits."""
    policy = Policy(max_loads=max_loads, max_queued=None if max_loads is None else max_queued)
    return Operation(name, policy, Counters())


class Call(NamedTuple):
    """One caller, who comes after so many ticks, and may leave after so many more."""

    op: str
    after: int
    leaves: int | None


limits = st.sampled_from([None, None, 1, 1, 2])
bounds = st.sampled_from([None, None, 0, 1, 3])
delays = st.integers(0, 6)
recipes = st.builds(
    Recipe,
    st.lists(st.tuples(delays, st.lists(st.sampled_from(OPS), max_size=3)), max_size=3),
    st.sampled_from(["finish", "cancel"]),
)
menus = st.fixed_dictionaries(dict.fromkeys(OPS, recipes))
callers = st.lists(st.builds(Call, st.sampled_from(OPS), delays, st.none() | delays), min_size=2, max_size=12)


class Kitchen:
    """Loads as their recipes say, with slots as in a guard."""

    def __init__(
        self, recipes: dict[str, Recipe], max_loads: int | None, max_queued: int | None, *operations: Operation
    ) -> None:
        self.board = Scoreboard()
        self.limits = Limiters(max_loads, max_queued)
        self.limiters: set[Limiter] = set()  # an idle one is kept by nothing else
        self._max_loads = max_loads
        self._recipes = recipes
        self._operations = {op: operations[OPS.index(op) % len(operations)] for op in OPS}
        self._asked_within: set[str] = set()  # ops that a load ever asked for: their flights may need no slot
        self._running: list[Operation] = []  # loads that no other load waits for

    async def ask(self, op: str) -> None:
        """Join or launch."""
        flight = self.board.current(op)
        if flight is None:
            run = partial(self._run, self._recipes[op], self._operations[op])
            flight = self.board.launch(op, run, Counters(), self._recipes[op].on_abandon)
        await wait_one(flight)

    async def _run(self, recipe: Recipe, operation: Operation, flight: Flight[Any]) -> None:
        policy = operation.policy
        limiter = self.limits.of(operation.name, policy.max_loads, policy.max_queued)
        if limiter is None:
            await self._load(recipe)
            return
        self.limiters.add(limiter)
        async with limiter.slot(flight, operation):
            running = [] if flight.op in self._asked_within else [operation]
            self._running += running
            assert self._max_loads is None or len(self._running) <= self._max_loads
            assert not isinstance(policy.max_loads, int) or self._running.count(operation) <= policy.max_loads
            try:
                await self._load(recipe, refused=AssertionError)  # what a load with a slot waits for is not refused
            finally:
                for each in running:
                    self._running.remove(each)

    async def _load(self, recipe: Recipe, refused: type[Exception] = Overloaded) -> None:
        for after, ops in recipe.rounds:
            await ticks(after)
            self._asked_within.update(ops)
            outcomes = await asyncio.gather(*map(self.ask, ops), return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, AssertionError):
                    raise outcome
                assert refused is Overloaded or not isinstance(outcome, Overloaded)

    async def serve(self, call: Call) -> None:
        """Let one caller come and perhaps leave."""
        await ticks(call.after)
        asking = asyncio.create_task(self.ask(call.op))
        if call.leaves is not None:
            await ticks(call.leaves)
            asking.cancel()
        outcomes = await asyncio.gather(asking, return_exceptions=True)
        assert isinstance(outcomes[0], RecursiveLoad | Overloaded | asyncio.CancelledError | None)


@OFTEN
@given(menu=menus, calls=callers, limits=st.tuples(limits, limits, limits), bounds=st.tuples(bounds, bounds, bounds))
async def test_nobody_waits_for_ever_and_limits_hold(
    menu: dict[str, Recipe],
    calls: list[Call],
    limits: tuple[int | None, int | None, int | None],
    bounds: tuple[int | None, int | None, int | None],
) -> None:
    """Whatever asks for what within what, everything ends, with all slots free; and loads of callers keep the limits.

    Nothing here waits for time to pass, so that whoever has not ended after so many ticks never will.
    """
    operations = map(operation, ("one", "two"), limits[1:], bounds[1:])
    kitchen = Kitchen(menu, limits[0], bounds[0], *operations)

    serving = [asyncio.create_task(kitchen.serve(call)) for call in calls]
    for _ in range(PATIENCE):
        await asyncio.sleep(0)
        if all(task.done() for task in serving) and not kitchen.board.up:
            break
    else:
        for task in [*serving, *kitchen.board._next_steps()]:
            task.cancel()
        pytest.fail("somebody waits for ever")
    for task in serving:
        task.result()

    assert all("<Limiter 0 of" in repr(each) and " 0 queued" in repr(each) for each in kitchen.limiters)
    assert not any(each._lines for each in kitchen.limiters)


# One limiter, and what it promises each line


class Step(NamedTuple):
    """What happens next: a load comes, ends, is cancelled, or has waited for too long."""

    what: str
    line: str
    number: int  # which of those that it can happen to


class Canteen:
    """The loads of one limiter, one step after the other."""

    def __init__(self, max_loads: int, max_queued: int | None, *, is_partitioned: bool) -> None:
        self.limiter = Limiter(max_loads, max_queued=max_queued, is_partitioned=is_partitioned)
        self.running: dict[str, str] = {}  # loads, with their lines
        self.waiting: dict[str, str] = {}
        self.refused: list[str] = []
        self.began: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._max_loads = max_loads
        self._max_queued = max_queued
        self._is_partitioned = is_partitioned
        self._board = Scoreboard()
        self._ends: dict[str, asyncio.Event] = {}
        self._operations = {line: operation(line, None, None) for line in LINES}

    def held(self, line: str) -> int:
        """Return how many slots *line* has."""
        return list(self.running.values()).count(line)

    async def take(self, step: Step) -> None:
        """Take *step*, if there is something that it can happen to, and check what came of it."""
        waiting = dict(self.waiting)
        among = {"come": {"": ""}, "end": self.running, "leave": {**self.running, **self.waiting}, "late": self.waiting}
        loads = list(among[step.what])
        if loads:
            getattr(self, f"_{step.what}")(step.line, loads[step.number % len(loads)])
            self.began.clear()
            refused = len(self.refused)
            await ticks(6)
            self._check(step, waiting, self.refused[refused:])

    def _come(self, line: str, _: str) -> None:
        op = f"{line} {len(self._ends)}"
        self._ends[op] = asyncio.Event()
        self.waiting[op] = line
        flight = self._board.launch(op, partial(self._load, line), Counters(), "cancel")
        self.tasks[op] = asyncio.create_task(wait_one(flight))

    def _end(self, _: str, op: str) -> None:
        self._ends[op].set()

    def _leave(self, _: str, op: str) -> None:
        self.tasks[op].cancel()

    def _late(self, _: str, op: str) -> None:
        place = self._board.flights[op].queue_slot
        assert place is not None
        place.set_result("late")

    async def _load(self, line: str, flight: Flight[Any]) -> None:
        try:
            async with self.limiter.slot(flight, self._operations[line], line):
                del self.waiting[flight.op]
                self.running[flight.op] = line
                self.began.append(line)
                free = self._max_loads - len(self.running)
                assert not self._is_partitioned or self.held(line) <= free + 1, "it takes what is kept for others"
                try:
                    await self._ends[flight.op].wait()
                finally:
                    del self.running[flight.op]
        except Overloaded:
            self.refused.append(flight.op)
            raise
        finally:
            self.waiting.pop(flight.op, None)

    def _check(self, step: Step, before: dict[str, str], refused: list[str]) -> None:
        free = self._max_loads - len(self.running)
        assert free >= 0
        assert self._max_queued is None or len(self.waiting) <= self._max_queued
        for line in set(self.waiting.values()):
            assert free <= (self.held(line) if self._is_partitioned else 0), "a slot is free that a load waits for"
        for line in self.began:
            if line in before.values():  # not the newcomer: it has the slot of the line that has fewest
                assert all(self.held(line) <= self.held(other) + 1 for other in self.waiting.values())
        is_full = self._max_queued is not None and len(before) >= self._max_queued
        assert len(refused) <= 1
        assert not refused or step.what == "late" or (step.what == "come" and is_full)
        if refused and step.what == "come" and refused[0] in before:  # it was pushed out by a shorter line
            assert list(before.values()).count(before[refused[0]]) > list(before.values()).count(step.line) + 1


LINES = "abcd"
steps = st.builds(
    Step, st.sampled_from(["come", "come", "end", "leave", "late"]), st.sampled_from(LINES), st.integers(0, 20)
)


@OFTEN
@given(
    steps=st.lists(steps, max_size=40),
    max_loads=st.integers(1, 5),
    max_queued=st.none() | st.integers(0, 6),
    is_partitioned=st.booleans(),
)
async def test_slots_are_shared_evenly(
    steps: list[Step], max_loads: int, max_queued: int | None, *, is_partitioned: bool
) -> None:
    """No slot is lost or idle, the line with the fewest slots is next, and a load is refused only for a full queue.

    In the end no load has waited in vain: as running loads end, all that wait begin.
    """
    canteen = Canteen(max_loads, max_queued, is_partitioned=is_partitioned)
    for step in steps:
        await canteen.take(step)
    for _ in range(len(steps) + 1):
        for op in tuple(canteen.running):
            await canteen.take(Step("end", "", list(canteen.running).index(op)))
    outcomes = await asyncio.gather(*canteen.tasks.values(), return_exceptions=True)

    assert not [outcome for outcome in outcomes if isinstance(outcome, AssertionError)]
    assert (f"<Limiter 0 of {max_loads} taken, 0 queued>", {}) == (repr(canteen.limiter), canteen.limiter._lines)
