"""A process that refreshes, reads and loads as it is told to: `python refresher.py '{"url": …, "truth_url": …, …}'`.

What is true stands in another server, which has no faults: a number for each key. It answers orders in lines of JSON;
see `Refresher`.
"""

import asyncio
import json
import sys
from time import monotonic
from typing import Any

from processes import orders, say
from redis.asyncio import Redis

from stampede_guard import Guard, InvalidationPending, coalesce
from stampede_guard.testing import Gate

GAP = 0.01  # seconds between two reads


class Refresher:
    """What the process can be told to do: each method is an order, and says its own name when it is done.

    Args:
        settings: `truth_key`, of the number that is true; `length`, in characters, of the answers; `options` of the
            operation; and `load_time`, in seconds.
    """

    def __init__(self, settings: dict[str, Any], guard: Guard, truth: Redis) -> None:
        self._guard = guard
        self._gate = Gate()
        self._gate.open()
        self._held: list[Gate] = []
        self._fails = self._reads_on = False
        self.reads: list[tuple[float, int]] = []

        @coalesce("menu", guard=guard, **settings["options"])
        async def load_menu() -> str:
            number, gate, fails = int(await truth.get(settings["truth_key"]) or 0), self._gate, self._fails
            if gate in self._held:
                say("held", number=number)
            await asyncio.sleep(settings.get("load_time", 0))
            await gate.passage()
            if fails:
                raise LookupError(number)
            return str(number).zfill(settings.get("length", 1))

        self._load_menu = load_menu

    async def hold(self) -> None:
        """Hold the loads that begin from now on, when they have read."""
        self._gate = Gate()
        self._held.append(self._gate)
        say("hold")

    async def let_pass(self) -> None:
        """Hold no more loads than are held."""
        self._gate = Gate()
        self._gate.open()
        say("let_pass")

    async def open(self) -> None:
        """Let go of what is held."""
        for gate in self._held:
            gate.open()
        say("open")

    async def fail(self) -> None:
        """Let the loads that begin from now on end in an error."""
        self._fails = True
        say("fail")

    async def call(self) -> None:
        """Ask once; say the number, and when it was there."""
        number = int(await self._load_menu())
        say("call", number=number, at=monotonic())

    async def refresh(self) -> None:
        """Refresh; say the number and when it was there, and once more when no invalidation is pending any more."""
        is_pending = False
        try:
            number = int(await self._load_menu.refresh())
        except InvalidationPending as error:
            is_pending, number = True, int(error.value)
        except LookupError:
            number = 0
        say("refresh", number=number, is_pending=is_pending, at=monotonic())
        tier = self._guard._states.running().tier
        while tier is not None and not tier.pending.is_empty:
            await asyncio.sleep(GAP)
        say("settled", at=monotonic())

    async def invalidate(self) -> None:
        """Invalidate."""
        await self._load_menu.invalidate()
        say("invalidate")

    async def read_on(self) -> None:
        """Read until told to stop."""
        self._reads_on = True
        say("read_on")
        while self._reads_on:
            began = monotonic()
            self.reads.append((began, int(await self._load_menu())))
            await asyncio.sleep(GAP)
        say("stop", reads=self.reads)

    async def stop(self) -> None:
        """Read no more; `read_on` says what was read, and when each read began."""
        self._reads_on = False


async def main(settings: dict[str, Any]) -> None:
    """Obey until there are no more orders."""
    async with (
        Redis.from_url(settings["truth_url"]) as truth,
        Guard(settings["url"], namespace=settings["namespace"], **settings["guard"]) as guard,
    ):
        refresher = Refresher(settings, guard, truth)
        say("ready")
        tasks: set[asyncio.Task[None]] = set()
        async for order in orders():
            doing = asyncio.create_task(getattr(refresher, order.pop("do"))(**order))
            tasks.add(doing)
            doing.add_done_callback(tasks.discard)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
