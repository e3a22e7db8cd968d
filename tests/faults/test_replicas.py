"""Replicas that hang, lag, or are being filled: reads go where the truth is."""

import asyncio
from collections.abc import Callable, Iterator
from time import monotonic

import pytest
from inside import tier_of
from polling import LIMITS, Lateness, Scripted, opened, read, reads
from redis import Redis
from waiting import until

from demo_api.servers import HOST, ValkeyServer, valkey_server
from demo_api.topologies import REPLICATION, Valkeys, ask, follows, valkey_replicated
from stampede_guard import Guard, coalesce
from stampede_guard.stores import Refused
from stampede_guard.stores._redis.node import ConnectionLimits
from stampede_guard.stores._redis.topology.base import Topology, close_all
from stampede_guard.stores._redis.topology.factory import make_topology
from stampede_guard.stores._redis.topology.health import Group
from stampede_guard.stores._redis.topology.polling import Poller
from stampede_guard.stores._redis.topology.replicated import Replicated
from stampede_guard.stores._redis.urls import parse_url
from stampede_guard.stores.redis import RedisStore
from stampede_guard.testing import ManualClock

Logged = Callable[[], list[str]]


@pytest.fixture(scope="module")
def shared() -> Iterator[Valkeys]:
    """Return a primary with two replicas that no test may harm."""
    with valkey_replicated() as servers:
        yield servers


def names(topology: Topology, tries: int = 60) -> set[str]:
    """Return the names of the replicas that reads go to."""
    return {node.name for _ in range(tries) if (node := topology.replica("menu")) is not None}


async def test_reads_are_spread_over_good_replicas(shared: Valkeys, namespace: str) -> None:
    """Both replicas serve what was written to the primary, and the primary is asked for no read."""
    ask(shared.primary, "SET", namespace, "soup")
    asked_of_primary = reads(shared.primary)
    async with opened(shared.url) as topology:
        await until(lambda: len(names(topology)) == 2, "both replicas to be good")
        answers = [await read(topology, namespace) for _ in range(40)]

    assert {("Redis replica 1", b"soup"), ("Redis replica 2", b"soup")} == {*answers}
    assert asked_of_primary == reads(shared.primary)


async def test_no_reads_before_the_first_good_word(shared: Valkeys) -> None:
    """When a topology has just been opened, no replica is good yet; nobody has asked one."""
    topology = make_topology(parse_url(shared.url), LIMITS, monotonic)

    assert topology.has_replicas
    assert topology.replica("menu") is None
    await topology.aclose()


async def test_replica_that_is_being_filled_gets_no_read(logged: Logged) -> None:
    """During a full resync a replica serves nothing, whatever it would answer; when it is connected, it serves."""
    with valkey_server("--rdb-key-save-delay", "1500", *REPLICATION) as primary, valkey_server() as replica:
        with Redis(host=HOST, port=primary.port) as client:
            client.mset({f"menu-{number}": "new" for number in range(1_000)})
        ask(replica, "SET", "menu-7", "old")
        ask(replica, "REPLICAOF", HOST, primary.port)
        async with opened(f"redis://{HOST}:{primary.port},{HOST}:{replica.port}") as topology:
            answers = set()
            while not follows(replica):
                answers.add(await read(topology, "menu-7"))
                await asyncio.sleep(0.01)
            early = reads(replica)
            took = await until(lambda: topology.replica("menu-7"), "the replica to be good")
            late = await read(topology, "menu-7")

    assert ({None}, 0) == (answers, early)
    assert took < 1
    assert late == ("Redis replica 1", b"new")
    assert ["it is not connected to its primary, or is in a full resync", "reads"] == [
        line.removeprefix("Redis replica 1 serves ").removeprefix("no reads: ") for line in logged()
    ]


async def test_frozen_replica_is_left_within_a_second(logged: Logged) -> None:
    """Reads leave a replica that hangs, none takes longer than its deadline, and it is used again when it answers."""
    slowest, late = 0.0, Lateness()
    with valkey_replicated() as servers:
        async with opened(servers.url) as topology:
            await until(lambda: len(names(topology)) == 2, "both replicas to be good")
            servers.replicas[0].freeze()
            frozen_at = monotonic()
            left_after = 0.0
            told: list[str] = []
            async with late.noted():
                while monotonic() < frozen_at + 1.5 or not told:
                    started_at = monotonic()
                    answer = await read(topology, "menu")
                    slowest = max(slowest, monotonic() - started_at)
                    if answer is None or answer[0] == "Redis replica 1":
                        left_after = monotonic() - frozen_at
                    await asyncio.sleep(0.001)
                    told = [line.partition(" (")[0] for line in logged()][2:]
            servers.replicas[0].thaw()
            await until(lambda: len(names(topology)) == 2, "the thawed replica to be good")

    assert left_after < 1 + late.seconds
    assert slowest < LIMITS.connect_timeout + LIMITS.deadline + 0.2 + late.seconds
    assert ["Redis replica 1 does not answer"] == told
    assert "Redis replica 1 answers again" == logged()[-1]


