"""L2: what a store has to be able to do.

A store moves bytes. The envelope, the breaker and the order of writes are the tier's (`_tier`),
so that a store stays a thin piece over somebody's client.
"""

from typing import NamedTuple, Protocol

__all__ = ("Refused", "Store", "Stored")


class Refused(Exception):  # noqa: N818  # a verdict of the store, not a fault in it
    """The store is alive and said no: full, read-only, no permission. The text is a code for the log.

    Anything else that a store raises counts against its node.
    """


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
