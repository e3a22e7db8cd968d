from math import inf

import pytest
from arguments import Ending
from inside import untyped

from stampede_guard._memory.entries import OVERHEAD
from stampede_guard._memory.epochs import Generation, Lineage
from stampede_guard._memory.l1 import Memory
from stampede_guard._stats import Counters
from stampede_guard.testing import ManualClock


@pytest.fixture
def memory(clock: ManualClock) -> Memory:
    """Return a memory with room for three entries."""
    return Memory(3, clock)


def ops_in(memory: Memory) -> str:
    """Return the ops that are remembered; looking makes them recently used."""
    return "".join(op for op in "abcdef" if memory.get(op) is not None)


@pytest.mark.parametrize("value", ["soup", None, False, 0, ""])
def test_what_was_put_is_found(value: object, memory: Memory, clock: ManualClock) -> None:
    """An entry holds its value, any value, and the instant at which it stops being fresh."""
    memory.put("a", value, 5)

    entry = memory.get("a")

    assert entry is not None
    assert (value, clock() + 5) == (entry.value, entry.fresh_until)


def test_what_was_not_put_is_not_found(memory: Memory) -> None:
    """There is no entry for an unknown op."""
    assert memory.get("a") is None


def test_entry_is_fresh_until_its_instant(memory: Memory, clock: ManualClock) -> None:
    """An entry is there just before its life is over, and gone just then."""
    memory.put("a", "soup", 5)

    clock.advance(4.999)
    before = memory.get("a")
    clock.advance(0.001)

    assert before is not None
    assert memory.get("a") is None


def test_expired_entry_takes_no_room(memory: Memory, clock: ManualClock) -> None:
    """An entry that was found too old is dropped."""
    memory.put("a", "soup", 5)
    clock.advance(5)

    memory.get("a")

    assert 0 == len(memory)


@pytest.mark.parametrize("life", [0, -1])
def test_no_life_at_all(life: float, memory: Memory) -> None:
    """An entry that has no time left is never found."""
    memory.put("a", "soup", life)

    assert memory.get("a") is None


def test_entry_ends_with_its_generation(memory: Memory) -> None:
    """What belongs to a definition that is over is not found, and takes no room; the next one's is."""
    lineage = Lineage()
    memory.put("a", "soup", 5, (), lineage.generation)
    lineage.start_generation()

    assert memory.get("a") is None
    assert 0 == len(memory)
    memory.put("a", "soup", 5, (), lineage.generation)
    assert memory.get("a") is not None


def test_each_entry_has_its_own_life(memory: Memory, clock: ManualClock) -> None:
    """Entries of operations with different lives expire apart."""
    memory.put("a", "soup", 5)
    memory.put("b", "salad", 10)

    clock.advance(7)

    assert "b" == ops_in(memory)


def test_putting_again_replaces(memory: Memory, clock: ManualClock) -> None:
    """A second put replaces the value and begins a new life."""
    memory.put("a", "soup", 5)
    clock.advance(4)
    memory.put("a", "salad", 5)
    clock.advance(4)

    assert "salad" == untyped(memory.get("a")).value
    assert 1 == len(memory)


def test_least_recently_used_goes_first(memory: Memory) -> None:
    """A full memory lets go of what was read or put longest ago."""
    for op in "abc":
        memory.put(op, "soup", 5)
    memory.get("a")
    memory.put("d", "soup", 5)

    assert "acd" == ops_in(memory)


def test_drop(memory: Memory) -> None:
    """`drop` forgets one op, whether it is there or not."""
    memory.put("a", "soup", 5)
    memory.put("b", "soup", 5)

    memory.drop("a")
    memory.drop("f")

    assert "b" == ops_in(memory)


def test_clear(memory: Memory) -> None:
    """`clear` forgets everything."""
    memory.put("a", "soup", 5)

    memory.clear()

    assert 0 == len(memory)


# Old values


def test_entry_has_a_window(memory: Memory, clock: ManualClock) -> None:
    """Past its freshness an entry is an old value, up to the end of its window, and then it is gone."""
    memory.put("a", "soup", 5, stale=3)
    seen: list[tuple[bool, bool, bool]] = []
    for step in (0, 4.999, 0.001, 2.999, 0.001):
        clock.advance(step)
        seen.append((memory.get("a") is not None, memory.old("a") is not None, "a" in memory))

    fresh, old, gone = (True, False, True), (False, True, True), (False, False, False)
    assert [fresh, fresh, old, old, gone] == seen


def test_old_value_ends_its_room_by_itself(memory: Memory, clock: ManualClock) -> None:
    """`old` too drops what is past its window, and finds nothing where nothing is."""
    memory.put("a", "soup", 5, stale=3)
    clock.advance(8)

    assert [None, None] == [memory.old("a"), memory.old("b")]
    assert 0 == len(memory)