async def test_killed_replica_is_left_and_found_again(logged: Logged) -> None:
    """Reads leave a replica that is gone; when it is back and connected, it serves again. The log has no address."""
    with valkey_replicated(replicas=1) as servers:
        async with opened(servers.url) as topology:
            await until(lambda: topology.replica("menu"), "the replica to be good")
            servers.replicas[0].kill()
            left_after = await until(lambda: topology.replica("menu") is None, "reads to leave")
            await until(lambda: len(logged()) > 1, "a word about it")
            servers.replicas[0].revive()
            await until(lambda: topology.replica("menu"), "the replica to be good again")
            addresses = [HOST, *(str(server.port) for server in (servers.primary, *servers.replicas))]

    assert left_after < 1
    assert [] == [address for address in addresses if address in "".join(logged())]


async def test_failed_read_sends_the_next_elsewhere_at_once(shared: Valkeys) -> None:
    """A read that was not answered keeps all others away until the replica has proved itself again."""
    async with opened(shared.url) as topology:
        await until(lambda: len(names(topology)) == 2, "both replicas to be good")
        node = topology.replica("menu")
        assert node is not None
        topology.failed(node)
        left = names(topology)
        await until(lambda: len(names(topology)) == 2, "the replica to be good again")

    assert 1 == len(left)
    assert node.name not in left


async def test_replica_without_its_primary_serves_no_reads() -> None:
    """When the primary is gone, nobody can say what a replica has missed."""
    with valkey_replicated(replicas=1) as servers:
        async with opened(servers.url) as topology:
            await until(lambda: topology.replica("menu"), "the replica to be good")
            servers.primary.kill()
            took = await until(lambda: topology.replica("menu") is None, "reads to end")

    assert took < 1.5


async def test_restarted_primary_is_noticed() -> None:
    """A primary that has lost its memory counts as another one."""
    with valkey_replicated(replicas=1) as servers:
        async with opened(servers.url) as topology:
            await until(lambda: topology.replica("menu"), "the replica to be good")
            before = topology.generation
            servers.primary.kill()
            servers.primary.revive()
            await until(lambda: topology.generation > before, "the restart to be noticed")
            await until(lambda: topology.replica("menu"), "the replica to be good again")

    assert topology.generation == before + 1


@pytest.mark.parametrize("silent", ["primary", "replica"])
async def test_without_permission_to_ask_no_replica_is_read_from(silent: str, logged: Logged) -> None:
    """Where ROLE is refused there are no reads from replicas, and one warning says why."""
    with valkey_replicated() as servers:
        for server in [servers.primary] if silent == "primary" else servers.replicas:
            ask(server, "ACL", "SETUSER", "default", "-role")
        async with opened(servers.url) as topology:
            await until(lambda: [line for line in logged() if "+role" in line], "the warning")
            found = names(topology)
            (warning,) = [line for line in logged() if "+role" in line]

    assert set() == found
    assert "so no replica serves reads" in warning


async def round_of(group: Group) -> None:
    """Ask everybody once."""
    for _, probe in group.probes():
        await probe()


async def test_lag_is_measured_on_one_clock() -> None:
    """A replica is good for a second from the moment at which the primary had no more than it has."""
    clock = ManualClock()
    primary, replica = Scripted("primary"), Scripted("replica")
    group = Group(primary, clock, lambda *_: None)
    group.set_replicas([replica])
    seen = []
    for offset_of_primary, offset_of_replica in [(100, 90), (100, 100), (200, 100), (300, 199), (400, 300), (400, 400)]:
        primary.replies = [[b"master", offset_of_primary, []], b"run_id:a"]
        replica.replies = [[b"slave", b"host", 1, b"connected", offset_of_replica]]
        await round_of(group)
        seen.append(group.fresh_replica() is replica)
        clock.advance(0.4)
    clock.advance(1)

    # Not yet; at once; 0.4 s behind; 0.8 s behind, still; 0.8 s behind 300, fresh enough; at once.
    assert [False, True, True, True, True, True] == seen
    assert group.fresh_replica() is None


