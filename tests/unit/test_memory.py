import pytest

from stampede_guard._memory import Memory
from stampede_guard.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    """Return the time, as told."""
    return ManualClock()


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

    assert "salad" == memory.get("a").value  # type: ignore[union-attr]
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
