"""What the tests of the service share: a Postgres with menus, scenarios, and children that can be interrupted."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme

from demo_api.compare.load import LOCUSTFILES
from demo_api.seeding import seed

WINDOW = 0.5
# The command line, except that a run may last for less than a second: what it measures is of no interest here.
BRIEF = """
import sys
from demo_api.compare import options
options.SHORTEST_WINDOW = 0.1
from demo_api.__main__ import main
sys.exit(main())
"""
Flags = dict[str, object]
Locust = Callable[[str, Flags], subprocess.Popen[str]]


@pytest.fixture(scope="session")
def menus_url(database_url: str) -> str:
    """A Postgres that holds the menus."""
    asyncio.run(seed(database_url))
    return database_url


@pytest.fixture(scope="session", autouse=True)
def _no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let no HTTP client load the certificates of the world: that takes longer than what it is made for."""
    path = tmp_path_factory.mktemp("certificates") / "one.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


@pytest.fixture(scope="session")
def environment(redis_url: str, menus_url: str) -> dict[str, str]:
    """Variables for a run on the tests' servers, with lives of entries that a short run sees the end of."""
    lives = {"L1_TTL": "0.1", "L2_TTL": "0.2"}
    return {**os.environ, **lives, "REDIS_URL": redis_url, "DATABASE_URL": menus_url, "COLUMNS": "120"}


@pytest.fixture(scope="session")
def brief() -> tuple[str, ...]:
    """What runs `python -m demo_api`, whose runs may be shorter than a second."""
    return (sys.executable, "-c", BRIEF)


@pytest.fixture(autouse=True)
def _is_in_the_foreground() -> Iterator[None]:
    """Let children heed SIGINT: of tests that a shell runs in its background they inherit that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Where a scenario writes its samples."""
    return tmp_path / "samples.f64"


@pytest.fixture
def locust(recorded: Path) -> Generator[Locust]:
    """Starts Locust with a scenario, and sees to it that it ends."""
    with ExitStack() as started:

        def start(scenario: str, flags: Flags) -> subprocess.Popen[str]:
            chosen: Flags = {"-u": 10, "-r": 10, "-s": 20, "--window": WINDOW, "--restaurants": 5, "--record": recorded}
            words = [str(word) for flag in (chosen | flags).items() for word in flag if word is not None]
            process = subprocess.Popen(
                [sys.executable, "-m", "locust", "-f", str(LOCUSTFILES / f"{scenario}.py"), "--headless", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=LOCUSTFILES.parent,
            )
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield start
