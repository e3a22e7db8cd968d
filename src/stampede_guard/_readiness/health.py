"""What is wrong with a guard in one event loop."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .._l2.tier import Tier
from .._loops import LoopState, LoopStates

Code: TypeAlias = Literal[
    "not_open", "load_overdue", "loads_queued", "store_unavailable", "bus_lost", "invalidations_unconfirmed"
]

_OVERDUE = 1.0  # seconds that a load whose time is up may take to end
_ROUNDS = 10  # loads that may wait for each slot
_MANY_UNCONFIRMED = 1_000
_LATELY = 60.0  # seconds for which the loss of unconfirmed invalidations is a reason


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that is wrong.

    Attributes:
        code: `"not_open"`: the guard has a store, and is not open in the running event loop;
            `"load_overdue"`: a load runs on, more than a second after its `load_timeout`;
            `"loads_queued"`: more than ten loads wait for each slot of `max_loads`;
            `"store_unavailable"`: a server does not answer, and its breaker is open;
            `"bus_lost"`: nothing tells of invalidations in other processes;
            `"invalidations_unconfirmed"`: more than a thousand, or within the last minute more than could be
            remembered.
        text: The same with numbers, in English; it names servers, and neither keys nor values.
    """

    code: Code
    text: str


@dataclass(frozen=True, slots=True)
class Health:
    """What is wrong with a guard in the running event loop.

    Attributes:
        reasons: What is wrong; empty if nothing is.
    """

    reasons: tuple[Reason, ...] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.reasons

    def as_dict(self) -> dict[str, object]:
        """Return plain builtins, for JSON."""
        reasons = [{"code": reason.code, "text": reason.text} for reason in self.reasons]
        return {"is_healthy": self.is_healthy, "reasons": reasons}


def health_of(states: LoopStates) -> Health:
    """Return the health of a guard in the running event loop; it need not be open, and no loop need run."""
    try:
        state = states.here()
    except RuntimeError:  # no loop is running
        state = None
    if state is None or (states.needs_entering and not state.depth):
        not_open = Reason("not_open", "the guard has a store, and is not open in the running event loop")
        return Health((not_open,) if states.needs_entering else ())
    return Health((*_reasons_of_loads(state), *_reasons_of_store(state)))


def _reasons_of_loads(state: LoopState) -> Iterator[Reason]:
    now = asyncio.get_running_loop().time()
    overdue = [now - since for since in state.board.overdue() if now - since >= _OVERDUE]
    if overdue:
        many = f"{len(overdue):,} loads run on after their" if len(overdue) > 1 else "a load runs on after its"
        text = f"{many} load_timeout, for {max(overdue):.1f} s by now"
        yield Reason("load_overdue", text)
    for queued, slots in state.limits.queues():
        if queued > _ROUNDS * slots:
            yield Reason("loads_queued", f"{queued:,} loads wait for the slots of a max_loads={slots}")


def _reasons_of_store(state: LoopState) -> Iterator[Reason]:
    if state.tier is not None:
        for node in state.tier.access.open_nodes():
            yield Reason("store_unavailable", f"{node} does not answer: calls go on without it")
    silence = None if state.backplane is None else state.backplane.untrusted_for
    if silence is not None:
        yield Reason("bus_lost", f"the bus is lost for {silence:.1f} s: memory keeps values for a second at most")
    if state.tier is not None:
        yield from _reasons_of_invalidations(state.tier)


def _reasons_of_invalidations(tier: Tier) -> Iterator[Reason]:
    number, lost_at = len(tier.pending), tier.pending.lost_at
    if number > _MANY_UNCONFIRMED:
        yield Reason("invalidations_unconfirmed", f"{number:,} invalidations are not confirmed by the store")
    elif lost_at is not None and (seconds := tier.clock() - lost_at) < _LATELY:
        text = f"{seconds:.1f} s ago there were too many unconfirmed invalidations to remember"
        yield Reason("invalidations_unconfirmed", text)
