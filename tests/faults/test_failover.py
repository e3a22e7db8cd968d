"""An address that leads to another server: a virtual one, a service, a name; the old server is demoted and lives on."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from loaders import returning
from polling import LIMITS
from proxying import Wire
from redis.asyncio.connection import Connection
from waiting import until

from demo_api.servers import HOST, ValkeyServer, valkey_server
from demo_api.topologies import ask as tell
from demo_api.topologies import follows, leads
from stampede_guard import Guard, InvalidationPending
from stampede_guard._bus import backplane
from stampede_guard.stores._redis import node
from stampede_guard.stores._redis.node import Node, NotPrimaryError
from stampede_guard.stores.redis import RedisStore

OP = "menu-7"
KEY = f"sg1:{{default:{OP}}}"


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[ValkeyServer, ValkeyServer]]:
    """Return two servers, either of which can be demoted."""
    at_once = ("--repl-diskless-sync-delay", "0")
    with valkey_server(*at_once) as first, valkey_server(*at_once) as second:
        yield first, second


class Address:
    """What leads to one of two servers: first to the primary, which has the other for its replica."""

    def __init__(self, wire: Wire, old: ValkeyServer, new: ValkeyServer) -> None:
        self.wire = wire
        self.old = old
        self.new = new

    @property
    def url(self) -> str:
        """The address."""
        return self.wire.url

    async def demote(self) -> None:
        """Let the replica be the primary, and the primary its replica; connections stay, and so does the address."""
        tell(self.new, "REPLICAOF", "NO", "ONE")
        tell(self.old, "REPLICAOF", HOST, self.new.port)
        await until(lambda: follows(self.old) and leads(self.new), "the new order")

    async def switch(self) -> None:
        """Do so, and let the address lead to the new primary; connections stay where they are."""
        await self.demote()
        self.wire.port = self.new.port


@pytest.fixture
async def address(pair: tuple[ValkeyServer, ValkeyServer]) -> AsyncIterator[Address]:
    """Return the address of the first of two empty servers."""
    old, new = pair
    tell(old, "REPLICAOF", "NO", "ONE")
    tell(old, "FLUSHALL")
    tell(new, "REPLICAOF", HOST, old.port)
    await until(lambda: leads(old) and follows(new), "the old order")
    async with Wire(old.port) as wire:
        yield Address(wire, old, new)


@pytest.fixture
def doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no server be believed to be the primary for longer than one exchange."""
    monkeypatch.setattr(node, "_ROLE_MAX_AGE", 0.0)


