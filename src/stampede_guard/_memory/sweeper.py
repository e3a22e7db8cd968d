"""The sweeper: removes entries that are over.

An entry that no caller asks for any more would stay in memory otherwise. A heap of all instants would take more memory
than the entries do. So the sweeper waits for the earliest instant that it knows of, passes over all entries, a few in
each step, and learns the next instant. A step takes less than a millisecond; steps and passes keep their distance.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context
from math import inf
from weakref import ref

from .entries import Entries

STEP = 250  # entries that one step looks at
_STEP_PAUSE = 0.01  # seconds between two steps
_PASS_PAUSE = 1.0  # seconds between two passes, and so the time that an entry of a small memory is removed too late
_LONGEST_PAUSE = 3600.0  # seconds that a timer runs at most


class Sweeper:
    """Removes what is over from *entries*, in steps, as long as there is something that will be.

    Args:
        entries: The entries of one event loop.
        clock: Monotonic seconds, in which the entries' instants are.
        loop: Weak reference to the event loop; without one, steps are the caller's to make.

    Attributes:
        due: Instant before which nothing is over, except what a pass is about to find.
    """

    __slots__ = ("__weakref__", "_clock", "_entries", "_left", "_loop", "_timer", "due")

    def __init__(
        self, entries: Entries, clock: Callable[[], float], loop: "ref[asyncio.AbstractEventLoop] | None"
    ) -> None:
        self.due = inf
        self._entries = entries
        self._clock = clock
        self._loop = loop
        self._left = 0  # entries that the present pass has not looked at
        self._timer: Callable[[], asyncio.TimerHandle | None] | None = None  # weak if it can be: it holds the loop

    def note(self, until: float) -> None:
        """Note that an entry is over at the instant *until*, which is before `due`."""
        self.due = until
        if not self._left:  # a pass goes on by itself, and then waits for what is due next
            self._arm(self._pause(self._clock()))

    def step(self) -> float | None:
        """Look at a few entries; return the seconds until the next step, or `None` if nothing will ever be over."""
        entries, now = self._entries, self._clock()
        if not self._left:
            if now < self.due:
                return self._pause(now)
            self.due, self._left = inf, len(entries.ops)
        for _ in range(min(self._left, STEP)):
            # From the last to the first: what is removed leaves its place to the last one, which was looked at.
            self._left = min(self._left, len(entries.ops)) - 1
            if self._left < 0:  # a destructor has emptied the memory
                break
            op = entries.ops[self._left]
            until = entries.slots[op].stale_until
            if until <= now:
                entries.expire(op)
            elif until < self.due:
                self.due = until
        self._left = max(self._left, 0)
        return _STEP_PAUSE if self._left else self._pause(now)

    def close(self) -> None:
        """Cancel the timer."""
        timer = None if self._timer is None else self._timer()
        if timer is not None:
            timer.cancel()
        self._timer = None

    def _pause(self, now: float) -> float | None:
        return None if self.due == inf else min(max(self.due - now, _PASS_PAUSE), _LONGEST_PAUSE)

    def _arm(self, pause: float | None) -> None:
        loop = None if self._loop is None else self._loop()
        self.close()
        if loop is None or pause is None or loop.is_closed():
            return
        # A clean context, or the timer would keep that of the caller that happened to arm it; and no strong reference,
        # or it would keep a memory that is otherwise gone.
        swept: ref[Sweeper] = ref(self)
        timer = loop.call_later(pause, _on_timer, swept, context=Context())
        try:
            self._timer = ref(timer)
        except TypeError:  # rloop's timers allow no weak references
            self._timer = lambda: timer

    def run(self) -> None:
        """Make the step that is due, and arm the timer for the next one."""
        self._timer = None
        self._arm(self.step())


def _on_timer(swept: "ref[Sweeper]") -> None:
    sweeper = swept()
    if sweeper is not None:
        sweeper.run()
