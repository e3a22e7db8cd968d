"""Loaders that query a real Postgres: one query for many callers, and no connection left busy."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal
from uuid import uuid4

import asyncpg
import pytest

from stampede_guard import Guard, coalesce
from stampede_guard.testing import Gate

CALLERS = 500
POOL_SIZE = 5


@pytest.fixture
def name() -> str:
    """Return a name for what the test makes in the shared database."""
    return f"test_{uuid4().hex}"


@pytest.fixture
async def watcher(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """Return a connection that looks at what the others do."""
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


@pytest.fixture
async def pool(database_url: str, name: str) -> AsyncIterator[asyncpg.Pool]:
    """Return the loaders' pool."""
    async with asyncpg.create_pool(
        database_url, min_size=POOL_SIZE, max_size=POOL_SIZE, server_settings={"application_name": name}
    ) as pool:
        yield pool


@pytest.fixture
async def counter(watcher: asyncpg.Connection, name: str) -> AsyncIterator[str]:
    """Return the name of a sequence, which counts the queries."""
    await watcher.execute(f"CREATE SEQUENCE {name}")
    yield name
    await watcher.execute(f"DROP SEQUENCE {name}")


async def busy(watcher: asyncpg.Connection, name: str) -> int:
    """Return how many of the pool's connections run a query or hold a transaction open."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND state <> 'idle'"
    count: int = await watcher.fetchval(query, name)
    return count


async def until_busy(watcher: asyncpg.Connection, name: str, number: int) -> None:
    """Wait until so many connections are busy."""
    async with asyncio.timeout(20):
        while await busy(watcher, name) != number:
            await asyncio.sleep(0)


async def test_many_callers_cost_one_query(pool: asyncpg.Pool, counter: str) -> None:
    """Five hundred concurrent calls run the query once, and all get its answer."""
    guard = Guard()

    @coalesce("menu-{menu_id}", guard=guard)
    async def load_menu(menu_id: int) -> int:
        answer: int = await pool.fetchval("SELECT nextval($1::text::regclass) FROM pg_sleep(0.05)", counter)
        return answer

    answers = await asyncio.gather(*(load_menu(7) for _ in range(CALLERS)))

    assert [1] * CALLERS == answers
    assert (1, CALLERS - 1) == (guard.stats().loads, guard.stats().joins)


async def test_many_ops_share_a_small_pool(pool: asyncpg.Pool, counter: str) -> None:
    """Ten callers for each of fifty ops over five connections: fifty queries."""
    guard = Guard()

    @coalesce("menu-{menu_id}", guard=guard)
    async def load_menu(menu_id: int) -> int:
        answer: int = await pool.fetchval("SELECT $1::int FROM nextval($2::text::regclass)", menu_id, counter)
        return answer

    answers = await asyncio.gather(*(load_menu(call % 50) for call in range(CALLERS)))

    assert [call % 50 for call in range(CALLERS)] == answers
    assert await pool.fetchval("SELECT nextval($1::text::regclass)", counter) == 51


async def test_guard_over_redis_asks_postgres_once(
    pool: asyncpg.Pool, counter: str, redis_url: str, namespace: str
) -> None:
    """With a store between, two guards' thousand calls in turn cost one query."""

    async def load() -> int:
        answer: int = await pool.fetchval("SELECT nextval($1::text::regclass)", counter)
        return answer

    async def ask(guard: Guard) -> int:
        return await guard.fetch("menu-7", load, ttl=60, l2_ttl=60, returns=int)

    options: dict[str, Any] = {"namespace": namespace, "deadline": 5, "connect_timeout": 5}
    async with Guard(redis_url, **options) as first, Guard(redis_url, **options) as second:
        answers = await asyncio.gather(*(ask(first) for _ in range(CALLERS)))
        answers += await asyncio.gather(*(ask(second) for _ in range(CALLERS)))

    assert [1] * 2 * CALLERS == answers


