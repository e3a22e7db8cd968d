from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from redis.asyncio import Redis


@pytest.fixture
def namespace() -> str:
    """Return a namespace of the test's own: tests share a server."""
    return uuid4().hex


@pytest.fixture
async def admin(admin_url: str) -> AsyncIterator[Redis]:
    """Return a client that sees what is stored."""
    async with Redis.from_url(admin_url) as client:
        yield client
