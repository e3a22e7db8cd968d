"""The order of evictions: S3-FIFO.

Yang, Zhang, Qiu, Yue, Rashmi: "FIFO Queues are All You Need for Cache Eviction", SOSP 2023. A new entry goes into a
small queue. If it was used by the time it is the oldest there, it goes on into the main queue; if not, it is evicted
after a short stay, and what is read but once costs the others little room. An op that comes again soon after goes
into the main queue at once. There the oldest entry goes, and one that was used gets another round.

Unlike there, one bit says whether an entry was used, as a hit can set it without a call, and an eviction spares
only so many entries.
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping

from .._speed.forms import Slot

_SMALL = 10  # the small queue keeps one in so many entries
_MAX_SPARED = 16  # entries that one eviction spares because they were used


class _Ghosts:
    """Marks of ops that were there of late: 32 bits of each one's hash, where other bits of it say.

    A later op may take the place, and one op in four billion may be taken for another. Either costs a miss at worst.

    Attributes:
        room: How many entries there may be before there are too few places.
    """

    __slots__ = ("_marks", "_mask", "room")

    def __init__(self, count: int = 1) -> None:
        places = 1 << (count - 1).bit_length()
        self._marks = array("I", [0]) * places
        self._mask = places - 1
        self.room = 2 * places

    def add(self, op: str) -> None:
        """Mark *op*."""
        number = hash(op)
        self._marks[number & self._mask] = number >> 32 & 0xFFFFFFFF or 1

    def pop(self, op: str) -> bool:
        """Return whether *op* is marked, and remove its mark."""
        number = hash(op)
        place = number & self._mask
        if self._marks[place] != (number >> 32 & 0xFFFFFFFF or 1):
            return False
        self._marks[place] = 0
        return True


class Queues:
    """The ops in memory, in the order in which they are evicted.

    Args:
        slots: The slots by op. An op is in one queue as long as it is there.
    """

    __slots__ = ("_ghosts", "_main", "_slots", "_small")

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self._slots = slots
        self._small: OrderedDict[str, None] = OrderedDict()
        self._main: OrderedDict[str, None] = OrderedDict()
        self._ghosts = _Ghosts()

    def add(self, op: str) -> None:
        """Add *op* as the newest."""
        queue = self._main if self._ghosts.pop(op) else self._small
        queue[op] = None

    def discard(self, op: str) -> None:
        """Remove *op*, which was not evicted: it stands where it stood if it comes back soon."""
        if op in self._main:
            del self._main[op]
            self._ghosts.add(op)
        else:
            del self._small[op]
            if self._slots[op].used:
                self._ghosts.add(op)

    def evict(self) -> str:
        """Remove an op, and return it."""
        small, main, count = self._small, self._main, len(self._slots)
        if count > self._ghosts.room:  # too few places, or none yet
            self._ghosts = _Ghosts(count - count // _SMALL)
        for _ in range(_MAX_SPARED):
            is_new = len(small) * _SMALL >= count or not main
            op, _ = (small if is_new else main).popitem(last=False)
            slot = self._slots[op]
            if not slot.used:
                if is_new:
                    self._ghosts.add(op)
                return op
            slot.used = False
            main[op] = None
        return (small if len(small) * _SMALL >= count else main).popitem(last=False)[0]
