"""Counters of each operation, and snapshots of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ._speed.forms import HitCounter


class Counters(HitCounter):
    """The live counters of one operation: plain attributes, so that a hit costs one addition."""

    __slots__ = (
        "abandoned",
        "evictions",
        "executions",
        "expirations",
        "failures",
        "handovers",
        "in_flight",
        "joins",
        "l2_errors",
        "l2_hits",
        "l2_misses",
        "l2_skips",
        "l2_undecodable",
        "l2_unstorable",
        "l2_waits",
        "loads",
        "overloaded",
        "overtaken",
        "recent_failures",
        "stale",
    )

    def __init__(self) -> None:
        super().__init__()
        self.joins = 0
        self.executions = 0
        self.l2_hits = 0
        self.l2_misses = 0
        self.l2_skips = 0
        self.l2_errors = 0
        self.l2_undecodable = 0
        self.l2_unstorable = 0
        self.l2_waits = 0
        self.loads = 0
        self.failures = 0
        self.handovers = 0
        self.abandoned = 0
        self.overloaded = 0
        self.overtaken = 0
        self.recent_failures = 0
        self.stale = 0
        self.evictions = 0
        self.expirations = 0
        self.in_flight = 0


@dataclass(frozen=True, slots=True, repr=False)
class Stats:
    """A snapshot of the counters of one operation, or of all operations of a guard.

    `calls` is always `l1_hits + joins + executions + recent_failures`. Where several threads count at once, a count
    may be lost.

    Attributes:
        l1_hits: Calls answered by this process's memory.
        joins: Calls that found a flight already running: the duplicates saved. Almost all waited for it; `max_waiters`
            may have refused some.
        executions: Flights launched.
        l2_hits: Flights answered by the store.
        l2_misses: Flights that found no value in the store.
        l2_waits: Flights that waited for another process's load.
        l2_skips: Store operations not tried, because the breaker was open, the queue too long, or too many
            invalidations were unconfirmed.
        l2_errors: Store operations that failed, ran out of time or were refused, and values larger than `max_bytes`.
        l2_undecodable: Stored values that were not this op's, or could not be decoded; treated as misses.
        l2_unstorable: Loads whose value cannot be stored, or would come back as something else.
        loads: Runs of the loader.
        handovers: Second runs of a loader whose first took longer than `handover_after`.
        failures: Flights that ended in an error, a timeout or a cancellation; with `coalesce_many`, one for each id.
        abandoned: Flights whose waiters had all left before they landed.
        overloaded: Loads that got no slot, because too many waited or they waited for too long, and calls that
            `max_waiters` refused.
        overtaken: Loads whose value was not stored: an invalidation or a refresh came meanwhile, the lease was lost,
            or the version is too old.
        recent_failures: Calls that ended with `RecentFailure`, because a load had failed and the next was not due.
        stale: Calls that were answered at once with an old value, and loads that were, because they failed.
        in_flight: Flights that are running now.
        evictions: Entries that this process's memory gave up to make room for others.
        expirations: Entries that it removed because their time was over.
        entries: Entries that it has now, in all event loops.
        bytes: Their size; `None` if the guard has no `max_size`, and so does not measure them.
        operations: The same for each operation, by its key; empty in the snapshot of one.
    """

    l1_hits: int = 0
    joins: int = 0
    executions: int = 0
    l2_hits: int = 0
    l2_misses: int = 0
    l2_skips: int = 0
    l2_errors: int = 0
    l2_undecodable: int = 0
    l2_unstorable: int = 0
    l2_waits: int = 0
    loads: int = 0
    handovers: int = 0
    failures: int = 0
    abandoned: int = 0
    overloaded: int = 0
    overtaken: int = 0
    recent_failures: int = 0
    stale: int = 0
    in_flight: int = 0
    evictions: int = 0
    expirations: int = 0
    entries: int = 0
    bytes: int | None = None
    operations: Mapping[str, "Stats"] = field(default_factory=dict[str, "Stats"])

    @property
    def calls(self) -> int:
        """All calls, however they were answered."""
        return self.l1_hits + self.joins + self.executions + self.recent_failures

    @property
    def l2_reads(self) -> int:
        """Reads that the store answered, with a value or without one."""
        return self.l2_hits + self.l2_misses + self.l2_undecodable

    def as_dict(self) -> dict[str, object]:
        """Return plain builtins, for JSON."""
        numbers = {name: getattr(self, name) for name in _COUNTERS}
        operations = {name: stats.as_dict() for name, stats in self.operations.items()}
        held = {"entries": self.entries, "bytes": self.bytes}
        return {"calls": self.calls, **numbers, **held, "operations": operations}

    def __repr__(self) -> str:
        sentence = (
            f"{self.calls:,} calls = {self.l1_hits:,} L1 hits + {self.joins:,} joins + "
            f"{self.executions:,} executions ({self.l2_hits:,} L2 hits, {self.loads:,} loads)"
        )
        troubles = [f"{getattr(self, name):,} {name}" for name in _TROUBLES if getattr(self, name)]
        return f"<Stats {', '.join([sentence, *troubles])}, {self.in_flight:,} in flight>"


_TROUBLES = (
    "stale",
    "recent_failures",
    "failures",
    "overloaded",
    "abandoned",
    "overtaken",
    "l2_errors",
    "l2_undecodable",
    "l2_unstorable",
    "l2_skips",
)
_COUNTERS = ("l1_hits", *Counters.__slots__)


class MemoryStats:
    """What memory has of each operation now, in all event loops.

    Args:
        is_measured: Whether its size is known.

    Attributes:
        is_measured: As given.
    """

    def __init__(self, *, is_measured: bool = False) -> None:
        self.is_measured = is_measured
        self._of: dict[object, tuple[int, int]] = {}

    def add(self, counters: object, entries: int, size: int) -> None:
        """Count *entries* of *size* bytes for the operation that has *counters*."""
        known, known_size = self._of.get(counters, (0, 0))
        self._of[counters] = known + entries, known_size + size

    def of(self, counters: object) -> tuple[int, int | None]:
        """Return the entries of the operation that has *counters*, and their bytes if these are known."""
        entries, size = self._of.get(counters, (0, 0))
        return entries, size if self.is_measured else None


def snapshot(counters: Counters, memory: MemoryStats | None = None) -> Stats:
    """Return a snapshot of *counters*, and of what memory has."""
    numbers: dict[str, Any] = {name: getattr(counters, name) for name in _COUNTERS}
    entries, size = (memory or MemoryStats()).of(counters)
    return Stats(**numbers, entries=entries, bytes=size)


def total(operations: Iterable[tuple[str, Counters]], memory: MemoryStats | None = None) -> Stats:
    """Return the sum over *operations*, with a snapshot for each name, which several may have."""
    memory = memory or MemoryStats()
    by_name: dict[str, Stats] = {}
    for name, counters in operations:
        now = snapshot(counters, memory)
        by_name[name] = _sum((by_name[name], now), memory) if name in by_name else now
    return _sum(by_name.values(), memory, by_name)


def _sum(parts: Iterable[Stats], memory: MemoryStats, operations: Mapping[str, Stats] | None = None) -> Stats:
    parts = list(parts)
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in (*_COUNTERS, "entries")}
    size = sum(part.bytes or 0 for part in parts) if memory.is_measured else None
    return Stats(**sums, bytes=size, operations=operations or {})
