"""The checker is worth as much as the faults that it finds: each of these is planted in a log that is in order."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from checker import Rules, Verdict, check
from records import CHUNK, NOTHING, Kind, Log, Record, merged, read_value, write_value

BOUND = 1.0
RULES = Rules(bound=BOUND, is_monotonic=True, spare_loads=0)
HOME, AWAY, SAMPLER = 1, 2, 3
KEY = 7

Plant = Callable[[list[Record]], list[Record]]


def record(process: int, kind: Kind, start: float, version: int, *, key: int = KEY, trouble: str = "") -> Record:
    """Return a record of something that took a tenth of a second."""
    return Record(process, kind, key, start, start + 0.1, version, key, trouble)


def good_log() -> list[Record]:
    """Return a log of two processes and a sampler that is in order, with all that may happen."""
    return [
        record(HOME, "load", 10.0, 0),
        record(HOME, "read", 10.0, 0),
        record(AWAY, "read", 10.2, 0),
        record(SAMPLER, "sample", 10.3, 0),
        record(HOME, "write", 11.0, 1),
        record(AWAY, "read", 11.2, 0),  # committed, but nobody was told yet
        record(HOME, "invalidate", 11.3, 1),
        record(SAMPLER, "sample", 11.35, 0),  # while the invalidation was under way
        record(AWAY, "read", 11.5, 0),  # out of its own memory, within the bound
        record(SAMPLER, "sample", 11.5, NOTHING),
        record(HOME, "load", 11.5, 1),
        record(HOME, "read", 11.5, 1),
        record(SAMPLER, "sample", 11.7, 1),
        record(AWAY, "read", 12.5, 1),
        record(AWAY, "write", 13.0, 2),
        record(AWAY, "invalidate", 13.2, 2, trouble="pending"),
        record(HOME, "read", 15.0, 1),  # nothing was acknowledged
        record(AWAY, "load", 15.0, 2),
        record(AWAY, "read", 15.0, 2),
        record(SAMPLER, "sample", 15.0, 1),
        record(AWAY, "final", 20.0, 2),
        record(HOME, "final", 20.0, 2),
        record(AWAY, "final", 20.0, 0, key=8),
    ]


def adds(*planted: Record) -> Plant:
    """Plant records beside the others."""
    return lambda log: [*log, *planted]


def drops(kind: Kind, version: int) -> Plant:
    """Plant a gap where a record was."""
    return lambda log: [each for each in log if (each.kind, each.version) != (kind, version)]


FAULTS: list[tuple[str, Plant]] = [
    ("stale read", adds(record(AWAY, "read", 12.45, 0))),
    ("stale read", adds(record(AWAY, "read", 19.0, 0))),
    ("stale at home", adds(record(HOME, "read", 11.31, 0))),
    ("stale at home", adds(record(AWAY, "read", 13.21, 1))),
    ("stale store", adds(record(SAMPLER, "sample", 11.45, 0))),
    ("stale store", adds(record(SAMPLER, "sample", 19.0, 0))),
    ("stale load", adds(record(AWAY, "load", 13.15, 1))),
    ("wrong key", adds(Record(AWAY, "read", KEY, 12.6, 12.7, 1, 8))),
    ("wrong key", adds(Record(SAMPLER, "sample", KEY, 12.6, 12.7, 1, 8))),
    ("failed read", adds(Record(AWAY, "read", KEY, 12.6, 12.7, NOTHING, KEY, "ConnectionError"))),
    ("from the future", adds(record(AWAY, "read", 12.6, 2))),
    ("from the future", adds(record(AWAY, "read", 19.0, 3))),
    ("from the future", adds(record(SAMPLER, "sample", 12.6, 2))),
    ("lost write", drops("write", 1)),
    ("lost write", adds(record(HOME, "write", 16.0, 2))),
    ("lost write", adds(record(AWAY, "final", 20.0, 1))),
    ("lost write", adds(record(AWAY, "final", 20.0, 1, key=8))),
    ("went back", adds(record(AWAY, "read", 15.2, 1))),
    ("went back", adds(record(HOME, "read", 15.2, 2), record(HOME, "read", 15.4, 1))),
    ("too many loads", adds(record(AWAY, "load", 12.0, 1))),
]


def shuffled(log: list[Record]) -> list[Record]:
    """Return *log* as the files of several processes would have it."""
    Random(len(log)).shuffle(log)
    return log


def test_log_in_order_passes() -> None:
    """Nothing is found where nothing is wrong, and the figures are those of the log."""
    verdict = check(shuffled(good_log()), RULES)

    assert ([], 0) == (verdict.shown, verdict.found.total())
    assert {"read": 8, "final": 3, "write": 2, "invalidate": 2, "load": 3, "sample": 5} == verdict.counts
    assert [pytest.approx(0.1)] == verdict.stale
    assert [] == verdict.store_stale
    assert ({KEY: 3}, 1, 0) == (verdict.loads, verdict.pending, verdict.backwards)


@pytest.mark.parametrize(("rule", "plant"), FAULTS)
def test_planted_fault_is_found(rule: str, plant: Plant) -> None:
    """Each fault is found, under its name."""
    verdict = check(shuffled(plant(good_log())), RULES)

    assert verdict.found[rule] >= 1
    assert any(shown.startswith(f"{rule}: ") for shown in verdict.shown)


def test_every_rule_has_a_fault_that_breaks_it() -> None:
    """No rule of the list at the head of the checker is without a planted fault."""
    import checker  # noqa: PLC0415  # for its text alone

    lines = (checker.__doc__ or "").splitlines()
    rules = {line for line, below in pairwise(lines) if below.startswith("    ") and line[:1].strip()}

    assert {rule for rule, _ in FAULTS} == rules


LAXER: list[tuple[str, Rules, Record]] = [
    ("stale read", Rules(bound=9), record(AWAY, "read", 19.0, 0)),
    ("stale store", Rules(bound=BOUND, store_bound=9), record(SAMPLER, "sample", 19.0, 0)),
    ("stale at home", Rules(bound=BOUND, home_bound=9), record(AWAY, "read", 13.25, 1)),
    ("stale load", Rules(bound=BOUND, load_bound=9, spare_loads=9), record(AWAY, "load", 13.15, 1)),
    ("went back", Rules(bound=BOUND), record(AWAY, "read", 15.2, 1)),
    ("too many loads", Rules(bound=BOUND, spare_loads=1), record(AWAY, "load", 12.0, 1)),
    ("too many loads", Rules(bound=BOUND), record(AWAY, "load", 12.0, 1)),
]


@pytest.mark.parametrize(("rule", "lax", "planted"), LAXER)
def test_laxer_rule_lets_it_pass(rule: str, lax: Rules, planted: Record) -> None:
    """What a run allows is no violation: a bound, a number of loads, an order that is not promised."""
    log = [*good_log(), planted]

    assert check(log, RULES).found[rule] == 1
    assert check(log, lax).found[rule] == 0


def test_figures_of_staleness() -> None:
    """A read's staleness counts from the first acknowledgement that should have kept it from what it saw."""
    verdict = check([*good_log(), record(AWAY, "read", 12.0, 0), record(SAMPLER, "sample", 12.0, 0)], RULES)

    assert [pytest.approx(0.1), pytest.approx(0.6)] == verdict.stale
    assert [pytest.approx(0.6)] == verdict.store_stale


def test_only_the_first_violations_are_kept_as_text() -> None:
    """A run that is wrong throughout is counted to the end, and described to a limit."""
    many = [record(AWAY, "read", 30.0 + number, 0) for number in range(1_000)]
    verdict: Verdict = check([*good_log(), *many], RULES)

    assert verdict.found["stale read"] == 1_000
    assert len(verdict.shown) < 100


def test_log_survives_its_files(tmp_path: Path) -> None:
    """What was written down in several files is read back, whole."""
    records = [record(HOME, "read", float(number), number) for number in range(CHUNK * 2 + 5)]
    for name in ("a", "b"):
        log = Log(tmp_path / name)
        for each in records:
            log.add(each)
        log.flush()

    assert records + records == list(merged([tmp_path / "a", tmp_path / "b"]))


def test_value_says_whose_it_is() -> None:
    """A value names its key and version, and gives them back."""
    assert (17, 123) == read_value(write_value(17, 123))
