"""A leasing store in memory, for what the guard does with one; what Redis does is for tests with a real one."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any

from stampede_guard._codecs.fingerprint import NO_FINGERPRINT
from stampede_guard._flights.flight import running_flight
from stampede_guard.stores import AcquireRequest, AcquireResult, Echo, KeysChanged, Stored, Subscription
from stampede_guard.stores._envelope import may_have_usable, tokens_of
from stampede_guard.testing import Gate, ManualClock


class _Inbox:
    """What one listener has not read yet."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | KeysChanged | Echo | Exception] = asyncio.Queue()

    async def next(self) -> bytes | KeysChanged | Echo:
        message = await self.queue.get()
        if isinstance(message, Exception):
            raise message
        return message


class Server:
    """What the processes of a fleet share.

    Attributes:
        values: Envelopes and the instants at which they expire.
        leases: Tokens, whether somebody waits, and the instants at which they expire.
        is_mute: Whether what is published reaches nobody.
    """

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.values: dict[str, tuple[bytes, float]] = {}
        self.versions: dict[str, int | None] = {}
        self.lowest: dict[str, int] = {}
        self.leases: dict[str, tuple[str, bool, float]] = {}
        self.marks: dict[str, bytes] = {}
        self.inboxes: list[_Inbox] = []
        self.published: list[bytes] = []
        self.is_mute = False

    def publish(self, message: bytes) -> None:
        """Let everybody hear *message*."""
        self.published.append(message)
        if not self.is_mute:
            for inbox in self.inboxes:
                inbox.queue.put_nowait(message)

    def cut(self, error: Exception | None = None) -> None:
        """Break every listener's connection."""
        for inbox in self.inboxes:
            inbox.queue.put_nowait(error or ConnectionError("gone"))

    def lease_of(self, key: str) -> tuple[str, bool, float] | None:
        """Return the lease of *key*, unless it has expired."""
        lease = self.leases.get(key)
        return lease if lease is not None and self.clock() < lease[2] else None


class DirectAcquire:
    """The future of an acquisition that needs no task of its flight's.

    Args:
        store: Its store.
        task: What acquires.
    """

    def __init__(self, store: "LeasingDouble", task: "asyncio.Task[AcquireResult]") -> None:
        self._store = store
        self._task = task
        self.done, self.cancelled, self.exception = task.done, task.cancelled, task.exception

    def add_done_callback(self, callback: Callable[["DirectAcquire"], object]) -> None:
        """Call *callback* when the task is done, and what the test has to do after."""

        def answered(_: object) -> None:
            callback(self)
            self._store.after()

        self._task.add_done_callback(answered, context=Context())

    def result(self) -> AcquireResult:
        """Return the result, if it is complete."""
        result = self._task.result()
        if self._store.has_more:
            raise asyncio.InvalidStateError
        return result

    def __await__(self) -> Generator[Any, None, AcquireResult]:
        return self._store.conclude(self._task).__await__()


