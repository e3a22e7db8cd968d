"""A request whose connection is gone, and which the server executes nevertheless, when nobody expects it any more."""

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
from proxying import LossyProxy, runs
from redis.asyncio import Redis
from stored import script_calls

from stampede_guard import Guard
from stampede_guard.stores._redis import scripts
from stampede_guard.testing import Gate


class HoldingWire(LossyProxy):
    """A proxy that resets the connection of the first request of a script, and delivers that request when told to."""

    def __init__(self, port: int) -> None:
        super().__init__(port, "")
        self.held: scripts.Script | None = None
        self.gate = Gate()

    def is_late(self, request: bytes) -> bool:
        """Return whether this is the request to be held."""
        if self.held is None or not runs(self.held, request):
            return False
        self.held = None
        return True

    async def lateness(self) -> None:
        """Wait for the test."""
        await self.gate.passage()


class Row:
    """What loaders read: the present truth; a load can be held after it has read."""

    def __init__(self) -> None:
        self.version = "old"
        self.gate = Gate()

    async def load(self) -> str:
        """Read the truth, and take one's time."""
        version = self.version
        await self.gate.passage()
        return version


@pytest.fixture
async def wire(redis_url: str) -> AsyncIterator[HoldingWire]:
    """Return a proxy to the shared server."""
    async with HoldingWire(urlsplit(redis_url).port or 6379) as wire:
        yield wire


async def executed(admin: Redis, before: int, requests: int) -> None:
    """Wait until the server has executed so many more requests of scripts than before."""
    async with asyncio.timeout(10):
        while await script_calls(admin) < before + requests:
            await asyncio.sleep(0)


@pytest.fixture
async def slow(wire: HoldingWire, namespace: str) -> AsyncIterator[Guard]:
    """Return the guard of the process whose requests are late."""
    async with Guard(wire.url, namespace=namespace, deadline=5, connect_timeout=5) as guard:
        yield guard


async def test_late_request_for_a_lease_brings_no_right_back(
    wire: HoldingWire, slow: Guard, other: Guard, namespace: str, admin: Redis
) -> None:
    """A lost request for a lease is made again; executed late, after an invalidation, it must not let the load store.

    1. ACQUIRE is sent, and its connection dies. 2. Sent again, it is granted, and the load reads. 3. Another process
    writes and invalidates. 4. The server executes the first ACQUIRE. 5. The load is over, and wants to store.
    """
    row = Row()
    wire.held = scripts.ACQUIRE
    calling = asyncio.create_task(slow.fetch("row", row.load, l2_ttl=60, returns=str))
    await wire.gate.arrivals(1)
    await row.gate.arrivals(1)
    row.version = "new"
    await other.invalidate("row")
    before = await script_calls(admin)
    wire.gate.open()
    await executed(admin, before, 1)
    row.gate.open()
    late = await calling
    stored = await admin.get(f"sg1:{{{namespace}:row}}:v")
    answers = [await guard.fetch("row", row.load, l2_ttl=60, returns=str) for guard in (other, slow)]

    assert late == "old"
    assert stored is None
    assert ["new", "new"] == answers


async def test_late_invalidation_of_a_tag_brings_no_value_back(
    wire: HoldingWire, slow: Guard, other: Guard, admin: Redis
) -> None:
    """A lost invalidation of a tag is made again; executed late, it must not undo one that came in between.

    1. The tag's new mark is sent, and the connection dies. 2. Sent again, it is confirmed. 3. A value is stored under
    it. 4. Another process writes, and invalidates the tag. 5. The server executes the first request.
    """
    row = Row()
    row.gate.open()
    wire.held = scripts.INVALIDATE_TAG
    await slow.invalidate_tag("rows")
    await other.fetch("row", row.load, l2_ttl=60, returns=str, tags=("rows",))
    row.version = "new"
    await other.invalidate_tag("rows")
    before = await script_calls(admin)
    wire.gate.open()
    await executed(admin, before, 1)
    answers = [await guard.fetch("row", row.load, l2_ttl=60, returns=str, tags=("rows",)) for guard in (slow, other)]

    assert ["new", "new"] == answers
