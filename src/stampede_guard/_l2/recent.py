"""Keys that changed recently: reads of them bypass the replicas."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable

_REPLICA_LAG = 5.0  # seconds; a replica with a lag of more than one serves no reads at all
_MAX_RECENT = 65_536


class RecentInvalidations:
    """Keys that were invalidated or stored in the last seconds. When there are too many, all keys count as recent.

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
        if len(self._noted) >= _MAX_RECENT:
            self.note_all()
        self._noted[key] = now + _REPLICA_LAG
        self._noted.move_to_end(key)
        while next(iter(self._noted.values())) <= now:
            self._noted.popitem(last=False)

    def note_all(self) -> None:
        """Note that any key may have been."""
        self._all_until = self._clock() + _REPLICA_LAG
        self._noted.clear()

    def has_any(self, keys: Iterable[str]) -> bool:
        """Whether one of *keys* was invalidated or stored lately."""
        now = self._clock()
        return now < self._all_until or any(now < self._noted.get(key, 0.0) for key in keys)
