import asyncio

import pytest

from stampede_guard import Guard, coalesce
from stampede_guard.stores import Stored
from stampede_guard.testing import FaultStore, Gate, ManualClock


def test_clock_stands_still() -> None:
    """Time passes only when it is told to."""
    clock = ManualClock(5.0)

    assert (5.0, 5.0) == (clock(), clock())


def test_clock_advances() -> None:
    """Time passes by as much as it is told to."""
    clock = ManualClock()
    before = clock()
    clock.advance(2.5)

    assert 2.5 == clock() - before


async def test_clock_drives_a_guard() -> None:
    """A guard's memory ages by the clock that it was given."""
    clock = ManualClock()
    guard = Guard(clock=clock)

    @coalesce(guard=guard, ttl=5, jitter=0)
    async def load() -> str:
        return "answer"

    await load()
    clock.advance(4.999)
    fresh = load.peek()
    clock.advance(0.001)

    assert fresh is not None
    assert load.peek() is None


async def test_gate_holds_and_opens() -> None:
    """Whoever arrives waits until the gate is open, and is counted."""
    gate = Gate()
    visitors = [asyncio.create_task(gate.passage()) for _ in range(3)]
    await gate.arrivals(3)
    held = [visitor.done() for visitor in visitors]
    gate.open()
    await asyncio.gather(*visitors)

    assert [False] * 3 == held
    assert 3 == gate.arrived


async def test_open_gate_lets_pass() -> None:
    """Who comes after the opening does not wait, and is counted too."""
    gate = Gate()
    gate.open()
    await gate.passage()

    assert 1 == gate.arrived


async def test_arrivals_count_from_the_beginning() -> None:
    """Who asks for arrivals that have been does not wait."""
    gate = Gate()
    gate.open()
    await gate.passage()
    await gate.arrivals(1)

    assert 1 == gate.arrived


async def test_store_remembers() -> None:
    """The store gives back what was written, with the life that it has left."""
    clock = ManualClock()
    store = FaultStore(clock)
    await store.open()
    await store.write("key", b"envelope", 10.0)
    clock.advance(4.0)

    assert Stored(b"envelope", 6.0) == await store.read("key")


async def test_store_forgets_in_time() -> None:
    """What has outlived its life is gone."""
    clock = ManualClock()
    store = FaultStore(clock)
    await store.write("key", b"envelope", 10.0)
    clock.advance(10.0)

    assert await store.read("key") is None


async def test_store_deletes() -> None:
    """What was deleted is gone, and deleting what is not there succeeds."""
    store = FaultStore(ManualClock())
    await store.write("key", b"envelope", 10.0)
    await store.delete("key")
    await store.delete("key")

    assert await store.read("key") is None


async def test_store_keeps_its_contents_when_closed() -> None:
    """A second guard finds what the first one stored."""
    store = FaultStore(ManualClock())
    await store.write("key", b"envelope", 10.0)
    await store.aclose()

    assert Stored(b"envelope", 10.0) == await store.read("key")


@pytest.mark.parametrize("operation", ["open", "read", "write", "delete"])
async def test_store_fails_on_demand(operation: str) -> None:
    """While an error is set, every operation raises it."""
    store = FaultStore(ManualClock())
    store.error = ConnectionError("down")
    arguments = {"open": (), "write": ("key", b"envelope", 1.0)}.get(operation, ("key",))

    with pytest.raises(ConnectionError, match="down"):
        await getattr(store, operation)(*arguments)


async def test_store_hangs_on_demand() -> None:
    """While a gate is set, every operation waits there."""
    store = FaultStore(ManualClock())
    store.gate = Gate()
    read = asyncio.create_task(store.read("key"))
    await store.gate.arrivals(1)
    store.gate.open()

    assert await read is None


async def test_store_serves_a_guard() -> None:
    """A guard on this store needs no server, and outlives its failures."""
    store = FaultStore(ManualClock())
    guard = Guard(lambda: store)

    @coalesce("answer-{item}", guard=guard, l2_ttl=10)
    async def load(item: int) -> int:
        return item

    async with guard:
        await load(7)
        stored = [*store.contents]
        store.error = ConnectionError("down")
        answer = await load(7)

    assert ["sg1:{default:answer-7}:v"] == stored
    assert 7 == answer
