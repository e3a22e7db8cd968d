"""A limit on loads that follows what their backend can bear.

By Little's law, a backend that runs N loads at a time takes no longer for each until there are more than N. So the
limit rises while loads take as long as they usually do, and falls when they take longer. It rises by one and falls by
a tenth, as the window of TCP does when packets are lost ("Congestion Avoidance and Control", Jacobson, 1988); until it
falls for the first time, it doubles.

What is compared is the mean of a window of loads with the usual mean, as in Netflix's `Gradient2Limit`
(github.com/Netflix/concurrency-limits). There the usual mean is that of the last 600 loads, so within seconds an
overloaded backend is usually slow. Here it follows shorter means only, unless the limit is at its lower end: where
loads take longer although few run, the backend itself has become slower.
"""

from .._operations.options import AdaptiveLimit

_LEAST_LOADS = 10  # in a window, and as many as the limit allows, if that is more
_TOLERANCE = 2.0  # times the usual duration; no more is no sign of a queue
_STEEPEST, _FLATTEST = 0.5, 0.9  # what a window of long loads multiplies the limit by
_WEIGHT = 0.25  # of a window in the usual duration


class LearntLimit:
    """How many loads may run, learnt from how long they take.

    Args:
        bounds: Between which the limit stays.
    """

    __slots__ = ("_bounds", "_has_fallen", "_limit", "_loads", "_most", "_total", "_usual")

    def __init__(self, bounds: AdaptiveLimit) -> None:
        self._bounds = bounds
        self._limit = float(bounds.min)
        self._has_fallen = False
        self._usual: float | None = None  # seconds; unknown until the first window is over
        # Of the window: how many loads have ended, their seconds, and how many ran together.
        self._loads, self._total, self._most = 0, 0.0, 0

    @property
    def slots(self) -> int:
        """How many loads may run now."""
        return int(self._limit)

    def note(self, duration: float, running: int, *, has_failed: bool) -> None:
        """Learn from a load.

        A load that has failed may have done nothing, so that a short time tells nothing. It counts only if it has taken
        longer than loads usually do, as one that was cut off by its `load_timeout`.

        Args:
            duration: Seconds that it took.
            running: How many ran when it ended, itself included.
            has_failed: Whether it ended with an error.
        """
        if has_failed and (self._usual is None or duration <= _TOLERANCE * self._usual):
            return
        self._loads += 1
        self._total += duration
        self._most = max(self._most, running)
        if self._loads >= max(_LEAST_LOADS, self.slots):
            self._end_window(self._total / self._loads, self._most)
            self._loads, self._total, self._most = 0, 0.0, 0

    def _end_window(self, mean: float, most: int) -> None:
        usual = mean if self._usual is None else self._usual
        is_lowest = self._limit <= self._bounds.min
        if mean < usual or is_lowest:
            usual += (mean - usual) * _WEIGHT
        self._usual = usual
        if mean > _TOLERANCE * usual:
            self._has_fallen = not is_lowest  # from there it doubles again
            slope = max(_STEEPEST, min(_FLATTEST, _TOLERANCE * usual / mean))
            self._limit = max(self._limit * slope, self._bounds.min)
        elif most >= self.slots:  # else it is not the limit that bounds them
            self._limit = min(self._limit + (1 if self._has_fallen else self._limit), self._bounds.max)

    def __repr__(self) -> str:
        usual = "" if self._usual is None else f", usually {self._usual:.3g} s a load"
        return f"<LearntLimit {self.slots}{usual}>"
