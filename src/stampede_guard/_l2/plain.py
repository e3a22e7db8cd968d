"""Adapts a plain store to the interface of a leasing one."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from .._codecs.fingerprint import NO_FINGERPRINT
from ..stores import AcquireRequest, AcquireResult, Refused, Release, Store, Subscription
from ..stores._envelope import freshness_of, window_of


class PlainStoreAdapter:
    """A plain store as a leasing one without capabilities; the tier orders the writes of each key.

    Args:
        store: The plain store.
    """

    capabilities: frozenset[str] = frozenset()
    has_replicas = False
    generation = 0

    def __init__(self, store: Store) -> None:
        self.channel = ""
        self.name = store.name
        self.concurrency = store.concurrency
        self._store = store
        self._tells_ttl: bool = getattr(store, "tells_ttl", True)
        self.open = store.open
        self.aclose = store.aclose

    def node_of(self, key: str) -> str:
        """Return the store's name: it counts as one node."""
        return self.name

    async def read_replica(
        self, key: str, tags: Sequence[str], fingerprint: bytes = NO_FINGERPRINT, margin: float = 0.0
    ) -> AcquireResult | None:
        """Return nothing: there are no replicas."""
        return None

    async def acquire(self, request: AcquireRequest) -> AcquireResult:
        """Read; without a fresh value, each flight may load.

        Where the store cannot tell how long a value has left, the value counts as fresh.
        """
        stored = None if request.reject else await self._store.read(f"{request.key}:v")
        if stored is None:
            return AcquireResult("own")
        ttl = -1 if stored.ttl is None else stored.ttl * 1000
        lives = request.window * 1000, request.margin * 1000
        freshness = freshness_of(stored.envelope, ttl, request.fingerprint, b"", *lives)
        if freshness == "fresh" or not stored.envelope:  # bytes that are no envelope are counted
            return AcquireResult("hit", stored)
        return AcquireResult("own", stored if freshness == "old" else None)

    async def fill(  # noqa: PLR0917  # as the protocol has it
        self,
        key: str,
        token: str,  # there are no leases
        envelope: bytes,
        ttl: float,
        version: int | None,  # the guard refuses versions
        message: bytes,  # there is no bus
        *,
        always_publish: bool,  # as above
    ) -> bool:
        """Write; without its window, if the store cannot tell whether the value is stale."""
        if not self._tells_ttl:
            ttl -= window_of(envelope)
        await self._store.write(f"{key}:v", envelope, ttl)
        return True

    async def renew(self, leases: Sequence[tuple[str, str, float]]) -> Sequence[bool]:
        """Return that all leases last: nothing expires."""
        return [True] * len(leases)

    async def release(self, leases: Sequence[Release]) -> Sequence[bool]:
        """Do nothing: there was no lease, nor is there room for a back-off marker."""
        return [False] * len(leases)

    async def invalidate(self, key: str, version: int | None, message: bytes, *, is_soft: bool = False) -> None:
        """Delete, also if *is_soft*: a plain store cannot change what a value has left."""
        await self._store.delete(f"{key}:v")

    async def invalidate_tag(self, key: str, mark: bytes, ttl: float, message: bytes) -> None:
        """Refuse; the guard allows no tags with a plain store."""
        why = "it has no tags"
        raise Refused(why)

    async def echo(self, payload: bytes) -> None:
        """Do nothing: there is no bus."""

    async def stored_by(self, key: str) -> tuple[bytes, ...]:
        """Refuse; the guard allows no tracking with a plain store."""
        why = "it does not know"
        raise Refused(why)

    def listen(self) -> AbstractAsyncContextManager[Subscription]:
        """Refuse; the guard opens no bus with a plain store."""
        why = "it has no bus"
        raise Refused(why)
