"""The protocols of a store: what L2 needs from it.

A store moves bytes. The envelope, the circuit breaker and the repetition of what failed belong to the tier (`_l2`), so
that a store stays a thin layer over a client. There are two kinds: a plain `Store` reads, writes and deletes; a
`LeasingStore` can also grant a lease, the right to load, to one flight of a whole cluster.
"""

import re
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, NamedTuple, Protocol

from .._codecs.fingerprint import NO_FINGERPRINT
from .._tokens import new_token

__all__ = (
    "AcquireRequest",
    "AcquireResult",
    "Echo",
    "KeysChanged",
    "LeasingStore",
    "LoadFailure",
    "Refused",
    "Release",
    "Store",
    "StoreOverloaded",
    "Stored",
    "Subscription",
)


_UNSAFE = re.compile("[^!-~]")


class Refused(Exception):  # noqa: N818  # the store's answer, not a fault in it
    """The store works and refuses: it is full, read-only, or permission is missing. The text is a code for the log.

    Any other exception counts against the node of the key, or the one in its `FAILED_NODE`, unless it has the note
    `LOST_TOGETHER`.
    """


LOST_TOGETHER = "part of a batch that failed; only the batch's first error counts for the breaker"
"""Note on all exceptions but the first where one failure ended several operations."""


FAILED_NODE = "failed_node"
"""Attribute of an exception: the name of the node that failed, if that is not the node of the operation's key."""


class StoreOverloaded(Exception):  # noqa: N818  # says nothing about the node
    """The queue was too long; the operation was dropped before it was sent."""


class Stored(NamedTuple):
    """A value as it was found in the store.

    Attributes:
        envelope: The bytes as they were written.
        ttl: Seconds until the store drops them; `None` if the store cannot tell. Then the value counts as fresh.
    """

    envelope: bytes
    ttl: float | None


class Store(Protocol):
    """One event loop's access to a store. Every method returns or raises within the store's own deadline.

    A store that cannot tell how long a value has left says so in an attribute, `tells_ttl = False`. All of its values
    count as fresh, so they are not written for longer than that.
    """

    name: str
    """The name in logs; contains neither address nor password."""

    concurrency: int
    """How many operations may run at once; more of them queue."""

    async def open(self) -> None:
        """Connect. An exception, when the node does not answer, is logged and does not stop the guard from starting."""

    async def read(self, key: str) -> Stored | None:
        """Return what is stored under *key*."""

    async def write(self, key: str, envelope: bytes, ttl: float) -> None:
        """Store *envelope* for *ttl* seconds, in place of what was there."""

    async def delete(self, key: str) -> None:
        """Delete *key*; succeeds if there is nothing."""

    async def aclose(self) -> None:
        """Close all connections."""


class AcquireResult(NamedTuple):
    """The result of `LeasingStore.acquire`: a fresh value, or else whether this flight holds the lease.

    Attributes:
        kind: `"hit"`: a fresh value was found; `"own"`: the lease is granted, load; `"wait"`: another flight holds the
            lease; `"alone"`: load without a lease and store nothing, because what another flight has just loaded could
            not be stored; `"backoff"`: a load failed a moment ago, pause.
        stored: The value of a hit. Of another kind, an old value that the request can use; to a request that rejects
            any value, also a fresh one.
        left: Seconds until the lease of the other flight expires, or the pause ends.
        marks: The current marks of the op's tags, in order.
        sent_at: When the request was sent, by `time.monotonic`; `None` if the store cannot tell.
        failure: The text of the failure for which to pause.
    """

    kind: Literal["hit", "own", "wait", "alone", "backoff"]
    stored: Stored | None = None
    left: float = 0.0
    marks: tuple[bytes, ...] = ()
    sent_at: float | None = None
    failure: str = ""


class AcquireRequest:
    """A flight's request for a fresh value of an op, or else for its lease, and for a value that is no longer fresh.

    Args:
        key: The key of the op.
        tags: The keys of its tags.
        lease: Seconds until the lease expires unless it is renewed.
        marks_ttl: Seconds for which the marks of the tags have to exist at least.
        fingerprint: The fingerprint of the values that the flight can use. One lease serves all fingerprints.
        token: The token of the flight; empty for a new one.
        reject: The values that the flight cannot use: `b""` for none; `=` and a token for the one that this token
            stored; `*` for any, which also takes the lease from a flight that holds it, and ignores a pause.
        previous_token: An earlier token of the same flight, whose request was not answered; its lease passes over.
        window: Seconds for which the flight can use a value that is not fresh any more; the store keeps none for longer
            than the flight that stored it has said.
        margin: Seconds by which a value counts as old before it is.
    """

    __slots__ = (
        "drawn_token",
        "fingerprint",
        "key",
        "lease",
        "margin",
        "marks_ttl",
        "previous_token",
        "reject",
        "tags",
        "window",
    )

    def __init__(  # noqa: PLR0913, PLR0917  # all that one round trip takes; keyword-only ones would cost reads
        self,
        key: str,
        tags: Sequence[str],
        lease: float,
        marks_ttl: float,
        fingerprint: bytes = NO_FINGERPRINT,
        window: float = 0.0,
        margin: float = 0.0,
        token: str = "",
        reject: bytes = b"",
        previous_token: str = "",
    ) -> None:
        self.key = key
        self.tags = tags
        self.lease = lease
        self.marks_ttl = marks_ttl
        self.fingerprint = fingerprint
        self.drawn_token = token
        self.reject = reject
        self.previous_token = previous_token
        self.window = window
        self.margin = margin

    @property
    def token(self) -> str:
        """The token of the flight; drawn when it is first read, since most flights find a value."""
        if not self.drawn_token:
            self.drawn_token = new_token()
        return self.drawn_token


