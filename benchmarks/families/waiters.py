"""Many callers of one cold key, and the cost of cancelling them."""

import asyncio
import gc
import inspect
import tracemalloc
from collections.abc import Awaitable, Callable
from itertools import count
from time import perf_counter

from benchmarks.families import Setting, row_in, row_of
from benchmarks.families.wrapped import all_wrapped
from benchmarks.model import Column, Figure, Table, Target
from benchmarks.peers import all_peers
from benchmarks.peers.peer import Peer
from benchmarks.peers.references import BARE, BARE_TTL_CACHE, BY_HAND, EVENT, IN_A_TASK
from benchmarks.subjects import VALUE, Function, Slow, Subject, Terms, subject_of
from benchmarks.timing import described, interleaved

TIME = Column("time a caller", "µs", target=Target(1.05), digits=1)
LOADS = Column("loads", "", has_ratio=False)
CANCELLED = Column("all cancelled, time a caller", "µs", digits=1)
PEAK = Column("peak memory a caller", "bytes")  # the same with each event loop
SECONDS = 1.0  # of a candidate's rounds


class Crowd:
    """Callers of one function; each round has a key of its own."""

    def __init__(self, call: Function, callers: int, slow: Slow) -> None:
        self.call = call
        self.callers = callers
        self.slow = slow
        self.keys = count(1)

    async def microseconds(self) -> float:
        """Return the µs of a caller, its task included."""
        call, key = self.call, next(self.keys)
        self.slow.runs = 0
        started_at = perf_counter()
        values = await asyncio.gather(*[call(key) for _ in range(self.callers)])
        took = perf_counter() - started_at
        if values.count(VALUE) != self.callers:
            message = "a caller got a wrong value"
            raise ValueError(message)
        return took / self.callers * 1e6

    async def peak(self) -> float:
        """Return the peak memory of a caller, in bytes."""
        gc.collect()
        tracemalloc.start()
        try:
            await self.microseconds()
            return tracemalloc.get_traced_memory()[1] / self.callers
        finally:
            tracemalloc.stop()


async def as_coroutines(call: Function) -> Function:
    """Return a function that returns a coroutine for each call.

    theine returns the same awaitable to all callers of a key.
    """
    first = call(0)
    await first
    if inspect.iscoroutine(first):
        return call

    async def wait(restaurant_id: int) -> str:
        return await call(restaurant_id)

    return wait


