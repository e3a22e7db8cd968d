"""A hit in Redis, with one, ten and a hundred readers.

Each read is of another key than the one before.
"""

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from time import perf_counter
from typing import Any

from benchmarks.families import Setting, row_in
from benchmarks.families.wrapped import all_wrapped
from benchmarks.model import Column, Figure, Row, Table, Target
from benchmarks.peers import all_peers
from benchmarks.peers.guard import NAMESPACE
from benchmarks.subjects import VALUE, Function, Subject, Terms, subject_of
from benchmarks.timing import interleaved
from demo_api.servers import embedded_servers
from stampede_guard import Guard, coalesce
from stampede_guard.stores import AcquireRequest
from stampede_guard.stores.redis import RedisStore

TITLE = "A hit in Redis"
CONNECTIONS = 128
READERS = (1, 10, 100)
BARE_GET = "redis-py GET"
STORE = "stampede_guard's RedisStore alone"
SECONDS = 1.0  # of a candidate's rounds

COLUMNS = [
    Column("alone", "µs", target=Target(1.1)),
    Column("10 readers", "reads/s", target=Target(3.0, sense="at least")),
    Column("100 readers", "reads/s", target=Target(8.0, sense="at least")),
]


@contextmanager
def redis_url() -> Iterator[str]:
    """Run a server, unless `REDIS_URL` names one."""
    given = os.environ.get("REDIS_URL")
    with nullcontext() if given else embedded_servers(postgres=False) as servers:
        yield given or servers.redis  # type: ignore[union-attr]  # one of them is there


class Loads:
    """Counts loads; there should be none once all values are stored.

    Args:
        name: A prefix of the keys, for peers that add none of their own.
    """

    def __init__(self, name: str) -> None:
        self.runs = 0
        self._prefix = re.sub(r"\W+", "-", name)

    def subject(self) -> Subject:
        """Return the loader as a function to be cached."""

        async def menu(restaurant_id: int) -> str:
            self.runs += 1
            return VALUE if restaurant_id is not None else ""

        return replace(subject_of(menu), template=f"{self._prefix}:{{restaurant_id}}")


@asynccontextmanager
async def bare_get(url: str, keys: int) -> AsyncGenerator[Function]:
    """One redis-py client for all readers, with a connection for each."""
    from redis.asyncio import BlockingConnectionPool, Redis

    pool: Any = BlockingConnectionPool.from_url(url, max_connections=CONNECTIONS)
    async with Redis.from_pool(pool) as client:
        for key in range(keys):
            await client.set(f"bare:{key}", VALUE)

        async def get(restaurant_id: int) -> str:
            found: Any = await client.get(f"bare:{restaurant_id}")
            return str(found, "utf-8")

        yield get


@asynccontextmanager
async def store_alone(url: str, keys: int) -> AsyncGenerator[Function]:
    """The guard's store, asked directly for values that the guard stored."""
    stores: list[RedisStore] = []

    def opened() -> RedisStore:
        stores.append(RedisStore(url))
        return stores[-1]

    async with Guard(opened, namespace=f"{NAMESPACE}-store") as guard:
        load: Any = coalesce("menu:{restaurant_id}", guard=guard, l2_ttl=3600)(Loads(STORE).subject().function)
        store, fingerprint = stores[-1], load._operation.fingerprint(())  # noqa: SLF001  # as flights do
        # The guard limits its requests in the same way.
        room = asyncio.Semaphore(store.concurrency)

        async def ask(restaurant_id: int) -> str:
            key = f"sg1:{{{NAMESPACE}-store:menu:{restaurant_id}}}"
            async with room:
                verdict = await store.acquire(AcquireRequest(key, (), 2.0, 0.0, fingerprint))
            # Decoding the value is the guard's part.
            return VALUE if verdict.stored is not None else ""

        for restaurant_id in range(keys):
            await load(restaurant_id)
        yield ask


def _round(call: Function, readers: int, reads: int, keys: int) -> Callable[[], Awaitable[float]]:
    """Return a round of *reads*: µs of a read for one reader, reads per second for more."""
    offsets = count()

    async def read(first: int) -> None:
        for number in range(reads // readers):
            await call((first + number * readers) % keys)

    async def measured() -> float:
        offset = next(offsets) * 37
        started_at = perf_counter()
        await asyncio.gather(*[read(offset + reader) for reader in range(readers)])
        took = perf_counter() - started_at
        done = reads // readers * readers
        return took / done * 1e6 if readers == 1 else done / took

    return measured


async def measure(setting: Setting) -> list[Table]:
    """Return one table."""
    peers = [peer for peer in all_peers().values() if peer.has_redis]
    failures: dict[str, str] = {}
    loads = {peer.name: Loads(peer.name) for peer in peers}
    keys = setting.scaled(1_000, 100)
    columns: list[dict[str, Figure]] = []
    with redis_url() as url:
        terms = Terms(url=url)
        async with (
            bare_get(url, keys) as get,
            store_alone(url, keys) as ask,
            all_wrapped(peers, lambda name: loads[name].subject(), terms, failures) as functions,
        ):
            everything: dict[str, Function] = {BARE_GET: get, STORE: ask, **functions}
            await _fill(everything, keys, failures)
            for name, call in everything.items():
                if name not in failures:
                    # This opens the connections of each candidate.
                    await _round(call, READERS[-1], READERS[-1], keys)()
            for counter in loads.values():
                counter.runs = 0
            for part, readers in enumerate(READERS):
                reads = setting.scaled(200 if readers == 1 else 1_000, 100)
                columns.append(
                    await interleaved(
                        {
                            name: _round(call, readers, reads, keys)
                            for name, call in everything.items()
                            if name not in failures
                        },
                        setting.scaled(15, 2),
                        lambda done, said: setting.tell((part + done) / len(READERS), said),  # noqa: B023
                        failures,
                        seconds=SECONDS,
                        least=5,
                    )
                )
    for name, counter in loads.items():
        if counter.runs and name not in failures:
            failures[name] = f"{counter.runs:,} reads were no hits"
    rows = [
        Row(BARE_GET, [column.get(BARE_GET) for column in columns], "baseline"),
        Row(STORE, [column.get(STORE) for column in columns], "reference", note=failures.get(STORE, "")),
        *(row_in(columns, peer, failures) for peer in peers),
    ]
    caption = "Nothing is kept in memory. Alone: a smaller ratio is better; with more readers, a larger one."
    return [Table("redis", TITLE, COLUMNS, rows, caption, setting.loop)]


async def _fill(functions: dict[str, Function], keys: int, failures: dict[str, str]) -> None:
    """Store all values, and check that they can be read."""
    for name, call in functions.items():
        try:
            for key in range(keys):
                if await call(key) != VALUE:
                    failures[name] = "failed: a wrong value"
        except Exception as error:  # noqa: BLE001  # a peer's failure is a line in the table
            failures[name] = f"failed: {error!r}"[:120]
