"""A lone server."""

from redis.asyncio.connection import Connection

from stampede_guard.stores import Refused
from stampede_guard.stores._node import Limits, Node
from stampede_guard.stores._topology import Single


async def test_lone_server_has_everything_and_knows_nobody() -> None:
    """Every key is its own, no replica is there to be read from, and no refusal leads elsewhere."""
    node = Node("Redis", Connection, {}, Limits())
    single = Single(node)

    assert node is single.primary("menu")
    assert single.replica("menu") is None
    assert await single.follow("menu", node, Refused("MOVED")) is None
