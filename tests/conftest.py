"""What the tests share: real servers, started when the first test needs one; a clock; what is logged."""

import gc
import logging
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from urllib.parse import urlsplit
from uuid import uuid4

import acl
import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from demo_api.servers import ValkeyServer, embedded_servers, valkey_server
from stampede_guard import Guard
from stampede_guard._bus import backplane
from stampede_guard.testing import ManualClock

LOGIN = "menus:pass"  # of the user who may do no more than is needed


@pytest.fixture(scope="session")
def admin_url() -> Generator[str]:
    """The Redis of `REDIS_URL`, or an embedded Valkey, for somebody who may do everything there."""
    given = os.environ.get("REDIS_URL")
    if given:
        yield given
        return
    with embedded_servers(postgres=False) as urls:
        yield urls.redis


@pytest.fixture(scope="session")
def redis_url(admin_url: str) -> str:
    """The same Redis; with `STAMPEDE_GUARD_ACL=1`, for a user who may do no more there than the package needs."""
    if not os.environ.get("STAMPEDE_GUARD_ACL"):
        return admin_url
    name, password = LOGIN.split(":")
    with Redis.from_url(admin_url) as admin:
        admin.execute_command("ACL", "SETUSER", name, "reset", f">{password}", *acl.rule("*"))
    parts = urlsplit(admin_url)
    return parts._replace(netloc=f"{LOGIN}@{parts.netloc.rpartition('@')[2]}").geturl()


@pytest.fixture(scope="session")
def database_url() -> Generator[str]:
    """The Postgres of `DATABASE_URL`, or an embedded one."""
    given = os.environ.get("DATABASE_URL")
    if given:
        yield given
        return
    with embedded_servers(redis=False) as urls:
        yield urls.postgres


@pytest.fixture
def namespace() -> str:
    """Return a namespace of the test's own: tests share a server."""
    return uuid4().hex


@pytest.fixture
async def admin(admin_url: str) -> AsyncIterator[AsyncRedis]:
    """Return a client that may read and write everything on the shared server."""
    async with AsyncRedis.from_url(admin_url) as client:
        yield client


@pytest.fixture
async def other(redis_url: str, namespace: str) -> AsyncIterator[Guard]:
    """Return a guard with a way of its own to the shared server, as another process has."""
    async with Guard(redis_url, namespace=namespace, deadline=5, connect_timeout=5) as guard:
        yield guard


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    """Return a server that the test may kill and freeze."""
    with valkey_server() as server:
        yield server


@pytest.fixture
def clock() -> ManualClock:
    """Return a clock that the test moves."""
    return ManualClock()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the lines that the package has logged so far."""
    caplog.set_level(logging.DEBUG)
    return lambda: [record.getMessage() for record in caplog.records if record.name == "stampede_guard"]


@pytest.fixture
def no_echoes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no guard send echoes or repeat invalidations by itself."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 3_600.0)


def pytest_collection_finish() -> None:
    """Let no garbage collection look at the modules and tests that are there from the start: many tests collect."""
    gc.collect()
    gc.freeze()
