"""A redis-py client of the user's own as the store."""

import ssl
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.cluster import LoadBalancingStrategy
from redis.maint_notifications import MaintNotificationsConfig

from demo_api.servers import HOST, valkey_server
from stampede_guard import ConfigurationError
from stampede_guard.stores._redis.client import describe
from stampede_guard.stores._redis.node import ConnectionLimits
from stampede_guard.stores._redis.topology.factory import _node_maker, _then, make_topology

PATIENT = ConnectionLimits(5.0, 5.0, 4)
FLAWLESS: dict[str, Any] = {
    "protocol": 2,
    "retry": Retry(NoBackoff(), 0),
    "socket_timeout": None,
    "maint_notifications_config": MaintNotificationsConfig(enabled=False),
}
FAULTS: dict[str, dict[str, Any]] = {
    "maintenance notifications": {
        "maint_notifications_config": MaintNotificationsConfig(enabled="auto"),
        "protocol": 3,
    },
    "retries": {"retry": Retry(NoBackoff(), 3)},
    "socket_timeout": {"socket_timeout": 5},
    "decode_responses": {"decode_responses": True},
    "protocol 3": {"protocol": 3},
    "certificates": {"ssl": True, "ssl_cert_reqs": "none"},
    "host names": {"ssl": True, "ssl_check_hostname": False},
}


def test_client_without_faults_is_taken_in_silence(logged: Callable[[], list[str]]) -> None:
    """There is nothing to say about a client whose settings are right."""
    servers = describe(Redis(host="cache", port=7000, db=3, username="menus", password="pass", **FLAWLESS))

    assert [] == logged()
    assert ("single", (("cache", 7000),), Connection) == (servers.kind, servers.addresses, servers.connection_class)
    assert {"db": 3, "username": "menus", "password": "pass"}.items() <= servers.options.items()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_told_once(fault: str, logged: Callable[[], list[str]]) -> None:
    """What a client has wrong is named in a warning, with what is done about it; socket timeouts harm 3.11 alone."""
    describe(Redis(**FLAWLESS | FAULTS[fault]))

    warnings = [line for line in logged() if fault in line.partition(":")[0]]
    assert int(fault != "socket_timeout" or sys.version_info < (3, 12)) == len(warnings)
    assert all("the guard's own connections" in warning for warning in warnings)


def test_a_fault_comes_alone(logged: Callable[[], list[str]]) -> None:
    """One fault is one warning."""
    describe(Redis(**FLAWLESS | FAULTS["decode_responses"]))

    assert 1 == len(logged())


def test_the_defaults_of_the_client_are_faults(logged: Callable[[], list[str]]) -> None:
    """A client as redis-py makes it has notifications, retries and protocol 3."""
    describe(Redis())

    told = " ".join(logged())
    assert all(fault in told for fault in ("maintenance notifications", "retries", "protocol 3"))


async def test_own_connections_have_none_of_the_faults(namespace: str) -> None:
    """A client with every fault is used all the same, on connections without them, and is not closed."""
    with valkey_server("--requirepass", "open sesame") as server:
        async with Redis(port=server.port, password="open sesame", db=3, decode_responses=True) as client:
            await client.set(namespace, "soup")
            topology = make_topology(describe(client), PATIENT, time.monotonic)
            await topology.open()
            node = topology.primary(namespace)
            replies = await node.exchange((bytes, "GET", namespace))
            connection = await node.connect()
            settings = (
                connection.protocol,
                connection.retry.get_retries(),
                connection.socket_timeout,
                bool(node._pool.maint_notifications_enabled()),
                connection.health_check_interval,
            )
            await connection.disconnect()
            await topology.aclose()

            assert "soup" == await client.get(namespace)

    assert [b"soup"] == replies
    assert (2, 0, None, False, 0) == settings


@pytest.mark.parametrize(
    ("client", "connection_class"),
    [
        (Redis(connection_pool=BlockingConnectionPool(host="cache", port=7000)), Connection),
        (Redis(host="cache", port=7000, ssl=True), SSLConnection),
        (Redis.from_url("rediss://cache:7000"), SSLConnection),
    ],
)
def test_ways_to_make_a_client(client: Redis, connection_class: type[object]) -> None:
    """Pools of every kind and clients from URLs lead to the same place."""
    servers = describe(client)

    assert ((("cache", 7000),), connection_class) == (servers.addresses, servers.connection_class)


