"""L2 in Redis or Valkey, through redis-py.

What is switched off, and why: its retries, since they execute commands twice and multiply every
deadline; maintenance notifications, since with them a pooled connection's unread reply is handed
to the next caller; socket timeouts, since with them Python 3.11 loses cancellations. One deadline
of our own spans the whole operation instead, and a connection that failed is never used again.
"""

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from .._policy import Duration, count, seconds
from ..errors import ConfigurationError
from . import Refused, Stored

try:
    from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import ResponseError
    from redis.maint_notifications import MaintNotificationsConfig
except ImportError as error:  # pragma: no cover  # the test environment has redis-py
    message = "a Redis store needs redis-py: pip install 'stampede-guard[redis]'"
    raise ImportError(message) from error

_SCHEMES = ("redis", "rediss", "unix")


def connection_options(url: str) -> tuple[type[Any], dict[str, Any]]:
    """Return redis-py's connection class and arguments for *url*.

    Raises:
        ConfigurationError: the URL is not one, or carries options: redis-py would let them win over
            the settings that correctness rests on, `?ssl_cert_reqs=none` among them.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        message = "the Redis URL has a port that is not a number from 0 to 65535; the form is redis://host:6379/0"
        raise ConfigurationError(message) from error
    if parts.scheme not in _SCHEMES:
        message = f"the store's URL begins with {parts.scheme!r}; give redis://, rediss:// or unix://"
        raise ConfigurationError(message)
    if parts.query or parts.fragment:
        options = (parts.query or parts.fragment).partition("=")[0]
        message = f"the Redis URL carries an option ({options}); options in a URL would override the guard's own"
        raise ConfigurationError(message)
    login = {
        "username": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
    }
    if parts.scheme == "unix":
        return UnixDomainSocketConnection, {**login, "path": unquote(parts.path)}
    database = parts.path.strip("/") or "0"
    if not database.isdecimal():
        message = f"the Redis URL names the database {database!r}; give its number, as in redis://host:6379/0"
        raise ConfigurationError(message)
    address = {"host": parts.hostname or "localhost", "port": port or 6379, "db": int(database)}
    return SSLConnection if parts.scheme == "rediss" else Connection, {**login, **address}


class RedisStore:
    """One event loop's connections to one Redis or Valkey.

    Args:
        url: `redis://`, `rediss://` (certificates and host names are checked) or `unix://`; no query options.
        deadline: Seconds that one operation may take on an open connection.
        connect_timeout: Seconds to get a connection, opening one included.
        max_connections: Connections open at once; further operations queue for one.
        max_bytes: Nothing longer is read, however long it is in the store.

    Raises:
        ConfigurationError: an argument breaks its rule.
    """

    name = "Redis"

    def __init__(
        self,
        url: str,
        *,
        deadline: Duration = 0.15,
        connect_timeout: Duration = 0.25,
        max_connections: int = 64,
        max_bytes: int = 1 << 20,
    ) -> None:
        connection_class, options = connection_options(url)
        self._deadline = seconds("deadline", deadline)
        self._connect_timeout = seconds("connect_timeout", connect_timeout)
        self._max_bytes = count("max_bytes", max_bytes)
        self._slots = asyncio.Semaphore(count("max_connections", max_connections))
        self._pool: Any = ConnectionPool(
            connection_class,
            max_connections=max_connections,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,
            socket_connect_timeout=None,
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
            **options,
        )

    async def open(self) -> None:
        """Open a connection, log in and say PING."""
        await self._run(("PING",))

    async def read(self, key: str) -> Stored | None:
        """Read the value and its remaining life in one round trip."""
        envelope, life = await self._run(("GETRANGE", key, 0, self._max_bytes + 64), ("PTTL", key))
        if not envelope:
            return None
        return Stored(envelope, max(life, 0) / 1000)

    async def write(self, key: str, envelope: bytes, life: float) -> None:
        """Write the value; the store forgets it after *life* seconds."""
        await self._run(("SET", key, envelope, "PX", max(1, round(life * 1000))))

    async def delete(self, key: str) -> None:
        """Drop the value."""
        await self._run(("DEL", key))

    async def aclose(self) -> None:
        """Close every connection."""
        async with asyncio.timeout(self._connect_timeout):
            await self._pool.aclose()

    async def _run(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Send *commands* together on one connection and return their replies, within the deadline."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout) as deadline, self._slots:
            connection = await self._pool.get_connection()
            try:
                deadline.reschedule(loop.time() + self._deadline)
                await connection.send_packed_command(connection.pack_commands(commands))
                return [await _reply(connection) for _ in commands]
            except BaseException:
                # Whatever it was, replies may be under way that the next caller would take for theirs.
                await connection.disconnect(nowait=True)
                raise
            finally:
                await self._pool.release(connection)

    def __repr__(self) -> str:
        return "<RedisStore>"  # the URL may hold a password


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        raise Refused(_code(error)) from None


def _code(error: ResponseError) -> str:
    """Return the error's first word (OOM, NOPERM, READONLY, …): the rest may quote keys and values."""
    word = str(error).partition(" ")[0]
    return word if word.isupper() else type(error).__name__


def redis_stores(url: str, **options: Any) -> Callable[[], RedisStore]:
    """Return what makes a store for each event loop, having checked the arguments now.

    Raises:
        ConfigurationError: an argument breaks its rule.
    """
    RedisStore(url, **options)
    return lambda: RedisStore(url, **options)
