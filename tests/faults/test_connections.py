"""Connections that are cut, soiled or answer nonsense: never an exception, never another op's value."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import ConnectionPool
from wire import Wire, babbling, passes

from demo_api.servers import ValkeyServer
from stampede_guard import Guard
from stampede_guard._codec import seal
from stampede_guard.stores.redis import RedisStore, UnexpectedReply
from stampede_guard.testing import Gate, ManualClock

Said = Callable[[], list[str]]

CANCELLATIONS = 2_000


async def load() -> str:
    """Load an answer."""
    return "soup"


async def ask(guard: Guard, op: str = "menu-7") -> str:
    """Make a call that looks into the store, and does not stay in memory."""
    return await guard.fetch(op, load, l2_ttl=60, returns=str)


def bulk(value: bytes) -> bytes:
    """Return *value* as Redis sends it."""
    return b"$%d\r\n%s\r\n" % (len(value), value)


def idle_connection(store: RedisStore) -> object:
    """Return the pooled connection that the next operation would get."""
    return store._pool._available_connections[-1]


async def reaches(store: RedisStore) -> None:
    """Wait until what was sent unasked has arrived at the idle connection."""
    async with asyncio.timeout(10):
        while not await idle_connection(store).can_read():  # type: ignore[attr-defined]
            await asyncio.sleep(0)


@pytest.fixture
async def store(wire: Wire) -> AsyncIterator[RedisStore]:
    """Return a store at the end of the wire."""
    store = RedisStore(wire.url, deadline=5, connect_timeout=5, max_connections=4)
    yield store
    await store.aclose()


@pytest.fixture
async def guard(wire: Wire, namespace: str) -> AsyncIterator[Guard]:
    """Return a guard at the end of the wire."""
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


async def test_connection_that_the_server_closed_is_not_used(wire: Wire, store: RedisStore, namespace: str) -> None:
    """A pooled connection whose end has arrived is replaced before use, so the operation succeeds."""
    await store.write(namespace, b"soup", 60)

    wire.hang_up()
    await reaches(store)
    found = await store.read(namespace)

    assert found is not None
    assert found.envelope == b"soup"
    assert wire.opened == 2


async def test_connection_that_was_reset_while_idle_is_not_used(wire: Wire, store: RedisStore, namespace: str) -> None:
    """Nor is one that ended with an RST, which redis-py's own check does not see."""
    await store.write(namespace, b"soup", 60)
    idle = store._pool._available_connections[-1]

    wire.reset()
    async with asyncio.timeout(10):
        while not idle._writer.is_closing():
            await asyncio.sleep(0)
    found = await store.read(namespace)

    assert found is not None
    assert found.envelope == b"soup"
    assert wire.opened == 2


async def test_connections_that_went_deaf_together_cost_one_deadline(wire: Wire, namespace: str) -> None:
    """Of many idle connections over a path that is gone, one costs a deadline; after that new ones are opened."""
    store = RedisStore(wire.url, deadline=0.1, connect_timeout=5, max_connections=4)
    await asyncio.gather(*(store.write(namespace, b"soup", 60) for _ in range(4)))
    opened = wire.opened

    wire.deafen()
    with pytest.raises(TimeoutError):
        await store.read(namespace)
    found = await asyncio.gather(*(store.read(namespace) for _ in range(4)))
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
    ],
)
async def test_server_that_talks_nonsense(nonsense: bytes, said: Said) -> None:
    """Whatever a server answers, calls get their own answers in bounded time, and the log quotes none of it."""
    async with (
        asyncio.timeout(10),
        babbling(nonsense) as url,
        Guard(url, deadline=0.05, connect_timeout=0.05) as guard,
    ):
        answers = [await ask(guard) for _ in range(5)]
        await guard.invalidate("menu-7")

    assert ["soup"] * 5 == answers
    assert "CANARY" not in "".join(said())
    assert guard.stats().loads == 5


async def test_unread_reply_is_never_handed_out(wire: Wire, store: RedisStore, namespace: str) -> None:
    """A pooled connection with a reply that nobody asked for is replaced before use."""
    await store.write(namespace, b"soup", 60)

    wire.say(b":1000\r\n" + bulk(b"salad"))
    await reaches(store)
    found = await store.read(namespace)

    assert found is not None
    assert found.envelope == b"soup"
    assert wire.opened == 2


