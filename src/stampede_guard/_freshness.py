"""Old values: which one may be an answer, and when.

This is decided here and nowhere else.

```
loaded ──── fresh ──── fresh_until ──── stale ──── answers_until ──── stale_if_error ──── kept_until
             a hit                 the answer at once,           the answer if the load fails,
                                   while one flight loads        or during a pause
```
The instants are those of the guard's clock. In the store nothing is an instant: an entry has its window beside it, and
the store tells the time that is left. The words are those of RFC 5861.
"""

import logging
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple, cast

from ._flights.flight import Flight, running_flight
from ._l2.lease import OldValue as StoredOldValue
from ._loops import LoopState
from ._memory.answer import Answer, Previous, Source
from ._operations.operation import Operation
from ._speed.forms import Slot

logger = logging.getLogger("stampede_guard")

_FAILING = 4096  # ops of one operation that are known to fail


class Origin(NamedTuple):
    """What is known of an answer besides its value; the instants are as for `OldValue`."""

    source: Source
    born_at: float
    fresh_until: float
    is_stale: bool = False

    def answer(self, state: LoopState, operation: Operation, op: str, kept: Any) -> Answer[Any]:
        """Return the answer for *op* that has *kept* as its value."""
        now, policy = state.clock(), operation.policy
        return Answer(
            self.source,
            None if self.born_at == -inf else now - self.born_at,
            self.is_stale and now >= self.fresh_until,
            max(self.fresh_until - now, 0.0),
            policy.stale or 0.0,
            policy.stale_if_error or 0.0,
            max(now - self.fresh_until, 0.0) if self.is_stale else 0.0,
            kept,
            operation.for_caller,
            partial(_entity_tag, state, operation, op, kept),
        )


def _entity_tag(state: LoopState, operation: Operation, op: str, kept: Any) -> str | None:
    """Return the entity tag of *kept*, which L1 may have under *op*."""
    slot = state.memory.slot_with(op, kept)
    return operation.entity_tags.find(op, slot, partial(operation.bytes_of, kept))


class OldValue(NamedTuple):
    """A value whose life is over, or nearly so.

    Attributes:
        kept: The value as L1 keeps it.
        born_at: Instant at which it was loaded; `-inf` if that is not known.
        fresh_until: Instant at which its life ends.
        answers_until: Instant up to which callers get it while a flight refreshes it.
        kept_until: Instant up to which it is the answer if the load fails.
    """

    kept: Any
    born_at: float
    fresh_until: float
    answers_until: float
    kept_until: float

    @property
    def origin(self) -> Origin:
        """The origin of an answer that it is."""
        return Origin("memory", self.born_at, self.fresh_until, is_stale=True)


def origin_in_memory(state: LoopState, op: str, slot: Slot) -> Origin:
    """Return the origin of a fresh value of *op* in L1."""
    return Origin("memory", slot.born_at, slot.fresh_until + state.memory.margin(op))


def old_in_memory(state: LoopState, operation: Operation, op: str) -> OldValue | None:
    """Return what L1 has of *op* past its life, if a call of *operation* may get it."""
    slot = state.memory.old(op)
    return None if slot is None else _old_value(state, operation, op, slot)


def _old_value(state: LoopState, operation: Operation, op: str, slot: Slot) -> OldValue:
    """Return what L1 has of *op*, with the instants that hold for calls of *operation*."""
    policy, fresh_until, last = operation.policy, slot.fresh_until + state.memory.margin(op), slot.stale_until
    answers_until = min(fresh_until + (policy.stale or 0.0), last)
    return OldValue(slot.value, slot.born_at, fresh_until, answers_until, min(fresh_until + policy.window, last))


def old_in_store(state: LoopState, operation: Operation, stored: StoredOldValue) -> OldValue:
    """Return what the store has of an op, and a call of *operation* may get."""
    now, policy = state.clock(), operation.policy
    kept = operation.isolate(stored.payload) if policy.isolate else stored.value
    fresh_until, last = now + stored.fresh_for, now + stored.usable_for
    answers_until = min(fresh_until + (policy.stale or 0.0), last)
    return OldValue(kept, now - stored.age, fresh_until, answers_until, last)


def early_margin(state: LoopState, operation: Operation, op: str) -> float:
    """Return the seconds by which a value of *op* in the store counts as old before it is."""
    if operation.policy.early is None:
        return 0.0
    old = old_in_memory(state, operation, op)
    if old is not None:  # what was due in memory is due in the store too, or this process would read it again and again
        return max(old.answers_until - state.clock(), 0.0)
    life = operation.policy.l2_ttl
    longest = inf if life is None or callable(life) else life / 2  # as in L1: nothing is due in its first half
    return min(operation.early_margin(), longest)


