"""L2 in an aiocache backend: memory, Memcached, Redis, or another one."""

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

_CANCEL_TRIES = 10  # times that an operation is cancelled
_CANCEL_PAUSE = 0.01  # seconds between two of them


class AiocacheStore:
    """An aiocache backend as L2, for one event loop.

    The cache has to pass bytes through, so its serializer must be a `NullSerializer`. aiocache does not tell when a
    value expires, so a value read from it gets a full `ttl` in L1: it may be `ttl + l2_ttl` old. In the store, TTLs are
    rounded up to whole seconds, because Memcached has no shorter unit. What is found counts as fresh, and is not kept
    for longer: a window in which values are stale has no effect here.

    Args:
        cache: The backend, as in `AiocacheStore(RedisCache(serializer=NullSerializer(encoding=None)))`.
        deadline: Seconds that one operation may take.
        max_connections: Operations that may run at once; at most the number of connections that the backend has.

    Raises:
        ConfigurationError: *cache* is not an aiocache backend, or its serializer changes bytes.
    """

    name = "aiocache"
    tells_ttl = False

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
        """Ask for a key, which makes a backend with connections open one."""
        await self._run(self._cache.exists("sg1:hello"))

    async def read(self, key: str) -> Stored | None:
        """Read the value, without its TTL."""
        envelope = await self._run(self._cache.get(key))
        if envelope is None:
            return None
        # Another type is a value that another program stored; an empty envelope is a miss.
        return Stored(envelope if isinstance(envelope, bytes) else b"", None)

    async def write(self, key: str, envelope: bytes, ttl: float) -> None:
        """Write the value for *ttl* seconds, rounded up to whole seconds."""
        await self._run(self._cache.set(key, envelope, ttl=math.ceil(ttl)))

    async def delete(self, key: str) -> None:
        """Drop the value."""
        await self._run(self._cache.delete(key))

    async def aclose(self) -> None:
        """Close the backend's connections."""
        for task in self._running:
            task.cancel()
        await self._run(self._cache.close())

    async def _run(self, operation: Coroutine[Any, Any, Any]) -> Any:
        """Return the answer of the backend, or raise `TimeoutError` at the deadline.

        The operation runs in a task of its own, which is cancelled several times if necessary: with aiocache's settings
        and Python 3.11, redis-py may take a cancellation for its own timeout, and go on for five seconds.
        """
        task = asyncio.create_task(operation)
        self._running.add(task)
        task.add_done_callback(self._task_done)
        try:
            await asyncio.wait((task,), timeout=self._deadline)
        finally:
            for _ in range(_CANCEL_TRIES):
                if task.done():
                    break
                task.cancel()
                await asyncio.wait((task,), timeout=_CANCEL_PAUSE)
        if not task.done() or task.cancelled():
            raise TimeoutError
        return task.result()

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it

    def __repr__(self) -> str:
        return f"<AiocacheStore {type(self._cache).__name__}>"
