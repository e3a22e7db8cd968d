"""Hits one value, again and again: `python -m benchmarks.hitting CANDIDATE HITS`, to be run under callgrind.

It imports what its candidate needs and little else: under callgrind all of that takes forty times as long.
"""

import asyncio
import os
import sys
from itertools import repeat

from benchmarks.peers import named
from benchmarks.peers.peer import Peer
from benchmarks.subjects import Terms, one_argument

BEFORE = 200  # the interpreter has specialised by then what it will


async def hit(peer: Peer, hits: int) -> None:
    """Hit so many times."""
    async with peer.wrap(one_argument(), Terms()) as call:
        for _ in repeat(None, BEFORE):
            await call(7)
        for _ in repeat(None, hits):
            await call(7)


if __name__ == "__main__":
    asyncio.run(hit(named(sys.argv[1]), int(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)