class Gate:
    """A loader that runs until it is told to stop."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    def subject(self) -> Subject:
        """Return the loader as a function to be cached."""

        async def menu(restaurant_id: int) -> str:
            await self.opened.wait()
            return VALUE if restaurant_id is not None else ""

        return subject_of(menu)


def _cancelling(call: Function, callers: int, gate: Gate) -> Callable[[], Awaitable[float]]:
    """Return a round in which all callers of a key that is being loaded are cancelled."""
    keys = count(1)

    async def microseconds() -> float:
        gate.opened.clear()
        key = next(keys)
        tasks = [asyncio.ensure_future(call(key)) for _ in range(callers)]
        # After that all of them wait.
        for _ in range(Slow.ITERATIONS):
            await asyncio.sleep(0)
        started_at = perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=60)
        took = perf_counter() - started_at
        kept = sum(not task.cancelled() for task in tasks)
        gate.opened.set()
        # Loads that still run end within that.
        for _ in range(Slow.ITERATIONS):
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        if kept > 1:
            message = f"{kept} callers were not cancelled"
            raise RuntimeError(message)
        return took / callers * 1e6

    return microseconds


async def measure(setting: Setting) -> list[Table]:
    """Return a table of all candidates, and one of a few with more callers."""
    without = {IN_A_TASK, BARE_TTL_CACHE}
    peers = [EVENT, *(peer for peer in all_peers().values() if peer not in without and peer is not EVENT)]
    failures: dict[str, str] = {}
    callers, fewer = setting.scaled(10_000, 100), setting.scaled(2_000, 100)
    times, loads = await _crowds(peers, callers, setting.scaled(5, 1), setting.part(0.0, 0.4), failures)
    columns = [(TIME, times), (LOADS, loads)]
    caption = "All figures include a caller's task, and the harness that waits for the tasks."
    if setting.loop == "asyncio":
        columns.append((PEAK, await _peaks(peers, fewer, failures)))
        caption += f" Memory is measured with {fewer:,} callers."
    cancelled, uncancelled = await _cancelled(peers, callers, setting.scaled(3, 1), setting.part(0.4, 0.7))
    columns.append((CANCELLED, cancelled))
    rows = []
    for peer in peers:
        row = row_in([found for _, found in columns], peer, failures)
        if not row.note and peer.name in uncancelled:
            row.note = f"cancelled: {uncancelled[peer.name]}"
        if row.role == "baseline" and peer is not EVENT:
            row.role = "reference"
        rows.append(row)
    most = setting.scaled(100_000, 500)
    few = [EVENT, BY_HAND, *(peer for peer in peers if peer.role == "guard")]
    many, _ = await _crowds(few, most, setting.scaled(3, 1), setting.part(0.7, 1.0), {})
    return [
        Table(
            "waiters",
            f"{callers:,} callers of one cold key",
            [column for column, _ in columns],
            rows,
            caption,
            setting.loop,
        ),
        Table(
            "waiters",
            f"{most:,} callers of one cold key",
            [TIME],
            [row_of(peer, [many.get(peer.name)]) for peer in few],
            "",
            setting.loop,
        ),
    ]


Figures = dict[str, Figure]


async def _crowds(
    peers: list[Peer], callers: int, rounds: int, setting: Setting, failures: dict[str, str]
) -> tuple[Figures, Figures]:
    """Return times and loads."""
    slow = {peer.name: Slow() for peer in peers}
    async with all_wrapped(peers, lambda name: slow[name].subject(), Terms(), failures) as functions:
        crowds = {
            name: Crowd(await as_coroutines(function), callers, slow[name]) for name, function in functions.items()
        }
        times = await interleaved(
            {name: crowd.microseconds for name, crowd in crowds.items()},
            rounds,
            setting.tell,
            failures,
            seconds=SECONDS,
            least=2,
        )
    return times, {name: Figure.of([float(slow[name].runs)]) for name in times}


async def _peaks(peers: list[Peer], callers: int, failures: dict[str, str]) -> Figures:
    """Return the peak memory of a caller, for each candidate."""
    found: Figures = {}
    slow = {peer.name: Slow() for peer in peers}
    async with all_wrapped(peers, lambda name: slow[name].subject(), Terms(), failures) as functions:
        for name, function in functions.items():
            try:
                crowd = Crowd(await as_coroutines(function), callers, slow[name])
                # The first round allocates what a candidate allocates once.
                await crowd.microseconds()
                found[name] = Figure.of([await crowd.peak()])
            except Exception as error:  # noqa: BLE001  # a peer's failure is a line in the table
                failures[name] = described(error)
    return found


async def _cancelled(peers: list[Peer], callers: int, rounds: int, setting: Setting) -> tuple[Figures, dict[str, str]]:
    """Return the time of a caller's cancellation for each candidate, and the failures."""
    failures: dict[str, str] = {}
    gate = Gate()
    waiting = [peer for peer in peers if peer is not BARE]
    async with all_wrapped(waiting, lambda _: gate.subject(), Terms(), failures) as functions:
        gate.opened.set()
        found = await interleaved(
            {name: _cancelling(await as_coroutines(function), callers, gate) for name, function in functions.items()},
            rounds,
            lambda done, said: setting.tell(done, f"cancelled, {said}"),
            failures,
            seconds=SECONDS,
            least=1,
        )
    return found, failures