def test_old_value_ends_with_its_generation(memory: Memory, clock: ManualClock) -> None:
    """What a definition that is over has left is no old value either."""
    lineage = Lineage()
    memory.put("a", "soup", 5, (), lineage.generation, stale=3)
    clock.advance(5)
    lineage.start_generation()

    assert memory.old("a") is None
    assert 0 == len(memory)


def test_reading_an_old_value_is_a_use(memory: Memory, clock: ManualClock) -> None:
    """An old value that callers take stays, when another entry has to go."""
    memory.put("a", "soup", 5, stale=60)
    clock.advance(5)
    memory.put("b", "soup", 5)
    memory.put("c", "soup", 5)
    memory.old("a")
    memory.put("d", "soup", 5)

    assert memory.old("a") is not None
    assert "b" not in memory


@pytest.mark.parametrize(("age", "born"), [(0.0, 1_000.0), (2.5, 997.5), (inf, -inf)])
def test_birth(age: float, born: float, memory: Memory) -> None:
    """An entry knows when its value came from its load, if that is known."""
    memory.put("a", "soup", 5, age=age)

    assert born == untyped(memory.get("a")).born_at


def test_soften(memory: Memory, clock: ManualClock) -> None:
    """A softened entry is old at once, for its whole window from then on; doing so again changes nothing."""
    memory.put("a", "soup", 5, stale=3)
    clock.advance(1)
    memory.soften("a")
    fresh, instants = memory.get("a"), [untyped(memory.old("a")).fresh_until]
    clock.advance(2.999)
    memory.soften("a")
    instants.append(untyped(memory.old("a")).fresh_until)
    clock.advance(0.001)

    assert (None, [1_001.0, 1_001.0]) == (fresh, instants)
    assert memory.old("a") is None


@pytest.mark.parametrize("window", [0, 3])
def test_soften_what_cannot_be_used_any_more(window: float, memory: Memory, clock: ManualClock) -> None:
    """An entry without a window is dropped, and so is one whose window is over; an unknown op is no error."""
    memory.put("a", "soup", 5, stale=window)
    clock.advance(8 if window else 1)
    memory.soften("a")
    memory.soften("f")

    assert 0 == len(memory)


def test_nothing_old_without_trust(memory: Memory, clock: ManualClock) -> None:
    """While no message would tell of an invalidation, nothing has a window; when trust ends, no old value is left."""
    memory.trust(clock() + 3)
    memory.put("a", "soup", 1, stale=60)
    clock.advance(2)
    trusted = memory.old("a")
    clock.advance(1)
    distrusted = memory.old("a")
    memory.put("b", "soup", 60, stale=60)
    clock.advance(1)

    assert trusted is not None
    assert (None, None, 0) == (distrusted, memory.old("b"), len(memory))


# Bytes


def sized(clock: ManualClock, max_size: int, maxsize: int = 100) -> Memory:
    """Return a memory for *max_size* bytes, without those that each entry takes besides."""
    return Memory(maxsize, clock, max_size=max_size)


def test_bytes_are_bounded(clock: ManualClock) -> None:
    """Entries are evicted until the bytes of a new one have room, however many that takes."""
    memory = sized(clock, 3 * (OVERHEAD + 100))
    for op in "abc":
        memory.put(op, "soup", 5, size=100)
    full = ops_in(memory)
    memory.put("d", "soup", 5, size=2 * 100 + OVERHEAD)

    assert ("abc", "cd") == (full, "".join(op for op in "abcd" if op in memory))
    assert [(None, 2, 3 * (OVERHEAD + 100))] == memory.shares()


def test_bytes_of_what_is_gone_are_free(clock: ManualClock) -> None:
    """However an entry goes, its bytes go with it; one that is put again counts once."""
    memory = sized(clock, 10_000)
    for op in "abcd":
        memory.put(op, "soup", 5, ("soups",) if op == "a" else (), size=100)
    memory.put("b", "salad", 5, size=300)
    sizes = [memory.shares()[0][2]]
    memory.drop("b")
    memory.drop_tagged("soups")
    sizes.append(memory.shares()[0][2])
    clock.advance(5)
    ops_in(memory)

    assert [600 + 4 * OVERHEAD, 200 + 2 * OVERHEAD] == sizes
    assert [(None, 0, 0)] == memory.shares()


def test_too_large(clock: ManualClock) -> None:
    """An entry that is larger than the whole memory is not kept; what it would replace goes, the others stay."""
    memory = sized(clock, 1_000)
    memory.put("a", "soup", 5, size=10)
    memory.put("b", "soup", 5, size=10)
    memory.put("a", "feast", 5, size=1_001 - OVERHEAD)

    assert "b" == ops_in(memory)


