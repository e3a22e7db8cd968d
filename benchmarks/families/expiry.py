"""How long the event loop is kept from anything else when many entries expire together."""

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

PILOT = 2_000  # inserts that tell how long the filling will take
INSERTS = 1_000  # after everything has expired
ROOMS = (1.25, 2.0)  # a life, in times that filling is to take: if it took longer after all, once more with more
MOST = 60.0  # seconds that entries may live here
SPREADING = "dogpile-breaker"  # lengthens lives at random, up to twofold
SPREAD = 2.2  # its longest life, in lives asked for
SWEEP = 1.5  # seconds in which whoever sweeps at intervals has done so


class Ticker:
    """The longest time between two of the event loop's iterations.

    It is the processor's time if that is the shorter one: then the machine had something else to do, and the process
    was ready. All threads' time counts, so that waiting for another one of the same process is a gap too.
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


async def _fill(function: Function, first: int, end: int) -> float:
    started_at = time.perf_counter()
    for key in range(first, end):
        await function(key)
    return time.perf_counter() - started_at


async def measure_one(peer: Peer, entries: float) -> list[float | None]:
    """Return the longest stall in ms: until all entries have expired, and while new ones come after that."""
    count = int(entries)
    gc.disable()  # the more there is the longer it would take: lives would have to be longer than the pilot says
    async with peer.wrap(one_argument(), Terms(maxsize=2 * count)) as function:
        each = await _fill(function, 0, PILOT) / PILOT
    filling = each * count
    for room in ROOMS:
        life = math.ceil(0.3 + room * filling)
        if life > MOST:
            message = f"filling takes {filling:.0f} s"
            raise TimeoutError(message)
        async with peer.wrap(one_argument(), Terms(ttl=life, maxsize=2 * count)) as function:
            filling = await _fill(function, 0, count)
            filling += await _fill(function, 0, count // 10)  # some are asked for again, as they are elsewhere
            if filling < life:
                return await _stalls(function, count, life * (SPREAD if peer.name == SPREADING else 1.0))
    message = f"filling took {filling:.1f} s, and a life is {life} s: they never were there together"
    raise TimeoutError(message)


async def _stalls(function: Function, count: int, longest_life: float) -> list[float | None]:
    """Return the same of *count* entries that are all there."""
    gc.collect()
    gc.freeze()  # the collector's own pauses grow with the number of objects: they are not looked at here
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
        f"{entries:,} entries, filled at full speed, all there before the first one ends. A task that does nothing but "
        "yield measures the gaps, until all have ended. Two candidates run at a time, each in a process of its own: a "
        "gap is the time by the clock, or the processor's time that the process took if that is less, so that neither "
        "the neighbour nor the machine is in it. The garbage collector leaves the entries alone meanwhile."
    )
    return [Table("expiry", f"{entries:,} entries expire together", columns, rows, caption, setting.loop)]
