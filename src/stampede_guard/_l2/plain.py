"""Adapts a plain store to the interface of a leasing one."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from .._codecs.fingerprint import NO_FINGERPRINT
from ..stores import AcquireRequest, AcquireResult, Refused, Store, Subscription


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
        self.open = store.open
        self.aclose = store.aclose

    def node_of(self, key: str) -> str:
        """Return the store's name: it counts as one node."""
        return self.name

    async def read_replica(
        self, key: str, tags: Sequence[str], fingerprint: bytes = NO_FINGERPRINT
    ) -> AcquireResult | None:
        """Return nothing: there are no replicas."""
        return None

    async def acquire(self, request: AcquireRequest) -> AcquireResult:
        """Read; without a usable value, each flight may load."""
        stored = None if request.reject else await self._store.read(f"{request.key}:v")
        return AcquireResult("own") if stored is None else AcquireResult("hit", stored)

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
        """Write."""
        await self._store.write(f"{key}:v", envelope, ttl)
        return True

    async def renew(self, leases: Sequence[tuple[str, str, float]]) -> Sequence[bool]:
        """Return that all leases last: nothing expires."""
        return [True] * len(leases)

    async def release(self, leases: Sequence[tuple[str, str, bytes, bool]]) -> Sequence[bool]:
        """Do nothing: there was no lease."""
        return [False] * len(leases)

    async def invalidate(self, key: str, version: int | None, message: bytes) -> None:
        """Delete."""
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
