import sys
import threading

import pytest

from stampede_guard._memory.epochs import Epochs


def test_epoch_stays_until_bumped() -> None:
    """Two looks at an op without an invalidation in between are equal."""
    epochs = Epochs()

    assert epochs.current("a") == epochs.current("a")


@pytest.mark.parametrize(("is_all", "stays"), [(False, [False, True]), (True, [False, False])], ids=["one", "all"])
def test_bump(is_all: bool, stays: list[bool]) -> None:
    """An invalidation begins a new epoch of its op alone; one of everything also of ops that never had one."""
    epochs = Epochs()
    epochs.bump("a")
    before = epochs.current("a"), epochs.current("b")

    _ = epochs.bump_all() if is_all else epochs.bump("a")

    assert stays == [epochs.current("a") == before[0], epochs.current("b") == before[1]]


def test_epochs_never_come_back() -> None:
    """Whatever is bumped in whatever order, no epoch of an op is seen twice."""
    epochs, seen = Epochs(max_ops=2), []

    for op in "aabcabcddddabca":
        epochs.bump(op)
        seen.append(epochs.current("a"))
        if op == "d":
            epochs.bump_all()
            seen.append(epochs.current("a"))
    changes = [now for now, before in zip(seen, [None, *seen], strict=False) if now != before]

    assert len(changes) == len(set(changes))


def test_epochs_are_bounded() -> None:
    """When there is no room for another op, all begin a new epoch; an op that is there needs no room."""
    epochs = Epochs(max_ops=2)
    epochs.bump("a")
    epochs.bump("b")
    before = epochs.current("a"), epochs.current("z")

    epochs.bump("b")
    in_place = epochs.current("a"), epochs.current("z")
    epochs.bump("c")

    assert before == in_place
    assert [False, False] == [epochs.current("a") == before[0], epochs.current("z") == before[1]]
    assert 1 == len(epochs._ops)


def test_no_bump_is_lost_between_threads() -> None:
    """Invalidations of one op in two threads at once are two: each draws a number of its own."""
    epochs, bumps = Epochs(), 20_000
    interval = sys.getswitchinterval()

    def bump() -> None:
        for _ in range(bumps):
            epochs.bump("a")

    threads = [threading.Thread(target=bump) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    epochs.bump("b")

    assert (0, 2 * bumps + 1) == epochs.current("b")


def test_tags_are_part_of_the_epoch() -> None:
    """An invalidation of a tag begins a new epoch of each op that has it, and of no other."""
    epochs = Epochs()
    asked: list[tuple[str, tuple[str, ...]]] = [
        ("a", ("soups", "hot")),
        ("b", ("soups",)),
        ("c", ("hot",)),
        ("soups", ()),
    ]
    before = [epochs.current(op, tags) for op, tags in asked]

    epochs.bump_tag("soups")

    assert [False, False, True, True] == [
        epochs.current(op, tags) == was for (op, tags), was in zip(asked, before, strict=True)
    ]


def test_invalidations_of_an_op_and_everything_count_for_what_has_tags() -> None:
    """An op with tags has its own epochs too."""
    epochs = Epochs()
    seen = [epochs.current("a", ("soups",))]

    epochs.bump("a")
    seen.append(epochs.current("a", ("soups",)))
    epochs.bump_all()
    seen.append(epochs.current("a", ("soups",)))

    assert 3 == len(set(seen))


def test_tags_are_bounded_with_the_ops() -> None:
    """Tags take the same room as ops: when it is full, all begin a new epoch."""
    epochs = Epochs(max_ops=2)
    epochs.bump("a")
    epochs.bump_tag("soups")
    before = epochs.current("b", ("salads",))

    epochs.bump_tag("drinks")

    assert before != epochs.current("b", ("salads",))
    assert 1 == len(epochs._ops)
