import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from leasing import LeasingDouble, Server
from waiting import eventually

from stampede_guard import Guard
from stampede_guard._bus import backplane as backplane_module
from stampede_guard._bus.tracking import Tracking
from stampede_guard._l2.tier import Tier
from stampede_guard._memory.l1 import Memory
from stampede_guard.stores import KeysChanged
from stampede_guard.stores._envelope import seal
from stampede_guard.testing import Gate, ManualClock

Pause = Callable[[], Awaitable[None]]

OURS, THEIRS = "o" * 22, "t" * 22


class TrackedStore(LeasingDouble):
    """A store that tells which keys change."""

    capabilities = LeasingDouble.capabilities | {"tracking"}


class Rig:
    """A memory of three entries, what tracks it, and the store."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.server = Server(self.clock)
        self.store = TrackedStore(self.server)
        self.tier = Tier(self.store, "menus", 100, self.clock)
        self.memory = Memory(3, self.clock)
        self.forgotten: list[str] = []
        self.tracking = Tracking(self.tier, self.memory, self.forgotten.append, lambda: self.forgotten.append("all"))

    async def remember(self, op: str, token: str = OURS) -> None:
        """Remember *op*, which is in the store, and let everything come to rest."""
        self.put(op, token)
        self.note(op, token)
        await self.rest()

    def note(self, op: str, token: str = OURS) -> None:
        """Remember *op*."""
        self.memory.put(op, "soup", 60)
        self.tracking.remember(op, token.encode())

    async def rest(self) -> None:
        """Let everything that was begun end; forget what was asked."""
        await eventually(lambda: not self.tracking._is_checking)
        self.looks = self.store.asked.count("stored by")
        self.store.asked.clear()

    def put(self, op: str, token: str) -> None:
        """Let a flight with *token* store *op*."""
        envelope = seal(f"menus:{op}", b"soup", token)
        self.server.values[self.tier.key(op)] = envelope, self.clock() + 60

    async def touch(self, *ops: str) -> None:
        """Let the server tell that *ops* were touched, and everything come to rest."""
        self.tracking.on_keys_changed(KeysChanged(tuple(f"{self.tier.key(op)}:v" for op in ops)))
        await self.rest()


@pytest.fixture
def rig() -> Rig:
    """Return a memory that is tracked, with nothing in it."""
    return Rig()


async def test_our_own_fill(rig: Rig) -> None:
    """What stands in the store as it was remembered stays."""
    await rig.remember("a")

    await rig.touch("a")

    assert ([], 1) == (rig.forgotten, rig.looks)


@pytest.mark.parametrize("how", ["replaced", "deleted", "overwritten"])
async def test_write_past_the_library(how: str, rig: Rig) -> None:
    """What stands there no more, or is another's, is forgotten; once is enough."""
    await rig.remember("a")
    if how == "replaced":
        rig.put("a", THEIRS)
    elif how == "deleted":
        rig.server.values.clear()
    else:
        rig.server.values[rig.tier.key("a")] = b"x", rig.clock() + 60
    await rig.touch("a")
    looks = rig.looks
    await rig.touch("a")

    assert (["a"], 1, 0) == (rig.forgotten, looks, rig.looks)


async def test_write_before_it_was_remembered(rig: Rig) -> None:
    """What was replaced while it was on its way to memory is found out when it gets there."""
    rig.put("a", THEIRS)
    await rig.touch("a")
    rig.note("a")
    await rig.rest()

    assert ["a"] == rig.forgotten


async def test_store_that_does_not_say(rig: Rig) -> None:
    """When nobody knows what stands there, it is not believed."""
    await rig.remember("a")
    rig.store.error = OSError("down")

    await rig.touch("a")

    assert ["a"] == rig.forgotten


async def test_what_is_not_held(rig: Rig) -> None:
    """Nobody looks at what is not in memory, or not any more."""
    await rig.remember("a")
    rig.memory.drop("a")

    await rig.touch("a", "b")

    assert ([], 0, {}) == (rig.forgotten, rig.looks, rig.tracking._remembered)


async def test_anything_may_have_changed(rig: Rig) -> None:
    """When the server lost count, everything is forgotten."""
    await rig.remember("a")
    rig.tracking.on_keys_changed(KeysChanged(None))

    assert (["all"], {}) == (rig.forgotten, rig.tracking._remembered)


async def test_one_look_at_a_time(rig: Rig, pause: Pause) -> None:
    """What is touched while something is looked at is looked at next, by the same task, and once."""
    for op in "ab":
        await rig.remember(op)
        rig.put(op, THEIRS)
    gate = rig.store.gate = Gate()
    rig.tracking.on_keys_changed(KeysChanged(("sg1:{menus:a}:v",)))
    await gate.arrivals(1)
    for _ in range(3):
        rig.tracking.on_keys_changed(KeysChanged(("sg1:{menus:b}:v",)))
    await pause()
    at_once = gate.arrived, len(rig.tier.upkeep)
    gate.open()
    await eventually(lambda: not rig.tracking._is_checking)

    assert ((1, 1), ["a", "b"]) == (at_once, rig.forgotten)


async def test_remembered_anew_while_it_is_looked_at(rig: Rig) -> None:
    """What was remembered after the look began is not judged by it."""
    await rig.remember("a")
    gate = rig.store.gate = Gate()
    rig.tracking.on_keys_changed(KeysChanged(("sg1:{menus:a}:v",)))
    await gate.arrivals(1)
    rig.put("a", THEIRS)
    rig.note("a", THEIRS)
    gate.open()
    await rig.rest()

    assert [] == rig.forgotten


async def test_what_has_left_memory_is_let_go(rig: Rig) -> None:
    """No more is noted than a few times what memory holds."""
    for number in range(100):
        await rig.remember(f"menu-{number}")

    assert len(rig.tracking._remembered) <= 7


# In a guard


@pytest.fixture
async def guards(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Guard, Server]]:
    """Return a guard whose store tells what changes, and the server."""
    monkeypatch.setattr(backplane_module, "_ECHO_PERIOD", 3_600.0)
    server = Server(ManualClock())
    async with Guard(lambda: TrackedStore(server), clock=server.clock) as guard:
        yield guard, server


async def load() -> str:
    """Load soup."""
    return "soup"


async def test_guard_forgets_what_was_written_past_it(guards: tuple[Guard, Server]) -> None:
    """An entry whose key was changed by another program goes from memory, one that was not stays."""
    guard, server = guards
    options: dict[str, Any] = {"ttl": 60, "l2_ttl": 60, "returns": str}
    for op in "ab":
        await guard.fetch(op, load, **options)
    del server.values["sg1:{default:a}"]
    server.inboxes[0].queue.put_nowait(KeysChanged(("sg1:{default:a}:v", "sg1:{default:b}:v")))
    await eventually(lambda: guard.peek("a") is None)
    tracking: Any = guard._states.running().tracking
    await eventually(lambda: not tracking._is_checking)
    await asyncio.sleep(0)

    assert guard.peek("b") is not None
