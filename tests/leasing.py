"""A leasing store in memory, for what the guard does with one; what Redis does is for tests with a real one."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any, NamedTuple

from stampede_guard._codecs.fingerprint import NO_FINGERPRINT
from stampede_guard._flights.flight import running_flight
from stampede_guard.stores import (
    AcquireRequest,
    AcquireResult,
    Echo,
    KeysChanged,
    LoadFailure,
    Release,
    Stored,
    Subscription,
)
from stampede_guard.stores._envelope import _ENTRY as ENTRY
from stampede_guard.stores._envelope import COUNT_AT, _bodies, _entries, entry_of, freshness_of, tokens_of
from stampede_guard.testing import Gate, ManualClock

REMEMBERED = 60.0  # seconds for which failures are counted on after a pause


class _Part(NamedTuple):
    """The value of one release in an envelope.

    Attributes:
        left: Seconds.
        stale, life: As in its entry.
        rest: Of its entry, behind these.
    """

    fingerprint: bytes
    left: float
    stale: float
    life: float
    rest: tuple[Any, ...]
    body: bytes

    def soften(self) -> "_Part":
        """Return it with no more left than its window."""
        over = max(self.left - self.stale, 0.0)
        return self._replace(left=self.left - over, life=max(self.life - over, 0.0))


def _parts_of(envelope: bytes, left: float) -> list[_Part]:
    """Return the values in an envelope that has so many seconds *left*, those that are not over."""
    parts = []
    for at in _entries(envelope) if entry_of(envelope, b"") > 0 else ():
        fingerprint, lag, stale, life, *rest = ENTRY.unpack_from(envelope, at)
        begins, _ = _bodies(envelope, at)
        body = envelope[begins : begins + rest[-1]]
        parts.append(_Part(fingerprint, left - lag / 1000, stale / 1000, life / 1000, tuple(rest), body))
    return [part for part in parts if part.left > 0]


def _joined(head: bytes, parts: Sequence[_Part]) -> tuple[bytes, float]:
    """Return the envelope of *parts*, and the seconds that it lives."""
    longest = max(part.left for part in parts)
    entries = [
        ENTRY.pack(
            each.fingerprint, *(round(1000 * life) for life in (longest - each.left, each.stale, each.life)), *each.rest
        )
        for each in parts
    ]
    return b"".join((head[:COUNT_AT], bytes([len(parts)]), *entries, *(each.body for each in parts))), longest


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
        leases: Tokens, whether another flight waits, and when they expire; or `!`, or back-off markers.
        failures: How many loads failed before those of the present leases.
        is_mute: Whether what is published is lost.
    """

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.values: dict[str, tuple[bytes, float]] = {}
        self.versions: dict[str, int | None] = {}
        self.lowest: dict[str, int] = {}
        self.leases: dict[str, tuple[str, bool, float]] = {}
        self.failures: dict[str, int] = {}
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
        self, key: str, tags: Sequence[str], fingerprint: bytes = NO_FINGERPRINT, margin: float = 0.0
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
        key, token, reject = request.key, request.token, request.reject
        await self._ask("acquire")
        server, now = self.server, self.server.clock()
        marks = tuple(server.marks.setdefault(tag, b"mark-%06d" % len(server.marks)) for tag in request.tags)
        stored, freshness = self._find(request)
        if freshness == "fresh" and reject != b"*":
            return AcquireResult("hit", stored, marks=marks)
        old: dict[str, Any] = {"stored": stored, "marks": marks}
        held = server.lease_of(key)
        failures = 0 if held is None else server.failures.get(key, 0)
        if held is not None and held[0].startswith("?"):
            pause, failures = held[2] - REMEMBERED - now, int(held[0][1])
            if reject != b"*" and pause > 0:
                return AcquireResult("backoff", left=pause, failure=held[0][2:], **old)
        elif held is not None and reject != b"*" and held[0] == "!":
            return AcquireResult("alone", left=held[2] - now, **old)
        elif held is not None and reject != b"*" and held[0] not in (token, request.previous_token):
            server.leases[key] = held[0], True, held[2]
            return AcquireResult("wait", left=held[2] - now, **old)
        server.leases[key] = token, held is not None and held[1], now + request.lease
        server.failures[key] = failures
        return AcquireResult("own", **old)

    def _find(self, request: AcquireRequest) -> tuple[Stored | None, str]:
        """Return the value that *request* can use, fresh or old, and which of these it is."""
        envelope, until = self.server.values.get(request.key, (b"", 0.0))
        left = until - self.server.clock()
        lives = 1000 * request.window, 1000 * request.margin
        freshness = freshness_of(envelope, max(1000 * left, 0), request.fingerprint, request.reject, *lives)
        return (Stored(envelope, left) if freshness and left > 0 else None), freshness if left > 0 else ""

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
        there, until = server.values.get(key, (b"", 0.0))
        mine = _parts_of(envelope, ttl)
        others = [part for part in _parts_of(there, until - server.clock()) if part[:1] != mine[0][:1]] if mine else []
        if others and not always_publish:
            envelope, ttl = _joined(envelope, (*mine, *others[:3]))
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

    async def release(self, leases: Sequence[Release]) -> list[bool]:
        await self._ask("release" if len(leases) == 1 else f"release {len(leases)}")
        return [self._release(each) for each in leases]

    def _release(self, release: Release) -> bool:
        key, failure, held = release.key, release.failure, self.server.lease_of(release.key)
        if held is None or held[0] != release.token:
            return False
        del self.server.leases[key]
        self._leave_word(key, is_awaited=held[1] and release.is_unstored)
        if failure is not None:
            self._leave_marker(key, failure)
        if held[1]:
            self.server.publish(release.message)
        return True

    def _leave_marker(self, key: str, failure: LoadFailure) -> None:
        """Let flights that ask during the pause know of *failure*."""
        failures = self.server.failures.get(key, 0)
        pause = min(failure.first_pause * 2**failures, failure.longest_pause)
        marker = f"?{min(failures + 1, 9)}{failure.text}"
        self.server.leases[key] = marker, False, self.server.clock() + pause + REMEMBERED

    def _leave_word(self, key: str, *, is_awaited: bool) -> None:
        """Let flights that ask within the next second load alone, if others wait for what was not stored."""
        if is_awaited:
            self.server.leases[key] = "!", False, self.server.clock() + 1.0

    async def invalidate(self, key: str, version: int | None, message: bytes, *, is_soft: bool = False) -> None:
        await self._ask("soft invalidate" if is_soft else "invalidate")
        envelope, until = self.server.values.pop(key, (b"", 0.0))
        now = self.server.clock()
        parts = [part.soften() for part in _parts_of(envelope, until - now) if part.stale > 0] if is_soft else []
        if parts:
            envelope, left = _joined(envelope, parts)
            self.server.values[key] = envelope, now + left
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