@pytest.fixture
def certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a server that was the primary once be asked no more."""
    monkeypatch.setattr(node, "_ROLE_MAX_AGE", 3600.0)


@pytest.fixture
def fast_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second pass in a twentieth."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 0.05)


def patient(url: str) -> Guard:
    """Return a guard that waits long enough on a busy machine."""
    return Guard(url, deadline=5, connect_timeout=5)


async def ask(guard: Guard, answer: str, ttl: float | None = None) -> str:
    """Make a call that would load *answer*."""
    return await guard.fetch(OP, returning(answer), ttl=ttl, l2_ttl=60, returns=str)


def node_at(address: Address) -> Node:
    """Return a node behind *address*."""
    return Node(
        "Redis", Connection, {"host": HOST, "port": int(address.url.rpartition(":")[2].removesuffix("/0"))}, LIMITS
    )


@pytest.mark.usefixtures("certain", "no_echoes")
async def test_write_that_is_refused_goes_to_the_new_primary(address: Address) -> None:
    """READONLY ends the connections to the old primary, and within the same call the new one is told."""
    async with patient(address.url) as guard:
        await ask(guard, "old")
        await address.switch()
        await guard.invalidate(OP)
        answer = await ask(guard, "new")
        stats = guard.stats()

    assert ("new", 0, 0) == (answer, stats.l2_errors, stats.l2_skips)
    assert 1 == tell(address.new, "EXISTS", f"{KEY}:v")


@pytest.mark.usefixtures("doubtful", "no_echoes")
async def test_old_primary_is_not_read(address: Address) -> None:
    """A process that only reads learns of the demotion by asking for the role, and reads from the new primary."""
    async with patient(address.url) as guard:
        await ask(guard, "old")
        await address.demote()
        tell(address.old, "REPLICAOF", HOST, 1)  # so that it goes on with what it had
        tell(address.new, "DEL", f"{KEY}:v")
        address.wire.port = address.new.port
        answer = await ask(guard, "new")

    assert ("new", 0) == (answer, guard.stats().l2_hits)


@pytest.mark.usefixtures("doubtful", "fast_beats")
async def test_bus_moves_to_the_new_primary(address: Address) -> None:
    """A guard that does nothing hears the new primary within a beat or two, and what is invalidated there."""
    async with patient(address.url) as idle, patient(address.url) as busy:
        await ask(idle, "old", ttl=60)
        await address.switch()
        tell(address.old, "REPLICAOF", HOST, 1)  # so that it passes on no messages
        await until(lambda: len(tell(address.new, "PUBSUB", "CHANNELS", "*:bus")) == 1, "the bus there")
        await busy.invalidate(OP)
        await until(lambda: idle.peek(OP) is None, "the word to arrive")


@pytest.mark.usefixtures("doubtful", "fast_beats")
async def test_what_the_old_primary_confirmed_is_said_again(address: Address) -> None:
    """An invalidation that the new primary may not have heard of is repeated there."""
    async with patient(address.url) as guard:
        await guard.invalidate(OP)
        await address.switch()
        tell(address.new, "SET", f"{KEY}:v", "left over")
        await until(lambda: not tell(address.new, "EXISTS", f"{KEY}:v"), "the repetition")


@pytest.mark.usefixtures("doubtful", "fast_beats")
async def test_primary_that_is_one_again(address: Address) -> None:
    """While the address leads to a replica, the store is done without; afterwards it is used, and told what it lost."""
    async with patient(address.url) as guard:
        await guard.invalidate(OP)
        await address.demote()
        with pytest.raises(InvalidationPending):
            await guard.invalidate("menu-8")
        answers = [await ask(guard, f"{number}") for number in range(3)]
        tell(address.new, "SET", f"{KEY}:v", "left over")
        await until(lambda: tell(address.old, "EXISTS", f"{KEY}:v"), "the copy")
        tell(address.old, "REPLICAOF", "NO", "ONE")

        await until(lambda: not tell(address.old, "EXISTS", f"{KEY}:v"), "the repetition")
    assert ["0", "1", "2"] == answers


async def test_replica_is_not_asked_on_and_on(address: Address) -> None:
    """As long as an address leads to a replica, it is looked up once a second, however much is asked."""
    await address.demote()
    demotions: list[str] = []
    node = node_at(address)
    node.require_primary(lambda: demotions.append("demoted"))
    for _ in range(50):
        with pytest.raises(NotPrimaryError):
            await node.exchange((bytes, "PING"))
    opened = address.wire.opened
    node._avoided_until = 0.0
    with pytest.raises(NotPrimaryError):
        await node.exchange((bytes, "PING"))
    with pytest.raises(NotPrimaryError):
        await node.connect()
    tell(address.old, "REPLICAOF", "NO", "ONE")
    node._avoided_until = 0.0
    (reply,) = await node.exchange((bytes, "PING"))
    await node.aclose()

    assert (1, 3, b"PONG", ["demoted"]) == (opened, address.wire.opened - 1, reply, demotions)


async def test_demotion_ends_dialled_connections(address: Address) -> None:
    """A connection that was handed out is closed when the server behind it may be the wrong one."""
    node = node_at(address)
    node.require_primary(lambda: None)
    connection = await node.connect()
    hearing = asyncio.create_task(connection.read_response())
    await asyncio.sleep(0)
    await address.demote()
    with pytest.raises(NotPrimaryError):
        await node.exchange((bytes, "PING"))
    await asyncio.wait([hearing])
    assert isinstance(hearing.exception(), Exception)
    await node.aclose()


async def test_first_of_several_hosts(address: Address) -> None:
    """With a list of hosts the first has to be the primary just as well, and its demotion is counted."""
    url = f"{address.url.removesuffix('/0')},{HOST}:{address.new.port}"
    store = RedisStore(url, deadline=5, connect_timeout=5)
    await store.open()
    node, before = store._topology.primary(KEY), store.generation
    await address.demote()
    node._confirmed.clear()  # as after a second
    with pytest.raises(NotPrimaryError):
        await node.exchange((bytes, "PING"))
    after = store.generation
    await store.aclose()

    assert (0, 1) == (before, after)


@pytest.mark.parametrize("code", [b"READONLY", b"MASTERDOWN"])
async def test_refusals_of_a_replica(code: bytes, wire: Wire) -> None:
    """What only a replica says counts for more than the role that it told; replies beside it are not believed."""

    async def refuse(reply: bytes) -> bytes:
        return reply.replace(b"+PONG\r\n", b"-%b no\r\n" % code, 1)

    store = RedisStore(wire.url, deadline=5, connect_timeout=5)
    wire.on_reply = refuse
    with pytest.raises(NotPrimaryError):
        await store._topology.primary(KEY).exchange((bytes, "PING"), (bytes, "PING"))
    generation = store.generation
    await store.aclose()

    assert 1 == generation


async def test_server_that_does_not_tell_its_role(wire: Wire) -> None:
    """A server, or a proxy, that does not know HELLO is taken for the primary."""

    async def misspell(request: bytes) -> bytes:
        return request.replace(b"HELLO", b"HULLO")

    store = RedisStore(wire.url, deadline=5, connect_timeout=5)
    wire.on_request = misspell
    await store.open()
    async with store.listen():
        pass
    await store.aclose()
