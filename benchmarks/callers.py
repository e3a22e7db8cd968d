"""Callers that come at random times, however long the others wait."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from stampede_guard import Overloaded


@dataclass
class Outcomes:
    """What the callers of some merchants got."""

    seconds: list[float] = field(default_factory=list)
    refused: int = 0

    async def of(self, call: Awaitable[object]) -> None:
        """Wait for *call*, and note what comes of it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await call
        except Overloaded:
            self.refused += 1
        else:
            self.seconds.append(loop.time() - began)

    def row(self) -> list[str]:
        """Return how many were answered, the median and the 99th percentile in milliseconds, how many were refused."""
        ordered = sorted(self.seconds)
        times = [f"{ordered[int(share * len(ordered))] * 1e3:,.0f}" if ordered else "" for share in (0.5, 0.99)]
        return [f"{len(ordered):,}", *times, f"{self.refused:,}"]


async def let_come(  # noqa: PLR0917  # most of it is the same for all
    callers: asyncio.TaskGroup,
    seconds: float,
    chance: random.Random,
    rate: float,
    outcomes: Outcomes,
    call: Callable[[], Awaitable[object]],
) -> None:
    """Let callers come for so many *seconds*.

    Args:
        callers: Where each of them gets a task.
        seconds: For how long they come.
        chance: What decides when.
        rate: How many come in a second.
        outcomes: Where it is noted what they get.
        call: What each of them does.
    """
    loop = asyncio.get_running_loop()
    due, end = loop.time(), loop.time() + seconds
    while due < end:
        callers.create_task(outcomes.of(call()))
        due += chance.expovariate(rate)
        await asyncio.sleep(max(due - loop.time(), 0))
