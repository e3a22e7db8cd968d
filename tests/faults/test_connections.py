"""Connections that are cut, soiled or answer nonsense: never an exception, never another op's value."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
import redis.exceptions
from proxying import Wire, babbling, passes, runs
from redis.asyncio import Redis
from redis.asyncio.connection import ConnectionPool
from stored import bytes_at, find, fingerprint_for, pool_of, put

from demo_api.servers import ValkeyServer
from stampede_guard import Guard, InvalidationPending
from stampede_guard._l2.tier import key_of
from stampede_guard._tokens import new_token
from stampede_guard.stores import AcquireRequest
from stampede_guard.stores._envelope import seal
from stampede_guard.stores._redis.node import ConnectionLimits, Node, UnexpectedReply
from stampede_guard.stores._redis.scripts import ACQUIRE, FILL, INVALIDATE, Script
from stampede_guard.stores._redis.urls import parse_url
from stampede_guard.stores.redis import RedisStore
from stampede_guard.testing import Gate, ManualClock

Logged = Callable[[], list[str]]

CANCELLATIONS = int(os.environ.get("CANCELLATIONS", "600"))


async def load() -> str:
    """Load an answer."""
    return "soup"


async def ask(guard: Guard, op: str = "menu-7") -> str:
    """Make a call that looks into the store, and does not stay in memory."""
    return await guard.fetch(op, load, l2_ttl=60, returns=str)


def bulk(value: bytes) -> bytes:
    """Return *value* as Redis sends it."""
    return b"$%d\r\n%s\r\n" % (len(value), value)


def hit(envelope: bytes) -> bytes:
    """Return the answer to an ACQUIRE that finds *envelope*, with a second left."""
    return b"*3\r\n" + bulk(b"HIT") + b":1000\r\n" + bulk(envelope)


async def idle_connection(store: RedisStore) -> Any:
    """Return the pooled connection that the next operation would get, as soon as nobody has it."""
    pool = pool_of(store)
    async with asyncio.timeout(10):
        while pool._in_use_connections:
            await asyncio.sleep(0)
    return pool._available_connections[-1]


async def reaches(store: RedisStore) -> None:
    """Wait until what was sent unasked has arrived at the idle connection."""
    async with asyncio.timeout(10):
        while not await (await idle_connection(store)).can_read():
            await asyncio.sleep(0)


@pytest.fixture
async def store(wire: Wire) -> AsyncIterator[RedisStore]:
    """Return a store at the end of the wire."""
    store = RedisStore(wire.url, deadline=5, connect_timeout=5, max_connections=4)
    yield store
    await store.aclose()


@pytest.fixture
async def guard(no_echoes: None, wire: Wire, namespace: str) -> AsyncIterator[Guard]:
    """Return a guard at the end of the wire, which does nothing by itself."""
    async with Guard(wire.url, namespace=namespace, deadline=5, connect_timeout=5, clock=ManualClock()) as guard:
        yield guard


async def test_killed_pooled_connections(valkey: ValkeyServer) -> None:
    """After the server closed every connection, the next call succeeds, from the store or without."""
    async with Guard(valkey.url, deadline=5, connect_timeout=5) as guard, Redis.from_url(valkey.url) as admin:
        await asyncio.gather(*(ask(guard, f"menu-{menu_id}") for menu_id in range(10)))
        for _ in range(10):
            await admin.client_kill_filter(_type="normal", skipme=True)
            answers = await asyncio.gather(*(ask(guard, f"menu-{menu_id}") for menu_id in range(10)))

            assert ["soup"] * 10 == answers
        await ask(guard)
        stats = guard.stats()

    assert stats.calls == stats.l2_hits + stats.loads


@pytest.mark.parametrize(
    "spoil",
    [lambda wire: wire.hang_up(), lambda wire: wire.say(b":1000\r\n" + bulk(b"salad"))],
    ids=["closed by the server", "with a reply to no request"],
)
async def test_connection_that_is_of_no_use_is_replaced(
    spoil: Callable[[Wire], None], wire: Wire, store: RedisStore, namespace: str
) -> None:
    """A pooled connection whose end has arrived, or a reply too many, is replaced before use."""
    await put(store, key_of(namespace, "menu-7"), b"soup")

    spoil(wire)
    await reaches(store)
    found = await find(store, key_of(namespace, "menu-7"))

    assert found is not None
    assert found.envelope == b"soup"
    assert wire.opened == 2


async def test_connection_that_was_reset_while_idle_is_not_used(wire: Wire, store: RedisStore, namespace: str) -> None:
    """Nor is one that ended with an RST, which redis-py's own check does not see."""
    await put(store, key_of(namespace, "menu-7"), b"soup")
    idle = await idle_connection(store)

    wire.reset()
    async with asyncio.timeout(10):
        while not idle._writer.is_closing():
            await asyncio.sleep(0)
    found = await find(store, key_of(namespace, "menu-7"))

    assert found is not None
    assert found.envelope == b"soup"
    assert wire.opened == 2


