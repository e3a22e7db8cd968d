"""A server that is alive and says no: wrong password, full, read-only, no permission, no room."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import acl
import pytest
from proxying import Wire, runs
from redis.asyncio import Redis
from stored import find

from demo_api.servers import HOST, ValkeyServer, valkey_server
from stampede_guard import Guard, InvalidationPending
from stampede_guard.stores import AcquireRequest, LoadFailure, Refused, Release
from stampede_guard.stores._envelope import seal
from stampede_guard.stores._redis import pipeline
from stampede_guard.stores._redis.scripts import ACQUIRE
from stampede_guard.stores.redis import RedisStore
from stampede_guard.testing import Gate, ManualClock

Logged = Callable[[], list[str]]

GONE = "Redis does not answer ({}); going on without it, probing again and again"
BACK = "Redis answers again"
DEAF = "the bus connection is lost ({}); until it is back, L1 keeps values for a second at most"

pytestmark = pytest.mark.usefixtures("no_echoes")


async def load() -> str:
    """Load an answer."""
    return "soup"


async def ask(guard: Guard, op: str = "menu-7") -> str:
    """Make a call that looks into the store, and does not stay in memory."""
    return await guard.fetch(op, load, l2_ttl=60, returns=str)


def patient(url: str, **options: Any) -> Guard:
    """Return a guard that waits long enough on a busy machine."""
    patience: dict[str, Any] = {"deadline": 5, "connect_timeout": 5, "clock": ManualClock()}
    return Guard(url, **patience | options)


@pytest.fixture
async def owner(valkey: ValkeyServer) -> AsyncIterator[Redis]:
    """Return a client that may configure the test's own server."""
    async with Redis.from_url(valkey.url) as client:
        yield client


@pytest.mark.parametrize("login", [":wrong@", "nobody:wrong@", ""])
async def test_wrong_password(login: str, logged: Logged) -> None:
    """A wrong password, an unknown user or none: calls go on without the store, and the log names the reason once."""
    with valkey_server("--requirepass", "right") as server:
        async with patient(f"redis://{login}{HOST}:{server.port}") as guard:
            answers = [await ask(guard) for _ in range(20)]

    assert ["soup"] * 20 == answers
    assert logged() == [GONE.format("AuthenticationError"), DEAF.format("AuthenticationError")]


async def test_full_server_is_still_read(valkey: ValkeyServer, owner: Redis, logged: Logged) -> None:
    """When Redis is out of memory, leases are refused and hits go on; each change is logged once."""
    clock = ManualClock()
    async with patient(valkey.url, clock=clock) as guard:
        await ask(guard)
        await owner.config_set("maxmemory", 1)
        answers = [await ask(guard, f"menu-{menu_id}") for menu_id in range(20)]
        await ask(guard)
        hits, errors = guard.stats().l2_hits, guard.stats().l2_errors
        await owner.config_set("maxmemory", 0)
        clock.advance(10)
        await ask(guard, "menu-8")
        await ask(guard, "menu-9")

    assert ["soup"] * 20 == answers
    assert (2, 19) == (hits, errors)
    assert logged() == ["Redis refuses to read: OutOfMemoryError", "Redis accepts to read again"]


async def test_server_on_the_brink_does_not_flood_the_log(valkey: ValkeyServer, owner: Redis, logged: Logged) -> None:
    """A server that is almost full, and says yes and no by turns, is told of once."""
    async with patient(valkey.url) as guard:
        for number in range(20):
            await owner.config_set("maxmemory", number % 2)
            await ask(guard, f"menu-{number}")

    assert guard.stats().l2_errors == 10
    assert logged() == ["Redis refuses to read: OutOfMemoryError"]


async def test_refusals_cost_no_connection(valkey: ValkeyServer, owner: Redis) -> None:
    """A refused fill is a whole answer: its connection is used on, not opened anew."""
    await owner.config_set("maxmemory", 1)
    async with patient(valkey.url) as guard:
        before = (await owner.info("stats"))["total_connections_received"]
        for menu_id in range(20):
            await ask(guard, f"menu-{menu_id}")
        after = (await owner.info("stats"))["total_connections_received"]

    assert before == after


