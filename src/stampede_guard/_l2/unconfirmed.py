"""Invalidations on their way: those that a store has not confirmed yet, and those that it may have lost since.

Until an invalidation is confirmed, its process reads and stores nothing of what it concerns. One that is
confirmed can still be lost with the server that confirmed it, before its successor heard of it; so for a
while it is kept, to be said again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

_LIMIT = 65_536
_MEMORY = 60.0  # seconds that a confirmed one is kept: far longer than replication lags


class Invalidation(NamedTuple):
    """One invalidation.

    Attributes:
        key: Key of the op, or of the tag.
        message: What the bus is told.
        is_tag: Which of the two it is.
        version: The lowest version that is acceptable from now on.
    """

    key: str
    message: bytes
    is_tag: bool
    version: int | None = None


class UnconfirmedInvalidations:
    """The invalidations of one event loop, by key, bounded in number.

    Args:
        clock: Monotonic seconds.
        everything: What takes their place when there are too many; `None` if the store cannot do that.
    """

    def __init__(self, clock: Callable[[], float], everything: Invalidation | None) -> None:
        self._clock = clock
        self._everything = everything
        self._waiting: dict[str, Invalidation] = {}
        self._confirmed: OrderedDict[str, tuple[float, Invalidation]] = OrderedDict()
        self.lost_at: float | None = None
        """When too many were waiting, and some had to be forgotten; `None` if never."""

    def add(self, invalidation: Invalidation) -> None:
        """Note that *invalidation* was asked for."""
        if len(self._waiting) >= _LIMIT and invalidation.key not in self._waiting:
            if self._everything is None:
                self.lose_all()
            else:
                self._waiting.clear()
                invalidation = self._everything
        # A new object each time: an answer to an earlier request does not confirm a later one.
        self._waiting[invalidation.key] = _merged(invalidation, self._waiting.get(invalidation.key))

    def lose_all(self) -> None:
        """Forget what is waiting, and that it is not known: everything may be old."""
        self._waiting.clear()
        self.lost_at = self._clock()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is waiting, or ever was lost."""
        return not self._waiting and self.lost_at is None

    def of(self, key: str) -> Invalidation | None:
        """Return what is waiting for *key*."""
        return self._waiting.get(key)

    def concerns(self, keys: Iterable[str]) -> list[Invalidation]:
        """Return what is waiting for any of *keys*."""
        if not self._waiting:
            return []
        return [self._waiting[key] for key in keys if key in self._waiting]

    def all(self) -> list[Invalidation]:
        """Return all that are waiting."""
        return list(self._waiting.values())

    def confirm(self, invalidation: Invalidation) -> None:
        """Note that the store has confirmed this very request."""
        if self._waiting.get(invalidation.key) is invalidation:
            del self._waiting[invalidation.key]
        now = self._clock()
        _, earlier = self._confirmed.get(invalidation.key, (now, None))
        # The server that loses this one has lost the earlier one too, and with it the lowest version.
        self._confirmed[invalidation.key] = now, _merged(invalidation, earlier)
        self._confirmed.move_to_end(invalidation.key)
        while len(self._confirmed) > _LIMIT or next(iter(self._confirmed.values()))[0] < now - _MEMORY:
            self._confirmed.popitem(last=False)

    def repeat(self) -> None:
        """Ask again for whatever was confirmed lately."""
        since = self._clock() - _MEMORY
        recent = [invalidation for at, invalidation in self._confirmed.values() if at >= since]
        self._confirmed.clear()
        for invalidation in recent:
            self.add(invalidation)


def _merged(invalidation: Invalidation, earlier: Invalidation | None) -> Invalidation:
    """Return a new object that asks for *invalidation*, and for the version of *earlier* if that is higher."""
    versions = [each.version for each in (invalidation, earlier) if each is not None and each.version is not None]
    return invalidation._replace(version=max(versions, default=None))
