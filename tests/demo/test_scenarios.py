import subprocess
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from demo_api.compare.measurement import Samples
from demo_api.compare.service import Service, running_service
from demo_api.servers import ServerUrls, free_port, wait_until

SCENARIOS = ("cold_boot", "warmed_up", "hot_key", "mixed_ids", "rolling_restart")
Flags = dict[str, object]

WINDOW = 0.5
GENTLY: Flags = {"--rate": 20, "--connections": 4}  # for each user
Locust = Callable[[str, Flags], subprocess.Popen[str]]


@pytest.fixture(scope="module")
def servers(redis_url: str, menus_url: str) -> ServerUrls:
    """A Redis, and a Postgres that holds the menus."""
    return ServerUrls(redis=redis_url, postgres=menus_url)


@pytest.fixture(scope="module")
def service(servers: ServerUrls, tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    """A service process with the guard on."""
    with running_service("on", servers, tmp_path_factory.mktemp("service") / "log") as service:
        yield service


@contextmanager
def server_that_notes_paths(*, has_menus: bool = True) -> Generator[tuple[str, list[str]]]:
    """A server that answers everything, or no menus until its end, and the paths that it was asked for."""
    paths: list[str] = []
    gate = Event()
    if has_menus:
        gate.set()

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            paths.append(self.path)
            if self.path.endswith("/menu"):
                gate.wait()
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_request(self, *_: object, **__: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", paths
        finally:
            gate.set()
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_runs_alone(scenario: str, service: Service, locust: Locust, recorded: Path) -> None:
    """Each scenario runs with plain Locust on a real service, every answer is right; one tells what it spared."""
    before = service.counts()

    process = locust(scenario, {"--host": service.url})
    said, _ = process.communicate()

    samples = Samples.read(recorded)
    assert 0 == process.returncode, said
    assert samples.outcome.size
    assert {1} == set(samples.outcome)
    assert service.counts().since(before).calls >= len(samples.latency)
    assert (scenario == "mixed_ids") == ("% spared" in said)  # the article's second experiment


def test_warmed_up_asks_for_every_menu_before(locust: Locust, recorded: Path) -> None:
    """The first requests of the warmed-up scenario fill the caches, and are not sampled."""
    with server_that_notes_paths() as (host, paths):
        locust("warmed_up", {"--host": host, "-u": 1}).communicate()

    menus = [path for path in paths if path.endswith("/menu")]
    assert [f"/restaurants/{restaurant_id}/menu" for restaurant_id in range(1, 6)] == menus[:5]
    assert len(menus) - 5 == len(Samples.read(recorded).latency)


def test_constant_rate_keeps_its_timetable(service: Service, locust: Locust, recorded: Path) -> None:
    """With a rate, requests are due at fixed distances, whatever the answers take."""
    locust("cold_boot", {"--host": service.url, "-u": 1, "--rate": 200, "--connections": 20}).communicate()

    due_at = np.sort(Samples.read(recorded).due_at)
    assert len(due_at) == pytest.approx(200 * WINDOW, rel=0.1)
    assert np.diff(due_at) == pytest.approx(1 / 200)


def test_latency_counts_from_when_a_request_was_due(locust: Locust, recorded: Path) -> None:
    """Requests that wait for a connection have waited, although the server never saw them wait."""
    # No server answers that many on one connection in time, so the last request has waited for all others.
    with server_that_notes_paths() as (host, _):
        locust(
            "cold_boot", {"--host": host, "-u": 1, "--rate": 50_000, "--connections": 1, "--window": 0.03}
        ).communicate()

    samples = Samples.read(recorded)
    late = samples.latency[np.argsort(samples.due_at)]
    assert late[-1] > 10 * late[0]


def test_requests_without_an_answer_are_not_forgotten(locust: Locust, recorded: Path) -> None:
    """Requests that still wait when the run is over are sampled as unanswered, with how long they had waited."""
    with server_that_notes_paths(has_menus=False) as (host, _):
        locust("cold_boot", {"--host": host, "-u": 1, "-s": 1, "--rate": 100, "--connections": 1}).communicate()

    samples = Samples.read(recorded)
    assert {-1} == set(samples.outcome)
    assert len(samples.outcome) == pytest.approx(100 * WINDOW, rel=0.1)


def test_same_seed_same_ids(locust: Locust) -> None:
    """The same seed asks for the same ids in the same order, however fast the server is."""
    asked = []
    for _ in range(2):
        with server_that_notes_paths() as (host, paths):
            locust("cold_boot", {"--host": host, "-u": 1, "--restaurants": 500}).communicate()
        asked.append(paths)

    shorter = min(map(len, asked))
    assert shorter > 20
    assert asked[0][:shorter] == asked[1][:shorter]


def test_hot_key_prefers_the_first_ids(locust: Locust) -> None:
    """Zipf's law: the most popular restaurant is asked for most, and others as well."""
    with server_that_notes_paths() as (host, paths):
        locust("hot_key", {"--host": host, "-u": 1, "--restaurants": 100}).communicate()

    asked = Counter(path for path in paths if path.endswith("/menu"))
    assert "/restaurants/1/menu" == asked.most_common(1)[0][0]
    assert len(asked) > 10


def test_distributed(service: Service, locust: Locust, tmp_path: Path) -> None:
    """With `--processes`, each worker sends its share and records its own samples."""
    process = locust("cold_boot", {"--host": service.url, "--processes": 2, "--run-time": 2, **GENTLY})
    said, _ = process.communicate()

    counts = [len(Samples.read(path).latency) for path in sorted(tmp_path.glob("samples.f64.*"))]
    assert 0 == process.returncode, said
    assert 2 == len(counts)
    assert all(counts)


def test_rolling_restart_loses_no_request(
    service: Service, servers: ServerUrls, locust: Locust, recorded: Path, tmp_path: Path
) -> None:
    """While one of two service processes stops, its users go on with the other one."""
    before = service.counts()
    with running_service("on", servers, tmp_path / "log") as first:
        process = locust(
            "rolling_restart",
            {"--host": first.url, "--hosts": service.url, "--window": 2, **GENTLY},
        )
        wait_until(lambda: first.counts().calls > 0, "the first service to be asked", deadline=30)
    process.communicate()

    samples = Samples.read(recorded)
    assert {1} == set(samples.outcome)
    assert service.counts().since(before).calls > 0


def test_connections_take_turns_with_several_hosts(locust: Locust) -> None:
    """With further hosts, each gets its share of the connections."""
    with server_that_notes_paths() as (host, paths), server_that_notes_paths() as (other, other_paths):
        locust("cold_boot", {"--host": host, "--hosts": other, "-u": 4}).communicate()

    assert [2, 2] == [asked.count("/healthz") for asked in (paths, other_paths)]
    assert all(len(asked) > 2 for asked in (paths, other_paths))


def test_absent_service_is_counted_as_failures(locust: Locust, recorded: Path) -> None:
    """Requests that nobody answers are failures in the samples and in Locust's exit code."""
    process = locust("cold_boot", {"--host": f"http://127.0.0.1:{free_port()}"})
    process.communicate()

    samples = Samples.read(recorded)
    assert 1 == process.returncode
    assert samples.outcome.size
    assert {0} == set(samples.outcome)


@pytest.mark.parametrize("flag", [("--restaurants", "0"), ("--rate", "-1"), ("--connections", "x")])
def test_bad_flag(flag: tuple[str, str], locust: Locust) -> None:
    """A value that cannot be is refused with its flag and its value."""
    process = locust("cold_boot", {flag[0]: flag[1]})
    said, _ = process.communicate()

    assert 2 == process.returncode
    assert flag[0] in said.splitlines()[-1]
    assert flag[1] in said.splitlines()[-1]
