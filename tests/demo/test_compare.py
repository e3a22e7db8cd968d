import argparse
import json
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from demo_api import compare
from demo_api.compare.measurement import Measurement, Samples
from demo_api.compare.options import parse
from demo_api.compare.plan import Run, Scenario, Shape, plan
from demo_api.compare.service import REPOSITORY, Counts
from demo_api.compare.targets import targets

# The tiny comparison takes its half a minute in whichever test is the first to ask for it.
pytestmark = pytest.mark.timeout(180)

SECONDS = 0.4


@pytest.fixture(scope="module")
def report(brief: tuple[str, ...], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the report on a tiny comparison: one mode, and the ceiling."""
    folder = tmp_path_factory.mktemp("report")
    flags = (f"--seconds={SECONDS}", "--users=10", "--restaurants=3", "--modes=on", f"--output={folder}")
    finished = subprocess.run(
        [*brief, "compare", *flags], env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert 0 == finished.returncode, finished.stdout + finished.stderr
    (folder / "printed.txt").write_text(finished.stdout)
    return folder


@pytest.fixture
def results(report: Path) -> Any:
    """The numbers of the tiny comparison."""
    return json.loads((report / "results.json").read_text())


def arguments(*flags: str) -> argparse.Namespace:
    """What the command line makes of *flags*."""
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    return parser.parse_args(flags)


def measurement(run: Run, milliseconds: Sequence[float], **counted: int) -> Measurement:
    """A run of one second whose requests took *milliseconds*."""
    latency = np.array(milliseconds) / 1000
    due_at = np.linspace(0, 1, len(latency))
    counts = dict.fromkeys(Counts.__slots__, 0) | counted
    return Measurement(run, 5, Samples(due_at, latency, np.ones_like(latency)), Counts(**counts), [])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seconds", "0"], "--seconds 0: must be a number of at least 1"),
        (["--seconds", "nan"], "--seconds nan: must be a number of at least 1"),
        (["--seconds", "soon"], "--seconds soon: must be a number of at least 1"),
        (["--users", "-1"], "--users -1: must be a whole number from 1 to 4000"),
        (["--users", "2.5"], "--users 2.5: must be a whole number from 1 to 4000"),
        (["--restaurants", "9999"], "--restaurants 9999: must be a whole number from 1 to 500"),
        (["--modes", "foo"], "--modes foo: 'foo' is none of off, aiocache, on"),
        (["--modes", "on,on"], "--modes on,on: each mode may be named once"),
        (["--output", __file__], f"--output {__file__}: that is a file, and must be a folder"),
    ],
)
def test_bad_flag(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that cannot be gets one line with the value and the rule, and exit code 2."""
    code = compare.run(arguments(*flags))

    assert 2 == code
    assert ("", f"{said}\n") == capsys.readouterr()


def test_bad_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A setting that cannot be is refused before anything starts, too."""
    monkeypatch.setenv("L2_TTL", "-3")

    code = compare.run(arguments())

    assert 2 == code
    assert capsys.readouterr().err.startswith("L2_TTL='-3'")


def test_modes_take_turns() -> None:
    """Each scenario is run in each mode before the next one, and first of all at saturation."""
    runs = plan(parse(arguments()))

    assert ["off", "aiocache", "on", "prebuilt"] * 2 + ["off", "aiocache", "on"] * 2 == [run.mode for run in runs]
    assert [Shape.SATURATION] * 8 + [Shape.CONSTANT_RATE] * 6 == [run.shape for run in runs]
    assert {Scenario.COLD_BOOT} == {run.scenario for run in runs[:4]}


def test_defaults_finish_in_time() -> None:
    """The default windows leave a good part of the four minutes for starting, draining and the report."""
    seconds = sum(run.seconds for run in plan(parse(arguments())))

    assert seconds <= 150


def test_missed_target_is_told() -> None:
    """A p99 that fell by less than was wanted is a missed target, with what was measured."""
    off = Run("off", Scenario.COLD_BOOT, Shape.CONSTANT_RATE, 1)
    on = Run("on", Scenario.COLD_BOOT, Shape.CONSTANT_RATE, 1)

    first = targets([measurement(off, [100.0] * 10), measurement(on, [50.0] * 10)], l2_ttl=10)[0]

    assert ("-50.0% (100.0 → 50.0 ms)", "-83%", False) == (first.measured, first.wanted, first.is_met)


def test_targets_need_their_runs() -> None:
    """After a comparison of one mode, nothing is said about modes that were not run."""
    run = Run("aiocache", Scenario.COLD_BOOT, Shape.SATURATION, 1)

    assert [] == targets([measurement(run, [1.0])], l2_ttl=10)


def test_queries_are_counted_for_each_expiry() -> None:
    """One query for each restaurant and L2 expiry is allowed, and one more is too many."""
    run = Run("on", Scenario.WARMED_UP, Shape.SATURATION, 1)

    verdicts = [
        targets([measurement(run, [1.0, 1.0], postgres_queries=queries)], l2_ttl=0.6)[-1].is_met for queries in (10, 11)
    ]

    assert [True, False] == verdicts


def test_results(results: Any) -> None:
    """The numbers of each run are there and fit together."""
    runs = {(run["mode"], run["scenario"], run["shape"]): run for run in results["runs"]}

    assert 6 == len(runs)
    assert all(run["errors"] == run["unanswered"] == 0 < run["requests"] for run in runs.values())
    assert all(
        run["latency_ms"]["fastest"]
        <= run["latency_ms"]["p50"]
        <= run["latency_ms"]["p99"]
        <= run["latency_ms"]["slowest"]
        for run in runs.values()
    )
    assert 0 == runs["prebuilt", "warmed_up", "saturation"]["counts"]["calls"]


def test_guard_reads_each_menu_once_per_expiry(results: Any) -> None:
    """With the guard, Postgres is asked at most once per restaurant and L2 expiry, as the report says."""
    verdict = next(target for target in results["targets"] if target["title"].startswith("Postgres queries"))

    assert verdict["is_met"], verdict


def test_constant_rate_is_the_same_for_all(results: Any) -> None:
    """At the constant rate each mode is asked as often, at the announced share of the ceiling."""
    requests = [run["requests"] for run in results["runs"] if run["shape"] == "constant rate"]

    assert requests == pytest.approx([SECONDS * results["rate"]] * 2, rel=0.1)


def test_page_opens_offline(report: Path) -> None:
    """The page holds its styles and pictures itself."""
    page = (report / "report.html").read_text()

    assert 12 == page.count("<svg")
    assert [] == re.findall(r"""(?:src|href)=["'](?!#)|@import|url\((?!#)|<script|<link""", page)


def test_picture_for_the_readme(report: Path) -> None:
    """The picture is a small SVG of its own."""
    picture = (report / "comparison.svg").read_text()

    assert picture.startswith("<svg")
    assert len(picture) < 300 * 1024


def test_terminal(report: Path) -> None:
    """The terminal shows each run's table, the targets, and what generator and service share."""
    printed = (report / "printed.txt").read_text()

    assert all(title in printed for title in ("Cold boot, saturation", "Warmed up, constant rate", "Figures to reach"))
    assert "cores of one machine" in " ".join(printed.split())


def test_interrupt_stops_everything_and_prints_what_is_finished(
    brief: tuple[str, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    """Ctrl-C ends all processes of the comparison, and the finished runs are shown."""
    flags = (f"--seconds={SECONDS}", "--users=5", "--restaurants=3", "--modes=on", f"--output={tmp_path}")
    with subprocess.Popen(
        [*brief, "compare", *flags], env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.readline()  # the first run has finished, and the second one begins
        children: list[psutil.Process] = []
        while not children:
            children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        printed += process.communicate()[0]

    assert 130 == process.returncode
    assert [] == psutil.wait_procs(children, timeout=30)[1]
    assert "Cold boot, saturation (latencies in ms)" in printed
    assert [] == list(tmp_path.iterdir())
