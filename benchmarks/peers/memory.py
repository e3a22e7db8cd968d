"""Decorators that keep values in memory."""

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from benchmarks.peers.peer import BOUND, COALESCING, COUNTERS, MEMORY, OWN_TASK, TTL, Peer, Wrapped
from benchmarks.subjects import Subject, Terms


@asynccontextmanager
async def async_lru(subject: Subject, terms: Terms) -> Wrapped:
    """async-lru: an LRU of tasks."""
    from async_lru import alru_cache

    cached: Any = alru_cache(maxsize=terms.maxsize, ttl=terms.ttl)(subject.function)
    yield cached
    await cached.cache_close()


@asynccontextmanager
async def cachebox(subject: Subject, terms: Terms) -> Wrapped:
    """cachebox: a cache in Rust, and a lock for each key."""
    import cachebox

    cache: Any = cachebox.TTLCache(terms.maxsize, terms.ttl)
    yield cachebox.cached(cache)(subject.function)


@asynccontextmanager
async def theine(subject: Subject, terms: Terms) -> Wrapped:
    """theine: W-TinyLFU in Rust, with a key function as its documentation recommends."""
    from theine import Memoize

    memoize: Any = Memoize(terms.maxsize, timedelta(seconds=terms.ttl))
    cached = memoize(subject.function)
    cached.key(subject.key)
    yield cached
    memoize.cache.close()


@asynccontextmanager
async def asyncache(subject: Subject, terms: Terms) -> Wrapped:
    """asyncache: a cache of cachetools around a coroutine function."""
    import asyncache
    from cachetools import TTLCache

    yield asyncache.cached(TTLCache[Any, Any](terms.maxsize, terms.ttl))(subject.function)


@asynccontextmanager
async def cachetools_async(subject: Subject, terms: Terms) -> Wrapped:
    """cachetools-async: futures in a cache of cachetools."""
    import cachetools_async
    from cachetools import TTLCache

    yield cachetools_async.cached(TTLCache[Any, Any](terms.maxsize, terms.ttl))(subject.function)


@asynccontextmanager
async def aiocached(subject: Subject, terms: Terms) -> Wrapped:
    """aiocached: a dict of values, and one of futures."""
    from aiocached import cached

    yield cached(ttl=terms.ttl)(subject.function)


@asynccontextmanager
async def asyncstdlib(subject: Subject, terms: Terms) -> Wrapped:
    """asyncstdlib: the standard library's lru_cache for coroutine functions."""
    from asyncstdlib import lru_cache

    yield lru_cache(maxsize=terms.maxsize)(subject.function)


@asynccontextmanager
async def advanced_caching(subject: Subject, terms: Terms) -> Wrapped:
    """advanced-caching: values under a key template."""
    from advanced_caching import cache

    yield cache(terms.ttl, key=subject.template)(subject.function)


@asynccontextmanager
async def singleflight(subject: Subject, _terms: Terms) -> Wrapped:
    """singleflight: merges concurrent calls, and keeps nothing."""
    from singleflight.asynchronous import SingleFlightAsync

    flights: Any = SingleFlightAsync()
    function, key = subject.function, subject.key

    async def call(*args: Any, **kwargs: Any) -> Any:
        return await flights.call(function, str(key(*args, **kwargs)), *args, **kwargs)

    yield call


PEERS = (
    Peer("async-lru", async_lru, (), "async-lru", ("async_lru",)),
    Peer("cachebox", cachebox, (OWN_TASK,), "cachebox", ("cachebox",)),
    Peer("theine", theine, (OWN_TASK,), "theine", ("theine",)),
    Peer("asyncache", asyncache, (COALESCING, COUNTERS, OWN_TASK), "asyncache", ("asyncache",)),
    Peer("cachetools-async", cachetools_async, (COUNTERS,), "cachetools-async", ("cachetools_async",)),
    Peer("aiocached", aiocached, (BOUND, COUNTERS, OWN_TASK), "aiocached", ("aiocached",)),
    Peer("asyncstdlib", asyncstdlib, (TTL, COALESCING, OWN_TASK), "asyncstdlib", ("asyncstdlib",)),
    Peer(
        "advanced-caching",
        advanced_caching,
        (BOUND, COALESCING, COUNTERS, OWN_TASK),
        "advanced-caching",
        ("advanced_caching",),
    ),
    Peer("singleflight", singleflight, (TTL, BOUND, COUNTERS, OWN_TASK, MEMORY), "singleflight", ("singleflight",)),
)
