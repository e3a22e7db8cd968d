"""Sentinel: the primary changes, and whoever is cut off from the others does not change it back."""

import asyncio
from collections.abc import Callable, Iterator
from math import inf
from time import monotonic

import pytest
from loaders import returning
from polling import LIMITS, Scripted, opened, read, reads, until_after
from redis import Redis
from waiting import until

from demo_api.servers import HOST, ValkeyServer, free_port
from demo_api.topologies import SERVICE, Valkeys, answer, ask, follows, leads, valkey_sentinels
from stampede_guard import Guard
from stampede_guard.stores import Refused
from stampede_guard.stores._redis.node import ConnectionLimits, Node
from stampede_guard.stores._redis.topology.base import Topology
from stampede_guard.stores._redis.topology.factory import make_topology
from stampede_guard.stores._redis.topology.health import Group
from stampede_guard.stores._redis.topology.sentinel import Sentinel
from stampede_guard.stores._redis.urls import parse_url
from stampede_guard.testing import ManualClock

Logged = Callable[[], list[str]]


@pytest.fixture(scope="module")
def shared() -> Iterator[Valkeys]:
    """Return servers whose primary no test may change."""
    with valkey_sentinels() as servers:
        yield servers


def primary_or_none(topology: Topology) -> Node | None:
    """Return the primary, if there is one at present."""
    try:
        return topology.primary("menu")
    except ConnectionError:
        return None


async def port_of(node: Node) -> int:
    """Return the port on which *node* says that it listens."""
    (reply,) = await node.exchange((bytes, "INFO", "server"))
    assert isinstance(reply, bytes)
    return int(reply.partition(b"tcp_port:")[2].split()[0])


def named(sentinel: ValkeyServer) -> int:
    """Return the port that *sentinel* calls the primary's, or 0 if it does not say."""
    _, port = answer(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE) or (b"", b"0")
    return int(port)


async def test_killed_primary_is_replaced(logged: Logged) -> None:
    """After a crash writes go to the new primary, reads to the replica that is left, and the generation has risen."""
    with valkey_sentinels() as servers:
        async with opened(servers.url) as topology:
            before, generation = topology.primary("menu"), topology.generation
            await until(lambda: topology.replica("menu"), "a good replica")
            await before.exchange((bytes, "SET", "menu", "soup"))
            servers.primary.kill()
            took = await until_after(
                lambda: any(named(sentinel) not in {servers.primary.port, 0} for sentinel in servers.sentinels),
                lambda: primary_or_none(topology) not in {before, None},
                "another primary",
            )
            after = topology.primary("menu")
            port = await port_of(after)
            replies = await after.exchange((bytes, "SET", "menu", "salad"))
            await until(lambda: topology.replica("menu"), "a good replica of the new primary")
            found = await read(topology, "menu")
            risen = topology.generation - generation
            is_open = any(connection.is_connected for connection in before._pool._available_connections)
            addresses = [HOST, *(str(server.port) for server in (*servers.replicas, *servers.sentinels))]

    assert port in {replica.port for replica in servers.replicas}
    assert [b"OK"] == replies
    assert found is not None
    assert b"salad" == found[1]
    assert (1, False) == (risen, is_open)
    assert before.name != after.name
    assert took < 1.5
    assert [] == [address for address in addresses if address in "".join(logged())]


async def test_guard_goes_on_with_the_new_primary(namespace: str) -> None:
    """A guard loses its primary in the middle: calls are answered throughout, and invalidations are said again."""
    load = returning(b"soup")
    with valkey_sentinels() as servers:
        async with Guard(servers.url, namespace=namespace) as guard:
            await guard.fetch("menu", load, l2_ttl=60, returns=bytes)
            await guard.invalidate("menu")
            tier = guard._states.running().tier
            assert tier is not None
            generation = tier.store.generation
            servers.primary.kill()
            answers = [await guard.fetch(f"menu-{number}", load, l2_ttl=60, returns=bytes) for number in range(20)]
            await until(lambda: tier.store.generation > generation, "another primary", 30)
            await until(lambda: not tier.pending.all() and tier.pending._confirmed, "the invalidation to be repeated")
            await guard.fetch("menu", load, l2_ttl=60, returns=bytes)
            stored = [ask(server, "EXISTS", f"sg1:{{{namespace}:menu}}:v") for server in servers.replicas]

    assert [b"soup"] * 20 == answers
    assert 1 in stored


