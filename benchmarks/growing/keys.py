"""The cost of hits, inserts and entries, by keys in memory.

Each size is measured in a process of its own.
"""

import asyncio
import gc
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter

import msgspec
import psutil

from benchmarks.growing import Curve, Picture, Question, Setting, settle_memory
from stampede_guard import Guard, coalesce

LIFE = 3600.0
HITS = 20_000  # of a round
INSERTS = 2_000  # of a round
# Keys up to which allocations are traced; tracing takes several times as long as the work.
TRACED = 1_000
HIT, AGAIN, INSERT, ENTRY = "hit, keys at random", "hit, the same key", "insert that evicts", "entry"
VALUE = "menu " * 20

Menu = Callable[[int], Awaitable[str]]


def menus(maxsize: int) -> Menu:
    """Return a function with a memory of *maxsize* entries."""

    @coalesce("menu:{restaurant_id}", guard=Guard(maxsize=maxsize), ttl=LIFE)
    async def menu(restaurant_id: int) -> str:
        return VALUE if restaurant_id is not None else ""

    return menu


async def ask(menu: Menu, keys: Sequence[int]) -> float:
    """Return the µs that *menu* takes for one of *keys*."""
    begun_at = perf_counter()
    for key in keys:
        await menu(key)
    return (perf_counter() - begun_at) / len(keys) * 1e6


async def traced_bytes(size: int) -> float:
    """Return the bytes that Python allocates for an entry.

    For sizes at which the growth of the process is too coarse.
    """
    menu = menus(size)
    # The first call allocates what a function allocates once.
    await menu(-1)
    gc.collect()
    tracemalloc.start()
    await ask(menu, range(size))
    await ask(menu, range(size))
    gc.collect()
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return allocated / size


def in_use() -> int:
    """Return the resident memory of this process, in bytes."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


async def measure_one(size: int, rounds: int) -> dict[str, list[float]]:
    """Return the rounds of each figure at one size, in a process that has done nothing else."""
    menu = menus(size)
    await menu(-1)
    before = in_use()
    await ask(menu, range(size))
    await ask(menu, range(size))
    entry = (in_use() - before) / size
    settle_memory()
    keys = random.Random(7).choices(range(size), k=HITS)  # noqa: S311  # the same order in each run
    # The frequent keys are known after that.
    await ask(menu, keys)
    found = {
        HIT: [await ask(menu, keys) for _ in range(rounds)],
        AGAIN: [await ask(menu, keys[:1] * HITS) for _ in range(rounds)],
    }
    firsts = [size + number * INSERTS for number in range(rounds)]
    found[INSERT] = [await ask(menu, range(first, first + INSERTS)) for first in firsts]
    found[ENTRY] = [entry if size > TRACED else await traced_bytes(size)]
    return found


async def measure(setting: Setting) -> Question:
    """Measure with a full memory of each size."""
    curves = {name: Curve(name) for name in (HIT, AGAIN, INSERT, ENTRY)}
    sizes = setting.sizes(1_000_000, 1_000)
    for number, size in enumerate(sizes):
        setting.tell(number / len(sizes), f"{size:,} keys")
        command = [sys.executable, "-m", "benchmarks.growing.keys", str(size), str(setting.rounds(15))]
        ended = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # noqa: ASYNC221, S603  # nothing else runs
        for name, rounds in msgspec.json.decode(ended.stdout, type=dict[str, list[float]]).items():
            curves[name].add(size, rounds)
    *times, entry = curves.values()
    caption = (
        "A process for each size; the memory has room for exactly so many keys and is full. "
        "Inserting is a miss with a loader that returns at once, its flight included. "
        "Bytes are those of an entry and its key: "
        f"as Python allocates them up to {TRACED:,} keys, and as the process grows beyond that. "
        "All values are one object."
    )
    return Question(
        "keys",
        "Keys in memory",
        "keys in memory",
        caption,
        [
            Picture("keys-time", "What an operation takes", "time", "µs", times),
            Picture("keys-bytes", "What an entry takes", "memory", "bytes", [entry]),
        ],
    )


if __name__ == "__main__":
    rounds = asyncio.run(measure_one(*map(int, sys.argv[1:])))
    print(msgspec.json.encode(rounds).decode())  # noqa: T201  # the parent reads it
