"""L2 in any aiocache backend: memory, Memcached, Redis, or one's own."""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

from .._operations.options import Duration, count, seconds
from ..errors import ConfigurationError
from . import Stored

try:
    from aiocache.base import BaseCache
    from aiocache.serializers import NullSerializer
except ImportError as error:  # pragma: no cover  # the test environment has aiocache
    message = "an aiocache store needs aiocache: pip install 'stampede-guard[aiocache]'"
    raise ImportError(message) from error

_INSISTENCE = 10  # how often an operation is told to stop
_PATIENCE = 0.01  # seconds between two times


class AiocacheStore:
    """An aiocache backend as L2, for one event loop.

    The cache must pass bytes through, so its serializer has to be a `NullSerializer`. aiocache cannot say how long
    a value has left, so a value read from it gets a full `ttl` in L1: it may be `ttl + l2_ttl` old.
    Lives in the store are rounded up to whole seconds, which is all that Memcached understands.

    Args:
        cache: The backend, as in `AiocacheStore(RedisCache(serializer=NullSerializer(encoding=None)))`.
        deadline: Seconds that one operation may take.
        max_connections: Operations that may be under way at once; not more than the backend has connections for.

    Raises:
        ConfigurationError: *cache* is not an aiocache backend, or has a serializer that would change bytes.
    """

    name = "aiocache"

    def __init__(self, cache: BaseCache, *, deadline: Duration = 0.15, max_connections: int = 64) -> None:
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
        self.concurrency = count("max_connections", max_connections)
        self._running: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Ask for a key, which opens a connection where there are any."""
        await self._run(self._cache.exists("sg1:hello"))

    async def read(self, key: str) -> Stored | None:
        """Read the value; how long it has left is not known."""
        envelope = await self._run(self._cache.get(key))
        if envelope is None:
            return None
        return Stored(envelope if isinstance(envelope, bytes) else b"", None)  # else somebody else's, and not this op's

    async def write(self, key: str, envelope: bytes, ttl: float) -> None:
        """Write the value for *ttl* seconds, rounded up to whole ones, which every backend understands."""
        await self._run(self._cache.set(key, envelope, ttl=math.ceil(ttl)))

    async def delete(self, key: str) -> None:
        """Drop the value."""
        await self._run(self._cache.delete(key))

    async def aclose(self) -> None:
        """Close the backend's connections."""
        for left_behind in self._running:
            left_behind.cancel()
        await self._run(self._cache.close())

    async def _run(self, operation: Coroutine[Any, Any, Any]) -> Any:
        """Return what the backend answers within the deadline.

        In a task of its own, since a cancellation can be lost: with aiocache's settings, redis-py under Python 3.11
        takes some for its own and goes on, for its own five seconds. So the task is told again.
        """
        task = asyncio.create_task(operation)
        self._running.add(task)
        task.add_done_callback(self._note_end)
        try:
            await asyncio.wait((task,), timeout=self._deadline)
        finally:
            for _ in range(_INSISTENCE):
                if task.done():
                    break
                task.cancel()
                await asyncio.wait((task,), timeout=_PATIENCE)
        if not task.done() or task.cancelled():
            raise TimeoutError
        return task.result()

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, in case nobody waits for it any more

    def __repr__(self) -> str:
        return f"<AiocacheStore {type(self._cache).__name__}>"
