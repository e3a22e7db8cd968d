"""What was invalidated or stored lately: a replica may lag behind, so only the primary is asked."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable

_LAG = 5.0  # seconds; a replica that lags by more than one is not asked at all
_LIMIT = 65_536


class RecentInvalidations:
    """Keys invalidated or stored within the last seconds, bounded: when there are too many, all count as such.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._noted: OrderedDict[str, float] = OrderedDict()
        self._all_until = -math.inf

    def note(self, key: str) -> None:
        """Note that *key* was invalidated or stored just now."""
        now = self._clock()
        if len(self._noted) >= _LIMIT:
            self.note_all()
        self._noted[key] = now + _LAG
        self._noted.move_to_end(key)
        while next(iter(self._noted.values())) <= now:
            self._noted.popitem(last=False)

    def note_all(self) -> None:
        """Note that anything may have been."""
        self._all_until = self._clock() + _LAG
        self._noted.clear()

    def has_any(self, keys: Iterable[str]) -> bool:
        """Whether one of *keys* was invalidated or stored lately."""
        now = self._clock()
        return now < self._all_until or any(now < self._noted.get(key, 0.0) for key in keys)
