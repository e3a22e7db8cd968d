"""What a guard keeps for each event loop: its flights, its memory, its connections.

Futures and connections belong to the loop that made them, and `cachetools` is not thread-safe. So
nothing is shared between loops, except that an invalidation reaches all of them. A site is held
weakly by its loop, and dies with it.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Lock
from weakref import WeakKeyDictionary, ref

from ._memory import Memory
from ._scoreboard import Flight, Scoreboard
from ._stats import Counters
from .stores._tier import Tier

_UNCOUNTED = Counters()  # for upkeep, which is nobody's call


class Site:
    """One event loop's part of a guard.

    Attributes:
        loop: Weak reference to the loop.
        board: Its flights.
        memory: Its L1.
        tier: Its L2, if there is one.
        depth: How often the guard was entered here.
    """

    __slots__ = ("__weakref__", "board", "depth", "loop", "memory", "tier")

    def __init__(self, loop: asyncio.AbstractEventLoop, memory: Memory, tier: Tier | None) -> None:
        self.loop = ref(loop)
        self.board = Scoreboard()
        self.memory = memory
        self.tier = tier
        self.depth = 0

    def forget(self, op: str) -> None:
        """Drop *op* from memory, and let its next caller start afresh."""
        self.memory.drop(op)
        self.board.forget(op)

    def delete(self, op: str) -> Flight[bool] | None:
        """Drop *op* from the store, if there is one; the flight tells whether it confirmed."""
        if self.tier is None:
            return None
        drop = partial(_drop, self.tier, op)
        return self.board.launch(f"{op} (invalidation)", drop, _UNCOUNTED, "finish", is_private=True)

    def forget_all(self) -> None:
        """Do so for every op."""
        self.memory.clear()
        self.board.forget_all()


async def _drop(tier: Tier, op: str, _: Flight[bool]) -> bool:
    return await tier.delete(op, _UNCOUNTED)


class Sites:
    """The sites of one guard."""

    def __init__(self) -> None:
        self._sites: WeakKeyDictionary[asyncio.AbstractEventLoop, Site] = WeakKeyDictionary()
        self._lock = Lock()
        self._last: Site | None = None

    def here(self) -> Site | None:
        """Return the running loop's site, if it has one.

        Raises:
            RuntimeError: no event loop is running.
        """
        loop = asyncio.get_running_loop()
        last = self._last  # read once: another thread may replace it between two looks
        if last is not None and last.loop() is loop:
            return last
        with self._lock:
            site = self._sites.get(loop)
        self._last = site
        return site

    def add(self, site: Site) -> None:
        """Make *site* the running loop's."""
        with self._lock:
            self._sites[asyncio.get_running_loop()] = site
        self._last = site

    def remove(self, site: Site) -> bool:
        """Let go of *site*, unless the running loop has another by now; return whether it was let go."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._sites.get(loop) is not site:
                return False
            del self._sites[loop]
        self._last = None
        return True

    def tell(self, change: Callable[[Site], object]) -> None:
        """Apply *change* to the running loop's site now, and to each other's that is open in its next iteration."""
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        with self._lock:
            sites = list(self._sites.items())
        for loop, site in sites:
            if loop is running:
                change(site)
            elif not loop.is_closed():
                with suppress(RuntimeError):  # closed since
                    loop.call_soon_threadsafe(self._apply, change, site)

    def _apply(self, change: Callable[[Site], object], site: Site) -> None:
        if self.here() is site:
            change(site)
