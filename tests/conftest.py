"""Real servers for the tests that need them, started once, and only when the first such test runs."""

import os
from collections.abc import Generator

import pytest

from demo_api.servers import embedded_servers


@pytest.fixture(scope="session")
def redis_url() -> Generator[str]:
    """The Redis of `REDIS_URL`, or an embedded Valkey."""
    given = os.environ.get("REDIS_URL")
    if given:
        yield given
        return
    with embedded_servers(postgres=False) as urls:
        yield urls.redis


@pytest.fixture(scope="session")
def database_url() -> Generator[str]:
    """The Postgres of `DATABASE_URL`, or an embedded one."""
    given = os.environ.get("DATABASE_URL")
    if given:
        yield given
        return
    with embedded_servers(redis=False) as urls:
        yield urls.postgres
