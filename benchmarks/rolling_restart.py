"""The first seconds of a process that restarts.

Three processes serve calls at a constant rate, over one Valkey that has all values. They are
replaced one by one, while the others go on: with the hot list, and without. For each new process,
the time of its first calls is compared with that of its later ones. Needs the demo's requirements, for the server.

Run: python -m benchmarks.rolling_restart
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from itertools import accumulate
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from demo_api.servers import valkey_server
from stampede_guard import Guard, coalesce

PROCESSES = 3
KEYS = 5_000
RATE = 400  # calls a second of each process
SETTLING = 9.0  # seconds: by then the hot list was stored
FIRST, MEASURED = 1.0, 2.5  # seconds of a process's traffic that are its first, and that are measured
SKEW = 1.1  # of the keys' popularity: Zipf's exponent
VALUE = "x" * 2_000
HOT = 1_000


def loader_of(guard: Guard) -> Any:
    """Return the function that is called; it loads in 20 ms."""

    @coalesce("menu-{menu_id}", guard=guard, ttl=60, l2_ttl=600)
    async def load_menu(menu_id: int) -> str:
        await asyncio.sleep(0.02)
        return f"{menu_id} {VALUE}"

    return load_menu


async def fill(url: str, namespace: str) -> None:
    """Let the store have all values, as after a day of traffic."""
    async with Guard(url, namespace=namespace) as guard:
        await guard.warm(loader_of(guard), range(KEYS), rate=None, concurrency=200)


async def serve(url: str, namespace: str, *, is_hot: bool) -> None:
    """Be one process: get ready, tell how long that took, serve, tell how long calls took, and go on."""
    guard = Guard(url, namespace=namespace)
    load_menu = loader_of(guard)
    weights = list(accumulate(1 / (rank + 1) ** SKEW for rank in range(KEYS)))
    calls = random.Random(namespace).choices(range(KEYS), cum_weights=weights, k=RATE * 3_600)  # noqa: S311
    taken: list[tuple[float, float]] = []  # when a call was due, and the seconds that it took
    async with guard:
        entered = time.perf_counter()
        values = await guard.warm_hot(HOT) if is_hot else 0
        begun = time.perf_counter()
        first_hits = 0

        async def call(menu_id: int, due: float) -> None:
            await load_menu(menu_id)
            taken.append((due - begun, time.perf_counter() - due))

        under_way: set[asyncio.Task[None]] = set()
        for number, menu_id in enumerate(calls):
            due = begun + number / RATE
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            task = asyncio.create_task(call(menu_id, due))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            if number == int(RATE * FIRST):
                first_hits = guard.stats().l1_hits
            if number == int(RATE * MEASURED):
                hits = first_hits / (RATE * FIRST)
                tell(taken, {"ready": begun - entered, "values": values, "hits": hits, "loads": guard.stats().loads})


def tell(taken: list[tuple[float, float]], known: dict[str, Any]) -> None:
    """Write what is *known*, and the times of the calls that were *taken*, in a line."""
    for part, times in (
        ("first", sorted(took for at, took in taken if at < FIRST)),
        ("later", sorted(took for at, took in taken if at >= FIRST)),
    ):
        known[part] = [times[len(times) // 2], times[int(len(times) * 0.99)]]
    sys.stdout.write(json.dumps(known) + "\n")
    sys.stdout.flush()


def replace_all(url: str, *, is_hot: bool) -> list[dict[str, Any]]:
    """Run the processes, replace each, and return what the new ones tell."""
    namespace = "hot" if is_hot else "cold"
    asyncio.run(fill(url, namespace))
    command = [sys.executable, "-m", "benchmarks.rolling_restart", "--serve", url, namespace]
    command += ["--hot"] if is_hot else []

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  # this module

    running = [start() for _ in range(PROCESSES)]
    try:
        time.sleep(SETTLING)
        told = []
        for number in range(PROCESSES):
            _end(running[number])
            running[number] = start()
            stdout = running[number].stdout
            assert stdout is not None
            told.append(json.loads(stdout.readline()))
    finally:
        for process in running:
            _end(process)
    return told


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--hot", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(*options.serve, is_hot=options.hot))
        return
    table = Table("start", "values taken", "ready after", "first second from memory", "p50", "p99", "later p50", "p99")
    with valkey_server() as valkey:
        for is_hot in (False, True):
            told = replace_all(valkey.url, is_hot=is_hot)
            places = [(part, at) for part in ("first", "later") for at in (0, 1)]
            times = [f"{1e3 * median(each[part][at] for each in told):.1f} ms" for part, at in places]
            taken, ready, hits = (median(each[part] for each in told) for part in ("values", "ready", "hits"))
            name = "warm_hot" if is_hot else "cold"
            table.add_row(name, f"{taken:,.0f}", f"{1e3 * ready:.0f} ms", f"{hits:.0%}", *times)
            assert not any(each["loads"] for each in told), "the store has all values"
    Console().print(table)


if __name__ == "__main__":
    main()
