"""Waiting for flights, and the graph of loads that wait.

A load that calls a coalesced function waits for another flight. `Flight.awaits` has these waits, so flights form a
graph. A circle in it would never end, so its waiter is woken with `RecursiveLoad`. And a flight that is waited for by a
load with a slot leaves the limiter's queue.
"""

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from .._stats import Counters
from ..errors import Overloaded, RecursiveLoad, StampedeGuardError, WaitTimeout
from .awaited import is_awaited_by
from .flight import LANDED, RELEASED, Flight, Wait, current_flight, running_flight

T = TypeVar("T")

_GAVE_UP = "gave up"  # what a timeout wakes a waiter with; a circle wakes it with the text of its error
_CHECKS = (0.05, 1.0)  # seconds between checks whether a wait is part of a circle, first and longest


async def wait_one(
    flight: Flight[T],
    timeout: float | None = None,  # noqa: ASYNC109  # one waiter's, not the load's
    *,
    takes_old: bool = True,
) -> T:
    """Wait for the answer of *flight*, at most *timeout* seconds; leaving disturbs no other waiter.

    If the caller *takes_old* values, the answer is one where the flight is released with it, or has failed.

    Raises:
        WaitTimeout: the time ran out.
        RecursiveLoad: the calling loader would wait for itself.
        LoadError: the flight ended without an answer.
        Exception: the loader's own error, an object of this waiter's own.
    """
    waiter = flight.join(takes_old=takes_old)
    if waiter is not None:  # few names: ten thousand waiters have as many of each
        outer = None if current_flight.get() is None else _begin_wait(waiter, flight)
        timer = None if timeout is None else flight.loop.call_later(timeout, _give_up, (waiter,))
        try:
            woken = await waiter
            if woken is RELEASED:
                return cast("T", flight.interim.kept)
            if woken is not LANDED:
                return _old_or_error(flight, waiter, timeout, takes_old=takes_old)
        finally:
            flight.leave(waiter)
            if outer is not None:
                _end_wait(waiter, outer)
            if timer is not None:
                timer.cancel()
    return flight.answer(takes_old=takes_old)


async def wait_all(
    flights: Sequence[Flight[Any]],
    timeout: float | None = None,  # noqa: ASYNC109
    *,
    takes_old: bool = True,
) -> list[Any]:
    """Wait for several flights as `wait_one` does for one; return their answers.

    Raises:
        Exception: the error of the first that failed, in their order; the others are left.
    """
    released: dict[Flight[Any], Any] = {}
    with _joined(flights, takes_old=takes_old) as joined:
        timer = None
        if timeout is not None:
            timer = asyncio.get_running_loop().call_later(timeout, _give_up, tuple(joined))
        try:
            for waiter, flight in joined.items():
                woken = await waiter
                if woken is RELEASED:
                    released[flight] = flight.interim.kept
                elif woken is not LANDED:
                    released[flight] = _old_or_error(flight, waiter, timeout, takes_old=takes_old)
                elif flight.has_failed(takes_old=takes_old):
                    break
        finally:
            if timer is not None:
                timer.cancel()
    return [released[flight] if flight in released else flight.answer(takes_old=takes_old) for flight in flights]


def check_room(flight: Flight[Any], max_waiters: int, counters: Counters) -> None:
    """Check that a call may wait for *flight*; a load that holds a slot always may.

    Raises:
        Overloaded: *max_waiters* others wait for it.
    """
    if flight.present < max_waiters or flight.landed:
        return
    outer = running_flight()
    if outer is not None and outer.skips_queue:
        return
    counters.overloaded += 1
    message = (
        f"{flight.op}: {flight.present} callers wait for its load, and max_waiters={max_waiters} allows no more; "
        "try again later"
    )
    raise Overloaded(message)


@contextmanager
def _joined(flights: Sequence[Flight[Any]], *, takes_old: bool) -> Generator[dict[Any, Flight[Any]]]:
    """Join those that are up, all at once, because a flight without waiters may be abandoned."""
    joined: dict[Any, Flight[Any]] = {}
    outer: Flight[Any] | None = None
    try:
        for flight in flights:
            waiter = flight.join(takes_old=takes_old)
            if waiter is not None:
                joined[waiter] = flight
                outer = _begin_wait(waiter, flight)
                if waiter.done():
                    raise _without_answer(flight, waiter, None)
        yield joined
    finally:
        for waiter, flight in joined.items():
            flight.leave(waiter)
            if outer is not None:
                _end_wait(waiter, outer)


