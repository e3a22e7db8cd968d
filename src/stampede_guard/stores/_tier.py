"""L2 as the guard sees it: never raises, never answers for another op, writes in order."""

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import blake2b
from typing import TypeVar
from weakref import WeakValueDictionary

from .._breaker import Breaker
from .._codec import seal, unseal
from .._stats import Counters
from . import Refused, Store, Stored
from ._patience import Patience

T = TypeVar("T")

logger = logging.getLogger("stampede_guard")

_READABLE = re.compile(r"[!-z|~]{1,200}")  # printable, no space and no brace: it stands inside a hash tag
_LONGEST = 240  # characters of namespace and op together
_SUSPECTS = 10_000
_QUEUE = 1.0  # seconds that an operation waits for its turn before it is given up
_CALM = 10.0  # seconds without a refusal until it is over: a store that is almost full says yes and no by turns


class _NoAnswer(Exception):  # noqa: N818  # control flow of this module alone
    """The store was not asked, or did not answer; already counted."""


class Tier:
    """A store behind an envelope, a breaker and an order of writes.

    Args:
        store: Where the bytes go.
        namespace: What keeps this guard's keys apart from others'.
        max_bytes: Size of the largest payload that is stored.
        clock: Monotonic seconds.
    """

    def __init__(self, store: Store, namespace: str, max_bytes: int, clock: Callable[[], float]) -> None:
        self.breaker = Breaker(store.name, clock)
        self._store = store
        self._namespace = namespace
        self._max_bytes = max_bytes
        self._clock = clock
        self._slots = asyncio.Semaphore(store.concurrency)
        self._writes: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._suspects: dict[str, object] = {}  # ops whose invalidation the store has not confirmed, and a mark of each
        self._blind_since = -math.inf
        self._refusals: dict[str, tuple[str, float]] = {}  # by what the store was asked to do: why not, and when last

    async def open(self) -> None:
        """Say hello; a store that does not answer opens the breaker, and calls go on without it."""
        try:
            await self._store.open()
        except Exception as error:  # noqa: BLE001  # drivers raise more than they document
            self.breaker.trip(_reason(error))

    async def aclose(self) -> None:
        """Close the store's connections."""
        try:
            await self._store.aclose()
        except Exception as error:  # noqa: BLE001  # as above; there is nothing left to save
            logger.warning("%s did not close cleanly (%s)", self._store.name, _reason(error))

    async def read(self, op: str, longest_life: float, counters: Counters) -> Stored | None:
        """Return the payload stored for *op* and the seconds it has left, or `None`.

        Args:
            op: The op id.
            longest_life: Seconds after which whatever was stored for *op* is gone.
            counters: Where the outcome is counted.
        """
        try:
            if op in self._suspects:
                async with self._turn(op):
                    await self._settle(op, counters)
            self._check_sight(longest_life, counters)
            found = await self._ask("read", partial(self._store.read, self._key(op)), counters)
        except _NoAnswer:
            return None
        if found is None:
            counters.l2_misses += 1
            return None
        payload = unseal(self._identity(op), found.envelope)
        if payload is None or len(payload) > self._max_bytes:
            counters.l2_undecodable += 1
            return None
        return Stored(payload, found.life)

    async def fill(
        self, op: str, payload: bytes, life: float, still_holds: Callable[[], bool], counters: Counters
    ) -> None:
        """Store *payload* for *life* seconds, if by the time it is this write's turn it *still_holds*."""
        if len(payload) > self._max_bytes:
            counters.l2_errors += 1
            self._note_refusal("store", f"values larger than max_bytes={self._max_bytes:,}")
            return
        try:
            async with self._turn(op):
                await self._settle(op, counters)
                if still_holds():
                    envelope = seal(self._identity(op), payload)
                    await self._ask("write", partial(self._store.write, self._key(op), envelope, life), counters)
        except _NoAnswer:
            return

    async def delete(self, op: str, counters: Counters) -> bool:
        """Drop *op*, after any write of it that is under way; return whether the store confirmed.

        Tried even when the breaker is open, for the sake of the other processes. Not confirmed, the op
        is neither read nor filled by this process until a later try was confirmed.
        """
        self._suspect(op)  # before the first await: no reader may slip in between
        async with self._turn(op):
            try:
                await self._settle(op, counters, is_forced=True)
            except _NoAnswer:
                return False
        return True

    async def _settle(self, op: str, counters: Counters, *, is_forced: bool = False) -> None:
        """Make sure that no invalidation of *op* is pending; only while it is the caller's turn."""
        mark = self._suspects.get(op)
        if mark is not None:
            await self._ask("delete", partial(self._store.delete, self._key(op)), counters, is_forced=is_forced)
            if self._suspects.get(op) is mark:  # else there was another invalidation, after this delete was sent
                del self._suspects[op]

    def _check_sight(self, longest_life: float, counters: Counters) -> None:
        if self._clock() < self._blind_since + longest_life:
            counters.l2_skips += 1
            raise _NoAnswer

    def _suspect(self, op: str) -> None:
        if len(self._suspects) >= _SUSPECTS and op not in self._suspects:
            self._suspects.clear()  # safe when full: nothing is read until all that was there has expired
            self._blind_since = self._clock()
        self._suspects[op] = object()

    async def _ask(
        self, verb: str, ask: Callable[[], Awaitable[T]], counters: Counters, *, is_forced: bool = False
    ) -> T:
        """Return the store's answer, when it is this operation's turn; tell the breaker how it went."""
        await self._queue(counters)
        try:
            # Now, not before the queue: should the store hang, those who queue leave as soon as that is known.
            if not self.breaker.allows() and not is_forced:
                counters.l2_skips += 1
                raise _NoAnswer
            return await self._watch(verb, ask, counters)
        finally:
            self._slots.release()

    async def _queue(self, counters: Counters) -> None:
        """Wait for a slot. A burst has to queue somewhere, and a database has fewer connections than this."""
        try:
            async with Patience(_QUEUE):
                await self._slots.acquire()
        except TimeoutError:
            counters.l2_skips += 1
            raise _NoAnswer from None

    async def _watch(self, verb: str, ask: Callable[[], Awaitable[T]], counters: Counters) -> T:
        try:
            answer = await ask()
        except Exception as error:  # drivers raise more than they document
            counters.l2_errors += 1
            self._note_failure(verb, error)
            raise _NoAnswer from error
        except BaseException:
            self.breaker.gave_up()
            raise
        self.breaker.succeeded()
        self._note_consent(verb)
        return answer

    def _note_failure(self, verb: str, error: Exception) -> None:
        if isinstance(error, Refused):
            self.breaker.succeeded()  # a no is an answer
            self._note_refusal(verb, str(error))
        else:
            self.breaker.failed(_reason(error))

    def _turn(self, op: str) -> asyncio.Lock:
        """Return the lock that lets one write of *op* through at a time, in the order of arrival.

        1. A flight's fill is on its way. 2. An invalidation arrives. Sent at once on another
        connection, its DEL could overtake the SET, and the old value would stay.
        """
        lock = self._writes.get(op)
        if lock is None:
            lock = self._writes[op] = asyncio.Lock()
        return lock

    def _note_refusal(self, verb: str, why: str) -> None:
        known, _ = self._refusals.get(verb, ("", 0.0))
        self._refusals[verb] = why, self._clock()
        if known != why:
            logger.warning("%s refuses to %s: %s", self._store.name, verb, why)

    def _note_consent(self, verb: str) -> None:
        if verb in self._refusals and self._clock() - self._refusals[verb][1] >= _CALM:
            del self._refusals[verb]
            logger.info("%s accepts to %s again", self._store.name, verb)

    def _identity(self, op: str) -> str:
        return f"{self._namespace}:{op}"

    def _key(self, op: str) -> str:
        return key_of(self._namespace, op)


def key_of(namespace: str, op: str) -> str:
    """Return the key of *op*'s value: readable up to 200 safe characters, else a prefix and a digest.

    With a long namespace fewer are readable: no key is longer than 250 bytes, which is all that Memcached takes.
    """
    if not _READABLE.fullmatch(op) or len(namespace) + len(op) > _LONGEST:
        prefix = re.sub(r"[^!-z|]", "_", op[:64])
        op = f"{prefix}~{blake2b(op.encode('utf-8', 'surrogatepass'), digest_size=20).hexdigest()}"
    return f"sg1:{{{namespace}:{op}}}:v"


def _reason(error: Exception) -> str:
    """Name *error* without its text, which may quote commands, values and addresses."""
    return type(error).__name__
