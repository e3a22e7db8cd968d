"""L2: what a store has to be able to do.

A store moves bytes. The envelope, the breaker and what has to be tried again are the tier's (`_l2`),
so that a store stays a thin piece over somebody's client. There are two kinds: a plain `Store` reads, writes
and deletes; a `LeasingStore` can also give one flight of a whole cluster the right to load.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, NamedTuple, Protocol

from .._codecs.fingerprint import NO_FINGERPRINT

__all__ = (
    "AcquireResult",
    "Echo",
    "KeysChanged",
    "LeasingStore",
    "PendingAcquire",
    "Refused",
    "Store",
    "StoreOverloaded",
    "Stored",
    "Subscription",
)


class Refused(Exception):  # noqa: N818  # a verdict of the store, not a fault in it
    """The store is alive and said no: full, read-only, no permission. The text is a code for the log.

    Anything else that a store raises counts against its node, unless it has the note `LOST_TOGETHER`.
    """


LOST_TOGETHER = "lost together with others, for one of which it counts against the node"
"""Note on the exceptions of all but one of the operations that one failure has ended."""


class StoreOverloaded(Exception):  # noqa: N818  # says nothing about the node
    """There were too many operations before this one, and it was given up before the node heard of it."""


class Stored(NamedTuple):
    """What was found under a key.

    Attributes:
        envelope: The bytes as they were written.
        life: Seconds until the store drops them; `None` if the store cannot tell.
    """

    envelope: bytes
    life: float | None


class Store(Protocol):
    """One event loop's way to a store. Every method returns or raises within the store's own deadline."""

    name: str
    """How logs call it; holds neither address nor password."""

    concurrency: int
    """How many operations it can do at once; more have to queue."""

    async def open(self) -> None:
        """Get ready; raises if the node does not answer, which is no reason not to start."""

    async def read(self, key: str) -> Stored | None:
        """Return what is stored under *key*."""

    async def write(self, key: str, envelope: bytes, life: float) -> None:
        """Store *envelope* for *life* seconds, replacing what was there."""

    async def delete(self, key: str) -> None:
        """Drop *key*; succeeds if there is nothing."""

    async def aclose(self) -> None:
        """Close every connection."""


class AcquireResult(NamedTuple):
    """A store's answer to a flight that asks for a value, or else for the right to load it.

    Attributes:
        kind: `"hit"`: here is a value; `"own"`: load it; `"wait"`: another flight does; `"alone"`: load it and store
            nothing, since what another flight has just loaded was not stored.
        stored: The value of a hit.
        left: Seconds until the other's lease expires.
        marks: The present marks of the op's tags, in order.
        sent_at: When the question was sent, by `time.monotonic`; `None` if the store cannot tell.
    """

    kind: Literal["hit", "own", "wait", "alone"]
    stored: Stored | None = None
    left: float = 0.0
    marks: tuple[bytes, ...] = ()
    sent_at: float | None = None


class KeysChanged(NamedTuple):
    """Word of the server's that keys were written or deleted, by whomever.

    Attributes:
        keys: The keys; `None` for all of them.
    """

    keys: tuple[str, ...] | None


class Echo(NamedTuple):
    """What this store itself sent by `LeasingStore.echo`.

    Attributes:
        word: As it was given there.
    """

    word: bytes


class Subscription(Protocol):
    """What comes in on the bus, from the moment at which it was opened."""

    async def next(self) -> bytes | KeysChanged | Echo:
        """Return the next message; raises when one may have been lost."""
        ...


class PendingAcquire(Protocol):
    """A question that was put without waiting for anything, and its answer."""

    error: Exception | None
    """Why there is no answer."""

    is_cut: bool
    """Whether there is none because the store is closed, or the event loop ends: nothing new may begin."""

    @property
    def token(self) -> str:
        """The flight's, from the moment on in which a right to load is asked for; until then it is empty."""
        ...

    @property
    def verdict(self) -> AcquireResult | None:
        """The answer; `None` if there is more to it, which `LeasingStore.conclude` knows, or none."""
        ...


