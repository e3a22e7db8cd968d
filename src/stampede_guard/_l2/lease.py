"""The L2 side of one flight: value, lease or wait.

A lease is a token in the store that expires. A fill is accepted only while the token is there, and every invalidation
deletes it. So no process can store after an invalidation what it loaded before, however long it slept in between. See
"Scaling Memcache at Facebook" (NSDI 2013), section 3.2.1.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from math import inf
from typing import Any, Literal, NamedTuple

from .._codecs.fingerprint import NO_FINGERPRINT
from .._stats import Counters
from .._tokens import new_token
from ..errors import LoadCancelled
from ..stores import AcquireRequest, AcquireResult, LoadFailure, Refused, Stored, StoreOverloaded
from ..stores._breaker import Breaker
from ..stores._envelope import UnsealedValue, seal, token_of, unseal
from .access import StoreUnavailable
from .messages import woken
from .tier import Tier
from .upkeep import LONGEST_LEASE, HeldLease, OwedRelease

_ATTEMPTS = 8  # each may return a different unusable value, e.g. while two releases run side by side


class LeaseLapsed(Exception):  # noqa: N818  # control flow of the data path
    """The lease ended before the load began: another process may be loading, or have loaded."""


class Found(NamedTuple):
    """A value that the store has.

    Attributes:
        value: The decoded value.
        payload: The bytes that it was decoded from.
        life: Seconds for which it is fresh; `None` if the store cannot tell.
        stale_for: Seconds after that for which the store keeps it.
        age: Seconds since it was stored.
    """

    value: Any
    payload: bytes
    life: float | None
    stale_for: float = 0.0
    age: float = 0.0


class OldValue(NamedTuple):
    """A value that the store has, and that is not fresh, or is to be replaced by a refresh.

    Attributes:
        value: The decoded value.
        payload: The bytes that it was decoded from.
        age: Seconds since it was stored.
        fresh_for: Seconds for which it is fresh; negative if that is over.
        usable_for: Seconds for which this flight can use it.
    """

    value: Any
    payload: bytes
    age: float
    fresh_for: float
    usable_for: float


class Lease:
    """A flight's access to the store, and its lease there.

    Args:
        tier: The store's.
        op: The op id.
        tags: Its tags.
        length: Seconds that the lease lasts unless it is renewed.
        longest_ttl: Seconds after which all that was stored for *op* before now is gone.
        counters: Where outcomes are counted.
        fingerprint: Of the codec and the schema of its values.
        window: Seconds for which the flight can use a value that is not fresh any more.
        margin: Seconds by which a value counts as old before it is.

    Attributes:
        failure: What the failed load leaves in the store when the lease is released.
        is_owned: Whether this flight holds the lease, as far as it knows.
        is_store_unavailable: Whether the store did not answer: other processes may be loading too.
        replaces: Whether its fill is to leave nothing older anywhere: this is a refresh.
        is_final: Whether the store certainly has nothing older than what a refresh has loaded.
        left: Seconds until the other flight's lease expires, after `acquire` returned `"wait"`; until the pause ends,
            after `"backoff"`.
        old: The old value that came with the last answer, if any.
        paused_for: The text of the failure to pause for, after `acquire` returned `"backoff"`.
        was_undecodable: Whether the stored value could not be decoded.
        stored_by: Token of the flight that stored the value, this one or another.
    """

    failure: LoadFailure | None = None
    is_final = False
    is_owned = False
    is_store_unavailable = False
    left = 0.0
    old: OldValue | None = None
    paused_for = ""
    replaces = False
    stored_by = b""
    was_undecodable = False
    # A lease is made for each flight, and most find a value: what they do not need stands in the class.
    _asked_at = 0.0
    _breaker: Breaker | None = None  # of the node that `start` called
    _generation = 0  # of the store, before the lease was taken over
    _has_loaded = False  # for the release: a value was loaded and not stored
    _held: HeldLease | None = None  # while it is renewed
    _is_lost = False
    _marks: tuple[bytes, ...] = ()
    _pending: Any = None  # what the store has returned to `start`, until it is read
    _rejected = b""
    _result: AcquireResult | None = None

    def __init__(  # noqa: PLR0913, PLR0917  # what a flight knows of its operation
        self,
        tier: Tier,
        op: str,
        tags: Sequence[str],
        length: float,
        longest_ttl: float,
        counters: Counters,
        fingerprint: bytes = NO_FINGERPRINT,
        window: float = 0.0,
        margin: float = 0.0,
    ) -> None:
        self._tier = tier
        self._op = op
        self._key = tier.key(op)
        self._length = length
        self._longest_ttl = longest_ttl
        self._counters = counters
        marks_ttl = max(tier.marks_life, 2 * longest_ttl)
        keys = tier.tag_keys(tags)
        self._request = AcquireRequest(self._key, keys, length, marks_ttl, fingerprint, window, margin)

    def start(self, on_answer: Callable[[object], None]) -> bool:
        """Start to read without a task, if nothing has to be waited for; return whether that was possible.

        Args:
            on_answer: Called once there is a `result`.
        """
        tier = self._tier
        store, breaker = tier.store, None
        try:
            if not store.has_replicas and tier.pending.is_empty:
                breaker = tier.access.reserve(store.node_of(self._key))
            if breaker is None:
                return False
            self._asked_at = tier.clock()
            pending: Any = store.acquire(self._request)
            self._pending = pending
            if hasattr(pending, "add_done_callback") and not pending.done():
                self._breaker = breaker
                pending.add_done_callback(on_answer)
                return True
        except Exception:  # noqa: BLE001, S110  # e.g. the key's node is unknown at present: `acquire` will find out
            pass
        if breaker is not None:
            tier.access.release("read", None)
        return False

    def result(self, decode: Callable[[bytes], tuple[Any] | None]) -> Found | None:
        """Return the value if one was read; `acquire` deals with any other outcome of `start`.

        Args:
            decode: As for `acquire`.

        Raises:
            LoadCancelled: there will be no answer, and nothing new may start.
        """
        access, pending = self._tier.access, self._pending
        try:
            result: AcquireResult = pending.result()
        except (Exception, asyncio.CancelledError):  # noqa: BLE001  # `acquire` awaits it, unless it was cancelled
            access.release("read", None)
            if not pending.cancelled():
                return None
            self._pending = None
            if self._token:
                self._release(self._token, is_sure=False, is_due=False)
            message = f"{self._op}: the load was cancelled with its request to the store"
            raise LoadCancelled(message) from None
        access.release("read", self._breaker)
        self._pending = None
        if result.kind == "hit":
            return self._unseal(result, decode)
        self._result = result
        self._apply_result(result)
        return None

    async def acquire(
        self, decode: Callable[[bytes], tuple[Any] | None]
    ) -> Found | Literal["own", "wait", "alone", "backoff", "unavailable"]:
        """Return the fresh value, or which flight is to load it, and keep the `old` one.

        Args:
            decode: Returns the value of a payload in a tuple of one, or `None` if it is not one.
        """
        tier = self._tier
        try:
            if not tier.pending.is_empty:
                await self._settle()
            if tier.store.has_replicas:
                replica_result = await self._read_replica(decode)
                if replica_result is not None:
                    return replica_result
            for _ in range(_ATTEMPTS):
                result = await self._acquire()
                if result.kind != "hit":
                    self.old = self._unseal_old(result, decode)
                    return self._apply_result(result)
                found = self._unseal(result, decode)
                if found is not None:
                    return found
            raise StoreUnavailable  # noqa: TRY301  # a store does not return again and again what was rejected
        except StoreUnavailable as silence:
            self._give_up_on_store(silence)
            return "unavailable"

    async def take_over(self, decode: Callable[[bytes], tuple[Any] | None] | None = None) -> None:
        """Take the lease from its holder, and reject any stored value.

        Args:
            decode: As for `acquire`; the stored value is `old` then, fresh or not.
        """
        self._rejected = b"*"
        self.replaces = True
        try:
            await self._settle()
            self._generation = self._tier.store.generation
            if self.is_arbitrated:
                result = await self._acquire()
                self.old = None if decode is None else self._unseal_old(result, decode)
                self._apply_result(result)
            else:
                self.is_owned = True  # without a request, so the store's state is unknown
        except StoreUnavailable as silence:
            self._give_up_on_store(silence)

    def _give_up_on_store(self, silence: StoreUnavailable) -> None:
        self.is_store_unavailable = True
        # The reply was lost or was never read; the lease may have been granted, so release it.
        why = silence.__cause__
        was_sent = why is not None and not isinstance(why, Refused | StoreOverloaded)
        had_pending = self._take_pending() is not None
        if (was_sent or had_pending) and self._token:
            # While connections break, another request is of no use.
            self._release(self._token, is_sure=False, is_due=had_pending or isinstance(why, TimeoutError))

    @property
    def is_arbitrated(self) -> bool:
        """Whether the store has leases, so that it says which flight loads."""
        return "leases" in self._tier.capabilities

    def _apply_result(self, result: AcquireResult) -> Literal["own", "wait", "alone", "backoff"]:
        self._marks = result.marks
        self.left = result.left
        self.paused_for = result.failure
        self._is_lost, self.is_owned = False, result.kind == "own"
        if self.is_owned and self._held is None and self.is_arbitrated:
            asked_at = self._asked_at
            if result.sent_at is not None:  # later than it was requested: there may have been a queue
                asked_at = self._tier.clock() - (time.monotonic() - result.sent_at)
            self._held = HeldLease(self._key, self._token, self._length, asked_at, self._counters, self._note_loss)
            self._tier.leases.hold(self._held)
        if self.is_owned:
            return "own"
        return result.kind if result.kind in ("alone", "backoff") else "wait"

    async def _settle(self) -> None:
        """Send the unconfirmed invalidations that concern this op before anything is read or stored."""
        tier = self._tier
        for waiting in tier.pending.concerns((self._key, *self._request.tags)):
            async with tier.turn(waiting.key):
                await tier.carry_out(waiting.key, self._counters)
        lost_at = tier.pending.lost_at
        if lost_at is not None and tier.clock() < lost_at + self._longest_ttl:
            self._counters.l2_skips += 1
            raise StoreUnavailable

    async def _read_replica(self, decode: Callable[[bytes], tuple[Any] | None]) -> Found | None:
        """Return a replica's value if it is usable; a replica may lag, so the primary gives all other answers."""
        store = self._tier.store
        if self._tier.recent.has_any((self._key, *self._request.tags)):
            return None
        asked = self._request
        ask = partial(store.read_replica, self._key, asked.tags, asked.fingerprint, asked.margin)
        try:
            replica_result = await self._tier.access.call("read", f"{store.name} replicas", ask, self._counters)
        except StoreUnavailable:
            return None  # the store stops using that replica
        if replica_result is None:
            return None
        found = self._unseal(replica_result, decode)
        self._rejected = b""  # the primary's value may be usable
        return found

    async def _acquire(self) -> AcquireResult:
        result, self._result = self._result, None
        if result is not None and not self._is_lost:
            return result
        node_of = self._tier.store.node_of
        node, *others = dict.fromkeys(map(node_of, (self._key, *self._request.tags)))
        try:
            return await self._tier.access.call("read", node, self._acquire_surely, self._counters, others=others)
        except asyncio.CancelledError:
            self.is_owned = bool(self._token)  # the answer might have granted the lease
            raise

    @property
    def _token(self) -> str:
        """The flight's token; empty until a lease is requested, because most flights find a value."""
        return self._request.drawn_token

    def _send(self, token: str, previous_token: str = "") -> Awaitable[AcquireResult]:
        """Request the lease under *token*, or under a new one."""
        last = self._request
        self._request = AcquireRequest(
            self._key,
            last.tags,
            self._length,
            last.marks_ttl,
            last.fingerprint,
            last.window,
            last.margin,
            token=token or new_token(),
            reject=self._rejected,
            previous_token=previous_token,
        )
        self._asked_at = self._tier.clock()
        return self._tier.store.acquire(self._request)

    async def _acquire_surely(self) -> AcquireResult:
        """Acquire; once more, under another token, if the request was lost with its connection.

        The first request may be executed later. After an invalidation it must not grant the lease to this flight,
        which by then has loaded an old value.
        """
        pending, self._pending = self._pending, None
        try:
            return await (self._send(self._token) if pending is None else pending)
        except Exception as error:
            if isinstance(error, TimeoutError | Refused | StoreOverloaded) or not self.is_arbitrated:
                raise
        lost_token = self._token
        try:
            return await self._send("", lost_token)
        finally:
            if lost_token:
                self._release(lost_token, is_sure=False, is_due=False)

    def _unseal(self, result: AcquireResult, decode: Callable[[bytes], tuple[Any] | None]) -> Found | None:
        """Return the fresh value in an envelope, or reject it in the next request."""
        stored = result.stored
        assert stored is not None
        opened = self._open(stored, result.marks)
        if opened is not None:
            self.stored_by = opened.token
            decoded = decode(opened.payload)
            self.was_undecodable = decoded is None
            if decoded is not None:
                life, age = stored.ttl, inf
                if life is not None:
                    life = max(life - opened.lag - opened.stale, 0.0)
                    age = max(opened.life - life, 0.0)
                return Found(decoded[0], opened.payload, life, opened.stale, age)
        self._rejected = b"=" + token_of(stored.envelope, self._request.fingerprint)
        return None

    def _unseal_old(self, result: AcquireResult, decode: Callable[[bytes], tuple[Any] | None]) -> OldValue | None:
        """Return the value that is not fresh, if one came with the lease or its denial."""
        stored = result.stored
        opened = None if stored is None else self._open(stored, result.marks)
        decoded = None if opened is None else decode(opened.payload)
        if stored is None or opened is None or decoded is None:
            return None
        left = (stored.ttl or 0.0) - opened.lag
        fresh_for = left - opened.stale
        usable_for = left - max(opened.stale - self._request.window, 0.0)
        return OldValue(decoded[0], opened.payload, max(opened.life - fresh_for, 0.0), fresh_for, usable_for)

    def _open(self, stored: Stored, marks: tuple[bytes, ...]) -> UnsealedValue | None:
        """Return what an envelope contains for this flight, if it is valid under these *marks*."""
        opened = unseal(self._tier.identity(self._op), stored.envelope, self._request.fingerprint)
        if opened is None or len(opened.payload) > self._tier.max_bytes:
            self._counters.l2_undecodable += 1
            self.was_undecodable = True
            return None
        return opened if opened.marks == marks else None  # else loaded before a tag of its was invalidated

    def check(self) -> None:
        """Check that a lease that this flight has got is still its own, and will be for a while.

        It is renewed long before half of its time has passed, unless the event loop is late. Then the load and the
        fill would be late too, so the flight acquires it once more, and for longer.

        Raises:
            LeaseLapsed: it may not be. To acquire again is safe: the same token gets the same lease.
        """
        right = self._held
        if self._is_lost or (right is not None and right.ends_at - self._tier.clock() < right.length / 2):
            self._drop()
            self._length = max(self._length, LONGEST_LEASE)
            raise LeaseLapsed

    def _note_loss(self) -> None:
        """Note that the lease has expired, or is another flight's."""
        self._held = None
        self.is_owned, self._is_lost = False, True

    async def fill(
        self,
        payload: bytes | None,
        life: float,
        version: int | None,
        still_holds: Callable[[], bool],
        name: str,
        *,
        window: float = 0.0,
    ) -> bool:
        """Store *payload*, and end the lease.

        Args:
            payload: The encoded value; `None` if it cannot be encoded.
            life: Seconds for which it is fresh.
            version: The value's version, if its operation has them.
            still_holds: Whether nothing was invalidated in this process since the load began.
            name: The operation's, for the log.
            window: Seconds after that for which it is stale.

        A refused refresh leaves no value in the store, because the flight that holds the lease now began after it.

        Returns:
            Whether the value may be kept as the latest: `False` when the store has refused it.
        """
        tier = self._tier
        self._has_loaded = True
        # A value that cannot be compared with the lowest version is kept for a moment at most.
        if payload is None or self._is_too_long(payload, name):
            self.is_store_unavailable = self.is_store_unavailable or version is not None
            return not self._is_lost  # the lease is released when the flight ends
        if not self.is_owned and not (self._is_lost and self.replaces):  # the refusal drops what is older
            return not self._is_lost and (version is None or self.is_store_unavailable)
        identity, asked = tier.identity(self._op), self._request
        envelope = seal(
            identity, payload, asked.token, version, self._marks, asked.fingerprint, life=life, stale=window
        )
        message = tier.invalidation(self._op).message if self.replaces else woken(self._op).pack()
        try:
            async with tier.turn(self._key):
                await tier.carry_out(self._key, self._counters)
                if not self.is_arbitrated and not still_holds():  # else the token tells
                    return False
                ask = partial(
                    tier.store.fill,
                    self._key,
                    self._token,
                    envelope,
                    life + window,
                    version,
                    message,
                    always_publish=self.replaces,
                )
                is_stored = await tier.access.call("write", tier.store.node_of(self._key), ask, self._counters)
        except StoreUnavailable:
            self.is_store_unavailable = True
            return True
        self.is_owned = False
        self._drop()
        self.stored_by = self._token.encode()
        # After a change of servers the fill may be lost while older values are not.
        if self.replaces and self._generation == tier.store.generation:
            self.is_final = True
            tier.pending.confirm(tier.invalidation(self._op))  # as strong as an invalidation
        if tier.store.has_replicas:  # which may lag
            tier.recent.note(self._key)
        return is_stored

    def _is_too_long(self, payload: bytes, name: str) -> bool:
        longest = self._tier.max_bytes
        if len(payload) <= longest:
            return False
        self._counters.l2_errors += 1
        self._tier.access.note_too_long(name, len(payload), longest)
        return True

    def release_soon(self) -> None:
        """Release the lease, if this flight may still hold it, without waiting for the store."""
        pending = self._take_pending()
        if pending is not None and self._breaker is not None:
            error = pending.exception()  # the flight ended before it was read
            if error is not None:
                self._tier.access.note_failure("read", self._breaker, error, self._counters)
        if self.is_owned or (pending is not None and self._token):
            self.is_owned = False
            self._release(self._token, is_sure=self._held is not None)
        self._drop()

    def _take_pending(self) -> Any:
        """Return the future that `start` got and that was not read, if any."""
        pending, self._pending = self._pending, None
        if isinstance(pending, Coroutine):
            pending.close()  # never started
            return None
        return pending

    def _drop(self) -> None:
        right, self._held = self._held, None
        if right is not None:
            self._tier.leases.drop(right)

    def _release(self, token: str, *, is_sure: bool, is_due: bool = True) -> None:
        """Release the lease that *token* has or may have, repeatedly until the store has confirmed it."""
        tier = self._tier
        if self.is_arbitrated:
            message = woken(self._op).pack()
            has_loaded, now = self._has_loaded, tier.clock()
            debt = OwedRelease(
                self._key, token, self._length, message, self._counters, is_sure, has_loaded, now, self.failure
            )
            tier.leases.owe(debt, is_due=is_due)
