"""How often each op was invalidated: a load whose epoch has passed may not store.

A flight takes its op's epoch before it reads anything, and compares before it stores.
Without that, a value read before an invalidation could be put back after it.
"""

from collections.abc import Sequence
from itertools import count


class Generation:
    """One definition of a function: what is remembered of it ends with it.

    Attributes:
        is_over: Whether the function was defined anew.
    """

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


class Lineage:
    """The definitions that one function has had; those that still live share the last generation.

    Attributes:
        generation: The last.
    """

    __slots__ = ("generation",)

    def __init__(self) -> None:
        self.generation = Generation()

    def start_generation(self) -> None:
        """Let nothing that was remembered, or is being loaded, be an answer any more."""
        self.generation.is_over = True
        self.generation = Generation()


_LIMIT = 65_536
_TAG = "\0tag:"  # tags are counted among the ops, under names that no op has


class Epochs:
    """The number of each op's last invalidation, bounded: when full, all ops move on together.

    Numbers are drawn from one counter, since `+= 1` in two threads at once could count two invalidations as one.
    """

    __slots__ = ("_all", "_limit", "_numbers", "_ops")

    def __init__(self, limit: int = _LIMIT) -> None:
        self._all = 0
        self._ops: dict[str, int] = {}
        self._limit = limit
        self._numbers = count(1)

    def current(self, op: str, tags: Sequence[str] = ()) -> tuple[int, ...]:
        """Return the present epoch of *op* and of its tags, to be compared for equality only."""
        get = self._ops.get
        if not tags:
            return self._all, get(op, 0)
        return self._all, get(op, 0), *(get(_TAG + tag, 0) for tag in tags)

    def bump(self, op: str) -> None:
        """Begin a new epoch of *op*."""
        if len(self._ops) >= self._limit and op not in self._ops:
            self.bump_all()  # safe: loads under way lose the right to store, nothing else
        self._ops[op] = next(self._numbers)

    def bump_tag(self, tag: str) -> None:
        """Begin a new epoch of every op that has *tag*."""
        self.bump(_TAG + tag)

    def bump_all(self) -> None:
        """Begin a new epoch of every op."""
        self._all = next(self._numbers)
        self._ops.clear()
