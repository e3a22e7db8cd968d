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
from typing import Any
from weakref import WeakKeyDictionary, ref

from ._backplane import Backplane
from ._epochs import Epochs
from ._limiter import Limits
from ._memory import Memory
from ._scoreboard import Flight, Scoreboard
from ._stats import Counters
from ._tracking import Tracking
from .stores import Touched
from .stores._pending import Invalidation
from .stores._tier import Tier

_UNCOUNTED = Counters()  # for upkeep, which is nobody's call


class Site:
    """One event loop's part of a guard; the audience of its backplane.

    Attributes:
        loop: Weak reference to the loop.
        board: Its flights.
        memory: Its L1.
        tier: Its L2, if there is one.
        backplane: What it hears of other processes, if the store has a bus.
        tracking: What it hears of writes past the library, if the store was asked to tell.
        limits: How many loads may run at once.
        epochs: The guard's.
        depth: How often the guard was entered here.
    """

    __slots__ = (
        "__weakref__",
        "backplane",
        "board",
        "depth",
        "epochs",
        "limits",
        "loop",
        "memory",
        "tier",
        "tracking",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        memory: Memory,
        tier: Tier | None,
        epochs: Epochs,
        limits: Limits,
    ) -> None:
        self.loop = ref(loop)
        self.board = Scoreboard()
        self.memory = memory
        self.tier = tier
        self.backplane: Backplane | None = None
        self.tracking: Tracking | None = None
        if tier is not None and "tracking" in tier.capabilities:
            self.tracking = Tracking(tier, memory, self.hear_invalidated, self.hear_cleared)
        self.limits = limits
        self.depth = 0
        self.epochs = epochs
        # Not a method: the memory must not keep its site alive.
        memory.on_lapse = partial(_doubt_flights, epochs, self.board)

    def forget(self, op: str) -> None:
        """Drop *op* from memory, and let its next caller start afresh."""
        self.memory.drop(op)
        self.board.forget(op)

    def forget_tagged(self, tag: str) -> None:
        """Do so for every op that has *tag*."""
        self.memory.drop_tagged(tag)
        self.board.forget_tagged(tag)

    def forget_all(self) -> None:
        """Do so for every op."""
        self.memory.clear()
        self.board.forget_all()

    def forget_replaced(self) -> None:
        """Let nobody join a flight of a function that was defined anew; memory finds its entries to be over."""
        self.board.forget_replaced()

    def hide_flights(self) -> None:
        """Let nobody join a flight without asking whether that is still the rule."""
        for flight in self.board.flights.values():
            flight.hide()

    def hear_invalidated(self, op: str) -> None:
        """Take note that *op* was invalidated elsewhere: loads under way lose the right to be remembered."""
        self.epochs.bump(op)
        self.forget(op)

    def hear_tag_invalidated(self, tag: str) -> None:
        """Take note that everything with *tag* was."""
        self.epochs.bump_tag(tag)
        self.forget_tagged(tag)

    def hear_cleared(self) -> None:
        """Take note that everything was, or may have been."""
        self.epochs.bump_all()
        self.forget_all()

    def hear_touched(self, touched: Touched) -> None:
        """Take note that the server saw keys change, through us or others."""
        if self.tracking is not None:
            self.tracking.hear(touched)

    def hear_sound(self, trusted_until: float) -> None:
        """Take note that all is heard in time: trust the bus until that instant."""
        self.memory.trust(trusted_until)

    def hear_nothing(self) -> None:
        """Take note that the bus is not."""
        self.memory.distrust()
        _doubt_flights(self.epochs, self.board)

    def joinable(self, op: str) -> Flight[Any] | None:
        """Return the flight of *op* that a caller who comes now may join."""
        flight = self.board.flights.get(op)
        if flight is None or self.memory.believes(flight.joinable_until):
            return flight
        self.board.forget(op)
        return None

    def send(self, announced: Invalidation) -> Flight[bool] | None:
        """Have the store invalidate what was announced; the flight tells whether it confirmed."""
        tier = self.tier
        if tier is None:
            return None

        async def carry_out(_: Flight[bool]) -> bool:
            return await tier.invalidate(announced, _UNCOUNTED)

        return self.board.launch(f"{announced.key} (invalidation)", carry_out, _UNCOUNTED, "finish", is_private=True)


def _doubt_flights(epochs: Epochs, board: Scoreboard) -> None:
    """Let loads under way be neither remembered nor joined: no message tells whether they were overtaken."""
    epochs.bump_all()
    board.forget_all()


def _nobody() -> None:
    """Stand for a weak reference to nothing."""


class Sites:
    """The sites of one guard."""

    def __init__(self) -> None:
        self._sites: WeakKeyDictionary[asyncio.AbstractEventLoop, Site] = WeakKeyDictionary()
        self._lock = Lock()
        self._last: Callable[[], Site | None] = _nobody  # weak: a site has to die with its loop

    def here(self) -> Site | None:
        """Return the running loop's site, if it has one.

        Raises:
            RuntimeError: no event loop is running.
        """
        loop = asyncio.get_running_loop()
        last = self._last()
        if last is not None and last.loop() is loop:
            return last
        with self._lock:
            site = self._sites.get(loop)
        if site is not None:
            self._last = ref(site)
        return site

    def add(self, site: Site) -> None:
        """Make *site* the running loop's."""
        with self._lock:
            self._sites[asyncio.get_running_loop()] = site
        self._last = ref(site)

    def remove(self, site: Site) -> bool:
        """Let go of *site*, unless the running loop has another by now; return whether it was let go."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._sites.get(loop) is not site:
                return False
            del self._sites[loop]
        self._last = _nobody
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
