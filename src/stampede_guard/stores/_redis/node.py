"""One Redis or Valkey server: its connections, and the exchange of commands.

Three features of redis-py are switched off: retries, because they execute commands twice and multiply every deadline;
maintenance notifications, because with them the next caller gets a pooled connection's unread reply; socket timeouts,
because with them Python 3.11 loses cancellations. Instead, one deadline spans the whole exchange, and a connection
that failed is never used again.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from math import inf
from random import random
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from redis.asyncio.connection import ConnectionPool, DefaultParser
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AskError, MovedError, ResponseError
from redis.exceptions import ConnectionError as Disconnected
from redis.maint_notifications import MaintNotificationsConfig

from .. import Refused
from .._timeouts import StallTolerantTimeout
from .resp import ErrorReply, UnexpectedReply, pack, parse

_ERROR_CODE = re.compile("[A-Z]{2,16}")

_SPARE_CONNECTIONS = 8  # for probes, echoes and the like, which do not queue with the calls
_READ_SIZE = 1 << 18  # bytes
_ROLE_MAX_AGE = 1.0  # seconds for which a server counts as the primary that its last HELLO said it is
_HELLO = pack(("HELLO", "2"))  # the only command that returns the role and needs no permission
_DEMOTIONS = frozenset({"ReadOnlyError", "MasterDownError"})  # errors of replicas alone

Address = tuple[str, int]  # host and port
Command = tuple[Any, ...]  # the type of its reply, its name, its arguments
Request = tuple[bytes, Sequence[Any]]  # commands, and the types of their replies
NextRequest = Callable[[list[Any]], Awaitable[Request | None]]


class Redirected(Refused):
    """Another node of the cluster has the key.

    Attributes:
        host: That node's host.
        port: That node's port.
        is_moved: Whether it has the slot for good (MOVED), or the key for this request only (ASK).
    """

    def __init__(self, code: str, host: str, port: int, *, is_moved: bool) -> None:
        super().__init__(code)
        self.host = host
        self.port = port
        self.is_moved = is_moved


class NotPrimaryError(ConnectionError):
    """The server that answered takes no writes: it is a replica, perhaps one that was the primary a moment ago."""


class ConnectionLimits(NamedTuple):
    """Deadlines, and the number of connections.

    Attributes:
        deadline: Seconds for one exchange on an open connection.
        connect_timeout: Seconds for getting a connection.
        max_connections: Connections open at once.
    """

    deadline: float = 0.15
    connect_timeout: float = 0.25
    max_connections: int = 64


def connection_settings(**options: Any) -> dict[str, Any]:
    """Return *options* of a redis-py connection with the settings that correctness needs."""
    return {
        **options,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }


class Node:
    """One server.

    Args:
        name: For logs, unique within a store; holds neither address nor password.
        connection_class: redis-py's, plain, TLS or Unix.
        options: Arguments of the connection: address, credentials, certificates.
        limits: Deadlines, and the number of connections.
    """

    def __init__(
        self, name: str, connection_class: type[Any], options: dict[str, Any], limits: ConnectionLimits
    ) -> None:
        self.name = name
        self._limits = limits
        self._pool: Any = ConnectionPool(
            connection_class,
            max_connections=limits.max_connections + _SPARE_CONNECTIONS,
            **connection_settings(**options),
        )
        self._is_closed = False
        self._on_demotion: Callable[[], None] | None = None
        self._is_demoted = False
        # When the server of each connection last said that it is the primary, by writer.
        self._confirmed: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        self._dedicated: WeakSet[Any] = WeakSet()
        self._avoided_until = -inf

    def require_primary(self, on_demotion: Callable[[], None]) -> None:
        """Accept only replies of a primary from now on; call *on_demotion* when the server is a primary no more.

        The server behind an address can change: a name, a virtual address or a service is moved to another server, and
        connections that were made before stay with the old one. So HELLO asks for the role of each connection's
        server, with the first commands and once a second. The role of a replica, and READONLY, end all connections,
        those of `connect` too. The next connection goes to the present server of the address, at most once a second as
        long as that is a replica.
        """
        self._on_demotion = on_demotion

    async def exchange(self, *commands: Command) -> list[Any]:
        """Run *commands*, each with the type of its reply in front, in one round trip; a refusal is a reply.

        Raises:
            TimeoutError: the node took longer than the deadline, or connecting did.
            Exception: another failure of the connection, which is closed.
        """
        replies: list[Any] = []

        async def keep(received: list[Any]) -> None:
            replies.extend(received)

        request = b"".join([pack(words) for _, *words in commands]), [kind for kind, *_ in commands]
        await self.exchange_many(request, keep)
        return replies

    async def exchange_many(self, request: Request, next_request: NextRequest) -> None:
        """Send *request*, and then each request that *next_request* returns for the last replies, until it is `None`.

        Raises:
            TimeoutError: as `exchange`.
            Exception: as `exchange`.
        """
        if asyncio.get_running_loop().time() < self._avoided_until:
            raise NotPrimaryError
        try:
            await self._exchange_many(request, next_request)
        except NotPrimaryError:
            await self._drop_all_connections()
            raise
        except Exception:
            await self.drop_idle_connections()
            raise
        finally:
            if self._is_closed:  # meanwhile, so this connection is still open
                await self.drop_idle_connections()

    async def _exchange_many(self, request: Request | None, next_request: NextRequest) -> None:
        async with StallTolerantTimeout(self._limits.connect_timeout) as timeout:
            connection = await self._pool.get_connection()
            try:
                while request is not None:
                    # It was reset while idle, which the pool does not notice; or it has an unexpected reply.
                    if connection._writer.is_closing() or await connection.can_read():  # noqa: SLF001
                        timeout.restart(self._limits.connect_timeout)
                        await connection.disconnect(nowait=True)
                        await connection.connect()
                    timeout.restart(self._limits.deadline)
                    request = await next_request(await self._send(connection, *request))
            except BaseException:
                # The next caller would get replies that are still under way.
                await connection.disconnect(nowait=True)
                raise
            finally:
                await self._pool.release(connection)

    async def _send(self, connection: Any, text: bytes, kinds: Sequence[Any]) -> list[Any]:
        """Return the replies to *text*, which only a primary may send if that is required."""
        if self._on_demotion is None:
            await connection.send_packed_command(text, check_health=False)
            return await _replies(connection, kinds)
        writer, now = connection._writer, asyncio.get_running_loop().time()  # noqa: SLF001  # one for each socket
        confirmed_at = self._confirmed.get(writer)
        is_due = confirmed_at is None or now - confirmed_at >= _ROLE_MAX_AGE
        await connection.send_packed_command(_HELLO + text if is_due else text, check_health=False)
        try:
            replies = await _primary_replies(connection, kinds, tells_role=is_due)
        except NotPrimaryError:
            if confirmed_at is None:  # a new connection, so the address leads to a replica now
                self._avoided_until = now + _ROLE_MAX_AGE * (1 - random() / 4)  # noqa: S311  # no secret
            raise
        if is_due:
            self._is_demoted = False
            self._confirmed[writer] = now
        return replies

    async def _drop_all_connections(self) -> None:
        """Close all connections; the next one is used once its server has said that it is a primary."""
        self._confirmed.clear()
        await self.drop_idle_connections()
        for connection in tuple(self._dedicated):
            await connection.disconnect(nowait=True)
        if not self._is_demoted and self._on_demotion is not None:
            self._is_demoted = True
            self._on_demotion()

    async def connect(self) -> Any:
        """Return a new connection outside the pool; the caller closes it.

        Raises:
            TimeoutError: connecting took longer than its deadline.
            Exception: it failed.
        """
        connection = self._pool.connection_class(**self._pool.connection_kwargs)
        try:
            async with StallTolerantTimeout(self._limits.connect_timeout):
                await connection.connect()
                if self._on_demotion is not None:
                    await connection.send_packed_command(_HELLO, check_health=False)
                    await _primary_replies(connection, (), tells_role=True)
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if isinstance(error, NotPrimaryError):
                await self._drop_all_connections()
            raise
        self._dedicated.add(connection)
        return connection

    async def drop_idle_connections(self) -> None:
        """Close all idle connections.

        The failure that closed one connection has probably broken them all. Each broken connection would cost a
        request its deadline, and the breaker a probe.
        """
        for connection in tuple(self._pool._available_connections):  # noqa: SLF001  # its own method waits for peers
            await connection.disconnect(nowait=True)

    async def aclose(self) -> None:
        """Close all connections; those of running exchanges are closed when these end."""
        self._is_closed = True
        async with asyncio.timeout(self._limits.connect_timeout):
            await self._pool.aclose()

    def __repr__(self) -> str:
        return f"<Node {self.name}>"  # its options may hold a password


async def _primary_replies(connection: Any, kinds: Sequence[Any], *, tells_role: bool) -> list[Any]:
    """Return as many replies as there are *kinds*, without the reply to HELLO if it *tells_role*.

    Raises:
        NotPrimaryError: one of the replies is a replica's, so none is valid.
    """
    replies = await _replies(connection, [list, *kinds] if tells_role else kinds, _DEMOTIONS)
    if tells_role and _is_replica(replies.pop(0)):
        raise NotPrimaryError
    return replies


async def _replies(connection: Any, kinds: Sequence[Any], demotions: frozenset[str] = frozenset()) -> list[Any]:
    """Return as many replies as there are *kinds*; a refusal is a reply, and the connection stays usable.

    The stream is read without redis-py's parser, which has nothing buffered after the replies that it has read.

    Raises:
        NotPrimaryError: a refusal is one of *demotions*.
    """
    stream: asyncio.StreamReader = connection._reader  # noqa: SLF001  # it has no public name
    replies: list[Any] = []
    buffer, at, lacking = b"", 0, 1
    while lacking:
        buffer = buffer[at:] + await _more(stream, lacking)
        at, lacking = parse(buffer, 0, len(kinds) - len(replies), replies)
    if at != len(buffer):
        raise UnexpectedReply  # there is one more than requests, so none can be assigned
    if not all(map(isinstance, replies, kinds)):  # without a step of the interpreter for each
        for position, (kind, reply) in enumerate(zip(kinds, replies, strict=True)):
            if not isinstance(reply, kind):
                replies[position] = refusal = _refusal(reply)
                if str(refusal) in demotions:
                    raise NotPrimaryError
    return replies


def _is_replica(hello: list[Any] | Refused) -> bool:
    """Return whether *hello* is a replica's; a server without that command counts as a primary."""
    return not isinstance(hello, Refused) and (b"role", b"replica") in pairwise(hello)