async def test_default_pool_would_hand_out_an_unread_reply(wire: Wire, admin: Redis, namespace: str) -> None:
    """Why the pool's settings matter: should this fail, redis-py has mended it, and the settings may be reviewed."""
    await admin.set(namespace, b"soup", ex=60)
    async with Redis.from_url(wire.url) as client:
        await client.get(namespace)
        pool = client.connection_pool
        wire.say(bulk(b"salad"))
        async with asyncio.timeout(10):
            while not await pool._available_connections[-1].can_read():
                await asyncio.sleep(0)

        assert await client.get(namespace) == b"salad"


@pytest.mark.parametrize("injected", [b":1000\r\n%b", b"%b", b"%b:1000\r\n", b"%b%b", b"+OK\r\n", b":1\r\n"])
async def test_reply_injected_into_an_operation_answers_no_other_op(
    injected: bytes, wire: Wire, guard: Guard, namespace: str
) -> None:
    """A's value that arrives as the reply to B's read, past every check of the pool, is not B's answer."""
    of_a = bulk(seal(f"{namespace}:menu-A", b"salad"))
    injected = injected.replace(b"%b", of_a)

    async def inject(request: bytes) -> bytes:
        if b"menu-B" in request:
            wire.say(injected)
        return request

    await ask(guard, "menu-B")
    wire.on_request = inject
    answers = [await ask(guard, "menu-B") for _ in range(3)]
    confirmed = await guard.invalidate("menu-B")
    wire.on_request = passes
    answers += [await ask(guard, "menu-B") for _ in range(3)]

    assert ["soup"] * 6 == answers
    assert isinstance(confirmed, bool)


async def test_connection_that_is_out_of_step_is_not_used_again(
    wire: Wire, store: RedisStore, namespace: str, admin: Redis
) -> None:
    """After a reply of the wrong kind others may be under way, so its connection is closed."""
    await admin.set(f"{namespace}:B", b"soup", ex=60)
    gate = Gate()

    async def answer_for_the_server(request: bytes) -> bytes:
        wire.on_request = passes
        wire.say(b"+OK\r\n")
        await gate.passage()
        return request

    await store.open()
    wire.on_request = answer_for_the_server
    with pytest.raises(UnexpectedReply):
        await store.read(f"{namespace}:A")
    found = await store.read(f"{namespace}:B")

    assert found is not None
    assert found.envelope == b"soup"
    assert wire.opened == 2


async def test_another_operations_reply_confirms_no_invalidation(
    wire: Wire, guard: Guard, namespace: str, admin: Redis
) -> None:
    """A stray `OK` is not taken for the answer to a delete that never arrived."""

    async def swallow(request: bytes) -> bytes:
        if b"\r\nDEL\r\n" in request:
            wire.say(b"+OK\r\n")
            return b""
        return request

    await ask(guard)
    wire.on_request = swallow

    assert not await guard.invalidate("menu-7")
    assert await admin.exists(f"sg1:{{{namespace}:menu-7}}:v")


async def test_life_is_never_a_newer_values(wire: Wire, store: RedisStore, namespace: str, admin: Redis) -> None:
    """Replaced between its two questions, a value gets too short a life, never the newer one's longer one."""
    await store.write(namespace, b"old", 10)

    async def replace_between(request: bytes) -> bytes:
        wire.on_request = passes
        first, second = request.split(b"*")[1:]
        await replies_to(b"*" + first)
        await admin.set(namespace, b"new", ex=1000)
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
    found = await store.read(namespace)

    assert found is not None
    assert found.life is not None
    assert found.life <= 10


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
        found = await self._store.read(key)
        self.wrong += found is None or found.envelope != self._envelopes[key]

    async def cancel(self, number: int) -> None:
        """Start and cancel so many."""
        for _ in range(number):
            reading = asyncio.create_task(self.read())
            for _ in range(self._chance.randrange(30)):
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
    """Thousands of reads cancelled at any moment: no wrong value, no lost cancellation, no leaked connection."""
    chance = random.Random(7)
    envelopes = {f"{namespace}:{number}": b"menu %d" % number for number in range(8)}
    for key, envelope in envelopes.items():
        await admin.set(key, envelope, ex=600)

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
    assert store._pool._in_use_connections == set()
    assert len(store._pool._available_connections) <= 4


async def test_cancelled_operations_leave_no_connection_at_the_server(valkey: ValkeyServer) -> None:
    """After many cancellations, the server has no more clients than the pool has connections."""
    chance = random.Random(7)
    store = RedisStore(valkey.url, deadline=5, connect_timeout=5, max_connections=4)
    for _ in range(300):
        reading = [asyncio.create_task(store.read("menu-7")) for _ in range(4)]
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


async def test_pool_type_is_the_one_that_checks(store: RedisStore) -> None:
    """The pool is redis-py's plain one, whose checks at check-out the other tests rely on."""
    assert type(store._pool) is ConnectionPool
