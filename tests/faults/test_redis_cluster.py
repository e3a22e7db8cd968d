"""Cluster: slots that move, primaries that die, and nodes that tell an old map."""

import asyncio
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any

import pytest
import redis.exceptions
from inside import untyped
from polling import LIMITS, Scripted, opened, read, reads, until_after
from redis.asyncio.connection import Connection
from redis.crc import key_slot
from stored import find, put
from waiting import until

from demo_api.servers import HOST, ValkeyServer, free_port, valkey_server
from demo_api.topologies import SLOTS, Valkeys, ask, leads, valkey_cluster
from stampede_guard import ConfigurationError, Guard
from stampede_guard._l2.lease import Lease
from stampede_guard._l2.tier import Tier
from stampede_guard._stats import Counters
from stampede_guard._tokens import new_token
from stampede_guard.stores import FAILED_NODE, AcquireRequest, Refused
from stampede_guard.stores._envelope import seal, unseal
from stampede_guard.stores._redis.node import Command, Node, Redirected
from stampede_guard.stores._redis.requests import ValueRequest
from stampede_guard.stores._redis.topology import cluster
from stampede_guard.stores._redis.topology.base import Topology
from stampede_guard.stores._redis.topology.cluster import Cluster
from stampede_guard.stores._redis.topology.factory import make_topology
from stampede_guard.stores._redis.urls import parse_url
from stampede_guard.stores.redis import RedisStore
from stampede_guard.testing import ManualClock

Logged = Callable[[], list[str]]


@pytest.fixture(scope="module")
def shared() -> Iterator[Valkeys]:
    """Return a cluster whose nodes no test may harm; slots that a test moves it moves back."""
    with valkey_cluster() as servers:
        yield servers


