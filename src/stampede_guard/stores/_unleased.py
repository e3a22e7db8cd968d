"""A plain store behind the interface of those that can do more: whoever misses has the right to load."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from . import Store, Subscription, Verdict


class Unleased:
    """A plain store, one writer at a time for each op being the tier's care.

    Args:
        store: What moves the bytes.
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

    def node_of(self, key: str) -> str:  # noqa: ARG002  # whatever is behind it, it is one to us
        """Return the store's name."""
        return self.name

    async def glance(self, key: str, tags: Sequence[str]) -> Verdict | None:  # noqa: ARG002  # no replicas
        """Return nothing."""
        return None

    async def acquire(  # noqa: PLR0917  # as the protocol has it
        self,
        key: str,
        tags: Sequence[str],  # noqa: ARG002  # the guard refuses them
        token: str,  # noqa: ARG002  # nobody arbitrates
        lease: float,  # noqa: ARG002  # as above
        unwanted: bytes,
        marks_life: float,  # noqa: ARG002  # as above
        former: str = "",  # noqa: ARG002  # as above
    ) -> Verdict:
        """Read; without a value that will do, everybody may load."""
        stored = None if unwanted else await self._store.read(f"{key}:v")
        return Verdict("own") if stored is None else Verdict("hit", stored)

    async def fill(  # noqa: PLR0917  # as the protocol has it
        self,
        key: str,
        token: str,  # noqa: ARG002  # nobody arbitrates
        envelope: bytes,
        life: float,
        version: int | None,  # noqa: ARG002  # the guard refuses them
        message: bytes,  # noqa: ARG002  # nobody listens
        *,
        tell_all: bool,  # noqa: ARG002  # as above
    ) -> bool:
        """Write."""
        await self._store.write(f"{key}:v", envelope, life)
        return True

    async def renew(self, key: str, token: str, lease: float) -> bool:  # noqa: ARG002  # nothing expires
        """Return that all is well."""
        return True

    async def release(self, key: str, token: str, message: bytes) -> None:
        """Do nothing: there was no lease."""

    async def invalidate(self, key: str, version: int | None, message: bytes) -> None:  # noqa: ARG002
        """Delete."""
        await self._store.delete(f"{key}:v")

    async def invalidate_tag(self, key: str, mark: bytes, life: float, message: bytes) -> None:
        """Raise: the guard refuses tags over such a store."""
        raise NotImplementedError

    async def publish(self, message: bytes) -> None:
        """Do nothing: there is no bus."""

    async def stored_by(self, key: str) -> bytes:
        """Raise: nothing is tracked, and nobody asks."""
        raise NotImplementedError

    def listen(self) -> AbstractAsyncContextManager[Subscription]:
        """Raise: there is no bus, and nobody asks."""
        raise NotImplementedError
