"""Every async test runs under each task factory that this Python has, and fails by what asyncio complains of."""

import asyncio
import gc
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

FACTORIES = ("lazy", "eager") if sys.version_info >= (3, 12) else ("lazy",)

MakeLoop = Callable[[], asyncio.AbstractEventLoop]
Pause = Callable[[], Awaitable[None]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every async test, and every test that makes loops of its own, each task factory."""
    if inspect.iscoroutinefunction(metafunc.function) or "make_loop" in metafunc.fixturenames:
        fixture = "make_loop" if "make_loop" in metafunc.fixturenames else "task_factory"
        if fixture not in metafunc.fixturenames:
            metafunc.fixturenames.append(fixture)
        metafunc.parametrize(fixture, FACTORIES, indirect=True)


def _prepare(loop: asyncio.AbstractEventLoop, factory: str) -> list[dict[str, Any]]:
    if sys.version_info >= (3, 12) and factory == "eager":
        loop.set_task_factory(asyncio.eager_task_factory)
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, complaint: complaints.append(complaint))
    return complaints


class Done(asyncio.Future[Any]):
    """A task that is over."""

    def set_name(self, name: object) -> None:
        """Have no name."""


def at_once(loop: asyncio.AbstractEventLoop, load: Any, **_: object) -> Any:
    """Run a task that never waits inside its own creation, as eager tasks do, on any Python."""
    future = Done(loop=loop)
    with pytest.raises(StopIteration) as stopped:
        load.send(None)
    future.set_result(stopped.value.value)
    return future


@pytest.fixture
async def task_factory(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Set the running loop's task factory; afterwards nothing may have been "never retrieved"."""
    complaints = _prepare(asyncio.get_running_loop(), request.param)
    yield request.param
    gc.collect(1)  # "never retrieved" is said when a task is collected; the young ones are this test's
    assert complaints == []


@pytest.fixture(autouse=True)
def in_force(request: pytest.FixtureRequest) -> None:
    """Set the task factory before anything else: that a test has it as a parameter alone does not set it."""
    if "task_factory" in getattr(getattr(request.node, "callspec", None), "params", ()):
        request.getfixturevalue("task_factory")


@pytest.fixture
def make_loop(request: pytest.FixtureRequest) -> Iterator[MakeLoop]:
    """Return what makes an event loop with the task factory; they are closed, and may not have complained."""
    loops: list[asyncio.AbstractEventLoop] = []
    complaints: list[list[dict[str, Any]]] = []

    def make() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loops.append(loop)
        complaints.append(_prepare(loop, request.param))
        return loop

    yield make
    for loop in loops:
        loop.close()
    gc.collect(1)
    assert not any(complaints)


@pytest.fixture
def pause() -> Pause:
    """Return what lets all that is ready run, and whatever becomes ready by that."""

    async def pause() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    return pause
