"""A hit in memory, awaited, with one argument and with three."""

import functools
from collections.abc import Awaitable, Callable
from itertools import repeat
from time import perf_counter
from typing import Any

from benchmarks.families import Setting, row_in
from benchmarks.families.wrapped import all_wrapped
from benchmarks.model import Column, Figure, Row, Table, Target
from benchmarks.peers import all_peers
from benchmarks.peers.peer import MEMORY
from benchmarks.peers.references import BARE, BARE_TTL_CACHE
from benchmarks.subjects import VALUE, Function, Terms, one_argument, three_arguments
from benchmarks.timing import interleaved

TITLE = "A hit in memory"
CALLS = (20, 20_000)  # fewest and most of a round
LRU_CACHE = "functools.lru_cache, called"

COLUMNS = [
    Column("1 argument", "ns", target=Target(2.5)),
    Column("3 arguments", "ns", target=Target(3.5)),
]


async def one(call: Function, calls: int) -> float:
    """Return the seconds that *calls* take."""
    started_at = perf_counter()
    for _ in repeat(None, calls):
        await call(7)
    return perf_counter() - started_at


async def three(call: Function, calls: int) -> float:
    """Likewise, with three arguments."""
    started_at = perf_counter()
    for _ in repeat(None, calls):
        await call(7, "en", currency="EUR")
    return perf_counter() - started_at


async def one_called(call: Callable[..., str], calls: int) -> float:
    """Likewise, of an ordinary function."""
    started_at = perf_counter()
    for _ in repeat(None, calls):
        call(7)
    return perf_counter() - started_at


async def three_called(call: Callable[..., str], calls: int) -> float:
    """Likewise, of an ordinary function."""
    started_at = perf_counter()
    for _ in repeat(None, calls):
        call(7, "en", currency="EUR")
    return perf_counter() - started_at


@functools.lru_cache
def _one(restaurant_id: int) -> str:
    return VALUE if restaurant_id else ""


@functools.lru_cache
def _three(restaurant_id: int, language: str, currency: str) -> str:
    return VALUE if restaurant_id and language and currency else ""


async def _rounds(
    functions: dict[str, Any], timers: tuple[Any, Any], failures: dict[str, str], seconds: float
) -> dict[str, Callable[[], Awaitable[float]]]:
    """Return a round for each function, with its value cached: as many calls as take *seconds*."""
    rounds: dict[str, Callable[[], Awaitable[float]]] = {}
    for name, function in functions.items():
        timer = timers[name == LRU_CACHE]
        try:
            await timer(function, 5)
            once = await timer(function, 20) / 20
        except Exception as error:  # noqa: BLE001  # a peer's failure is a line in the table
            failures[name] = f"failed: {error!r}"
            continue
        calls = min(max(int(seconds / once), CALLS[0]), CALLS[1])

        async def nanoseconds(timer: Any = timer, function: Any = function, calls: int = calls) -> float:
            return float(await timer(function, calls) / calls * 1e9)

        rounds[name] = nanoseconds
    return rounds


async def measure(setting: Setting) -> list[Table]:
    """Return one table."""
    peers = [
        peer
        for peer in all_peers().values()
        if peer is BARE or (MEMORY not in peer.lacks and (peer.role != "baseline" and peer is not BARE_TTL_CACHE))
    ]
    failures: dict[str, str] = {}
    columns: list[dict[str, Figure]] = []
    for half, (subject, cached, timers) in enumerate(
        ((one_argument, _one, (one, one_called)), (three_arguments, _three, (three, three_called)))
    ):
        async with all_wrapped(peers, lambda _: subject(), Terms(), failures) as functions:  # noqa: B023
            everything = {**functions, LRU_CACHE: cached}
            rounds = await _rounds(everything, timers, failures, setting.scaled(200, 10) / 10_000)
            columns.append(
                await interleaved(
                    rounds,
                    setting.scaled(25, 2),
                    lambda done, said: setting.tell((half + done) / 2, said),  # noqa: B023
                    failures,
                )
            )
    rows = [row_in(columns, peer, failures) for peer in peers]
    rows.append(Row(LRU_CACHE, [column.get(LRU_CACHE) for column in columns], "reference", ["everything async"]))
    return [
        Table(
            "hits",
            TITLE,
            COLUMNS,
            rows,
            "The loop around the call is in all figures. The third argument is given by keyword.",
            setting.loop,
        )
    ]
