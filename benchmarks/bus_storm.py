"""What a storm of invalidations costs a process that receives it.

A script on the server publishes them in one go, so that only the receiver is measured: its CPU time
for each message, and the longest stall of its event loop. Needs the demo's requirements, for the
server.

Run: python -m benchmarks.bus_storm [--messages 100000]
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from demo_api.servers import valkey_server
from stampede_guard import Guard

NAMESPACE = "storm"
HELD = 1_000
TIMEOUT = 120.0
PUBLISH = """
    for number = 1, tonumber(ARGV[1]) do
      redis.call('PUBLISH', 'sg1:storm:bus', 'i' .. string.rep('z', 22) .. ARGV[2] .. number)
    end
    redis.call('PUBLISH', 'sg1:storm:bus', 'i' .. string.rep('z', 22) .. 'the-end')
"""


class Stall:
    """The longest time between two steps of the event loop."""

    def __init__(self) -> None:
        self.longest = 0.0

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Watch the loop while the block runs."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0)
            self.longest = max(self.longest, time.perf_counter() - before)


async def load() -> bytes:
    """Return the cached value."""
    return b"menu"


async def measure(url: str, messages: int, prefix: str) -> tuple[float, float, float]:
    """Return CPU seconds, seconds in all and the longest stall, for *messages* with *prefix*."""
    async with Guard(url, namespace=NAMESPACE) as guard, Redis.from_url(url) as admin:
        ends = "the-end"
        for op in (ends, *(f"held-{number}" for number in range(HELD))):
            await guard.fetch(op, load, ttl=600, l2_ttl=600, returns=bytes)
        stall = Stall()
        busy, began = time.process_time(), time.perf_counter()
        async with asyncio.timeout(TIMEOUT):
            await admin.eval(PUBLISH, 0, messages, prefix)
            busy = time.process_time()
            async with stall.watched():
                while guard.peek(ends) is not None:  # noqa: ASYNC110  # L1 announces nothing
                    await asyncio.sleep(0.001)
        return time.process_time() - busy, time.perf_counter() - began, stall.longest


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="invalidations in the burst")
    messages = parser.parse_args().messages
    table = Table(title=f"{messages:,} invalidations in one burst")
    for heading in ("the process holds", "CPU, µs a message", "in all, s", "longest stall of the loop, ms"):
        table.add_column(heading, justify="right")
    with valkey_server() as server:
        for prefix, title in (("other-", "none of them"), ("held-", f"{HELD:,} of them")):
            busy, total, stall = asyncio.run(measure(server.url, messages, prefix))
            table.add_row(title, f"{busy / messages * 1e6:.1f}", f"{total:.2f}", f"{stall * 1e3:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
