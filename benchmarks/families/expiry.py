"""How long the event loop is kept from anything else when many entries expire together."""

import asyncio
import gc
import math
import time

from benchmarks.families import Setting, row_of
from benchmarks.families.probes import probe
from benchmarks.model import Column, Figure, Row, Table, Target
from benchmarks.peers import all_peers
from benchmarks.peers.peer import MEMORY, TTL, Peer
from benchmarks.peers.references import BARE_TTL_CACHE
from benchmarks.subjects import Function, Terms, one_argument

PILOT = 2_000  # inserts that tell how long the filling will take
INSERTS = 1_000  # after everything has expired
MOST = 60.0  # seconds that entries may live here
SPREAD = 2.2  # the longest life, in lives asked for: some lengthen them at random, up to twofold


class Ticker:
    """The longest time between two of the event loop's iterations."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def run(self) -> None:
        """Watch, until cancelled."""
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            self.longest = max(self.longest, now - before)
            before = now


async def _fill(function: Function, first: int, end: int) -> float:
    started_at = time.perf_counter()
    for key in range(first, end):
        await function(key)
    return time.perf_counter() - started_at


async def measure_one(peer: Peer, entries: float) -> list[float | None]:
    """Return the longest stall in ms: until all entries have expired, and while new ones come after that."""
    count = int(entries)
    async with peer.wrap(one_argument(), Terms(maxsize=2 * count)) as function:
        each = await _fill(function, 0, PILOT) / PILOT
    life = math.ceil(0.5 + 2.0 * each * count)
    if life > MOST:
        message = f"filling takes {each * count:.0f} s"
        raise TimeoutError(message)
    async with peer.wrap(one_argument(), Terms(ttl=life, maxsize=2 * count)) as function:
        await _fill(function, 0, count)
        await _fill(function, 0, count // 10)  # some are asked for again, as they are elsewhere
        gc.collect()
        gc.freeze()  # the collector's own pauses grow with the number of objects: they are not looked at here
        ticker = Ticker()
        watch = asyncio.create_task(ticker.run())
        await asyncio.sleep(life * (SPREAD if peer.name == "dogpile-breaker" else 1.2) + 1.5)
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
    rows: list[Row] = []
    for number, peer in enumerate(peers):
        setting.tell(number / len(peers), peer.name)
        found = probe("expiry", peer, entries)
        note = found if isinstance(found, str) else ""
        values = [None] * 3 if isinstance(found, str) else found
        rows.append(row_of(peer, [None if value is None else Figure.of([value]) for value in values], note))
    columns = [
        Column("while they expire", "ms", has_ratio=False, digits=1),
        Column(f"in the next {INSERTS:,} misses", "ms", has_ratio=False, digits=1),
        Column("longest stall", "ms", has_ratio=False, target=Target(5.0, of="figure"), digits=1),
    ]
    caption = (
        f"{entries:,} entries, filled at full speed with a life that is twice as long as that takes. A task that does "
        "nothing but yield measures the gaps. The garbage collector leaves the entries alone meanwhile."
    )
    return [Table("expiry", f"{entries:,} entries expire together", columns, rows, caption, setting.loop)]
