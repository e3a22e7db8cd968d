"""A guard under all that can happen to it, beside a model of it that fits on a page."""

import asyncio
import gc
import sys
from dataclasses import dataclass, field
from typing import Any

from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from inside import timers_of

from stampede_guard import Guard, LoadCancelled
from stampede_guard._operations.policy import Policy
from stampede_guard.testing import FaultStore, ManualClock

TTL, L2_TTL = 10, 30
OPS = st.sampled_from(["a", "b"])
TICKS = st.integers(0, 8)


class NoMenuError(Exception):
    """A load's failure."""


@dataclass(eq=False)
class ModelFlight:
    """A load that is up."""

    op: str
    is_refresh: bool
    waiters: set[int] = field(default_factory=set)
    may_store: bool = True


class Model:
    """What a guard does, without tasks: everything happens at once."""

    def __init__(self, *, cancels: bool) -> None:
        self.cancels = cancels  # whether a load that everybody left is cancelled
        self.now = 0
        self.memory: dict[str, tuple[Any, int]] = {}
        self.store: dict[str, tuple[Any, int]] = {}
        self.current: dict[str, ModelFlight] = {}
        self.up: list[ModelFlight] = []
        self.outcomes: dict[int, Any] = {}

    def call(self, call: int, op: str) -> ModelFlight | None:
        """Answer *call*, or let it wait; return the flight if it launched one that has to load."""
        answer, until = self.memory.get(op, (None, 0))
        if self.now < until:
            self.outcomes[call] = answer
            return None
        if op in self.current:
            self.current[op].waiters.add(call)
            return None
        answer, until = self.store.get(op, (None, 0))
        if self.now < until:
            self.outcomes[call] = answer
            self.memory[op] = answer, min(until, self.now + TTL)
            return None
        return self._launch(call, op, is_refresh=False)

    def refresh(self, call: int, op: str) -> ModelFlight:
        """Let *call* wait for a refresh; return its flight."""
        self._overtake(op)
        return self._launch(call, op, is_refresh=True)

    def _launch(self, call: int, op: str, *, is_refresh: bool) -> ModelFlight:
        flight = self.current[op] = ModelFlight(op, is_refresh, {call})
        self.up.append(flight)
        return flight

    def invalidate(self, op: str) -> None:
        """Drop everything of *op*."""
        self._drop(op)
        self._overtake(op)

    def _drop(self, op: str) -> None:
        self.memory.pop(op, None)
        self.store.pop(op, None)
        for flight in self.up:
            flight.may_store &= flight.op != op

    def _overtake(self, op: str) -> None:
        self.current.pop(op, None)
        for flight in self.up:
            flight.may_store &= flight.op != op

    def land(self, flight: ModelFlight, outcome: Any) -> None:
        """End *flight*, with an answer unless *outcome* is a type of error."""
        self._remove(flight)
        if not isinstance(outcome, type):
            if flight.is_refresh and not flight.may_store:
                self._drop(flight.op)
                self.current.pop(flight.op, None)  # it may have read what is older
            if flight.may_store:
                self.memory[flight.op] = outcome, self.now + TTL
                self.store[flight.op] = outcome, self.now + L2_TTL
        self.outcomes.update(dict.fromkeys(flight.waiters, outcome))

    def leave(self, call: int) -> None:
        """Cancel *call*."""
        self.outcomes[call] = asyncio.CancelledError
        for flight in [flight for flight in self.up if call in flight.waiters]:
            flight.waiters.remove(call)
            if self.cancels and not flight.waiters:
                self._remove(flight)

    def _remove(self, flight: ModelFlight) -> None:
        self.up.remove(flight)
        if self.current.get(flight.op) is flight:
            del self.current[flight.op]