@pytest.mark.long
async def test_thawed_primary_and_a_sentinel_that_was_cut_off() -> None:
    """A primary that hung, and a sentinel that did not hear of its end, do not bring it back when they wake up."""
    with valkey_sentinels(replicas=1) as servers:
        old, new, sentinel = servers.primary, servers.replicas[0], servers.sentinels[0]
        async with opened(servers.url) as topology:
            before = topology.primary("menu")
            sentinel.freeze()
            old.freeze()
            await until(lambda: primary_or_none(topology) not in {before, None}, "another primary", deadline=30)
            after, generation = topology.primary("menu"), topology.generation
            sentinel.thaw()
            old.thaw()
            seen: set[Node | None] = set()

            def is_settled() -> bool:
                seen.add(primary_or_none(topology))
                return named(sentinel) == new.port

            await until(is_settled, "the sentinel to hear of it")
            seen.add(primary_or_none(topology))
            port = await port_of(topology.primary("menu"))

    assert {after} == seen
    assert (new.port, generation) == (port, topology.generation)


async def test_replica_that_sentinel_calls_healthy_while_it_is_filled(shared: Valkeys) -> None:
    """During a full resync the sentinels list the replica as if nothing were wrong; it gets no read all the same."""
    replica = shared.replicas[0]
    with Redis(host=HOST, port=shared.primary.port) as client:
        client.mset({f"menu-{number}": "new" for number in range(1_000)})
        client.config_set("rdb-key-save-delay", 1_500)
    async with opened(shared.url) as topology:
        nodes: set[tuple[str, bytes] | None] = set()
        replica.start()  # empty
        while not follows(replica):
            nodes.add(await read(topology, "menu-7"))
        early = reads(replica)
        await until(lambda: _reads_reach(topology, replica), "the replica to be good")
        ask(shared.primary, "CONFIG", "SET", "rdb-key-save-delay", "0")

    assert 0 == early
    assert nodes


def _reads_reach(topology: Topology, replica: ValkeyServer) -> bool:
    found = {node for _ in range(20) if (node := topology.replica("menu")) is not None}
    return any(node._pool.connection_kwargs["port"] == replica.port for node in found)


async def test_frozen_sentinel_delays_nothing(shared: Valkeys) -> None:
    """With one sentinel hanging, the primary is found by asking the others, side by side."""
    shared.sentinels[0].freeze()
    try:
        started_at = monotonic()
        async with opened(shared.url, ConnectionLimits(deadline=50, connect_timeout=50)) as topology:
            took = monotonic() - started_at
            port = await port_of(topology.primary("menu"))
    finally:
        shared.sentinels[0].thaw()

    assert shared.primary.port == port
    assert took < 25  # seconds; the one that hangs would have had twice as many


async def test_password_of_the_servers_where_sentinels_have_none(shared: Valkeys) -> None:
    """The login of the URL is for the servers; sentinels that do not know it are asked without."""
    for server in (shared.primary, *shared.replicas):
        ask(server, "ACL", "SETUSER", "menus", "on", ">pass", "~*", "+@all")
    async with opened(shared.url.replace("://", "://menus:pass@")) as topology:
        replies = await topology.primary("menu").exchange((bytes, "ACL", "WHOAMI"))
        await until(lambda: topology.replica("menu"), "a good replica")

    assert [b"menus"] == replies


async def test_database_of_the_url_is_the_servers(shared: Valkeys) -> None:
    """The database is selected at the servers, not at the sentinels, which have none."""
    async with opened(shared.url.removesuffix("/0") + "/3") as topology:
        (client,) = await topology.primary("menu").exchange((bytes, "CLIENT", "INFO"))

    assert b" db=3 " in client


async def test_unknown_service(shared: Valkeys) -> None:
    """A service that the sentinels do not know has no primary; saying so takes no longer than asking."""
    topology = make_topology(parse_url(shared.url.replace(SERVICE, "drinks")), LIMITS, monotonic)
    with pytest.raises(ConnectionError):
        await topology.open()
    with pytest.raises(ConnectionError):
        topology.primary("menu")
    replica = topology.replica("menu")
    await topology.aclose()

    assert replica is None


