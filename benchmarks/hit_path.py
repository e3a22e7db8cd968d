"""What a hit in memory costs, beside its alternatives, all in one process and one run.

Rounds are interleaved, so that whatever else the machine does falls on all of them alike;
compare the ratios, since absolute times are the machine's.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from itertools import repeat
from statistics import median
from time import perf_counter

from aiocache import cached
from rich.console import Console
from rich.table import Table

from stampede_guard import coalesce

Call = Callable[[int], Awaitable[bytes]]

MENU = b"{}" * 512
REMEMBERED: dict[int, bytes] = {}


async def bare(restaurant_id: int) -> bytes:
    """Return the menu: a coroutine, and nothing around it."""
    return MENU if restaurant_id else b""


async def by_hand(restaurant_id: int) -> bytes:
    """Look into a dict first: no life, no bound, no counters, no coalescing."""
    if (menu := REMEMBERED.get(restaurant_id)) is None:
        menu = REMEMBERED[restaurant_id] = await bare(restaurant_id)
    return menu


@coalesce("restaurant-fetch-{restaurant_id}", ttl=3600)
async def coalesced(restaurant_id: int) -> bytes:
    """Load through the guard."""
    return await bare(restaurant_id)


@cached(ttl=3600)  # type: ignore[untyped-decorator]  # aiocache ships no types
async def by_aiocache(restaurant_id: int) -> bytes:
    """Load through aiocache's memory backend."""
    return await bare(restaurant_id)


CANDIDATES: dict[str, Call] = {
    "bare await": bare,
    "dict, by hand": by_hand,
    "@coalesce, L1 hit": coalesced,
    "aiocache cached, hit": by_aiocache,
}


async def time_of(call: Call, calls: int) -> float:
    """Return the nanoseconds of one awaited call, on average over *calls*."""
    started_at = perf_counter()
    for _ in repeat(None, calls):
        await call(7)
    return (perf_counter() - started_at) / calls * 1e9


async def measure(rounds: int, calls: int) -> dict[str, float]:
    """Return each candidate's median over *rounds*, in nanoseconds."""
    times: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for call in CANDIDATES.values():
        await call(7)  # fills what there is to fill
    for _ in range(rounds):
        for name, call in CANDIDATES.items():
            times[name].append(await time_of(call, calls))
    return {name: median(of_rounds) for name, of_rounds in times.items()}


def show(medians: dict[str, float], rounds: int, calls: int) -> None:
    """Print the medians and their ratios to a bare await."""
    caption = f"medians of {rounds} interleaved rounds of {calls:,} calls, Python {sys.version.split()[0]}"
    table = Table(title="A hit in memory, awaited", caption=caption)
    table.add_column("call")
    table.add_column("ns", justify="right")
    table.add_column("× bare await", justify="right")
    for name, nanoseconds in medians.items():
        table.add_row(name, f"{nanoseconds:,.0f}", f"{nanoseconds / medians['bare await']:.1f}")
    Console().print(table)


def main() -> None:
    """Measure, and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="a few short rounds: shows that it runs, not what it costs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    rounds, calls = (3, 500) if arguments.quick else (31, 5_000)
    medians = asyncio.run(measure(rounds, calls))
    if arguments.json:
        print(json.dumps({"unit": "ns", "rounds": rounds, "calls": calls, "medians": medians}))  # noqa: T201
    else:
        show(medians, rounds, calls)


if __name__ == "__main__":
    main()