class LeasingStore(Protocol):
    """A store that arbitrates between processes. Keys are bases, to which it adds its suffixes."""

    name: str
    """How logs call it; holds neither address nor password."""

    concurrency: int
    """How many operations it can do at once; more have to queue."""

    channel: str
    """Where messages are published and listened for; set by the tier before anything else."""

    capabilities: frozenset[str]
    """What it can: `"leases"`, `"backplane"`, `"tags"`, `"versions"`, `"tracking"`."""

    has_replicas: bool
    """Whether `glance` may find somebody to ask."""

    @property
    def generation(self) -> int:
        """Rises when another server may have taken over, and with it lost what was written last."""
        ...

    def node_of(self, key: str) -> str:
        """Return the name of the server that has *key*: each has a breaker of its own."""
        ...

    async def open(self) -> None:
        """Get ready; raises if the node does not answer, which is no reason not to start."""

    async def glance(self, key: str, tags: Sequence[str], fingerprint: bytes = NO_FINGERPRINT) -> AcquireResult | None:
        """Return what a good replica has; `None` if there is no value with *fingerprint*, or no good replica."""
        ...

    async def acquire(  # noqa: PLR0917  # one round trip for all of it
        self,
        key: str,
        tags: Sequence[str],
        token: str,
        lease: float,
        unwanted: bytes,
        marks_life: float,
        previous_token: str = "",
        fingerprint: bytes = NO_FINGERPRINT,
    ) -> AcquireResult:
        """Return the value, or give or deny the holder of *token* the right to load, in one round trip.

        Args:
            key: The op's.
            tags: Keys of its tags, whose marks are made if they are missing.
            token: The flight's.
            lease: Seconds that the right lasts unless it is renewed.
            unwanted: Nothing, or `=` and the token that stored the value that will not do, or `*`: whatever
                is there is not wanted, and whoever else is loading loses the right to.
            marks_life: Seconds that the tags' marks have to last.
            previous_token: An earlier token of the same flight, whose request went unanswered; its lease passes over.
            fingerprint: Of the values that will do. The right to load is one for all fingerprints.
        """
        ...

    def begin(  # noqa: PLR0917  # as `acquire`
        self,
        key: str,
        tags: Sequence[str],
        lease: float,
        marks_life: float,
        fingerprint: bytes,
        on_answer: Callable[[], None],
    ) -> PendingAcquire | None:
        """Begin to `acquire` under a token of the store's choice; `None` if that would take waiting.

        *on_answer* is called once, from another step of the event loop, and raises nothing that concerns others; the
        other arguments are those of `acquire`.
        """
        ...

    async def conclude(self, begun: PendingAcquire, token: str) -> AcquireResult:
        """Return or raise what `acquire` would have, after the answer; *token* is the flight's, if it had none yet."""
        ...

    async def fill(  # noqa: PLR0917  # one round trip for all of it
        self,
        key: str,
        token: str,
        envelope: bytes,
        life: float,
        version: int | None,
        message: bytes,
        *,
        always_publish: bool,
    ) -> bool:
        """Store *envelope* for *life* seconds and give the right back; return whether *token* still had it.

        Values with other fingerprints than the one in *envelope* may stay beside it, but not if *always_publish*.
        *message* is published if another flight waits, or if *always_publish*. A refusal then drops the value, too:
        it may be older. A version that was too low with it is the lowest that is acceptable from then on.
        """
        ...

    async def renew(self, rights: Sequence[tuple[str, str, float]]) -> Sequence[bool | Exception]:
        """Prolong leases, ahead of other operations; return for each whether its token still had it, or a refusal.

        Args:
            rights: Key, token, and the seconds that the lease is to last from now on; the keys are of one node.
        """
        ...

    async def release(self, rights: Sequence[tuple[str, str, bytes, bool]]) -> Sequence[bool | Exception]:
        """End leases without a value, ahead of other operations; return for each whether there was one, or a refusal.

        Args:
            rights: Key, token, what is published if another process waits, and whether there is a value that was not
                stored: then flights that ask within the next second are to load `"alone"`, if any waits. The keys are
                of one node.
        """
        ...

    async def invalidate(self, key: str, version: int | None, message: bytes) -> None:
        """Drop the value and everybody's right to store one that is being loaded; publish *message*.

        From now on versions below *version* are not stored.
        """

    async def invalidate_tag(self, key: str, mark: bytes, life: float, message: bytes) -> None:
        """Make *mark* the tag's, for *life* seconds at least; publish *message*."""

    async def echo(self, word: bytes) -> None:
        """Let this store's own subscription, and no other, hear *word*, behind all that was published before."""

    async def stored_by(self, key: str) -> tuple[bytes, ...]:
        """Return the tokens of the flights that stored the values under *key*, a whole one."""
        ...

    def listen(self) -> AbstractAsyncContextManager[Subscription]:
        """Open the bus."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