def test_size_is_estimated(clock: ManualClock) -> None:
    """Without a size the value is measured, if bytes are limited; if not, nothing is."""
    memories = [sized(clock, 10_000), Memory(3, clock)]
    for memory in memories:
        memory.put("a", b"x" * 1_000, 5)

    measured, unmeasured = (memory.shares()[0][2] for memory in memories)
    assert 1_000 + OVERHEAD < measured < 1_100 + OVERHEAD
    assert 0 == unmeasured


# Shares


@pytest.mark.parametrize("by", ["entries", "bytes"])
def test_share(by: str, clock: ManualClock) -> None:
    """An operation's oldest entries go when it would have more than its share; others' entries stay, used or not."""
    counters = Counters()
    own = Generation(counters)
    memory = Memory(8, clock) if by == "entries" else sized(clock, 8 * (OVERHEAD + 10))
    memory.put("x", "salad", 5, size=10)
    for op in "abc":
        memory.put(op, "soup", 5, (), own, size=10, max_share=0.25)
        memory.get(op)
    memory.put("b", "soup", 5, (), own, size=10, max_share=0.25)
    memory.put("d", "soup", 5, (), own, size=10, max_share=0.25)

    assert "bd" == ops_in(memory)
    assert "x" in memory
    assert 2 == counters.evictions
    assert 2 == next(entries for whose, entries, _ in memory.shares() if whose is counters)


def test_share_of_nearly_nothing(clock: ManualClock) -> None:
    """A share that comes to less than an entry is one entry, unless that is too large for the share."""
    memory = sized(clock, 1_000, 3)
    for op in "ab":
        memory.put(op, "soup", 5, size=0, max_share=0.4)
    memory.put("c", "soup", 5, size=10, max_share=0.4)

    assert "b" == ops_in(memory)


# Whose entries


def test_shares(memory: Memory, clock: ManualClock) -> None:
    """Each operation's entries, evictions and expirations are counted for it; what is dropped is neither."""
    counters = [Counters(), Counters()]
    mine, other = map(Generation, counters)
    for op, generation in zip("abcd", (mine, mine, other, other), strict=True):
        memory.put(op, "soup", 5, (), generation)
    memory.drop("c")
    clock.advance(5)
    memory.get("b")

    assert [(counters[0], 0, 0), (counters[1], 1, 0)] == memory.shares()
    assert [(1, 1), (0, 0)] == [(each.evictions, each.expirations) for each in counters]


# Tags


def test_drop_tagged(memory: Memory) -> None:
    """`drop_tagged` forgets every op that has the tag, whatever other tags it has, and no other op."""
    memory.put("a", "soup", 5, ("soups", "hot"))
    memory.put("b", "salad", 5, ("salads",))
    memory.put("c", "soup", 5, ("soups",))

    memory.drop_tagged("soups")
    memory.drop_tagged("drinks")

    assert "b" == ops_in(memory)


def test_putting_again_replaces_the_tags(memory: Memory) -> None:
    """What was put anew has the new tags alone."""
    memory.put("a", "soup", 5, ("soups",))
    memory.put("a", "salad", 5, ("salads",))

    memory.drop_tagged("soups")

    assert "a" == ops_in(memory)
    memory.drop_tagged("salads")
    assert "" == ops_in(memory)


def test_no_tags_are_kept_of_what_is_gone(memory: Memory, clock: ManualClock) -> None:
    """However an entry goes, evicted, dropped, expired or replaced, its tags go with it."""
    for op in "abcdef":
        memory.put(op, "soup", 5, ("soups", f"only {op}"))
    evicted = {*memory._entries._ops_by_tag}
    memory.drop("d")
    memory.put("e", "soup", 5)
    dropped = {*memory._entries._ops_by_tag}
    clock.advance(5)
    memory.get("f")

    assert {"soups", "only d", "only e", "only f"} == evicted
    assert {"soups", "only f"} == dropped
    assert ({}, {}) == (memory._entries._tags, memory._entries._ops_by_tag)


@pytest.mark.parametrize("way", ["drop", "drop_tagged", "evict"])
def test_tag_that_is_there_twice(way: str, memory: Memory) -> None:
    """An entry whose tags come to the same, as of an order whose buyer is its seller, goes like any other."""
    memory.put("a", "soup", 5, ("user-7", "user-7"))

    if way == "drop":
        memory.drop("a")
    elif way == "drop_tagged":
        memory.drop_tagged("user-7")
    else:
        for op in "bcd":
            memory.put(op, op, 5)

    assert "a" not in memory
    assert ({}, {}) == (memory._entries._tags, memory._entries._ops_by_tag)


