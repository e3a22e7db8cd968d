"""A deadline that does not blame others for this process's own delays."""

import asyncio
from types import TracebackType
from typing import Self

_STEPS = 8  # an answer takes some iterations of the loop: to be sent, to be read, to wake its task
_STALLS = 16


class StallTolerantTimeout:
    """Ends its block with `TimeoutError` after *duration* seconds in which the event loop was on time.

    While the loop is busy elsewhere, the answer of a healthy server lies in the socket. A plain timer would be due
    before that answer is read: the server would be taken for dead because its client is slow, and a service at its
    limit would turn from its cache to its database. So the deadline passes in steps, and a step that comes later
    than it is long does not count; at the most sixteen do not, since a loop may be late for ever.

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
        """Give what comes now *duration* seconds."""
        self._step = duration / _STEPS
        self._steps_left = _STEPS
        self._stalls_left = _STALLS
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