async def _more(stream: asyncio.StreamReader, lacking: int) -> bytes:
    try:
        # A long value is awaited as a whole, so that its parts are joined once.
        more = await (stream.read(_READ_SIZE) if lacking < _READ_SIZE else stream.readexactly(lacking))
    except (OSError, asyncio.IncompleteReadError) as error:
        raise Disconnected(type(error).__name__) from error
    if not more:
        message = "the server closed the connection"
        raise Disconnected(message)
    return more


def _refusal(reply: Any) -> Refused:
    """Return the refusal that *reply* is.

    Raises:
        UnexpectedReply: it is a reply of another type.
        ConnectionError: redis-py's; the server refuses the connection.
    """
    if not isinstance(reply, ErrorReply):
        raise UnexpectedReply
    parser: Any = DefaultParser
    error = parser.parse_error(reply.text)
    if isinstance(error, MovedError | AskError):
        return Redirected(_code(error), error.host, error.port, is_moved=isinstance(error, MovedError))
    if isinstance(error, ResponseError):
        return Refused(_code(error))
    raise error


def _code(error: ResponseError) -> str:
    """Return the error's first word (WRONGTYPE, MISCONF, …), or type: the rest may quote keys and values."""
    word = str(error).partition(" ")[0]
    return word if _ERROR_CODE.fullmatch(word) else type(error).__name__
