"""Guards that share a store which grants leases: the one in memory, in each way in which it can answer, and Redis."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from time import monotonic

import pytest
from inside import untyped
from leasing import LeasingDouble, Server

from stampede_guard import Guard, _path
from stampede_guard._operations import operation


@pytest.fixture(params=["at once", "concluded", "in a task", "Redis"])
def make_guard(
    request: pytest.FixtureRequest, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Guard]:
    """Return what makes guards over one store, which is asked before a flight has a task, or after that."""
    if request.param == "Redis":
        return partial(Guard, redis_url, namespace=namespace, deadline=5, connect_timeout=5)
    monkeypatch.setattr(LeasingDouble, "begins", request.param != "in a task")
    monkeypatch.setattr(LeasingDouble, "has_more", request.param == "concluded")
    return partial(Guard, partial(LeasingDouble, Server(untyped(monotonic))), namespace=namespace)


@pytest.fixture
async def pair(make_guard: Callable[..., Guard]) -> AsyncIterator[tuple[Guard, Guard]]:
    """Return two guards, open."""
    async with make_guard() as first, make_guard() as second:
        yield first, second


@pytest.fixture
def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no lease end, and no flight look again, before the test is over: only a word can wake."""
    monkeypatch.setattr(operation, "_LEASES", (60.0, 60.0))
    monkeypatch.setattr(_path, "_POLLS", (60.0, 60.0))
