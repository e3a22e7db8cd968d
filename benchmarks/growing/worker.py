"""One of several processes on one Redis.

It takes a command from each line of its standard input, and answers with a line on its output.
"""

import asyncio
import sys
from collections.abc import Awaitable
from time import monotonic
from typing import Any

import msgspec

from stampede_guard import Guard, coalesce

CALLERS = 20  # of each process, together
LOAD = 0.05  # seconds
LIFE = 0.25  # seconds, in Redis; nothing is kept in memory
LONG = 600.0
KEYS = 200  # keys that are read
READERS = 32  # of each process, each reading again and again
PATIENCE = 5.0  # seconds: a busy machine makes Redis slow here, and not unavailable


class Worker:
    """The commands of one process.

    Args:
        guard: An open guard.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._ended_at: list[float] = []

        async def load() -> str:
            await asyncio.sleep(LOAD)
            self._ended_at.append(monotonic())
            return "menu"

        # No jitter, so that the value has expired when the next round begins.
        self._load: dict[str, Any] = {
            "leases": coalesce("with-leases", guard=guard, l2_ttl=LIFE, jitter=0)(load),
            "no leases": coalesce("without-leases", guard=guard, l2_ttl=LIFE, jitter=0, lease=False)(load),
        }

        @coalesce("read-{key}", guard=guard, l2_ttl=LONG)
        async def read(key: int) -> str:
            return "menu " * 20 if key is not None else ""

        self._read = read

    async def expire(self, kind: str, at: float) -> dict[str, object]:
        """Call together at the instant *at*; return when loads ended here, and when calls did."""
        load, answered_at = self._load[kind], []
        self._ended_at.clear()
        await asyncio.sleep(at - monotonic())

        async def call() -> None:
            await load()
            answered_at.append(monotonic())

        await together(call() for _ in range(CALLERS))
        return {"ended_at": self._ended_at, "answered_at": answered_at}

    async def warm(self) -> dict[str, object]:
        """Store the values that will be read."""
        for key in range(KEYS):
            await self._read(key)
        return {}

    async def read(self, at: float, seconds: float) -> dict[str, object]:
        """Read from the instant *at* for so many seconds; return how many reads Redis answered."""
        before = self._guard.stats().l2_hits
        await asyncio.sleep(at - monotonic())

        async def go_on(key: int) -> None:
            while monotonic() < at + seconds:
                key = (key + READERS) % KEYS
                await self._read(key)

        await together(go_on(number) for number in range(READERS))
        return {"reads": self._guard.stats().l2_hits - before}


async def together(calls: Any) -> None:
    """Await all *calls*, each in a task."""

    async def one(call: Awaitable[None]) -> None:
        await call

    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(one(call))


async def main(url: str) -> None:
    """Execute commands until the input ends."""
    async with Guard(url, namespace="growth", deadline=PATIENCE, connect_timeout=PATIENCE) as guard:
        worker = Worker(guard)
        say({})
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
            what, arguments = msgspec.json.decode(line)
            say(await getattr(worker, what)(*arguments))


def say(answer: dict[str, object]) -> None:
    """Answer in one line."""
    print(msgspec.json.encode(answer).decode(), flush=True)  # noqa: T201  # the parent reads it


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
