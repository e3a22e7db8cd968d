"""One Redis or Valkey server: its connections, and the exchange of commands with it.

What is switched off in redis-py, and why: its retries, since they execute commands twice and multiply every
deadline; maintenance notifications, since with them a pooled connection's unread reply is handed
to the next caller; socket timeouts, since with them Python 3.11 loses cancellations. One deadline
of our own spans the whole exchange instead, and a connection that failed is never used again.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from math import inf
from random import random
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from .. import Refused
from .._timeouts import StallTolerantTimeout
from .resp import ErrorReply, UnexpectedReply, pack, parse

try:
    from redis.asyncio.connection import ConnectionPool, DefaultParser
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import AskError, MovedError, ResponseError
    from redis.exceptions import ConnectionError as Disconnected
    from redis.maint_notifications import MaintNotificationsConfig
except ImportError as error:  # pragma: no cover  # the test environment has redis-py
    message = "a Redis store needs redis-py: pip install 'stampede-guard[redis]'"
    raise ImportError(message) from error

_CODE = re.compile("[A-Z]{2,16}")

_SPARE = 8  # connections for probes, beats and the like, which do not queue with the calls
_CHUNK = 1 << 18  # bytes that are read at once
_ROLE_LIFE = 1.0  # seconds for which a connection's server is taken for the primary that it said it is
_HELLO = pack(("HELLO", "2"))  # tells the role too, and is the one way to it that needs no permission
_DEMOTIONS = frozenset({"ReadOnlyError", "MasterDownError"})  # said by replicas alone

Address = tuple[str, int]  # host and port
Command = tuple[Any, ...]  # the type of its reply, its name, its arguments
Request = tuple[bytes, Sequence[Any]]  # commands, and the types of their replies


class Redirected(Refused):
    """Another node of the cluster has the key.

    Attributes:
        host: That node's host.
        port: That node's port.
        is_moved: Whether it has the slot for good (MOVED), or the key this once (ASK).
    """

    def __init__(self, code: str, host: str, port: int, *, is_moved: bool) -> None:
        super().__init__(code)
        self.host = host
        self.port = port
        self.is_moved = is_moved


class NotPrimaryError(ConnectionError):
    """The server that answered takes no writes: it is a replica, perhaps one that was the primary a moment ago."""


class ConnectionLimits(NamedTuple):
    """What an exchange may take.

    Attributes:
        deadline: Seconds for one exchange on an open connection.
        connect_timeout: Seconds for getting a connection.
        max_connections: Connections open at once.
    """

    deadline: float = 0.15
    connect_timeout: float = 0.25
    max_connections: int = 64


def connection_settings(**options: Any) -> dict[str, Any]:
    """Return *options* of a redis-py connection with those that correctness rests on."""
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
        name: How logs call it; holds neither address nor password. Unique within a store.
        connection_class: redis-py's, plain, TLS or Unix.
        options: Arguments of the connection: address, credentials, certificates.
        limits: What an exchange may take.
    """

    def __init__(
        self, name: str, connection_class: type[Any], options: dict[str, Any], limits: ConnectionLimits
    ) -> None:
        self.name = name
        self._limits = limits
        self._pool: Any = ConnectionPool(
            connection_class, max_connections=limits.max_connections + _SPARE, **connection_settings(**options)
        )
        self._is_closed = False
        self._on_demotion: Callable[[], None] | None = None
        self._is_demoted = False
        self._vouched: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # by writer: when its server was primary
        self._dialled: WeakSet[Any] = WeakSet()
        self._avoided_until = -inf

    def require_primary(self, on_demotion: Callable[[], None]) -> None:
        """Talk to a primary alone from now on; *on_demotion* is called when it is found to be one no more.

        What an address leads to can change: a name, a virtual address or a service is moved to another server, and
        connections that were made before stay with the old one. So each connection is asked for the role of its
        server, with the first commands and once a second. The word of a replica, and READONLY, end all connections,
        those that were dialled too. The next one finds out where the address leads to now, at most once a second as
        long as that is a replica.
        """
        self._on_demotion = on_demotion

    async def exchange(self, *commands: Command) -> list[Any]:
        """Run *commands*, each behind the type of its reply, in one round trip; a refusal is a reply.

        Raises:
            TimeoutError: the node took longer than the deadline, or connecting did.
            Exception: whatever else went wrong with the connection; it is closed.
        """
        replies: list[Any] = []

        async def hear(heard: list[Any]) -> None:
            replies.extend(heard)

        said = b"".join([pack(words) for _, *words in commands]), [kind for kind, *_ in commands]
        await self.converse(said, hear)
        return replies

    async def converse(self, said: Request, go_on: Callable[[list[Any]], Awaitable[Request | None]]) -> None:
        """Send what is *said*, and what *go_on* returns when it is given the replies, until that is nothing.

        Raises:
            TimeoutError: as `exchange`.
            Exception: as `exchange`.
        """
        if asyncio.get_running_loop().time() < self._avoided_until:
            raise NotPrimaryError
        try:
            await self._converse(said, go_on)
        except NotPrimaryError:
            await self._forsake()
            raise
        except Exception:
            await self.cut()
            raise
        finally:
            if self._is_closed:  # meanwhile, and nobody closes it again
                await self.cut()

    async def _converse(self, said: Request | None, go_on: Callable[[list[Any]], Awaitable[Request | None]]) -> None:
        async with StallTolerantTimeout(self._limits.connect_timeout) as patience:
            connection = await self._pool.get_connection()
            try:
                while said is not None:
                    # Reset while idle, which the pool does not notice; or there is a word that nobody asked for.
                    if connection._writer.is_closing() or await connection.can_read():  # noqa: SLF001
                        patience.restart(self._limits.connect_timeout)
                        await connection.disconnect(nowait=True)
                        await connection.connect()
                    patience.restart(self._limits.deadline)
                    said = await go_on(await self._hear(connection, *said))
            except BaseException:
                # Whatever it was, replies may be under way that the next caller would take for theirs.
                await connection.disconnect(nowait=True)
                raise
            finally:
                await self._pool.release(connection)

    async def _hear(self, connection: Any, text: bytes, kinds: Sequence[Any]) -> list[Any]:
        """Return the replies to *text*, those of a primary if it has to be one."""
        if self._on_demotion is None:
            await connection.send_packed_command(text, check_health=False)
            return await _replies(connection, kinds)
        writer, now = connection._writer, asyncio.get_running_loop().time()  # noqa: SLF001  # stands for the socket
        vouched_at = self._vouched.get(writer)
        is_due = vouched_at is None or now - vouched_at >= _ROLE_LIFE
        await connection.send_packed_command(_HELLO + text if is_due else text, check_health=False)
        try:
            replies = await _primary_replies(connection, kinds, tells_role=is_due)
        except NotPrimaryError:
            if vouched_at is None:  # nor is it where the address leads to now
                self._avoided_until = now + _ROLE_LIFE * (1 - random() / 4)  # noqa: S311  # no secret
            raise
        if is_due:
            self._is_demoted = False
            self._vouched[writer] = now
        return replies

    async def _forsake(self) -> None:
        """Let no connection be used again before its server has said that it is a primary."""
        self._vouched.clear()
        await self.cut()
        for connection in tuple(self._dialled):
            await connection.disconnect(nowait=True)
        if not self._is_demoted and self._on_demotion is not None:
            self._is_demoted = True
            self._on_demotion()

    async def dial(self) -> Any:
        """Return a new connection of its own, connected; the caller closes it.

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
                await self._forsake()
            raise
        self._dialled.add(connection)
        return connection

    async def cut(self) -> None:
        """Let no idle connection be used again.

        What cut one has probably cut them all, and each would cost its finder a deadline, and the breaker a probe.
        """
        for connection in tuple(self._pool._available_connections):  # noqa: SLF001  # its own way waits for each peer
            await connection.disconnect(nowait=True)

    async def aclose(self) -> None:
        """Close every connection, and those of exchanges that are under way as soon as they are over."""
        self._is_closed = True
        async with asyncio.timeout(self._limits.connect_timeout):
            await self._pool.aclose()

    def __repr__(self) -> str:
        return f"<Node {self.name}>"  # its options may hold a password


async def _primary_replies(connection: Any, kinds: Sequence[Any], *, tells_role: bool) -> list[Any]:
    """Return as many replies as there are *kinds*, behind that to HELLO if there is one.

    Raises:
        NotPrimaryError: one of them is a replica's; then the others are not to be believed either.
    """
    replies = await _replies(connection, [list, *kinds] if tells_role else kinds, _DEMOTIONS)
    if tells_role and _is_replica(replies.pop(0)):
        raise NotPrimaryError
    return replies


async def _replies(connection: Any, kinds: Sequence[Any], demotions: frozenset[str] = frozenset()) -> list[Any]:
    """Return as many replies as there are *kinds*; a refusal is one, and leaves the connection in step.

    Raises:
        NotPrimaryError: a refusal is one of *demotions*.

    The stream is read past redis-py's parser, which has nothing left from the replies that it read.
    """
    stream: asyncio.StreamReader = connection._reader  # noqa: SLF001  # there is no public way to it
    replies: list[Any] = []
    buffer, at, lacking = b"", 0, 1
    while lacking:
        buffer = buffer[at:] + await _more(stream, lacking)
        at, lacking = parse(buffer, 0, len(kinds) - len(replies), replies)
    if at != len(buffer):
        raise UnexpectedReply  # one too many: which of them nobody asked for is anybody's guess
    for position, (kind, reply) in enumerate(zip(kinds, replies, strict=True)):
        if not isinstance(reply, kind):
            replies[position] = refusal = _refusal(reply)
            if str(refusal) in demotions:
                raise NotPrimaryError
    return replies


def _is_replica(hello: list[Any] | Refused) -> bool:
    """Return whether *hello* is the word of a replica; a server that does not know the command is none."""
    return not isinstance(hello, Refused) and (b"role", b"replica") in pairwise(hello)


async def _more(stream: asyncio.StreamReader, lacking: int) -> bytes:
    try:
        # What lacks much is one long value: waited for as a whole, it is put together once.
        more = await (stream.read(_CHUNK) if lacking < _CHUNK else stream.readexactly(lacking))
    except (OSError, asyncio.IncompleteReadError) as error:
        raise Disconnected(type(error).__name__) from error
    if not more:
        message = "the server closed the connection"
        raise Disconnected(message)
    return more


def _refusal(reply: Any) -> Refused:
    """Return the refusal that *reply* is.

    Raises:
        UnexpectedReply: it is something else.
        ConnectionError: redis-py's; the server will not talk to us.
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
    return word if _CODE.fullmatch(word) else type(error).__name__
