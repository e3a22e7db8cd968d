"""Which server has a key: the one question that tells a lone Redis from Sentinel and Cluster."""

from typing import Protocol

from ... import Refused
from ..node import Node


class Topology(Protocol):
    """One event loop's view of the servers behind a store."""

    has_replicas: bool
    """Whether reads may go to another node than the primary."""

    generation: int
    """Rises when the primary of anything has changed."""

    async def open(self) -> None:
        """Find the servers and say hello; raises if there is no answer, which is no reason not to start."""

    def primary(self, key: str) -> Node:
        """Return the node that takes writes for *key*, a whole key with its braces; no I/O.

        Raises:
            ConnectionError: nobody knows at present; looking has begun.
        """
        ...

    def replica(self, key: str) -> Node | None:
        """Return one of the good replicas for *key* at random, or `None` if there is none; no I/O."""
        ...

    async def follow(self, key: str, node: Node, refusal: Refused) -> Node | None:
        """Learn from a refusal of *node* to serve *key* (MOVED, ASK, READONLY, CLUSTERDOWN, …).

        Returns:
            The node to ask once more, within the same operation (after an ASK, with ASKING before the
            commands); `None` if there is none and the refusal stands.
        """
        ...

    def failed(self, node: Node) -> None:
        """Note that *node* did not answer; returns at once, whatever it sets going is bounded and tracked."""

    async def aclose(self) -> None:
        """Close every connection and end every task."""


class Single:
    """One address, which leads to the primary of all keys, be it the same server for ever or not."""

    has_replicas = False

    def __init__(self, node: Node) -> None:
        self.generation = 0
        self._node = node
        node.require_primary(self._note_demotion)

    async def open(self) -> None:
        """Open a connection, log in and say PING."""
        (reply,) = await self._node.exchange((bytes, "PING"))
        if isinstance(reply, Refused):
            raise reply

    def primary(self, key: str) -> Node:  # noqa: ARG002  # it has them all
        """Return the server."""
        return self._node

    def replica(self, key: str) -> Node | None:  # noqa: ARG002  # as above
        """Return nothing: there are none."""
        return None

    async def follow(self, key: str, node: Node, refusal: Refused) -> Node | None:  # noqa: ARG002  # there is no other
        """Learn nothing."""
        return None

    def failed(self, node: Node) -> None:
        """Do nothing: there is no other to turn to."""

    async def aclose(self) -> None:
        """Close every connection."""
        await self._node.aclose()

    def _note_demotion(self) -> None:
        self.generation += 1
