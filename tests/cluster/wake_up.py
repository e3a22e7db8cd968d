"""How soon the waiters of other processes have the answer, once a load is over.

    python tests/cluster/wake_up.py --rounds 20 --processes 8 --callers 1000

starts a server of its own. In each round one process loads a cold key while the callers of all others wait. The
loader returns; from this instant on it is measured how long it takes until the value is stored and each caller, in
whichever process, has it. A process's first caller shows what the wake-up costs, its last what a thousand tasks do.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).parents[2]))  # demo_api is run from the repository

from processes import Child, children, until
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from demo_api.servers import valkey_server

NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Figures:
    """Seconds from the loader's return, over all rounds."""

    def __init__(self) -> None:
        self.leaders: list[float] = []
        self.first: list[float] = []
        self.all: list[float] = []
        self.loads = 0

    def table(self, title: str) -> Table:
        """Return them as milliseconds."""
        table = Table(title=title)
        for name in ("from the loader's return until …", "count", "p50 ms", "p90 ms", "p99 ms", "max ms"):
            table.add_column(name, justify="left" if name.startswith("from") else "right")
        for name, seconds in (
            ("its own callers have it", self.leaders),
            ("the first caller of another process has it", self.first),
            ("a caller of another process has it", self.all),
        ):
            cuts = quantiles(seconds, n=100, method="inclusive")
            figures = (cuts[49], cuts[89], cuts[98], max(seconds))
            table.add_row(name, f"{len(seconds):,}", *(f"{figure * 1000:.1f}" for figure in figures))
        return table


async def play(workers: Sequence[Child], admin: Redis, namespace: str, key: int, callers: int) -> list[dict[str, Any]]:
    """Let the first process load, and the others wait for it; return what all of them got."""
    leader, *others = workers
    await leader.ask("close")
    await leader.tell("call", key=key, callers=callers)
    await leader.hears("loading")
    for worker in others:
        await worker.tell("call", key=key, callers=callers)
    for worker in workers:
        await worker.hears("called")
    lease = f"sg1:{{{namespace}:menu-{key}}}:l"

    async def is_waited_for() -> bool:
        return f"{await admin.get(lease)}".endswith("w'")

    await until(is_waited_for, "a process that waits for the other's load")
    await asyncio.sleep(0.2)  # by now the last of them waits, too
    await leader.tell("open")
    return [await worker.hears("landed") for worker in workers]


async def measure(url: str, rounds: int, processes: int, callers: int) -> Figures:
    """Play all rounds, each with another leader."""
    namespace, figures = uuid4().hex, Figures()
    shared = {
        "url": url,
        "admin_url": url,
        "namespace": namespace,
        "options": {"ttl": 30, "l2_ttl": 60},
        "guard": {"deadline": 5, "connect_timeout": 5},
    }
    settings = [{"name": name, **shared} for name in NAMES[:processes]]
    async with Redis.from_url(url) as admin, children("worker.py", settings) as workers:
        for key in range(rounds):
            turned = workers[key % processes :] + workers[: key % processes]
            landings = await play(turned, admin, namespace, key, callers)
            returned_at = landings[0]["returned_at"]
            waits = [[instant - returned_at for instant in landing["instants"]] for landing in landings]
            figures.leaders += waits[0]
            figures.first += [min(each) for each in waits[1:]]
            figures.all += [wait for each in waits[1:] for wait in each]
        figures.loads = int(await admin.get(f"loads:{namespace}") or 0)
    return figures


def main() -> int:
    """Measure, print, and return 1 if there was not one load a round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 20), ("processes", 8), ("callers", 1_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    with valkey_server() as server:
        figures = asyncio.run(measure(server.url, asked.rounds, asked.processes, asked.callers))
    console = Console()
    console.print(figures.table(f"{asked.processes} processes × {asked.callers:,} callers, {asked.rounds} rounds"))
    console.print(f"{figures.loads:,} loads in {asked.rounds:,} rounds")
    return 0 if figures.loads == asked.rounds else 1


if __name__ == "__main__":
    sys.exit(main())
