"""What a guard's health tells: each thing that is wrong, and nothing of keys and values."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest
from inside import tier_of
from leasing import LeasingDouble, Server
from waiting import eventually

from stampede_guard import Guard, Health, LoadTimeout, Reason, coalesce
from stampede_guard._bus import backplane
from stampede_guard._l2 import unconfirmed
from stampede_guard._readiness import health
from stampede_guard.testing import Gate, ManualClock

Pause = Callable[[], Awaitable[None]]

BUS = "the bus is lost for 12.0 s: memory keeps values for a second at most"


@pytest.fixture(autouse=True)
def _without_echoes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no echo be sent, nor anything be repeated."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 3_600.0)


@pytest.fixture
def store(clock: ManualClock) -> LeasingDouble:
    """Return a store with a bus."""
    return LeasingDouble(Server(clock))


@pytest.fixture
async def guard(clock: ManualClock, store: LeasingDouble) -> AsyncIterator[Guard]:
    """Return an open guard with that store."""
    async with Guard(lambda: store, clock=clock) as guard:
        yield guard


def codes(guard: Guard) -> list[str]:
    """Return the codes of what is wrong with *guard*."""
    return [reason.code for reason in guard.health().reasons]


async def test_a_guard_that_is_open_is_healthy(store: LeasingDouble, clock: ManualClock) -> None:
    """A guard with a store is healthy while it is open, and its health can be shown as JSON."""
    guard = Guard(lambda: store, clock=clock)
    reason = Reason("not_open", "the guard has a store, and is not open in the running event loop")
    assert Health((reason,)) == guard.health()
    assert {"is_healthy": False, "reasons": [{"code": reason.code, "text": reason.text}]} == guard.health().as_dict()

    async with guard:
        assert Health() == guard.health()
        assert guard.health().is_healthy

    assert not guard.health().is_healthy


@pytest.mark.parametrize(("store", "is_healthy"), [(None, True), ("redis://localhost", False)])
def test_health_needs_no_event_loop(store: str | None, is_healthy: bool) -> None:
    """Outside of any event loop, a guard is healthy if it needs no entering."""
    assert is_healthy is Guard(store).health().is_healthy


async def test_a_load_that_ignores_the_end_of_its_time(guard: Guard, pause: Pause) -> None:
    """A load that runs on for a second after its budget is a reason, until it ends."""
    gates = [Gate(), Gate()]

    @coalesce("menu-{menu_id}", guard=guard, load_timeout=30)
    async def load_menu(menu_id: int) -> int:
        with suppress(asyncio.CancelledError):
            await gates[0].passage()
        await gates[1].passage()
        return menu_id

    call = asyncio.create_task(load_menu(7))
    await gates[0].arrivals(1)
    flight = guard._states.running().board.flights[load_menu.key(7)]
    assert Health() == guard.health()
    flight.run_out(30)
    with pytest.raises(LoadTimeout):
        await call
    assert Health() == guard.health()
    assert flight.ran_out_at is not None
    flight.ran_out_at -= 12

    (reason,) = guard.health().reasons
    assert ("load_overdue", True) == (
        reason.code,
        reason.text.startswith("a load runs on after its load_timeout, for 12."),
    )
    gates[1].open()
    await eventually(lambda: guard.health().is_healthy)


async def test_a_long_queue_for_slots(pause: Pause, monkeypatch: pytest.MonkeyPatch) -> None:
    """More loads in a queue than ten rounds of its slots are a reason: of the guard's, and of an operation's."""
    monkeypatch.setattr(health, "_ROUNDS", 2)
    gate, guard = Gate(), Guard(max_loads=5)

    @coalesce("menu-{menu_id}", guard=guard, max_loads=1)
    async def load_menu(menu_id: int) -> int:
        await gate.passage()
        return menu_id

    calls = [asyncio.create_task(load_menu(each)) for each in range(3)]
    await pause()
    assert Health() == guard.health()
    calls.append(asyncio.create_task(load_menu(3)))
    await pause()

    assert (Reason("loads_queued", "3 loads wait for the slots of a max_loads=1"),) == guard.health().reasons
    gate.open()
    assert [0, 1, 2, 3] == await asyncio.gather(*calls)
    assert guard.health().is_healthy


async def test_a_server_that_does_not_answer(guard: Guard) -> None:
    """A server whose breaker is open is named."""
    breaker = tier_of(guard).access.breaker("redis 127.0.0.1:6379")
    assert guard.health().is_healthy
    breaker.trip("TimeoutError")

    assert (
        Reason("store_unavailable", "redis 127.0.0.1:6379 does not answer: calls go on without it"),
    ) == guard.health().reasons
    breaker.succeeded()
    assert guard.health().is_healthy


async def test_a_silent_bus(guard: Guard, clock: ManualClock) -> None:
    """Without an echo the bus is lost, from the end of its trust on."""
    clock.advance(backplane._TRUST - 0.1)
    assert guard.health().is_healthy
    clock.advance(12.1)

    assert (Reason("bus_lost", BUS),) == guard.health().reasons


async def test_a_broken_bus(store: LeasingDouble, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bus that breaks is lost at once, one that never was up since the guard was opened, until it is there."""
    monkeypatch.setattr(backplane, "_PAUSES", (0.0, 0.0))
    store.deaf = ConnectionError("gone")
    async with Guard(lambda: store, clock=clock) as guard:
        clock.advance(12)
        assert (Reason("bus_lost", BUS),) == guard.health().reasons
        store.deaf = None
        await eventually(lambda: guard.health().is_healthy)
        store.deaf = ConnectionError("gone")
        store.server.inboxes[0].queue.put_nowait(ConnectionError("gone"))

        await eventually(lambda: codes(guard) == ["bus_lost"])
        clock.advance(12)
        assert BUS == guard.health().reasons[0].text


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["many", "too many to remember"])
async def test_unconfirmed_invalidations(
    is_forgotten: bool, guard: Guard, store: LeasingDouble, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More unconfirmed invalidations than a few are a reason, and so are those that could not be remembered."""
    monkeypatch.setattr(health, "_MANY_UNCONFIRMED", 2)
    pending = tier_of(guard).pending
    for number in range(2):
        pending.add(unconfirmed.Invalidation(f"key-{number}", b"", is_tag=False))
    assert guard.health().is_healthy
    if is_forgotten:
        pending.lose_all()
        clock.advance(1)
    else:
        pending.add(unconfirmed.Invalidation("key-2", b"", is_tag=False))

    expected = (
        "1.0 s ago there were too many unconfirmed invalidations to remember"
        if is_forgotten
        else "3 invalidations are not confirmed by the store"
    )
    assert (Reason("invalidations_unconfirmed", expected),) == guard.health().reasons
    if is_forgotten:
        clock.advance(60)
        assert "invalidations_unconfirmed" not in codes(guard)
