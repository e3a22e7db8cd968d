"""A database whose capacity falls and comes back, behind each `max_loads`.

The capacity is 16, then 4, then 16. A load is a statement in a real Postgres that takes one of N advisory locks, and
sleeps while it holds it. So N of them run at a time, and the others wait in the database, each with a connection.
Callers come at a steady rate, which is three quarters of what 16 locks bear, and three times what 4 bear. Needs the
demo's requirements, for the server.

Run: python -m benchmarks.capacity [--seconds 6]
"""

import argparse
import asyncio
import random
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import asyncpg
from rich.console import Console
from rich.table import Table

from demo_api.servers import embedded_servers
from stampede_guard import AdaptiveLimit, Guard, coalesce

from .callers import Outcomes, let_come

PHASES = (16, 4, 16)
LOAD = 0.04  # seconds that a load takes which holds a lock
RATE = 300.0  # calls a second
CONNECTIONS = 64
QUEUE_TIMEOUT = 0.5
VARIANTS: dict[str, dict[str, Any]] = {
    "no limit": {},
    "4": {"max_loads": 4, "queue_timeout": QUEUE_TIMEOUT},
    "16": {"max_loads": 16, "queue_timeout": QUEUE_TIMEOUT},
    "64": {"max_loads": 64, "queue_timeout": QUEUE_TIMEOUT},
    "AdaptiveLimit(64, min=4)": {"max_loads": AdaptiveLimit(64, min=4), "queue_timeout": QUEUE_TIMEOUT},
}
SCHEMA = """
    CREATE OR REPLACE FUNCTION pg_temp.load(locks int, preferred int, seconds float8) RETURNS void AS $$
    BEGIN
        FOR number IN 1..locks LOOP
            IF pg_try_advisory_xact_lock((preferred + number) % locks) THEN
                PERFORM pg_sleep(seconds);
                RETURN;
            END IF;
        END LOOP;
        PERFORM pg_advisory_xact_lock(preferred % locks);
        PERFORM pg_sleep(seconds);
    END $$ LANGUAGE plpgsql
"""


class Database:
    """The database, as the loads see it.

    Attributes:
        locks: How many loads it runs at a time.
        seconds: How long those took that have ended since it was last asked.
        running: How many there are now.
        most: How many there were at most.
    """

    def __init__(self, pool: asyncpg.Pool) -> None:
        self.locks = PHASES[0]
        self.seconds: list[float] = []
        self.running = self.most = 0
        self._pool = pool

    async def load(self, number: int) -> None:
        """Run one load."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._pool.execute("SELECT pg_temp.load($1, $2, $3)", self.locks, number, LOAD)
        finally:
            self.running -= 1
            self.seconds.append(loop.time() - began)

    def row(self) -> list[str]:
        """Return how long a load took in milliseconds, and how many there were at most, since the last call."""
        taken, most = self.seconds, self.most
        self.seconds, self.most = [], self.running
        return [f"{median(taken) * 1e3:,.0f}" if taken else "", f"{most}"]


async def run(pool: asyncpg.Pool, seconds: float, options: dict[str, Any]) -> list[list[str]]:
    """Let callers come for so many *seconds* in each phase; return a row of each."""
    guard, numbers, chance = Guard(), count(), random.Random(7)  # noqa: S311  # the same calls in each run
    database, rows = Database(pool), list[list[str]]()

    @coalesce("item-{number}", guard=guard, load_timeout=None, **options)
    async def item(number: int) -> None:
        await database.load(number)

    async with asyncio.TaskGroup() as callers:
        come = partial(let_come, callers, seconds, chance, RATE)
        for locks in PHASES:
            database.locks = locks
            outcomes = Outcomes()
            await come(outcomes, lambda: item(next(numbers)))
            rows.append([f"{locks}", *outcomes.row(), *database.row()])
    return rows


async def _set_up(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    await connection.execute(SCHEMA)


async def measure(url: str, seconds: float, variants: dict[str, dict[str, Any]]) -> Table:
    """Return the table of all *variants*."""
    title = f"{RATE:.0f} calls a second, loads of {LOAD * 1e3:.0f} ms; {seconds:g} s for each row"
    table = Table(title=title, caption="those that wait at the end of a phase are in no row")
    table.add_column("max_loads")
    headings = ("capacity", "answered", "p50, ms", "p99, ms", "refused", "in the database: p50, ms", "loads at most")
    for heading in headings:
        table.add_column(heading, justify="right")
    async with asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS, init=_set_up) as pool:
        for name, options in variants.items():
            for row in await run(pool, seconds, options):
                table.add_row(name, *row)
            table.add_section()
    return table


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each phase")
    seconds = parser.parse_args().seconds
    with embedded_servers(redis=False) as urls:
        Console(width=140).print(asyncio.run(measure(urls.postgres, seconds, VARIANTS)))


if __name__ == "__main__":
    main()