class Sent:
    """Counts the requests of a script, and lets some vanish.

    Args:
        wire: Where.
        script: Which.
        do: Called with the number of each, from 1 on; returns whether it vanishes.
    """

    def __init__(self, wire: Wire, script: Script, do: Callable[[int], bool] = lambda _: False) -> None:
        self.number = 0
        self._script = script
        self._do = do
        wire.on_request = self._note

    async def _note(self, request: bytes) -> bytes:
        if not runs(self._script, request):
            return request
        self.number += 1
        return b"" if self._do(self.number) else request


def is_cut(wire: Wire) -> bool:
    """Cut every connection; return that it was done."""
    wire.reset()
    return True


def cut_next_reply(wire: Wire) -> None:
    """Let the next reply be lost with its connection."""

    async def cut(reply: bytes) -> bytes:
        wire.on_reply = passes
        wire.reset()
        return b""

    wire.on_reply = cut


@pytest.mark.parametrize(("cuts", "outcome"), [(1, (2, 1, 0)), (9, (2, 0, 1))], ids=["once", "again and again"])
async def test_question_that_was_lost_with_its_connection_is_put_once_more(
    cuts: int, outcome: tuple[int, int, int], wire: Wire, guard: Guard
) -> None:
    """When the connection dies before the server has heard anything, another is asked; but no third."""
    await ask(guard)

    sent = Sent(wire, ACQUIRE, lambda number: number <= cuts and is_cut(wire))
    answer = await ask(guard)

    assert answer == "soup"
    assert outcome == (sent.number, guard.stats().l2_hits, guard.stats().l2_errors)


async def test_lease_whose_grant_was_lost_is_had_all_the_same(wire: Wire, guard: Guard) -> None:
    """When the server has granted the lease and the answer is lost, the flight gets it under its next token."""
    await ask(guard, "menu-8")
    cut_next_reply(wire)
    sent = Sent(wire, ACQUIRE)
    await ask(guard)

    assert 2 == sent.number
    assert (2, 0, 0) == (guard.stats().loads, guard.stats().l2_errors, guard.stats().l2_waits)
    await ask(guard)
    assert 1 == guard.stats().l2_hits


async def test_fill_whose_answer_was_lost_is_not_refused(wire: Wire, store: RedisStore, namespace: str) -> None:
    """Asked once more, the store says that the value that is there is this flight's."""
    token = new_token()
    await put(store, key_of(namespace, "menu-8"), b"soup")  # the server knows the scripts
    await store.acquire(AcquireRequest(key_of(namespace, "menu-7"), (), 60, 60, token=token))

    cut_next_reply(wire)
    sent = Sent(wire, FILL)

    assert await store.fill(
        key_of(namespace, "menu-7"), token, seal("menu-7", b"soup", token), 60, None, b"w", always_publish=False
    )
    assert 2 == sent.number


async def test_change_is_asked_for_twice_at_most(wire: Wire, store: RedisStore, namespace: str) -> None:
    """What changes something is sent to a second connection, and to no third."""
    sent = Sent(wire, INVALIDATE, lambda _: is_cut(wire))
    with pytest.raises(redis.exceptions.ConnectionError):
        await store.invalidate(key_of(namespace, "menu-7"), None, b"w")

    assert 2 == sent.number


async def test_nothing_is_asked_again_after_a_deadline(wire: Wire, namespace: str) -> None:
    """Who has waited for a whole deadline does not wait for another."""
    store = RedisStore(wire.url, deadline=0.1, connect_timeout=5)
    await put(store, key_of(namespace, "menu-7"), b"soup")

    sent = Sent(wire, ACQUIRE, lambda _: True)
    with pytest.raises(TimeoutError):
        await find(store, key_of(namespace, "menu-7"))
    await store.aclose()

    assert (1, 1) == (sent.number, wire.opened)


