import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import acl
import pytest
from loaders import refuse, returning
from redis.asyncio import Redis
from redis.asyncio.connection import SSLConnection, UnixDomainSocketConnection
from redis.exceptions import RedisError
from stored import find, pool_of, put

from demo_api.servers import valkey_server
from stampede_guard import ConfigurationError, Guard
from stampede_guard._tokens import new_token
from stampede_guard.stores import AcquireRequest, AcquireResult, LoadFailure, Refused, Release
from stampede_guard.stores._envelope import seal
from stampede_guard.stores.redis import RedisStore, redis_stores

CANARY = "canary"
WORD = b"wmenu-7"

Logged = Callable[[], list[str]]


@pytest.fixture
async def store(redis_url: str, namespace: str) -> AsyncIterator[RedisStore]:
    """Return a store over the shared server."""
    store = RedisStore(redis_url, deadline=5, connect_timeout=5)
    store.channel = f"sg1:{namespace}:bus"
    yield store
    await store.aclose()


@pytest.fixture
def tag(namespace: str) -> str:
    """Return the key of a tag of the test's own."""
    return f"sg1:{{{namespace}:menus}}:t"


def sealed(token: str, version: int = 0, payload: bytes = b"soup") -> bytes:
    """Return as much of an envelope as the scripts look at."""
    return seal("menu-7", payload, token, version)


async def acquire(store: RedisStore, key: str, token: str, reject: bytes = b"", lease: float = 60) -> AcquireResult:
    """Ask for the value or the lease."""
    return await store.acquire(AcquireRequest(key, (), lease, 60, token=token, reject=reject))


async def fill(store: RedisStore, key: str, token: str, version: int | None = None) -> bool:
    """Store the value of the flight with *token*."""
    return await store.fill(key, token, sealed(token, version or 0), 60, version, WORD, always_publish=False)


async def test_life_of_a_mark_is_prolonged(store: RedisStore, key: str, tag: str, admin: Redis) -> None:
    """A mark outlives the values that carry it, however long ago it was made."""
    await store.acquire(AcquireRequest(key, (tag,), 60, 10))
    (mark,) = (await store.acquire(AcquireRequest(key, (tag,), 60, 1000))).marks

    assert 900 < await admin.ttl(tag) <= 1000
    assert await admin.get(tag) == mark


async def test_server_that_has_forgotten_the_scripts_is_taught(store: RedisStore, key: str, admin: Redis) -> None:
    """After a restart or a `SCRIPT FLUSH`, each script is sent once more as text."""
    token = new_token()
    for _ in range(2):
        await admin.script_flush()
        await store.acquire(AcquireRequest(key, (f"{key}:t",), 60, 60, token=token, reject=b"*"))
        await admin.script_flush()
        assert [True] == await store.renew([(key, token, 60)])
        await admin.script_flush()
        assert await fill(store, key, token)

    found = await find(store, key)
    assert found is not None
    assert sealed(token) == found.envelope


async def test_a_life_too_short_to_measure_is_a_millisecond(store: RedisStore, key: str) -> None:
    """Redis refuses an expiry of zero, so the shortest life is a millisecond."""
    await put(store, key, b"soup", 0.0001)


async def test_who_stored_a_value_is_told(store: RedisStore, key: str, admin: Redis) -> None:
    """The token in a value can be read alone; nothing stands for no value, and what is no value refuses."""
    absent = await store.stored_by(f"{key}:v")
    await admin.rpush(f"{key}:v", "menu")

    assert () == absent
    with pytest.raises(Refused):
        await store.stored_by(f"{key}:v")


async def test_pool_settings(store: RedisStore) -> None:
    """What correctness rests on: no retries, no maintenance notifications, no socket timeouts, RESP2."""
    await store.open()
    pool = pool_of(store)
    connection = await pool.get_connection()

    try:
        assert connection.retry.get_retries() == 0
        assert not pool.maint_notifications_enabled()
        assert connection.socket_timeout is None
        assert connection.socket_connect_timeout is None
        assert str(connection.protocol) == "2"
        assert connection.health_check_interval == 0
    finally:
        await pool.release(connection)


async def test_connections_are_bounded(redis_url: str, namespace: str) -> None:
    """However many operations run at once, no more than `max_connections` are open, and none is refused."""
    store = RedisStore(redis_url, deadline=5, connect_timeout=5, max_connections=3)
    async with Guard(lambda: store, namespace=namespace) as guard:
        ops = [f"menu-{number}" for number in range(100)]
        await asyncio.gather(*(guard.fetch(op, returning("soup"), l2_ttl=60, returns=str) for op in ops))
        found = await asyncio.gather(*(guard.fetch(op, refuse, l2_ttl=60, returns=str) for op in ops))
        connections = len(pool_of(store)._available_connections)

    assert ["soup"] * 100 == found
    assert (100, 0, 0) == (guard.stats().l2_hits, guard.stats().l2_skips, guard.stats().l2_errors)
    assert connections <= 3


async def test_unix_socket(tmp_path: Path) -> None:
    """A `unix://` URL reaches a server without a port."""
    socket = tmp_path / "valkey.sock"

    with valkey_server("--unixsocket", str(socket)):
        async with Guard(f"unix://{socket}", deadline=5, connect_timeout=5) as first:
            await first.fetch("menu-7", returning("soup"), l2_ttl=60, returns=str)
        async with Guard(f"unix://{socket}", deadline=5, connect_timeout=5) as second:
            await second.fetch("menu-7", returning("soup"), l2_ttl=60, returns=str)

    assert (1, 0) == (second.stats().l2_hits, second.stats().loads)