@pytest.fixture
def key(namespace: str) -> str:
    """Return a key of the first primary's."""
    return next(key for number in range(1_000) if key_slot((key := f"{namespace}{number}").encode()) < SLOTS // 3)


def slot_of(key: str) -> int:
    """Return the slot of *key*."""
    return key_slot(key.encode())


def port_of(node: Node) -> int:
    """Return the port of *node*."""
    port = node._pool.connection_kwargs["port"]
    assert isinstance(port, int)
    return port


def node_id(server: ValkeyServer) -> str:
    """Return how the cluster calls *server*."""
    found = ask(server, "CLUSTER", "MYID")
    assert isinstance(found, bytes)
    return found.decode()


def assign(servers: Valkeys, slot: int, owner: ValkeyServer, deadline: float = 15.0) -> None:
    """Give *slot*, and none of its keys, to *owner*, in the order in which the new owner's claim is the newer one.

    A primary keeps a slot while it holds a key of it, be it another test's or a late one of a guard. So each is
    emptied until it lets go. Primaries are told; replicas hear of it by gossip.
    """
    name, give_up_at = node_id(owner), monotonic() + deadline
    before = next(line[2][2] for line in ask(owner, "CLUSTER", "SLOTS") if line[0] <= slot <= line[1])
    ask(owner, "CLUSTER", "SETSLOT", slot, "IMPORTING", before.decode())
    for server in (owner, *(each for each in servers.primaries if each is not owner)):
        while not _takes(server, slot, name):
            assert monotonic() < give_up_at, f"waited in vain for the keys of slot {slot} to be gone"


def _takes(server: ValkeyServer, slot: int, name: str) -> bool:
    """Empty *slot* at *server*, and tell it that the node of this *name* has it; return whether it agreed."""
    for key in ask(server, "CLUSTER", "GETKEYSINSLOT", slot, 1_000):
        ask(server, "DEL", key)
    try:
        ask(server, "CLUSTER", "SETSLOT", slot, "NODE", name)
    except redis.exceptions.ResponseError as error:
        if "still hold keys" not in str(error):
            raise
        return False
    return True


async def give(servers: Valkeys, slot: int, owner: ValkeyServer) -> None:
    """Give *slot* to *owner*, and wait until every node has heard of it: the next test begins with one map."""
    assign(servers, slot, owner)

    def have_all_heard() -> bool:
        maps = [ask(server, "CLUSTER", "SLOTS") for server in (*servers.primaries, *servers.replicas)]
        owners = {line[2][1] for told in maps for line in told if line[0] <= slot <= line[1]}
        return owners == {owner.port}

    await until(have_all_heard, "the nodes to agree")


async def write(topology: Topology, node: Node, key: str, *, after: tuple[Command, ...] = ()) -> object:
    """Set *key* at *node*; return the last reply."""
    *_, reply = await node.exchange(*after, (bytes, "SET", key, "soup"))
    return reply


async def test_every_key_has_its_primary(shared: Valkeys) -> None:
    """Each of many keys is written where the map says, and nobody redirects."""
    async with opened(shared.url) as topology:
        keys = [f"menu-{number}" for number in range(60)]
        replies = [await write(topology, topology.primary(key), key) for key in keys]
        ports = {port_of(topology.primary(key)) for key in keys}

    assert [b"OK"] * 60 == replies
    assert {server.port for server in shared.primaries} == ports


async def test_reads_go_to_the_replica_of_the_slot(shared: Valkeys, key: str) -> None:
    """A good replica answers reads itself, and the primary is asked for none."""
    before = reads(shared.primary), reads(shared.replicas[0])
    async with opened(shared.url) as topology:
        await write(topology, topology.primary(key), key)
        await until(lambda: topology.replica(key), "the replica to be good")
        node = topology.replica(key)
        assert node is not None
        await until(lambda: ask(shared.replicas[0], "DBSIZE") == ask(shared.primary, "DBSIZE"), "the copy")
        answer = await read(topology, key)

    assert (node.name, b"soup") == answer
    assert (before[0], before[1] + 1) == (reads(shared.primary), reads(shared.replicas[0]))


async def test_moved_slot_is_followed(shared: Valkeys, key: str) -> None:
    """MOVED leads to the new owner within the same operation, and all later ones go there at once."""
    source, target = shared.primaries[0], shared.primaries[1]
    async with opened(shared.url) as topology:
        assert isinstance(topology, Cluster)
        node, generation = topology.primary(key), topology.generation
        untyped(topology._map._driver).cancel()  # or a look at the map could be faster
        assign(shared, slot_of(key), target)
        try:
            refusal = await write(topology, node, key)
            assert isinstance(refusal, Redirected)
            followed = await topology.follow(key, node, refusal)
            assert followed is not None
            reply = await write(topology, followed, key)
            ask(target, "DEL", key)
        finally:
            await give(shared, slot_of(key), source)

        assert (source.port, target.port, b"OK") == (port_of(node), port_of(followed), reply)
        assert followed is topology.primary(key)
        assert generation + 1 == topology.generation


async def test_map_is_looked_at_after_a_redirection(shared: Valkeys, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole map is asked for again at once, so that the other slots that moved with it are known too."""
    monkeypatch.setattr(cluster, "_MAP_PERIOD", 3600.0)
    source, target = shared.primaries[0], shared.primaries[1]
    other = next(f"o{number}" for number in range(1_000) if 0 <= slot_of(f"o{number}") < SLOTS // 3)
    async with opened(shared.url) as topology:
        assert isinstance(topology, Cluster)
        looks, node = topology._map, topology.primary(key)
        await until(lambda: topology.replica(key) and not looks._pending, "the looks that belong to the beginning")
        try:
            for moved in (key, other):
                await give(shared, slot_of(moved), target)
            refusal = await write(topology, node, key)
            assert isinstance(refusal, Redirected)
            await topology.follow(key, node, refusal)
            await until(lambda: port_of(topology.primary(other)) == target.port, "the new map")
        finally:
            for moved in (key, other):
                await give(shared, slot_of(moved), source)


async def test_slot_on_its_way_is_asked_for_there(shared: Valkeys, key: str) -> None:
    """ASK leads to the importing node this once; the slot stays where it is."""
    source, target = shared.primaries[0], shared.primaries[1]
    async with opened(shared.url) as topology:
        node, generation = topology.primary(key), topology.generation
        ask(target, "CLUSTER", "SETSLOT", slot_of(key), "IMPORTING", node_id(source))
        ask(source, "CLUSTER", "SETSLOT", slot_of(key), "MIGRATING", node_id(target))
        try:
            refusal = await write(topology, node, key)
            assert isinstance(refusal, Redirected)
            followed = await topology.follow(key, node, refusal)
            assert followed is not None
            reply = await write(topology, followed, key, after=((bytes, "ASKING"),))
            ask(target, "FLUSHALL")
        finally:
            for server in (source, target):
                ask(server, "CLUSTER", "SETSLOT", slot_of(key), "STABLE")

        assert (False, target.port, b"OK") == (refusal.is_moved, port_of(followed), reply)
        assert (node, generation) == (topology.primary(key), topology.generation)


async def load() -> bytes:
    """Return what is cached."""
    return b"soup"


def placed(namespace: str, *thirds: int) -> list[str]:
    """Return an op in the slots of each of these primaries."""
    ops = [f"menu-{number}" for number in range(1_000)]
    slots = {op: slot_of(f"sg1:{{{namespace}:{op}}}") for op in ops}
    # Well within: the primaries' ranges do not end where thirds do.
    return [next(op for op in ops if 0.1 < slots[op] * 3 / SLOTS - third < 0.9) for third in thirds]


async def test_guard_over_a_cluster(shared: Valkeys, namespace: str) -> None:
    """One load for two guards, whichever nodes have the op and its tags; an invalidation of the tag reaches both."""
    first, second, tag = placed(namespace, 0, 1, 2)
    loads = 0

    async def count() -> bytes:
        nonlocal loads
        loads += 1
        return b"soup"

    async with Guard(shared.url, namespace=namespace) as here, Guard(shared.url, namespace=namespace) as there:
        for op in (first, second):
            for guard in (here, there):
                assert b"soup" == await guard.fetch(op, count, ttl=60, l2_ttl=60, tags=(tag,), returns=bytes)
        once = loads
        await here.invalidate_tag(tag)
        await until(lambda: there.peek(first) is None and there.peek(second) is None, "the word to arrive")
        for op in (first, second):
            await there.fetch(op, count, l2_ttl=60, tags=(tag,), returns=bytes)

    assert (2, 4) == (once, loads)


async def test_guard_follows_a_slot(shared: Valkeys, namespace: str) -> None:
    """A slot that has moved costs the guard nothing: it asks where it is sent."""
    (op,) = placed(namespace, 0)
    slot, (source, target, _) = slot_of(f"sg1:{{{namespace}:{op}}}"), shared.primaries
    async with Guard(shared.url, namespace=namespace) as guard:
        assign(shared, slot, target)
        await guard.fetch(op, load, l2_ttl=60, returns=bytes)
        stats = guard.stats()
        stored = ask(target, "EXISTS", f"sg1:{{{namespace}:{op}}}:v")
        await guard.invalidate(op)
        await give(shared, slot, source)

    assert (0, 0, 1, 1) == (stats.l2_errors, stats.l2_skips, stats.loads, stored)


async def test_guard_and_a_slot_on_its_way(shared: Valkeys, namespace: str) -> None:
    """While a slot is on its way, a tag in it is invalidated where it goes; an op in it is loaded past the store."""
    (name,) = placed(namespace, 0)
    slot, (source, target, _) = slot_of(f"sg1:{{{namespace}:{name}}}"), shared.primaries
    async with Guard(shared.url, namespace=namespace) as guard:
        ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
        ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))
        try:
            await guard.invalidate_tag(name)
            answer = await guard.fetch(name, load, l2_ttl=60, returns=bytes)
            ask(target, "FLUSHALL")
        finally:
            for server in (source, target):
                ask(server, "CLUSTER", "SETSLOT", slot, "STABLE")

    assert (b"soup", 1) == (answer, guard.stats().loads)


@contextmanager
def on_its_way(slot: int, source: ValkeyServer, target: ValkeyServer) -> Generator[None]:
    """Let *slot* be on its way from *source* to *target* while the block runs; afterwards it is empty, and stays."""
    ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
    ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))
    try:
        yield
    finally:
        ask(target, "FLUSHALL")
        for server in (source, target):
            ask(server, "CLUSTER", "SETSLOT", slot, "STABLE")


@pytest.mark.parametrize("moved", ["", "v", "l", "vl", "g", "vlg", "no g"])
async def test_invalidation_in_a_slot_on_its_way(moved: str, shared: Valkeys, namespace: str) -> None:
    """Wherever value, lease and lowest version are, or the one that is missing would be, it holds at once."""
    (op,) = placed(namespace, 0)
    base = f"sg1:{{{namespace}:{op}}}"
    source, target, _ = shared.primaries
    # A starved process needs longer than 0.15 s for an exchange.
    make = partial(Guard, shared.url, namespace=namespace, deadline=3)
    async with make() as here, make() as there:
        for guard in (here, there):
            await guard.fetch(op, load, ttl=60, l2_ttl=60, returns=bytes)
        ask(source, "SET", f"{base}:l", "t" * 22)
        if moved != "no g":
            ask(source, "SET", f"{base}:g", "3")
        with on_its_way(slot_of(base), source, target):
            for name in moved.removeprefix("no g"):
                ask(source, "MIGRATE", HOST, target.port, f"{base}:{name}", 0, 5_000)
            await here.invalidate(op, version=8)
            await until(lambda: there.peek(op) is None, "the word to arrive")
            left = [ask(server, "KEYS", f"*{namespace}:{op}}}:*") for server in (source, target)]

    key = f"{base}:g".encode()
    assert ([[], [key]] if "g" in moved else [[key], []]) == left


@pytest.mark.parametrize("moves", [False, True])
async def test_tag_in_a_slot_on_its_way(moves: bool, shared: Valkeys, namespace: str) -> None:
    """A mark is replaced where it is, before it has moved and after."""
    (tag,) = placed(namespace, 0)
    mark = f"sg1:{{{namespace}:{tag}}}:t"
    source, target, _ = shared.primaries
    async with Guard(shared.url, namespace=namespace) as guard:
        await guard.fetch("menu", load, l2_ttl=60, tags=(tag,), returns=bytes)
        before = ask(source, "GET", mark)
        with on_its_way(slot_of(mark), source, target):
            if moves:
                ask(source, "MIGRATE", HOST, target.port, mark, 0, 5_000)
            await guard.invalidate_tag(tag)
            places = [ask(server, "CLUSTER", "COUNTKEYSINSLOT", slot_of(mark)) for server in (source, target)]
            await guard.fetch("menu", load, l2_ttl=60, tags=(tag,), returns=bytes)

    assert before
    assert ([int(not moves), int(moves)], 2) == (places, guard.stats().loads)


@pytest.mark.parametrize("moved", ["", "v"])
async def test_value_in_a_slot_on_its_way_is_read(moved: str, shared: Valkeys, namespace: str) -> None:
    """Wherever the value is, it is read, though no lease can be had."""
    (op,) = placed(namespace, 0)
    base = f"sg1:{{{namespace}:{op}}}"
    source, target, _ = shared.primaries
    async with Guard(shared.url, namespace=namespace) as guard:
        await guard.fetch(op, load, l2_ttl=60, returns=bytes)
        with on_its_way(slot_of(base), source, target):
            for name in moved:
                ask(source, "MIGRATE", HOST, target.port, f"{base}:{name}", 0, 5_000)
            answers = [await guard.fetch(op, load, l2_ttl=60, returns=bytes) for _ in range(3)]

    assert ([b"soup"] * 3, 3, 1) == (answers, guard.stats().l2_hits, guard.stats().loads)


@pytest.mark.parametrize("moved", ["", "v", "l", "vl", "vlg"])
async def test_old_value_in_a_slot_on_its_way(moved: str, shared: Valkeys, namespace: str) -> None:
    """Wherever the value is, it is made stale, and read; a flight that gets it has no lease, nor does any other."""
    (op,) = placed(namespace, 0)
    base, token = f"sg1:{{{namespace}:{op}}}", new_token()
    source, target, _ = shared.primaries
    store = RedisStore(shared.url, deadline=5, connect_timeout=5)
    await store.open()
    await store.acquire(AcquireRequest(base, (), 60, 60, token=token))
    envelope = seal(op, b"soup", token, life=60, stale=30)
    await store.fill(base, token, envelope, 90, None, b"w", always_publish=False)
    ask(source, "SET", f"{base}:l", "t" * 22)
    ask(source, "SET", f"{base}:g", "3")
    with on_its_way(slot_of(base), source, target):
        for name in moved:
            ask(source, "MIGRATE", HOST, target.port, f"{base}:{name}", 0, 5_000)
        await store.invalidate(base, 8, b"s", is_soft=True)
        found = await store.acquire(AcquireRequest(base, (), 60, 60, window=30))
        left = [ask(server, "KEYS", f"{base}:l") for server in (source, target)]
    await store.aclose()

    assert found.stored is not None
    opened = unseal(op, found.stored.envelope)
    assert opened is not None
    assert (b"soup", 30) == (opened.payload, opened.stale)
    assert 0 < (found.stored.ttl or 0) <= 30
    assert ("alone", [[], []]) == (found.kind, left)


@pytest.mark.parametrize("after", ["g", "l", "v"])
async def test_fill_between_the_parts_of_an_invalidation(
    after: str, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Key by key, the order is such that a load that began before leaves nothing, whenever it is stored."""
    store = RedisStore(redis_url, deadline=5, connect_timeout=5)
    key, token = f"sg1:{{{namespace}:menu-7}}", new_token()
    invalidate = store._invalidate

    async def key_by_key(keys: tuple[str, ...], version: int | None, message: bytes, *, is_soft: bool) -> None:
        if len(keys) > 1:
            raise Refused("TryAgainError")
        await invalidate(keys, version, message, is_soft=is_soft)
        if keys == (f"{key}:{after}",):
            await store.fill(key, token, b"old", 60, None, b"w", always_publish=False)

    monkeypatch.setattr(store, "_invalidate", key_by_key)
    await store.acquire(AcquireRequest(key, (), 60, 60, token=token))
    await store.invalidate(key, None, b"i")
    found = await find(store, key)
    await store.aclose()

    assert found is None


@pytest.mark.parametrize("code", ["TryAgainError", "OutOfMemoryError"])
async def test_refusal_of_an_invalidation(
    code: str, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused key by key too, or for another reason, is not confirmed."""
    store = RedisStore(redis_url, deadline=5, connect_timeout=5)
    asked = 0

    async def refuse(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise Refused(code)

    monkeypatch.setattr(store, "_run", refuse)
    with pytest.raises(Refused, match=code):
        await store.invalidate(f"sg1:{{{namespace}:menu-7}}", None, b"i")
    await store.aclose()

    assert asked == (2 if code == "TryAgainError" else 1)


@pytest.mark.parametrize("is_expected", [False, True])
async def test_batches_and_a_slot_that_moved(is_expected: bool, shared: Valkeys, namespace: str) -> None:
    """Of what is asked together, each node gets its share, and only what is redirected is asked elsewhere."""
    store = RedisStore(shared.url, deadline=5, connect_timeout=5)
    await store.open()
    topology: Any = store._topology
    keys = [f"sg1:{{{namespace}:menu-{number}}}" for number in range(60)]
    await asyncio.gather(*(put(store, key, key.encode()) for key in keys))
    moved = f"sg1:{{{namespace}:moved}}"
    source = topology.primary(moved)
    owner = next(server for server in shared.primaries if server.port == port_of(source))
    target = next(server for server in shared.primaries if server is not owner)
    for _ in range(8 if is_expected else 0):
        await asyncio.gather(*(find(store, key) for key in keys * 3))
    topology._map._driver.cancel()
    assign(shared, slot_of(moved), target)
    try:
        mark = f"{moved}:t"
        found = await asyncio.gather(*(find(store, key) for key in [*keys[:30], moved, *keys[30:]]))
        verdicts = await asyncio.gather(*(store.acquire(AcquireRequest(key, (mark,), 60, 60)) for key in keys))
        ask(target, "DEL", f"{moved}:l", mark)
    finally:
        await give(shared, slot_of(moved), owner)
        await store.aclose()

    assert found.pop(30) is None
    assert [key.encode() for key in keys] == [stored.envelope for stored in found if stored is not None]
    assert 1 == len({verdict.marks for verdict in verdicts})


async def test_node_that_is_down_is_its_own_ops_trouble(key: str) -> None:
    """Without an answer of one node, commands to several fail as one; the others' connections are none the worse."""
    with valkey_server() as healthy:
        store = RedisStore(healthy.url, deadline=1, connect_timeout=1)
        dead = Node("Redis 2", Connection, {"host": HOST, "port": free_port()}, LIMITS)
        node = store._topology.primary(key)
        await put(store, key, b"soup")
        asked = AcquireRequest(key, (f"{key}:t",), 1, 1)
        look = ValueRequest(node, key, 100, (f"{key}:t",), 1000, asked=asked)
        with pytest.raises(redis.exceptions.ConnectionError):
            await store._submit(look, [dead])
        assert await find(store, key) is not None
        await store.aclose()


@pytest.mark.parametrize("is_of_replica", [False, True])
async def test_error_names_the_node_of_a_tag(is_of_replica: bool, key: str) -> None:
    """A read at a primary blames the node of a mark for its failure; replicas have one breaker for all."""
    with valkey_server() as healthy:
        store = RedisStore(healthy.url, deadline=5, connect_timeout=5)
        dead = Node("Redis 2", Connection, {"host": HOST, "port": free_port()}, LIMITS)
        node, tags = store._topology.primary(key), (f"{key}:t",)
        asked = None if is_of_replica else AcquireRequest(key, tags, 1, 1)
        read = ValueRequest(node, key, 100, tags, 0 if is_of_replica else 1000, asked=asked)
        with pytest.raises(redis.exceptions.ConnectionError) as failure:
            await store._submit(read, [dead])
        await store.aclose()

    assert (None if is_of_replica else "Redis 2") == getattr(failure.value, FAILED_NODE, None)


@pytest.mark.parametrize("is_back", [False, True])
async def test_node_of_a_tag_that_is_down_has_its_own_breaker(
    is_back: bool, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the node with a tag's mark does not answer, its own breaker opens, and not the breaker of the key's node."""
    with valkey_server() as healthy, valkey_server() as other:
        clock = ManualClock()
        store = RedisStore(healthy.url, deadline=5, connect_timeout=5)
        tier, counters = Tier(store, namespace, 100, clock), Counters()
        dead = Node("Redis 2", Connection, {"host": HOST, "port": free_port()}, LIMITS)
        alive = Node("Redis 2", Connection, {"host": HOST, "port": other.port}, LIMITS)
        places, primary = {tier.tag_key("soups"): dead}, store._topology.primary
        monkeypatch.setattr(store._topology, "primary", lambda key: places.get(key) or primary(key))

        async def acquire(*tags: str) -> object:
            return await Lease(tier, new_token(), tags, 2, 60, counters).acquire(lambda payload: (payload,))

        tagged = [await acquire("soups") for _ in range(4)]
        breakers = [tier.access.breaker(store.node_of(key)) for key in (tier.key("menu"), tier.tag_key("soups"))]
        states = [breaker.state for breaker in breakers]
        counts = counters.l2_errors, counters.l2_skips
        places[tier.tag_key("soups")] = alive if is_back else dead
        clock.advance(1)
        later = [await acquire("soups"), await acquire()]
        await tier.aclose()
        await alive.aclose()

    assert (["unavailable"] * 4, ["closed", "open"], (3, 1)) == (tagged, states, counts)
    assert (["own", "own"] if is_back else ["unavailable", "own"]) == later
    assert ["closed", "closed" if is_back else "open"] == [breaker.state for breaker in breakers]


def test_tracking_is_for_one_primary() -> None:
    """A node of a cluster tells of its own keys alone, so tracking is refused there."""
    with pytest.raises(ConfigurationError, match="tracking=True: a server of a cluster"):
        Guard("redis+cluster://localhost:7000", tracking=True)


async def test_host_that_the_cluster_does_not_tell(shared: Valkeys, key: str) -> None:
    """Where nodes tell no host, the one that was asked is meant, in the map and in redirections."""
    for server in (*shared.primaries, *shared.replicas):
        ask(server, "CONFIG", "SET", "cluster-preferred-endpoint-type", "unknown-endpoint")
    try:
        async with opened(shared.url) as topology:
            node = topology.primary(key)
            stranger = topology.primary(next(f"k{n}" for n in range(1_000) if slot_of(f"k{n}") > 2 * SLOTS // 3))
            refusal = await write(topology, stranger, key)
            assert isinstance(refusal, Redirected)
            followed = await topology.follow(key, stranger, refusal)
            await until(lambda: topology.replica(key), "the replica to be good")
    finally:
        for server in (*shared.primaries, *shared.replicas):
            ask(server, "CONFIG", "SET", "cluster-preferred-endpoint-type", "ip")

    assert "" == refusal.host
    assert shared.primary.port == port_of(node)
    assert followed is node


async def test_killed_primary_is_replaced_by_its_replica(key: str, logged: Logged) -> None:
    """After a crash the replica takes the writes, the generation has risen, and the old one serves reads when back."""
    with valkey_cluster() as servers:
        async with opened(servers.url) as topology:
            await until(lambda: topology.replica(key), "the replica to be good")
            before, generation = topology.primary(key), topology.generation
            servers.primary.kill()
            topology.failed(before)
            took = await until_after(
                lambda: leads(servers.replicas[0]), lambda: topology.primary(key) is not before, "another primary"
            )
            after = topology.primary(key)
            reply = await write(topology, after, key)
            risen = topology.generation - generation
            servers.primary.revive()
            await until(lambda: topology.replica(key), "the old primary to be a good replica", deadline=30)
            found = await read(topology, key)
            addresses = [HOST, *(str(server.port) for server in (*servers.primaries, *servers.replicas))]

    assert (servers.replicas[0].port, b"OK") == (port_of(after), reply)
    assert found is not None
    assert b"soup" == found[1]
    assert risen >= 1
    assert took < 1.5
    assert [] == [address for address in addresses if address in "".join(logged())]


async def test_no_cluster_anywhere() -> None:
    """Where nobody answers, or there is no cluster, opening says so, and so does asking for a primary."""
    with valkey_server() as lone:
        for port in (free_port(), lone.port):
            topology = make_topology(parse_url(f"redis+cluster://{HOST}:{port}"), LIMITS, ManualClock())
            with pytest.raises(ConnectionError):
                await topology.open()
            with pytest.raises(ConnectionError):
                topology.primary("menu")
            replica = topology.replica("menu")
            await topology.aclose()

            assert replica is None


class Made:
    """Makes scripted nodes, and keeps them."""

    def __init__(self) -> None:
        self.nodes: dict[str, Scripted] = {}

    def __call__(self, name: str, address: tuple[str, int], greet: object = None) -> Scripted:
        """Make one."""
        node = self.nodes[name] = Scripted(name)
        return node


@pytest.fixture
def made() -> Made:
    """Return what makes the topology's nodes."""
    return Made()


@pytest.fixture
def scripted(made: Made, clock: ManualClock) -> Cluster:
    """Return a topology of scripted nodes; nothing is asked unless the test does it."""
    return Cluster(made, [("seed", 1)], clock)


async def hear(topology: Cluster, *replies: object) -> None:
    """Let a node say *replies*."""
    node = Scripted("node", *replies)
    await topology._poll(node, ("asked", 1))


def shards(*hosts: str) -> list[object]:
    """Return what CLUSTER SLOTS says; the first of each line's hosts is the primary."""
    size = SLOTS // len(hosts)
    return [
        [at * size, (at + 1) * size - 1, *([host.encode(), 1, b"id"] for host in line.split())]
        for at, line in enumerate(hosts)
    ]


def told(epoch: int) -> bytes:
    """Return what CLUSTER INFO says."""
    return b"cluster_current_epoch:%d" % epoch


def names(topology: Cluster) -> dict[str, list[str]]:
    """Return the names of each primary and its replicas, by the primary's host."""
    return {host: [node.name for node in group.nodes] for (host, _), group in topology._groups.items()}


@pytest.mark.parametrize(
    ("later", "epoch", "believed", "generation"), [(4.9, 6, "first", 0), (5.1, 1, "second", 1)], ids=["soon", "at last"]
)
async def test_older_map(  # noqa: PLR0917  # fixtures
    later: float, epoch: int, believed: str, generation: int, scripted: Cluster, clock: ManualClock
) -> None:
    """A node that was cut off tells an old map in vain while newer ones are told; a new cluster counts from zero."""
    await hear(scripted, told(7), shards("first", "other"))
    clock.advance(later)
    await hear(scripted, told(epoch), shards("second", "other"))
    await scripted._health.aclose()

    assert ({believed, "other"}, generation) == ({*names(scripted)}, scripted.generation)


async def test_roles_that_change_hands(scripted: Cluster, made: Made) -> None:
    """A replica that becomes the primary is a new node, and the other way round; a node that is gone is closed."""
    await hear(scripted, told(1), shards("a b c"))
    await hear(scripted, told(2), shards("b a"))
    await scripted._health.aclose()

    assert ["b"] == list(names(scripted))
    (primary, replica) = names(scripted)["b"]
    number = {"a": 1, **{host: scripted._numbers[host, 1] for host in "bc"}}
    assert (f"Redis primary {number['b']}", "Redis replica 1") == (primary, replica)
    closed = {node.name for node in made.nodes.values() if node.is_closed}
    assert {"Redis primary 1", f"Redis replica {number['b']}", f"Redis replica {number['c']}"} == closed
    assert 1 == scripted.generation


async def test_same_map_changes_nothing(scripted: Cluster) -> None:
    """A map that says the same again keeps every node."""
    await hear(scripted, told(1), shards("a b", "c d"))
    before = [node for group in scripted._groups.values() for node in group.nodes]
    await hear(scripted, told(1), shards("a b", "c d"))

    assert before == [node for group in scripted._groups.values() for node in group.nodes]
    assert 0 == scripted.generation


async def test_map_after_a_redirection_is_the_maps(scripted: Cluster) -> None:
    """A redirection that the map does not bear out is forgotten with the next look, though the map is the same."""
    await hear(scripted, told(1), shards("a", "b"))
    node = scripted.primary("menu")
    await scripted.follow("menu", node, Redirected("MovedError", "c", 1, is_moved=True))
    moved = scripted.primary("menu")
    await hear(scripted, told(1), shards("a", "b"))
    await scripted._health.aclose()

    assert moved is not node
    assert node is scripted.primary("menu")
    assert 2 == scripted.generation


async def test_cluster_that_does_not_tell_its_epoch(scripted: Cluster) -> None:
    """Where CLUSTER INFO is not allowed, the last map counts."""
    await hear(scripted, Refused("NoPermissionError"), shards("a"))
    await hear(scripted, Refused("NoPermissionError"), shards("b"))
    await scripted._health.aclose()

    assert {"b"} == set(names(scripted))


@pytest.mark.parametrize(
    "replies", [(ConnectionError(), None), (told(9), Refused("ResponseError")), (told(9), [])], ids=str
)
async def test_node_that_is_no_help(scripted: Cluster, replies: tuple[object, object]) -> None:
    """Silence, refusals and an empty map change nothing."""
    await hear(scripted, told(1), shards("a"))
    await hear(scripted, *replies)

    assert ({"a"}, 1) == (set(names(scripted)), scripted._epoch)


@pytest.mark.parametrize("code", ["ClusterDownError", "TryAgainError", "MasterDownError", "OutOfMemoryError"])
async def test_other_refusals_stand(scripted: Cluster, code: str) -> None:
    """Nobody else would answer better; whether the map is looked at depends on the word."""
    await hear(scripted, told(1), shards("a"))

    assert await scripted.follow("menu", scripted.primary("menu"), Refused(code)) is None
    assert scripted._map._is_due.is_set() == (code in {"ClusterDownError", "MasterDownError"})


async def test_addresses_are_translated(made: Made) -> None:
    """A cluster behind a tunnel is reached by the client's own translation."""
    topology = Cluster(made, [], ManualClock(), translate=lambda address: ("tunnel", address[1] + 5))
    await hear(topology, told(1), shards("a b"))
    await topology.follow("menu", topology.primary("menu"), Redirected("AskError", "c", 3, is_moved=False))

    assert {("tunnel", 6), ("tunnel", 8)} == set(topology._groups)


async def test_restarted_primary_is_counted(scripted: Cluster) -> None:
    """A primary that lost its memory raises the generation; one that is silent makes the map be looked at."""
    await hear(scripted, told(1), shards("a"))
    (group,) = scripted._groups.values()
    seen = []
    for change in ("silent", "restarted"):
        scripted._note_change(group, change)
        seen.append((scripted.generation, scripted._map._is_due.is_set()))

    assert [(0, True), (1, True)] == seen
