"""Pauses between loads of one op that fail.

When the database is down, each arrival would begin a load that fails. So a failure begins a pause, and each further
failure a longer one: 1, 2, 4, 8 … seconds. With leases the store keeps the pause for the whole cluster, in place of the
lease; see `stores/_redis/scripts.py`. This is what one event loop knows of it.
"""

from collections.abc import Callable
from math import inf
from random import random
from typing import NamedTuple

from ..errors import RecentFailure
from .failure import bare_copy

FIRST_PAUSE = 1.0  # seconds after the first failure; each further failure doubles them
REMEMBERED = 60.0  # seconds after a pause within which another failure counts as the next
_RECHECK = 1.0  # seconds after which the store is asked whether a pause is over
_ROOM = 4096  # pauses that are remembered
_SPREAD = 0.1  # part by which a pause is lengthened at random: loads that failed together must not begin together


class Pause(NamedTuple):
    """What is known of the failures of one op.

    Attributes:
        failures: How many there were.
        ends_at: Instant from which on another load may begin.
        recheck_at: Instant from which on the store may know better.
        kind: Name of the error's type.
        error: A copy of the error; `None` if the load was another process's.
        may_be_stored: Whether the store may have an old value.
    """

    failures: int
    ends_at: float
    recheck_at: float
    kind: str
    error: Exception | None
    may_be_stored: bool = False


class Pauses:
    """The pauses that one event loop knows of.

    Args:
        clock: Monotonic seconds.
    """

    __slots__ = ("_clock", "_pauses")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pauses: dict[str, Pause] = {}

    def note_failure(
        self, op: str, error: Exception, longest: float, *, is_stored: bool = False, may_be_stored: bool = False
    ) -> float:
        """Begin the next pause of *op*, whose load failed with *error*; return its seconds, about *longest* at most.

        If the pause *is_stored*, the store is asked once a second whether another process has ended it. An old value
        *may_be_stored*.
        """
        last = self._pauses.get(op)
        failures = 0 if last is None or self._clock() > last.ends_at + REMEMBERED else last.failures
        seconds = min(FIRST_PAUSE * 2.0**failures, longest) * (1 + _SPREAD * random())  # noqa: S311  # no secret
        now, longest_wait = self._clock(), _RECHECK if is_stored else inf
        kind, copied = type(error).__name__, bare_copy(error)
        recheck_at = now + min(seconds, longest_wait)
        self._note(op, Pause(failures + 1, now + seconds, recheck_at, kind, copied, may_be_stored))
        return seconds

    def note_told(self, op: str, seconds: float, kind: str, *, may_be_stored: bool = False) -> None:
        """Note that *op* pauses for *seconds*, as the store tells, after an error whose type has the name *kind*."""
        last = self._pauses.get(op)
        error = None if last is None or last.kind != kind else last.error
        failures = 1 if last is None else last.failures
        now = self._clock()
        self._note(op, Pause(failures, now + seconds, now + min(seconds, _RECHECK), kind, error, may_be_stored))

    def _note(self, op: str, pause: Pause) -> None:
        if op not in self._pauses and len(self._pauses) >= _ROOM:
            del self._pauses[next(iter(self._pauses))]
        self._pauses[op] = pause

    def is_on(self, op: str) -> bool:
        """Whether no load of *op* may begin now."""
        pause = self._pauses.get(op)
        return pause is not None and self._clock() < pause.recheck_at

    def lasts(self, op: str) -> bool:
        """Whether no load of *op* may begin that the store has not granted."""
        pause = self._pauses.get(op)
        return pause is not None and self._clock() < pause.ends_at

    def may_be_stored(self, op: str) -> bool:
        """Whether the store may have an old value of *op*, which pauses."""
        return self._pauses[op].may_be_stored

    def forget(self, op: str) -> None:
        """Let a load of *op* begin, as if none had failed."""
        self._pauses.pop(op, None)

    def forget_all(self) -> None:
        """Let loads of all ops begin."""
        self._pauses.clear()

    def error(self, op: str) -> RecentFailure:
        """Return the error of a call during the pause of *op*."""
        pause = self._pauses[op]
        left = max(pause.ends_at - self._clock(), 0.0)
        message = f"{op}: the load failed with {pause.kind} a moment ago; the next may begin in {left:.1f} s"
        failure = RecentFailure(message, retry_after=left)
        failure.__cause__ = None if pause.error is None else bare_copy(pause.error)
        return failure
