import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from aiocache import SimpleMemoryCache
from aiocache.serializers import JsonSerializer, NullSerializer, PickleSerializer, StringSerializer
from loaders import returning
from redis.asyncio import Redis
from stored import fingerprint_for, in_aiocache

from demo_api.servers import ValkeyServer, valkey_server
from stampede_guard import ConfigurationError, Guard
from stampede_guard.stores._envelope import seal
from stampede_guard.stores.aiocache import AiocacheStore

# aiocache calls redis-py by names that it has since changed.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated (close|setex):DeprecationWarning")

FLIGHT = "the-flight-that-stored"  # a token


@pytest.mark.parametrize(("l2_ttl", "life"), [(0.2, 1), (1.5, 2), (60, 60)])
async def test_lives_are_whole_seconds(l2_ttl: float, life: int, redis_url: str, namespace: str, admin: Redis) -> None:
    """A fraction of a second is rounded up, since Memcached knows none."""
    cache = in_aiocache(redis_url)

    async with Guard(lambda: AiocacheStore(cache, deadline=5), namespace=namespace) as guard:
        await guard.fetch("menu-7", returning("soup"), l2_ttl=l2_ttl, jitter=0, returns=str)
        left = await admin.pttl(f"sg1:{{{namespace}:menu-7}}:v")

    assert 1000 * (life - 1) < left <= 1000 * life


@pytest.mark.parametrize(
    "foreign", [7, 10**10, "soup", ["soup"], {"soup": 1}, b"soup", b"", bytearray(b"soup"), object()]
)
async def test_what_others_keep_in_the_backend_is_a_miss(foreign: object, namespace: str) -> None:
    """Whatever lies under an op's key in a shared memory backend, it is a counted miss, and no fault of the backend."""
    cache = in_aiocache(None)
    await cache.set(f"sg1:{{{namespace}:menu-7}}:v", foreign)

    async with Guard(lambda: AiocacheStore(cache), namespace=namespace) as guard:
        answer = await guard.fetch("menu-7", returning("salad"), l2_ttl=60, returns=str)

    assert answer == "salad"
    assert (1, 0) == (guard.stats().l2_undecodable, guard.stats().l2_errors)


@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "Redis"])
@pytest.mark.parametrize(
    ("op", "size"), [("menu-7", 4), ("menu-8", 1_001)], ids=["another op's", "larger than max_bytes"]
)
async def test_i7_what_is_no_value_of_the_op_is_refused(
    op: str, size: int, in_memory: bool, redis_url: str, namespace: str
) -> None:
    """Neither a value that was stored for another op answers, nor one that is too large."""
    async with in_aiocache(None if in_memory else redis_url) as cache:
        envelope = seal(f"{namespace}:{op}", b"x" * size, FLIGHT, fingerprint=fingerprint_for(bytes))
        await cache.set(f"sg1:{{{namespace}:menu-8}}:v", envelope, ttl=60)
        async with Guard(lambda: AiocacheStore(cache, deadline=5), namespace=namespace, max_bytes=1_000) as guard:
            answer = await guard.fetch("menu-8", returning(b"salad"), l2_ttl=60, returns=bytes)

    assert (b"salad", 1) == (answer, guard.stats().l2_undecodable)


@pytest.mark.parametrize(
    "serializer", [None, NullSerializer(), StringSerializer(), JsonSerializer(), PickleSerializer()]
)
def test_serializer_that_changes_bytes_is_refused(serializer: object) -> None:
    """A backend whose serializer would not give back the bytes is an error that says which one does."""
    cache = SimpleMemoryCache(serializer=serializer)

    with pytest.raises(ConfigurationError, match=r"NullSerializer\(encoding=None\)"):
        AiocacheStore(cache)


@pytest.mark.parametrize("cache", ["redis://localhost", None, SimpleMemoryCache, Redis])
def test_what_is_no_backend_is_refused(cache: Any) -> None:
    """A URL, a class or another client is an error that names what is wanted."""
    with pytest.raises(ConfigurationError, match="aiocache backend"):
        AiocacheStore(cache)


@pytest.mark.parametrize("deadline", [0, -1, "1"])
def test_deadline_is_checked(deadline: Any) -> None:
    """A deadline is a duration above zero."""
    with pytest.raises(ConfigurationError, match="deadline"):
        AiocacheStore(in_aiocache(None), deadline=deadline)


def test_repr_names_the_backend_and_nothing_else() -> None:
    """The backend's own repr would show its address."""
    store = AiocacheStore(in_aiocache("redis://canary:6379"))

    assert repr(store) == "<AiocacheStore RedisCache>"


