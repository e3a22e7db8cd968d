"""The ops that are called most."""

import asyncio
from dataclasses import dataclass

from .._loops import LoopStates
from .._memory.counted import counting
from .._operations.options import Duration, count, seconds


@dataclass(frozen=True, slots=True)
class HotKey:
    """One of the ops that are called most.

    Attributes:
        op: The op id.
        calls: How many calls there were while they were counted.
    """

    op: str
    calls: int


async def hot_keys(states: LoopStates, limit: int, duration: Duration) -> list[HotKey]:
    """Count the calls of the running event loop for *duration*, and return the *limit* ops with the most.

    Raises:
        ConfigurationError: *limit* is no whole number above zero, or *duration* not more than zero.
        GuardClosed: the guard has a store and is not open.
    """
    count("limit", limit)
    pause = seconds("seconds", duration)
    with counting(states.running().memory) as counter:
        await asyncio.sleep(pause)
    return [HotKey(op, calls) for op, calls in counter.top(limit)]
