import pytest

from stampede_guard._l2 import unconfirmed
from stampede_guard._l2.unconfirmed import Invalidation, UnconfirmedInvalidations
from stampede_guard.testing import ManualClock

EVERYTHING = Invalidation("everything", b"c", is_tag=True)


@pytest.fixture
def pending(clock: ManualClock) -> UnconfirmedInvalidations:
    """Return no invalidations yet, of a store that can invalidate everything."""
    return UnconfirmedInvalidations(clock, EVERYTHING)


def asked(key: str, version: int | None = None) -> Invalidation:
    """Return an invalidation of *key*."""
    return Invalidation(key, b"i" + key.encode(), is_tag=False, version=version)


def added(pending: UnconfirmedInvalidations, key: str, version: int | None = None) -> Invalidation:
    """Return the invalidation of *key* that waits after one was added."""
    pending.add(asked(key, version))
    waiting = pending.of(key)
    assert waiting is not None
    return waiting


def keys(pending: UnconfirmedInvalidations) -> list[str]:
    """Return the keys of what is waiting."""
    return [invalidation.key for invalidation in pending.all()]


def test_what_was_asked_for_is_waiting(pending: UnconfirmedInvalidations) -> None:
    """An invalidation is waiting, under its key, until it is confirmed."""
    waiting = added(pending, "a")
    before = keys(pending), pending.of("b")

    pending.confirm(waiting)

    assert ((["a"], None), []) == (before, keys(pending))
    assert pending.of("a") is None


def test_confirmation_of_an_earlier_request(pending: UnconfirmedInvalidations) -> None:
    """An answer to a request that was sent before the last one confirms nothing: it may have come too early."""
    earlier = added(pending, "a")
    later = added(pending, "a")

    pending.confirm(earlier)

    assert later is pending.of("a")


@pytest.mark.parametrize(
    ("versions", "expected"),
    [((None, None), None), ((None, 3), 3), ((3, None), 3), ((3, 5), 5), ((5, 3), 5)],
)
def test_highest_version_counts(
    versions: tuple[int | None, int | None], expected: int | None, pending: UnconfirmedInvalidations
) -> None:
    """Of several requests for a key the one that waits carries the highest version."""
    waiting = [added(pending, "a", version) for version in versions]

    assert expected == waiting[-1].version


@pytest.mark.parametrize(
    ("versions", "expected"),
    [((8, None), 8), ((None, 8), 8), ((8, 3), 8), ((3, 8), 8), ((8, None, None), 8), ((None, None), None)],
)
def test_repetition_asks_for_the_highest_version(
    versions: tuple[int | None, ...], expected: int | None, pending: UnconfirmedInvalidations
) -> None:
    """A later confirmation without a version, or with a lower one, takes nothing from what is said again."""
    for version in versions:
        pending.confirm(added(pending, "a", version))

    pending.repeat()

    assert [expected] == [waiting.version for waiting in pending.all()]


@pytest.mark.parametrize(
    ("first", "then", "is_soft"), [("s", "s", True), ("s", "i", False), ("i", "s", False), ("i", "i", False)]
)
@pytest.mark.parametrize("is_confirmed", [False, True])
def test_hard_invalidation_wins(
    first: str, then: str, is_soft: bool, is_confirmed: bool, pending: UnconfirmedInvalidations
) -> None:
    """Of a soft and a hard one for a key, the hard one is sent, and repeated, with the highest version."""
    for kind, version in ((first, 7), (then, 5)):
        pending.add(Invalidation("a", kind.encode(), is_tag=False, version=version, is_soft=kind == "s"))
        if is_confirmed:
            (waiting,) = pending.all()
            pending.confirm(waiting)
    pending.repeat()

    message = b"s" if is_soft else b"i"
    assert [Invalidation("a", message, is_tag=False, version=7, is_soft=is_soft)] == pending.all()


def test_concerns(pending: UnconfirmedInvalidations) -> None:
    """What waits for any of some keys is found."""
    nothing = pending.concerns(("a", "b"))
    a, c = added(pending, "a"), added(pending, "c")

    assert ([], [a], [c, a]) == (nothing, pending.concerns(("a", "b")), pending.concerns(("c", "b", "a")))


def test_too_many(pending: UnconfirmedInvalidations, monkeypatch: pytest.MonkeyPatch) -> None:
    """When too many are waiting, the invalidation of everything takes their place; one that waits needs no room."""
    monkeypatch.setattr(unconfirmed, "_MAX_UNCONFIRMED", 2)
    for key in "aab":
        pending.add(asked(key))
    in_place = keys(pending)
    pending.add(asked("c"))
    instead = pending.all()
    pending.add(asked("d"))

    assert ["a", "b"] == in_place
    assert [EVERYTHING] == instead
    assert ["everything", "d"] == keys(pending)
    assert pending.lost_at is None


def test_too_many_of_a_store_that_cannot_clear(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everything cannot be invalidated, what was forgotten is told by when that was."""
    monkeypatch.setattr(unconfirmed, "_MAX_UNCONFIRMED", 2)
    pending = UnconfirmedInvalidations(clock, None)
    for key in "ab":
        pending.add(asked(key))
    before = pending.lost_at
    clock.advance(5)
    pending.add(asked("c"))

    assert (None, clock(), ["c"]) == (before, pending.lost_at, keys(pending))


# What a store has confirmed, and may lose


def test_repeat(pending: UnconfirmedInvalidations, clock: ManualClock) -> None:
    """What was confirmed within the last minute can be asked for again, once."""
    pending.confirm(added(pending, "old"))
    clock.advance(1)
    pending.confirm(added(pending, "new", 7))
    clock.advance(60)
    pending.repeat()
    again = pending.all()
    for waiting in again:
        pending.confirm(waiting)
    pending.repeat()
    pending.repeat()

    assert [asked("new", 7)] == again
    assert [asked("new", 7)] == pending.all()


def test_repeat_does_not_lower_a_version(pending: UnconfirmedInvalidations) -> None:
    """What was confirmed is repeated beside what is waiting for the same key: the highest version counts."""
    pending.confirm(added(pending, "a", 5))
    pending.add(asked("a", 3))

    pending.repeat()

    assert [asked("a", 5)] == pending.all()


def test_confirmed_ones_are_bounded_in_number(
    pending: UnconfirmedInvalidations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of very many confirmed ones the latest are kept; one that is confirmed again is among these."""
    for key in "abca":
        pending.confirm(added(pending, key))
    monkeypatch.setattr(unconfirmed, "_MAX_UNCONFIRMED", 2)
    pending.confirm(added(pending, "d"))
    monkeypatch.setattr(unconfirmed, "_MAX_UNCONFIRMED", 100)
    pending.repeat()

    assert ["a", "d"] == keys(pending)


def test_confirmed_ones_are_bounded_in_time(pending: UnconfirmedInvalidations, clock: ManualClock) -> None:
    """Those that were confirmed longer than a minute ago are let go when another one is."""
    for key in "ab":
        pending.confirm(added(pending, key))
    clock.advance(60.5)

    pending.confirm(added(pending, "c"))

    assert ["c"] == list(pending._confirmed)
