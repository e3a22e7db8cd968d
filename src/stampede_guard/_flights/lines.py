"""Lines: the loads of one operation or partition at a limiter.

A limiter serves the line that holds the fewest slots first, and lines that hold as many in turn. So slots are shared
evenly between lines, however many loads each of them has waiting, and however long its loads take. Turns alone would
give a line of slow loads most of the slots, because it keeps each slot for longer.
"""

import asyncio
from collections import OrderedDict
from typing import TypeAlias

# Of a load in a limiter's queue. Done with whether it has a slot, or with why it is refused.
Place: TypeAlias = "asyncio.Future[bool | str]"


class Line:
    """The loads of one operation, or of one partition.

    Attributes:
        name: The operation or the partition.
        held: How many of its loads have a slot.
        waiting: The places of those that wait, in order of arrival. A load that leaves early is not searched for.
    """

    __slots__ = ("held", "name", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.held = 0
        self.waiting: OrderedDict[Place, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Line {self.name}: {self.held} slots, {len(self.waiting)} waiting>"


class RankedLines:
    """Lines by a number of theirs; those with the same number in the order in which they got it.

    Adding and removing take the same time for any number of lines. Finding an end takes the smallest of the numbers
    that occur. These are few: lines that hold 1,000 slots in all have at most 45 different numbers of slots.
    """

    __slots__ = ("_by_rank",)

    def __init__(self) -> None:
        self._by_rank: dict[int, OrderedDict[Line, None]] = {}

    def add(self, line: Line, rank: int) -> None:
        """Add *line* behind those of the same *rank*."""
        self._by_rank.setdefault(rank, OrderedDict())[line] = None

    def remove(self, line: Line, rank: int) -> None:
        """Remove *line*, which was added with that *rank*."""
        lines = self._by_rank[rank]
        del lines[line]
        if not lines:
            del self._by_rank[rank]

    def lowest(self) -> Line | None:
        """Return the first of those with the lowest rank."""
        return next(iter(self._by_rank[min(self._by_rank)])) if self._by_rank else None

    def highest(self) -> Line | None:
        """Return the first of those with the highest rank."""
        return next(iter(self._by_rank[max(self._by_rank)])) if self._by_rank else None
