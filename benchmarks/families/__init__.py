"""The families of rows, each measured in one process and run."""

from dataclasses import dataclass, replace

from benchmarks.children import Tell
from benchmarks.model import Figure, Row
from benchmarks.peers.peer import Peer

NOT_INSTALLED = "not installed"


@dataclass(frozen=True, slots=True)
class Setting:
    """How a family is to be run.

    Args:
        tell: Takes the progress, 0 to 1, and a description.
        is_quick: Whether it is a smoke test.
        loop: Name of the event loop.
    """

    tell: Tell
    is_quick: bool = False
    loop: str = "asyncio"

    def part(self, begin: float, end: float) -> "Setting":
        """Return the setting of a part; its progress runs from *begin* to *end* of the whole."""
        return replace(self, tell=lambda done, said: self.tell(begin + done * (end - begin), said))

    def scaled(self, full: int, quick: int) -> int:
        """Return *full*, or *quick* for a smoke test."""
        return quick if self.is_quick else full


def row_of(peer: Peer, figures: list[Figure | None], note: str = "") -> Row:
    """Return the row of *peer*."""
    lacks = list(peer.lacks) if peer.role in {"peer", "reference"} else []
    return Row(peer.name, figures, peer.role, lacks, note)


def row_in(columns: list[dict[str, Figure]], peer: Peer, failures: dict[str, str]) -> Row:
    """Return the row of *peer*, with its figures in *columns*, or the reason why it has none."""
    return row_of(peer, [column.get(peer.name) for column in columns], failures.get(peer.name, ""))