@pytest.mark.parametrize("on_abandon", ["finish", "cancel"])
async def test_cancelled_callers_leave_no_connection_busy(
    on_abandon: Literal["finish", "cancel"], pool: asyncpg.Pool, watcher: asyncpg.Connection, name: str
) -> None:
    """All callers leave in the middle of the query: whether it ends or is ended, its connection is free again."""
    guard = Guard()
    await watcher.execute("SELECT pg_advisory_lock(hashtext($1))", name)

    @coalesce("menu-{menu_id}", guard=guard, on_abandon=on_abandon)
    async def load_menu(menu_id: int) -> int:
        await pool.execute("SELECT pg_advisory_xact_lock(hashtext($1))", name)
        return menu_id

    calls = [asyncio.create_task(load_menu(7)) for _ in range(CALLERS)]
    await until_busy(watcher, name, 1)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    if on_abandon == "cancel":
        await until_busy(watcher, name, 0)
    await watcher.execute("SELECT pg_advisory_unlock(hashtext($1))", name)
    await until_busy(watcher, name, 0)
    async with asyncio.timeout(20):
        while pool.get_idle_size() != POOL_SIZE or guard.stats().in_flight:
            await asyncio.sleep(0)

    assert all(call.cancelled() for call in calls)
    assert guard.stats().abandoned == 1
    assert await load_menu(8) == 8


async def test_some_cancelled_callers_disturb_no_query(
    pool: asyncpg.Pool, watcher: asyncpg.Connection, name: str
) -> None:
    """I2: the caller that launched the query leaves; those who stay get its answer, from one query."""
    guard = Guard()
    await watcher.execute("SELECT pg_advisory_lock(hashtext($1))", name)

    @coalesce("menu-{menu_id}", guard=guard, on_abandon="cancel")
    async def load_menu(menu_id: int) -> int:
        await pool.execute("SELECT pg_advisory_xact_lock(hashtext($1))", name)
        return menu_id

    calls = [asyncio.create_task(load_menu(7)) for _ in range(CALLERS)]
    await until_busy(watcher, name, 1)
    for call in calls[: CALLERS // 2]:
        call.cancel()
    await watcher.execute("SELECT pg_advisory_unlock(hashtext($1))", name)
    answers = await asyncio.gather(*calls[CALLERS // 2 :])

    assert [7] * (CALLERS // 2) == answers
    assert guard.stats().loads == 1


async def test_load_timeout_frees_the_connection(pool: asyncpg.Pool, watcher: asyncpg.Connection, name: str) -> None:
    """A query that exceeds `load_timeout` is ended at the server, and its connection is free again."""
    guard = Guard()
    await watcher.execute("SELECT pg_advisory_lock(hashtext($1))", name)

    @coalesce("menu-{menu_id}", guard=guard, load_timeout=0.1)
    async def load_menu(menu_id: int) -> int:
        await pool.execute("SELECT pg_advisory_xact_lock(hashtext($1))", name)
        return menu_id

    with pytest.raises(TimeoutError):
        await load_menu(7)
    await until_busy(watcher, name, 0)
    async with asyncio.timeout(20):
        while pool.get_idle_size() != POOL_SIZE:
            await asyncio.sleep(0)

    assert guard.stats().in_flight == 0


async def test_error_of_the_database_reaches_every_caller(pool: asyncpg.Pool) -> None:
    """One failing query fails all who wait for it, each with an error of their own, and leaves the pool whole."""
    guard, gate = Guard(), Gate()

    @coalesce("menu-{menu_id}", guard=guard)
    async def load_menu(menu_id: int) -> int:
        await gate.passage()
        answer: int = await pool.fetchval("SELECT 1 / 0")
        return answer

    calls = [asyncio.create_task(load_menu(7)) for _ in range(CALLERS)]
    await gate.arrivals(1)
    gate.open()
    failures = await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(failure, asyncpg.DivisionByZeroError) for failure in failures)
    assert len({id(failure) for failure in failures}) == CALLERS
    assert (1, POOL_SIZE) == (guard.stats().loads, pool.get_idle_size())
