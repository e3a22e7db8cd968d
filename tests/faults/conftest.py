import logging
from collections.abc import AsyncIterator, Callable, Iterator
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from redis.asyncio import Redis
from wire import Wire

from demo_api.servers import ValkeyServer, valkey_server
from stampede_guard._bus import backplane
from stampede_guard.stores._redis import scripts


@pytest.fixture
def namespace() -> str:
    """Return a namespace of the test's own: tests share a server."""
    return uuid4().hex


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    """Return a server that the test may kill and freeze."""
    with valkey_server() as server:
        yield server


@pytest.fixture
async def wire(redis_url: str, admin: Redis) -> AsyncIterator[Wire]:
    """Return a proxy to the shared server, which knows the scripts, so that each is asked for in one request."""
    for script in vars(scripts).values():
        if isinstance(script, scripts.Script):
            await admin.script_load(script.text)
    parts = urlsplit(redis_url)
    wire = Wire(parts.port or 6379, login=parts.netloc.rpartition("@")[0])
    await wire.start()
    yield wire
    await wire.aclose()


@pytest.fixture
async def admin(admin_url: str) -> AsyncIterator[Redis]:
    """Return a client of the shared server."""
    async with Redis.from_url(admin_url) as client:
        yield client


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no guard do anything by itself: neither heartbeats nor repetitions get in between."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 3600.0)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what tells the lines that the package has logged so far."""
    caplog.set_level(logging.DEBUG)
    return lambda: [record.getMessage() for record in caplog.records if record.name == "stampede_guard"]