@pytest.fixture
async def own(namespace: str) -> AsyncIterator[tuple[ValkeyServer, Guard]]:
    """Return a server that may be frozen, and an open guard over aiocache's backend for it."""
    with valkey_server() as server:
        cache = in_aiocache(server.url)
        async with Guard(lambda: AiocacheStore(cache, deadline=0.1), namespace=namespace) as guard:
            yield server, guard
            server.thaw()


async def test_deadline_bounds_a_frozen_server(own: tuple[ValkeyServer, Guard]) -> None:
    """A frozen server costs three deadlines, whatever patience and retries the backend has of its own."""
    server, guard = own
    loop = asyncio.get_running_loop()

    await guard.fetch("menu-7", returning("soup"), l2_ttl=60, returns=str)
    server.freeze()
    started_at = loop.time()
    answers = [await guard.fetch(f"menu-{menu_id}", returning("soup"), l2_ttl=60, returns=str) for menu_id in range(3)]
    took = loop.time() - started_at

    assert ["soup"] * 3 == answers
    assert guard.stats().l2_errors == 3
    assert took < 2


async def test_no_cancellation_is_lost_in_the_backend(own: tuple[ValkeyServer, Guard], namespace: str) -> None:
    """However often the deadline cuts an operation at whichever moment, none outlives it by the backend's patience."""
    server, _ = own
    loop = asyncio.get_running_loop()
    cache = in_aiocache(server.url)
    await cache.exists("warm-up")
    server.freeze()

    longest, left_behind = 0.0, 0
    for number in range(200):
        store = AiocacheStore(cache, deadline=0.0005 + number / 100_000)
        started_at = loop.time()
        with pytest.raises(TimeoutError):
            await store.read(namespace)
        longest = max(longest, loop.time() - started_at)
        left_behind += len(store._running)
    server.thaw()
    await cache.close()

    assert longest < 1
    assert left_behind == 0


class Stubborn(SimpleMemoryCache):
    """A backend of one's own that goes on whoever cancels it, and fails in the end."""

    def __init__(self) -> None:
        super().__init__(serializer=NullSerializer(encoding=None), timeout=None)
        self.end = asyncio.Event()
        self.ended = False

    async def _get(self, *_args: object, **_options: object) -> None:
        while not self.end.is_set():
            with suppress(asyncio.CancelledError):
                await self.end.wait()
        self.ended = True
        raise LookupError("nobody waits for this")


async def test_backend_that_ignores_cancellation_is_left_behind() -> None:
    """An operation that cannot be stopped ends for its caller all the same, and its outcome disturbs nobody."""
    cache = Stubborn()
    store = AiocacheStore(cache, deadline=0.01)

    with pytest.raises(TimeoutError):
        await store.read("menu-7")
    was_left_behind = len(store._running)
    await store.aclose()
    cache.end.set()
    async with asyncio.timeout(10):
        while store._running:
            await asyncio.sleep(0)

    assert (1, True) == (was_left_behind, cache.ended)


async def test_backends_own_cancellation_is_a_failure() -> None:
    """A backend that raises `CancelledError` by itself did not answer, and cancels nobody."""

    class Cancelling(SimpleMemoryCache):
        async def _get(self, *_args: object, **_options: object) -> None:
            raise asyncio.CancelledError

    store = AiocacheStore(Cancelling(serializer=NullSerializer(encoding=None)), deadline=5)

    with pytest.raises(TimeoutError):
        await store.read("menu-7")


async def test_cancelled_operation_is_stopped(own: tuple[ValkeyServer, Guard]) -> None:
    """Whoever waits for the store may be cancelled; the operation stops too."""
    server, _ = own
    cache = in_aiocache(server.url)
    store = AiocacheStore(cache, deadline=60)
    server.freeze()
    reading = asyncio.create_task(store.read("menu-7"))
    async with asyncio.timeout(10):
        while not store._running:
            await asyncio.sleep(0)

    reading.cancel()
    await asyncio.wait([reading])
    server.thaw()
    await cache.close()

    assert reading.cancelled()
    assert store._running == set()


async def test_value_is_right_after_a_cut_operation(own: tuple[ValkeyServer, Guard], namespace: str) -> None:
    """Replies that come after their deadline are nobody else's answer."""
    server, _ = own
    cache = in_aiocache(server.url)
    patient, hasty = AiocacheStore(cache, deadline=5), AiocacheStore(cache, deadline=0.01)
    for number in range(10):
        await patient.write(f"{namespace}-{number}", b"%d" % number, 60)
    server.freeze()
    for number in range(10):
        with pytest.raises(TimeoutError):
            await hasty.read(f"{namespace}-{number}")
    server.thaw()

    found = [await patient.read(f"{namespace}-{number}") for number in range(10)]
    await cache.close()

    assert [b"%d" % number for number in range(10)] == [stored.envelope for stored in found if stored is not None]
