"""Busy processes ask for thousands of cold keys at once, or of a server that hangs: how often each is loaded."""

import asyncio
import sys
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from processes import PATIENCE, Child, children, until
from redis.asyncio import Redis

from demo_api.servers import valkey_server

KEYS = 6_000
OPS = 300
SPARE = 1.5  # 1 on a machine with time; where other programs starve the processes for seconds, leases expire
WAVES = 6
LONG = 10.0  # seconds that a lease lasts whose end is not to be waited for
HOGS = 2  # processes that do nothing but to compute, on two cores
LOAD = {"options": {"ttl": 30, "l2_ttl": 60, "max_loads": 200}, "load_time": 0.01, "block": 0.0, "pause": 0.01}


@asynccontextmanager
async def busy_machine() -> AsyncGenerator[None]:
    """Let other processes compute while the block runs."""
    hogs: list[Process] = []
    try:
        for _ in range(HOGS):
            hogs.append(await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass"))  # noqa: PERF401
        yield
    finally:
        for hog in hogs:
            hog.kill()
            await hog.wait()


async def ask(*workers: Child, keys: range) -> list[dict[str, Any]]:
    """Let each of *workers* ask for all *keys*; return what they say of it."""
    await asyncio.gather(*(worker.tell("go", keys=[*keys]) for worker in workers))
    return await asyncio.gather(*(worker.hears("go", 2 * PATIENCE) for worker in workers))


async def loads_of(*workers: Child) -> Counter[int]:
    """Return how often each key was loaded, by all together."""
    said = await asyncio.gather(*(worker.ask("finish") for worker in workers))
    return Counter(key for each in said for key in each["loads"])


@pytest.mark.long
@pytest.mark.parametrize("block", [0.0, 0.1], ids=["computes", "blocks its loop"])
async def test_thousands_of_cold_keys_are_loaded_once(block: float, redis_url: str, namespace: str) -> None:
    """I8: two processes whose event loops are late load each of 6 000 keys once, however long they queue for that."""
    settings = {"url": redis_url, "namespace": namespace, "guard": {}, **LOAD, "block": block}
    async with busy_machine(), children("busy.py", [settings] * 2) as workers:
        answers = await ask(*workers, keys=range(KEYS))
        loads = await loads_of(*workers)

    assert [0, 0] == [each["wrong"] for each in answers]
    assert len(loads) == KEYS
    assert loads.total() <= KEYS * SPARE


@pytest.mark.long
async def test_leases_that_a_hung_server_grants_late_are_released(namespace: str) -> None:
    """A server that hangs grants, once it goes on, what was asked for meanwhile: these leases are released at once."""
    with valkey_server() as server:
        settings = {"url": server.url, "namespace": namespace, "guard": {}, **LOAD, "lease": LONG}
        async with children("busy.py", [settings] * 2) as (first, second), Redis.from_url(server.url) as admin:
            await ask(first, second, keys=range(OPS, OPS + 10))  # connected, and scripts are known
            server.freeze()
            hanging = [await ask(first, keys=range(start, OPS, WAVES)) for start in range(WAVES)]  # the breaker opens
            server.thaw()
            await until(lambda: _none_left(admin, namespace), "leases to be gone", patience=LONG / 2)
            waits = await ask(second, keys=range(OPS))

    assert {0} == {each["wrong"] for said in (*hanging, waits) for each in said}
    assert waits[0]["took"] < LONG / 2


async def _none_left(admin: Redis, namespace: str) -> bool:
    return not [key async for key in admin.scan_iter(f"sg1:{{{namespace}:*:l", count=1000)]
