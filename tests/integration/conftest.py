from collections.abc import AsyncIterator, Callable
from functools import partial
from urllib.parse import urlsplit

import pytest
from observing import load_scripts
from proxying import CountingProxy
from redis.asyncio import Redis

from stampede_guard import Guard
from stampede_guard.stores._redis.node import Node


@pytest.fixture
def key(namespace: str) -> str:
    """Return the base of the keys of `menu-7`."""
    return f"sg1:{{{namespace}:menu-7}}"


@pytest.fixture
async def pair(make_guard: Callable[..., Guard]) -> AsyncIterator[tuple[Guard, Guard]]:
    """Return two guards, open."""
    async with make_guard() as first, make_guard() as second:
        yield first, second


@pytest.fixture
def make_guard(redis_url: str, namespace: str) -> Callable[..., Guard]:
    """Return what makes guards over the shared server, patient enough for a busy machine."""
    return partial(Guard, redis_url, namespace=namespace, deadline=5, connect_timeout=5)


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no server be asked for its role, where commands and round trips are counted: that is a matter of time."""
    monkeypatch.setattr(Node, "require_primary", lambda *_: None)


@pytest.fixture
async def proxy(redis_url: str, admin: Redis) -> AsyncIterator[CountingProxy]:
    """Return a proxy to a server that knows the scripts."""
    await load_scripts(admin)
    async with CountingProxy(urlsplit(redis_url).port or 6379) as proxy:
        yield proxy
