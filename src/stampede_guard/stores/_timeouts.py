"""A timeout that does not count the event loop's own delays."""

import asyncio
from types import TracebackType
from typing import Self

_STEPS = 8  # an answer takes some iterations of the loop: to be sent, to be read, to wake its task
_MAX_STALLS = 16


class StallTolerantTimeout:
    """Ends its block with `TimeoutError` after *duration* seconds in which the event loop was on time.

    While the loop is busy, the answer of a healthy server waits in the socket. A plain timer would fire before that
    answer is read, the server would count as dead, and an overloaded service would bypass its cache and hit its
    database. So the timeout passes in steps, and a step that is late by more than its length does not count. At most
    sixteen steps are not counted, since a loop may be late for ever.

    Args:
        duration: Seconds.
    """

    __slots__ = ("_due_at", "_loop", "_stalls_left", "_step", "_steps_left", "_timeout", "_timer")

    def __init__(self, duration: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self.restart(duration)

    def restart(self, duration: float) -> None:
        """Begin again, with *duration* seconds."""
        self._step = duration / _STEPS
        self._steps_left = _STEPS
        self._stalls_left = _MAX_STALLS
        self._schedule()

    def _schedule(self) -> None:
        self._cancel()
        self._due_at = self._loop.time() + self._step
        self._timer = self._loop.call_at(self._due_at, self._tick)

    def _tick(self) -> None:
        is_late = self._loop.time() - self._due_at > self._step
        if is_late and self._stalls_left:
            self._stalls_left -= 1
        else:
            self._steps_left -= 1
        if self._steps_left:
            self._schedule()
        else:
            self._timeout.reschedule(self._loop.time())

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cancel()
        await self._timeout.__aexit__(kind, error, traceback)