def test_tags_of_everything(memory: Memory) -> None:
    """`clear` forgets the tags too."""
    memory.put("a", "soup", 5, ("soups",))

    memory.clear()
    memory.drop_tagged("soups")

    assert {} == memory._entries._ops_by_tag


# Trust


def test_memory_that_nobody_would_tell_is_trusted_for_ever(memory: Memory, clock: ManualClock) -> None:
    """Where there is no bus, an entry lives as long as it was given."""
    memory.put("a", "soup", 1e9)
    clock.advance(1e9 - 1)

    assert "a" == ops_in(memory)


def test_trust_ends(memory: Memory, clock: ManualClock) -> None:
    """Up to the instant to which it is trusted memory answers; then everything is forgotten, and that is told."""
    lapses: list[str] = []
    memory.on_trust_lost = lambda: lapses.append("lapse")
    memory.trust(clock() + 3)
    memory.put("a", "soup", 60)
    clock.advance(2.999)
    before = ops_in(memory)
    clock.advance(0.001)
    after = ops_in(memory)

    assert ("a", "", ["lapse"], 0) == (before, after, lapses, len(memory))


def test_trust_is_prolonged(memory: Memory, clock: ManualClock) -> None:
    """Who hears something in time goes on believing what it has."""
    memory.trust(clock() + 3)
    memory.put("a", "soup", 60)
    clock.advance(2)
    memory.trust(clock() + 3)
    clock.advance(2)

    assert "a" == ops_in(memory)


@pytest.mark.parametrize("notice", ["get", "put"])
def test_after_a_lapse_entries_live_for_a_second(notice: str, memory: Memory, clock: ManualClock) -> None:
    """Whoever notices that the trust is over: what is put from then on lives for a second at most, and not longer."""
    memory.trust(clock() + 3)
    memory.put("a", "soup", 60)
    clock.advance(3)
    if notice == "get":
        memory.get("a")
    memory.put("b", "soup", 60)
    memory.put("c", "soup", 0.5)
    lives = [entry.fresh_until - clock() for op in "bc" if (entry := memory.get(op)) is not None]

    assert [1, 0.5] == lives
    assert "bc" == ops_in(memory)


def test_silence_that_nobody_noticed(memory: Memory, clock: ManualClock) -> None:
    """A word that comes too late does not bring back what should have been forgotten."""
    lapses: list[str] = []
    memory.on_trust_lost = lambda: lapses.append("lapse")
    memory.trust(clock() + 3)
    memory.put("a", "soup", 60)
    clock.advance(3)
    memory.trust(clock() + 3)
    memory.put("b", "soup", 60)
    clock.advance(2)

    assert ("b", ["lapse"]) == (ops_in(memory), lapses)


def test_distrust(memory: Memory, clock: ManualClock) -> None:
    """Without a bus everything is forgotten, and what comes in lives for a second, until there is trust again."""
    memory.put("a", "soup", 60)
    memory.distrust()
    before = ops_in(memory)
    memory.put("b", "soup", 60)
    clock.advance(0.999)
    within = ops_in(memory)
    clock.advance(0.001)
    after = ops_in(memory)
    memory.trust(clock() + 3)
    memory.put("c", "soup", 60)
    clock.advance(2)

    assert ("", "b", "", "c") == (before, within, after, ops_in(memory))


def test_contains(memory: Memory) -> None:
    """Whether something is held can be asked without using it."""
    memory.put("a", "soup", 5)

    assert [True, False] == ["a" in memory, "b" in memory]


# Destructors of values that use the memory


@pytest.mark.parametrize("way", ["drop", "put", "expiry", "eviction", "tag"])
def test_destructor_that_puts_again(way: str, memory: Memory, clock: ManualClock) -> None:
    """What the destructor of a value puts under its op is an entry like any other: its tag and its room are right."""
    memory.put("a", Ending(lambda: memory.put("a", "salad", 60, ["green"])), 5, ["menus"])
    if way == "drop":
        memory.drop("a")
    elif way == "put":
        memory.put("a", "soup", 60, ["menus"])
    elif way == "expiry":
        clock.advance(5)
        memory.get("a")
    elif way == "tag":
        memory.drop_tagged("menus")
    else:
        for op in "bcd":
            memory.put(op, "soup", 60)

    entry = memory.get("a")
    assert entry is not None
    assert "salad" == entry.value
    memory.drop_tagged("menus")
    assert "a" in memory
    memory.drop_tagged("green")
    assert "a" not in memory
    assert len(memory) <= 3


def test_destructor_that_empties_memory(memory: Memory) -> None:
    """A value that empties memory when it goes, to make room for another, takes that with it, and no error comes."""
    memory.put("a", Ending(memory.clear), 60)

    memory.put("a", "soup", 60)

    assert (0, "") == (len(memory), ops_in(memory))
