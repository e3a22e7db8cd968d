"""Each candidate in a process of its own.

So memory that one leaves behind is not charged to the next.
"""

import asyncio
import importlib
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from benchmarks.children import Tell
from benchmarks.families import NOT_INSTALLED
from benchmarks.peers import is_installed, named
from benchmarks.peers.peer import Peer

TIMEOUT = 240.0
# With fixed thresholds, malloc returns each large block to the system as soon as it is free.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

Found = list[float | None] | str
T = TypeVar("T")


def in_pairs(measured: Callable[[Peer], T], peers: Sequence[Peer], tell: Tell) -> list[T]:
    """Return the results of *measured* for all peers, two at a time.

    Only for figures that a neighbour does not change.
    """
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        # The last ones are the slowest; they start first, so that no processor is idle at the end.
        jobs = {pool.submit(measured, peer): peer for peer in reversed(peers)}
        for number, job in enumerate(as_completed(jobs)):
            tell((number + 1) / len(peers), jobs[job].name)
        return [job.result() for job in reversed(jobs)]


def probe(family: str, peer: Peer, *numbers: float) -> Found:
    """Return the figures of *family* for *peer*, or the reason why there are none."""
    if not is_installed(peer):
        return NOT_INSTALLED
    command = [sys.executable, "-m", "benchmarks.families.probes", family, peer.name, *map(str, numbers)]
    try:
        ended = subprocess.run(  # noqa: S603  # a module of this package
            command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=os.environ | _ENVIRONMENT
        )
    except subprocess.TimeoutExpired:
        return f"not done after {TIMEOUT:.0f} s"
    if ended.returncode:
        return f"failed: {(ended.stderr.strip().splitlines() or ['?'])[-1]}"[:120]
    found: list[float | None] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str]) -> None:
    """Measure one candidate, and print its figures."""
    family, name, *numbers = arguments
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    measure_one = importlib.import_module(f"benchmarks.families.{family}").measure_one
    found = asyncio.run(measure_one(named(name), *map(float, numbers)))
    print(json.dumps(found), flush=True)  # noqa: T201
    # Exit without waiting for the candidate's threads and timers.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
