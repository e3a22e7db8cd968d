"""Decorators over a backend, which may be memory or Redis."""

from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from benchmarks.peers.peer import BOUND, COALESCING, COUNTERS, OWN_TASK, Peer, Wrap, Wrapped
from benchmarks.subjects import Subject, Terms

CONNECTIONS = 128  # more than the readers


def _aiocache(decorator: str, **options: Any) -> Wrap:
    """Return a wrapper that applies aiocache's *decorator*."""

    @asynccontextmanager
    async def wrap(subject: Subject, terms: Terms) -> Wrapped:
        import aiocache
        from aiocache.serializers import StringSerializer

        place: dict[str, Any] = {"cache": aiocache.Cache.MEMORY}
        if terms.url:
            server = urlsplit(terms.url)
            place = {
                "cache": aiocache.Cache.REDIS,
                "endpoint": server.hostname,
                "port": server.port,
                "pool_max_size": CONNECTIONS,
                "serializer": StringSerializer(),
                "namespace": decorator,
            }
        cached = getattr(aiocache, decorator)(ttl=terms.ttl, **place, **options)(subject.function)
        yield cached
        await cached.cache.close()

    return wrap


def _cashews(**options: Any) -> Wrap:
    """Return a wrapper that applies cashews' `cache`."""

    @asynccontextmanager
    async def wrap(subject: Subject, terms: Terms) -> Wrapped:
        from cashews import Cache

        cache = Cache()
        if terms.url:
            cache.setup(terms.url, max_connections=CONNECTIONS)
        else:
            cache.setup("mem://", size=terms.maxsize)
        early = {"early_ttl": terms.ttl / 2} if options.get("early") else {}
        decorate: Any = cache.early if early else cache
        others = {name: value for name, value in options.items() if name != "early"}
        yield decorate(ttl=terms.ttl, key=subject.template, **early, **others)(subject.function)
        await cache.close()

    return wrap


@asynccontextmanager
async def _fastapi_cache(subject: Subject, terms: Terms) -> Wrapped:
    from fastapi_cache import FastAPICache
    from fastapi_cache.backends.inmemory import InMemoryBackend
    from fastapi_cache.decorator import cache

    client: Any = None
    backend: Any = InMemoryBackend()
    if terms.url:
        from fastapi_cache.backends.redis import RedisBackend
        from redis.asyncio import BlockingConnectionPool, Redis

        client = Redis.from_pool(BlockingConnectionPool.from_url(terms.url, max_connections=CONNECTIONS))
        backend = RedisBackend(client)
    FastAPICache.init(backend, prefix="benchmarks")
    yield cache(expire=int(terms.ttl))(subject.function)
    FastAPICache.reset()
    if client is None:
        # All of its backends in memory share one dict.
        await backend.clear("benchmarks")
    else:
        await client.aclose()


@asynccontextmanager
async def _dogpile_breaker(subject: Subject, terms: Terms) -> Wrapped:
    from dogpile_breaker import CacheRegion, MemoryBackendLRU, RedisStorageBackend

    place: Any = MemoryBackendLRU
    options: dict[str, Any] = {"max_size": terms.maxsize}
    if terms.url:
        place = RedisStorageBackend
        server = urlsplit(terms.url)
        options = {"host": server.hostname, "port": server.port, "db": 0, "max_connections": CONNECTIONS, "timeout": 10}
    key = subject.key

    def key_of(_function: Any, *args: Any, **kwargs: Any) -> str:
        return f"dogpile:{key(*args, **kwargs)}"

    region = CacheRegion(str.encode, bytes.decode, "benchmarks", stats_enabled=False)
    await region.configure(place, options)
    cached: Any = region.cache_on_arguments(int(terms.ttl), 10, key_of)(subject.function)
    yield cached
    await region.aclose()


_UNBOUND = (BOUND, COALESCING, COUNTERS, OWN_TASK)

PEERS = (
    Peer("aiocache cached", _aiocache("cached"), _UNBOUND, "aiocache", ("aiocache",), has_redis=True),
    Peer(
        "aiocache cached, no timeout",
        _aiocache("cached", timeout=None),
        _UNBOUND,
        "aiocache",
        ("aiocache",),
        is_variant=True,
    ),
    Peer(
        "aiocache cached_stampede",
        _aiocache("cached_stampede"),
        (BOUND, COUNTERS, OWN_TASK),
        "aiocache",
        ("aiocache",),
        has_redis=True,
        is_variant=True,
    ),
    Peer("cashews cache", _cashews(), (COUNTERS,), "cashews", ("cashews",), has_redis=True),
    Peer(
        "cashews cache, lock",
        _cashews(lock=True),
        (COUNTERS,),
        "cashews",
        ("cashews",),
        has_redis=True,
        is_variant=True,
    ),
    Peer(
        "cashews early",
        _cashews(early=True),
        (COUNTERS,),
        "cashews",
        ("cashews",),
        has_redis=True,
        is_variant=True,
    ),
    Peer("fastapi-cache2", _fastapi_cache, _UNBOUND, "fastapi-cache2", ("fastapi_cache", "fastapi"), has_redis=True),
    Peer(
        "dogpile-breaker",
        _dogpile_breaker,
        (COUNTERS, OWN_TASK),
        "dogpile-breaker",
        ("dogpile_breaker",),
        has_redis=True,
    ),
)
