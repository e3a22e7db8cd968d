import argparse
import itertools
import json
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import psutil
import pytest

from demo_api import cluster
from demo_api.cluster.demonstration import Finding
from demo_api.cluster.options import Fleet, parse
from demo_api.cluster.processes import Processes
from demo_api.cluster.tables import grid
from demo_api.compare.measurement import Measurement, Samples
from demo_api.compare.plan import Run, Scenario, Shape
from demo_api.compare.service import REPOSITORY, Counts, Service
from demo_api.servers import free_port

# Each run boots several processes, twice.
pytestmark = pytest.mark.timeout(180)

Demonstrate = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(brief: tuple[str, ...]) -> tuple[str, ...]:
    """The command, with a small load."""
    return (*brief, "cluster", "--users=20", "--restaurants=2", "--seconds=0.8")


@pytest.fixture
def demonstrate(command: tuple[str, ...], environment: dict[str, str]) -> Demonstrate:
    """Runs the command with these flags and further variables."""

    def run(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *flags], env=environment | variables, cwd=REPOSITORY, capture_output=True, text=True, check=False
        )

    return run


def arguments(*flags: str) -> argparse.Namespace:
    """What the command line makes of *flags*."""
    parser = argparse.ArgumentParser()
    cluster.add_arguments(parser)
    return parser.parse_args(flags)


@pytest.fixture
def fleet() -> Fleet:
    """What the command does by default."""
    return parse(arguments())


def finding(mode: str, seconds: float, **counted: int) -> Finding:
    """A run of so many *seconds* with two restaurants."""
    run = Run(mode, Scenario.COLD_BOOT, Shape.SATURATION, seconds)
    due_at = np.array([0.0, seconds])
    samples = Samples(due_at, np.zeros(2), np.ones(2))
    return Finding(Measurement(run, 2, samples, Counts(**dict.fromkeys(Counts.__slots__, 0) | counted), []), 0)


def row(printed: str, title: str) -> Sequence[str]:
    """The cells of a row of the table that was printed."""
    (line,) = [line for line in printed.splitlines() if line.strip().startswith(f"{title}  ")]
    return re.split(r"\s{2,}", line.strip())[1:]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--instances", "1"], "--instances 1: must be a whole number from 2 to 8"),
        (["--instances", "many"], "--instances many: must be a whole number from 2 to 8"),
        (["--workers", "9"], "--workers 9: must be a whole number from 2 to 8"),
        (["--workers", "2", "--instances", "2"], "--instances and --workers: give one of them"),
        (["--seconds", "soon"], "--seconds soon: must be a number of at least 1"),
        (["--seconds", "2"], "--seconds 2: must be longer than the L2 TTL, 2"),
        (["--users", "0"], "--users 0: must be a whole number from 1 to 4000"),
        (["--restaurants", "501"], "--restaurants 501: must be a whole number from 1 to 500"),
    ],
)
def test_bad_flag(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that cannot be gets one line with the value and the rule, and exit code 2."""
    code = cluster.run(arguments(*flags))

    assert (2, ("", f"{said}\n")) == (code, capsys.readouterr())


def test_bad_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A setting that cannot be is refused before anything starts, too."""
    monkeypatch.setenv("L2_TTL", "-3")

    code = cluster.run(arguments())

    assert 2 == code
    assert capsys.readouterr().err.startswith("L2_TTL='-3'")


def test_one_load_for_each_menu_and_expiry_is_allowed(fleet: Fleet) -> None:
    """Two menus and 7 of 2 seconds are eight loads; with the lease a ninth breaks the promise, without it none does."""
    verdicts = [
        grid(fleet, [finding("lease off", 7, loads=99), finding("lease on", 7, loads=loads)]).rows[0][-3:]
        for loads in (8, 9)
    ]

    assert [("1.00", "≤ 1", "met"), ("1.12", "≤ 1", "MISSED")] == verdicts


def test_nothing_is_said_of_a_run_that_did_not_finish(fleet: Fleet) -> None:
    """After an interrupt the table has the first run alone, and no verdict."""
    found = grid(fleet, [finding("lease off", 7, loads=16)])

    assert ("", "lease off", "promised (I8)", "") == found.columns
    assert ("Loads per menu and expiry", "2.00", "≤ 1", "") == found.rows[0]


def test_every_worker_is_counted(tmp_path: Path) -> None:
    """Workers that share a port are asked until each has answered, however long one of them keeps the others away."""
    asked = itertools.count()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            worker = 1 if next(asked) < 50 else 2
            stats = {"process": worker, **dict.fromkeys(Counts.__slots__, worker)}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(stats).encode())

        def log_request(self, *_: object, **__: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            counts = Processes([Service(server.server_port)], 2, tmp_path / "log").counts()
        finally:
            server.shutdown()
            thread.join()

    assert Counts(3, 3, 3, 3, 3) == counts


def test_instances_load_once_for_all(demonstrate: Demonstrate) -> None:
    """With the lease, two instances together load a menu once per expiry, as is promised, and no request fails."""
    finished = demonstrate("--instances=2")

    loads = row(finished.stdout, "Loads per menu and expiry")
    assert 0 == finished.returncode, finished.stdout + finished.stderr
    assert ["≤ 1", "met"] == list(loads[-2:])
    assert float(loads[0]) > 0.5
    assert ["0", "0"] == row(finished.stdout, "Failed requests")
    assert all(int(count.replace(",", "")) > 20 for count in row(finished.stdout, "Requests"))


@pytest.mark.long
def test_workers_load_once_for_all(demonstrate: Demonstrate) -> None:
    """So do the workers of one instance, which are all counted."""
    finished = demonstrate("--workers=2")

    assert 0 == finished.returncode, finished.stdout + finished.stderr
    assert "1 instance with 2 workers" in finished.stdout
    assert ["≤ 1", "met"] == list(row(finished.stdout, "Postgres queries per menu and expiry")[-2:])
    assert int(row(finished.stdout, "Loads")[1]) >= 2


def test_absent_redis_is_named(demonstrate: Demonstrate) -> None:
    """Without the Redis of the URL nothing can be shown, and the message says which variable is wrong."""
    finished = demonstrate("--instances=2", REDIS_URL=f"redis://127.0.0.1:{free_port()}/0")

    assert 1 == finished.returncode
    assert finished.stderr.endswith("check REDIS_URL\n")
    assert "Traceback" not in finished.stderr


def test_interrupt_stops_everything_and_prints_what_is_finished(
    command: tuple[str, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    """Ctrl-C ends all processes of the demonstration, and the finished run is shown."""
    with subprocess.Popen(
        [*command, "--instances=2"],
        env={**environment, "TMPDIR": str(tmp_path)},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
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
    assert "2 instances, L2 TTL 0.2 s" in printed
    assert "lease on" not in printed.splitlines()[-5]
    assert [] == list(tmp_path.iterdir())
