"""The hot list: what a cluster calls most, for processes that start.

The list is a value like others: one op, whose value each taking part stores every few seconds, the last one for all.
It names for each op its operation and its tags. That is all that a read of the store needs, so a process that starts
takes the values without a call: no argument has to be kept, and no loader runs.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from contextvars import Context
from itertools import islice
from random import random
from typing import TypeAlias

from .._flights.waiting import wait_one
from .._loops import LoopState, LoopStates
from .._memory.counted import counting
from .._operations.operation import Operation
from .._operations.options import count
from .._operations.policy import Policy
from .._operations.registry import Registry
from .._path import DataPath
from .._stats import Counters
from ..errors import ConfigurationError, StampedeGuardError

_OP = "stampede_guard.hot-list"
_LIFE = 60.0  # seconds that the list stays in the store
_PAUSE = 2.0  # seconds between samples, after each of which the list is stored
_STEP, _STEPS = 0.05, 60  # seconds after which it is seen whether a sample is large enough, and how often at most
_ENOUGH = 2_000  # calls: a busy process counts for a moment only
_FADING = 0.95  # of the older samples' weight, that is left with each sample
_AT_ONCE = 256  # reads of the store under way
_CHORE = "hot list"

# For each op: the name of its operation, its tags, and how often it was called, for the order.
HotList: TypeAlias = list[tuple[str, str, list[str], float]]


async def warm_hot(states: LoopStates, path: DataPath, registry: Registry, limit: int) -> int:
    """Do what `Guard.warm_hot` says.

    Raises:
        ConfigurationError: *limit* is no whole number above zero, or the guard has no store.
        GuardClosed: the guard is not open.
    """
    count("limit", limit)
    if not states.needs_entering:
        message = "warm_hot: the list is shared through the store; this guard has none"
        raise ConfigurationError(message)
    state = states.running()
    keeper = HotListKeeper(state, path, registry, limit)
    taken = await keeper.take()
    if _CHORE not in state.chores:
        run = keeper.run()
        state.chores[_CHORE] = asyncio.get_running_loop().create_task(run, name=_CHORE, context=Context())
    return taken


class HotListKeeper:
    """One event loop's part in the hot list.

    Args:
        state: The loop's part of the guard.
        path: The guard's data path.
        registry: The guard's operations.
        limit: How many ops are taken, and stored.

    Attributes:
        scores: How often each op was called lately, as far as samples tell.
    """

    def __init__(self, state: LoopState, path: DataPath, registry: Registry, limit: int) -> None:
        self._state = state
        self._path = path
        self._registry = registry
        self._limit = limit
        policy = Policy(l2_ttl=_LIFE, load_timeout=None)
        self._operation = Operation(_CHORE, policy, Counters(), annotation=lambda: HotList)
        self.scores: dict[str, float] = {}

    async def take(self) -> int:
        """Put what the store has of the list's ops into L1; return how many values there were."""
        found = await wait_one(self._path.take_stored(self._operation, _OP, ()))
        hot: HotList = [] if found is None else found[0][: self._limit]
        self.scores = {op: score for _, op, _, score in hot}
        operations = {operation.name: operation for operation in self._registry.operations()}
        taken, rest = 0, iter(hot)
        while batch := list(islice(rest, _AT_ONCE)):
            flights = [
                self._path.take_stored(operations[name], op, tuple(tags))
                for name, op, tags, _ in batch
                if name in operations and operations[name].policy.l2_ttl is not None and op not in self._state.memory
            ]
            for flight in flights:
                taken += await wait_one(flight) is not None
        return taken

    async def run(self) -> None:
        """Sample the calls, and store the list, again and again."""
        while True:
            await asyncio.sleep(_PAUSE * (1 - random() / 4))  # noqa: S311  # no secret
            await self.sample()
            with suppress(StampedeGuardError):  # the next list replaces this one
                await self.store()

    async def sample(self) -> None:
        """Count some calls; older ones count for less."""
        with counting(self._state.memory) as counter:
            for _ in range(_STEPS):
                await asyncio.sleep(_STEP)
                if sum(counter.calls.values()) >= _ENOUGH:
                    break
        scores = {op: score * _FADING for op, score in self.scores.items()}
        for op, calls in counter.calls.items():
            scores[op] = scores.get(op, 0.0) + calls
        best = sorted(scores.items(), key=lambda each: -each[1])
        self.scores = dict(best[: 2 * self._limit])

    async def store(self) -> None:
        """Store the list, if it has any op."""
        hot = list(islice(self._hot(), self._limit))
        if hot:

            async def load() -> HotList:
                return hot

            await self._path.refresh(self._operation, _OP, load, replaces=False)

    def _hot(self) -> Iterator[tuple[str, str, list[str], float]]:
        """Yield the ops that are in L1 and in the store, the most called first."""
        operations = {operation.lineage.generation: operation for operation in self._registry.operations()}
        for op, score in self.scores.items():
            generation, tags = self._state.memory.origin_of(op)
            operation = None if generation is None else operations.get(generation)
            if operation is not None and operation.policy.l2_ttl is not None:
                yield operation.name, op, list(tags), score
