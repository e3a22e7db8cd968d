"""How a store is asked: in turn, through the breaker of its node, and with an eye on refusals."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from .._stats import Counters
from ..stores import LOST_TOGETHER, Refused, StoreOverloaded
from ..stores._breaker import Breaker
from ..stores._timeouts import StallTolerantTimeout

T = TypeVar("T")

logger = logging.getLogger("stampede_guard")

_QUEUE = 5.0  # seconds that an operation waits for its turn before it is given up
_CALM = 10.0  # seconds without a refusal until it is over: a store that is almost full says yes and no by turns


class StoreUnavailable(Exception):  # noqa: N818  # control flow of the tier alone
    """The store was not asked, or did not answer; already counted."""


class StoreAccess:
    """The queue, the breakers and the refusals of one store.

    Args:
        name: The store's, for logs.
        concurrency: How many may ask at once.
        clock: Monotonic seconds.
    """

    def __init__(self, name: str, concurrency: int, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self._begun = 0  # questions that were put without a slot; there may be as many of them
        self._breakers: dict[str, Breaker] = {}
        self._refusals: dict[str, tuple[str, float]] = {}  # by what the store was asked to do: why not, and when last

    def breaker(self, node: str) -> Breaker:
        """Return the breaker of *node*."""
        breaker = self._breakers.get(node)
        if breaker is None:
            breaker = self._breakers[node] = Breaker(node, self._clock)
        return breaker

    def begin(self, node: str) -> Breaker | None:
        """Return the breaker of *node* if a question can be put without waiting; when it is answered, `end` it."""
        breaker = self._breakers.get(node) or self.breaker(node)
        if breaker.state != "closed" or self._begun >= self._concurrency:
            return None
        self._begun += 1
        return breaker

    def end(self, verb: str, breaker: Breaker | None) -> None:
        """Take note that such a question is over, and of its *breaker* if it was answered."""
        self._begun -= 1
        if breaker is not None:
            self._note_success(verb, breaker)

    async def ask(
        self,
        verb: str,
        node: str,
        ask: Callable[[], Awaitable[T]],
        counters: Counters,
        *,
        is_forced: bool = False,
        is_urgent: bool = False,
    ) -> T:
        """Return the store's answer, when it is this operation's turn; tell the breaker of *node* how it went.

        Args:
            verb: What the store is asked to do, for logs.
            node: Name of the server.
            ask: Asks it.
            counters: Where outcomes are counted.
            is_forced: Whether to ask even when the breaker is open, and to wait for a turn as long as it takes.
            is_urgent: Whether to ask without a slot, ahead of the queue.

        Raises:
            StoreUnavailable: there was none.
        """
        if is_urgent:
            return await self._try(verb, node, ask, counters, is_forced=is_forced)
        if self._slots.locked() and not is_forced:
            await self._queue(counters)
        else:
            await self._slots.acquire()  # at once, or as long as it takes
        try:
            return await self._try(verb, node, ask, counters, is_forced=is_forced)
        finally:
            self._slots.release()

    async def _try(
        self, verb: str, node: str, ask: Callable[[], Awaitable[T]], counters: Counters, *, is_forced: bool
    ) -> T:
        # Now, not before the queue: should the store hang, those who queue leave as soon as that is known.
        breaker = self.breaker(node)
        if not breaker.allows() and not is_forced:
            counters.l2_skips += 1
            raise StoreUnavailable
        return await self._watch(verb, breaker, ask, counters)

    async def _queue(self, counters: Counters) -> None:
        """Wait for a slot. A burst has to queue somewhere, and a database has fewer connections than this."""
        try:
            async with StallTolerantTimeout(_QUEUE):
                await self._slots.acquire()
        except TimeoutError:
            counters.l2_skips += 1
            raise StoreUnavailable from None

    async def _watch(self, verb: str, breaker: Breaker, ask: Callable[[], Awaitable[T]], counters: Counters) -> T:
        try:
            answer = await ask()
        except Exception as error:  # drivers raise more than they document
            self.note_failure(verb, breaker, error, counters)
            raise StoreUnavailable from error
        except BaseException:
            breaker.gave_up()
            raise
        self._note_success(verb, breaker)
        return answer

    def _note_success(self, verb: str, breaker: Breaker) -> None:
        breaker.succeeded()
        if self._refusals:
            self._note_consent(verb)

    def note_failure(self, verb: str, breaker: Breaker, error: Exception, counters: Counters) -> None:
        """Count the *error* that there was in place of an answer, and tell the breaker."""
        if isinstance(error, StoreOverloaded):
            counters.l2_skips += 1
            breaker.gave_up()
            return
        counters.l2_errors += 1
        if isinstance(error, Refused):
            breaker.succeeded()  # a no is an answer
            self.note_refusal(verb, str(error))
        elif LOST_TOGETHER in getattr(error, "__notes__", ()):
            breaker.gave_up()  # else one lost connection of many would open it
        else:
            breaker.failed(reason(error))

    def note_refusal(self, verb: str, why: str) -> None:
        """Log that the store will not do *verb*, once for each reason."""
        known, _ = self._refusals.get(verb, ("", 0.0))
        self._refusals[verb] = why, self._clock()
        if known != why:
            logger.warning("%s refuses to %s: %s", self._name, verb, why)

    def _note_consent(self, verb: str) -> None:
        if verb in self._refusals and self._clock() - self._refusals[verb][1] >= _CALM:
            del self._refusals[verb]
            logger.info("%s accepts to %s again", self._name, verb)


def reason(error: Exception) -> str:
    """Name *error* without its text, which may quote commands, values and addresses."""
    return type(error).__name__
