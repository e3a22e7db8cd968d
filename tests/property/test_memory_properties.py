"""Random use of a memory, beside a dict that forgets nothing: what it has is right, and within its bounds."""

from math import inf
from typing import NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stampede_guard._memory.entries import OVERHEAD
from stampede_guard._memory.epochs import Lineage
from stampede_guard._memory.l1 import UNTRUSTED_TTL, Memory
from stampede_guard._stats import Counters
from stampede_guard.testing import ManualClock

OPS = [f"op-{number}" for number in range(20)]
TAGS = ["red", "green", "blue"]
SHARE = 0.5

ops = st.sampled_from(OPS)
lives = st.sampled_from([0.0, 1.0, 3.0, 10.0])
sizes = st.sampled_from([0, 10, 500, 3_000])


class Known(NamedTuple):
    """What was put last under an op, and not dropped since."""

    value: int
    fresh_until: float
    stale_until: float
    tags: frozenset[str]
    owner: int
    generation: object
    size: int


class MemoryMachine(RuleBasedStateMachine):
    """A memory, the dict beside it, and two operations of which one has half of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.counters = [Counters(), Counters()]
        self.lineages = [Lineage(counters) for counters in self.counters]
        self.known: dict[str, Known] = {}
        self.values = 0
        self.is_trusted = True

    @initialize(maxsize=st.sampled_from([1, 2, 5, 12, 40]), max_size=st.sampled_from([None, 900, 4_000, 20_000]))
    def make(self, maxsize: int, max_size: int | None) -> None:
        """Begin with an empty memory."""
        self.maxsize, self.max_size = maxsize, max_size
        self.memory = Memory(maxsize, self.clock, max_size=max_size)

    @rule(
        op=ops, life=lives, stale=lives, tags=st.sets(st.sampled_from(TAGS)), owner=st.sampled_from([0, 1]), size=sizes
    )
    def put(self, *, op: str, life: float, stale: float, tags: set[str], owner: int, size: int) -> None:
        """Put a new value; it is there at once, unless it is too large."""
        self.values += 1
        generation = self.lineages[owner].generation
        share = SHARE if owner else None
        self.memory.put(op, self.values, life, tuple(tags), generation, stale, size=size, max_share=share)
        size = size + OVERHEAD if self.max_size is not None else 0
        self.known.pop(op, None)
        largest = (self.max_size or inf) * (share or 1)
        assert (op in self.memory) == (size <= largest)
        if size <= largest:
            now = self.clock()
            if not self.is_trusted:
                life, stale = min(life, UNTRUSTED_TTL), 0.0
            fresh_until = now + life
            self.known[op] = Known(
                self.values, fresh_until, fresh_until + stale, frozenset(tags), owner, generation, size
            )

    @rule(op=ops)
    def get(self, op: str) -> None:
        """What is found is what was put last, and fresh; what was put and is fresh is found, or was evicted."""
        was_there, slot, known = op in self.memory, self.memory.get(op), self.known.get(op)
        is_fresh = known is not None and self.clock() < known.fresh_until and not self.is_over(known)
        assert (slot is not None) == (was_there and is_fresh)
        if slot is not None and known is not None:
            assert (known.value, known.fresh_until) == (slot.value, slot.fresh_until)

    @rule(op=ops)
    def old(self, op: str) -> None:
        """An old value is past its freshness and within its window."""
        was_there, slot, known = op in self.memory, self.memory.old(op), self.known.get(op)
        is_old = known is not None and known.fresh_until <= self.clock() < known.stale_until
        assert (slot is not None) == (was_there and is_old and known is not None and not self.is_over(known))
        if slot is not None and known is not None:
            assert known.value == slot.value

    def is_over(self, known: Known) -> bool:
        """Whether what is known was left by a definition that is over."""
        return known.generation is not self.lineages[known.owner].generation

    @rule(op=ops)
    def soften(self, op: str) -> None:
        """Let an entry be old from now on."""
        self.memory.soften(op)
        known, now = self.known.get(op), self.clock()
        if known is None:
            return
        window = known.stale_until - known.fresh_until
        if window <= 0 or now >= known.stale_until:
            del self.known[op]
        elif now < known.fresh_until:
            self.known[op] = known._replace(fresh_until=now, stale_until=now + window)

    @rule(op=ops)
    def drop(self, op: str) -> None:
        """Drop an op."""
        self.memory.drop(op)
        self.known.pop(op, None)

    @rule(tag=st.sampled_from(TAGS))
    def drop_tagged(self, tag: str) -> None:
        """Drop what has a tag."""
        self.memory.drop_tagged(tag)
        self.known = {op: known for op, known in self.known.items() if tag not in known.tags}

    @rule()
    def clear(self) -> None:
        """Drop everything."""
        self.memory.clear()
        self.known.clear()

    @rule(is_trusted=st.booleans())
    def change_trust(self, *, is_trusted: bool) -> None:
        """Lose trust, and with it everything, or regain it."""
        self.is_trusted = is_trusted
        if is_trusted:
            self.memory.trust(inf)
        else:
            self.memory.distrust()
            self.known.clear()

    @rule(owner=st.sampled_from([0, 1]))
    def define_anew(self, owner: int) -> None:
        """End what an operation has left."""
        self.lineages[owner].start_generation()

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.advance(seconds)

    @rule()
    def sweep(self) -> None:
        """Make a pass; nothing that is over is left, and nothing else is gone."""
        self.clock.advance(1.0)
        before = {op for op in OPS if op in self.memory}
        self.memory._sweeper.step()
        over = {op for op, known in self.known.items() if self.clock() >= known.stale_until}
        assert before - over == {op for op in OPS if op in self.memory}

    @invariant()
    def has_what_was_put(self) -> None:
        """Only what was put and not dropped is there; what else is missing was evicted or was over."""
        entries = self.memory._entries
        assert entries.slots.keys() <= self.known.keys()
        gone = sum(counters.evictions + counters.expirations for counters in self.counters)
        assert len(self.known.keys() - entries.slots.keys()) <= gone + self.ended()

    def ended(self) -> int:
        """Return how many were left by definitions that are over, and may have been removed for that."""
        return sum(self.is_over(known) for known in self.known.values())

    @invariant()
    def is_within_bounds(self) -> None:
        """Neither the memory nor a share of it has more than it may."""
        entries = self.memory._entries
        assert len(self.memory) <= self.maxsize
        assert self.max_size is None or entries.size <= self.max_size
        shared = [known for op, known in self.known.items() if known.owner == 1 and op in entries.slots]
        assert len(shared) <= max(SHARE * self.maxsize, 1)
        assert self.max_size is None or sum(known.size for known in shared) <= SHARE * self.max_size

    @invariant()
    def is_consistent(self) -> None:
        """All that is noted of the entries is of those that are there, and adds up."""
        entries = self.memory._entries
        there = {op: self.known[op] for op in entries.slots}
        assert {op: entries.slots[op].place for op in there} == {op: place for place, op in enumerate(entries.ops)}
        assert entries._queues._small.keys() | entries._queues._main.keys() == there.keys()
        assert len(entries._queues._small) + len(entries._queues._main) == len(there) == entries.currsize
        assert sum(known.size for known in there.values()) == entries.size
        by_tag = {tag: {op for op, known in there.items() if tag in known.tags} for tag in TAGS}
        assert {tag: ops for tag, ops in by_tag.items() if ops} == entries._ops_by_tag
        assert {op for op, known in there.items() if known.tags} == entries._tags.keys()
        for number, counters in enumerate(self.counters):
            mine = [known.size for known in there.values() if known.owner == number]
            found = [(count, size) for whose, count, size in self.memory.shares() if whose is counters]
            assert found in ([(len(mine), sum(mine))], [] if not mine else None)
        assert [] == entries._removed


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(
    deadline=None, max_examples=100, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