_LONGEST_TEXT = 64  # characters of a failure that are stored


class LoadFailure(NamedTuple):
    """What a failed load leaves in the store: other flights pause, for twice as long after each failure.

    Attributes:
        first_pause: Seconds after the first failure.
        longest_pause: Seconds.
        reason: Type name of the error.
    """

    first_pause: float
    longest_pause: float
    reason: str

    @property
    def text(self) -> str:
        """The reason as it is stored: printable ASCII, 64 characters at most."""
        return _UNSAFE.sub("_", self.reason[:_LONGEST_TEXT])


class Release(NamedTuple):
    """The end of a lease without a fill.

    Attributes:
        key: The op's.
        token: The flight's.
        message: Published if another process waits.
        is_unstored: Whether a loaded value could not be stored: then flights that ask within the next second get
            `"alone"`, if one waits.
        failure: The failure of the load: then flights that ask during its pause get `"backoff"`. The next lease carries
            the number of failures on, until a fill or an invalidation ends it.
    """

    key: str
    token: str
    message: bytes
    is_unstored: bool = False
    failure: LoadFailure | None = None


class KeysChanged(NamedTuple):
    """The server's message that keys were written or deleted, by any client.

    Attributes:
        keys: The keys; `None` for all of them.
    """

    keys: tuple[str, ...] | None


class Echo(NamedTuple):
    """A message that this store sent to itself with `LeasingStore.echo`.

    Attributes:
        payload: The argument of `LeasingStore.echo`.
    """

    payload: bytes


class Subscription(Protocol):
    """The messages of the bus since it was opened."""

    async def next(self) -> bytes | KeysChanged | Echo:
        """Return the next message; raises if a message may have been lost."""
        ...


class LeasingStore(Protocol):
    """A store that grants leases. The keys it is given are bases, to which it adds suffixes of its own."""

    name: str
    """The name in logs; contains neither address nor password."""

    concurrency: int
    """How many operations may run at once; more of them queue."""

    channel: str
    """The channel of the bus; the tier sets it before any other use."""

    capabilities: frozenset[str]
    """A subset of `"leases"`, `"backplane"`, `"tags"`, `"versions"`, `"tracking"`."""

    has_replicas: bool
    """Whether `read_replica` may find a replica."""

    @property
    def generation(self) -> int:
        """Rises when another server may have become the primary, so that the latest writes may be lost."""
        ...

    def node_of(self, key: str) -> str:
        """Return the name of the server that has *key*: each server has a breaker of its own."""
        ...

    async def open(self) -> None:
        """Connect. An exception, when the node does not answer, is logged and does not stop the guard from starting."""

    async def read_replica(
        self, key: str, tags: Sequence[str], fingerprint: bytes = NO_FINGERPRINT, margin: float = 0.0
    ) -> AcquireResult | None:
        """Return a fresh value from a healthy replica; `None` without such a replica, or value with *fingerprint*.

        *margin* is that of a request.
        """
        ...

    def acquire(self, request: AcquireRequest) -> Awaitable[AcquireResult]:
        """Return the fresh value, or grant or deny the lease, in one round trip; missing marks are made.

        A coroutine function is enough. If the method returns a future instead (an object with `add_done_callback`), a
        flight reads the future's `result` without a task of its own. The flight awaits the future in its task if
        `result` raises. A future is cancelled if the store is closed.
        """
        ...

    async def fill(  # noqa: PLR0917  # one round trip for all of it
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
        """Store *envelope* for *ttl* seconds and end the lease; return whether *token* still held it.

        The envelope says for how many of these seconds, at their end, its value is stale.

        Values with other fingerprints than the one in *envelope* may stay beside it, but not if *always_publish*.
        *message* is published if another flight waits, or if *always_publish*. A refusal then also drops the stored
        value, which may be older. If the version was too low as well, it becomes the lowest acceptable one.
        """
        ...

    async def renew(self, leases: Sequence[tuple[str, str, float]]) -> Sequence[bool | Exception]:
        """Renew leases, ahead of other operations; return for each whether its token still held it, or an exception.

        Args:
            leases: Key, token, and the seconds until the lease expires, from now on; the keys are of one node.
        """
        ...

    async def release(self, leases: Sequence[Release]) -> Sequence[bool | Exception]:
        """End leases without a value, ahead of other operations; return for each whether there was one, or a refusal.

        Args:
            leases: Their keys are of one node.
        """
        ...

    async def invalidate(self, key: str, version: int | None, message: bytes, *, is_soft: bool = False) -> None:
        """Drop the value, and the lease of a flight that is loading one; publish *message*.

        From then on versions below *version* are not stored. If *is_soft*, the value stays and is stale from now on,
        unless it has no window.
        """

    async def invalidate_tag(self, key: str, mark: bytes, ttl: float, message: bytes) -> None:
        """Give the tag the new *mark*, for *ttl* seconds at least; publish *message*."""

    async def echo(self, payload: bytes) -> None:
        """Send *payload* to this store's own subscription only, behind all that was published before."""

    async def stored_by(self, key: str) -> tuple[bytes, ...]:
        """Return the tokens of the flights that stored the values under *key*, which has its suffix."""
        ...

    def listen(self) -> AbstractAsyncContextManager[Subscription]:
        """Subscribe to the bus."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
