"""Rounds of all candidates in turn, so that whatever else the machine does falls on all of them alike."""

import gc
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from time import perf_counter

from .model import Figure

Round = Callable[[], Awaitable[float]]
Tell = Callable[[float, str], None]


async def interleaved(
    candidates: Mapping[str, Round],
    rounds: int,
    tell: Tell,
    failures: dict[str, str],
    *,
    seconds: float = math.inf,
    least: int = 3,
) -> dict[str, Figure]:
    """Return what the rounds of each candidate come to; whoever fails is left out, and named in *failures*.

    The order is another one in each round: nobody always follows the same neighbour. Whoever has had its *seconds*,
    and the *least* number of rounds, sits out the rest: a long round needs fewer of its kind for the same certainty.
    """
    found: dict[str, list[float]] = {name: [] for name in candidates}
    spent = dict.fromkeys(candidates, 0.0)
    order = random.Random(7)  # noqa: S311  # the same order in each run
    for number in range(rounds):
        for name in order.sample(list(candidates), len(candidates)):
            if name in failures or (number >= least and spent[name] >= seconds):
                continue
            # What earlier rounds left behind is out of the collector's way: it would charge it to whoever is next.
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


def described(error: BaseException) -> str:
    """Return what a table says of *error*."""
    return f"failed: {type(error).__name__}: {error}"[:120]