async def test_password_and_database_of_the_url_are_used() -> None:
    """Quoted characters in the password are unquoted, and the database is selected."""
    with valkey_server("--requirepass", "s/e:c@r#t") as server:
        url = f"redis://:s%2Fe%3Ac%40r%23t@127.0.0.1:{server.port}/3"
        store = RedisStore(url, deadline=5, connect_timeout=5)
        await put(store, "menu-7", b"soup")
        await store.aclose()
        async with Redis.from_url(url) as admin:
            found = await admin.get("menu-7:v")

    assert found == b"soup"


async def use_guard(url: str) -> None:
    """Let two guards load, and invalidate in every way."""

    async def ask(guard: Guard) -> str:
        return await guard.fetch("menu-7", returning("soup"), ttl=60, l2_ttl=60, returns=str, tags=("menus",))

    options: dict[str, Any] = {"namespace": "menus", "deadline": 5, "connect_timeout": 5}
    async with Guard(url, tracking=True, **options) as guard, Guard(url, **options) as other:
        await asyncio.gather(ask(guard), ask(other))
        await guard.invalidate("menu-7", version=7)
        await guard.invalidate_tag("menus")
        await guard.clear()


async def use_store(url: str) -> None:
    """Have each script go each of its ways that ask for another command; raises if one is refused."""
    store = RedisStore(url, deadline=5, connect_timeout=5, tracking=True)
    store.channel = "sg1:menus:bus"
    op, mark, token = "sg1:{menus:menu-7}", "sg1:{menus:}:t", new_token()
    try:
        await store.open()
        async with store.listen():
            await store.acquire(AcquireRequest(op, (mark,), 60, 60, token=token))
            await store.acquire(AcquireRequest(op, (mark,), 60, 6000))  # waits, and prolongs the mark
            await store.renew([(op, token, 60)])
            await store.fill(
                op, token, seal("menus:menu-7", b"soup", token, 7, stale=30), 60, 7, WORD, always_publish=True
            )
            await store.acquire(AcquireRequest(op, (mark,), 60, 60, token=token, reject=b"*"))
            await store.release([Release(op, token, WORD)])
            await store.acquire(AcquireRequest(op, (mark,), 60, 60, token=token, reject=b"*"))
            await store.release([Release(op, token, WORD, failure=LoadFailure(1, 2, "OSError"))])
            await store.stored_by(f"{op}:v")
            await store.invalidate(op, None, WORD, is_soft=True)
            await store.invalidate(op, 7, WORD)
            await store.invalidate_tag(mark, b"random", 60, WORD)
            await store.echo(WORD)
    finally:
        await store.aclose()


async def grant(admin: Redis, rules: list[str]) -> None:
    """Make the user menus."""
    await admin.execute_command("ACL", "SETUSER", "menus", "reset", ">pass", *rules)


async def test_acl_user_with_the_documented_permissions(logged: Logged) -> None:
    """The permissions that the documentation names are enough, and errors stay away."""
    with valkey_server() as server:
        url = f"redis://menus:pass@127.0.0.1:{server.port}/1"
        async with Redis.from_url(server.url) as admin:
            await grant(admin, acl.rule("menus"))
            await use_guard(url)
            await use_store(url)
            denied = [str(entry["object"]) for entry in await admin.acl_log()]

    assert logged() == []
    assert {"client|setinfo"} == {*denied}  # how redis-py introduces itself


async def test_acl_user_needs_every_documented_permission() -> None:
    """Without any one of the permissions that a lone server asks for, something is refused."""
    others = {f"+{command}" for command in (*acl.ADVISABLE, *acl.WITH_REPLICAS, *acl.IN_A_CLUSTER)}
    words = [word for word in acl.rule("menus") if word[0] in "+~&" and word not in others]
    needless = []
    with valkey_server() as server:
        async with Redis.from_url(server.url) as admin:
            for word in words:
                await grant(admin, acl.rule("menus", without=word))
                await admin.flushall()
                await admin.script_flush()
                try:
                    await use_store(f"redis://menus:pass@127.0.0.1:{server.port}/1")
                except (Refused, RedisError):
                    continue
                needless.append(word)

    assert [] == needless


def test_rediss_checks_certificates() -> None:
    """A `rediss://` URL gets TLS with certificates and host names checked."""
    pool = pool_of(RedisStore("rediss://cache"))
    connection = pool.connection_class(**pool.connection_kwargs)

    assert isinstance(connection, SSLConnection)
    assert (2, True) == (connection.ssl_context.cert_reqs, connection.ssl_context.check_hostname)


def test_unix_url_gets_a_unix_connection() -> None:
    """A `unix://` URL is a path."""
    pool = pool_of(RedisStore("unix:///run/redis.sock"))

    assert pool.connection_class is UnixDomainSocketConnection
    assert pool.connection_kwargs["path"] == "/run/redis.sock"


@pytest.mark.parametrize("option", ["deadline", "connect_timeout", "max_connections", "max_bytes"])
def test_options_are_checked(option: str) -> None:
    """A zero is refused by name."""
    options: dict[str, Any] = {option: 0}
    with pytest.raises(ConfigurationError, match=option):
        RedisStore("redis://localhost", **options)


def test_store_is_made_once_per_loop() -> None:
    """A URL becomes what makes a store for each event loop; nothing is connected."""
    make = redis_stores("redis://localhost", deadline=1)

    assert make() is not make()


def test_repr_shows_no_url() -> None:
    """Neither store nor guard shows where its server is, nor the password."""
    url = f"redis://{CANARY}:{CANARY}@{CANARY}:6379/0"

    assert CANARY not in repr(RedisStore(url)) + repr(Guard(url))
