"""A busy process that asks for many cold keys at once: `python busy.py '{"url": …, "namespace": …, …}'`.

Its loads queue for a few slots, and its event loop is blocked again and again for a while, as by rendering templates
or parsing. It obeys `go` and `finish`, in lines of JSON.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any

from processes import orders, say

from stampede_guard import Guard, coalesce
from stampede_guard._operations import operation


class Busy:
    """What the process does.

    Args:
        settings: `options` of the operation, `load_time` of each load, and `block` and `pause`: seconds for which the
            event loop is blocked, and is not; `lease`, seconds that each lease lasts, if that is not to be learnt.
        guard: The process's.
    """

    def __init__(self, settings: dict[str, Any], guard: Guard) -> None:
        self._settings = settings
        self._guard = guard
        self._loads: Counter[int] = Counter()

        if "lease" in settings:
            operation._LEASES = (settings["lease"], settings["lease"])

        @coalesce("menu-{menu_id}", guard=guard, **settings["options"])
        async def load_menu(menu_id: int) -> str:
            self._loads[menu_id] += 1
            await asyncio.sleep(settings["load_time"])
            return f"menu {menu_id}"

        self._load_menu = load_menu

    async def _be_busy(self) -> None:
        while True:
            time.sleep(self._settings["block"])  # noqa: ASYNC251  # what blocks the loop is the point
            await asyncio.sleep(self._settings["pause"])

    async def go(self, keys: list[int]) -> None:
        """Ask for all *keys* at once; say how long it took until the last answer, and how many were wrong."""
        started = time.monotonic()
        hog = asyncio.create_task(self._be_busy())
        answers = await asyncio.gather(*(self._load_menu(key) for key in keys))
        hog.cancel()
        wrong = sum(answer != f"menu {key}" for key, answer in zip(keys, answers, strict=True))
        say("go", took=time.monotonic() - started, wrong=wrong)

    async def finish(self) -> None:
        """Say what was loaded, and the guard's counters."""
        say("finish", loads=list(self._loads.elements()), stats=self._guard.stats().as_dict())


async def main(settings: dict[str, Any]) -> None:
    """Obey until there are no more orders."""
    async with Guard(settings["url"], namespace=settings["namespace"], **settings["guard"]) as guard:
        busy = Busy(settings, guard)
        say("ready")
        async for order in orders():
            await getattr(busy, order.pop("do"))(**order)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
