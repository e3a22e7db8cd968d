"""What old values buy at an expiry, and in an outage.

Several processes read through one Valkey from one Postgres. Needs the demo's requirements, for the servers.

Run: python -m benchmarks.staleness edge [--processes 16] [--seconds 10]
     python -m benchmarks.staleness outage [--processes 4] [--seconds 180]
"""

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
from rich.console import Console
from rich.progress import track
from rich.table import Table

from demo_api.servers import HOST, embedded_servers
from stampede_guard import Guard, coalesce

LIFE = 1.0  # seconds of a value
LOAD = 0.05  # seconds of a load
PAUSE = 0.02  # seconds between the calls of one process
KEYS = 20  # in the outage
START = 4.0  # seconds until all processes call: they start one after the other
UNAVAILABLE = (OSError, TimeoutError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError)

EDGE: dict[str, dict[str, Any]] = {
    "no expiry": {"l2_ttl": 3600},
    "neither": {"l2_ttl": LIFE},
    "stale=60": {"l2_ttl": LIFE, "stale": 60},
    "early=1": {"l2_ttl": LIFE, "early": 1.0},
}
OUTAGE: dict[str, dict[str, Any]] = {
    "neither": {"l2_ttl": LIFE},
    "stale=60, stale_if_error=3600": {
        "l2_ttl": LIFE,
        "stale": 60,
        "stale_if_error": 3600,
        "stale_on": UNAVAILABLE,
    },
}


@dataclass(slots=True)
class Tally:
    """What the callers of one process got.

    Attributes:
        waits: Seconds of each call.
        errors: Calls that failed.
        oldest: Seconds since the load of the oldest answer.
        loads: Runs of the loader.
        stale: Old values among the answers.
    """

    waits: list[float] = field(default_factory=list[float])
    errors: int = 0
    oldest: float = 0.0
    loads: int = 0
    stale: int = 0


async def call(urls: tuple[str, str], options: dict[str, Any], keys: int, starts_at: float, seconds: float) -> Tally:
    """Call from *starts_at* for so many *seconds*, key by key, with a pause after each call."""
    guard = Guard(urls[0], namespace="staleness")

    @coalesce("row-{number}", guard=guard, ttl=LIFE / 4 if options["l2_ttl"] == LIFE else 3600, **options)
    async def row(number: int) -> float:  # noqa: ARG001  # each has a key of its own
        connection = await asyncpg.connect(urls[1], timeout=2)
        try:
            await connection.execute("SELECT pg_sleep($1)", LOAD)
        finally:
            connection.terminate()
        return time.monotonic()  # one clock for all processes

    async with guard:
        with suppress(*UNAVAILABLE):
            await row(0)
        await asyncio.sleep(starts_at - time.monotonic())
        before = guard.stats().loads
        tally = await tally_of(row, keys, starts_at + seconds)
        stats = guard.stats()
    tally.loads, tally.stale = stats.loads - before, stats.stale
    return tally


async def tally_of(row: Callable[[int], Awaitable[float]], keys: int, until: float) -> Tally:
    """Call *row* until that instant."""
    tally, number = Tally(), 0
    while (began_at := time.monotonic()) < until:
        try:
            loaded_at = await row(number := (number + 1) % keys)
        except Exception:  # noqa: BLE001  # callers of a service see a failed request
            tally.errors += 1
        else:
            tally.oldest = max(tally.oldest, time.monotonic() - loaded_at)
        tally.waits.append(time.monotonic() - began_at)
        await asyncio.sleep(PAUSE)
    return tally


def work(*arguments: Any) -> Tally:
    """Do `call` in a process of its own."""
    return asyncio.run(call(*arguments))


@asynccontextmanager
async def proxy(url: str) -> AsyncGenerator[tuple[str, "Gateway"]]:
    """Stand between the callers and the Postgres of *url*; yield the URL of the gateway, and it."""
    gateway = Gateway(url)
    await gateway.open()
    parts = urlsplit(url)
    user, _, _ = parts.netloc.rpartition("@")
    try:
        yield urlunsplit(parts._replace(netloc=f"{user}@{HOST}:{gateway.port}")), gateway
    finally:
        gateway.close()


class Gateway:
    """A port that leads to a server, and that can be closed."""

    def __init__(self, url: str) -> None:
        self.port = 0
        self._to = urlsplit(url)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Let connections pass."""
        self._server = await asyncio.start_server(self._pass, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Refuse connections, and cut those that are open."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(self._to.hostname, self._to.port)
        mine = {writer, server_writer}
        self._writers |= mine
        with suppress(ConnectionError):
            await asyncio.gather(_pump(reader, server_writer), _pump(server_reader, writer))
        self._writers -= mine


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
    finally:
        writer.close()


def row_of(name: str, tallies: Sequence[Tally], *, life: float) -> list[str]:
    """Return a row of the table."""
    waits = [each * 1000 for tally in tallies for each in tally.waits]
    percentiles = quantiles(waits, n=1000)
    return [
        name,
        f"{len(waits):,}",
        f"{sum(tally.errors for tally in tallies):,}",
        f"{percentiles[499]:.2f}",
        f"{percentiles[989]:.2f}",
        f"{max(waits):.1f}",
        f"{sum(tally.stale for tally in tallies):,}",
        f"{max(max(tally.oldest for tally in tallies) - life, 0):.1f}",
        f"{sum(tally.loads for tally in tallies):,}",
    ]


HEADINGS = (
    "options",
    "calls",
    "failed",
    "p50 ms",
    "p99 ms",
    "longest ms",
    "old answers",
    "most stale s",
    "loads",
)


async def measure(title: str, variants: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> Table:
    """Return the table of all variants; in the outage the Postgres is away from the fourth second on."""
    table, is_outage = Table(title=title), arguments.scenario == "outage"
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "options" else "right")
    loop, spawn = asyncio.get_running_loop(), multiprocessing.get_context("spawn")
    for name, options in variants.items():
        with embedded_servers() as urls, ProcessPoolExecutor(arguments.processes, spawn) as pool:
            async with proxy(urls.postgres) as (postgres, gateway):
                starts_at = time.monotonic() + START + arguments.processes / 2
                seconds = arguments.seconds + (8 if is_outage else 0)
                given = ((urls.redis, postgres), options, KEYS if is_outage else 1, starts_at, seconds)
                calls = asyncio.gather(*[loop.run_in_executor(pool, work, *given) for _ in range(arguments.processes)])
                if is_outage:
                    await asyncio.sleep(starts_at + 4 - time.monotonic())
                    gateway.close()
                    for _ in track(range(round(arguments.seconds)), description=f"no Postgres: {name}"):
                        await asyncio.sleep(1)
                    await gateway.open()
                table.add_row(*row_of(name, await calls, life=options["l2_ttl"]))
    return table


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=("edge", "outage"))
    parser.add_argument("--processes", type=int, help="how many call (default: 16 at the edge, 4 in the outage)")
    parser.add_argument("--seconds", type=float, help="of the calls, or of the outage (default: 10, and 180)")
    arguments = parser.parse_args()
    is_edge = arguments.scenario == "edge"
    arguments.processes = arguments.processes or (16 if is_edge else 4)
    arguments.seconds = arguments.seconds or (10.0 if is_edge else 180.0)
    title = f"{arguments.processes} processes, one key, loads of {LOAD * 1000:g} ms, a life of {LIFE:g} s"
    if not is_edge:
        title = f"{arguments.processes} processes, {KEYS} keys, {arguments.seconds:g} s without Postgres"
    table = asyncio.run(measure(title, EDGE if is_edge else OUTAGE, arguments))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