def _give_up(waiters: Sequence[asyncio.Future[str]]) -> None:
    for waiter in waiters:
        if not waiter.done():  # its caller was cancelled in this very tick
            waiter.set_result(_GAVE_UP)


def _old_or_error(flight: Flight[T], waiter: asyncio.Future[str], timeout: float | None, *, takes_old: bool) -> T:
    """Return the old value that is the answer to a *waiter* that was woken before the landing, or raise its error."""
    error = _without_answer(flight, waiter, timeout)
    replaced = flight.replace_timeout(error) if takes_old and isinstance(error, WaitTimeout) else None
    if replaced is None:
        raise error
    return replaced[0]


def _without_answer(flight: Flight[Any], waiter: asyncio.Future[str], timeout: float | None) -> StampedeGuardError:
    """Return the error of a *waiter* that was woken before the landing."""
    why = waiter.result()
    if why is _GAVE_UP:
        return WaitTimeout(f"{flight.op}: no answer within wait_timeout={timeout:g} s")
    return RecursiveLoad(why)


def _begin_wait(waiter: asyncio.Future[str], flight: Flight[Any]) -> Flight[Any] | None:
    """Note that the running load, if there is one, waits for *flight*; return that load's flight."""
    outer = running_flight()
    if outer is None:
        return None
    if outer.skips_queue:  # even if it was aborted, while it cleans up
        skip_queue(flight)
    if outer.landed:
        return None
    outer.awaits[waiter] = Wait(flight, asyncio.current_task())
    _check_for_circle(outer, waiter)
    return outer


def _end_wait(waiter: asyncio.Future[str], outer: Flight[Any]) -> None:
    check = outer.awaits.pop(waiter).check
    if check is not None:
        check.cancel()


def _check_for_circle(outer: Flight[Any], waiter: asyncio.Future[str], pause: float = 0.0) -> None:
    """Wake *waiter* if the load of *outer* waits for it, and what it waits for waits for that load.

    The load need not wait for a task that it has started, or not yet. So where that is not seen, there is another
    check later.
    """
    wait = outer.awaits[waiter]
    flight = wait.flight
    if waiter.done() or not leads_to(flight, outer):
        return
    if waits_for(outer, wait.task) and leads_to(flight, outer, is_certain=True):
        through = "" if flight is outer else f", through {outer.op}"
        waiter.set_result(f"{flight.op}: its loader waits for itself{through}")
    else:
        shortest, longest = _CHECKS
        later = min(max(2 * pause, shortest), longest)
        wait.check = outer.loop.call_later(pause, _check_for_circle, outer, waiter, later)


def waits_for(flight: Flight[Any], task: "asyncio.Task[Any] | None") -> bool:
    """Whether the load of *flight* is seen to wait for *task*, or is that task."""
    own = flight.own_task
    return task is not None and own is not None and is_awaited_by(task, own)


def leads_to(flight: Flight[Any], other: Flight[Any], *, is_certain: bool = False) -> bool:
    """Whether the load of *flight* waits, directly or through others, for *other*.

    Args:
        flight: Where the path begins.
        other: Where it may end.
        is_certain: Whether only waits count that the loads are seen to wait for.
    """
    ahead: list[Flight[Any]] = [flight]
    seen = {flight}  # loads that share sub-loads have exponentially many paths
    while ahead and other not in seen:
        each = ahead.pop()
        waits = () if each.landed else each.awaits.values()
        new = {wait.flight for wait in waits if not is_certain or wait.task is None or waits_for(each, wait.task)}
        new -= seen
        seen |= new
        ahead += new
    return other in seen


def skip_queue(flight: Flight[Any]) -> None:
    """Take *flight*, and all flights that it waits for, out of the limiters' queues.

    This is priority inheritance: a load that holds a slot waits for *flight*.
    """
    ahead: list[Flight[Any]] = [flight]
    while ahead:
        each = ahead.pop()
        # Another loop's is left alone: its futures are not this thread's to touch.
        if each.skips_queue or each.loop is not flight.loop:
            continue
        each.skips_queue = True
        if each.queue_slot is not None and not each.queue_slot.done():
            each.queue_slot.set_result(False)
        ahead += [wait.flight for wait in each.awaits.values()]
