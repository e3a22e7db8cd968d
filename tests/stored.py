"""Stores: one that gives leases, used as one that reads and writes; and the backends of aiocache."""

from typing import Any
from urllib.parse import urlsplit

from aiocache import RedisCache, SimpleMemoryCache
from aiocache.serializers import NullSerializer
from redis.asyncio import Redis

from stampede_guard._codecs.codec import codec_for
from stampede_guard._codecs.fingerprint import describe_codec, fingerprint_of, with_tags
from stampede_guard._tokens import new_token
from stampede_guard.stores import AcquireRequest, LeasingStore, Stored
from stampede_guard.stores.redis import RedisStore


def fingerprint_for(annotation: Any, *tags: str) -> bytes:
    """Return the fingerprint of an operation's values."""
    base = fingerprint_of(describe_codec(codec_for(annotation), lambda: annotation))
    return with_tags(base, tags) if tags else base


async def put(store: LeasingStore, key: str, envelope: bytes, life: float = 60) -> None:
    """Store *envelope*, whatever is there and whoever has the lease."""
    token = new_token()
    await store.acquire(AcquireRequest(key, (), 10, 60, token=token, reject=b"*"))
    assert await store.fill(key, token, envelope, life, None, b"w", always_publish=False)


async def bytes_at(admin: Redis, key: str) -> bytes:
    """Return the bytes under *key*, where there have to be some."""
    value = await admin.get(key)
    assert isinstance(value, bytes)
    return value


async def script_calls(admin: Redis) -> int:
    """Return how many requests of scripts the server has executed."""
    statistics = await admin.info("commandstats")
    return sum(statistics.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))


def in_aiocache(url: str | None) -> Any:
    """Return aiocache's backend for the Redis at *url*, or the one in memory; bytes pass as they are."""
    if url is None:
        return SimpleMemoryCache(serializer=NullSerializer(encoding=None))
    parts = urlsplit(url)
    return RedisCache(endpoint=parts.hostname, port=parts.port, serializer=NullSerializer(encoding=None))


async def find(store: LeasingStore, key: str) -> Stored | None:
    """Return what is stored; if that is nothing, a lease of a second is left behind."""
    verdict = await store.acquire(AcquireRequest(key, (), 1, 60))
    return verdict.stored


def pool_of(store: RedisStore) -> Any:
    """Return redis-py's pool of the store's only server."""
    return store._topology.primary("")._pool
