"""Calls to a store: bounded in number, with breakers and logged refusals."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TypeVar

from .._stats import Counters
from ..stores import FAILED_NODE, LOST_TOGETHER, Refused, StoreOverloaded
from ..stores._breaker import Breaker
from ..stores._timeouts import StallTolerantTimeout

T = TypeVar("T")

logger = logging.getLogger("stampede_guard")

_QUEUE_TIMEOUT = 5.0  # seconds that an operation waits for its turn before it is given up
# Seconds without a refusal until it is over: a store that is almost full accepts and refuses by turns.
_ACCEPTED_AFTER = 10.0


class StoreUnavailable(Exception):  # noqa: N818  # control flow of the tier alone
    """The store was not called, or did not answer; already counted."""


class StoreAccess:
    """The queue, the breakers and the refusals of one store.

    Args:
        name: The store's, for logs.
        concurrency: How many operations may run at once.
        clock: Monotonic seconds.
    """

    def __init__(self, name: str, concurrency: int, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._concurrency = concurrency
        self._in_use = 0  # slots
        self._too_long: set[str] = set()  # names of operations
        self._queue: deque[asyncio.Future[None]] = deque()
        self._breakers: dict[str, Breaker] = {}
        self._refusals: dict[str, tuple[str, float]] = {}  # by operation: the reason, and when last

    def breaker(self, node: str) -> Breaker:
        """Return the breaker of *node*."""
        breaker = self._breakers.get(node)
        if breaker is None:
            breaker = self._breakers[node] = Breaker(node, self._clock)
        return breaker

    def open_nodes(self) -> Iterator[str]:
        """Yield the names of the servers that requests are kept from."""
        return (node for node, breaker in self._breakers.items() if not breaker.is_closed)

    def reserve(self, node: str) -> Breaker | None:
        """Return the breaker of *node* if an operation can start at once; `release` it afterwards."""
        breaker = self._breakers.get(node) or self.breaker(node)
        if breaker.state != "closed" or self._in_use >= self._concurrency:
            return None
        self._in_use += 1
        return breaker

    def release(self, verb: str, breaker: Breaker | None) -> None:
        """End an operation for which `reserve` made room; *breaker* is given if it was answered."""
        if self._queue:
            self._leave()
        else:
            self._in_use -= 1
        if breaker is not None:
            self._note_success(verb, breaker)

    async def call(
        self,
        verb: str,
        node: str,
        operation: Callable[[], Awaitable[T]],
        counters: Counters,
        *,
        others: Sequence[str] = (),
        is_forced: bool = False,
        is_urgent: bool = False,
    ) -> T:
        """Run *operation* when it is its turn; record its outcome with the breaker of *node*.

        Args:
            verb: The operation's name, for logs.
            node: Name of the server.
            operation: The call.
            counters: Where outcomes are counted.
            others: Names of further servers that have to answer, as those with the marks of tags.
            is_forced: Whether to call even when the breaker is open, and to wait for a turn as long as it takes.
            is_urgent: Whether to call without a slot, ahead of the queue.

        Raises:
            StoreUnavailable: there was no answer.
        """
        if is_urgent:
            return await self._call_now(verb, (node, *others), operation, counters, is_forced=is_forced)
        await self._enter(counters, is_forced=is_forced)
        try:
            return await self._call_now(verb, (node, *others), operation, counters, is_forced=is_forced)
        finally:
            self._leave()

    async def _enter(self, counters: Counters, *, is_forced: bool) -> None:
        """Take a slot, in the order of arrival: a burst queues here, because the database has fewer connections."""
        if self._in_use < self._concurrency:
            self._in_use += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            async with nullcontext() if is_forced else StallTolerantTimeout(_QUEUE_TIMEOUT):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # the slot came too late
                self._leave()
            turn.cancel()
            if not isinstance(error, TimeoutError):
                raise
            counters.l2_skips += 1
            raise StoreUnavailable from None

    def _leave(self) -> None:
        """Pass the slot on to the next in the queue."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._in_use -= 1

    async def _call_now(
        self,
        verb: str,
        nodes: Sequence[str],
        operation: Callable[[], Awaitable[T]],
        counters: Counters,
        *,
        is_forced: bool,
    ) -> T:
        # After the queue, not before: once a hanging store has opened the breaker, queued operations end at once.
        breakers = [self.breaker(node) for node in nodes]
        if not _all_allow(breakers) and not is_forced:
            counters.l2_skips += 1
            raise StoreUnavailable
        return await self._call_and_record(verb, breakers, operation, counters)

    async def _call_and_record(
        self, verb: str, breakers: Sequence[Breaker], operation: Callable[[], Awaitable[T]], counters: Counters
    ) -> T:
        try:
            answer = await operation()
        except BaseException as error:
            if isinstance(error, Exception):  # drivers raise more than they document
                self.note_failure(verb, breakers[0], error, counters)
            for breaker in breakers:
                breaker.gave_up()  # unless it has an outcome
            if isinstance(error, Exception):
                raise StoreUnavailable from error
            raise
        for breaker in breakers:
            self._note_success(verb, breaker)
        return answer

    def _note_success(self, verb: str, breaker: Breaker) -> None:
        breaker.succeeded()
        if self._refusals:
            self._note_acceptance(verb)

    def note_failure(self, verb: str, breaker: Breaker, error: Exception, counters: Counters) -> None:
        """Count *error*, and record it with the breaker."""
        if isinstance(error, StoreOverloaded):
            counters.l2_skips += 1
            breaker.gave_up()
            return
        counters.l2_errors += 1
        failed = getattr(error, FAILED_NODE, None)
        if failed is not None:
            breaker.succeeded()  # the node of the key has answered, and that of a tag has not
            breaker = self.breaker(failed)
        if isinstance(error, Refused):
            breaker.succeeded()  # a refusal is an answer
            self.note_refusal(verb, str(error))
        elif LOST_TOGETHER in getattr(error, "__notes__", ()):
            breaker.gave_up()  # else one lost connection of many would open it
        else:
            breaker.failed(reason(error))

    def note_refusal(self, verb: str, why: str) -> None:
        """Log that the store refuses *verb*, once for each reason."""
        known, _ = self._refusals.get(verb, ("", 0.0))
        self._refusals[verb] = why, self._clock()
        if known != why:
            logger.warning("%s refuses to %s: %s", self._name, verb, why)

    def note_too_long(self, name: str, size: int, longest: int) -> None:
        """Log that a value is not stored because of its size, once for each operation."""
        if name not in self._too_long:
            self._too_long.add(name)
            logger.warning(
                "%s: a value of %s bytes is larger than max_bytes=%s, so it is not stored",
                name,
                f"{size:,}",
                f"{longest:,}",
            )

    def _note_acceptance(self, verb: str) -> None:
        if verb in self._refusals and self._clock() - self._refusals[verb][1] >= _ACCEPTED_AFTER:
            del self._refusals[verb]
            logger.info("%s accepts to %s again", self._name, verb)


def _all_allow(breakers: Sequence[Breaker]) -> bool:
    """Return whether all *breakers* allow a request; if not, no breaker waits for the outcome of a probe."""
    for position, breaker in enumerate(breakers):
        if not breaker.allows():
            for probed in breakers[:position]:
                probed.gave_up()
            return False
    return True


def reason(error: Exception) -> str:
    """Name *error* without its text, which may quote commands, values and addresses."""
    return type(error).__name__
