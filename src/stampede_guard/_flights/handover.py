"""A second run of a slow loader.

It begins beside the first when that is too old, and the first to succeed wins.
nginx's `proxy_cache_lock_age` lets another request pass to the origin then. Dean and Barroso call it a hedged request
("The Tail at Scale", CACM 56(2), 2013).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

_left_behind: set[asyncio.Task[Any]] = set()  # runs that have lost, until they end: a loop holds tasks weakly


async def first_to_succeed(load: Callable[[], Awaitable[T]], after: float, on_second: Callable[[], object]) -> T:
    """Return what *load* returns; run it a second time if it takes longer than *after* seconds.

    Args:
        load: Begins one run.
        after: Seconds.
        on_second: Called when the second run begins.

    Raises:
        Exception: both runs have failed; it is the first one's error. Or the only run has.
    """
    runs = [asyncio.ensure_future(load())]
    try:
        await asyncio.wait(runs, timeout=after)
        if not runs[0].done():
            on_second()
            runs.append(asyncio.ensure_future(load()))
        pending = set(runs)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for run in done:
                if not run.cancelled() and run.exception() is None:
                    return run.result()
        return runs[0].result()
    finally:
        for run in runs:
            if run.cancel():
                _left_behind.add(run)
            run.add_done_callback(_forget)


def _forget(run: "asyncio.Future[Any]") -> None:
    """Take note of the outcome of a run that has lost, so that asyncio does not complain of it."""
    _left_behind.discard(run)
    if not run.cancelled():
        run.exception()
