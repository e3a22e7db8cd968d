"""The parts of a guard and of an event loop that no public name leads to."""

import asyncio
from typing import Any

import pytest
from waiting import until

from stampede_guard import Guard, _path
from stampede_guard._bus.backplane import Backplane
from stampede_guard._l2.lease import Lease
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


def instance_of(guard: Guard) -> str:
    """Return the name under which *guard* speaks on the running loop."""
    return backplane_of(guard)._instance


def new_leases(monkeypatch: pytest.MonkeyPatch) -> list[Lease]:
    """Return the list to which each lease that a guard makes from now on is added."""
    made: list[Lease] = []

    def lease(*args: Any, **options: Any) -> Lease:
        made.append(Lease(*args, **options))
        return made[-1]

    monkeypatch.setattr(_path, "Lease", lease)
    return made


def is_up(guard: Guard) -> bool:
    """Whether *guard* hears the bus."""
    return backplane_of(guard)._is_up is True


def is_expecting(guard: Guard, op: str) -> bool:
    """Whether a flight of *guard* waits for another's load of *op*."""
    return op in backplane_of(guard)._wake_ups


async def echoed(guard: Guard) -> None:
    """Let *guard* send itself an echo, and wait until it has heard it, and so all that was said before."""
    backplane = backplane_of(guard)
    await backplane._send_echo()
    await until(lambda: not backplane._echoes, "the echo")
