import dataclasses
import json
from typing import Any

import pytest
from inside import untyped

from stampede_guard import Stats
from stampede_guard._stats import Counters, MemoryStats, snapshot, total


def counters_with(**numbers: int) -> Counters:
    """Return counters that stand at *numbers*."""
    counters = Counters()
    for name, number in numbers.items():
        setattr(counters, name, number)
    return counters


def test_counters_begin_at_zero() -> None:
    """Nothing was counted before the first call."""
    assert Stats() == snapshot(Counters())


def test_every_counter_is_in_the_snapshot() -> None:
    """Stats has a field for each counter, and each shows its own number."""
    numbers = {name: position for position, name in enumerate(("l1_hits", *Counters.__slots__), start=1)}
    stats = snapshot(counters_with(**numbers))

    assert {field.name for field in dataclasses.fields(Stats)} == {*numbers, "entries", "bytes", "operations"}
    assert numbers == {name: getattr(stats, name) for name in numbers}


def test_snapshot_stands_still() -> None:
    """What is counted later does not change a snapshot."""
    counters = counters_with(loads=1)
    stats = snapshot(counters)
    counters.loads += 1

    assert 1 == stats.loads


def test_calls() -> None:
    """Every call was a hit in memory, joined a flight or launched one."""
    assert 6 == Stats(l1_hits=1, joins=2, executions=3).calls


def test_l2_reads() -> None:
    """The store answered with a value, without one, or with one that was of no use."""
    assert 6 == Stats(l2_hits=1, l2_misses=2, l2_undecodable=3, l2_errors=10, l2_skips=10).l2_reads


def test_total_of_nothing() -> None:
    """Without operations everything is zero."""
    assert Stats() == total([])


def test_total() -> None:
    """The total is the sum of the operations, and shows each of them."""
    stats = total([("menu", counters_with(loads=1, joins=2)), ("hours", counters_with(loads=3))])

    assert (4, 2) == (stats.loads, stats.joins)
    assert {"menu": Stats(loads=1, joins=2), "hours": Stats(loads=3)} == stats.operations


def test_total_adds_up_namesakes() -> None:
    """Counters under one name are shown as one operation."""
    stats = total([("menu", counters_with(loads=1)), ("menu", counters_with(loads=2, in_flight=1))])

    assert {"menu": Stats(loads=3, in_flight=1)} == stats.operations
    assert 3 == stats.loads


@pytest.mark.parametrize("is_measured", [False, True])
def test_what_memory_has(*, is_measured: bool) -> None:
    """Each operation shows its entries in all loops, and their bytes where these are measured; the total is the sum."""
    menu, hours, idle = Counters(), Counters(), Counters()
    memory = MemoryStats(is_measured=is_measured)
    for owner, entries, size in ((menu, 2, 300), (hours, 1, 50), (menu, 3, 400)):
        memory.add(owner, entries, size)
    stats = total([("menu", menu), ("hours", hours), ("idle", idle)], memory)

    shown = {name: (each.entries, each.bytes) for name, each in {**stats.operations, "total": stats}.items()}
    expected = {"menu": (5, 700), "hours": (1, 50), "idle": (0, 0), "total": (6, 750)}
    assert {name: (entries, size if is_measured else None) for name, (entries, size) in expected.items()} == shown


def test_as_dict_is_json() -> None:
    """As plain builtins, the stats go through JSON unchanged, derived numbers and operations included."""
    stats = total([("menu", counters_with(l1_hits=1, executions=2))])
    plain: Any = stats.as_dict()

    assert plain == json.loads(json.dumps(plain))
    assert (3, 1, 3) == (plain["calls"], plain["l1_hits"], plain["operations"]["menu"]["calls"])
    assert {} == plain["operations"]["menu"]["operations"]


def test_as_dict_is_complete() -> None:
    """No counter is left out."""
    shown = {"calls", "operations", "l1_hits", "entries", "bytes", *Counters.__slots__}

    assert shown == set(Stats().as_dict())


def test_repr_is_a_sentence() -> None:
    """Where there was no trouble, a repr tells where the calls went."""
    stats = Stats(l1_hits=1_200, joins=30, executions=4, l2_hits=3, loads=1, in_flight=1)
    expected = "<Stats 1,234 calls = 1,200 L1 hits + 30 joins + 4 executions (3 L2 hits, 1 loads), 1 in flight>"

    assert expected == repr(stats)


@pytest.mark.parametrize("trouble", ["failures", "abandoned", "overtaken", "l2_errors", "l2_undecodable", "l2_skips"])
def test_repr_shows_trouble(trouble: str) -> None:
    """Trouble shows in the repr when there was some."""
    counts: dict[str, Any] = {trouble: 2}

    assert f", 2 {trouble}, 0 in flight>" in repr(Stats(**counts))


def test_stats_are_frozen() -> None:
    """A snapshot cannot be mistaken for the live counters."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        untyped(Stats()).loads = 1
