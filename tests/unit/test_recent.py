import pytest

from stampede_guard._l2 import recent as recent_module
from stampede_guard._l2.recent import RecentInvalidations
from stampede_guard.testing import ManualClock


@pytest.fixture
def recent(clock: ManualClock) -> RecentInvalidations:
    """Return a memory in which nothing was invalidated."""
    return RecentInvalidations(clock)


def test_nothing_was_invalidated(recent: RecentInvalidations) -> None:
    """At first a replica may be asked for anything."""
    assert not recent.has_any(("a", "b"))


def test_note(recent: RecentInvalidations, clock: ManualClock) -> None:
    """What was invalidated is recent for five seconds, and so is what has it among its keys."""
    recent.note("a")
    clock.advance(4.999)
    before = [recent.has_any(keys) for keys in (("a",), ("b", "a"), ("b",), ())]
    clock.advance(0.001)

    assert [True, True, False, False] == before
    assert not recent.has_any(("a",))


def test_noted_again(recent: RecentInvalidations, clock: ManualClock) -> None:
    """A second invalidation begins anew."""
    for _ in range(2):
        recent.note("a")
        clock.advance(4)

    assert recent.has_any(("a",))


def test_note_all(recent: RecentInvalidations, clock: ManualClock) -> None:
    """When anything may have been invalidated, everything is recent for five seconds."""
    recent.note_all()
    clock.advance(4.999)
    before = recent.has_any(("a",))
    clock.advance(0.001)

    assert (True, False) == (before, recent.has_any(("a",)))


def test_old_ones_take_no_room(recent: RecentInvalidations, clock: ManualClock) -> None:
    """What is not recent any more goes when something else is noted."""
    recent.note("a")
    clock.advance(1)
    recent.note("b")
    clock.advance(4)
    recent.note("c")

    assert ["b", "c"] == list(recent._noted)


def test_noted_again_is_the_latest(recent: RecentInvalidations, clock: ManualClock) -> None:
    """What was noted again stands in nobody's way: those that are old by then go."""
    for op in "aba":
        recent.note(op)
        clock.advance(2)
    recent.note("c")
    clock.advance(1)
    recent.note("d")

    assert ["a", "c", "d"] == list(recent._noted)


def test_too_many(recent: RecentInvalidations, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """When there is no room for another, everything is recent, and those that were noted need no room."""
    monkeypatch.setattr(recent_module, "_MAX_RECENT", 2)
    for key in "ab":
        recent.note(key)
    before = recent.has_any(("z",))
    clock.advance(1)
    recent.note("c")
    clock.advance(4.5)

    assert (False, True) == (before, recent.has_any(("z",)))
    assert ["c"] == list(recent._noted)
