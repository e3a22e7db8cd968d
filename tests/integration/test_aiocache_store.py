import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiocache import RedisCache, SimpleMemoryCache
from aiocache.base import BaseCache
from aiocache.serializers import JsonSerializer, NullSerializer, PickleSerializer, StringSerializer
from redis.asyncio import Redis
from stored import fingerprint_for

from demo_api.servers import ValkeyServer, valkey_server
from stampede_guard import ConfigurationError, Guard
from stampede_guard.stores._envelope import seal
from stampede_guard.stores.aiocache import AiocacheStore

# aiocache calls redis-py by names that it has since changed.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated (close|setex):DeprecationWarning")

MakeCache = Callable[[], BaseCache]

FLIGHT = "the-flight-that-stored"  # a token


async def refuse() -> str:
    """Load nothing: what is asked for has to be in the store."""
    raise AssertionError("loaded")


def raw() -> NullSerializer:
    """Return the serializer that lets bytes pass."""
    return NullSerializer(encoding=None)


@pytest.fixture(params=["memory", "redis"])
async def cache(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[BaseCache]:
    """Return one of aiocache's backends."""
    if request.param == "memory":
        yield SimpleMemoryCache(serializer=raw())
        return
    async with RedisCache(endpoint="127.0.0.1", port=urlsplit(redis_url).port, serializer=raw()) as cache:
        yield cache


@pytest.fixture
def make_guard(cache: BaseCache, namespace: str) -> Callable[[], Guard]:
    """Return what makes guards over the same backend."""
    return lambda: Guard(lambda: AiocacheStore(cache, deadline=5), namespace=namespace)


MakeGuard = Callable[[], Guard]


async def test_second_guard_reads_what_the_first_loaded(make_guard: MakeGuard) -> None:
    """A value that one guard stored answers in another."""

    async def load() -> str:
        return "soup"

    async with make_guard() as first, make_guard() as second:
        await first.fetch("menu-7", load, l2_ttl=60, returns=str)
        answer = await second.fetch("menu-7", refuse, l2_ttl=60, returns=str)

    assert answer == "soup"
    assert (1, 0) == (second.stats().l2_hits, second.stats().l2_errors)


async def test_none_is_a_value(make_guard: MakeGuard) -> None:
    """A stored `None` is the answer, though `None` is aiocache's word for a miss."""

    async def load() -> None:
        return None

    async with make_guard() as first, make_guard() as second:
        await first.fetch("menu-7", load, l2_ttl=60, returns=None)
        answer = await second.fetch("menu-7", refuse, l2_ttl=60, returns=None)

    assert answer is None
    assert second.stats().l2_hits == 1


async def test_any_bytes_pass(make_guard: MakeGuard) -> None:
    """Bytes that are no text come back as they were."""

    async def load() -> bytes:
        return bytes(range(256))

    async with make_guard() as first, make_guard() as second:
        await first.fetch("menu-7", load, l2_ttl=60, returns=bytes)
        answer: object = await second.fetch("menu-7", refuse, l2_ttl=60, returns=bytes)

    assert bytes(range(256)) == answer


@pytest.mark.parametrize(("l2_ttl", "life"), [(0.2, 1), (1.5, 2), (60, 60)])
async def test_lives_are_whole_seconds(l2_ttl: float, life: int, redis_url: str, namespace: str, admin: Redis) -> None:
    """A fraction of a second is rounded up, since Memcached knows none."""
    cache = RedisCache(endpoint="127.0.0.1", port=urlsplit(redis_url).port, serializer=raw())

    async def load() -> str:
        return "soup"

    async with Guard(lambda: AiocacheStore(cache, deadline=5), namespace=namespace) as guard:
        await guard.fetch("menu-7", load, l2_ttl=l2_ttl, jitter=0, returns=str)
        left = await admin.pttl(f"sg1:{{{namespace}:menu-7}}:v")

    assert 1000 * (life - 1) < left <= 1000 * life


async def test_value_gets_a_whole_ttl_in_memory(make_guard: MakeGuard) -> None:
    """The backend does not say how long a value has left, so it stays in memory for `ttl`."""

    async def load() -> str:
        return "soup"

    async with make_guard() as first, make_guard() as second:
        await first.fetch("menu-7", load, l2_ttl=60, returns=str)
        for _ in range(2):
            await second.fetch("menu-7", refuse, ttl=30, l2_ttl=60, returns=str)

    assert (1, 1) == (second.stats().l2_hits, second.stats().l1_hits)


async def test_invalidate_removes(make_guard: MakeGuard) -> None:
    """After an invalidation the backend holds nothing, and the next call loads."""
    served = iter(["old", "new"])

    async def load() -> str:
        return next(served)

    async with make_guard() as guard:
        await guard.fetch("menu-7", load, ttl=5, l2_ttl=60, returns=str)
        await guard.invalidate("menu-7")
        answer = await guard.fetch("menu-7", load, ttl=5, l2_ttl=60, returns=str)

    assert (answer, guard.stats().l2_misses) == ("new", 2)


async def test_absent_key_can_be_deleted(make_guard: MakeGuard) -> None:
    """Nothing to delete is as good as deleted: nothing is raised, and nothing left to be tried again."""
    async with make_guard() as guard:
        await guard.invalidate("menu-7")
        tier = guard._states.running().tier

    assert tier is not None
    assert [] == tier.pending.all()


@pytest.mark.parametrize(
    "foreign", [7, 10**10, "soup", ["soup"], {"soup": 1}, b"soup", b"", bytearray(b"soup"), object()]
)
async def test_what_others_keep_in_the_backend_is_a_miss(foreign: object, namespace: str) -> None:
    """Whatever lies under an op's key in a shared memory backend, it is a counted miss, and no fault of the backend."""
    cache = SimpleMemoryCache(serializer=raw())
    await cache.set(f"sg1:{{{namespace}:menu-7}}:v", foreign)

    async def load() -> str:
        return "salad"

    async with Guard(lambda: AiocacheStore(cache), namespace=namespace) as guard:
        answer = await guard.fetch("menu-7", load, l2_ttl=60, returns=str)

    assert answer == "salad"
    assert (1, 0) == (guard.stats().l2_undecodable, guard.stats().l2_errors)


async def test_i7_envelope_of_another_op_is_refused(cache: BaseCache, namespace: str) -> None:
    """A value that was stored for another op never answers."""
    await cache.set(
        f"sg1:{{{namespace}:menu-8}}:v",
        seal(f"{namespace}:menu-7", b"soup", FLIGHT, fingerprint=fingerprint_for(str)),
        ttl=60,
    )

    async def load() -> str:
        return "salad"

    async with Guard(lambda: AiocacheStore(cache, deadline=5), namespace=namespace) as guard:
        answer = await guard.fetch("menu-8", load, l2_ttl=60, returns=str)

    assert answer == "salad"
    assert guard.stats().l2_undecodable == 1


async def test_values_over_max_bytes_are_not_read(namespace: str) -> None:
    """The limit on what is read holds for every backend."""
    cache = SimpleMemoryCache(serializer=raw())
    await cache.set(
        f"sg1:{{{namespace}:menu-7}}:v",
        seal(f"{namespace}:menu-7", b"x" * 1001, FLIGHT, fingerprint=fingerprint_for(bytes)),
    )

    async def load() -> bytes:
        return b"soup"

    async with Guard(lambda: AiocacheStore(cache), namespace=namespace, max_bytes=1000) as guard:
        answer = await guard.fetch("menu-7", load, l2_ttl=60, returns=bytes)

    assert answer == b"soup"
    assert guard.stats().l2_undecodable == 1


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
        AiocacheStore(SimpleMemoryCache(serializer=raw()), deadline=deadline)


def test_repr_names_the_backend_and_nothing_else() -> None:
    """The backend's own repr would show its address."""
    store = AiocacheStore(RedisCache(endpoint="canary", serializer=raw()))

    assert repr(store) == "<AiocacheStore RedisCache>"


@pytest.fixture
async def own(namespace: str) -> AsyncIterator[tuple[ValkeyServer, Guard]]:
    """Return a server that may be frozen, and an open guard over aiocache's backend for it."""
    with valkey_server() as server:
        cache = RedisCache(endpoint="127.0.0.1", port=server.port, serializer=raw())
        async with Guard(lambda: AiocacheStore(cache, deadline=0.1), namespace=namespace) as guard:
            yield server, guard
            server.thaw()


async def test_deadline_bounds_a_frozen_server(own: tuple[ValkeyServer, Guard]) -> None:
    """A frozen server costs three deadlines, whatever patience and retries the backend has of its own."""
    server, guard = own
    loop = asyncio.get_running_loop()

    async def load() -> str:
        return "soup"

    await guard.fetch("menu-7", load, l2_ttl=60, returns=str)
    server.freeze()
    started_at = loop.time()
    answers = [await guard.fetch(f"menu-{menu_id}", load, l2_ttl=60, returns=str) for menu_id in range(3)]
    took = loop.time() - started_at

    assert ["soup"] * 3 == answers
    assert guard.stats().l2_errors == 3
    assert took < 2


async def test_no_cancellation_is_lost_in_the_backend(own: tuple[ValkeyServer, Guard], namespace: str) -> None:
    """However often the deadline cuts an operation at whichever moment, none outlives it by the backend's patience."""
    server, _ = own
    loop = asyncio.get_running_loop()
    cache = RedisCache(endpoint="127.0.0.1", port=server.port, serializer=raw())
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
        super().__init__(serializer=raw(), timeout=None)
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

    store = AiocacheStore(Cancelling(serializer=raw()), deadline=5)

    with pytest.raises(TimeoutError):
        await store.read("menu-7")


async def test_cancelled_operation_is_stopped(own: tuple[ValkeyServer, Guard]) -> None:
    """Whoever waits for the store may be cancelled; the operation stops too."""
    server, _ = own
    cache = RedisCache(endpoint="127.0.0.1", port=server.port, serializer=raw())
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
    cache = RedisCache(endpoint="127.0.0.1", port=server.port, serializer=raw())
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
