"""Invalidations that meet fills, reads and dead servers on their way to the store."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from wire import Hook, Wire, passes

from demo_api.servers import ValkeyServer
from stampede_guard import Guard
from stampede_guard.testing import Gate, ManualClock

SET = b"\r\nSET\r\n"
DEL = b"\r\nDEL\r\n"
READ = b"\r\nGETRANGE\r\n"


class Menu:
    """What the loader reads: the present truth."""

    def __init__(self) -> None:
        self.version = "old"
        self.loads = 0

    async def load(self) -> str:
        """Read the truth."""
        self.loads += 1
        return self.version


async def ask(guard: Guard, menu: Menu, ttl: float | None = None) -> str:
    """Make a call that looks into the store."""
    return await guard.fetch("menu-7", menu.load, ttl=ttl, l2_ttl=60, returns=str)


def hold(command: bytes) -> tuple[Gate, Hook]:
    """Return a gate, and a hook that lets requests with *command* wait at it."""
    gate = Gate()

    async def wait(request: bytes) -> bytes:
        if command in request:
            await gate.passage()
        return request

    return gate, wait


async def turns(number: int = 50) -> None:
    """Let everything that can go on do so."""
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> ManualClock:
    """Return the guard's clock."""
    return ManualClock()


@pytest.fixture
async def guard(wire: Wire, namespace: str, clock: ManualClock) -> AsyncIterator[Guard]:
    """Return a guard at the end of the wire."""
    async with Guard(wire.url, namespace=namespace, deadline=5, connect_timeout=5, clock=clock) as guard:
        yield guard


async def test_i3_fill_on_its_way_is_undone(wire: Wire, guard: Guard, namespace: str, admin: Redis) -> None:
    """A value whose fill was under way when its op was invalidated is not in the store when that returned."""
    menu = Menu()
    gate, wire.on_request = hold(SET)
    filling = asyncio.create_task(ask(guard, menu))
    await gate.arrivals(1)

    menu.version = "new"
    invalidating = asyncio.create_task(guard.invalidate("menu-7"))
    await turns()
    was_hasty = invalidating.done()
    gate.open()

    assert await invalidating
    assert not was_hasty
    assert not await admin.exists(f"sg1:{{{namespace}:menu-7}}:v")
    assert await filling == "old"
    assert await ask(guard, menu) == "new"


async def test_i3_reader_during_an_invalidation_keeps_no_old_value(wire: Wire, guard: Guard) -> None:
    """A call that begins while the invalidation waits for an old fill does not find that fill's value."""
    menu = Menu()
    set_gate, hold_set = hold(SET)
    read_gate, hold_read = hold(READ)
    wire.on_request = hold_set
    filling = asyncio.create_task(ask(guard, menu))
    await set_gate.arrivals(1)

    menu.version = "new"
    invalidating = asyncio.create_task(guard.invalidate("menu-7"))
    await turns()
    wire.on_request = hold_read  # the late reader's own question overtakes nothing
    reading = asyncio.create_task(ask(guard, menu, ttl=60))
    await turns()
    set_gate.open()
    await filling
    read_gate.open()
    answer = await reading
    await invalidating

    assert answer == "new"
    assert await ask(guard, menu, ttl=60) == "new"


async def test_unconfirmed_invalidation_is_made_up_for(
    wire: Wire, guard: Guard, clock: ManualClock, namespace: str, admin: Redis
) -> None:
    """An invalidation that the server never got is `False`; its op is not read from there until it was confirmed."""
    menu = Menu()

    async def cut(request: bytes) -> bytes:
        if DEL in request:
            wire.reset()
            return b""
        return request

    await ask(guard, menu)
    menu.version = "new"
    wire.on_request = cut
    confirmed = await guard.invalidate("menu-7")
    left = await admin.exists(f"sg1:{{{namespace}:menu-7}}:v")
    meanwhile = await ask(guard, menu)
    wire.on_request = passes
    clock.advance(2)
    afterwards = await ask(guard, menu)
    hits = guard.stats().l2_hits
    later = await ask(guard, menu)

    assert (False, 1) == (confirmed, left)
    assert ["new", "new", "new"] == [meanwhile, afterwards, later]
    assert (0, 1) == (hits, guard.stats().l2_hits)


async def test_server_that_was_down_during_an_invalidation(valkey: ValkeyServer) -> None:
    """With the server frozen an invalidation returns `False` in time; when it is back, the old value is not read."""
    menu, clock = Menu(), ManualClock()
    async with Guard(valkey.url, clock=clock) as guard:
        await ask(guard, menu)
        valkey.freeze()
        menu.version = "new"
        async with asyncio.timeout(5):
            confirmed = await guard.invalidate("menu-7")
            meanwhile = [await ask(guard, menu) for _ in range(5)]
        valkey.thaw()
        clock.advance(2)
        afterwards = [await ask(guard, menu) for _ in range(3)]

    assert not confirmed
    assert ["new"] * 8 == meanwhile + afterwards
    assert guard.stats().l2_hits == 2


async def test_later_invalidation_is_not_confirmed_by_an_earlier_ones_answer(
    wire: Wire, guard: Guard, namespace: str, admin: Redis
) -> None:
    """Two invalidations, of which the first is confirmed late and the second never: the op stays unread."""
    menu = Menu()
    gate = Gate()

    async def cut(request: bytes) -> bytes:
        if DEL in request:
            wire.reset()
            return b""
        return request

    await ask(guard, menu)
    replied = asyncio.Event()

    async def keep_reply(reply: bytes) -> bytes:
        if reply == b":1\r\n":
            replied.set()
            await gate.passage()
        return reply

    wire.on_reply = keep_reply
    first = asyncio.create_task(guard.invalidate("menu-7"))
    await replied.wait()  # deleted, but the answer is still under way
    await admin.set(f"sg1:{{{namespace}:menu-7}}:v", b"elsewhere's fill of the old value", ex=60)
    second = asyncio.create_task(guard.invalidate("menu-7"))
    await turns()
    wire.on_request = cut
    gate.open()
    await asyncio.wait([first, second])

    assert not second.result()
    assert "menu-7" in guard._site().tier._suspects  # type: ignore[union-attr]


async def test_cancelled_invalidation_goes_on(wire: Wire, guard: Guard, namespace: str, admin: Redis) -> None:
    """Whoever cancels the call that invalidates does not stop the invalidation."""
    menu = Menu()
    await ask(guard, menu)
    gate, wire.on_request = hold(DEL)
    invalidating = asyncio.create_task(guard.invalidate("menu-7"))
    await gate.arrivals(1)

    invalidating.cancel()
    await asyncio.wait([invalidating])
    gate.open()
    async with asyncio.timeout(10):
        while await admin.exists(f"sg1:{{{namespace}:menu-7}}:v"):
            await asyncio.sleep(0)

    assert invalidating.cancelled()


async def test_invalidations_of_other_ops_do_not_wait(wire: Wire, guard: Guard) -> None:
    """A fill that is held up holds up the invalidation of its own op alone."""
    menu = Menu()
    gate, wire.on_request = hold(SET)
    filling = asyncio.create_task(ask(guard, menu))
    await gate.arrivals(1)

    async with asyncio.timeout(10):
        confirmed = await guard.invalidate("menu-8")
    gate.open()

    assert confirmed
    assert await filling == "old"
