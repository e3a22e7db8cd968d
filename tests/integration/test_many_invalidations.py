"""More invalidations at once than the store takes at once, on a real server."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from loaders import returning
from redis.asyncio import Redis

from stampede_guard import Guard, InvalidationPending
from stampede_guard._l2 import access
from stampede_guard.stores._redis import pipeline

MakeGuard = Callable[..., Guard]


async def store(guard: Guard, ops: list[str]) -> None:
    """Store a value for each of *ops*."""
    await asyncio.gather(*(guard.fetch(op, returning("old"), l2_ttl=60, returns=str) for op in ops))


async def pending_of(guard: Guard, ops: list[str], way: str) -> list[str]:
    """Invalidate *ops* at once, by one call or by one for each; return those that are not confirmed."""
    if way == "by one call":
        try:
            await guard._invalidator.invalidate_all(ops)
        except InvalidationPending as error:
            return [*error.pending]
        return []
    came: list[Any] = await asyncio.gather(*map(guard.invalidate, ops), return_exceptions=True)
    return [op for op, error in zip(ops, came, strict=True) if error is not None]


@pytest.mark.parametrize("way", ["by one call", "one by one"])
async def test_line_in_this_process_is_no_failure(
    way: str, make_guard: MakeGuard, admin: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invalidations that have to queue for longer than others would are confirmed, and the values are gone."""
    for module in (access, pipeline):
        monkeypatch.setattr(module, "_QUEUE_TIMEOUT", 0.0)
    ops = [f"menu-{number}" for number in range(1_000)]
    async with make_guard(max_connections=1) as guard:
        await store(guard, ops[:50])

        assert [] == await pending_of(guard, ops, way)

    assert [] == [key async for key in admin.scan_iter(f"sg1:{{{guard._namespace}:*:v")]


@pytest.mark.long
@pytest.mark.parametrize("number", [20_000, 50_000])
@pytest.mark.parametrize("way", ["by one call", "one by one"])
async def test_tens_of_thousands_at_once(number: int, way: str, make_guard: MakeGuard) -> None:
    """Each of tens of thousands that are invalidated in one moment is confirmed."""
    ops = [f"menu-{each}" for each in range(number)]
    async with make_guard() as guard:
        pending = await pending_of(guard, ops, way)

    assert [] == pending
