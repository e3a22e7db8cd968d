"""One flight's dealings with the store: a value, or the right to load it, or the wait for whoever has that right.

The right is a token in the store that expires. A fill is accepted only while it is there, and every
invalidation deletes it; so what was loaded before an invalidation cannot be stored after it, by no process,
however long it slept in between. See "Scaling Memcache at Facebook" (NSDI 2013), section 3.2.1.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from .._codecs.fingerprint import NO_FINGERPRINT
from .._stats import Counters
from .._tokens import new_token
from ..errors import LoadCancelled
from ..stores import AcquireResult, PendingAcquire, Refused, Stored, StoreOverloaded
from ..stores._breaker import Breaker
from ..stores._envelope import entry_of, seal, token_of, unseal
from .access import StoreUnavailable
from .messages import woken
from .tier import Tier
from .upkeep import LONGEST_LEASE, HeldLease, OwedRelease

_LOOKS = 8  # at values that will not do, each another, as two versions of a service may leave them


class LeaseLapsed(Exception):  # noqa: N818  # control flow of the course alone
    """The right to load ended before the load began: another process may be loading, or have loaded."""


class Found(NamedTuple):
    """A value of the op's.

    Attributes:
        value: It.
        payload: The bytes that it was decoded from.
        life: Seconds that it has left in the store, `None` if the store cannot tell.
    """

    value: Any
    payload: bytes
    life: float | None


class Lease:
    """What a flight holds of the store.

    Args:
        tier: The store's.
        op: The op id.
        tags: Its tags.
        length: Seconds that the lease lasts unless it is renewed.
        longest_life: Seconds after which all that was stored for *op* before now is gone.
        counters: Where outcomes are counted.
        fingerprint: Of the codec and the schema of its values.

    Attributes:
        is_owned: Whether this flight has the right to load and store, as far as it knows.
        is_store_unavailable: Whether the store did not answer: nobody knows what happens to the op elsewhere.
        is_seized: Whether the right was taken from another flight: this is a refresh.
        is_final: Whether a refresh has left nothing in the store that is older than what it has loaded, for certain.
        left: Seconds until the lease of whoever is loading expires, after `ask` said `"wait"`.
        was_undecodable: Whether there was something that is no value of the op's.
        stored_by: Token of the flight that stored the value, this one or another.
    """

    __slots__ = (
        "_asked_at",
        "_begun",
        "_breaker",
        "_counters",
        "_fingerprint",
        "_generation",
        "_has_loaded",
        "_is_lost",
        "_key",
        "_length",
        "_longest_life",
        "_marks",
        "_op",
        "_right",
        "_tags",
        "_tier",
        "_token",
        "_unwanted",
        "_verdict",
        "is_final",
        "is_owned",
        "is_seized",
        "is_store_unavailable",
        "left",
        "stored_by",
        "was_undecodable",
    )

    def __init__(  # noqa: PLR0917  # what a flight knows of its operation
        self,
        tier: Tier,
        op: str,
        tags: Sequence[str],
        length: float,
        longest_life: float,
        counters: Counters,
        fingerprint: bytes = NO_FINGERPRINT,
    ) -> None:
        self._fingerprint = fingerprint
        self._tier = tier
        self._op = op
        self._key = tier.key(op)
        self._tags = tier.tag_keys(tags)
        self._length = length
        self._longest_life = longest_life
        self._counters = counters
        self._token = ""  # until there is a right to ask for: most flights find a value
        self._begun: PendingAcquire | None = None
        self._breaker: Breaker | None = None  # of the node that the question went to
        self._verdict: AcquireResult | None = None
        self._marks: tuple[bytes, ...] = ()
        self._unwanted = b""
        self._asked_at = 0.0
        self._right: HeldLease | None = None  # while it is renewed
        self._is_lost = self._has_loaded = False  # a right that is given back after the load: nothing was stored
        self._generation = 0  # of the store, before the right was seized
        self.is_owned = False
        self.is_store_unavailable = False
        self.is_final = False
        self.is_seized = False
        self.left = 0.0
        self.stored_by = b""
        self.was_undecodable = False

    def begin(self, on_answer: Callable[[], None]) -> bool:
        """Put the question, if that takes no waiting; return whether it does not.

        Args:
            on_answer: Called once `open` can tell what became of it.
        """
        tier = self._tier
        store = tier.store
        try:
            if store.has_replicas or not tier.pending.is_empty:
                return False
            self._breaker = tier.asking.begin(store.node_of(self._key))
            if self._breaker is not None:
                self._asked_at = tier.clock()
                question = self._key, self._tags, self._length, self._marks_life, self._fingerprint
                self._begun = store.start_acquire(*question, on_answer)
        except Exception:  # noqa: BLE001  # nobody knows who has the key at present, for one: `ask` will find out
            self._begun = None
        if self._begun is None and self._breaker is not None:
            tier.asking.end("read", None)
        return self._begun is not None

    def open(self, decode: Callable[[bytes], tuple[Any] | None]) -> Found | None:
        """Return the value if the question was answered with one; what else it was answered with is for `ask`.

        Args:
            decode: As for `ask`.

        Raises:
            LoadCancelled: there will be no answer, and nothing new may begin.
        """
        begun = self._begun
        assert begun is not None
        self._token = begun.token
        if begun.is_aborted:
            self._begun = None
            self._tier.asking.end("read", None)
            message = f"{self._op}: the load was cancelled with the question that it had put to the store"
            raise LoadCancelled(message)
        verdict = begun.result
        if verdict is None:
            self._tier.asking.end("read", None)
            return None
        self._tier.asking.end("read", self._breaker)
        self._begun = None
        if verdict.stored is not None:
            return self._open(verdict.stored, verdict.marks, decode)
        self._verdict = verdict
        self._concede(verdict)
        return None

    async def ask(
        self, decode: Callable[[bytes], tuple[Any] | None]
    ) -> Found | Literal["own", "wait", "alone", "blind"]:
        """Return the value, or who is to load it.

        Args:
            decode: Returns the value of a payload in a tuple of one, or `None` if it is not one.
        """
        tier = self._tier
        try:
            if not tier.pending.is_empty:
                await self._settle()
            if tier.store.has_replicas:
                glimpse = await self._glance(decode)
                if glimpse is not None:
                    return glimpse
            for _ in range(_LOOKS):
                verdict = await self._acquire()
                if verdict.stored is None:
                    return self._concede(verdict)
                found = self._open(verdict.stored, verdict.marks, decode)
                if found is not None:
                    return found
            raise StoreUnavailable  # noqa: TRY301  # a store would not offer time and again what was refused
        except StoreUnavailable as silence:
            self._give_up_on_store(silence)
            return "blind"

    async def take_over(self) -> None:
        """Take the right to load from whoever has it, whatever is stored."""
        self._token = new_token()
        self._unwanted = b"*"
        self.is_seized = True
        try:
            await self._settle()
            self._generation = self._tier.store.generation
            if self._is_arbitrated:
                self._concede(await self._acquire())
            else:
                self.is_owned = True  # nobody was asked, so nothing was learnt about the store
        except StoreUnavailable as silence:
            self._give_up_on_store(silence)

    def _give_up_on_store(self, silence: StoreUnavailable) -> None:
        self.is_store_unavailable = True
        # The question was sent, and not answered; or the answer was not read. It may have granted the lease.
        why = silence.__cause__
        was_sent = why is not None and not isinstance(why, Refused | StoreOverloaded)
        was_begun, self._begun = self._begun is not None, None
        if (was_sent or was_begun) and self._token:
            # While connections break there is no use in another request.
            self._release(self._token, is_sure=False, is_due=was_begun or isinstance(why, TimeoutError))

    @property
    def _is_arbitrated(self) -> bool:
        return "leases" in self._tier.capabilities

    def _concede(self, verdict: AcquireResult) -> Literal["own", "wait", "alone"]:
        self._marks = verdict.marks
        self.left = verdict.left
        self._is_lost, self.is_owned = False, verdict.kind == "own"
        if self.is_owned and self._right is None and self._is_arbitrated:
            asked_at = self._asked_at
            if verdict.sent_at is not None:  # later than it was asked for: there may have been a queue
                asked_at = self._tier.clock() - (time.monotonic() - verdict.sent_at)
            self._right = HeldLease(self._key, self._token, self._length, asked_at, self._counters, self._note_loss)
            self._tier.leases.hold(self._right)
        if self.is_owned:
            return "own"
        return "alone" if verdict.kind == "alone" else "wait"

    async def _settle(self) -> None:
        """Let nothing be read or stored while an invalidation that concerns it is not confirmed."""
        tier = self._tier
        for waiting in tier.pending.concerns((self._key, *self._tags)):
            async with tier.turn(waiting.key):
                await tier.settle(waiting.key, self._counters)
        lost_at = tier.pending.lost_at
        if lost_at is not None and tier.clock() < lost_at + self._longest_life:
            self._counters.l2_skips += 1
            raise StoreUnavailable

    async def _glance(self, decode: Callable[[bytes], tuple[Any] | None]) -> Found | None:
        """Return what a replica has; it may not have heard of the latest: if that will not do, the primary is asked."""
        store = self._tier.store
        if self._tier.recent.has_any((self._key, *self._tags)):
            return None
        ask = partial(store.read_replica, self._key, self._tags, self._fingerprint)
        try:
            glimpse = await self._tier.asking.ask("read", f"{store.name} replicas", ask, self._counters)
        except StoreUnavailable:
            return None  # the store stops using that replica
        if glimpse is None or glimpse.stored is None:
            return None
        found = self._open(glimpse.stored, glimpse.marks, decode)
        self._unwanted = b""  # what will not do as the replica has it may do as the primary has
        return found

    async def _acquire(self) -> AcquireResult:
        verdict, self._verdict = self._verdict, None
        if verdict is not None and not self._is_lost:
            return verdict
        node = self._tier.store.node_of(self._key)
        try:
            return await self._tier.asking.ask("read", node, self._acquire_surely, self._counters)
        except asyncio.CancelledError:
            self.is_owned = bool(self._token)  # the answer would have been a yes, for all we know
            raise

    @property
    def _marks_life(self) -> float:
        return max(self._tier.marks_life, 2 * self._longest_life)

    async def _acquire_surely(self) -> AcquireResult:
        """Ask once more, under another token, if the request was lost with its connection.

        The first may be executed yet. If that was after an invalidation, it must not give this flight, which
        by then has loaded an old value, the right to store it.
        """
        store, marks_life = self._tier.store, self._marks_life
        acquire = partial(store.acquire, self._key, self._tags)
        begun, self._begun = self._begun, None
        self._token = self._token or new_token()
        try:
            if begun is not None:
                return await store.finish_acquire(begun, self._token)
            self._asked_at = self._tier.clock()
            return await acquire(self._token, self._length, self._unwanted, marks_life, "", self._fingerprint)
        except Exception as error:
            if isinstance(error, TimeoutError | Refused | StoreOverloaded) or "leases" not in self._tier.capabilities:
                raise
        previous_token, self._token = self._token, new_token()
        self._asked_at = self._tier.clock()
        try:
            return await acquire(
                self._token, self._length, self._unwanted, marks_life, previous_token, self._fingerprint
            )
        finally:
            self._release(previous_token, is_sure=False, is_due=False)

    def _open(
        self, stored: Stored, marks: tuple[bytes, ...], decode: Callable[[bytes], tuple[Any] | None]
    ) -> Found | None:
        """Return the value in an envelope, or remember that this one will not do."""
        opened = unseal(self._tier.identity(self._op), stored.envelope, self._fingerprint)
        self._unwanted = b"=" + token_of(stored.envelope, self._fingerprint)
        if opened is None or len(opened.payload) > self._tier.max_bytes:
            if entry_of(stored.envelope, self._fingerprint):  # else it is another release's
                self._counters.l2_undecodable += 1
                self.was_undecodable = True
            return None
        if opened.marks != marks:  # loaded before a tag of its was invalidated
            return None
        self.stored_by = opened.token
        decoded = decode(opened.payload)
        self.was_undecodable = decoded is None
        life = stored.ttl
        if life is not None and opened.lag:
            life = max(life - opened.lag, 0.0)
        return None if decoded is None else Found(decoded[0], opened.payload, life)

    def check(self) -> None:
        """Make sure that the right to load, if this flight has had it, is its own, and will be for a while.

        It is renewed long before half of its life has passed, unless the event loop is late. Then the load and the
        fill would be late too: it is asked for once more, and for longer.

        Raises:
            LeaseLapsed: it may not be. To ask again is safe: the same token gets the same lease, if that is left.
        """
        right = self._right
        if self._is_lost or (right is not None and right.ends_at - self._tier.clock() < right.length / 2):
            self._drop()
            self._length = max(self._length, LONGEST_LEASE)
            raise LeaseLapsed

    def _note_loss(self) -> None:
        """Take note that the store has given the right to another flight, or to none."""
        self._right = None
        self.is_owned, self._is_lost = False, True

    async def fill(
        self, payload: bytes | None, life: float, version: int | None, still_holds: Callable[[], bool]
    ) -> bool:
        """Store *payload* for *life* seconds, and give the right back.

        Args:
            payload: The encoded value; `None` if there is no way to store it.
            life: Seconds.
            version: The value's version, if its operation has them.
            still_holds: Whether nothing was invalidated in this process since the load began.

        A refresh that is refused leaves no value in the store: the flight that has the right now began after it.

        Returns:
            Whether the value is, as far as anybody knows, the one to remember: `False` when the store said no.
        """
        tier = self._tier
        self._has_loaded = True
        # What cannot be compared with the lowest version is remembered for a moment at most.
        if payload is None or self._is_too_long(payload):
            self.is_store_unavailable = self.is_store_unavailable or version is not None
            return not self._is_lost  # the right is given back when the flight ends
        if not self.is_owned and not (self._is_lost and self.is_seized):  # the refusal drops what is older
            return not self._is_lost and (version is None or self.is_store_unavailable)
        envelope = seal(tier.identity(self._op), payload, self._token, version, self._marks, self._fingerprint)
        message = tier.invalidation(self._op).message if self.is_seized else woken(self._op).pack()
        try:
            async with tier.turn(self._key):
                await tier.settle(self._key, self._counters)
                if not self._is_arbitrated and not still_holds():  # else the token tells, better than we can
                    return False
                ask = partial(
                    tier.store.fill,
                    self._key,
                    self._token,
                    envelope,
                    life,
                    version,
                    message,
                    always_publish=self.is_seized,
                )
                is_stored = await tier.asking.ask("write", tier.store.node_of(self._key), ask, self._counters)
        except StoreUnavailable:
            self.is_store_unavailable = True
            return True
        self.is_owned = False
        self._drop()
        self.stored_by = self._token.encode()
        if self.is_seized and self._generation == tier.store.generation:  # else the right may be lost, and others not
            self.is_final = True
            tier.pending.confirm(tier.invalidation(self._op))  # as strong as one, and as easily lost with the server
        if tier.store.has_replicas:  # they may have the older value for a moment
            tier.recent.note(self._key)
        return is_stored

    def _is_too_long(self, payload: bytes) -> bool:
        longest = self._tier.max_bytes
        if len(payload) <= longest:
            return False
        self._counters.l2_errors += 1
        self._tier.asking.note_refusal("store", f"values larger than max_bytes={longest:,}")
        return True

    def let_go(self) -> None:
        """Give the right back, if this flight still has it; nobody waits for that, least of all a caller."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.error is not None and self._breaker is not None:
            # The flight was over before anybody dealt with it; others were lost together with this one, and say less.
            self._tier.asking.note_failure("read", self._breaker, begun.error, self._counters)
        if self.is_owned or (begun is not None and self._token):
            self.is_owned = False
            self._release(self._token, is_sure=self._right is not None)
        self._drop()

    def _drop(self) -> None:
        right, self._right = self._right, None
        if right is not None:
            self._tier.leases.drop(right)

    def _release(self, token: str, *, is_sure: bool, is_due: bool = True) -> None:
        """Give back the right that *token* has, or may have: again and again until that is certain."""
        tier = self._tier
        if self._is_arbitrated:
            message = woken(self._op).pack()
            has_loaded, now = self._has_loaded, tier.clock()
            debt = OwedRelease(self._key, token, self._length, message, self._counters, is_sure, has_loaded, now)
            tier.leases.owe(debt, is_due=is_due)
