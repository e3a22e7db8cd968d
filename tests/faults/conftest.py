from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
from proxying import Wire
from redis.asyncio import Redis

from stampede_guard.stores._redis import scripts


@pytest.fixture
async def wire(redis_url: str, admin: Redis) -> AsyncIterator[Wire]:
    """Return a proxy to the shared server, which knows the scripts, so that each is asked for in one request."""
    for script in vars(scripts).values():
        if isinstance(script, scripts.Script):
            await admin.script_load(script.text)
    parts = urlsplit(redis_url)
    async with Wire(parts.port or 6379, login=parts.netloc.rpartition("@")[0]) as wire:
        yield wire