def test_client_of_a_unix_socket() -> None:
    """A path is kept."""
    servers = describe(Redis(unix_socket_path="/run/redis.sock"))

    assert ((), UnixDomainSocketConnection) == (servers.addresses, servers.connection_class)
    assert "/run/redis.sock" == servers.options["path"]


def test_client_of_a_cluster() -> None:
    """A cluster's client leads to its start-up nodes, and to the others by its own translation of addresses."""
    client = RedisCluster(host="one", port=7000, password="pass", address_remap=lambda _: ("two", 7001))
    servers = describe(client)

    assert ("cluster", (("one", 7000),)) == (servers.kind, servers.addresses)
    assert "pass" == servers.options["password"]
    assert servers.translate is not None
    assert ("two", 7001) == servers.translate(("one", 1))


def test_client_of_a_cluster_that_reads_from_replicas() -> None:
    """What makes the client's connections to primaries read-only too is left to it."""
    servers = describe(
        RedisCluster(host="one", port=7000, load_balancing_strategy=LoadBalancingStrategy.ROUND_ROBIN, ssl=True)
    )

    assert SSLConnection is servers.connection_class
    assert "redis_connect_func" not in servers.options


def test_client_that_sentinels_made() -> None:
    """A client from `Sentinel.master_for` leads to the sentinels, with their own password."""
    sentinels = Sentinel([("one", 26379), ("two", 26380)], sentinel_kwargs={"password": "theirs"})
    servers = describe(sentinels.master_for("menus", password="ours", db=2))

    assert ("sentinel", "menus", Connection) == (servers.kind, servers.service, servers.connection_class)
    assert (("one", 26379), ("two", 26380)) == servers.addresses
    assert ("ours", 2) == (servers.options["password"], servers.options["db"])
    assert servers.sentinel_way is not None
    assert "theirs" == servers.sentinel_way[1]["password"]


async def test_login_of_the_clients_own_making() -> None:
    """A client's own function for new connections is called for ours."""
    greeted: list[object] = []

    async def greet(connection: Any) -> None:
        await connection.on_connect()
        greeted.append(connection)

    with valkey_server() as server:
        client = Redis(host=HOST, port=server.port, redis_connect_func=greet)
        topology = make_topology(describe(client), PATIENT, time.monotonic)
        await topology.open()
        await topology.aclose()
        await client.aclose()

    assert 1 == len(greeted)


@pytest.mark.parametrize("is_async", [True, False])
async def test_login_of_the_clients_own_making_comes_first(*, is_async: bool) -> None:
    """What a topology says to a new connection itself is said after the client's own login."""
    said: list[str] = []

    async def greet_in_time(connection: Any) -> None:
        said.append("own")
        await connection.on_connect()

    def greet(connection: Any) -> Any:
        return greet_in_time(connection) if is_async else said.append("own")

    async def greet_too(_: Any) -> None:
        said.append("ours")

    with valkey_server() as server:
        options = {"redis_connect_func": greet}
        node = _node_maker(Connection, options, PATIENT)("node", (HOST, server.port), greet_too)
        if is_async:
            await node.exchange((bytes, "PING"))
        else:
            await _then(greet_too, greet)(None)
        await node.aclose()

    assert ["own", "ours"] == said


def test_url_is_described_too() -> None:
    """Whatever a guard is given goes the same way."""
    assert (("cache", 7000),) == describe("redis://cache:7000").addresses


@pytest.mark.parametrize("store", [redis.Redis(), redis.Redis().connection_pool, 7, None, ssl.CERT_NONE])
def test_anything_else_is_refused(store: object) -> None:
    """A synchronous client would block the event loop; what is no client at all is named by its type."""
    with pytest.raises(ConfigurationError, match=r"redis\.asyncio") as refusal:
        describe(store)

    assert ("synchronous" in str(refusal.value)) == isinstance(store, redis.Redis)