async def test_replica_that_lags_too_far_is_left(logged: Logged) -> None:
    """A replica whose copy is more than a second old serves nothing until it has caught up."""
    clock = ManualClock()
    primary, replica = Scripted("primary"), Scripted("replica")
    group = Group(primary, clock, lambda *_: None)
    group.set_replicas([replica])
    replica.replies = [[b"slave", b"host", 1, b"connected", 100]]
    seen = []
    for offset in (100, 200, 300, 400, 500):
        primary.replies = [[b"master", offset, []], b"run_id:a"]
        await round_of(group)
        seen.append(group.fresh_replica() is replica)
        clock.advance(0.4)

    assert [True, True, True, False, False] == seen
    assert ["replica serves reads", "replica serves no reads: it lags behind"] == logged()


@pytest.mark.parametrize(
    ("role", "why"),
    [
        ([b"slave", b"other", 1, b"connected", 100], "it follows another primary"),
        ([b"slave", b"host", 2, b"connected", 100], "it follows another primary"),
        ([b"slave", b"host", 1, b"sync", 100], "it is not connected to its primary, or is in a full resync"),
        ([b"slave", b"host", 1, b"connect", -1], "it is not connected to its primary, or is in a full resync"),
        ([b"master", 100, []], "it is no replica"),
    ],
)
async def test_what_keeps_reads_away(role: list[object], why: str, logged: Logged) -> None:
    """Only a replica that is connected to this very primary serves reads."""
    primary, replica = Scripted("primary"), Scripted("replica")
    group = Group(primary, ManualClock(), lambda *_: None, ("host", 1))
    group.set_replicas([replica])
    primary.replies = [[b"master", 100, []], b"run_id:a"]
    replica.replies = [[b"slave", b"host", 1, b"connected", 100]]
    await round_of(group)
    was_good = group.fresh_replica() is replica
    replica.replies = [role]
    await round_of(group)

    assert was_good
    assert group.fresh_replica() is None
    assert f"replica serves no reads: {why}" == logged()[-1]


async def test_history_that_was_cut_is_another_primary() -> None:
    """An offset that falls tells a restart where INFO is not allowed; a role that changes is told once."""
    changes: list[str] = []
    primary = Scripted("primary")
    group = Group(primary, ManualClock(), lambda _, change: changes.append(change))
    for role in ([b"master", 9, []], [b"master", 4, []], [b"slave", b"", 1, b"", 4], [b"slave", b"", 1, b"", 4]):
        primary.replies = [role, b""]
        await round_of(group)

    assert ["restarted", "demoted"] == changes


async def test_closing_in_the_middle_of_a_probe() -> None:
    """A topology whose servers hang is closed without waiting for their answers."""
    with valkey_replicated(replicas=1) as servers:
        limits = ConnectionLimits(deadline=30, connect_timeout=30)
        topology = make_topology(parse_url(servers.url), limits, monotonic)
        assert isinstance(topology, Replicated)
        await topology.open()
        servers.replicas[0].freeze()
        await until(lambda: len(topology._health._pending) > 0, "a probe to hang")
        started_at = monotonic()
        await topology.aclose()

    assert monotonic() - started_at < 5
    assert {asyncio.current_task()} == asyncio.all_tasks()


async def test_node_that_does_not_answer_is_asked_less_often(logged: Logged) -> None:
    """After three misses in a row a replica is asked again when its pause is over, and is back when it is good."""
    clock = ManualClock()
    primary, replica = Scripted("primary", [b"master", 100, []], b""), Scripted("replica", TimeoutError())
    group = Group(primary, clock, lambda *_: None)
    group.set_replicas([replica])
    for _ in range(4):
        await round_of(group)
    asked = replica.asked
    clock.advance(0.3)
    replica.replies = [[b"slave", b"host", 1, b"connected", 100]]
    await round_of(group)

    assert 3 == asked
    assert group.fresh_replica() is replica
    assert ["replica does not answer", "replica answers again", "replica serves reads"] == [
        line.partition(" (")[0] for line in logged()
    ]


