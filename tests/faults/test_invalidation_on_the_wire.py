"""Invalidations that meet fills, reads and dead servers on their way to the store."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from proxying import Hook, Wire, passes, runs
from redis.asyncio import Redis
from stored import script_calls
from waiting import ticks

from demo_api.servers import ValkeyServer
from stampede_guard import Guard, InvalidationPending
from stampede_guard._bus import backplane
from stampede_guard.stores._redis.scripts import ACQUIRE, FILL, INVALIDATE, Script
from stampede_guard.testing import Gate, ManualClock


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


async def confirms(guard: Guard) -> bool:
    """Invalidate; return whether the store confirmed it."""
    try:
        await guard.invalidate("menu-7")
    except InvalidationPending:
        return False
    return True


def hold(script: Script) -> tuple[Gate, Hook]:
    """Return a gate, and a hook that lets requests of *script* wait at it."""
    gate = Gate()

    async def wait(request: bytes) -> bytes:
        if runs(script, request):
            await gate.passage()
        return request

    return gate, wait


def cut(wire: Wire, script: Script) -> Hook:
    """Return a hook that answers requests of *script* with an RST, on every connection."""

    async def reset(request: bytes) -> bytes:
        if runs(script, request):
            wire.reset()
            return b""
        return request

    return reset


@pytest.fixture
async def guard(no_echoes: None, wire: Wire, namespace: str, clock: ManualClock) -> AsyncIterator[Guard]:
    """Return a guard at the end of the wire, which does nothing by itself."""
    async with Guard(wire.url, namespace=namespace, deadline=5, connect_timeout=5, clock=clock) as guard:
        yield guard


async def test_i3_fill_let_through_after_an_invalidation_is_refused(
    wire: Wire, guard: Guard, other: Guard, namespace: str, admin: Redis
) -> None:
    """A fill that is under way while another process invalidates is refused when it arrives, and remembered nowhere.

    1. A loads. 2. A's FILL is sent, and held up. 3. B writes and invalidates: confirmed at once. 4. The FILL arrives.
    """
    menu = Menu()
    gate, wire.on_request = hold(FILL)
    filling = asyncio.create_task(ask(guard, menu, ttl=60))
    await gate.arrivals(1)

    menu.version = "new"
    was_confirmed = await confirms(other)
    gate.open()
    answer = await filling
    kept = guard._states.running().memory.get("menu-7")

    assert was_confirmed
    assert ("old", None) == (answer, kept)
    assert not await admin.exists(f"sg1:{{{namespace}:menu-7}}:v")
    assert ["new", "new"] == [await ask(each, menu) for each in (other, guard)]


async def test_i3_fill_that_was_given_up_and_arrives_late_is_refused(
    no_echoes: None, wire: Wire, namespace: str, admin: Redis
) -> None:
    """A fill whose deadline ran out reaches the server after the same process has invalidated: it stores nothing."""
    menu = Menu()
    async with Guard(wire.url, namespace=namespace, deadline=0.1, connect_timeout=5) as guard:
        gate, wire.on_request = hold(FILL)
        answer = await ask(guard, menu)
        menu.version = "new"
        was_confirmed = await confirms(guard)
        before = await script_calls(admin)
        gate.open()
        async with asyncio.timeout(10):
            while await script_calls(admin) == before:
                await asyncio.sleep(0)
        is_stored = await admin.exists(f"sg1:{{{namespace}:menu-7}}:v")

    assert (1, "old", True) == (gate.arrived, answer, was_confirmed)
    assert not is_stored


async def test_i3_fill_let_through_after_a_newer_load_changes_nothing(
    wire: Wire, guard: Guard, other: Guard, namespace: str, admin: Redis
) -> None:
    """A fill that arrives when the next load has already stored what is true now does not replace it."""
    menu = Menu()
    gate, wire.on_request = hold(FILL)
    filling = asyncio.create_task(ask(guard, menu))
    await gate.arrivals(1)

    menu.version = "new"
    await other.invalidate("menu-7")
    newer = await ask(other, menu)
    stored = await admin.get(f"sg1:{{{namespace}:menu-7}}:v")
    gate.open()
    await filling

    assert newer == "new"
    assert stored is not None
    assert stored == await admin.get(f"sg1:{{{namespace}:menu-7}}:v")
    assert await ask(guard, menu) == "new"


async def test_i3_fill_let_through_while_the_next_load_runs_does_not_end_its_lease(
    wire: Wire, guard: Guard, other: Guard, namespace: str, admin: Redis
) -> None:
    """A fill that arrives during the next load is refused, and that load stores what it found."""
    menu, loading = Menu(), Gate()

    async def load() -> str:
        await loading.passage()
        return menu.version

    gate, wire.on_request = hold(FILL)
    filling = asyncio.create_task(ask(guard, menu))
    await gate.arrivals(1)
    menu.version = "new"
    await other.invalidate("menu-7")
    newer = asyncio.create_task(other.fetch("menu-7", load, l2_ttl=60, returns=str))
    await loading.arrivals(1)
    gate.open()
    await filling
    was_stored = await admin.exists(f"sg1:{{{namespace}:menu-7}}:v")
    loading.open()

    assert await newer == "new"
    assert not was_stored
    assert await ask(guard, menu) == "new"
    assert guard.stats().l2_hits == 1


async def test_i3_fill_on_its_way_is_undone(wire: Wire, guard: Guard, namespace: str, admin: Redis) -> None:
    """A value whose fill was under way when its op was invalidated is not in the store when that returned."""
    menu = Menu()
    gate, wire.on_request = hold(FILL)
    filling = asyncio.create_task(ask(guard, menu))
    await gate.arrivals(1)

    menu.version = "new"
    invalidating = asyncio.create_task(guard.invalidate("menu-7"))
    await ticks(50)
    gate.open()
    await invalidating

    assert not await admin.exists(f"sg1:{{{namespace}:menu-7}}:v")
    assert await filling == "old"
    assert await ask(guard, menu) == "new"


async def test_i3_reader_during_an_invalidation_keeps_no_old_value(wire: Wire, guard: Guard) -> None:
    """A call that begins while the invalidation waits for an old fill does not find that fill's value."""
    menu = Menu()
    set_gate, hold_set = hold(FILL)
    read_gate, hold_read = hold(ACQUIRE)
    wire.on_request = hold_set
    filling = asyncio.create_task(ask(guard, menu))
    await set_gate.arrivals(1)

    menu.version = "new"
    invalidating = asyncio.create_task(guard.invalidate("menu-7"))
    await ticks(50)
    wire.on_request = hold_read  # the late reader's own question overtakes nothing
    reading = asyncio.create_task(ask(guard, menu, ttl=60))
    await ticks(50)
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
    """An invalidation that the server never got is told; its op is not read from there until it was confirmed."""
    menu = Menu()

    await ask(guard, menu)
    menu.version = "new"
    wire.on_request = cut(wire, INVALIDATE)
    with pytest.raises(InvalidationPending, match="menu-7"):
        await guard.invalidate("menu-7")
    left = await admin.exists(f"sg1:{{{namespace}:menu-7}}:v")
    meanwhile = await ask(guard, menu)
    wire.on_request = passes
    clock.advance(2)
    afterwards = await ask(guard, menu)
    hits = guard.stats().l2_hits
    later = await ask(guard, menu)

    assert left
    assert ["new", "new", "new"] == [meanwhile, afterwards, later]
    assert (0, 1) == (hits, guard.stats().l2_hits)


