"""L2 in Redis or Valkey, through redis-py.

What is switched off, and why: its retries, since they execute commands twice and multiply every
deadline; maintenance notifications, since with them a pooled connection's unread reply is handed
to the next caller; socket timeouts, since with them Python 3.11 loses cancellations. One deadline
of our own spans the whole operation instead, and a connection that failed is never used again.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from .._policy import Duration, count, seconds
from ..errors import ConfigurationError
from . import Refused, Stored
from ._patience import Patience

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
_CODE = re.compile("[A-Z]{2,16}")


class UnexpectedReply(Exception):  # noqa: N818  # the log shows the name
    """The reply is of another type than the command's: it belongs to something else."""


def connection_options(url: str) -> tuple[type[Any], dict[str, Any]]:
    """Return redis-py's connection class and arguments for *url*.

    Raises:
        ConfigurationError: the URL is not one, or carries options: redis-py would let them win over
            the settings that correctness rests on, `?ssl_cert_reqs=none` among them. The message
            quotes nothing, as any part may be a piece of a password that was not escaped.
    """
    if "?" in url or "#" in url:
        message = (
            "the Redis URL carries options, which would override the guard's own; "
            "leave out what follows the ? or #, and write these two in a password as %3F and %23"
        )
        raise ConfigurationError(message)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text quotes
        message = (
            "the Redis URL has a port that is not a number from 0 to 65535, or a character out of place; "
            "the form is redis://user:password@host:6379/0, where a / in the password is written %2F"
        )
        raise ConfigurationError(message) from None
    if parts.scheme not in _SCHEMES:
        message = "the store's URL has another scheme than redis://, rediss:// and unix://"
        raise ConfigurationError(message)
    login = {
        "username": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
    }
    if parts.scheme == "unix":
        if not parts.path:
            message = "the Redis URL has no path; the form is unix:///run/redis.sock"
            raise ConfigurationError(message)
        return UnixDomainSocketConnection, {**login, "path": unquote(parts.path)}
    database = parts.path.strip("/") or "0"
    if not re.fullmatch("[0-9]+", database):
        message = "the Redis URL names a database that is not a number; the form is redis://host:6379/0"
        raise ConfigurationError(message)
    address = {"host": parts.hostname or "localhost", "port": port or 6379, "db": int(database)}
    return SSLConnection if parts.scheme == "rediss" else Connection, {**login, **address}


class RedisStore:
    """One event loop's connections to one Redis or Valkey.

    Args:
        url: `redis://`, `rediss://` (certificates and host names are checked) or `unix://`; no query options.
        deadline: Seconds that one operation may take on an open connection.
        connect_timeout: Seconds that opening a connection may take.
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
        self.concurrency = count("max_connections", max_connections)
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
        await self._run((bytes, "PING"))

    async def read(self, key: str) -> Stored | None:
        """Read the value and its remaining life in one round trip.

        The life first: should the value be replaced in between, it is the older one's, and not too long.
        """
        end = self._max_bytes + 64  # some room for the header; a longer value is cut, and therefore refused
        try:
            life, envelope = await self._run((int, "PTTL", key), (bytes, "GETRANGE", key, 0, end))
        except Refused as refusal:
            if str(refusal) == "WRONGTYPE":  # no fault of the server's: somebody else's list lies there
                return Stored(b"", 0.0)
            raise
        return Stored(envelope, max(life, 0) / 1000) if envelope else None

    async def write(self, key: str, envelope: bytes, life: float) -> None:
        """Write the value; the store forgets it after *life* seconds."""
        await self._run((bytes, "SET", key, envelope, "PX", max(1, round(life * 1000))))

    async def delete(self, key: str) -> None:
        """Drop the value."""
        await self._run((int, "DEL", key))

    async def aclose(self) -> None:
        """Close every connection."""
        async with asyncio.timeout(self._connect_timeout):
            await self._pool.aclose()

    async def _run(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Run *commands*, each behind the type of its reply, in one round trip within the deadline."""
        try:
            replies = await self._exchange(commands)
        except Exception:
            await self._distrust()
            raise
        for reply in replies:
            if isinstance(reply, Refused):
                raise reply
        return replies

    async def _exchange(self, commands: tuple[tuple[Any, ...], ...]) -> list[Any]:
        async with Patience(self._connect_timeout) as patience:
            connection = await self._pool.get_connection()
            try:
                if connection._writer.is_closing():  # noqa: SLF001  # reset while idle: the pool does not notice
                    await connection.disconnect(nowait=True)
                    await connection.connect()
                patience.restart(self._deadline)
                await connection.send_packed_command(connection.pack_commands(command for _, *command in commands))
                return [await _reply(connection, kind) for kind, *_ in commands]
            except BaseException:
                # Whatever it was, replies may be under way that the next caller would take for theirs.
                await connection.disconnect(nowait=True)
                raise
            finally:
                await self._pool.release(connection)

    async def _distrust(self) -> None:
        """Let no idle connection be used again.

        What cut one has probably cut them all, and each would cost its finder a deadline, and the breaker a probe.
        """
        for connection in tuple(self._pool._available_connections):  # noqa: SLF001  # its own way waits for each peer
            await connection.disconnect(nowait=True)

    def __repr__(self) -> str:
        return "<RedisStore>"  # the URL may hold a password


async def _reply(connection: Any, kind: type[Any]) -> Any:
    """Return the next reply; a refusal is one, and leaves the connection in step."""
    try:
        reply = await connection.read_response()
    except ResponseError as error:
        return Refused(_code(error))
    if not isinstance(reply, kind):
        raise UnexpectedReply
    return reply


def _code(error: ResponseError) -> str:
    """Return the error's first word (WRONGTYPE, MISCONF, …), or type: the rest may quote keys and values."""
    word = str(error).partition(" ")[0]
    return word if _CODE.fullmatch(word) else type(error).__name__


def redis_stores(url: str, **options: Any) -> Callable[[], RedisStore]:
    """Return what makes a store for each event loop, having checked the arguments now.

    Raises:
        ConfigurationError: an argument breaks its rule.
    """
    RedisStore(url, **options)
    return lambda: RedisStore(url, **options)