class GuardMachine(RuleBasedStateMachine):
    """Drives a guard, tick by tick, and its model."""

    factory: Any = None

    @initialize(cancels=st.booleans())
    def begin(self, *, cancels: bool) -> None:
        """Open a guard in a loop that runs only when it is told to."""
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self.factory)
        self.complaints: list[Any] = []
        self.loop.set_exception_handler(lambda _, complaint: self.complaints.append(complaint))
        self.clock = ManualClock(0)
        store = FaultStore(self.clock)
        self.guard = Guard(lambda: store, clock=self.clock)
        policy = Policy(ttl=TTL, l2_ttl=L2_TTL, jitter=0, on_abandon="cancel" if cancels else "finish")
        self.operation = self.guard._add_operation("menus", policy, annotation=lambda: int)
        self.loop.run_until_complete(self.guard.__aenter__())
        self.model = Model(cancels=cancels)
        self.gates: list[asyncio.Future[int]] = []
        self.gate_of: dict[ModelFlight, asyncio.Future[int]] = {}
        self.calls: list[asyncio.Task[int]] = []
        self.answers = 0

    async def _load(self) -> int:
        gate = self.loop.create_future()
        self.gates.append(gate)
        answer: int = await gate
        return answer

    def _step(self, ticks: int = 15) -> None:
        for _ in range(ticks):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def _start(self, call: Any) -> int:
        self.calls.append(self.loop.create_task(call))
        return len(self.calls) - 1

    def _launched(self, flight: ModelFlight | None) -> None:
        self._step()
        if flight is not None:
            self.gate_of[flight] = self.gates[-1]

    def _answer(self, flight: ModelFlight) -> int:
        self.answers += 1
        self.gate_of.pop(flight).set_result(self.answers)
        return self.answers

    def _waiting(self) -> list[int]:
        return [call for call, task in enumerate(self.calls) if not task.done()]

    @rule(op=OPS)
    def call(self, op: str) -> None:
        """Somebody calls."""
        call = self._start(self.guard._path.get(self.operation, op, self._load))
        self._launched(self.model.call(call, op))

    @rule(op=OPS)
    def refresh(self, op: str) -> None:
        """A caller refreshes, unless another refresh is up, which would be waited for: that has tests of its own."""
        if any(flight.op == op and flight.is_refresh for flight in self.model.up):
            return
        call = self._start(self.guard._path.refresh(self.operation, op, self._load))
        self._launched(self.model.refresh(call, op))

    @rule(op=OPS)
    def invalidate(self, op: str) -> None:
        """Somebody invalidates."""
        self.loop.run_until_complete(self.guard.invalidate(op))
        self.model.invalidate(op)

    @rule(seconds=st.integers(1, 12))
    def expire(self, seconds: int) -> None:
        """Time passes."""
        self.clock.advance(seconds)
        self.model.now += seconds

    @precondition(lambda self: self.model.up)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """A load returns."""
        flight = data.draw(st.sampled_from(self.model.up))
        self.model.land(flight, self._answer(flight))
        self._step()

    @precondition(lambda self: self.model.up)
    @rule(data=st.data(), error=st.sampled_from([NoMenuError, asyncio.CancelledError]))
    def fail(self, data: st.DataObject, error: type[BaseException]) -> None:
        """A load raises."""
        flight = data.draw(st.sampled_from(self.model.up))
        self.gate_of.pop(flight).set_exception(error())
        self.model.land(flight, error if error is NoMenuError else LoadCancelled)
        self._step()

    @precondition(lambda self: self._waiting())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Some of those who wait are cancelled at once."""
        for call in data.draw(st.sets(st.sampled_from(self._waiting()), min_size=1)):
            self.calls[call].cancel()
            self.model.leave(call)
        self._step()

    @precondition(lambda self: any(flight.waiters for flight in self.model.up))
    @rule(data=st.data(), ticks=TICKS)
    def land_and_cancel(self, data: st.DataObject, ticks: int) -> None:
        """A load returns, and some ticks later one of those who wait for it is cancelled."""
        ups = [flight for flight in self.model.up if flight.waiters]
        flight = data.draw(st.sampled_from(ups))
        if flight.is_refresh and not flight.may_store:
            return  # nothing tells whether it has dropped what is older before it is cancelled
        call = data.draw(st.sampled_from(sorted(flight.waiters)))
        answer = self._answer(flight)
        self._step(ticks)
        was_cancelled = self.calls[call].cancel()
        self._step()
        is_abandoned = self.model.cancels and flight.waiters == {call} and was_cancelled
        if is_abandoned and self._peek(flight.op) != answer:  # cancelled before it could store
            self.model.leave(call)
        else:
            self.model.land(flight, answer)
            self.model.outcomes[call] = asyncio.CancelledError if was_cancelled else answer

    @precondition(lambda self: self.model.up)
    @rule(data=st.data(), ticks=TICKS)
    def land_and_invalidate(self, data: st.DataObject, ticks: int) -> None:
        """A load returns, and some ticks later its op is invalidated."""
        flight = data.draw(st.sampled_from(self.model.up))
        self.model.land(flight, self._answer(flight))
        self._step(ticks)
        self.invalidate(flight.op)
        self._step()

    @precondition(lambda self: any(flight.may_store for flight in self.model.current.values()))
    @rule(data=st.data(), ticks=TICKS)
    def land_and_call(self, data: st.DataObject, ticks: int) -> None:
        """A load returns, and some ticks later somebody calls: they get that answer, from the flight or from memory."""
        flight = data.draw(st.sampled_from([one for one in self.model.current.values() if one.may_store]))
        answer = self._answer(flight)
        self._step(ticks)
        call = self._start(self.guard._path.get(self.operation, flight.op, self._load))
        flight.waiters.add(call)
        self.model.land(flight, answer)
        self._step()

    def _peek(self, op: str) -> Any:
        async def peek() -> Any:
            return self.guard.peek(op)

        entry = self.loop.run_until_complete(peek())
        return None if entry is None else entry.value

    @invariant()
    def outcomes_agree(self) -> None:
        """Everybody who got something got what the model says, and the others wait."""
        for call, task in enumerate(self.calls):
            assert task.done() == (call in self.model.outcomes), call
            if task.done():
                error = asyncio.CancelledError() if task.cancelled() else task.exception()
                assert self.model.outcomes[call] == (task.result() if error is None else type(error))

    @invariant()
    def state_agrees(self) -> None:
        """Memory, scoreboard and what is in flight are the model's."""
        for op in ("a", "b"):
            answer, until = self.model.memory.get(op, (None, 0))
            assert self._peek(op) == (answer if self.model.now < until else None)
        assert len(self.model.up) == self.guard.stats().in_flight
        (site,) = self.guard._states._living()
        assert set(self.model.current) == set(site.board.flights)
        assert len(self.model.up) == len(site.board.up)

    def teardown(self) -> None:
        """Let everything land, and leave; nothing is left."""
        if not hasattr(self, "loop"):
            return
        for flight in [*self.model.up]:
            self.model.land(flight, self._answer(flight))
        self._step()
        self.outcomes_agree()
        self.loop.run_until_complete(self.guard.__aexit__(None, None, None))
        left = asyncio.all_tasks(self.loop)
        timers = timers_of(self.loop)
        self.loop.close()
        gc.collect(1)
        assert (set(), [], []) == (left, timers, self.complaints)


OFTEN = settings(max_examples=examples(50), stateful_step_count=40)

TestGuardMachine = GuardMachine.TestCase
TestGuardMachine.settings = OFTEN

if sys.version_info >= (3, 12):

    class EagerGuardMachine(GuardMachine):
        """The same with eager tasks."""

        factory = staticmethod(asyncio.eager_task_factory)

    TestEagerGuardMachine = EagerGuardMachine.TestCase
    TestEagerGuardMachine.settings = OFTEN