async def test_connections_that_went_deaf_together_cost_one_deadline(wire: Wire, namespace: str) -> None:
    """Of many idle connections over a path that is gone, one costs a deadline; after that new ones are opened."""
    store = RedisStore(wire.url, deadline=0.1, connect_timeout=5, max_connections=4)
    await asyncio.gather(*(put(store, key_of(namespace, f"menu-{number}"), b"soup") for number in range(4)))
    pool = pool_of(store)
    for connection in [await pool.get_connection() for _ in range(4)]:
        await pool.release(connection)
    opened = wire.opened

    wire.silence()
    with pytest.raises(TimeoutError):
        await find(store, key_of(namespace, "menu-0"))
    found = await asyncio.gather(*(find(store, key_of(namespace, f"menu-{number}")) for number in range(4)))
    await store.aclose()

    assert opened == 4
    assert [b"soup"] * 4 == [stored.envelope for stored in found if stored is not None]


async def test_reset_at_any_moment_is_a_counted_miss_at_most(wire: Wire, guard: Guard) -> None:
    """An RST on idle and busy connections never surfaces."""
    chance = random.Random(7)
    answers = []
    for number in range(100):
        call = asyncio.create_task(ask(guard, f"menu-{number % 5}"))
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
        wire.reset()
        answers.append(await call)
    stats = guard.stats()

    assert ["soup"] * 100 == answers
    assert stats.calls == stats.l2_hits + stats.loads


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
        b"\x00" * 1000,
        b"\xff\xfe\r\n",
        b"\r\n",
        b"+OK\r\n",
        b":7\r\n",
        b":7\r\n" * 9,
        b"$-1\r\n" * 2,
        b"*-1\r\n",
        b"$5\r\nab",
        b"$99999999999\r\nab",
        b"$-7\r\n",
        b":seven\r\n",
        b"*1\r\n" * 500,
        b"*2\r\n:1\r\n$4\r\nsoup\r\n",
        b">3\r\n+push\r\n+soup\r\n+x\r\n",
        b"-ERR\r\n",
        b"-\r\n",
        b"-SECRET CANARY\r\n" * 4,
        b"-SECRET\x1b[31mCANARY\r\n" * 4,
        b"-MOVED 3999 127.0.0.1:6381\r\n" * 4,
        b"-ASK nonsense\r\n" * 4,
        b"-LOADING CANARY\r\n" * 4,
        b"-CLUSTERDOWN CANARY\r\n" * 4,
        b"+OK\r\n" * 2 + bulk(b"x" * 100_000) * 2,
        b"*0\r\n" + bulk(b"m" * 11),
        hit(b"soup") + bulk(b"m" * 11),
        hit(b"") + bulk(b"m" * 11),
        b"*2\r\n" + bulk(b"HIT") + b":1000\r\n" + bulk(b"m" * 11),
        b"*2\r\n" + bulk(b"OWN") + b":0\r\n" + bulk(b"m" * 11),
        b"*3\r\n" + bulk(b"message") + bulk(b"sg1:default:bus") + bulk(b"soup"),
    ],
)
@pytest.mark.usefixtures("no_echoes")
async def test_server_that_talks_nonsense(nonsense: bytes, logged: Logged) -> None:
    """Whatever a server answers, calls get their own answers in bounded time, and the log quotes none of it."""
    async with (
        asyncio.timeout(10),
        babbling(nonsense) as url,
        Guard(url, deadline=0.05, connect_timeout=0.05) as guard,
    ):
        answers = [await ask(guard) for _ in range(5)]
        with suppress(InvalidationPending):
            await guard.invalidate("menu-7")

    assert ["soup"] * 5 == answers
    assert "CANARY" not in "".join(logged())
    assert guard.stats().loads == 5


async def test_confirmation_of_something_else(wire: Wire, store: RedisStore) -> None:
    """A server that confirms something else than the subscription is not listened to."""

    async def misspell(reply: bytes) -> bytes:
        return reply.replace(b"subscribe", b"describes")

    wire.on_reply = misspell
    with pytest.raises(UnexpectedReply):
        async with store.listen():
            pass


async def test_default_pool_would_hand_out_an_unread_reply(wire: Wire, admin: Redis, namespace: str) -> None:
    """Why the pool's settings matter: should this fail, redis-py has mended it, and the settings may be reviewed."""
    key = f"{key_of(namespace, 'menu-7')}:v"
    async with Redis.from_url(wire.url) as client:
        await client.get(key)
        pool = client.connection_pool
        wire.say(bulk(b"salad"))
        async with asyncio.timeout(10):
            while not await pool._available_connections[-1].can_read():
                await asyncio.sleep(0)

        assert await client.get(key) == b"salad"


