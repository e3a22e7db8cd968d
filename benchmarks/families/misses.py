"""A miss: keys never asked for before, a loader that never suspends."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from itertools import count, islice
from time import perf_counter
from typing import Any

from benchmarks.families import Setting, row_in
from benchmarks.families.wrapped import all_wrapped
from benchmarks.model import Column, Figure, Table, Target
from benchmarks.peers import all_peers
from benchmarks.peers.references import EVENT, IN_A_TASK
from benchmarks.subjects import Function, Terms, one_argument
from benchmarks.timing import interleaved

TITLE = "A miss in memory"
MAXSIZE = 1_000_000  # nothing is evicted

COLUMNS = [Column("a unique key", "µs", target=Target(2.0), digits=1)]
SECONDS = 1.0  # of a candidate's rounds
EAGER = [*COLUMNS, Column("with eager tasks", "µs", digits=1)]


async def measure(setting: Setting) -> list[Table]:
    """Return one table."""
    peers = [IN_A_TASK, *(peer for peer in all_peers().values() if peer not in {IN_A_TASK, EVENT})]
    failures: tuple[dict[str, str], dict[str, str]] = ({}, {})
    calls = setting.scaled(1_000, 100)
    caption = "A candidate that lacks a task of its own runs the loader inside the first caller."
    factories: list[Any] = [None]
    if sys.version_info >= (3, 12):
        if await _starts_tasks(asyncio.eager_task_factory):
            factories.append(asyncio.eager_task_factory)
        else:
            caption += " This event loop has no eager tasks on this Python."
    columns: list[dict[str, Figure]] = []
    loop = asyncio.get_running_loop()
    for factory, failed in zip(factories, failures, strict=False):
        loop.set_task_factory(factory)
        async with all_wrapped(peers, lambda _: one_argument(), Terms(maxsize=MAXSIZE), failed) as functions:
            rounds = {name: _round(function, calls) for name, function in functions.items()}
            columns.append(
                await interleaved(
                    rounds,
                    setting.scaled(25, 2),
                    lambda done, said: setting.tell((len(columns) + done) / len(factories), said),
                    failed,
                    seconds=SECONDS,
                    least=5,
                )
            )
    loop.set_task_factory(None)
    rows = [row_in(columns, peer, failures[0]) for peer in peers]
    for row in rows:
        if not row.note and row.name in failures[1]:
            row.note = f"with eager tasks: {failures[1][row.name]}"
        if row.role == "baseline" and row.name != IN_A_TASK.name:
            # The table has one baseline; the others are references here.
            row.role = "reference"
    return [Table("misses", TITLE, EAGER if len(columns) > 1 else COLUMNS, rows, caption, setting.loop)]


async def _starts_tasks(factory: Any) -> bool:
    """Return whether the event loop can start tasks by *factory*; some uvloops cannot."""
    loop = asyncio.get_running_loop()
    coroutine = asyncio.sleep(0)
    loop.set_task_factory(factory)
    try:
        await loop.create_task(coroutine)
    except TypeError:
        coroutine.close()
        return False
    finally:
        loop.set_task_factory(None)
    return True


def _round(call: Function, calls: int) -> Callable[[], Awaitable[float]]:
    keys = count()

    async def microseconds() -> float:
        unused = list(islice(keys, calls))
        started_at = perf_counter()
        for key in unused:
            await call(key)
        return (perf_counter() - started_at) / calls * 1e6

    return microseconds
