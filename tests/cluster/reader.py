"""A process that reads a few keys without a pause: `python reader.py '{"url": …, "truth_url": …, "namespace": …}'`.

What is true stands in another server, which has no faults: a number for each key, which only rises, and the number of
loads. It answers orders in lines of JSON; see `Reader`.
"""

import asyncio
import json
import sys
from time import monotonic
from typing import Any

from processes import orders, say
from redis.asyncio import Redis

from stampede_guard import Guard, InvalidationPending, coalesce

GAP = 0.02  # seconds between two rounds of reads


class Reader:
    """What the process can be told to do: each method is an order, and says its own name when it is done."""

    def __init__(self, settings: dict[str, Any], guard: Guard, truth: Redis) -> None:
        self._guard = guard
        self._truth = truth
        self._keys = range(settings["keys"])

        @coalesce("menu-{menu_id}", guard=guard, ttl=settings["ttl"], l2_ttl=settings["l2_ttl"])
        async def load_menu(menu_id: int) -> int:
            await truth.incr("loads")
            return int(await truth.get(f"menu:{menu_id}") or 0)

        self._load_menu = load_menu

    async def read(self, seconds: float) -> None:
        """Read every key again and again; say when all were read once, and in the end when which number was read."""
        until = monotonic() + seconds
        reads: list[tuple[float, int, int]] = []
        while monotonic() < until:
            for key in self._keys:
                began = monotonic()
                reads.append((began, key, await self._load_menu(key)))
            if len(reads) == len(self._keys):
                say("remembers")
            await asyncio.sleep(GAP)
        say("read", reads=reads)

    async def write(self, key: int) -> None:
        """Let a key's number rise, and invalidate; say when that was confirmed, and how often it was not."""
        number = await self._truth.incr(f"menu:{key}")
        refusals = 0
        while True:
            try:
                await self._load_menu.invalidate(key)
            except InvalidationPending:
                refusals += 1
                await asyncio.sleep(GAP)
            else:
                break
        say("write", number=number, confirmed_at=monotonic(), refusals=refusals)


async def main(settings: dict[str, Any]) -> None:
    """Obey until there are no more orders."""
    async with (
        Redis.from_url(settings["truth_url"]) as truth,
        Guard(settings["url"], namespace=settings["namespace"]) as guard,
    ):
        reader = Reader(settings, guard, truth)
        say("ready")
        tasks: set[asyncio.Task[None]] = set()
        async for order in orders():
            what = order.pop("do")
            doing = asyncio.create_task(getattr(reader, what)(**order))
            tasks.add(doing)
            doing.add_done_callback(tasks.discard)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