class LeasingDouble:
    """One process's way to the server.

    Attributes:
        begins: Whether a flight needs no task to acquire.
        has_more: Whether the result of such an acquisition has to be concluded.
        looks: How many there were.
        after: Called in the very step in which one of them was answered.
        error: Raised by every operation while it is set.
        gate: Waited for by every operation while it is set.
        deaf: Raised by every attempt to listen while it is set.
        asked: What was asked for, in order.
        inboxes: Where its own echoes are heard.
        echoes: The words of those that were sent.
        holds_echoes: Whether they are kept until they are let go.
        replica: What `read_replica` returns.
    """

    name = "Leasing"
    concurrency = 64
    capabilities = frozenset({"leases", "backplane", "tags", "versions"})
    begins = True
    has_more = False

    def __init__(self, server: Server) -> None:
        self.server = server
        self.channel = ""
        self.generation = 0
        self.has_replicas = False
        self.replica: AcquireResult | Exception | None = None
        self.error: Exception | None = None
        self.deaf: Exception | None = None
        self.gate: Gate | None = None
        self.asked: list[str] = []
        self.is_closed = False
        self.inboxes: list[_Inbox] = []
        self.echoes: list[bytes] = []
        self.holds_echoes = False
        self._late_echoes: list[bytes] = []
        self.looks = 0
        self.after: Callable[[], object] = int
        self._under_way: set[asyncio.Task[AcquireResult]] = set()

    async def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.is_closed:
            raise ConnectionError("closed")
        if self.gate is not None:
            await self.gate.passage()
        if self.error is not None:
            raise self.error

    def node_of(self, key: str) -> str:
        return "tags' node" if key.endswith(":t") else self.name

    async def open(self) -> None:
        await self._ask("open")

    async def read_replica(
        self, key: str, tags: Sequence[str], fingerprint: bytes = NO_FINGERPRINT
    ) -> AcquireResult | None:
        self.asked.append("read_replica")
        if isinstance(self.replica, Exception):
            raise self.replica
        return self.replica

    def acquire(self, request: AcquireRequest) -> Awaitable[AcquireResult]:
        flight = running_flight()
        is_in_its_task = flight is not None and request.key.endswith(f":{flight.op}}}")
        if is_in_its_task or self.is_closed or not self.begins:
            return self._acquire(request)
        self.looks += 1
        # As a batch of the real one: not by the loop's factory, nor in the context of the caller.
        task = asyncio.Task(self._acquire(request), name="begun", context=Context())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard, context=Context())
        return DirectAcquire(self, task)

    async def conclude(self, answered: "asyncio.Task[AcquireResult]") -> AcquireResult:
        """Return the rest of an answer."""
        return await answered

    async def _acquire(self, request: AcquireRequest) -> AcquireResult:
        key, token, reject, fingerprint = request.key, request.token, request.reject, request.fingerprint
        await self._ask("acquire")
        server, now = self.server, self.server.clock()
        marks = tuple(server.marks.setdefault(tag, b"mark-%06d" % len(server.marks)) for tag in request.tags)
        envelope, until = server.values.get(key, (b"", 0.0))
        if reject != b"*" and now < until and may_have_usable(envelope, -1, fingerprint, reject):
            return AcquireResult("hit", Stored(envelope, until - now), marks=marks)
        held = server.lease_of(key)
        if held is not None and reject != b"*" and held[0] == "!":
            return AcquireResult("alone", left=held[2] - now, marks=marks)
        if held is not None and reject != b"*" and held[0] not in (token, request.previous_token):
            server.leases[key] = held[0], True, held[2]
            return AcquireResult("wait", left=held[2] - now, marks=marks)
        server.leases[key] = token, held is not None and held[1], now + request.lease
        return AcquireResult("own", marks=marks)

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
        await self._ask("fill")
        server = self.server
        held = server.lease_of(key)
        if held is None or held[0] != token:
            if token.encode() in self._stored_by(key):
                return True
            if always_publish:
                self._drop(key, message)
            return False
        del server.leases[key]
        if held[1] or always_publish:
            server.publish(message)
        lowest = max(server.lowest.get(key, 0), (server.versions.get(key) or 0) if key in server.values else 0)
        if version is not None and version < lowest:
            if always_publish:
                server.values.pop(key, None)
                server.lowest[key] = lowest
            self._leave_word(key, is_awaited=held[1])
            return False
        server.values[key] = envelope, server.clock() + ttl
        server.versions[key] = version
        return True

    def _drop(self, key: str, message: bytes) -> None:
        self.server.values.pop(key, None)
        self.server.publish(message)

    async def renew(self, leases: Sequence[tuple[str, str, float]]) -> list[bool]:
        await self._ask("renew" if len(leases) == 1 else f"renew {len(leases)}")
        return [self._renew(*right) for right in leases]

    def _renew(self, key: str, token: str, lease: float) -> bool:
        held = self.server.lease_of(key)
        if held is None or held[0] != token:
            return False
        self.server.leases[key] = token, held[1], self.server.clock() + lease
        return True

    async def release(self, leases: Sequence[tuple[str, str, bytes, bool]]) -> list[bool]:
        await self._ask("release" if len(leases) == 1 else f"release {len(leases)}")
        return [self._release(*right) for right in leases]

    def _release(self, key: str, token: str, message: bytes, is_unstored: bool) -> bool:  # noqa: FBT001
        held = self.server.lease_of(key)
        if held is None or held[0] != token:
            return False
        del self.server.leases[key]
        self._leave_word(key, is_awaited=held[1] and is_unstored)
        if held[1]:
            self.server.publish(message)
        return True

    def _leave_word(self, key: str, *, is_awaited: bool) -> None:
        """Let flights that ask within the next second load alone, if others wait for what was not stored."""
        if is_awaited:
            self.server.leases[key] = "!", False, self.server.clock() + 1.0

    async def invalidate(self, key: str, version: int | None, message: bytes) -> None:
        await self._ask("invalidate")
        self.server.values.pop(key, None)
        self.server.leases.pop(key, None)
        if version is not None:
            self.server.lowest[key] = max(version, self.server.lowest.get(key, 0))
        self.server.publish(message)

    async def invalidate_tag(self, key: str, mark: bytes, ttl: float, message: bytes) -> None:
        await self._ask("invalidate tag")
        self.server.marks[key] = mark
        self.server.publish(message)

    async def echo(self, payload: bytes) -> None:
        await self._ask("echo")
        self.echoes.append(payload)
        self._late_echoes.append(payload)
        if not self.holds_echoes:
            self.let_echoes_go()

    def let_echoes_go(self, number: int = 1 << 16) -> None:
        """Let the first *number* of the echoes that were held be heard."""
        heard, self._late_echoes = self._late_echoes[:number], self._late_echoes[number:]
        for inbox in () if self.server.is_mute else self.inboxes:
            for payload in heard:
                inbox.queue.put_nowait(Echo(payload))

    async def stored_by(self, key: str) -> tuple[bytes, ...]:
        await self._ask("stored by")
        return self._stored_by(key.removesuffix(":v"))

    def _stored_by(self, key: str) -> tuple[bytes, ...]:
        envelope, until = self.server.values.get(key, (b"", 0.0))
        return tokens_of(envelope) if self.server.clock() < until else ()

    @asynccontextmanager
    async def listen(self) -> AsyncGenerator[Subscription]:
        self.asked.append("listen")
        if self.deaf is not None:
            raise self.deaf
        inbox = _Inbox()
        for inboxes in (self.server.inboxes, self.inboxes):
            inboxes.append(inbox)
        try:
            yield inbox
        finally:
            for inboxes in (self.server.inboxes, self.inboxes):
                inboxes.remove(inbox)

    async def aclose(self) -> None:
        self.is_closed = True
        tasks = tuple(self._under_way)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
