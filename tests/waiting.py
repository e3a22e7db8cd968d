"""Waiting for a state: in the event loop alone, or of a real server."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic


async def eventually(is_so: Callable[[], object]) -> None:
    """Run the event loop until *is_so* holds; for what needs no server."""
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0)


async def ticks(number: int) -> None:
    """Let so many iterations of the event loop pass."""
    for _ in range(number):
        await asyncio.sleep(0)


async def until(is_so: Callable[[], object], what: str, deadline: float = 15.0) -> float:
    """Poll *is_so* until it holds; return the seconds that it took."""
    started_at = monotonic()
    while not is_so():
        assert monotonic() - started_at < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.005)
    return monotonic() - started_at


async def until_there(is_so: Callable[[], Awaitable[object]], what: str, deadline: float = 15.0) -> None:
    """Poll *is_so*, which asks a server, until it holds."""
    give_up_at = monotonic() + deadline
    while not await is_so():
        assert monotonic() < give_up_at, f"waited in vain for {what}"
        await asyncio.sleep(0.005)
