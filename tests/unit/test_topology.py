"""Servers as a store sees them before it has talked to any."""

from redis.asyncio.connection import Connection

from stampede_guard.stores import Refused
from stampede_guard.stores._redis.node import ConnectionLimits, Node
from stampede_guard.stores._redis.topology.base import Single
from stampede_guard.stores.redis import RedisStore


async def test_lone_server_has_everything_and_knows_nobody() -> None:
    """Every key is its own, no replica is there to be read from, and no refusal leads elsewhere."""
    node = Node("Redis", Connection, {}, ConnectionLimits())
    single = Single(node)

    assert node is single.primary("menu")
    assert single.replica("menu") is None
    assert await single.follow("menu", node, Refused("MOVED")) is None


async def test_store_that_knows_no_primary_yet_goes_by_its_own_name() -> None:
    """Before the sentinels were asked nobody knows where a key is; that is no error, and no server's trouble."""
    store = RedisStore("redis+sentinel://localhost/menus")

    assert "Redis" == store.node_of("sg1:{menus:7}")
    assert await store.read_replica("sg1:{menus:7}", ()) is None
    await store.aclose()