async def test_node_that_is_silent_for_a_second_is_out(logged: Logged) -> None:
    """One miss is enough if the last answer is a second old."""
    clock = ManualClock()
    group = Group(Scripted("primary"), clock, lambda *_: None)
    replica = Scripted("replica")
    group.set_replicas([replica])
    clock.advance(1.1)
    group.failed(replica)

    assert ["replica does not answer (no answer); going on without it, probing again and again"] == logged()


async def test_probe_that_was_cancelled_is_no_verdict() -> None:
    """A half-open probe that is given up leaves the replica to the next one."""
    clock = ManualClock()
    replica = Scripted("replica")
    group = Group(Scripted("primary"), clock, lambda *_: None)
    group.set_replicas([replica])
    (gate,) = group._replicas
    gate.breaker.trip("no answer")
    clock.advance(0.3)
    replica.replies = [asyncio.CancelledError()]
    with pytest.raises(asyncio.CancelledError):
        await group._probe(gate)

    assert "open" == gate.breaker.state


async def test_word_of_a_replica_lasts_a_second() -> None:
    """While a replica's next answer is awaited, its last one serves for a second, though nothing new was written."""
    clock = ManualClock()
    primary, replica = Scripted("primary", [b"master", 100, []], b""), Scripted("replica")
    group = Group(primary, clock, lambda *_: None)
    group.set_replicas([replica])
    replica.replies = [[b"slave", b"host", 1, b"connected", 100]]
    await round_of(group)
    seen = []
    for _ in range(3):
        clock.advance(0.4)
        await group._probe_primary()
        seen.append(group.fresh_replica() is replica)

    assert [True, True, False] == seen


async def test_barred_replicas_are_asked_no_more() -> None:
    """Once a ROLE was refused, only the primary is asked."""
    primary, replica = Scripted("primary", [b"master", 9, []], b""), Scripted("replica", Refused("NoPermissionError"))
    group = Group(primary, ManualClock(), lambda *_: None)
    group.set_replicas([replica])
    for _ in range(3):
        await round_of(group)

    assert (3, 1) == (primary.asked, replica.asked)


async def test_list_of_addresses_is_what_it_says() -> None:
    """With a plain list nobody else is to be found: refusals stand, and a primary that says no is no answer."""
    primary, replica = Scripted("primary", Refused("NoPermissionError")), Scripted("replica")
    topology = Replicated(primary, [replica], ManualClock())
    with pytest.raises(Refused, match="NoPermissionError"):
        await topology.open()
    followed = await topology.follow("menu", primary, Refused("ReadOnlyError"))
    topology.failed(primary)
    await topology.aclose()

    assert followed is None
    assert topology.primary("menu") is primary
    assert primary.is_closed
    assert replica.is_closed


async def test_primary_that_changes_is_counted() -> None:
    """A role or a history that changes raises the generation; silence does not."""
    primary = Scripted("primary")
    topology = Replicated(primary, [], ManualClock())
    seen = []
    for reply in ([b"master", 9, []], TimeoutError(), [b"master", 4, []], [b"slave", b"", 1, b"", 4]):
        primary.replies = [reply, b""]
        await round_of(topology._group)
        seen.append(topology.generation)

    assert [0, 0, 1, 2] == seen


async def test_nodes_that_do_not_close() -> None:
    """One node that does not close keeps no other from closing, and is told."""
    stubborn, other = Scripted("stubborn"), Scripted("other")
    stubborn.error_at_closing = TimeoutError()

    with pytest.raises(ExceptionGroup, match="did not close"):
        await close_all([stubborn, other])

    assert other.is_closed


async def test_rounds_survive_what_nobody_foresaw(logged: Logged) -> None:
    """A question that fails is told, and asked again; starting twice is starting once."""
    node, times = Scripted("node"), 0

    async def ask_in_vain() -> None:
        nonlocal times
        times += 1
        raise LookupError

    rounds = Poller(0.06, lambda: [(node, ask_in_vain)])
    rounds.start()
    driver = rounds._driver
    rounds.start()
    await until(lambda: times >= 2, "a second round")
    node.error_at_closing = TimeoutError()
    rounds.close_nodes([node])
    same = driver is rounds._driver
    await rounds.aclose()
    await Poller(1, lambda: ()).aclose()

    assert same
    assert "a probe of node failed (LookupError)" == logged()[0]
    assert "node did not close cleanly (TimeoutError)" == logged()[-1]


# A guard whose store has replicas


async def load() -> bytes:
    """Return what is cached."""
    return b"soup"


