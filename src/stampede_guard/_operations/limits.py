"""How many loads may run and wait, as users say it."""

from dataclasses import dataclass
from typing import cast

from ..errors import ConfigurationError
from .options import AdaptiveLimit, Duration, MaxLoads, count, seconds

_NEEDS_MAX_LOADS = "needs max_loads=: without it, no load waits for a slot"


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """The limits of a guard or of an operation on its loads, checked.

    Attributes:
        max_loads: How many may run at once, per event loop; `None` sets no limit.
        max_queued: How many may wait for a slot; `None` sets no limit.
        queue_timeout: Seconds that each may wait for its slots; `None` sets no limit.
    """

    max_loads: MaxLoads | None = None
    max_queued: int | None = None
    queue_timeout: float | None = None

    def __post_init__(self) -> None:
        """Check them, and turn a `timedelta` into seconds.

        Raises:
            ConfigurationError: one breaks its rule.
        """
        if self.max_loads is not None and not isinstance(self.max_loads, AdaptiveLimit):
            count("max_loads", self.max_loads)
        if self.max_queued is not None:
            count("max_queued", self.max_queued, zero=True)
        if self.queue_timeout is not None:
            object.__setattr__(self, "queue_timeout", seconds("queue_timeout", self.queue_timeout))

    @classmethod
    def of_guard(
        cls, max_loads: MaxLoads | None, max_queued: int | None, queue_timeout: Duration | None
    ) -> "LoadLimits":
        """Return the limits of a guard.

        Raises:
            ConfigurationError: one breaks its rule.
        """
        limits = cls(max_loads, max_queued, cast("float | None", queue_timeout))  # the check makes them seconds
        limits.check_together()
        if limits.max_loads is None and limits.queue_timeout is not None:
            message = f"queue_timeout={limits.queue_timeout:g} {_NEEDS_MAX_LOADS}"
            raise ConfigurationError(message)
        return limits

    def check_together(self) -> None:
        """Check that there is a queue to limit.

        Raises:
            ConfigurationError: there is none.
        """
        if self.max_queued is not None and self.max_loads is None:
            message = f"max_queued={self.max_queued} {_NEEDS_MAX_LOADS}"
            raise ConfigurationError(message)

    def check_timeout(self, name: str, guard: "LoadLimits") -> None:
        """Check that the loads of an operation whose waiting is limited may have to wait.

        Args:
            name: The operation.
            guard: The limits of its guard.

        Raises:
            ConfigurationError: nothing limits them.
        """
        if self.queue_timeout is not None and self.max_loads is None and guard.max_loads is None:
            message = f"{name}: queue_timeout={self.queue_timeout:g} {_NEEDS_MAX_LOADS}; of the guard is enough"
            raise ConfigurationError(message)
