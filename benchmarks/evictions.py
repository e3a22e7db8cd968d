"""Count misses of L1 and of other policies: `python -m benchmarks.evictions`.

Each gets the same traces, drawn from fixed seeds. So the counts are the same in each run; only theine's vary a little.
"""

import argparse
import itertools
import os
import random
import sys
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from cachetools import LRUCache

from benchmarks.show import BEGIN, END
from stampede_guard._memory.l1 import Memory
from stampede_guard.testing import ManualClock

PAGE = Path("docs/explanation/memory.md")
KEYS = 20_000  # of a popularity
REQUESTS = 150_000
SIZES = (500, 2_000)  # entries
TICK = 0.001  # seconds between requests
LIFE = 30.0  # seconds, of an entry that has a TTL
SPREAD = 0.1  # of lives
STEP_EVERY = 20  # requests for each step of the sweeper
OLD = "second chance"  # what the others are compared with


class Policy(Protocol):
    """A cache of so many entries."""

    def get(self, key: str) -> float | None:
        """Return the instant up to which *key* is fresh, if it is there."""
        ...

    def put(self, key: str, until: float) -> None:
        """Keep *key*."""
        ...


class Own:
    """L1 itself, with its sweeper."""

    def __init__(self, size: int, clock: ManualClock) -> None:
        self._memory = Memory(size, clock)
        self._clock = clock
        self._requests = 0

    def get(self, key: str) -> float | None:
        """Look up, and now and then make a step of the sweeper."""
        self._requests += 1
        if self._requests % STEP_EVERY == 0:
            self._memory._sweeper.step()  # noqa: SLF001  # a timer would, in a loop
        slot = self._memory.get(key)
        return None if slot is None else slot.fresh_until

    def put(self, key: str, until: float) -> None:
        """Keep *key*."""
        self._memory.put(key, None, until - self._clock())


class Lru:
    """cachetools' `LRUCache`."""

    def __init__(self, size: int, clock: ManualClock) -> None:  # noqa: ARG002  # as the others
        self._cache: LRUCache[str, float] = LRUCache(size)

    def get(self, key: str) -> float | None:
        """Look up, and move to the end."""
        return self._cache.get(key)

    def put(self, key: str, until: float) -> None:
        """Keep *key*."""
        self._cache[key] = until


class SecondChance:
    """The clock algorithm of earlier versions: first in, first out, but what was used gets another round."""

    def __init__(self, size: int, clock: ManualClock) -> None:  # noqa: ARG002  # as the others
        self._size = size
        self._entries: OrderedDict[str, list[float]] = OrderedDict()  # the instant, and whether it was used

    def get(self, key: str) -> float | None:
        """Look up, and note the use."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[1] = True
        return entry[0]

    def put(self, key: str, until: float) -> None:
        """Keep *key*."""
        entries = self._entries
        entries.pop(key, None)
        if len(entries) >= self._size:
            oldest, entry = entries.popitem(last=False)
            for _ in range(16):
                if not entry[1]:
                    break
                entry[1] = False
                entries[oldest] = entry
                oldest, entry = entries.popitem(last=False)
        entries[key] = [until, False]


class Theine:
    """theine's W-TinyLFU."""

    def __init__(self, size: int, clock: ManualClock) -> None:  # noqa: ARG002  # as the others
        from theine import Cache  # not everywhere installed

        self._cache: Any = Cache(size)

    def get(self, key: str) -> float | None:
        """Look up."""
        until: float | None = self._cache.get(key)[0]
        return until

    def put(self, key: str, until: float) -> None:
        """Keep *key*."""
        self._cache.set(key, until)


POLICIES: dict[str, Callable[[int, ManualClock], Policy]] = {
    OLD: SecondChance,
    "LRU": Lru,
    "stampede_guard": Own,
    "theine": Theine,
}


def popular(seed: int, exponent: float) -> Iterator[int]:
    """Yield ranks of keys for ever, as popular as Zipf's law says."""
    weights = [*itertools.accumulate((rank + 1) ** -exponent for rank in range(KEYS))]
    draw = random.Random(seed).random  # noqa: S311  # no secret
    while True:
        yield bisect(weights, draw() * weights[-1])