async def replicas_of(guard: Guard) -> None:
    """Wait until reads may go to a replica."""
    tier = tier_of(guard)
    assert isinstance(tier.store, RedisStore)
    topology = tier.store._topology
    await until(lambda: topology.replica("menu"), "a good replica")
    tier.recent._all_until = 0.0  # that the bus was joined just now is another test's matter


def scripts(server: ValkeyServer) -> int:
    """Return how many calls of scripts *server* has executed."""
    found = ask(server, "INFO", "commandstats").decode()
    return sum(
        int(line.split("calls=")[1].split(",")[0]) for line in found.splitlines() if line.startswith("cmdstat_eval")
    )


async def test_guard_reads_from_replicas(shared: Valkeys, namespace: str) -> None:
    """What another process has stored comes from a replica; the primary runs no script for it."""
    async with Guard(shared.url, namespace=namespace) as writer, Guard(shared.url, namespace=namespace) as reader:
        await writer.fetch("menu", load, l2_ttl=60, tags=("menus",), returns=bytes)
        await replicas_of(reader)
        for replica in shared.replicas:
            await until(lambda: ask(replica, "EXISTS", f"sg1:{{{namespace}:menu}}:v"), "it")  # noqa: B023
        before = scripts(shared.primary)
        answer = await reader.fetch("menu", load, l2_ttl=60, tags=("menus",), returns=bytes)

        assert (b"soup", 1, 0, before) == (
            answer,
            reader.stats().l2_hits,
            reader.stats().loads,
            scripts(shared.primary),
        )


async def test_what_a_replica_does_not_have_is_asked_of_the_primary(shared: Valkeys, namespace: str) -> None:
    """A miss on a replica is no miss: it may be behind. The primary gives the right to load."""
    async with Guard(shared.url, namespace=namespace) as guard:
        await replicas_of(guard)
        before = scripts(shared.primary)
        answer = await guard.fetch("menu", load, l2_ttl=60, returns=bytes)

        assert (b"soup", 1) == (answer, guard.stats().loads)
        assert before < scripts(shared.primary)


@pytest.mark.parametrize("is_other", [True, False], ids=["of another type", "not there yet"])
async def test_what_a_replica_cannot_answer_is_asked_of_the_primary(
    is_other: bool, shared: Valkeys, namespace: str
) -> None:
    """Where a replica that knows the marks refuses to read, or has nothing, the flight goes to the primary."""
    key, mark = f"sg1:{{{namespace}:menu}}:v", f"sg1:{{{namespace}:}}:t"
    if is_other:
        ask(shared.primary, "RPUSH", key, "soup")
    async with Guard(shared.url, namespace=namespace) as guard:
        await guard.fetch("other", load, l2_ttl=60, returns=bytes)  # so that the namespace has a mark
        await replicas_of(guard)
        for replica in shared.replicas:
            await until(lambda: ask(replica, "EXISTS", key, mark) == 1 + is_other, "all")  # noqa: B023
        answer = await guard.fetch("menu", load, l2_ttl=60, returns=bytes)

        assert (b"soup", 2) == (answer, guard.stats().loads)


async def test_invalidated_lately_is_read_from_the_primary(shared: Valkeys, namespace: str) -> None:
    """After an invalidation no replica is asked for the op: it may not have heard of it."""
    async with Guard(shared.url, namespace=namespace) as guard:
        await guard.fetch("menu", load, l2_ttl=60, returns=bytes)
        await replicas_of(guard)
        await guard.invalidate("menu")
        reads_before = [reads(replica) for replica in shared.replicas]
        answer = await guard.fetch("menu", load, l2_ttl=60, returns=bytes)

        assert (b"soup", 2) == (answer, guard.stats().loads)
        assert reads_before == [reads(replica) for replica in shared.replicas]


async def test_stored_lately_is_read_from_the_primary(shared: Valkeys, namespace: str) -> None:
    """After a fill of its own a process asks no replica for the op: it may have the older value yet."""
    async with Guard(shared.url, namespace=namespace) as guard:
        menu = coalesce("menu", guard=guard, l2_ttl=60)(load)
        await replicas_of(guard)
        await menu()
        await menu.refresh()
        reads_before = [reads(replica) for replica in shared.replicas]
        answers = [await menu() for _ in range(5)]

        assert ([b"soup"] * 5, 2, 5) == (answers, guard.stats().loads, guard.stats().l2_hits)
        assert reads_before == [reads(replica) for replica in shared.replicas]
