"""The parts of a guard and of an event loop that no public name leads to."""

import asyncio
from typing import Any

from stampede_guard import Guard
from stampede_guard._bus.backplane import Backplane
from stampede_guard._l2.tier import Tier


def tier_of(guard: Guard) -> Tier:
    """Return the L2 of *guard* on the running loop."""
    tier = guard._states.running().tier
    assert tier is not None
    return tier


def backplane_of(guard: Guard) -> Backplane:
    """Return the bus connection of *guard* on the running loop."""
    backplane = guard._states.running().backplane
    assert backplane is not None
    return backplane


def timers_of(loop: asyncio.AbstractEventLoop) -> list[asyncio.TimerHandle]:
    """Return the timers of *loop* that were not cancelled."""
    scheduled: list[asyncio.TimerHandle] = vars(loop)["_scheduled"]
    return [timer for timer in scheduled if not timer.cancelled()]


def untyped(thing: object) -> Any:
    """Return *thing*, for uses that a type checker would refuse."""
    return thing
