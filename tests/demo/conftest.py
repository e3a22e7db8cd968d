"""What the tests of the service share: a Postgres with menus, scenarios, and children that can be interrupted."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from demo_api.compare.load import LOCUSTFILES
from demo_api.seeding import seed

WINDOW = 0.5
Flags = dict[str, object]
Locust = Callable[[str, Flags], subprocess.Popen[str]]


@pytest.fixture(scope="session")
def menus_url(database_url: str) -> str:
    """A Postgres that holds the menus."""
    asyncio.run(seed(database_url))
    return database_url


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