async def test_sentinels_that_come_up_late() -> None:
    """A topology that found nobody when it was opened goes on looking."""
    port = free_port()
    topology = make_topology(parse_url(f"redis+sentinel://{HOST}:{port}/{SERVICE}"), LIMITS, monotonic)
    with pytest.raises(ConnectionError):
        await topology.open()
    assert isinstance(topology, Sentinel)
    (sentinel,) = topology._sentinels
    made = Made()
    topology._make_node = made
    sentinel.exchange = Scripted("sentinel", *word(1, "one")).exchange
    await until(lambda: primary_or_none(topology) is not None, "the primary")
    await topology.aclose()

    assert ["Redis primary 1"] == [node.name for node in made.nodes]


async def test_primary_that_was_demoted_is_not_asked(shared: Valkeys) -> None:
    """A connection to a server that is a replica by now is refused before it answers anything."""
    servers = parse_url(shared.url)
    topology = make_topology(servers, LIMITS, monotonic)
    assert isinstance(topology, Sentinel)

    assert await topology._confirm_primary((HOST, shared.replicas[0].port)) is None
    assert leads(shared.primary)
    await topology.aclose()


class Made:
    """Makes scripted nodes.

    Attributes:
        nodes: What was made.
        demoted: Hosts that are no primaries.
        replies: What the others answer.
    """

    def __init__(self) -> None:
        self.nodes: list[Scripted] = []
        self.demoted: set[str] = set()
        self.replies: list[object] = [b"PONG"]

    def __call__(self, name: str, address: tuple[str, int], greet: object = None) -> Scripted:
        """Make one."""
        self.nodes.append(Scripted(name, *([ConnectionError()] if address[0] in self.demoted else self.replies)))
        return self.nodes[-1]


def word(epoch: int, primary: str, *replicas: str) -> list[object]:
    """Return what a sentinel says."""
    others = [[b"ip", replica.encode(), b"port", b"1"] for replica in replicas]
    return [[primary.encode(), b"1"], [b"config-epoch", b"%d" % epoch], others]


@pytest.fixture
def made() -> Made:
    """Return what makes the topology's nodes."""
    return Made()


@pytest.fixture
def scripted(made: Made, clock: ManualClock) -> Sentinel:
    """Return a topology of scripted servers; nothing is asked unless the test does it."""
    return Sentinel(made, [Scripted("sentinel 1"), Scripted("sentinel 2")], SERVICE, clock)


async def hear(topology: Sentinel, replies: list[object]) -> None:
    """Let a sentinel say *replies*."""
    sentinel = topology._sentinels[0]
    assert isinstance(sentinel, Scripted)
    sentinel.replies = replies
    await topology._poll(sentinel)


def confirm(topology: Sentinel, clock: ManualClock) -> None:
    """Let the primary have said that it is one."""
    assert topology._group is not None
    topology._group.confirmed_at = clock()


@pytest.mark.parametrize(
    ("later", "epoch", "believed"), [(0.0, 1, ("new", 0)), (3.1, 0, ("other", 1))], ids=["at once", "at last"]
)
async def test_older_epoch(
    later: float, epoch: int, believed: tuple[str, int], scripted: Sentinel, clock: ManualClock
) -> None:
    """A sentinel that missed a failover is heeded only if the primary is silent: new sentinels count from zero."""
    await hear(scripted, word(2, "new"))
    confirm(scripted, clock)
    clock.advance(later)
    await hear(scripted, word(epoch, "other"))

    assert scripted._address is not None
    assert believed == (scripted._address[0], scripted.generation)


async def test_primary_that_denies_it_is_not_taken(scripted: Sentinel, made: Made) -> None:
    """What a sentinel calls the primary has to say so too."""
    await hear(scripted, word(1, "one"))
    made.demoted.add("two")
    await hear(scripted, word(2, "two"))
    await scripted._health.aclose()

    assert (("one", 1), 0) == (scripted._address, scripted.generation)
    assert [False, True] == [node.is_closed for node in made.nodes]


