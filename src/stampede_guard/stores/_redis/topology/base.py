"""Which server has a key, and the topology of one server."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ... import Refused
from ..node import Address, Node


class MakeNode(Protocol):
    """Makes a node with the store's settings."""

    def __call__(self, name: str, address: Address, greet: Callable[[Any], Any] | None = None) -> Node:
        """Return a node at *address*; *greet* is called with each new connection after the login."""
        ...


class Topology(Protocol):
    """One event loop's view of the servers behind a store."""

    has_replicas: bool
    """Whether reads may go to another node than the primary."""

    generation: int
    """Rises when any key has got another primary."""

    async def open(self) -> None:
        """Find the servers and connect; raises if none answers, which is no reason not to start."""

    def primary(self, key: str) -> Node:
        """Return the node that takes writes for *key*, a whole key with its braces; no I/O.

        Raises:
            ConnectionError: the primary is unknown at present; the search for it has begun.
        """
        ...

    def replica(self, key: str) -> Node | None:
        """Return one of the fresh replicas for *key* at random, or `None` if there is none; no I/O."""
        ...

    async def follow(self, key: str, node: Node, refusal: Refused) -> Node | None:
        """Learn from a refusal of *node* to serve *key* (MOVED, ASK, READONLY, CLUSTERDOWN, …).

        Returns:
            The node to ask once more, within the same operation (after an ASK, with ASKING before the
            commands); `None` if there is none and the refusal stands.
        """
        ...

    def failed(self, node: Node) -> None:
        """Note that *node* did not answer; returns at once, as probes run in tasks that `aclose` ends."""

    async def aclose(self) -> None:
        """Close every connection and end every task."""


class Single:
    """One address, which leads to the primary of all keys. The server behind it may change."""

    has_replicas = False

    def __init__(self, node: Node) -> None:
        self.generation = 0
        self._node = node
        node.require_primary(self._note_demotion)

    async def open(self) -> None:
        """Open a connection, log in and send PING.

        Raises:
            Refused: the node is alive and refuses.
            Exception: there was no answer.
        """
        (reply,) = await self._node.exchange((bytes, "PING"))
        if isinstance(reply, Refused):
            raise reply

    def primary(self, key: str) -> Node:  # noqa: ARG002  # one node has all keys
        """Return the node."""
        return self._node

    def replica(self, key: str) -> Node | None:  # noqa: ARG002  # as above
        """Return nothing: there are no replicas."""
        return None

    async def follow(self, key: str, node: Node, refusal: Refused) -> Node | None:  # noqa: ARG002  # as above
        """Return nothing: no other node takes writes."""
        return None

    def failed(self, node: Node) -> None:
        """Do nothing: there is no other node."""

    async def aclose(self) -> None:
        """Close every connection."""
        await self._node.aclose()

    def _note_demotion(self) -> None:
        self.generation += 1


async def close_all(nodes: Iterable[Node]) -> None:
    """Close all *nodes*.

    Raises:
        ExceptionGroup: some did not close in time.
    """
    errors: list[Exception] = []
    for node in nodes:
        try:
            await node.aclose()
        except Exception as error:  # noqa: BLE001  # the others are to be closed all the same
            errors.append(error)
    if errors:
        message = "some connections did not close"
        raise ExceptionGroup(message, errors)
