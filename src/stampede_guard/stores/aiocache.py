"""L2 in any aiocache backend: memory, Memcached, Redis, or one's own."""

import asyncio
import math
from typing import Any

from .._policy import Duration, seconds
from ..errors import ConfigurationError
from . import Stored

try:
    from aiocache.base import BaseCache
    from aiocache.serializers import NullSerializer
except ImportError as error:  # pragma: no cover  # the test environment has aiocache
    message = "an aiocache store needs aiocache: pip install 'stampede-guard[aiocache]'"
    raise ImportError(message) from error


class AiocacheStore:
    """An aiocache backend as L2, for one event loop.

    The cache must pass bytes through, so its serializer has to be a `NullSerializer`. aiocache cannot say how long
    a value has left, so a value read from it gets a full `ttl` in L1: it may be `ttl + l2_ttl` old.
    Lives in the store are rounded up to whole seconds, which is all that Memcached understands.

    Args:
        cache: The backend, as in `AiocacheStore(RedisCache(serializer=NullSerializer(encoding=None)))`.
        deadline: Seconds that one operation may take.

    Raises:
        ConfigurationError: *cache* is not an aiocache backend, or has a serializer that would change bytes.
    """

    name = "aiocache"

    def __init__(self, cache: BaseCache, *, deadline: Duration = 0.15) -> None:
        if not isinstance(cache, BaseCache):
            message = f"give AiocacheStore an aiocache backend, not a {type(cache).__qualname__}"
            raise ConfigurationError(message)
        serializer: Any = cache.serializer
        if not isinstance(serializer, NullSerializer) or serializer.encoding is not None:
            message = (
                f"the aiocache backend's {type(serializer).__qualname__} would change bytes; "
                "make it with serializer=NullSerializer(encoding=None)"
            )
            raise ConfigurationError(message)
        self._cache: Any = cache
        self._deadline = seconds("deadline", deadline)

    async def open(self) -> None:
        """Ask for a key, which opens a connection where there are any."""
        async with asyncio.timeout(self._deadline):
            await self._cache.exists("sg1:hello")

    async def read(self, key: str) -> Stored | None:
        """Read the value; how long it has left is not known."""
        async with asyncio.timeout(self._deadline):
            envelope = await self._cache.get(key)
        return None if envelope is None else Stored(bytes(envelope), None)

    async def write(self, key: str, envelope: bytes, life: float) -> None:
        """Write the value for *life* seconds, rounded up to whole ones, which every backend understands."""
        async with asyncio.timeout(self._deadline):
            await self._cache.set(key, envelope, ttl=math.ceil(life))

    async def delete(self, key: str) -> None:
        """Drop the value."""
        async with asyncio.timeout(self._deadline):
            await self._cache.delete(key)

    async def aclose(self) -> None:
        """Close the backend's connections."""
        async with asyncio.timeout(self._deadline):
            await self._cache.close()

    def __repr__(self) -> str:
        return f"<AiocacheStore {type(self._cache).__name__}>"