async def test_read_only_primary_is_left(scripted: Sentinel, made: Made) -> None:
    """READONLY means that there is another primary, or will be; the one that said it is asked no more."""
    await hear(scripted, word(1, "one"))
    old = scripted.primary("menu")
    known_at_once = await scripted.follow("menu", old, Refused("ReadOnlyError"))
    nobody = primary_or_none(scripted)
    await hear(scripted, word(2, "two"))
    found = await scripted.follow("menu", old, Refused("ReadOnlyError"))
    other = await scripted.follow("menu", old, Refused("OutOfMemoryError"))
    await scripted._health.aclose()

    assert (None, None, None) == (known_at_once, nobody, other)
    assert made.nodes[1] is found is scripted.primary("menu")
    assert 1 == scripted.generation
    assert made.nodes[0].is_closed


async def test_what_the_primary_says_of_itself(scripted: Sentinel) -> None:
    """One that is a replica by now is asked no more; one that was restarted is another; silence is no news."""
    await hear(scripted, word(1, "one"))
    group = scripted._group
    assert group is not None
    seen = []
    for change in ("silent", "demoted", "demoted", "restarted"):
        scripted._note_change(group, change)
        seen.append((scripted.generation, primary_or_none(scripted) is not None))
    scripted._note_change(Group(group.primary, ManualClock(), lambda *_: None), "restarted")

    assert [(0, True), (1, False), (1, False), (2, True)] == seen
    assert 2 == scripted.generation


async def test_failure_of_the_primary_is_asked_about_at_once(scripted: Sentinel) -> None:
    """The sentinels are asked when the primary does not answer, and not because of anybody else."""
    scripted.failed(Scripted("nobody knows"))
    await hear(scripted, word(1, "one", "a"))
    assert scripted._group is not None
    primary, replica = scripted._group.nodes
    polled = []
    for node in (replica, primary):
        scripted.failed(node)
        polled.append(scripted._views._is_due.is_set())

    assert [False, True] == polled


async def test_election_that_is_cancelled_leaves_nothing_open(scripted: Sentinel, made: Made) -> None:
    """A candidate whose connection was not finished is closed."""
    made.replies = [asyncio.CancelledError()]
    with pytest.raises(asyncio.CancelledError):
        await scripted._confirm_primary(("one", 1))
    await scripted._health.aclose()

    assert made.nodes[0].is_closed


async def test_primary_that_will_not_tell_its_role(shared: Valkeys) -> None:
    """Where ROLE is refused, the sentinels' word has to do for the primary, and replicas are not read from."""
    for server in (shared.primary, *shared.replicas):
        ask(server, "ACL", "SETUSER", "silent", "on", ">pass", "~*", "+@all", "-role")
    async with opened(shared.url.replace("://", "://silent:pass@")) as topology:
        assert isinstance(topology, Sentinel)
        await until(lambda: topology._group is not None and topology._group._is_disabled, "the refusal")
        port = await port_of(topology.primary("menu"))
        replica = topology.replica("menu")
        confirmed_at = -inf if topology._group is None else topology._group.confirmed_at

    assert (shared.primary.port, None) == (port, replica)
    assert confirmed_at > 0


async def test_replicas_come_and_go(scripted: Sentinel, made: Made) -> None:
    """Replicas are those that the sentinels list; one that stays keeps its connections, one that goes loses them."""
    await hear(scripted, word(1, "one", "a", "b"))
    await hear(scripted, word(1, "one", "b", "c"))
    await scripted._health.aclose()
    assert scripted._group is not None

    assert ["Redis replica 2", "Redis replica 3"] == [node.name for node in scripted._group.nodes[1:]]
    assert ["Redis replica 1"] == [node.name for node in made.nodes if node.is_closed]


@pytest.mark.parametrize(
    "replies",
    [
        [ConnectionError()],
        [Refused("No"), Refused("No"), Refused("No")],
        [[b"one", b"1"], [b"config-epoch", b"1"], Refused("NoPermissionError")],
        [[b"one"], [], []],
    ],
)
async def test_sentinel_that_is_no_help(scripted: Sentinel, replies: list[object]) -> None:
    """Silence, refusals and nonsense change nothing."""
    await hear(scripted, word(1, "one"))
    await hear(scripted, replies)

    assert ("one", 1) == scripted._address
