"""Waiting for what real servers do."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from math import inf
from time import monotonic

from waiting import until

from demo_api.servers import ValkeyServer
from demo_api.topologies import ask
from stampede_guard.stores import Refused
from stampede_guard.stores._redis.node import ConnectionLimits, Node
from stampede_guard.stores._redis.topology.base import Topology
from stampede_guard.stores._redis.topology.factory import make_topology
from stampede_guard.stores._redis.urls import parse_url

LIMITS = ConnectionLimits(deadline=0.25, connect_timeout=0.5, max_connections=8)


class Lateness:
    """Seconds by which this process's event loop was late, in all; deadlines do not count them either."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @asynccontextmanager
    async def noted(self) -> AsyncGenerator[None]:
        """Note it while the block runs."""
        noting = asyncio.create_task(self._note())
        yield
        noting.cancel()

    async def _note(self) -> None:
        while True:
            started_at = monotonic()
            await asyncio.sleep(0.005)
            self.seconds += max(0.0, monotonic() - started_at - 0.01)


async def until_after(is_so_there: Callable[[], object], is_so: Callable[[], object], what: str) -> float:
    """Poll both until *is_so* holds; return the seconds by which that came after *is_so_there*.

    How long servers take to agree is theirs to say: a vote that is split is repeated after seconds.
    """
    there_at = inf

    def look() -> object:
        nonlocal there_at
        if there_at == inf and is_so_there():
            there_at = monotonic()
        return is_so()

    await until(look, what, deadline=30)
    return max(monotonic() - there_at, 0.0)


@asynccontextmanager
async def opened(url: str, limits: ConnectionLimits = LIMITS) -> AsyncGenerator[Topology]:
    """Yield the topology of *url*, open; afterwards it has left no task behind."""
    tasks = asyncio.all_tasks()
    topology = make_topology(parse_url(url), limits, monotonic)
    try:
        await topology.open()
        yield topology
    finally:
        await topology.aclose()
    assert asyncio.all_tasks() <= tasks


async def read(topology: Topology, key: str) -> tuple[str, bytes] | None:
    """Read *key* from a good replica; return its name and what it said, or `None` if there is none."""
    node = topology.replica(key)
    if node is None:
        return None
    try:
        (value,) = await node.exchange((bytes, "GETRANGE", key, 0, -1))
    except Exception as error:
        topology.failed(node)
        return node.name, type(error).__name__.encode()
    assert isinstance(value, bytes), value
    return node.name, value


def reads(server: ValkeyServer) -> int:
    """Return how many reads of a key *server* was asked for so far."""
    for line in ask(server, "INFO", "commandstats").decode().splitlines():
        if line.startswith("cmdstat_getrange:"):
            return int(line.partition("calls=")[2].partition(",")[0])
    return 0


class Scripted(Node):
    """A node that answers what it was told to, for states that no real server stays in.

    Attributes:
        replies: Its answers; an exception is raised.
        asked: How often it was asked.
        is_closed: Whether its connections were closed.
        error_at_closing: Raised then, if it is set.
    """

    def __init__(self, name: str, *replies: object) -> None:
        self.name = name
        self.replies: Sequence[object] = replies
        self.asked = 0
        self.is_closed = False
        self.error_at_closing: Exception | None = None

    async def exchange(self, *commands: object) -> list[object]:
        """Answer."""
        self.asked += 1
        for reply in self.replies:
            if isinstance(reply, BaseException) and not isinstance(reply, Refused):
                raise reply
        return [*self.replies[: len(commands)]]

    async def aclose(self) -> None:
        """Note it."""
        if self.error_at_closing is not None:
            raise self.error_at_closing
        self.is_closed = True
