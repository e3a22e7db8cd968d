import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from inside import untyped

from stampede_guard._flights.awaited import is_awaited_by
from stampede_guard.testing import Gate

Pause = Callable[[], Awaitable[None]]
Tie = Callable[["asyncio.Task[Any]"], Awaitable[Any]]


async def by_await(task: "asyncio.Task[Any]") -> None:
    """Wait for it as it is."""
    await task


async def by_gather(task: "asyncio.Task[Any]") -> None:
    """Wait for it among others, twice over."""
    await asyncio.gather(asyncio.sleep(0), asyncio.gather(task))


async def by_wait(task: "asyncio.Task[Any]") -> None:
    """Wait for it with `wait`."""
    await asyncio.wait({task})


async def by_wait_for(task: "asyncio.Task[Any]") -> None:
    """Wait for it with a time-out."""
    await asyncio.wait_for(task, 20)


async def by_shield(task: "asyncio.Task[Any]") -> None:
    """Wait for it behind a shield."""
    await asyncio.shield(task)


async def by_another(task: "asyncio.Task[Any]") -> None:
    """Wait for it in a task of its own."""
    await asyncio.create_task(by_gather(task))


async def by_as_completed(task: "asyncio.Task[Any]") -> None:
    """Wait for it as the first that is done."""
    for each in asyncio.as_completed([task]):
        await each


async def by_anyio(task: "asyncio.Task[Any]") -> None:
    """Wait for what waits for it in a task group of AnyIO's."""
    async with anyio.create_task_group() as group:
        group.start_soon(by_await, task)


@pytest.mark.parametrize(
    "tie", [by_await, by_gather, by_wait, by_wait_for, by_shield, by_another, by_as_completed, by_anyio]
)
async def test_seen(tie: Tie, pause: Pause) -> None:
    """In each of asyncio's ways to wait for a task, that is seen; the other way round it is not so."""
    gate = Gate()
    task = asyncio.create_task(gate.passage())
    waiting = asyncio.ensure_future(tie(task))
    before = is_awaited_by(task, task)
    await pause()
    seen = is_awaited_by(task, waiting), is_awaited_by(waiting, task)
    gate.open()
    await waiting

    assert before
    assert (True, False) == seen
    assert not is_awaited_by(task, waiting)


async def test_task_group_waits_from_the_start(pause: Pause) -> None:
    """What a task group has started is waited for, also while its block runs."""
    gate = Gate()
    own = asyncio.current_task()
    assert own is not None
    async with asyncio.TaskGroup() as group:
        task = group.create_task(gate.passage())
        await pause()
        assert is_awaited_by(task, own)
        gate.open()


async def test_first_of_several_is_not_waited_for(pause: Pause) -> None:
    """`wait` for the first of several ends without the others."""
    gate, other = Gate(), Gate()
    tasks = [asyncio.create_task(each.passage()) for each in (gate, other)]
    waiting = asyncio.create_task(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
    await pause()
    seen = is_awaited_by(tasks[0], waiting)
    gate.open()
    await waiting
    other.open()
    await tasks[1]

    assert not seen


@pytest.mark.parametrize("kind", ["event", "callback", "nothing"])
async def test_not_seen(kind: str, pause: Pause) -> None:
    """A task that is not waited for, or by means that cannot be seen, is not."""
    gate, event = Gate(), asyncio.Event()

    async def run() -> None:
        await gate.passage()
        event.set()

    task = asyncio.create_task(run())
    if kind == "callback":
        task.add_done_callback(lambda _: None)
    waiting = asyncio.create_task(event.wait() if kind == "event" else gate.passage())
    await pause()
    seen = is_awaited_by(task, waiting)
    gate.open()
    await asyncio.gather(task, waiting)

    assert not seen


async def test_ring_of_futures_ends() -> None:
    """A search that comes by the same future twice goes on without it."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    other = asyncio.create_task(asyncio.sleep(0))

    def again(_: Any) -> Any:
        return future

    future.add_done_callback(again)
    seen = is_awaited_by(future, other)
    future.cancel()
    await other

    assert not seen


class _Array:
    """What is equal to nothing, and different from nothing."""

    __hash__ = untyped(None)

    def __eq__(self, other: object) -> bool:
        raise ValueError


async def test_callbacks_of_others_are_no_obstacle() -> None:
    """A callback may hold variables that are not set yet, or that cannot be compared."""
    loop = asyncio.get_running_loop()
    future, other = loop.create_future(), asyncio.create_task(asyncio.sleep(0))
    array = _Array()
    later: int

    def call(_: Any) -> Any:
        return array, later

    future.add_done_callback(call)
    seen = is_awaited_by(future, other)
    later = 1
    future.cancel()
    await other

    assert not seen
