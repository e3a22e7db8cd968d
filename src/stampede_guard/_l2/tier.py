"""L2: a store behind keys, breakers and invalidations.

Reads and writes of a tier raise only `StoreUnavailable`, and bring no value back that was invalidated.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from functools import partial
from hashlib import blake2b
from random import random
from typing import Any
from weakref import WeakValueDictionary

from .._stats import Counters
from .._tokens import new_mark
from ..stores import LeasingStore, Store, StoreOverloaded
from .access import StoreAccess, StoreUnavailable, reason
from .messages import Message
from .plain import PlainStoreAdapter
from .recent import RecentInvalidations
from .sender import Confirmation, InvalidationSender
from .unconfirmed import Invalidation, UnconfirmedInvalidations
from .upkeep import UNCOUNTED, LeaseKeeper

logger = logging.getLogger("stampede_guard")

_UNREADABLE = re.compile(r"[^!-z|~]")  # not printable, a space, or a brace, because a hash tag contains the op
_MAX_OP_LENGTH = 200  # characters of an op that is readable in its key
_MAX_KEY_LENGTH = 240  # characters of namespace and op together
_MARKS_TTL = 86_400.0  # seconds; a mark that has expired costs a load of each value that carries it
_REPEAT_PERIOD = 1.0  # seconds between attempts to have an invalidation confirmed, where no bus's upkeep does that


class Tier:
    """One event loop's L2.

    Args:
        store: The store.
        namespace: Part of all keys, so that several guards can share a store.
        max_bytes: Size of the largest payload that is stored.
        clock: Monotonic seconds.
        instance: Sender of this event loop's messages.
    """

    def __init__(
        self,
        store: Store | LeasingStore,
        namespace: str,
        max_bytes: int,
        clock: Callable[[], float],
        instance: str = "",
    ) -> None:
        self.store = _leasing(store)
        self.store.channel = f"sg1:{namespace}:bus"
        self.max_bytes = max_bytes
        self.marks_life = _MARKS_TTL
        self.clock = clock
        self.access = StoreAccess(store.name, store.concurrency, clock)
        self.recent = RecentInvalidations(clock)
        self._namespace = namespace
        self._instance = instance
        self._everything = Invalidation(self.tag_key(""), Message("c", instance, "").pack(), is_tag=True)
        self._has_tags = "tags" in self.store.capabilities
        self._marks_of_all = (self._everything.key,) if self._has_tags else ()
        self._pending = UnconfirmedInvalidations(clock, self._everything if self._has_tags else None)
        self._writes: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._generation = self.store.generation
        self.upkeep: set[asyncio.Task[None]] = set()
        self._repetition: asyncio.Task[None] | None = None
        self._is_closed = False
        self._sender = InvalidationSender(self.store, self.access, self._carry_out_in_turn, self.upkeep)
        self.leases = LeaseKeeper(self.store, self.access, clock, self.run_upkeep)

    @property
    def capabilities(self) -> frozenset[str]:
        """The capabilities of the store."""
        return self.store.capabilities

    @property
    def pending(self) -> UnconfirmedInvalidations:
        """The invalidations that the store has not confirmed; after a change of servers, those that it may have lost.

        Each access checks for such a change, so nothing is read from the new server before the invalidations that it
        may lack are repeated.
        """
        if self._generation != self.store.generation:
            self._generation = self.store.generation
            self._pending.repeat()
        return self._pending

    async def open(self) -> None:
        """Open the store; if it does not answer, open its breaker, so that calls go on without it."""
        try:
            await self.store.open()
        except Exception as error:  # noqa: BLE001  # drivers raise more than they document
            self.access.breaker(self.store.node_of(self.tag_key(""))).trip(reason(error))

    async def aclose(self) -> None:
        """Close the store's connections."""
        self._is_closed = True
        self.leases.close()
        if self._repetition is not None:
            self._repetition.cancel()
            await asyncio.wait([self._repetition])
        if self.upkeep:
            await asyncio.wait(self.upkeep)  # each is bounded by the store's deadlines
        try:
            await self.store.aclose()
        except Exception as error:  # noqa: BLE001  # as above
            logger.warning("%s did not close cleanly (%s)", self.store.name, reason(error))

    def invalidation(self, op: str, version: int | None = None, *, is_soft: bool = False) -> Invalidation:
        """Return the invalidation of *op*; a soft one keeps the value as a stale one, if it has a window."""
        message = Message("s" if is_soft else "i", self._instance, op).pack()
        return Invalidation(self.key(op), message, is_tag=False, version=version, is_soft=is_soft)

    def tag_invalidation(self, tag: str) -> Invalidation:
        """Return the invalidation of *tag*; of everything, if it is empty."""
        if not tag:
            return self._everything
        return Invalidation(self.tag_key(tag), Message("t", self._instance, tag).pack(), is_tag=True)

    def announce(self, invalidation: Invalidation) -> None:
        """Read and store nothing that *invalidation* concerns until the store has confirmed it."""
        self.recent.note(invalidation.key)
        if invalidation is self._everything and not self._has_tags:
            self.pending.lose_all()
        else:
            self.pending.add(invalidation)

    def send(self, invalidation: Invalidation) -> Confirmation:
        """Announce *invalidation*, and carry it out in the background.

        It follows any write of the key that is under way. The other processes need it, so it is sent even when the
        breaker is open.
        """
        self.announce(invalidation)
        return self._sender.send(invalidation.key)

    async def carry_out(self, key: str, counters: Counters, *, is_forced: bool = False) -> None:
        """Carry out the pending invalidation of *key*, if there is one; the caller holds the key's `turn`.

        Raises:
            StoreUnavailable: it is still pending.
        """
        while (waiting := self.pending.of(key)) is not None:
            generation = self.store.generation
            if waiting.is_tag:
                send = partial(self.store.invalidate_tag, key, new_mark(), _MARKS_TTL, waiting.message)
            else:
                send = partial(self.store.invalidate, key, waiting.version, waiting.message, is_soft=waiting.is_soft)
            await self.access.call("invalidate", self.store.node_of(key), send, counters, is_forced=is_forced)
            # After a change of servers it may be lost with the server that confirmed it.
            if generation == self.store.generation:
                self.pending.confirm(waiting)
                self.recent.note(key)  # a replica may lag behind the confirmation
                return

    async def _carry_out_in_turn(self, key: str) -> bool:
        """Carry out the pending invalidation of *key* after any write that is under way; return whether none is left.

        When too many were pending, one for everything has replaced this one.
        """
        for each in dict.fromkeys((key, self._everything.key)):
            async with self.turn(each):
                while self.pending.of(each) is not None:
                    try:
                        await self.carry_out(each, UNCOUNTED, is_forced=True)
                    except StoreUnavailable as silence:
                        breaker = self.access.breaker(self.store.node_of(each))
                        if not (isinstance(silence.__cause__, StoreOverloaded) and breaker.is_closed):
                            self._start_repeating()
                            return False
                    else:
                        return True
        return True

    async def repeat_invalidations(self) -> None:
        """Send all pending invalidations again."""
        for confirmation in [self._sender.send(each.key) for each in self.pending.all()]:
            await confirmation.wait()

    def _start_repeating(self) -> None:
        """Repeat unconfirmed invalidations in a task of its own, unless the upkeep of a bus repeats them."""
        is_repeating = self._repetition is not None and not self._repetition.done()
        if is_repeating or self._is_closed or "backplane" in self.capabilities:
            return
        loop = asyncio.get_running_loop()
        self._repetition = asyncio.Task(self._keep_repeating(), loop=loop, name="repeat", context=Context())

    async def _keep_repeating(self) -> None:
        while self.pending.all():
            await asyncio.sleep(_REPEAT_PERIOD * (1 - random() / 4))  # noqa: S311  # no secret
            await self.repeat_invalidations()

    async def echo(self, payload: bytes) -> bool:
        """Send an echo, even when the breaker is open: its answer shows that the store is back."""
        node = self.store.node_of(self.store.channel)
        try:
            await self.access.call("publish", node, partial(self.store.echo, payload), UNCOUNTED, is_forced=True)
        except StoreUnavailable:
            return False
        return True

    async def stored_by(self, key: str) -> tuple[bytes, ...]:
        """Return the tokens of the flights that stored the values under *key*; none if the store does not answer."""
        ask = partial(self.store.stored_by, key)
        try:
            return await self.access.call("read", self.store.node_of(key), ask, UNCOUNTED)
        except StoreUnavailable:
            return ()

    @property
    def bus_node(self) -> str:
        """Name of the server that has the bus."""
        return self.store.node_of(self.store.channel)

    def run_upkeep(self, upkeep: Coroutine[None, None, None]) -> None:
        """Run *upkeep*, which the store's deadlines bound, in a task of its own; closing waits for it."""
        task = asyncio.get_running_loop().create_task(upkeep, name="upkeep of leases")
        if not task.done():
            self.upkeep.add(task)
            task.add_done_callback(self.upkeep.discard)

    def turn(self, key: str) -> asyncio.Lock:
        """Return the lock for writes of *key*, which are sent one at a time, in the order of arrival.

        1. A flight's fill is under way. 2. An invalidation is sent at once on another connection. 3. Its DEL overtakes
        the SET. A store without leases would then keep the old value.
        """
        lock = self._writes.get(key)
        if lock is None:
            lock = self._writes[key] = asyncio.Lock()
        return lock

    def identity(self, op: str) -> str:
        """Return the identity that an envelope for *op* contains."""
        return f"{self._namespace}:{op}"

    def key(self, op: str) -> str:
        """Return the key of *op*."""
        return key_of(self._namespace, op)

    def tag_key(self, tag: str) -> str:
        """Return the key of *tag*'s mark; the empty tag is that of all values."""
        return f"{key_of(self._namespace, tag)}:t"

    def tag_keys(self, tags: Sequence[str]) -> tuple[str, ...]:
        """Return the keys of the marks that a value with *tags* carries; none if the store has no tags."""
        return (*self._marks_of_all, *map(self.tag_key, tags)) if tags and self._has_tags else self._marks_of_all


def _leasing(store: Store | LeasingStore) -> LeasingStore:
    either: Any = store
    leasing: LeasingStore = either if hasattr(either, "acquire") else PlainStoreAdapter(either)
    return leasing


def key_of(namespace: str, op: str) -> str:
    """Return the prefix of *op*'s keys: *op* itself if it is short and all characters are safe, else its digest.

    With a long namespace more ops are digested, because no key may be longer than Memcached's 250 bytes.
    """
    length = len(op)
    if op and (_UNREADABLE.search(op) or length > _MAX_OP_LENGTH or len(namespace) + length > _MAX_KEY_LENGTH):
        prefix = re.sub(r"[^!-z|]", "_", op[:64])
        op = f"{prefix}~{blake2b(op.encode('utf-8', 'surrogatepass'), digest_size=20).hexdigest()}"
    return f"sg1:{{{namespace}:{op}}}"
