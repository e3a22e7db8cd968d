import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import SSLConnection, UnixDomainSocketConnection

from demo_api.servers import valkey_server
from stampede_guard import ConfigurationError, Guard
from stampede_guard._stats import Counters
from stampede_guard.stores._tier import Tier
from stampede_guard.stores.redis import RedisStore, connection_options, redis_stores
from stampede_guard.testing import ManualClock

CANARY = "canary"


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RedisStore]:
    """Return a store over the shared server."""
    store = RedisStore(redis_url, deadline=5, connect_timeout=5)
    yield store
    await store.aclose()


async def test_what_was_written_is_read(store: RedisStore, namespace: str) -> None:
    """The envelope comes back, with the life that it has left."""
    await store.write(namespace, b"soup", 60)

    found = await store.read(namespace)

    assert found is not None
    assert found.envelope == b"soup"
    assert found.life is not None
    assert 50 < found.life <= 60


async def test_absent_key_reads_as_none(store: RedisStore, namespace: str) -> None:
    """What is not there is `None`."""
    assert await store.read(namespace) is None


async def test_a_life_too_short_to_measure_is_a_millisecond(store: RedisStore, namespace: str) -> None:
    """Redis refuses an expiry of zero, so the shortest life is a millisecond."""
    await store.write(namespace, b"soup", 0.0001)


async def test_deleted_key_is_gone(store: RedisStore, namespace: str) -> None:
    """Deleting leaves nothing to read; doing so twice is as good."""
    await store.write(namespace, b"soup", 60)

    await store.delete(namespace)
    await store.delete(namespace)

    assert await store.read(namespace) is None


async def test_pool_settings(store: RedisStore) -> None:
    """What correctness rests on: no retries, no maintenance notifications, no socket timeouts, RESP2."""
    await store.open()
    pool = store._pool
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
    tier = Tier(store, namespace, 100, ManualClock())
    counters = Counters()

    await asyncio.gather(*(tier.fill(str(number), b"soup", 60, lambda: True, counters) for number in range(100)))
    found = await asyncio.gather(*(tier.read(str(number), 60, counters) for number in range(100)))
    connections = len(store._pool._available_connections)
    await tier.aclose()

    assert [b"soup"] * 100 == [stored.envelope for stored in found if stored is not None]
    assert connections <= 3


async def test_unix_socket(tmp_path: Path) -> None:
    """A `unix://` URL reaches a server without a port."""
    socket = tmp_path / "valkey.sock"

    async def load() -> str:
        return "soup"

    with valkey_server("--unixsocket", str(socket)):
        async with Guard(f"unix://{socket}", deadline=5, connect_timeout=5) as first:
            await first.fetch("menu-7", load, l2_ttl=60, returns=str)
        async with Guard(f"unix://{socket}", deadline=5, connect_timeout=5) as second:
            await second.fetch("menu-7", load, l2_ttl=60, returns=str)

    assert (1, 0) == (second.stats().l2_hits, second.stats().loads)


async def test_password_and_database_of_the_url_are_used(namespace: str) -> None:
    """Quoted characters in the password are unquoted, and the database is selected."""
    with valkey_server("--requirepass", "s/e:c@r#t") as server:
        url = f"redis://:s%2Fe%3Ac%40r%23t@127.0.0.1:{server.port}/3"
        store = RedisStore(url, deadline=5, connect_timeout=5)
        await store.write(namespace, b"soup", 60)
        await store.aclose()
        async with Redis.from_url(url) as admin:
            found = await admin.get(namespace)

    assert found == b"soup"