async def test_fill_of_a_full_server_is_stored_if_it_had_the_lease(valkey: ValkeyServer, owner: Redis) -> None:
    """A server that became full during the load takes the value, since that replaces the lease."""

    async def fill_up() -> str:
        await owner.config_set("maxmemory", 1)
        return "soup"

    async with patient(valkey.url) as guard:
        await guard.fetch("menu-7", fill_up, l2_ttl=60, returns=str)
        await ask(guard)

    assert (1, 0) == (guard.stats().l2_hits, guard.stats().l2_errors)


async def test_full_server_still_invalidates(valkey: ValkeyServer, owner: Redis) -> None:
    """A server that is out of memory still deletes, notes versions, and changes marks."""
    async with patient(valkey.url) as guard:
        await ask(guard)
        await owner.config_set("maxmemory", 1)
        await guard.invalidate("menu-7")
        await guard.invalidate("menu-7", version=7)
        await guard.invalidate_tag("menus")
        await guard.clear()
        left = [key async for key in owner.scan_iter("*menu-7*:v")]

    assert [] == left


async def test_full_server_still_makes_values_stale_and_keeps_failures(valkey: ValkeyServer, owner: Redis) -> None:
    """A server that is out of memory leaves a value its window, and a marker in the place of a lease."""
    store, key, token = RedisStore(valkey.url, deadline=5, connect_timeout=5), "sg1:{menus:menu-7}", "t" * 22
    await store.acquire(AcquireRequest(key, (), 60, 60, token=token))
    envelope = seal("menus:menu-7", b"soup", token, life=60, stale=30)
    await store.fill(key, token, envelope, 90, None, b"w", always_publish=False)
    await store.acquire(AcquireRequest(key, (), 60, 60, token=token, margin=60))
    await owner.config_set("maxmemory", 1)

    (is_released,) = await store.release([Release(key, token, b"w", failure=LoadFailure(10, 30, "OSError"))])
    paused = await store.acquire(AcquireRequest(key, (), 60, 60, margin=60))
    await store.invalidate(key, None, b"s", is_soft=True)
    left = await owner.pttl(f"{key}:v"), await owner.exists(f"{key}:l")
    await store.aclose()

    assert (True, "backoff", "OSError") == (is_released, paused.kind, paused.failure)
    assert (True, 0) == (25_000 < left[0] <= 30_000, left[1])


@pytest.fixture
async def replica(valkey: ValkeyServer, owner: Redis) -> AsyncIterator[str]:
    """Return the URL of a read-only replica of the test's own server, on which `menu-7` is stored."""
    async with patient(valkey.url) as guard:
        await ask(guard)
    await owner.config_set("repl-diskless-sync-delay", 0)
    with valkey_server("--replicaof", f"{HOST} {valkey.port}") as server:
        async with Redis.from_url(server.url) as client, asyncio.timeout(20):
            while not await client.dbsize():
                await asyncio.sleep(0)
        yield server.url


async def test_read_only_replica(replica: str, logged: Logged) -> None:
    """By a replica's address nothing is read, old as it may be, and nothing stored; the log says why, once."""
    async with patient(replica) as guard:
        answers = [await ask(guard), await ask(guard, "menu-8")]
        with pytest.raises(InvalidationPending):
            await guard.invalidate("menu-8")

    assert ["soup", "soup"] == answers
    assert (0, 2) == (guard.stats().l2_hits, guard.stats().loads)
    assert sorted(logged()) == [GONE.format("NotPrimaryError"), DEAF.format("NotPrimaryError")]


