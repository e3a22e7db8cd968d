"""Test tools: a clock, a gate, a store that fails."""

import asyncio
from collections.abc import Callable

from .stores import Stored

__all__ = ("FaultStore", "Gate", "ManualClock")


class ManualClock:
    """A monotonic clock that only `advance` moves: `Guard(clock=clock)`."""

    def __init__(self, now: float = 1_000.0) -> None:
        self._now = now

    def __call__(self) -> float:
        """Return the present instant, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass."""
        self._now += seconds


class Gate:
    """Holds loaders until it is opened, and counts those that have arrived.

    A loader does `await gate.passage()`. The test does `await gate.arrivals(1)`, checks what it wants to, and calls
    `gate.open()`.

    Attributes:
        arrived: How many loaders have arrived.
    """

    def __init__(self) -> None:
        self.arrived = 0
        self._opened = asyncio.Event()
        self._changed = asyncio.Condition()

    async def passage(self) -> None:
        """Arrive, and wait until the gate is open."""
        async with self._changed:
            self.arrived += 1
            self._changed.notify_all()
        await self._opened.wait()

    async def arrivals(self, number: int) -> None:
        """Wait until *number* loaders have arrived, counted from the beginning."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.arrived >= number)

    def open(self) -> None:
        """Let all loaders pass, now and later."""
        self._opened.set()


class FaultStore:
    """A store in memory that can be made to fail or to hang: `Guard(lambda: store)`.

    It is for tests of a service without its Redis; it does not behave like Redis in other respects.

    Args:
        clock: Monotonic seconds.

    Attributes:
        error: If set, every operation raises it.
        gate: If set, every operation waits for it.
        contents: The envelopes, and the instants of *clock* at which they expire, by key.
    """

    name = "FaultStore"
    concurrency = 64

    def __init__(self, clock: Callable[[], float]) -> None:
        self.error: Exception | None = None
        self.gate: Gate | None = None
        self.contents: dict[str, tuple[bytes, float]] = {}
        self._clock = clock

    async def open(self) -> None:
        """Connect, which fails while `error` is set."""
        await self._pass()

    async def read(self, key: str) -> Stored | None:
        """Return what is stored under *key*."""
        await self._pass()
        envelope, until = self.contents.get(key, (b"", 0.0))
        left = until - self._clock()
        return Stored(envelope, left) if left > 0 else None

    async def write(self, key: str, envelope: bytes, ttl: float) -> None:
        """Store *envelope* for *ttl* seconds."""
        await self._pass()
        self.contents[key] = envelope, self._clock() + ttl

    async def delete(self, key: str) -> None:
        """Delete *key*."""
        await self._pass()
        self.contents.pop(key, None)

    async def aclose(self) -> None:
        """Do nothing: `contents` stays, for a guard that is entered again."""

    async def _pass(self) -> None:
        if self.gate is not None:
            await self.gate.passage()
        if self.error is not None:
            raise self.error
