"""One slow merchant among 200, with and without `partition`.

DoorDash's engineers wrote of their point-of-sale service that one merchant's slow API took all workers, and that orders
for the others piled up. Here a load is a statement that sleeps in a real Postgres, 100 times as long for one merchant.
Needs the demo's requirements, for the server.

Run: python -m benchmarks.merchants [--seconds 8]
"""

import argparse
import asyncio
import random
from functools import partial
from itertools import count
from typing import Any

import asyncpg
from rich.console import Console
from rich.table import Table

from demo_api.servers import embedded_servers
from stampede_guard import Guard, coalesce

from .callers import Outcomes, let_come

MERCHANTS = 200
SLOTS = 16
USUAL, SLOW = 0.005, 0.5  # seconds that a backend takes
RATE, SLOW_RATE = 300.0, 40.0  # calls a second, of all other merchants and of the slow one
QUEUE_TIMEOUT = 2.0
SLOW_MERCHANT = 0
VARIANTS: dict[str, dict[str, Any]] = {
    "no limit": {},
    f"max_loads={SLOTS}": {"max_loads": SLOTS, "queue_timeout": QUEUE_TIMEOUT},
    "the same, and partition": {
        "max_loads": SLOTS,
        "queue_timeout": QUEUE_TIMEOUT,
        "partition": "merchant:{merchant_id}",
    },
}


async def run(pool: asyncpg.Pool, seconds: float, options: dict[str, Any]) -> tuple[Outcomes, Outcomes]:
    """Let callers come for so many *seconds*; return what those of the others and of the slow merchant got."""
    guard, numbers, chance = Guard(), count(), random.Random(7)  # noqa: S311  # the same calls in each run

    @coalesce("orders-{merchant_id}-{number}", guard=guard, **options)
    async def orders(merchant_id: int, number: int) -> None:  # noqa: ARG001  # each order is another key
        await pool.execute("SELECT pg_sleep($1)", SLOW if merchant_id == SLOW_MERCHANT else USUAL)

    others, slow = Outcomes(), Outcomes()
    async with asyncio.TaskGroup() as callers:
        come = partial(let_come, callers, seconds, chance)
        callers.create_task(come(RATE, others, lambda: orders(chance.randrange(1, MERCHANTS), next(numbers))))
        callers.create_task(come(SLOW_RATE, slow, lambda: orders(SLOW_MERCHANT, next(numbers))))
    return others, slow


async def measure(url: str, seconds: float) -> Table:
    """Return the table of all variants."""
    table = Table(title=f"{MERCHANTS} merchants, one {SLOW / USUAL:.0f} times slower; {SLOTS} connections; ms")
    table.add_column("loads")
    for who in ("others", "slow"):
        for heading in ("answered", "p50", "p99", "refused"):
            table.add_column(f"{who}: {heading}", justify="right")
    async with asyncpg.create_pool(url, min_size=SLOTS, max_size=SLOTS) as pool:
        for name, options in VARIANTS.items():
            others, slow = await run(pool, seconds, options)
            table.add_row(name, *others.row(), *slow.row())
    return table


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="for how long callers come, for each variant")
    seconds = parser.parse_args().seconds
    with embedded_servers(redis=False) as urls:
        Console(width=140).print(asyncio.run(measure(urls.postgres, seconds)))


if __name__ == "__main__":
    main()
