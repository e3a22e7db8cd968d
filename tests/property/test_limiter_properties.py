"""Random loads within loads, joins and cancellations: nobody waits for ever, and the limits hold."""

import asyncio
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stampede_guard import RecursiveLoad, Scoreboard
from stampede_guard._flights.flight import Flight
from stampede_guard._flights.limiter import Limiter, Limiters
from stampede_guard._flights.waiting import wait_one
from stampede_guard._operations.options import OnAbandon
from stampede_guard._stats import Counters

OPS = "abcdef"
PATIENCE = 2_000  # iterations of the loop in which everything has to have ended

OFTEN = settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Recipe(NamedTuple):
    """What one op's load does: rounds of ops that it asks for at once, each after so many ticks."""

    rounds: list[tuple[int, list[str]]]
    on_abandon: OnAbandon


class Limit:
    """An operation, as far as its limit goes."""

    def __init__(self, name: str, max_loads: int | None) -> None:
        self.name = name
        self.max_loads = max_loads


class Call(NamedTuple):
    """One caller, who comes after so many ticks, and may leave after so many more."""

    op: str
    after: int
    leaves: int | None


limits = st.sampled_from([None, None, 1, 1, 2])
ticks = st.integers(0, 6)
recipes = st.builds(
    Recipe,
    st.lists(st.tuples(ticks, st.lists(st.sampled_from(OPS), max_size=3)), max_size=3),
    st.sampled_from(["finish", "cancel"]),
)
menus = st.fixed_dictionaries(dict.fromkeys(OPS, recipes))
callers = st.lists(st.builds(Call, st.sampled_from(OPS), ticks, st.none() | ticks), min_size=2, max_size=12)


async def pass_ticks(number: int) -> None:
    """Let so many iterations of the loop pass."""
    for _ in range(number):
        await asyncio.sleep(0)


class Kitchen:
    """Loads as their recipes say, with slots as in a guard."""

    def __init__(self, recipes: dict[str, Recipe], max_loads: int | None, *operations: Limit) -> None:
        self.board = Scoreboard()
        self.limits = Limiters(max_loads)
        self.limiters: set[Limiter] = set()  # an idle one is kept by nothing else
        self._max_loads = max_loads
        self._recipes = recipes
        self._operations = {op: operations[OPS.index(op) % len(operations)] for op in OPS}
        self._asked_within: set[str] = set()  # ops that a load ever asked for: their flights may need no slot
        self._running: list[Limit] = []  # loads that nobody but callers asked for

    async def ask(self, op: str) -> None:
        """Join or launch."""
        flight = self.board.current(op)
        if flight is None:
            run = partial(self._run, self._recipes[op], self._operations[op])
            flight = self.board.launch(op, run, Counters(), self._recipes[op].on_abandon)
        await wait_one(flight)

    async def _run(self, recipe: Recipe, operation: Limit, flight: Flight[Any]) -> None:
        limiter = self.limits.of(operation.name, operation.max_loads)
        if limiter is None:
            await self._load(recipe)
            return
        self.limiters.add(limiter)
        async with limiter.slot(flight):
            running = [] if flight.op in self._asked_within else [operation]
            self._running += running
            assert self._max_loads is None or len(self._running) <= self._max_loads
            assert operation.max_loads is None or self._running.count(operation) <= operation.max_loads
            try:
                await self._load(recipe)
            finally:
                for each in running:
                    self._running.remove(each)

    async def _load(self, recipe: Recipe) -> None:
        for after, ops in recipe.rounds:
            await pass_ticks(after)
            self._asked_within.update(ops)
            outcomes = await asyncio.gather(*map(self.ask, ops), return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, AssertionError):
                    raise outcome

    async def serve(self, call: Call) -> None:
        """Let one caller come and perhaps leave."""
        await pass_ticks(call.after)
        asking = asyncio.create_task(self.ask(call.op))
        if call.leaves is not None:
            await pass_ticks(call.leaves)
            asking.cancel()
        outcomes = await asyncio.gather(asking, return_exceptions=True)
        assert isinstance(outcomes[0], RecursiveLoad | asyncio.CancelledError | None)


@OFTEN
@given(menu=menus, calls=callers, limits=st.tuples(limits, limits, limits))
async def test_nobody_waits_for_ever_and_limits_hold(
    menu: dict[str, Recipe], calls: list[Call], limits: tuple[int | None, ...]
) -> None:
    """Whatever asks for what within what, everything ends, with all slots free; and loads of callers keep the limits.

    Nothing here waits for time to pass, so that whoever has not ended after so many ticks never will.
    """
    guard, *operations = limits
    kitchen = Kitchen(menu, guard, *map(Limit, ("one", "two"), operations))

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
