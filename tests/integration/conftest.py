from collections.abc import AsyncIterator, Callable
from functools import partial
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from onlooker import HitCounter, load_scripts
from redis.asyncio import Redis

from stampede_guard import Guard
from stampede_guard.stores._redis.node import Node


@pytest.fixture
def namespace() -> str:
    """Return a namespace of the test's own: tests share a server."""
    return uuid4().hex


@pytest.fixture
def make_guard(redis_url: str, namespace: str) -> Callable[..., Guard]:
    """Return what makes guards over the shared server, patient enough for a busy machine."""
    return partial(Guard, redis_url, namespace=namespace, deadline=5, connect_timeout=5)


@pytest.fixture
async def admin(admin_url: str) -> AsyncIterator[Redis]:
    """Return a client that sees what is stored."""
    async with Redis.from_url(admin_url) as client:
        yield client


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no server be asked for its role, where commands and round trips are counted: that is a matter of time."""
    monkeypatch.setattr(Node, "require_primary", lambda *_: None)


@pytest.fixture
async def tally(redis_url: str, admin: Redis) -> AsyncIterator[HitCounter]:
    """Return a proxy to a server that knows the scripts."""
    await load_scripts(admin)
    tally = HitCounter(urlsplit(redis_url).port or 6379)
    async with tally.listening():
        yield tally