HIT_OF_A = b"*3\r\n$3\r\nHIT\r\n:1000\r\n%b"


@pytest.mark.parametrize(
    "injected",
    [
        HIT_OF_A,
        HIT_OF_A + b"%m",
        HIT_OF_A + b"%m" + HIT_OF_A + b"%m",
        b"%b",
        b"%b%m",
        b"%m",
        b"%m%m",
        b"+OK\r\n",
        b":1\r\n",
    ],
)
async def test_reply_injected_into_an_operation_answers_no_other_op(
    injected: bytes, wire: Wire, guard: Guard, namespace: str, admin: Redis
) -> None:
    """A's value that arrives as the reply to B's question, past every check of the pool, is not B's answer."""

    async def inject(request: bytes) -> bytes:
        if b"menu-B" in request:
            wire.say(injected)
        return request

    await ask(guard, "menu-B")
    mark = await bytes_at(admin, f"sg1:{{{namespace}:}}:t")
    of_a = bulk(seal(f"{namespace}:menu-A", b"salad", new_token(), None, [mark], fingerprint_for(str)))
    injected = injected.replace(b"%b", of_a).replace(b"%m", bulk(mark))
    wire.on_request = inject
    async with asyncio.timeout(20):
        answers = [await ask(guard, "menu-B") for _ in range(3)]
        with suppress(InvalidationPending):
            await guard.invalidate("menu-B")
    wire.on_request = passes
    answers += [await ask(guard, "menu-B") for _ in range(3)]

    assert ["soup"] * 6 == answers


async def test_connection_that_is_out_of_step_is_not_used_again(
    wire: Wire, store: RedisStore, namespace: str, admin: Redis
) -> None:
    """After a reply of the wrong kind others may be under way, so its connection is closed."""
    await put(store, key_of(namespace, "B"), b"soup")
    gate = Gate()

    async def answer_for_the_server(request: bytes) -> bytes:
        wire.on_request = passes
        wire.say(b"+OK\r\n")
        await gate.passage()
        return request

    await idle_connection(store)
    await store.open()
    wire.on_request = answer_for_the_server
    with pytest.raises(UnexpectedReply):
        await store.echo(b"hello")
    found = await find(store, key_of(namespace, "B"))

    assert found is not None
    assert found.envelope == b"soup"
    assert wire.opened == 2


async def test_another_operations_reply_confirms_no_invalidation(
    wire: Wire, guard: Guard, namespace: str, admin: Redis
) -> None:
    """A stray `OK` is not taken for the answer to an invalidation that never arrived."""

    async def swallow(request: bytes) -> bytes:
        if runs(INVALIDATE, request):
            wire.say(b"+OK\r\n")
            return b""
        return request

    await ask(guard)
    wire.on_request = swallow

    with pytest.raises(InvalidationPending):
        await guard.invalidate("menu-7")
    assert await admin.exists(f"sg1:{{{namespace}:menu-7}}:v")


