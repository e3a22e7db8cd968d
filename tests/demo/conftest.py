"""What the tests of the service share: a Postgres with menus, and children that can be interrupted."""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from demo_api.seeding import seed


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