@pytest.mark.parametrize(
    ("missing", "line", "hits", "errors"),
    [
        ("+evalsha", "Redis refuses to read: NoPermissionError", 0, 10),
        ("+getrange", "Redis refuses to read: (ACL|NoPermissionError)", 0, 10),
        ("+set", "Redis refuses to read: (ACL|NoPermissionError)", 1, 9),
        ("~sg1:{default:*", "Redis refuses to read: NoPermissionError", 0, 10),
        ("+subscribe", re.escape(DEAF.format("NoPermissionError")), 1, 0),
        ("&sg1:default:bus*", re.escape(DEAF.format("NoPermissionError")), 1, 0),
    ],
)
async def test_user_without_permission(  # noqa: PLR0917  # what the case says, and fixtures
    missing: str, line: str, hits: int, errors: int, valkey: ValkeyServer, owner: Redis, logged: Logged
) -> None:
    """A user that may do only a part of it gets answers; the log says once which part is missing."""
    async with patient(valkey.url) as guard:
        await ask(guard, "menu-0")
    await owner.execute_command("ACL", "SETUSER", "menus", ">pass", *acl.rule("default", without=missing))

    async with patient(f"redis://menus:pass@{HOST}:{valkey.port}") as guard:
        answers = [await ask(guard, f"menu-{menu_id}") for menu_id in range(10)]

    assert ["soup"] * 10 == answers
    assert (hits, errors) == (guard.stats().l2_hits, guard.stats().l2_errors)
    assert len(logged()) == 1
    assert re.fullmatch(line, logged()[0])


async def test_server_without_room_for_connections(valkey: ValkeyServer, owner: Redis, logged: Logged) -> None:
    """A server that has as many clients as it takes is one that does not answer; it is used when there is room."""
    clock = ManualClock()
    await owner.config_set("maxclients", 1)
    async with patient(valkey.url, clock=clock) as guard:
        answers = [await ask(guard) for _ in range(10)]
        await owner.config_set("maxclients", 1000)
        clock.advance(2)
        answers += [await ask(guard) for _ in range(2)]

    assert ["soup"] * 12 == answers
    assert guard.stats().l2_hits == 1
    assert [line for line in logged() if line.startswith("Redis")] == [GONE.format("ConnectionError"), BACK]


async def test_server_without_the_database(valkey: ValkeyServer, logged: Logged) -> None:
    """A database that the server does not have is no reason to fail, nor to use another."""
    async with patient(f"{valkey.url.removesuffix('/0')}/99") as guard:
        answers = [await ask(guard) for _ in range(5)]

    assert ["soup"] * 5 == answers
    assert logged() == [GONE.format("ResponseError"), DEAF.format("ResponseError")]


async def test_all_connections_busy_is_no_failure_of_the_server(
    wire: Wire, namespace: str, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations that find no free connection in time go without the store, and do not open the breaker."""
    gate = Gate()

    async def hold(request: bytes) -> bytes:
        if runs(ACQUIRE, request):
            await gate.passage()
        return request

    monkeypatch.setattr(pipeline, "_QUEUE_TIMEOUT", 0.05)
    async with patient(wire.url, namespace=namespace, max_connections=1) as guard:
        wire.on_request = hold
        first = asyncio.create_task(ask(guard, "menu-0"))
        await gate.arrivals(1)
        answers = [await ask(guard, f"menu-{menu_id}") for menu_id in range(1, 5)]
        gate.open()
        answers.append(await first)
        await ask(guard, "menu-0")
        stats = guard.stats()

    assert ["soup"] * 5 == answers
    assert (4, 0, 1) == (stats.l2_skips, stats.l2_errors, stats.l2_hits)
    assert logged() == []


async def test_busy_connections_do_not_stand_for_an_answer(
    valkey: ValkeyServer, namespace: str, logged: Logged
) -> None:
    """With all connections waiting for a frozen server, the breaker opens: being busy is no sign of life."""
    async with Guard(valkey.url, max_connections=1, clock=ManualClock()) as guard:
        await ask(guard)
        valkey.freeze()
        await asyncio.gather(*(ask(guard, f"menu-{menu_id}") for menu_id in range(100)))
        for _ in range(3):
            await ask(guard)

    assert logged() == ["Redis does not answer (TimeoutError); going on without it, probing again and again"]


async def test_refusal_is_told_by_its_code(valkey: ValkeyServer, owner: Redis) -> None:
    """What a store says about a refusal is its code; the server's sentence may quote keys and values."""
    await owner.config_set("maxmemory", 1)
    store = RedisStore(valkey.url, deadline=5, connect_timeout=5)

    with pytest.raises(Refused) as refusal:
        await find(store, "menu-7")
    await store.aclose()

    assert str(refusal.value) == "OutOfMemoryError"