async def test_life_is_never_a_newer_values(
    wire: Wire, store: RedisStore, namespace: str, admin: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced between a replica's two answers, a value gets too short a life, never the newer one's longer one."""
    await put(store, key_of(namespace, "menu-7"), b"old", 10)
    monkeypatch.setattr(store._topology, "replica", store._topology.primary)

    async def replace_between(request: bytes) -> bytes:
        wire.on_request = passes
        first, second = request.split(b"*")[1:]
        await replies_to(b"*" + first)
        await admin.set(f"{key_of(namespace, 'menu-7')}:v", b"new", ex=1000)
        return b"*" + second

    async def replies_to(command: bytes) -> None:
        answered = asyncio.Event()

        async def note(reply: bytes) -> bytes:
            answered.set()
            return reply

        wire.on_reply = note
        wire.forward(command)
        await answered.wait()

    wire.on_request = replace_between
    verdict = await store.read_replica(key_of(namespace, "menu-7"), ())

    assert verdict is not None
    assert verdict.stored is not None
    assert verdict.stored.ttl is not None
    assert verdict.stored.ttl <= 10
    assert verdict.stored.envelope == b"new"


class Reads:
    """Reads of keys that each hold a value of their own, to be cancelled at any moment.

    Attributes:
        lost: Reads that ended although they had been cancelled in time.
        wrong: Values that were another key's.
        cancelled: Reads that ended by their cancellation.
    """

    def __init__(self, store: RedisStore, envelopes: dict[str, bytes], chance: random.Random) -> None:
        self.lost = self.wrong = self.cancelled = 0
        self._store = store
        self._envelopes = envelopes
        self._chance = chance

    async def read(self) -> None:
        """Read one key, and check the value."""
        key = self._chance.choice(list(self._envelopes))
        found = await find(self._store, key)
        self.wrong += found is None or found.envelope != self._envelopes[key]

    async def cancel(self, number: int) -> None:
        """Start and cancel so many."""
        for _ in range(number):
            reading = asyncio.create_task(self.read())
            for _ in range(self._chance.randrange(20)):
                await asyncio.sleep(0)
            in_time = reading.cancel()
            await asyncio.wait([reading])
            self.cancelled += reading.cancelled()
            self.lost += in_time and not reading.cancelled()

    async def go_on(self) -> None:
        """Read until cancelled."""
        while True:
            await self.read()


async def test_cancelled_operations_leave_nothing_behind(
    wire: Wire, store: RedisStore, namespace: str, admin: Redis
) -> None:
    """Hundreds of reads cancelled at any moment: no wrong value, no lost cancellation, no leaked connection."""
    chance = random.Random(7)
    envelopes = {key_of(namespace, f"menu-{number}"): b"menu %d" % number for number in range(8)}
    for key, envelope in envelopes.items():
        await admin.set(f"{key}:v", envelope, ex=600)

    async def dawdle(chunk: bytes) -> bytes:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        return chunk

    reads = Reads(store, envelopes, chance)
    wire.on_request = wire.on_reply = dawdle
    undisturbed = asyncio.create_task(reads.go_on())
    await asyncio.gather(*(reads.cancel(CANCELLATIONS // 2) for _ in range(2)))
    undisturbed.cancel()
    await asyncio.wait([undisturbed])

    assert undisturbed.cancelled()
    assert (0, 0) == (reads.wrong, reads.lost)
    assert reads.cancelled > CANCELLATIONS // 2
    await idle_connection(store)  # those of questions that nobody waits for any more come back too
    assert len(pool_of(store)._available_connections) <= 4


async def test_cancelled_operations_leave_no_connection_at_the_server(valkey: ValkeyServer) -> None:
    """After many cancellations, the server has no more clients than the pool has connections."""
    chance = random.Random(7)
    store = RedisStore(valkey.url, deadline=5, connect_timeout=5, max_connections=4)
    for _ in range(300):
        reading = [asyncio.create_task(find(store, "menu-7")) for _ in range(4)]
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)

    async with Redis.from_url(valkey.url) as admin, asyncio.timeout(10):
        while len(await admin.client_list()) > 1 + 4:
            await asyncio.sleep(0)
        await store.aclose()
        while len(await admin.client_list()) > 1:
            await asyncio.sleep(0)


async def test_cancelled_callers_do_not_cut_connections(wire: Wire, guard: Guard) -> None:
    """Store operations run in the flight's task: a hundred callers that leave cost no reconnection."""
    await ask(guard)
    opened = wire.opened

    for number in range(100):
        call = asyncio.create_task(ask(guard, f"menu-{number}"))
        for _ in range(number % 10):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        async with asyncio.timeout(10):
            while guard.stats().in_flight:
                await asyncio.sleep(0)

    assert wire.opened == opened
    assert guard.stats().l2_errors == 0


async def test_node_that_is_closed_while_an_exchange_connects(redis_url: str) -> None:
    """The exchange gets its answer, and its connection, which was not there yet to be closed, is closed behind it."""
    gate, servers = Gate(), parse_url(redis_url)
    ((host, port),) = servers.addresses

    async def greet(connection: Any) -> None:
        await connection.on_connect()
        await gate.passage()

    options = {**servers.options, "host": host, "port": port, "redis_connect_func": greet}
    node = Node("Redis", servers.connection_class, options, ConnectionLimits(deadline=5, connect_timeout=5))
    asking = asyncio.create_task(node.exchange((bytes, "PING")))
    await gate.arrivals(1)
    await node.aclose()
    gate.open()
    replies = await asking
    (connection,) = node._pool._available_connections

    assert [b"PONG"] == replies
    assert not connection.is_connected


async def test_pool_type_is_the_one_that_checks(store: RedisStore) -> None:
    """The pool is redis-py's plain one, whose checks at check-out the other tests rely on."""
    assert type(pool_of(store)) is ConnectionPool
