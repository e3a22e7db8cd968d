"""Rounds of all candidates in turn.

So the other work of the machine falls on all of them alike.
"""

import gc
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from time import perf_counter

from .children import Tell
from .model import Figure
from .subjects import Function

Round = Callable[[], Awaitable[float]]


async def interleaved(
    candidates: Mapping[str, Round],
    rounds: int,
    tell: Tell,
    failures: dict[str, str],
    *,
    seconds: float = math.inf,
    least: int = 3,
) -> dict[str, Figure]:
    """Return the figure of each candidate; one that fails is left out, and named in *failures*.

    The order differs in each round, so that no candidate always follows the same one. A candidate
    that has had its *seconds* and the *least* number of rounds skips the others, because fewer long
    rounds give the same certainty.
    """
    found: dict[str, list[float]] = {name: [] for name in candidates}
    spent = dict.fromkeys(candidates, 0.0)
    order = random.Random(7)  # noqa: S311  # the same order in each run
    for number in range(rounds):
        for name in order.sample(list(candidates), len(candidates)):
            if name in failures or (number >= least and spent[name] >= seconds):
                continue
            # Otherwise this candidate would pay for collecting the objects of earlier rounds.
            gc.collect()
            gc.freeze()
            started_at = perf_counter()
            try:
                found[name].append(await candidates[name]())
            except Exception as error:  # noqa: BLE001  # a peer's failure is a line in the table
                failures[name] = described(error)
            spent[name] += perf_counter() - started_at
        tell((number + 1) / rounds, f"round {number + 1} of {rounds}")
    return {name: Figure.of(times) for name, times in found.items() if times and name not in failures}


async def fill(function: Function, first: int, end: int) -> float:
    """Call *function* with each number from *first* to *end*; return the seconds that it takes."""
    started_at = perf_counter()
    for key in range(first, end):
        await function(key)
    return perf_counter() - started_at


def described(error: BaseException) -> str:
    """Return the note for *error* in a table."""
    return f"failed: {type(error).__name__}: {error}"[:120]
