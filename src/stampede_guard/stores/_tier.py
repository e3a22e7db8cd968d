"""L2 as the guard sees it: never raises, never answers for another op, writes in order."""

import asyncio
import logging
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

T = TypeVar("T")

logger = logging.getLogger("stampede_guard")

_READABLE = re.compile(r"[!-z|~]{1,200}")  # printable, no space and no brace: it stands inside a hash tag
_SUSPECTS = 10_000


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
        self._writes: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._suspects: set[str] = set()  # ops whose invalidation the store has not confirmed
        self._blind_until = 0.0
        self._longest_life = 0.0
        self._refusal = ""  # what the store last said no with; empty while it says yes

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

    async def read(self, op: str, counters: Counters) -> Stored | None:
        """Return the payload stored for *op* and the seconds it has left, or `None`."""
        try:
            if op in self._suspects:
                async with self._turn(op):
                    await self._settle(op, counters)
            self._check_sight(counters)
            found = await self._ask(partial(self._store.read, self._key(op)), counters)
        except _NoAnswer:
            return None
        if found is None:
            counters.l2_misses += 1
            return None
        payload = unseal(self._identity(op), found.envelope)
        if payload is None:
            counters.l2_undecodable += 1
            return None
        return Stored(payload, found.life)

    async def fill(
        self, op: str, payload: bytes, life: float, still_holds: Callable[[], bool], counters: Counters
    ) -> None:
        """Store *payload* for *life* seconds, if by the time it is this write's turn it *still_holds*."""
        if len(payload) > self._max_bytes:
            counters.l2_errors += 1
            self._note_refusal(f"a value of {len(payload):,} bytes is larger than max_bytes={self._max_bytes:,}")
            return
        self._longest_life = max(self._longest_life, life)
        try:
            async with self._turn(op):
                self._check_sight(counters)
                await self._settle(op, counters)
                if still_holds():
                    envelope = seal(self._identity(op), payload)
                    await self._ask(partial(self._store.write, self._key(op), envelope, life), counters)
                    self._note_refusal("")
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
        if op in self._suspects:
            await self._ask(partial(self._store.delete, self._key(op)), counters, is_forced=is_forced)
            self._suspects.discard(op)

    def _check_sight(self, counters: Counters) -> None:
        if self._clock() < self._blind_until:
            counters.l2_skips += 1
            raise _NoAnswer

    def _suspect(self, op: str) -> None:
        if len(self._suspects) >= _SUSPECTS:  # safe when full: read nothing until all of it has expired
            self._suspects.clear()
            self._blind_until = self._clock() + self._longest_life
        self._suspects.add(op)

    async def _ask(self, ask: Callable[[], Awaitable[T]], counters: Counters, *, is_forced: bool = False) -> T:
        """Return the store's answer; tell the breaker how it went."""
        if not self.breaker.allows() and not is_forced:
            counters.l2_skips += 1
            raise _NoAnswer
        try:
            answer = await ask()
        except Refused as refusal:
            self.breaker.succeeded()  # a no is an answer
            counters.l2_errors += 1
            self._note_refusal(str(refusal))
            raise _NoAnswer from refusal
        except Exception as error:  # drivers raise more than they document
            self.breaker.failed(_reason(error))
            counters.l2_errors += 1
            raise _NoAnswer from error
        except BaseException:
            self.breaker.gave_up()
            raise
        self.breaker.succeeded()
        return answer

    def _turn(self, op: str) -> asyncio.Lock:
        """Return the lock that lets one write of *op* through at a time, in the order of arrival.

        1. A flight's fill is on its way. 2. An invalidation arrives. Sent at once on another
        connection, its DEL could overtake the SET, and the old value would stay.
        """
        lock = self._writes.get(op)
        if lock is None:
            lock = self._writes[op] = asyncio.Lock()
        return lock

    def _note_refusal(self, refusal: str) -> None:
        if refusal == self._refusal:
            return
        self._refusal = refusal
        if refusal:
            logger.warning("%s refuses: %s", self._store.name, refusal)
        else:
            logger.info("%s accepts writes again", self._store.name)

    def _identity(self, op: str) -> str:
        return f"{self._namespace}:{op}"

    def _key(self, op: str) -> str:
        return key_of(self._namespace, op)


def key_of(namespace: str, op: str) -> str:
    """Return the key of *op*'s value: readable up to 200 safe characters, else a prefix and a digest."""
    if not _READABLE.fullmatch(op):
        prefix = re.sub(r"[^!-z|]", "_", op[:64])
        op = f"{prefix}~{blake2b(op.encode('utf-8', 'surrogatepass'), digest_size=20).hexdigest()}"
    return f"sg1:{{{namespace}:{op}}}:v"


def _reason(error: Exception) -> str:
    """Name *error* without its text, which may quote commands, values and addresses."""
    return type(error).__name__
