"""A primary and its replicas with fixed roles."""

from collections.abc import Callable, Sequence

from ..node import Node
from .base import Single, close_all
from .health import PROBE_PERIOD, Change, Group
from .polling import Poller


class Replicated(Single):
    """A primary and its replicas, as a list of addresses names them; roles do not change.

    Args:
        primary: The node that takes the writes.
        replicas: The others.
        clock: Monotonic seconds.
    """

    has_replicas = True

    def __init__(self, primary: Node, replicas: Sequence[Node], clock: Callable[[], float]) -> None:
        super().__init__(primary)
        self._group = Group(primary, clock, self._note_change)
        self._group.set_replicas(replicas)
        self._health = Poller(PROBE_PERIOD, self._group.probes)

    async def open(self) -> None:
        """Send PING to the primary, and begin to probe the replicas."""
        self._health.start()
        await super().open()

    def replica(self, key: str) -> Node | None:  # noqa: ARG002  # each replica has all keys
        """Return one of the fresh replicas at random."""
        return self._group.fresh_replica()

    def failed(self, node: Node) -> None:
        """Send reads elsewhere, if it is a replica."""
        self._group.failed(node)

    async def aclose(self) -> None:
        """End the probes, and close every connection."""
        await self._health.aclose()
        await close_all(self._group.nodes)

    def _note_change(self, group: Group, change: Change) -> None:  # noqa: ARG002  # there is one group
        if change != "silent":
            self.generation += 1
