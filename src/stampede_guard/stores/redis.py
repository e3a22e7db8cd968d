"""L2 in Redis or Valkey, through redis-py: the store's operations as commands.

Every script but ACQUIRE is idempotent, even long after, so a request that was lost with its connection is sent once
more. A request that ran into its deadline is not, because the caller has waited long enough.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, NoReturn

from .._codecs.fingerprint import NO_FINGERPRINT
from .._operations.options import Duration, count, flag, seconds
from .._tokens import new_token
from ..errors import ConfigurationError
from . import (
    FAILED_NODE,
    AcquireRequest,
    AcquireResult,
    Echo,
    KeysChanged,
    Refused,
    Release,
    StoreOverloaded,
    Subscription,
)
from ._envelope import LONGEST_HEADER, tokens_of
from ._redis import ResponseError, scripts
from ._redis.client import describe
from ._redis.node import Command, ConnectionLimits, Node, NotPrimaryError, Redirected
from ._redis.pipeline import Pipeliner
from ._redis.requests import CommandRequest, ValueRequest, as_result, marking
from ._redis.resp import UnexpectedReply
from ._redis.scripts import Call
from ._redis.topology.factory import make_topology
from ._redis.urls import Servers
from ._timeouts import StallTolerantTimeout

_HEADER_BYTES = 1024  # bytes for the header of a value
_RELEASES = 2  # whose longest values fit into one envelope, beside each other
_VERSION_TTL = 600.0  # seconds that a lowest version is kept: longer than any load, lag or transaction
_NO_SCRIPT = "NoScriptError"
_TRY_AGAIN = "TryAgainError"  # a slot is on its way, and the keys are not at one node, or are missing
_CAPABILITIES = frozenset({"leases", "backplane", "tags", "versions"})
_OPERATIONS_PER_CONNECTION = 64  # operations at once for each connection
_MAX_PIPELINERS = 64  # pipeliners that are kept; beyond that, idle ones are dropped
_ECHO_TRIES = 8  # tries to find a node other than the one with the subscription
_INVALIDATE_CHANNEL = b"__redis__:invalidate"  # the channel on which a server tells of keys


class RedisStore:
    """One event loop's connections to Redis or Valkey.

    Args:
        servers: A URL without query options, or an asyncio client of redis-py's, which tells where the servers are:

            - `redis://host`, `unix:///path`: one server;
            - `redis://primary,replica,replica`: one that takes the writes, and others that may be read from;
            - `redis+sentinel://sentinel,sentinel/service`: the primary and replicas that the sentinels name;
            - `redis+cluster://node,node`: a cluster.

            With `rediss` instead of `redis`, connections are encrypted, and certificates and host names checked.
        deadline: Seconds that one operation may take on an open connection.
        connect_timeout: Seconds that opening a connection may take.
        max_connections: Connections open at once to each server; operations that come together share one.
        max_bytes: Size of the longest value; nothing longer than two of these is read, however long it is in the store.
        tracking: Whether to hear of keys that others write or delete, `redis-cli` for one; costs a message for each
            write under the namespace, and a read of each key that is in L1.
        ca_certs: Path of a file with the certificates to trust, instead of the system's.

    Raises:
        ConfigurationError: an argument breaks its rule.
    """

    name = "Redis"

    def __init__(
        self,
        servers: str | object,
        *,
        deadline: Duration = 0.15,
        connect_timeout: Duration = 0.25,
        max_connections: int = 64,
        max_bytes: int = 1 << 20,
        tracking: bool = False,
        ca_certs: str | None = None,
    ) -> None:
        flag("tracking", tracking)
        self._tracks = tracking
        self.capabilities = _CAPABILITIES | {"tracking"} if tracking else _CAPABILITIES
        limits = ConnectionLimits(
            seconds("deadline", deadline),
            seconds("connect_timeout", connect_timeout),
            count("max_connections", max_connections),
        )
        # A longer envelope is cut, and therefore refused.
        self.max_bytes = count("max_bytes", max_bytes)
        self._last = _RELEASES * (max_bytes + _HEADER_BYTES)
        self._limits = limits
        self.concurrency = limits.max_connections * _OPERATIONS_PER_CONNECTION
        tls = {} if ca_certs is None else {"ssl_ca_certs": ca_certs}
        described = servers if isinstance(servers, Servers) else describe(servers)
        if tracking and described.kind == "cluster":
            message = "tracking=True: a server of a cluster tells of its own keys alone; leave it out"
            raise ConfigurationError(message)
        database = int(described.options.get("db") or 0)
        self._suffix = f":{database}" if database else ""
        self.channel = ""
        self._echoes = new_token()
        self._topology = make_topology(described, limits, time.monotonic, **tls)
        self.has_replicas = self._topology.has_replicas
        self._pipeliners: dict[Node, Pipeliner] = {}
        self._run_ids: dict[str, str] = {}
        self._restarts = 0
        self._bus_node = ""  # name of the node that is listened to

    @property
    def generation(self) -> int:
        """Rises when another server may have taken over."""
        return self._restarts + self._topology.generation

    @property
    def _bus(self) -> str:
        """The channel, with the database's number behind it unless that is 0: channels belong to all databases."""
        return self.channel + self._suffix

    def node_of(self, key: str) -> str:
        """Return the name of the server that has *key* now."""
        try:
            return self._topology.primary(key).name
        except ConnectionError:
            return self.name

    async def open(self) -> None:
        """Find the servers, log in and say PING."""
        await self._topology.open()

    async def read_replica(
        self, key: str, tags: Sequence[str], fingerprint: bytes = NO_FINGERPRINT, margin: float = 0.0
    ) -> AcquireResult | None:
        """Read the value, its remaining life and its tags' marks from good replicas, in one round trip."""
        node = self._topology.replica(key)
        if node is None:
            return None
        tag_nodes = [self._topology.replica(tag) or self._topology.primary(tag) for tag in tags]

        def send() -> Awaitable[Any]:
            read = ValueRequest(node, key, self._last, tuple(tags), 0, fingerprint, margin=round(margin * 1000))
            return self._submit(read, tag_nodes)

        answer = await _twice(send)
        if answer.__class__ is AcquireResult:
            return answer
        reply, marks = answer
        if any(each is None or isinstance(each, Refused) for each in (reply, *marks)):
            return None  # the primary will know
        return as_result(reply, tuple(marks))

    def acquire(self, request: AcquireRequest) -> Awaitable[AcquireResult]:
        """Run ACQUIRE, and MARK for each tag; or plain reads, as the pipeline decides."""
        primary, key, tags = self._topology.primary, request.key, tuple(request.tags)
        node = primary(key)
        marks_ttl = round(request.marks_ttl * 1000) or 1
        margin = round(request.margin * 1000) if request.margin else 0
        sent = ValueRequest(
            node, key, self._last, tags, marks_ttl, request.fingerprint, request, self._follow_up, margin
        )
        for tag in tags:
            if primary(tag) is not node:
                return self._acquire_from_nodes(sent)
        return (self._pipeliners.get(node) or self._pipeliner_of(node)).submit(sent)

    async def _acquire_from_nodes(self, request: ValueRequest) -> AcquireResult:
        tag_nodes = [self._topology.primary(tag) for tag in request.tags]
        reply, marks = await self._submit_to_nodes(request, tag_nodes)
        return await self._complete(request, reply, marks, tag_nodes)

    async def _follow_up(self, request: ValueRequest, reply: Any, marks: Sequence[Any]) -> AcquireResult:
        return await self._complete(request, reply, marks, [request.node] * len(marks))

    async def _complete(
        self, request: ValueRequest, reply: Any, marks: Sequence[Any], tag_nodes: Sequence[Node]
    ) -> AcquireResult:
        """Return the result of an incomplete reply: follow redirections, and send scripts that were missing."""
        if isinstance(reply, Refused):
            reply = await self._retry_acquire(request.node, request.acquisition(), reply)
        marks = [*marks]
        for at, mark in enumerate(marks):
            if isinstance(mark, Refused):
                marks[at] = await self._retry_refused(tag_nodes[at], marking(request.tags[at], request.ttl), mark)
        return as_result(reply, tuple(marks))

    async def _retry_acquire(self, node: Node, call: Call, refusal: Refused) -> Any:
        """Run ACQUIRE as `_retry_refused`; read the value alone where it may be at another node than the lease."""
        if str(refusal) != _TRY_AGAIN:
            try:
                return await self._retry_refused(node, call, refusal)
            except Refused as again:
                if str(again) != _TRY_AGAIN:
                    raise
        return await self._run(call._replace(keys=call.keys[:1]))

    def _submit(self, request: ValueRequest, tag_nodes: Sequence[Node]) -> Awaitable[Any]:
        """Send *request*, and requests for marks to the other nodes that have them, all at once."""
        if tag_nodes.count(request.node) == len(tag_nodes):
            return self._pipeliner_of(request.node).submit(request)
        return self._submit_to_nodes(request, tag_nodes)

    async def _submit_to_nodes(self, request: ValueRequest, tag_nodes: Sequence[Node]) -> tuple[Any, list[Any]]:
        node, tags = request.node, request.tags
        positions: dict[Node, list[int]] = {node: []}
        for at, tag_node in enumerate(tag_nodes):
            positions.setdefault(tag_node, []).append(at)
        marks: list[Any] = [None] * len(tag_nodes)
        sent: list[ValueRequest] = []
        for tag_node, its in positions.items():
            key, asked = (request.key, request.asked) if tag_node is node else ("", request.asked)
            here = tuple(tags[at] for at in its)
            each = ValueRequest(
                tag_node, key, request.last, here, request.ttl, request.fingerprint, asked, margin=request.margin
            )
            each.is_easy = False
            sent.append(self._pipeliner_of(tag_node).submit(each))
        answers: list[tuple[Any, Sequence[Any]]] = []
        # The key's node comes first, so it has answered when another fails. Replicas have one breaker for all.
        try:
            for tag_node, each in zip(positions, sent, strict=True):
                with _failure_of(None if tag_node is node or request.asked is None else tag_node):
                    answers.append(await each)
        finally:
            for each in sent:
                each.cancel()
        for its, (_, found) in zip(positions.values(), answers, strict=True):
            for at, mark in zip(its, found, strict=True):
                marks[at] = mark
        return answers[0][0], marks

    async def fill(  # noqa: PLR0917  # as the protocol has it
        self,
        key: str,
        token: str,
        envelope: bytes,
        ttl: float,
        version: int | None,
        message: bytes,
        *,
        always_publish: bool,
    ) -> bool:
        """Run FILL."""
        lowest = "" if version is None else version
        stored = token, envelope, _ms(ttl), lowest, _ms(_VERSION_TTL)
        args = (*stored, self._bus, message, int(always_publish), self._last)
        reply = await self._run(Call(bytes, scripts.FILL, _keys(key), args))
        return reply in (b"OK", b"DUP")

    async def renew(self, leases: Sequence[tuple[str, str, float]]) -> Sequence[bool | Exception]:
        """Run RENEW for each of *leases*."""
        return await self._run_all(
            [Call(int, scripts.RENEW, (f"{key}:l",), (token, _ms(lease))) for key, token, lease in leases]
        )

    async def release(self, leases: Sequence[Release]) -> Sequence[bool | Exception]:
        """Run RELEASE for each of *leases*."""
        calls: list[Call] = []
        for key, token, message, is_unstored, failure in leases:
            args: tuple[Any, ...] = (token, self._bus, message, "!" if is_unstored else "")
            if failure is not None:
                args = (*args[:3], f"?{failure.text}", _ms(failure.first_pause), _ms(failure.longest_pause))
            calls.append(Call(int, scripts.RELEASE, (f"{key}:l",), args))
        return await self._run_all(calls)

    async def invalidate(self, key: str, version: int | None, message: bytes, *, is_soft: bool = False) -> None:
        """Run INVALIDATE; key by key where the keys of a slot that is on its way are at two nodes."""
        try:
            await self._invalidate(_keys(key), version, message, is_soft=is_soft)
        except Refused as refusal:
            if str(refusal) != _TRY_AGAIN:
                raise
            # The value last: a load that began before must find no lease when it is gone, nor a lower version.
            for name, said in (("g", b""), ("l", b""), ("v", message)):
                await self._invalidate((f"{key}:{name}",), version, said, is_soft=is_soft)

    async def _invalidate(self, keys: tuple[str, ...], version: int | None, message: bytes, *, is_soft: bool) -> None:
        lowest = "" if version is None else version
        args = (lowest, _ms(_VERSION_TTL), self._bus, message, int(is_soft))
        await self._run(Call(int, scripts.INVALIDATE, keys, args))

    async def invalidate_tag(self, key: str, mark: bytes, ttl: float, message: bytes) -> None:
        """Run INVALIDATE_TAG."""
        await self._run(Call(int, scripts.INVALIDATE_TAG, (key,), (mark, _ms(ttl), self._bus, message)))

    async def echo(self, payload: bytes) -> None:
        """Publish for ourselves, in a cluster through another node than the one that is listened to."""
        nodes = [self._topology.primary(f"{self.channel}-{number}") for number in range(_ECHO_TRIES)]
        node = next((each for each in nodes if each.name != self._bus_node), nodes[0])
        for reply in await node.exchange((int, "PUBLISH", self._echo_channel, payload)):
            if isinstance(reply, Refused):
                raise reply

    async def stored_by(self, key: str) -> tuple[bytes, ...]:
        """Read the tokens in the envelope's header."""
        (header,) = await self._command(self._topology.primary(key), (bytes, "GETRANGE", key, 0, LONGEST_HEADER - 1))
        if isinstance(header, Refused):
            raise header
        return tokens_of(header)

    @property
    def _echo_channel(self) -> str:
        return f"{self._bus}:{self._echoes}"

    @asynccontextmanager
    async def listen(self) -> AsyncGenerator[Subscription]:
        """Subscribe on a connection of its own."""
        node = self._topology.primary(self.channel)
        self._bus_node = node.name
        connection = await node.connect()
        try:
            async with StallTolerantTimeout(self._limits.deadline):
                self._note_run_id(node.name, await _run_id(connection))
                if self._tracks:
                    await _track(connection, f"sg1:{{{self.channel.split(':')[1]}:")
                channels = (self._bus, self._echo_channel, *((_INVALIDATE_CHANNEL,) if self._tracks else ()))
                await connection.send_packed_command(connection.pack_command("SUBSCRIBE", *channels))
                for _ in channels:
                    confirmation = await connection.read_response()
                    if not isinstance(confirmation, list) or confirmation[0] != b"subscribe":
                        raise UnexpectedReply
            yield _Subscription(connection, self._echo_channel.encode())
        finally:
            await connection.disconnect(nowait=True)

    def _note_run_id(self, node: str, run_id: str) -> None:
        """Compare with the node's last run id; without one, each answer may be from another server."""
        known = self._run_ids.get(node)
        self._run_ids[node] = run_id
        if known is not None and (known != run_id or not run_id):
            self._restarts += 1

    async def aclose(self) -> None:
        """Close every connection."""
        await asyncio.gather(*[pipeliner.aclose() for pipeliner in self._pipeliners.values()])
        await self._topology.aclose()

    async def _run(self, call: Call) -> Any:
        """Run *call* on the primary of its keys; once more if the first node is no longer the primary."""
        try:
            return await self._run_once(call)
        except NotPrimaryError:
            return await self._run_once(call)

    async def _run_once(self, call: Call) -> Any:
        node = self._topology.primary(call.keys[0])
        (reply,) = await self._command(node, call.by_digest())
        return await self._retry_refused(node, call, reply) if isinstance(reply, Refused) else reply

    async def _run_all(self, calls: Sequence[Call]) -> list[bool | Exception]:
        """Run *calls*, whose keys are of one node, in one round trip ahead of the queue; a refusal is a reply."""
        node = self._topology.primary(calls[0].keys[0])
        commands = [call.by_digest() for call in calls]
        replies = await self._command(node, *commands, is_urgent=True)
        if isinstance(replies[0], Refused) and str(replies[0]) == _NO_SCRIPT:
            # The first brings the script for all: one by one, they would take as many round trips.
            replies = await self._command(node, calls[0].by_text(), *commands[1:], is_urgent=True)
        for at, reply in enumerate(replies):
            if isinstance(reply, Refused):
                try:
                    replies[at] = await self._retry_refused(node, calls[at], reply)
                except Refused as refusal:
                    replies[at] = refusal
        return [reply if isinstance(reply, Refused) else bool(reply) for reply in replies]

    async def _retry_refused(self, node: Node, call: Call, refusal: Refused) -> Any:
        """Run *call* on the node to which *node* redirects, or with the script's text if that was missing."""
        reply: Any = refusal
        asking: list[Command] = []
        if str(refusal) != _NO_SCRIPT:
            other = await self._topology.follow(call.keys[0], node, refusal)
            if other is None:
                raise Refused(*refusal.args)  # another object: others may have been told the same
            if isinstance(refusal, Redirected) and not refusal.is_moved:
                asking = [(bytes, "ASKING")]
            *_, reply = await self._pipeliner_of(other).submit(CommandRequest(*asking, call.by_digest()))
            node = other
        if isinstance(reply, Refused) and str(reply) == _NO_SCRIPT:
            *_, reply = await self._pipeliner_of(node).submit(CommandRequest(*asking, call.by_text()))
        if isinstance(reply, Refused):
            raise reply
        return reply

    async def _command(self, node: Node, *commands: Command, is_urgent: bool = False) -> list[Any]:
        """Return the replies of *node*."""
        pipeliner = self._pipeliner_of(node)
        replies: list[Any] = await _twice(lambda: pipeliner.submit(CommandRequest(*commands, is_urgent=is_urgent)))
        return replies

    def _pipeliner_of(self, node: Node) -> Pipeliner:
        pipeliner = self._pipeliners.get(node)
        if pipeliner is None:
            if len(self._pipeliners) >= _MAX_PIPELINERS:  # there were so many, in the course of time
                self._pipeliners = {known: each for known, each in self._pipeliners.items() if not each.is_idle}
            pipeliner = Pipeliner(node, self._limits.max_connections, partial(self._topology.failed, node))
            self._pipeliners[node] = pipeliner
        return pipeliner

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, password and all."""
        message = "a RedisStore cannot be pickled; make one in each process"
        raise TypeError(message)

    def __repr__(self) -> str:
        return "<RedisStore>"  # the URL may hold a password


class _Subscription:
    """The messages of one connection that has subscribed."""

    def __init__(self, connection: Any, echoes: bytes) -> None:
        self._connection = connection
        self._echoes = echoes

    async def next(self) -> bytes | KeysChanged | Echo:
        """Return the next message.

        Raises:
            UnexpectedReply: it is none; a second confirmation, say, means that messages may have been lost.
            Exception: the connection is gone.
        """
        reply = await self._connection.read_response()
        if not isinstance(reply, list) or reply[0] != b"message":
            raise UnexpectedReply
        _, channel, content = reply
        if channel == self._echoes:
            return Echo(bytes(content))
        if channel == _INVALIDATE_CHANNEL:
            return KeysChanged(None if content is None else tuple(key.decode(errors="replace") for key in content))
        return bytes(content)


async def _track(connection: Any, prefix: str) -> None:
    """Have the server tell *connection* itself of every key that begins with *prefix*."""
    await connection.send_packed_command(connection.pack_command("CLIENT", "ID"))
    me = await connection.read_response()
    await connection.send_packed_command(
        connection.pack_command("CLIENT", "TRACKING", "ON", "REDIRECT", me, "BCAST", "PREFIX", prefix)
    )
    await connection.read_response()


async def _run_id(connection: Any) -> str:
    """Return the id of this run of the server; empty if the client may not ask for it."""
    await connection.send_packed_command(connection.pack_command("INFO", "server"))
    try:
        found = re.search(rb"run_id:(\w+)", await connection.read_response())
    except ResponseError:
        return ""
    return "" if found is None else found[1].decode()


@contextmanager
def _failure_of(node: Node | None) -> Generator[None]:
    """Let an error count against *node* if one is given, instead of the node of the key."""
    try:
        yield
    except Exception as error:
        if node is not None:
            setattr(error, FAILED_NODE, node.name)
        raise


async def _twice(send: Callable[[], Awaitable[Any]]) -> Any:
    """Return the reply to what *send* sends; on any error but a lack of time, send it once more."""
    try:
        return await send()
    except (TimeoutError, StoreOverloaded):
        raise
    except Exception:  # noqa: BLE001  # drivers raise more than they document
        return await send()


def _keys(key: str) -> tuple[str, str, str]:
    return f"{key}:v", f"{key}:l", f"{key}:g"


def _ms(duration: float) -> int:
    return round(duration * 1000) or 1


def redis_stores(servers: str | object, **options: Any) -> Callable[[], RedisStore]:
    """Return what makes a store for each event loop, having checked the arguments now.

    Raises:
        ConfigurationError: an argument breaks its rule.
    """
    described = describe(servers)
    RedisStore(described, **options)
    return lambda: RedisStore(described, **options)
