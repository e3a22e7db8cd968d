"""A process of a cluster that calls when it is told to: `python worker.py '{"url": …, "namespace": …, "name": …}'`.

Its loads are counted in the same Redis, by a client of their own that may do so, and can be held at a gate. It answers
orders in lines of JSON; see `Caller`.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any

from processes import orders, say
from redis.asyncio import Redis

from stampede_guard import Guard, coalesce
from stampede_guard.testing import Gate


class Caller:
    """What the process can be told to do: each method is an order, and says its own name when it is done."""

    def __init__(self, settings: dict[str, Any], guard: Guard, redis: Redis) -> None:
        self._name: str = settings["name"]
        self._guard = guard
        self._redis = redis
        self._count_key = f"loads:{settings['namespace']}"
        self._gate = Gate()
        self._returned_at = 0.0
        self._fails = False
        self._tasks: set[asyncio.Task[None]] = set()

        @coalesce("menu-{menu_id}", guard=guard, **settings["options"])
        async def load_menu(menu_id: int) -> str:
            return await self._load(menu_id)

        self.load_menu = load_menu

    async def _load(self, menu_id: int) -> str:
        number = await self._redis.incr(self._count_key)
        say("loading", number=number)
        await self._gate.passage()
        self._returned_at = time.monotonic()
        if self._fails:
            raise LookupError(menu_id)
        return f"{self._name} {menu_id} load {number}"

    async def obey(self, order: dict[str, Any]) -> None:
        """Do what is ordered, without waiting for what takes long."""
        what = order.pop("do")
        doing = asyncio.create_task(getattr(self, what)(**order))
        self._tasks.add(doing)
        doing.add_done_callback(self._tasks.discard)

    async def call(self, key: int, callers: int) -> None:
        """Let *callers* ask for one menu; say `called` when all wait, and `landed` when all have their answer."""
        started = time.monotonic()
        calls = [asyncio.create_task(self._one(key)) for _ in range(callers)]
        await asyncio.sleep(0)  # each has run up to its first wait
        stats = self._guard.stats()
        say("called", flights=stats.in_flight, calls=stats.calls)
        landed = await asyncio.gather(*calls)
        answers = Counter(answer for answer, _ in landed)
        instants = [instant for _, instant in landed]
        say("landed", answers=answers, started=started, instants=instants, returned_at=self._returned_at)

    async def _one(self, key: int) -> tuple[str, float]:
        try:
            answer = await self.load_menu(key)
        except Exception as error:
            answer = type(error).__name__
        return answer, time.monotonic()

    async def open(self) -> None:
        """Let loads pass, now and later."""
        self._gate.open()

    async def close(self) -> None:
        """Hold the loads that begin from now on."""
        self._gate = Gate()
        say("close")

    async def fail(self) -> None:
        """Let loads end in an error."""
        self._fails = True
        say("fail")

    async def invalidate(self, key: int) -> None:
        """Invalidate one menu."""
        await self.load_menu.invalidate(key)
        say("invalidate")

    async def count(self) -> None:
        """Say the guard's counters."""
        say("count", **self._guard.stats().as_dict())


async def main(settings: dict[str, Any]) -> None:
    """Obey until there are no more orders."""
    guard = Guard(settings["url"], namespace=settings["namespace"], **settings["guard"])
    async with Redis.from_url(settings["admin_url"]) as redis:
        await redis.ping()
        caller = Caller(settings, guard, redis)
        async with guard:
            say("ready")
            async for order in orders():
                await caller.obey(order)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
