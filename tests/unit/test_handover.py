"""A second run of a loader beside a first that takes too long."""

import asyncio
from typing import Any

import pytest

from stampede_guard import ConfigurationError, Guard, LoadTimeout, coalesce, coalesce_many
from stampede_guard.testing import Gate


class Runs:
    """A loader whose runs stop at gates of their own, and then return their number or raise."""

    def __init__(self) -> None:
        self.gates = [Gate(), Gate(), Gate()]
        self.errors: list[Exception | None] = [None, None, None]
        self.begun = 0
        self.cancelled: list[int] = []

    async def load(self) -> int:
        number = self.begun
        self.begun += 1
        try:
            await self.gates[number].passage()
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        if (error := self.errors[number]) is not None:
            raise error
        return number


@pytest.fixture
def runs() -> Runs:
    """Return a loader."""
    return Runs()


@pytest.fixture
def guard() -> Guard:
    """Return a guard in memory."""
    return Guard()


def ask(guard: Guard, runs: Runs, **options: Any) -> asyncio.Task[int]:
    """Begin a call of which the second run begins at once."""
    return asyncio.ensure_future(guard.fetch("menu-7", runs.load, handover_after=0.001, **options))


@pytest.mark.parametrize("winner", [0, 1])
async def test_first_run_to_succeed_wins(winner: int, guard: Guard, runs: Runs) -> None:
    """All callers get what the faster run returns, and the other run is cancelled; there is no third."""
    calls = [ask(guard, runs) for _ in range(3)]
    await runs.gates[1].arrivals(1)

    runs.gates[winner].open()

    assert [winner] * 3 == await asyncio.gather(*calls)
    await asyncio.sleep(0)
    assert ([1 - winner], 2) == (runs.cancelled, runs.begun)
    stats = guard.stats()
    assert (2, 1, 1) == (stats.loads, stats.handovers, stats.executions)


async def test_quick_load_is_run_once(guard: Guard, runs: Runs) -> None:
    """A load that ends in time is the only one."""
    runs.gates[0].open()

    assert 0 == await guard.fetch("menu-7", runs.load, handover_after=10)
    assert (1, 0) == (guard.stats().loads, guard.stats().handovers)


async def test_failed_run_waits_for_the_other(guard: Guard, runs: Runs) -> None:
    """An error of one run is no answer as long as the other may succeed."""
    runs.errors = [OSError("first"), None, None]
    call = ask(guard, runs)
    await runs.gates[1].arrivals(1)

    runs.gates[0].open()
    await asyncio.sleep(0)
    runs.gates[1].open()

    assert 1 == await call


async def test_both_runs_fail(guard: Guard, runs: Runs) -> None:
    """If both fail, callers get the first run's error."""
    runs.errors = [OSError("first"), OSError("second"), None]
    call = ask(guard, runs)
    await runs.gates[1].arrivals(1)
    for gate in reversed(runs.gates):
        gate.open()

    with pytest.raises(OSError, match="first"):
        await call


async def test_one_budget_for_both_runs(guard: Guard, runs: Runs) -> None:
    """When the budget is used up both runs are cancelled."""
    with pytest.raises(LoadTimeout):
        await ask(guard, runs, load_timeout=0.02)

    await asyncio.sleep(0)
    assert [0, 1] == sorted(runs.cancelled)


async def test_run_that_ignores_its_cancellation(guard: Guard) -> None:
    """A run that goes on after it has lost disturbs nothing, and its error is not missed by asyncio."""
    gate, hung = Gate(), Gate()
    begun = 0

    async def load() -> int:
        nonlocal begun
        begun += 1
        number = begun
        if number == 1:
            try:
                await hung.passage()
            except asyncio.CancelledError:
                await gate.passage()
                raise OSError from None
        return number

    assert 2 == await guard.fetch("menu-7", load, handover_after=0.001)
    await gate.arrivals(1)
    gate.open()
    await asyncio.sleep(0)


async def test_wrong_handovers() -> None:
    """A handover that could never come is refused, and so is one for loaders of many."""
    with pytest.raises(ConfigurationError, match=r"^handover_after=5 is no less than load_timeout=5: "):
        coalesce(handover_after=5, load_timeout=5)
    with pytest.raises(ConfigurationError, match=r"^handover_after=: ids are loaded in batches"):
        coalesce_many(handover_after=5)
