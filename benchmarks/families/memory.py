"""What an entry takes, and what an insert costs that evicts another."""

import gc
from statistics import median
from time import perf_counter

import psutil

from benchmarks.families import Setting, row_of
from benchmarks.families.probes import probe
from benchmarks.model import Column, Figure, Row, Table, Target
from benchmarks.peers import all_peers
from benchmarks.peers.peer import BOUND, MEMORY, Peer
from benchmarks.peers.references import BARE_TTL_CACHE, DICT
from benchmarks.subjects import Function, Terms, one_argument

ROUNDS = 9
INSERTS = 500  # of a round


async def measure_one(peer: Peer, entries: float) -> list[float | None]:
    """Return the bytes of an entry, and the µs of an insert into a full cache if it is bounded."""
    count = int(entries)
    async with peer.wrap(one_argument(), Terms(maxsize=count)) as function:
        await _fill(function, -100, 0)  # whatever is made at the first call is there
        before = _used()
        await _fill(function, 0, count)
        await _fill(function, 0, count)  # all of them are asked for again, as what is worth keeping is
        size = (_used() - before) / count
        if BOUND in peer.lacks:
            return [size, None]
        gc.freeze()
        times = []
        for number in range(ROUNDS):
            started_at = perf_counter()
            await _fill(function, count + number * INSERTS, count + (number + 1) * INSERTS)
            times.append((perf_counter() - started_at) / INSERTS * 1e6)
        return [size, median(times)]


async def _fill(function: Function, first: int, end: int) -> None:
    for key in range(first, end):
        await function(key)


def _used() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def measure(setting: Setting) -> list[Table]:
    """Return one table."""
    sizes = (setting.scaled(100_000, 2_000), setting.scaled(1_000_000, 4_000))
    peers = [
        BARE_TTL_CACHE,
        DICT,
        *(
            peer
            for peer in all_peers().values()
            if peer.role in {"guard", "peer"} and MEMORY not in peer.lacks and not peer.is_variant
        ),
    ]
    if setting.is_quick:
        peers = [peer for peer in peers if peer.role == "guard"][:1]
    rows: list[Row] = []
    for number, peer in enumerate(peers):
        setting.tell(number / len(peers), peer.name)
        figures: list[Figure | None] = []
        note = ""
        for size in sizes:
            found = probe("memory", peer, size)
            if isinstance(found, str):
                note, found = found, [None, None]
            figures += [None if value is None else Figure.of([value]) for value in found]
        rows.append(row_of(peer, [figures[0], figures[2], figures[1], figures[3]], note))
    few, many = (f"{size:,}" for size in sizes)
    columns = [
        Column(f"an entry of {few}", "bytes", target=Target(1.3)),
        Column(f"an entry of {many}", "bytes", target=Target(1.3)),
        Column(f"insert and evict, {few}", "µs", digits=1),
        Column(f"insert and evict, {many}", "µs", digits=1),
    ]
    caption = (
        "Growth of the process, a fresh one for each candidate and size. Keys are distinct whole numbers, which count; "
        "all values are one object. Each entry is read once after all are there. An insert is a miss with a loader "
        "that returns at once. Without a bound nothing is evicted."
    )
    return [Table("memory", "Memory, and inserts into a full cache", columns, rows, caption, setting.loop)]