async def test_unconfirmed_invalidation_is_repeated_when_nobody_asks(
    wire: Wire, namespace: str, admin: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other processes do not have to wait until this one is asked for the op again."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 0.05)
    menu = Menu()
    async with Guard(wire.url, namespace=namespace, deadline=5, connect_timeout=5) as guard:
        await ask(guard, menu)
        wire.on_request = cut(wire, INVALIDATE)
        was_confirmed = await confirms(guard)
        left = await admin.exists(f"sg1:{{{namespace}:menu-7}}:v")
        wire.on_request = passes
        async with asyncio.timeout(10):
            while await admin.exists(f"sg1:{{{namespace}:menu-7}}:v"):
                await asyncio.sleep(0)

    assert (False, 1) == (was_confirmed, left)


async def test_answer_that_was_lost_is_asked_for_again(wire: Wire, guard: Guard) -> None:
    """An invalidation whose connection dies before the answer is repeated at once, and thereby confirmed."""
    menu = Menu()
    await ask(guard, menu)
    seen = 0

    async def cut_the_first(request: bytes) -> bytes:
        nonlocal seen
        if runs(INVALIDATE, request):
            seen += 1
            if seen == 1:
                wire.reset()
                return b""
        return request

    wire.on_request = cut_the_first

    assert await confirms(guard)
    assert seen == 2


@pytest.mark.usefixtures("no_echoes")
async def test_server_that_was_down_during_an_invalidation(valkey: ValkeyServer) -> None:
    """With the server frozen an invalidation ends in time, and says so; when it is back, the old value is not read."""
    menu, clock = Menu(), ManualClock()
    async with Guard(valkey.url, clock=clock) as guard:
        await ask(guard, menu)
        valkey.freeze()
        menu.version = "new"
        async with asyncio.timeout(5):
            was_confirmed = await confirms(guard)
            meanwhile = [await ask(guard, menu) for _ in range(5)]
        valkey.thaw()
        clock.advance(2)
        afterwards = [await ask(guard, menu) for _ in range(3)]

    assert not was_confirmed
    assert ["new"] * 8 == meanwhile + afterwards
    assert guard.stats().l2_hits == 2


async def test_later_invalidation_is_not_confirmed_by_an_earlier_ones_answer(
    wire: Wire, guard: Guard, namespace: str, admin: Redis
) -> None:
    """Two invalidations, of which the first is confirmed late and the second never: the op stays unread."""
    menu = Menu()
    gate = Gate()

    await ask(guard, menu)
    await guard.invalidate("menu-8")  # the server knows the script
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
    await ticks(50)
    wire.on_request = cut(wire, INVALIDATE)
    gate.open()
    await asyncio.wait([first, second])
    tier = guard._states.running().tier

    assert first.exception() is None
    assert isinstance(second.exception(), InvalidationPending)
    assert tier is not None
    assert tier.pending.of(tier.key("menu-7")) is not None


async def test_cancelled_invalidation_goes_on(wire: Wire, guard: Guard, namespace: str, admin: Redis) -> None:
    """Whoever cancels the call that invalidates does not stop the invalidation."""
    menu = Menu()
    await ask(guard, menu)
    gate, wire.on_request = hold(INVALIDATE)
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
    gate, wire.on_request = hold(FILL)
    filling = asyncio.create_task(ask(guard, menu))
    await gate.arrivals(1)

    async with asyncio.timeout(10):
        await guard.invalidate("menu-8")
    gate.open()

    assert await filling == "old"
