"""The circuit breaker: stops requests to a node that does not answer.

Closed → open after three failures in a row → half-open when the pause is over: the next request is the probe, and no
other is sent before its outcome. Each failed probe doubles the pause. Only a change of state is logged. After
M. Nygard, "Release It!" (2007).
"""

import logging
from collections.abc import Callable
from random import random
from typing import Literal

State = Literal["closed", "open", "half-open"]

logger = logging.getLogger("stampede_guard")


class Breaker:
    """One node's breaker.

    Args:
        node: The node's name for the log; never a URL, which may hold a password.
        clock: Monotonic seconds.
        threshold: Failures in a row that open it.
        pause: First and longest pause between probes, in seconds, shortened at random by up to a quarter
            so that the processes of a fleet do not probe together.
    """

    __slots__ = ("_clock", "_failures", "_node", "_pause", "_pauses", "_probe_at", "_threshold", "state")

    def __init__(
        self,
        node: str,
        clock: Callable[[], float],
        *,
        threshold: int = 3,
        pause: tuple[float, float] = (0.2, 2.0),
    ) -> None:
        self.state: State = "closed"
        self._node = node
        self._clock = clock
        self._threshold = threshold
        self._pauses = pause
        self._pause = pause[0]
        self._failures = 0
        self._probe_at = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether requests are sent."""
        return self.state == "closed"

    def allows(self) -> bool:
        """Whether the caller may send a request, after which it calls `succeeded`, `failed` or `gave_up`."""
        if self.state == "closed":
            return True
        if self.state == "open" and self._clock() >= self._probe_at:
            self.state = "half-open"
            return True
        return False

    def succeeded(self) -> None:
        """Note an answer."""
        self._failures = 0
        if self.state != "closed":
            self.state = "closed"
            self._pause = self._pauses[0]
            logger.info("%s answers again", self._node)

    def failed(self, reason: str) -> None:
        """Note that there was no answer, and why."""
        self._failures += 1
        if self.state == "half-open":
            self._pause = min(2 * self._pause, self._pauses[1])
            self._open()
        elif self.state == "closed" and self._failures >= self._threshold:
            self.trip(reason)

    def trip(self, reason: str) -> None:
        """Open at once."""
        self._open()
        logger.warning("%s does not answer (%s); going on without it, probing again and again", self._node, reason)

    def gave_up(self) -> None:
        """Note that the request ended without an outcome."""
        if self.state == "half-open":
            self._open()

    def _open(self) -> None:
        self.state = "open"
        self._probe_at = self._clock() + self._pause * (1 - random() / 4)  # noqa: S311  # no secret

    def __repr__(self) -> str:
        return f"<Breaker {self._node} {self.state}>"
