import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from demo_api.compare.measurement import Samples

# A timetable, not the closed loop: what a fault does to requests shows as well in a hundred a second.
GENTLY = {"-u": 1, "--rate": 100, "--connections": 10}

Flags = dict[str, object]
Locust = Callable[[str, Flags], subprocess.Popen[str]]


@pytest.fixture
def own_stage(menus_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lends the menus to scenarios that start their own servers."""
    monkeypatch.setenv("DATABASE_URL", menus_url)


@pytest.mark.timeout(120)  # up to six servers and a service have to start
@pytest.mark.parametrize(
    ("scenario", "flags"),
    [
        ("redis_outage", {"--outage": 1}),
        pytest.param("redis_outage", {"--outage": 1, "--frozen": None}, marks=pytest.mark.long),
        ("failover", {}),
    ],
)
def test_fault_fails_no_request(scenario: str, flags: Flags, own_stage: None, locust: Locust, recorded: Path) -> None:
    """Redis goes away in the middle of the run: every answer is right, and Redis is read before and after."""
    process = locust(scenario, {**GENTLY, "--before": 1, "--window": 6, **flags})
    said, _ = process.communicate()

    samples = Samples.read(recorded)
    answers = dict(re.findall(r"^ *(before|during|after): .* ms, ([\d,]+) answers of Redis", said, re.MULTILINE))
    assert 0 == process.returncode, said
    assert {1} == set(samples.outcome)
    assert f"failures = 0 of {len(samples.outcome):,} requests\n" in said
    assert ["before", "during", "after"] == list(answers)
    assert "0" not in (answers["before"], answers["after"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"--path": "/nothing/{restaurant_id}"}, "failures = [1-9]"),
        ({"--before": 30}, "the run was over before the fault"),
        ({"--processes": 2}, "leave out --processes"),
    ],
)
def test_fault_that_shows_nothing(flags: Flags, said: str, own_stage: None, locust: Locust) -> None:
    """Failed requests, a window that is too short, and several processes end with an exit code and a reason."""
    process = locust("redis_outage", {**GENTLY, "--before": 0.2, "--outage": 0.2, "--window": 2, **flags})
    printed, _ = process.communicate()

    assert 1 == process.returncode, printed
    assert re.search(said, printed)
    assert "Traceback" not in printed


def test_interrupted_fault_leaves_nothing_behind(
    own_stage: None, locust: Locust, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C while Redis is away ends the service and the servers, too."""
    (tmp_path / "folders").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "folders"))

    process = locust("redis_outage", {**GENTLY, "--before": 0.2, "--outage": 60, "--window": 60})
    assert process.stdout is not None
    for line in process.stdout:
        if "during the fault" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.communicate()

    assert 1 == process.returncode
    assert children
    assert [] == psutil.wait_procs(children, timeout=30)[1]
    assert [] == list((tmp_path / "folders").iterdir())