def origin_of(state: LoopState, op: str, flight: Flight[Any], kept: Any) -> Origin:
    """Return the origin of what a caller of *flight* has got, whose op is *op*."""
    if flight.has_landed_with(kept):
        if flight.origin is None:  # by a load that L2 has nothing to do with
            slot, now = state.memory.get(op), state.clock()
            end = now if slot is None else origin_in_memory(state, op, slot).fresh_until
            flight.origin = ("load", now, end)
        return Origin(*flight.origin)
    interim: OldValue | None = flight.interim
    if interim is None and flight.old_values is not None:
        interim = flight.old_values.old
    return cast("OldValue", interim).origin


def last_in_memory(state: LoopState, operation: Operation, op: str) -> OldValue | None:
    """Return what L1 has of *op*, fresh (then this is a refresh) or old."""
    slot = state.memory.get(op)
    if slot is None:
        return old_in_memory(state, operation, op)
    return _old_value(state, operation, op, slot)


def answer_in_pause(state: LoopState, operation: Operation, op: str) -> OldValue | None:
    """Return the old value of *op*, whose loads have failed; `None` if only the store may have one.

    Raises:
        RecentFailure: there is none.
    """
    old, counters = old_in_memory(state, operation, op), operation.counters
    if old is None or state.clock() >= old.kept_until:
        if state.pauses.may_be_stored(op):
            return None
        counters.recent_failures += 1
        raise state.pauses.error(op)
    counters.l1_hits += 1
    counters.stale += 1
    return old


@dataclass(slots=True, eq=False)
class Freshness:
    """The old value that one flight is to replace, and what callers get of it.

    Attributes:
        old: That value, if one is known.
    """

    _state: LoopState
    _operation: Operation
    old: OldValue | None

    def at_once(self) -> OldValue | None:
        """Return the known old value, if it is the answer before a flight has begun."""
        policy = self._operation.policy
        if self.old is None or policy.stale_wait or self._state.clock() >= self.old.answers_until:
            return None
        return self.old

    def offer(self, flight: Flight[Any], old: OldValue | None = None) -> None:
        """Let callers of *flight* have the known old value, or *old* if that is younger, as long as it may answer."""
        if old is not None and (self.old is None or old.fresh_until >= self.old.fresh_until):
            self.old = old
        policy = self._operation.policy
        if self.old is None or flight.landed or (flight.is_refresh and policy.stale is None):
            return
        if policy.stale_wait and flight.interim is None:
            flight.release_later(policy.stale_wait, self._release)
        else:
            self._release(flight)

    def _release(self, flight: Flight[Any]) -> None:
        old = self.old
        if old is not None and self._state.clock() < old.answers_until:
            flight.release(old)

    def previous(self) -> Previous | None:
        """Return what the loader is told of the old value."""
        old, operation = self.old, self._operation
        if old is None:
            return None
        value = operation.for_caller(old.kept)
        age = None if old.born_at == -inf else self._state.clock() - old.born_at
        return Previous(value, age, operation.version_of(value))

    def note_success(self, op: str) -> None:
        """Note that *op* has a fresh value: its next failure is the first again."""
        self._state.pauses.forget(op)
        failing = self._operation.failing
        if op in failing:
            failing.discard(op)
            if not failing:
                logger.info("%s: loads succeed again", self._operation.name)

    def note_failure(self, op: str, error: Exception, *, has_marker: bool, may_be_stored: bool) -> None:
        """Begin a pause after a load of *op* that failed because of unavailability.

        Args:
            op: The op id.
            error: The load's.
            has_marker: Whether the store has the pause for the whole cluster.
            may_be_stored: Whether the store may have an old value.
        """
        operation, pauses = self._operation, self._state.pauses
        longest = operation.policy.longest_pause
        if longest is None:
            return
        pause = pauses.note_failure(op, error, longest, is_stored=has_marker, may_be_stored=may_be_stored)
        is_first = not operation.failing
        if len(operation.failing) < _FAILING:
            operation.failing.add(op)
        if is_first:
            kind = type(error).__name__
            logger.warning("%s: a load failed (%s); no load of that key begins for %.1f s", operation.name, kind, pause)

    def rescuer(self) -> OldValue | None:
        """Return the old value that callers of a failed load get; `None` without one."""
        if self.old is None or self._state.clock() >= self.old.kept_until:
            return None
        self._operation.counters.stale += 1
        return self.old


def previous() -> Previous | None:
    """Return the value that the running loader is to replace, with age and version; `None` if none is known.

    It is known to a load that an old value was found for, and to a refresh of what this process has in memory. A
    loader can then ask the database only for what is newer, and return the same value anew. A loader of many ids is
    told of none.
    """
    flight = running_flight()
    if flight is None or flight.old_values is None:
        return None
    return cast("Previous | None", flight.old_values.previous())