async def test_acl_user_with_the_documented_permissions(namespace: str) -> None:
    """The permissions that the documentation names are enough, and errors stay away."""

    async def load() -> str:
        return "soup"

    with valkey_server() as server:
        async with Redis.from_url(server.url) as admin:
            rules = (
                f"on >pass resetkeys resetchannels ~sg1:{{{namespace}:* -@all +ping +getrange +pttl +set +del +select"
            )
            await admin.execute_command("ACL", "SETUSER", "menus", *rules.split())
        url = f"redis://menus:pass@127.0.0.1:{server.port}/1"
        async with Guard(url, namespace=namespace, deadline=5, connect_timeout=5) as guard:
            await guard.fetch("menu-7", load, l2_ttl=60, returns=str)
            await guard.fetch("menu-7", load, l2_ttl=60, returns=str)
            confirmed = await guard.invalidate("menu-7")

    assert confirmed
    assert (1, 0) == (guard.stats().l2_hits, guard.stats().l2_errors)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://localhost", {"host": "localhost", "port": 6379, "db": 0}),
        ("redis://", {"host": "localhost", "port": 6379, "db": 0}),
        ("redis://cache:7000/5", {"host": "cache", "port": 7000, "db": 5}),
        ("redis://[::1]:7000", {"host": "::1", "port": 7000, "db": 0}),
        ("redis://menus@cache", {"host": "cache", "port": 6379, "db": 0, "username": "menus"}),
        (
            "redis://menus:p%40ss@cache",
            {"host": "cache", "port": 6379, "db": 0, "username": "menus", "password": "p@ss"},
        ),
        ("unix:///run/redis%20one.sock", {"path": "/run/redis one.sock"}),
        ("unix://:pass@/run/redis.sock", {"path": "/run/redis.sock", "password": "pass"}),
    ],
)
def test_url_says_where_the_server_is(url: str, expected: dict[str, object]) -> None:
    """Host, port, database, path and login are taken from the URL."""
    _, options = connection_options(url)

    assert {"username": None, "password": None} | expected == options


def test_rediss_checks_certificates() -> None:
    """A `rediss://` URL gets TLS with certificates and host names checked."""
    connection_class, options = connection_options("rediss://cache")
    connection = connection_class(**options)

    assert connection_class is SSLConnection
    assert (2, True) == (connection.ssl_context.cert_reqs, connection.ssl_context.check_hostname)


def test_unix_url_gets_a_unix_connection() -> None:
    """A `unix://` URL is a path."""
    assert connection_options("unix:///run/redis.sock")[0] is UnixDomainSocketConnection


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"http://{CANARY}", "redis://"),
        (f"{CANARY}", "redis://"),
        (f"redis://:{CANARY}@cache:port", "port"),
        (f"redis://:{CANARY}@cache:70000", "port"),
        (f"redis://:pass/{CANARY}@cache:6379/0", "port"),
        (f"redis://:12/{CANARY}@cache:6379/0", "database"),
        (f"redis://cache/{CANARY}", "database"),
        (f"redis://cache/-1{CANARY}", "database"),
        ("redis://cache?ssl_cert_reqs=none", "option"),
        (f"redis://cache/0?{CANARY}=10", "option"),
        (f"redis://:pa?{CANARY}@cache", "option"),
        (f"redis://:pa#{CANARY}=@cache", "option"),
        (f"redis://[{CANARY}", "the form is"),
        (f"redis://cache\N{FULLWIDTH NUMBER SIGN}{CANARY}", "the form is"),
        (f"unix://?{CANARY}", "option"),
        ("unix://", "path"),
    ],
)
def test_bad_url_is_refused_without_quoting_it(url: str, reason: str) -> None:
    """A wrong URL is an error that says what is wrong, and shows no part that could be a password."""
    with pytest.raises(ConfigurationError, match=reason) as refusal:
        Guard(url)

    error: BaseException | None = refusal.value
    while error is not None:
        assert CANARY not in f"{error!r} {error}"
        error = None if error.__suppress_context__ else error.__cause__ or error.__context__


@pytest.mark.parametrize("option", ["deadline", "connect_timeout", "max_connections", "max_bytes"])
def test_options_are_checked(option: str) -> None:
    """A zero is refused by name."""
    options = {option: 0}
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
