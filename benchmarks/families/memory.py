"""The memory of an entry, and the time of an evicting insert."""

import gc
from statistics import median

import psutil

from benchmarks.families import Setting, row_of
from benchmarks.families.probes import Found, in_pairs, probe
from benchmarks.model import Column, Figure, Table, Target
from benchmarks.peers import all_peers
from benchmarks.peers.peer import BOUND, MEMORY, Peer
from benchmarks.peers.references import BARE_TTL_CACHE, DICT
from benchmarks.subjects import Terms, one_argument
from benchmarks.timing import fill

ROUNDS = 9
INSERTS = 500  # of a round
MOST = 20.0  # seconds that filling a peer with the larger number may take


async def measure_one(peer: Peer, entries: float) -> list[float | None]:
    """Return bytes of an entry, µs of an insert that evicts if bounded, and seconds of filling."""
    count = int(entries)
    async with peer.wrap(one_argument(), Terms(maxsize=count)) as function:
        # The first calls allocate what a cache allocates once.
        await fill(function, -100, 0)
        before = _used()
        took = await fill(function, 0, count)
        # All entries are read again, as entries worth keeping are.
        await fill(function, 0, count)
        size = (_used() - before) / count
        if BOUND in peer.lacks:
            return [size, None, took]
        gc.freeze()
        times = []
        for number in range(ROUNDS):
            first = count + number * INSERTS
            times.append(await fill(function, first, first + INSERTS) / INSERTS * 1e6)
        return [size, median(times), took]


def _used() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _sizes(peer: Peer, few: int, many: int) -> tuple[list[float | None], str]:
    """Return size and time of an insert with *few* entries and with *many*, and a note."""
    first = probe("memory", peer, few)
    if isinstance(first, str):
        return [None] * 4, first
    size, insert, took = first
    if peer.role != "guard" and (took or 0.0) * many / few > MOST:
        return [size, None, insert, None], f"filling takes more than {MOST:.0f} s with {many:,}"
    second: Found = probe("memory", peer, many)
    if isinstance(second, str):
        return [size, None, insert, None], second
    return [size, second[0], insert, second[1]], ""


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
    rows = [
        row_of(peer, [None if value is None else Figure.of([value]) for value in values], note)
        for peer, (values, note) in zip(
            peers, in_pairs(lambda peer: _sizes(peer, *sizes), peers, setting.tell), strict=True
        )
    ]
    few, many = (f"{size:,}" for size in sizes)
    columns = [
        Column(f"an entry of {few}", "bytes", target=Target(1.3)),
        Column(f"an entry of {many}", "bytes", target=Target(1.3)),
        Column(f"insert and evict, {few}", "µs", digits=1),
        Column(f"insert and evict, {many}", "µs", digits=1),
    ]
    caption = (
        "Growth of the process, a fresh one for each candidate and size, two at a time. "
        "Keys are distinct integers, and their memory counts; all values are one object. "
        "Each entry is read once after all are cached. "
        "An insert is a miss with a loader that returns at once. Without a bound nothing is evicted."
    )
    return [Table("memory", "Memory, and inserts into a full cache", columns, rows, caption, setting.loop)]