def zipf(exponent: float, seed: int) -> Iterator[str]:
    """Yield keys whose popularity never changes."""
    return (f"key-{rank}" for rank in popular(seed, exponent))


def with_scans() -> Iterator[str]:
    """Yield popular keys, with 6,000 that come but once after each 20,000."""
    ranks, once = popular(4, 0.9), itertools.count()
    while True:
        for rank in itertools.islice(ranks, 20_000):
            yield f"key-{rank}"
        for number in itertools.islice(once, 6_000):
            yield f"scan-{number}"


def drifting() -> Iterator[str]:
    """Yield popular keys, of which the most popular ones are others after each 25,000."""
    for number, rank in enumerate(popular(5, 0.9)):
        yield f"key-{(rank + number // 25_000 * 2_000) % KEYS}"


def shuffled() -> Iterator[str]:
    """Yield popular keys, with all popularities dealt out anew after each 50,000."""
    keys, deal = [*range(KEYS)], random.Random(7)  # noqa: S311  # no secret
    for number, rank in enumerate(popular(7, 0.9)):
        if number % 50_000 == 0:
            deal.shuffle(keys)
        yield f"key-{keys[rank]}"


def looping() -> Iterator[str]:
    """Yield 3,000 keys in a loop, which no cache here can hold, and as many popular ones in between."""
    for number, rank in enumerate(popular(9, 0.9)):
        yield f"loop-{number % 3_000}"
        yield f"key-{rank}"


TRACES: dict[str, Callable[[], Iterator[str]]] = {
    "Zipf 0.7": lambda: zipf(0.7, 1),
    "Zipf 0.9": lambda: zipf(0.9, 2),
    "Zipf 1.1": lambda: zipf(1.1, 3),
    "Zipf 0.9, scans between": with_scans,
    "Zipf 0.9, drifting": drifting,
    "Zipf 0.9, dealt out anew": shuffled,
    "Zipf 0.9 and a loop": looping,
}


def misses(make: Callable[[int, ManualClock], Policy], size: int, keys: list[str], life: float | None) -> int:
    """Return how many of *keys* are not found, or not fresh, when they come."""
    clock = ManualClock()
    policy, draw, missed = make(size, clock), random.Random(8).random, 0  # noqa: S311  # no secret
    for key in keys:
        clock.advance(TICK)
        until = policy.get(key)
        if until is None or until <= clock():
            missed += 1
            policy.put(key, clock() + (1e9 if life is None else life * (1 + SPREAD * (2 * draw() - 1))))
    return missed


def rows(requests: int, sizes: tuple[int, ...]) -> Iterator[list[str]]:
    """Yield the rows of the table, which has a column for each policy."""
    policies = {name: make for name, make in POLICIES.items() if make is not Theine or find_spec("theine")}
    yield ["trace", "entries", "TTL", *policies]
    for trace, make_keys in TRACES.items():
        keys = [*itertools.islice(make_keys(), requests)]
        for life, size in itertools.product((None, LIFE), sizes):
            counts = {name: misses(make, size, keys, life) for name, make in policies.items()}
            shown = [
                f"{count:,}" if name == OLD else f"{count:,} ({count / counts[OLD] - 1:+.1%})"
                for name, count in counts.items()
            ]
            yield [trace, f"{size:,}", "–" if life is None else f"{life:g} s", *shown]


def markdown(table: list[list[str]]) -> str:
    """Return *table* in Markdown, between the marks."""
    aligned = ["---", *("---:" for _ in table[0][1:])]
    lines = [f"| {' | '.join(cells)} |" for cells in (table[0], aligned, *table[1:])]
    return "\n".join([BEGIN, "", *lines, "", END])


def main() -> None:
    """Count, and print a table or put it into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--markdown", action="store_true", help=f"put the table into {PAGE}")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # ghosts stand where hashes of texts say
        os.execve(  # noqa: S606  # this program again
            sys.executable,
            [sys.executable, "-m", "benchmarks.evictions", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    found = [*(rows(2_000, (50,)) if options.quick else rows(REQUESTS, SIZES))]
    if options.markdown:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(before + markdown(found) + rest.partition(END)[2])
    else:
        sys.stdout.write(f"{markdown(found)}\n")


if __name__ == "__main__":
    main()
