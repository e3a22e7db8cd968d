"""The event loop's longest stall when many entries expire together."""

import asyncio
import gc
import math
import time

from benchmarks.families import Setting, row_of
from benchmarks.families.probes import Found, in_pairs, probe
from benchmarks.model import Column, Figure, Table, Target
from benchmarks.peers import all_peers
from benchmarks.peers.peer import MEMORY, TTL, Peer
from benchmarks.peers.references import BARE_TTL_CACHE
from benchmarks.subjects import Function, Terms, one_argument
from benchmarks.timing import fill

PILOT = 2_000  # inserts that predict how long the filling takes
INSERTS = 1_000  # after all entries have expired
# Lives of entries, as multiples of the predicted time of filling; the second if the first is short.
ROOMS = (1.25, 2.0)
MOST = 60.0  # seconds: the longest life
SPREADING = "dogpile-breaker"  # lengthens lives at random, up to twofold
SPREAD = 2.2  # its longest life, in lives asked for
SWEEP = 1.5  # seconds within which periodic sweeps have run


class Ticker:
    """The longest time between two iterations of the event loop.

    It is the time by the clock, or the CPU time of the process if that is shorter: then the machine
    ran something else while the process was ready. The CPU time is that of all threads, so that
    waiting for another thread of the process counts, too.
    """

    def __init__(self) -> None:
        self.longest = 0.0

    async def run(self) -> None:
        """Watch, until cancelled."""
        before, before_own = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(0)
            now, now_own = time.perf_counter(), time.process_time()
            self.longest = max(self.longest, min(now - before, now_own - before_own))
            before, before_own = now, now_own


async def measure_one(peer: Peer, entries: float) -> list[float | None]:
    """Return the longest stalls in ms: while entries expire, during later misses, and of both."""
    count = int(entries)
    # Collections take longer with each entry, so filling would take longer than the pilot predicts.
    gc.disable()
    async with peer.wrap(one_argument(), Terms(maxsize=2 * count)) as function:
        each = await fill(function, 0, PILOT) / PILOT
    filling = each * count
    for room in ROOMS:
        life = math.ceil(0.3 + room * filling)
        if life > MOST:
            message = f"filling takes {filling:.0f} s"
            raise TimeoutError(message)
        async with peer.wrap(one_argument(), Terms(ttl=life, maxsize=2 * count)) as function:
            filling = await fill(function, 0, count)
            # Some entries are read again, as in the other families.
            filling += await fill(function, 0, count // 10)
            if filling < life:
                return await _stalls(function, count, life * (SPREAD if peer.name == SPREADING else 1.0))
    message = f"filling took {filling:.1f} s, and a life is {life} s: the first entries expired before the last came"
    raise TimeoutError(message)


async def _stalls(function: Function, count: int, longest_life: float) -> list[float | None]:
    """Return the stalls of *count* entries that are all cached."""
    gc.collect()
    # The collector's own pauses grow with the number of objects, and are not measured here.
    gc.freeze()
    gc.enable()
    ticker = Ticker()
    watch = asyncio.create_task(ticker.run())
    await asyncio.sleep(longest_life + SWEEP)
    idle = ticker.longest
    ticker.longest = 0.0
    for key in range(count, count + INSERTS):
        await function(key)
        await asyncio.sleep(0)
    watch.cancel()
    return [idle * 1e3, ticker.longest * 1e3, max(idle, ticker.longest) * 1e3]


def measure(setting: Setting) -> list[Table]:
    """Return one table."""
    entries = setting.scaled(200_000, 500)
    peers = [
        BARE_TTL_CACHE,
        *(
            peer
            for peer in all_peers().values()
            if peer.role in {"guard", "peer"} and not {TTL, MEMORY} & set(peer.lacks) and not peer.is_variant
        ),
    ]
    if setting.is_quick:
        peers = peers[1:2]
    rows = []

    def measured(peer: Peer) -> Found:
        return probe("expiry", peer, entries)

    for peer, found in zip(peers, in_pairs(measured, peers, setting.tell), strict=True):
        note = found if isinstance(found, str) else ""
        values = [None] * 3 if isinstance(found, str) else found
        rows.append(row_of(peer, [None if value is None else Figure.of([value]) for value in values], note))
    columns = [
        Column("while they expire", "ms", has_ratio=False, digits=1),
        Column(f"in the next {INSERTS:,} misses", "ms", has_ratio=False, digits=1),
        Column("longest stall", "ms", has_ratio=False, target=Target(5.0, of="figure"), digits=1),
    ]
    caption = (
        f"{entries:,} entries, filled at full speed; all are cached before the first one expires. "
        "A task that only yields measures the gaps until all have expired. "
        "Two candidates run at a time, each in a process of its own. "
        "A gap is the time by the clock, or the CPU time of the process if that is less, "
        "so that it contains no time of other processes. "
        "The garbage collector passes over the entries."
    )
    return [Table("expiry", f"{entries:,} entries expire together", columns, rows, caption, setting.loop)]
