"""Hits one value, under callgrind: `python -m benchmarks.hitting CANDIDATE HITS`.

It imports little but the modules that its candidate needs, because everything takes forty times as
long under callgrind.
"""

import asyncio
import os
import sys
from itertools import repeat

from benchmarks.peers import named
from benchmarks.peers.peer import Peer
from benchmarks.subjects import Terms, one_argument

BEFORE = 200  # hits after which the interpreter has specialised the code


async def hit(peer: Peer, hits: int) -> None:
    """Hit the value *hits* times."""
    async with peer.wrap(one_argument(), Terms()) as call:
        for _ in repeat(None, BEFORE):
            await call(7)
        for _ in repeat(None, hits):
            await call(7)


if __name__ == "__main__":
    asyncio.run(hit(named(sys.argv[1]), int(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)
