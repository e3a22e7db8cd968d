"""Decides, from what the processes of a run wrote down, whether anything happened that must not.

Nothing here knows of the package: a record says what was asked, when, and what came. The rules:

wrong key
    A value names another key than the one that was asked for.
failed read
    A caller got an error; the store's trouble is none of theirs.
from the future
    A version was seen before its write began, or was never written.
stale read
    A read began later than an acknowledged invalidation plus the bound, and saw an older version.
stale at home
    A read began after an invalidation in its own process, acknowledged or not, and saw an older version.
stale store
    A look at the store began after an acknowledged invalidation, and found an older version there.
stale load
    A loader began after a write was committed, and read an older version: the source of truth itself is at fault.
lost write
    A committed version was given twice or left out, or a final read is not the last committed version.
went back
    A process read a version, and then, in a read that began afterwards, an older one. Counted, and a violation only
    where it is promised: who waits for a load that an invalidation overtook gets what it read, which may be newer
    than what others have stored since, up to the moment at which the next invalidation is acknowledged.
too many loads
    More runs of the loader than the first, one for each invalidation, and those that the run allows for.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from records import NOTHING, Record

SHOWN = 20  # violations of one rule that are kept as text; all are counted


@dataclass(frozen=True, slots=True)
class Rules:
    """What a run promises.

    Attributes:
        bound: Seconds after an acknowledgement during which other processes may still answer from memory.
        store_bound: Seconds after an acknowledgement during which the store may still hold the old value: none,
            unless servers are replaced in the run.
        home_bound: Seconds for which a process may forget its own invalidation: none, likewise.
        load_bound: Seconds by which a loader may be behind: none, unless it reads from a replica.
        is_monotonic: Whether a process may never read an older version than before.
        spare_loads: Loads of one key beyond the first and those that invalidations cause; `None` for any number.
    """

    bound: float
    store_bound: float = 0.0
    home_bound: float = 0.0
    load_bound: float = 0.0
    is_monotonic: bool = False
    spare_loads: int | None = None


@dataclass(slots=True)
class Verdict:
    """What the rules say of a run.

    Attributes:
        found: How often each rule was broken.
        shown: The first of each, in words.
        counts: Records of each kind.
        stale: For each read that saw an older version than acknowledged: seconds since that acknowledgement.
        store_stale: The same for the store.
        waits: Seconds that each read took.
        loads: Runs of the loader, by key.
        pending: Invalidations that were not acknowledged.
        backwards: Reads that went back, whether that is a violation or not.
    """

    found: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    stale: list[float] = field(default_factory=list)
    store_stale: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    loads: Counter[int] = field(default_factory=Counter)
    pending: int = 0
    backwards: int = 0

    def blame(self, rule: str, what: str) -> None:
        """Note that *rule* was broken."""
        self.found[rule] += 1
        if self.found[rule] <= SHOWN:
            self.shown.append(f"{rule}: {what}")


class Floor:
    """The version below which nothing may be seen, as it rises with time."""

    def __init__(self, steps: Iterable[tuple[float, int]]) -> None:
        ordered = sorted(steps)
        self._instants = [instant for instant, _ in ordered]
        self._versions = list(accumulate((version for _, version in ordered), max))

    def before(self, instant: float) -> int:
        """Return the highest version that was made known before *instant*, or `NOTHING`."""
        found = bisect_left(self._instants, instant)
        return self._versions[found - 1] if found else NOTHING

    def overtook(self, version: int) -> float | None:
        """Return when a version higher than *version* was first made known."""
        found = bisect_right(self._versions, version)
        return self._instants[found] if found < len(self._instants) else None


def check(records: Iterable[Record], rules: Rules) -> Verdict:
    """Return what *rules* say of *records*, in whatever order they come."""
    verdict = Verdict()
    by_key: defaultdict[int, list[Record]] = defaultdict(list)
    for record in records:
        verdict.counts[record.kind] += 1
        by_key[record.key].append(record)
    for key in sorted(by_key):
        KeyCheck(by_key[key], rules, verdict).run()
    return verdict


class KeyCheck:
    """The rules, applied to the records of one key."""

    def __init__(self, records: Sequence[Record], rules: Rules, verdict: Verdict) -> None:
        self._rules = rules
        self._verdict = verdict
        self._kinds: defaultdict[str, list[Record]] = defaultdict(list)
        for record in sorted(records, key=lambda each: each.start):
            self._kinds[record.kind].append(record)
        self._reads = self._kinds["read"] + self._kinds["final"]  # in the order of their start, as no final is early
        self._written = {write.version: write for write in self._kinds["write"]}
        self._acknowledged = Floor((each.end, each.version) for each in self._kinds["invalidate"] if not each.trouble)

    def run(self) -> None:
        """Apply each rule."""
        for record in (*self._reads, *self._kinds["load"], *self._kinds["sample"]):
            self._check_value(record)
        self._check_reads()
        self._check_store()
        self._check_loads()
        self._check_writes()
        self._check_order()

    def _check_value(self, record: Record) -> None:
        if record.trouble:
            self._verdict.blame("failed read", f"{record}")
        elif record.version != NOTHING and record.of != record.key:
            self._verdict.blame("wrong key", f"{record}")
        elif record.version > 0:
            write = self._written.get(record.version)
            if write is None or write.start > record.end:
                self._verdict.blame("from the future", f"{record}, written by {write}")

    def _check_reads(self) -> None:
        at_home: dict[int, Floor] = {}
        for process in {read.process for read in self._reads}:
            own = [each for each in self._kinds["invalidate"] if each.process == process]
            at_home[process] = Floor((each.start, each.version) for each in own)
        for read in self._reads:
            self._verdict.waits.append(read.end - read.start)
            if read.trouble:
                continue
            self._note_staleness(read, self._verdict.stale)
            self._blame_below("stale read", read, self._acknowledged.before(read.start - self._rules.bound))
            self._blame_below("stale at home", read, at_home[read.process].before(read.start - self._rules.home_bound))

    def _check_store(self) -> None:
        for sample in self._kinds["sample"]:
            if sample.version != NOTHING and not sample.trouble:
                self._note_staleness(sample, self._verdict.store_stale)
                floor = self._acknowledged.before(sample.start - self._rules.store_bound)
                self._blame_below("stale store", sample, floor)

    def _check_loads(self) -> None:
        loads, invalidations = self._kinds["load"], self._kinds["invalidate"]
        self._verdict.pending += sum(each.trouble != "" for each in invalidations)
        if not loads:
            return
        self._verdict.loads[loads[0].key] += len(loads)
        committed = Floor((each.end, each.version) for each in self._kinds["write"])
        for load in loads:
            if not load.trouble:
                self._blame_below("stale load", load, committed.before(load.start - self._rules.load_bound))
        spare = self._rules.spare_loads
        if spare is not None and len(loads) > 1 + len(invalidations) + spare:
            what = f"key {loads[0].key}: {len(loads)} loads, {len(invalidations)} invalidations"
            self._verdict.blame("too many loads", what)

    def _check_writes(self) -> None:
        writes = self._kinds["write"]
        versions = sorted(write.version for write in writes)
        if versions != list(range(1, len(versions) + 1)):
            self._verdict.blame("lost write", f"versions {versions[:SHOWN]}… are not one after the other")
        last = versions[-1] if versions else 0
        for read in self._kinds["final"]:
            if not read.trouble and read.version != last:
                self._verdict.blame("lost write", f"{read}, and the last version is {last}")

    def _check_order(self) -> None:
        for reads in _grouped(self._reads, lambda read: read.process).values():
            seen = Floor((read.end, read.version) for read in reads if not read.trouble)
            for read in reads:
                highest = seen.before(read.start)
                if not read.trouble and read.version < highest:
                    self._verdict.backwards += 1
                    if self._rules.is_monotonic:
                        self._verdict.blame("went back", f"{read}, after version {highest}")

    def _note_staleness(self, record: Record, into: list[float]) -> None:
        since = self._acknowledged.overtook(record.version)
        if since is not None and since < record.start:
            into.append(record.start - since)

    def _blame_below(self, rule: str, record: Record, floor: int) -> None:
        if record.version < floor:
            write = self._written.get(floor)
            self._verdict.blame(rule, f"{record}, when version {floor} was due, of {write}")


def _grouped(records: Iterable[Record], by: Callable[[Record], int]) -> dict[int, list[Record]]:
    groups: defaultdict[int, list[Record]] = defaultdict(list)
    for record in records:
        groups[by(record)].append(record)
    return groups
