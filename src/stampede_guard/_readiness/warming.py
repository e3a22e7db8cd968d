"""Warming up: many calls before traffic comes."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Any, Protocol

from .._flights.flight import Flight
from .._flights.waiting import wait_one
from .._operations.operation import Operation
from .._operations.options import count, shown
from ..errors import ConfigurationError

logger = logging.getLogger("stampede_guard")


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up has done so far.

    Attributes:
        loaded: Calls that a load in this process has answered.
        found: Calls that memory, the store or a load in another process has answered.
        failed: Calls that ended in an error.
    """

    loaded: int = 0
    found: int = 0
    failed: int = 0

    @property
    def done(self) -> int:
        """Calls that are over, however they ended."""
        return self.loaded + self.found + self.failed

    def __add__(self, other: "WarmUp") -> "WarmUp":
        return WarmUp(self.loaded + other.loaded, self.found + other.found, self.failed + other.failed)


class Warmable(Protocol):
    """The part of a decorated function that a warm-up uses.

    Attributes:
        guard: Its guard.
    """

    guard: Any
    _operation: Operation

    def _begin(self, calls: Sequence[Any]) -> "Sequence[Flight[Any] | Exception | None]":
        """Return the flight of each call, or its error, or `None` if memory has its answer."""
        ...

    @property
    def _together(self) -> int:
        """How many calls are best begun at once."""
        ...


class RateLimit:
    """Keeps loads to so many a second. A turn is taken before it is known whether the call will load.

    Args:
        rate: Loads a second; `None` sets no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._pause = 0.0 if rate is None else 1 / rate
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.time()
        self._was_given_back = asyncio.Event()

    async def take(self, number: int) -> None:
        """Wait until *number* calls may begin."""
        while (left := self._next - self._loop.time()) > 0:
            self._was_given_back.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._was_given_back.wait()
        self._next = max(self._next, self._loop.time()) + number * self._pause

    def give_back(self, number: int) -> None:
        """Let *number* calls not have counted, because they did not load."""
        self._next -= number * self._pause
        self._was_given_back.set()


async def warm(  # options
    guard: object,
    function: Warmable,
    calls: Iterable[Any],
    *,
    rate: float | None,
    concurrency: int,
    on_progress: Callable[[WarmUp], object] | None,
) -> WarmUp:
    """Make *calls* of *function* by the ordinary path; return how they ended.

    Raises:
        ConfigurationError: *function* is none of *guard*'s, or keeps nothing, or an option breaks its rule.
        GuardClosed: the guard has a store and is not open.
    """
    _check(guard, function, rate, concurrency)
    limit = RateLimit(rate)
    total, running, errors = WarmUp(), set[asyncio.Task[WarmUp]](), set[str]()
    try:
        for batch in _batches(calls, function._together):
            if len(running) >= concurrency:
                total, running = await _collect(total, running, on_progress)
            await limit.take(len(batch))
            running.add(asyncio.create_task(_answered(function, batch, limit, errors), name="warm-up"))
        while running:
            total, running = await _collect(total, running, on_progress)
    finally:
        for task in running:
            task.cancel()
    if total.failed:
        counts = total.failed, total.done, ", ".join(sorted(errors))
        logger.warning("%s: %d of %d calls of a warm-up failed (%s)", function._operation.name, *counts)
    return total


def _check(guard: object, function: Warmable, rate: float | None, concurrency: int) -> None:
    if getattr(function, "guard", None) is not guard or not hasattr(function, "_begin"):
        message = f"warm: give a function that is decorated with this guard, not {function!r}"
        raise ConfigurationError(message)
    policy = function._operation.policy
    if policy.ttl is None and policy.l2_ttl is None:
        message = f"{function._operation.name}: without ttl= and l2_ttl= nothing is kept, so nothing can be warm"
        raise ConfigurationError(message)
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if rate is not None and not (is_number and 0 < rate < inf):
        message = f"rate={shown(rate)}: give loads a second, more than zero, or None"
        raise ConfigurationError(message)
    count("concurrency", concurrency)


def _batches(calls: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(calls)
    while batch := list(islice(rest, size)):
        yield batch


async def _collect(
    total: WarmUp, running: set[asyncio.Task[WarmUp]], on_progress: Callable[[WarmUp], object] | None
) -> tuple[WarmUp, set[asyncio.Task[WarmUp]]]:
    """Wait until some of those that are *running* are over; return the new total, and the others."""
    over, others = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in over:
        total += task.result()
    if on_progress is not None:
        on_progress(total)
    return total, others


async def _answered(function: Warmable, batch: Sequence[Any], limit: RateLimit, errors: set[str]) -> WarmUp:
    """Wait for the answers of a batch; return how its calls ended, and add the types of *errors*."""
    loaded = found = failed = 0
    try:
        flights = function._begin(batch)
    except Exception as error:  # noqa: BLE001  # a call that cannot be made is no reason to stop
        errors.add(type(error).__name__)
        return WarmUp(failed=len(batch))
    for flight in flights:
        try:
            is_loaded = await _is_loaded(flight, function._operation.policy.wait_timeout)
        except Exception as error:  # noqa: BLE001  # nor is one that fails
            errors.add(type(error).__name__)
            failed += 1
            continue
        loaded += is_loaded
        found += not is_loaded
    limit.give_back(len(batch) - loaded - failed)
    return WarmUp(loaded, found, failed)


async def _is_loaded(begun: Flight[Any] | Exception | None, patience: float | None) -> bool:
    """Wait for an answer; return whether a load has given it, or raise its error."""
    if isinstance(begun, Exception):
        raise begun
    if begun is None:
        return False
    await wait_one(begun, patience)
    return begun.loader_called
