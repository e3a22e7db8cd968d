"""Invalidations that a store has not confirmed, or may have lost since.

Until an invalidation is confirmed, its process reads and stores no value that it concerns. A confirmed one can still
be lost with its server, before the server that takes over has it. So it is kept for a while, to be repeated.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

_MAX_UNCONFIRMED = 65_536
_REPEAT_WINDOW = 60.0  # seconds that a confirmed one is kept, far longer than replication lags


class Invalidation(NamedTuple):
    """One invalidation.

    Attributes:
        key: Key of the op, or of the tag.
        message: Published on the bus.
        is_tag: Whether the key is a tag's.
        version: The lowest version that is acceptable from now on.
        is_soft: Whether the value stays, as a stale one.
    """

    key: str
    message: bytes
    is_tag: bool
    version: int | None = None
    is_soft: bool = False


class UnconfirmedInvalidations:
    """The invalidations of one event loop, by key, bounded in number.

    Args:
        clock: Monotonic seconds.
        everything: Replaces all others when there are too many; `None` if the store has no tags.

    Attributes:
        lost_at: When there were too many last, and they were forgotten; `None` if never.
    """

    def __init__(self, clock: Callable[[], float], everything: Invalidation | None) -> None:
        self._clock = clock
        self._everything = everything
        self._unconfirmed: dict[str, Invalidation] = {}
        self._confirmed: OrderedDict[str, tuple[float, Invalidation]] = OrderedDict()
        self.lost_at: float | None = None

    def add(self, invalidation: Invalidation) -> None:
        """Note *invalidation* as unconfirmed."""
        if len(self._unconfirmed) >= _MAX_UNCONFIRMED and invalidation.key not in self._unconfirmed:
            if self._everything is None:
                self.lose_all()
            else:
                self._unconfirmed.clear()
                invalidation = self._everything
        # A new object each time, because an answer to an earlier request does not confirm a later one.
        self._unconfirmed[invalidation.key] = _merged(invalidation, self._unconfirmed.get(invalidation.key))

    def lose_all(self) -> None:
        """Forget which are unconfirmed; note the time, because any value may be stale now."""
        self._unconfirmed.clear()
        self.lost_at = self._clock()

    @property
    def is_empty(self) -> bool:
        """Whether none is unconfirmed, or ever was forgotten."""
        return not self._unconfirmed and self.lost_at is None

    def __len__(self) -> int:
        return len(self._unconfirmed)

    def of(self, key: str) -> Invalidation | None:
        """Return the unconfirmed invalidation of *key*."""
        return self._unconfirmed.get(key)

    def concerns(self, keys: Iterable[str]) -> list[Invalidation]:
        """Return the unconfirmed invalidations of *keys*."""
        if not self._unconfirmed:
            return []
        return [self._unconfirmed[key] for key in keys if key in self._unconfirmed]

    def all(self) -> list[Invalidation]:
        """Return all that are unconfirmed."""
        return list(self._unconfirmed.values())

    def confirm(self, invalidation: Invalidation) -> None:
        """Note that the store has confirmed this very request."""
        if self._unconfirmed.get(invalidation.key) is invalidation:
            del self._unconfirmed[invalidation.key]
        now = self._clock()
        _, earlier = self._confirmed.get(invalidation.key, (now, None))
        # A server that loses this one has lost the earlier one too, and with it the lowest version.
        self._confirmed[invalidation.key] = now, _merged(invalidation, earlier)
        self._confirmed.move_to_end(invalidation.key)
        while len(self._confirmed) > _MAX_UNCONFIRMED or next(iter(self._confirmed.values()))[0] < now - _REPEAT_WINDOW:
            self._confirmed.popitem(last=False)

    def repeat(self) -> None:
        """Make all recently confirmed invalidations unconfirmed again."""
        since = self._clock() - _REPEAT_WINDOW
        recent = [invalidation for at, invalidation in self._confirmed.values() if at >= since]
        self._confirmed.clear()
        for invalidation in recent:
            self.add(invalidation)


def _merged(invalidation: Invalidation, earlier: Invalidation | None) -> Invalidation:
    """Return a new object: *invalidation*, or a hard one instead of a soft one, with the higher of both versions."""
    versions = [each.version for each in (invalidation, earlier) if each is not None and each.version is not None]
    if earlier is not None and invalidation.is_soft and not earlier.is_soft:
        invalidation = earlier
    return invalidation._replace(version=max(versions, default=None))
