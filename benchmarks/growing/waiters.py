"""The cost of a waiter, by the number on one key."""

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import product
from time import perf_counter

from benchmarks.growing import Curve, Picture, Question, Setting, settle_memory
from stampede_guard import Guard, coalesce

WORK = 200_000  # waiters of all rounds of a size together


@dataclass(frozen=True, slots=True)
class Crowd:
    """A way to wait for one result.

    Attributes:
        wait: Waits for the result.
        is_full: Returns whether the given number of waiters has come.
        settle: Delivers the result.
    """

    wait: Callable[[], Awaitable[object]]
    is_full: Callable[[int], bool]
    settle: Callable[[], None]


def at_the_guard() -> Crowd:
    """Return a crowd that waits for one load of a guarded function."""
    guard, gate = Guard(), asyncio.Event()

    @coalesce("menu", guard=guard)
    async def menu() -> str:
        await gate.wait()
        return "menu"

    return Crowd(menu, lambda count: guard.stats().calls == count, gate.set)


def at_an_event() -> Crowd:
    """Return a crowd that waits for an `asyncio.Event`: the least that so many tasks can cost."""
    event, waiting = asyncio.Event(), 0

    async def wait() -> None:
        nonlocal waiting
        waiting += 1
        await event.wait()

    return Crowd(wait, lambda count: waiting == count, event.set)


async def gather_around(crowd: Crowd, count: int) -> list[asyncio.Task[object]]:
    """Return *count* tasks that all wait."""

    async def come() -> object:
        return await crowd.wait()

    tasks = [asyncio.create_task(come()) for _ in range(count)]
    while not crowd.is_full(count):  # noqa: ASYNC110  # waiters are counted, and no event tells
        await asyncio.sleep(0)
    # One more step, in which the loader starts to wait, too.
    await asyncio.sleep(0)
    return tasks


async def time_to_settle(crowd: Crowd, count: int) -> float:
    """Return the µs of a waiter, from its start to its answer."""
    begun_at = perf_counter()
    tasks = await gather_around(crowd, count)
    crowd.settle()
    for task in tasks:
        await task
    return (perf_counter() - begun_at) / count * 1e6


async def time_to_cancel(crowd: Crowd, count: int) -> float:
    """Return the µs of a waiter, from the cancelling of all to the end of the last."""
    tasks = await gather_around(crowd, count)
    begun_at = perf_counter()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    took = perf_counter() - begun_at
    crowd.settle()
    await asyncio.sleep(0)
    return took / count * 1e6


async def bytes_of_a_waiter(crowd: Crowd, count: int) -> float:
    """Return the bytes that Python allocates for a waiter, its task included."""
    settle_memory()
    tracemalloc.start()
    tasks = await gather_around(crowd, count)
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    crowd.settle()
    for task in tasks:
        await task
    return allocated / count


async def measure(setting: Setting) -> Question:
    """Measure the guard's waiters beside those of an event, in turn."""
    crowds = {"guard": at_the_guard, "asyncio.Event": at_an_event}
    curves = {
        (what, of): Curve(f"{what}, {of}", is_reference=of != "guard")
        for what, of in product(("come and settle", "cancel all", "waiter"), crowds)
    }
    sizes = setting.sizes(100_000, 1_000)
    for make in crowds.values():
        # The first crowd allocates what is allocated once.
        await time_to_cancel(make(), 100)
    for number, count in enumerate(sizes):
        found: dict[tuple[str, str], list[float]] = {name: [] for name in curves}
        rounds = setting.rounds(min(max(WORK // count, 5), 50))
        for round_ in range(rounds):
            setting.tell((number + round_ / rounds) / len(sizes), f"{count:,} waiters")
            for of, make in crowds.items():
                settle_memory()
                found["come and settle", of].append(await time_to_settle(make(), count))
                settle_memory()
                found["cancel all", of].append(await time_to_cancel(make(), count))
        for of, make in crowds.items():
            found["waiter", of] = [await bytes_of_a_waiter(make(), count)]
        for name, curve in curves.items():
            curve.add(count, found[name])
    times = [curve for (what, _), curve in curves.items() if what != "waiter"]
    memory = [curve for (what, _), curve in curves.items() if what == "waiter"]
    caption = (
        "Each waiter is a task, and the cost of the tasks is in all figures; "
        "an `asyncio.Event` with as many tasks shows how much that is. "
        "Time and bytes are those of one waiter."
    )
    return Question(
        "waiters",
        "Waiters on one key",
        "waiters on one key",
        caption,
        [
            Picture("waiters-time", "What a waiter takes", "time", "µs", times),
            Picture("waiters-bytes", "What a waiter holds", "memory", "bytes", memory),
        ],
    )
