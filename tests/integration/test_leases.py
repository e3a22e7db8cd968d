"""One load for all of a cluster: each guard here has an instance of its own, as a process has."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from itertools import pairwise
from typing import Any

import pytest
from inside import backplane_of, instance_of, is_expecting, is_up, new_leases, tier_of
from loaders import Kitchen, returning
from observing import until_gone
from redis.asyncio import Redis
from stored import bytes_at, fingerprint_for
from waiting import until, until_there

from demo_api.servers import ValkeyServer
from stampede_guard import Guard, InvalidationPending, LoadTimeout, WaitTimeout, _path, coalesce
from stampede_guard._bus import backplane as backplane_module
from stampede_guard._operations import operation
from stampede_guard._tokens import new_token
from stampede_guard.stores import AcquireRequest
from stampede_guard.stores._envelope import seal
from stampede_guard.testing import Gate, ManualClock

MakeGuard = Callable[..., Guard]

OP = "menu-7"
OTHER = "o" * 22


@pytest.fixture
def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no lease end, and nobody look again, before the test is over: only a word can wake."""
    monkeypatch.setattr(operation, "_LEASES", (60.0, 60.0))
    monkeypatch.setattr(_path, "_POLLS", (60.0, 60.0))


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let leases last for a third of a second."""
    monkeypatch.setattr(operation, "_LEASES", (0.3, 0.3))


def ask(guard: Guard, kitchen: Kitchen, **options: Any) -> "asyncio.Task[str]":
    """Begin a call that both tiers remember."""
    options = {"ttl": 60, "l2_ttl": 60, "returns": str, **options}
    return asyncio.create_task(guard.fetch(OP, kitchen.load, **options))


def refreshing(guard: Guard, kitchen: Kitchen) -> Callable[[], Any]:
    """Return what refreshes the op."""

    @coalesce(OP, guard=guard, ttl=60, l2_ttl=60)
    async def load() -> str:
        return await kitchen.load()

    return load.refresh


async def until_renewed(admin: Redis, key: str) -> None:
    """Wait until the lease has been renewed five times, and never was away."""
    lives: list[int] = []

    async def is_renewed_again() -> bool:
        lives.append(await admin.pttl(key))
        return sum(later > earlier for earlier, later in pairwise(lives)) >= 5

    await until_there(is_renewed_again, "five renewals")
    assert min(lives) > 0


async def test_each_guard_is_an_instance(make_guard: MakeGuard) -> None:
    """Two guards of one process are as strange to each other as two processes."""
    async with AsyncExitStack() as stack:
        guards = [await stack.enter_async_context(make_guard()) for _ in range(5)]
        instances = {instance_of(guard) for guard in guards}

    assert len(instances) == 5
    assert {22} == {len(instance) for instance in instances}


@pytest.mark.usefixtures("long_leases")
async def test_word_that_comes_before_one_listens_is_not_missed(pair: tuple[Guard, Guard], admin: Redis) -> None:
    """The load may end between the answer that somebody else loads and the wait; it is asked for once more."""
    first, second = pair
    kitchen = Kitchen(is_open=False)
    leader = ask(first, kitchen)
    await kitchen.gate.arrivals(1)
    expecting = backplane_of(second).expecting

    def late(op: str) -> Any:
        kitchen.gate.open()
        return expecting(op)

    backplane = backplane_of(second)
    backplane.expecting = late
    follower = ask(second, kitchen)

    assert ["soup 1"] * 2 == await asyncio.gather(leader, follower)


async def test_lost_word_is_made_up_for_by_polling(
    pair: tuple[Guard, Guard], admin: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bus cut off for good, whoever waits finds the value by looking again."""
    monkeypatch.setattr(operation, "_LEASES", (60.0, 60.0))
    monkeypatch.setattr(backplane_module, "_PAUSES", (600.0, 600.0))
    first, second = pair
    kitchen = Kitchen(is_open=False)
    leader = ask(first, kitchen)
    await kitchen.gate.arrivals(1)
    follower = ask(second, kitchen)
    await until(lambda: is_expecting(second, OP), "the other to wait")

    await admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    await until(lambda: not is_up(first) and not is_up(second), "both to notice")
    kitchen.gate.open()

    assert ["soup 1"] * 2 == await asyncio.gather(leader, follower)
    assert kitchen.loads == 1


@pytest.mark.usefixtures("long_leases")
async def test_load_that_ignores_its_end_hands_the_right_on(pair: tuple[Guard, Guard]) -> None:
    """A load that swallows its cancellation keeps running after `load_timeout`, and keeps no lease."""
    first, second = pair
    stubborn, kitchen = Gate(), Kitchen()

    async def load() -> str:
        with suppress(asyncio.CancelledError):
            await stubborn.passage()
        await stubborn.passage()
        return "late soup"

    options: dict[str, Any] = {"ttl": 60, "l2_ttl": 60, "returns": str}
    leader = asyncio.create_task(first.fetch(OP, load, load_timeout=0.2, **options))
    await stubborn.arrivals(1)
    follower = ask(second, kitchen)

    with pytest.raises(LoadTimeout):
        await leader
    async with asyncio.timeout(10):
        assert await follower == "soup 1"
    await stubborn.arrivals(2)
    assert tier_of(first).leases.is_idle
    stubborn.open()
    await until(lambda: not first._states.running().board.up, "the stubborn load to end")
    assert await ask(first, kitchen) == "soup 1"  # what the late one returned is nowhere


@pytest.mark.usefixtures("short_leases")
async def test_lease_is_kept_while_its_flight_queues_for_a_slot(
    pair: tuple[Guard, Guard], admin: Redis, key: str
) -> None:
    """A flight that queues for a slot for longer than its lease lasts still has it when it loads, and loads alone."""
    first, second = pair
    other, kitchen = Kitchen(is_open=False), Kitchen()
    options: dict[str, Any] = {"max_loads": 1, "name": "kitchen", "l2_ttl": 60, "returns": str}
    slot = asyncio.create_task(first.fetch("menu-8", other.load, **options))
    await other.gate.arrivals(1)
    leader = asyncio.create_task(first.fetch(OP, kitchen.load, **options))
    await until_there(lambda: admin.exists(f"{key}:l"), "the lease")
    token = await bytes_at(admin, f"{key}:l")
    follower = ask(second, kitchen)
    await until_renewed(admin, f"{key}:l")
    still = await bytes_at(admin, f"{key}:l")
    other.gate.open()

    assert ["soup 1"] * 3 == await asyncio.gather(slot, leader, follower)
    assert (token[:22], 1) == (still[:22], kitchen.loads)


@pytest.mark.usefixtures("short_leases")
async def test_loop_that_was_blocked_for_longer_than_the_lease(
    pair: tuple[Guard, Guard], admin: Redis, key: str
) -> None:
    """A flight whose lease ended before it loads asks again, and takes the value that another process has stored."""
    first, second = pair
    other, kitchen = Kitchen(is_open=False), Kitchen()
    options: dict[str, Any] = {"max_loads": 1, "name": "kitchen", "l2_ttl": 60, "returns": str}
    slot = asyncio.create_task(first.fetch("menu-8", other.load, **options))
    await other.gate.arrivals(1)
    queueing = asyncio.create_task(first.fetch(OP, kitchen.load, **options))
    await until_there(lambda: admin.exists(f"{key}:l"), "the lease")
    await admin.delete(f"{key}:l")  # as if it had expired
    assert await ask(second, kitchen) == "soup 1"
    await until(lambda: not tier_of(first).leases._held - {*_rights_of("menu-8", first)}, "the loss to be noticed")
    other.gate.open()

    assert ["soup 1"] * 2 == await asyncio.gather(slot, queueing)
    assert 1 == kitchen.loads
    assert (2, 1) == (first.stats().executions, first.stats().loads)


def _rights_of(op: str, guard: Guard) -> list[Any]:
    return [right for right in tier_of(guard).leases._held if op in right.key]


@pytest.mark.usefixtures("short_leases")
async def test_circle_of_queues_in_two_processes_is_broken(pair: tuple[Guard, Guard]) -> None:
    """Each process's only slot is held by a load that waits for a flight in the other's queue: neither waits for ever.

    Leases are renewed in the queue; so a load with a slot waits for another process no longer than a lease lasts.
    """
    first, second = pair
    gates = Gate(), Gate()
    options: dict[str, Any] = {"max_loads": 1, "name": "kitchen", "l2_ttl": 60, "returns": str}

    async def order(guard: Guard, gate: Gate, op: str) -> str:
        await gate.passage()
        return await guard.fetch(op, returning("soup"), **options)

    def begin(guard: Guard, gate: Gate, number: int, op: str) -> "asyncio.Task[str]":
        return asyncio.create_task(guard.fetch(f"order-{number}", lambda: order(guard, gate, op), **options))

    orders = [begin(first, gates[0], 1, "dish-2"), begin(second, gates[1], 2, "dish-1")]
    for gate in gates:
        await gate.arrivals(1)
    queued = [
        asyncio.create_task(guard.fetch(op, returning("soup"), **options))
        for guard, op in ((first, "dish-1"), (second, "dish-2"))
    ]
    await until(lambda: all(len(tier_of(guard).leases._held) == 2 for guard in pair), "both to queue with a lease")
    for gate in gates:
        gate.open()

    async with asyncio.timeout(10):
        assert ["soup"] * 4 == await asyncio.gather(*orders, *queued)


async def test_value_that_cannot_be_encoded_hands_the_right_on(make_guard: MakeGuard, admin: Redis, key: str) -> None:
    """A value that is not stored, as it is too large, leaves no lease behind."""
    async with make_guard(max_bytes=3) as guard:
        assert await ask(guard, Kitchen()) == "soup 1"

    assert not await admin.exists(f"{key}:l", f"{key}:v")


async def test_leader_that_vanished_is_waited_for_to_the_end_of_its_lease(
    make_guard: MakeGuard, admin: Redis, key: str
) -> None:
    """A lease whose owner is dead is taken over when it has expired, and not before."""
    await admin.set(f"{key}:l", OTHER, px=300)
    async with make_guard() as guard:
        kitchen = Kitchen(is_open=False)
        call = ask(guard, kitchen)
        await until_there(lambda: _is(admin, f"{key}:l", f"{OTHER}w"), "the wait")
        assert kitchen.loads == 0

        await kitchen.gate.arrivals(1)
        token = await bytes_at(admin, f"{key}:l")
        kitchen.gate.open()
        answer = await call

    assert answer == "soup 1"
    assert not token.startswith(OTHER.encode())
    assert (1, 1, 1) == (guard.stats().l2_waits, guard.stats().l2_misses, guard.stats().loads)
    assert await admin.exists(f"{key}:v")


async def _is(admin: Redis, key: str, value: str) -> bool:
    return bool(await admin.get(key) == value.encode())


@pytest.mark.usefixtures("short_leases")
async def test_long_load_keeps_its_lease(pair: tuple[Guard, Guard], admin: Redis, key: str) -> None:
    """A load that takes longer than the lease keeps the right: it is renewed again and again, and is then stored."""
    first, second = pair
    kitchen = Kitchen(is_open=False)
    leader = ask(first, kitchen)
    await kitchen.gate.arrivals(1)
    follower = ask(second, kitchen)
    await until(lambda: is_expecting(second, OP), "the other to wait")
    token = await admin.get(f"{key}:l")
    await until_renewed(admin, f"{key}:l")
    still = await admin.get(f"{key}:l")
    kitchen.gate.open()

    assert ["soup 1"] * 2 == await asyncio.gather(leader, follower)
    assert token == still
    assert kitchen.loads == 1


@pytest.mark.usefixtures("short_leases")
async def test_renewal_ends_with_the_load(make_guard: MakeGuard, admin: Redis, key: str) -> None:
    """When the load is over, so is the renewal."""
    async with make_guard() as guard:
        await ask(guard, Kitchen())

        assert tier_of(guard).leases.is_idle
        assert not await admin.exists(f"{key}:l")


@pytest.mark.usefixtures("short_leases")
async def test_renewal_that_gets_no_answer_is_tried_again(
    make_guard: MakeGuard, admin: Redis, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One renewal that fails costs nothing: the lease has some life left, and the next one comes through."""
    kitchen = Kitchen(is_open=False)
    async with make_guard() as guard:
        leases = new_leases(monkeypatch)
        call = ask(guard, kitchen)
        await kitchen.gate.arrivals(1)
        await admin.rename(f"{key}:l", f"{key}:kept")
        await admin.rpush(f"{key}:l", "not a lease")
        await until(lambda: guard.stats().l2_errors > 0, "a refusal")
        await admin.rename(f"{key}:kept", f"{key}:l")
        await until_there(lambda: _lives_longer(admin, f"{key}:l", 200), "a renewal")
        kitchen.gate.open()

        assert await call == "soup 1"
        assert [False] == [lease._is_lost for lease in leases]
    assert await admin.exists(f"{key}:v")


async def _lives_longer(admin: Redis, key: str, milliseconds: int) -> bool:
    return await admin.pttl(key) > milliseconds


@pytest.mark.usefixtures("short_leases")
async def test_lost_lease_is_noticed_by_its_renewal(
    make_guard: MakeGuard, admin: Redis, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose lease is gone answers those who wait, and neither stores nor remembers."""
    kitchen = Kitchen(is_open=False)
    async with make_guard() as guard:
        leases = new_leases(monkeypatch)
        call = ask(guard, kitchen)
        await kitchen.gate.arrivals(1)
        await admin.delete(f"{key}:l")
        await until(lambda: not leases[0].is_owned, "the loss to be noticed")
        kitchen.gate.open()

        assert await call == "soup 1"
        assert guard.peek(OP) is None
        assert guard.stats().overtaken == 1
    assert not await admin.exists(f"{key}:v", f"{key}:l")


@pytest.mark.usefixtures("long_leases")
async def test_lost_lease_is_noticed_by_the_fill(make_guard: MakeGuard, admin: Redis, key: str) -> None:
    """The fill of whoever lost the lease to another is refused, and the other's stays."""
    kitchen = Kitchen(is_open=False)
    async with make_guard() as guard:
        call = ask(guard, kitchen)
        await kitchen.gate.arrivals(1)
        await admin.set(f"{key}:l", OTHER, px=60_000)
        kitchen.gate.open()

        assert await call == "soup 1"
        assert guard.peek(OP) is None
        assert guard.stats().overtaken == 1
    assert not await admin.exists(f"{key}:v")
    assert OTHER.encode() == await admin.get(f"{key}:l")


@pytest.mark.usefixtures("long_leases")
async def test_caller_who_leaves_stops_waiting(make_guard: MakeGuard, admin: Redis, key: str) -> None:
    """A caller who has waited long enough leaves; with the last, if so asked, the wait for another's load ends."""
    await admin.set(f"{key}:l", OTHER, px=60_000)
    async with make_guard() as guard:
        kitchen = Kitchen()
        with pytest.raises(WaitTimeout):
            await ask(guard, kitchen, wait_timeout=0.2, on_abandon="cancel")
        await until(lambda: not is_expecting(guard, OP), "the wait to end")

    assert kitchen.loads == 0
    assert f"{OTHER}w".encode() == await admin.get(f"{key}:l")


async def test_without_lease_one_still_stores(make_guard: MakeGuard, admin: Redis, key: str) -> None:
    """With `lease=False`, whoever comes first has the right to store, and stores."""
    async with make_guard() as guard:
        await ask(guard, Kitchen(), lease=False)

    assert await admin.exists(f"{key}:v")


@pytest.mark.usefixtures("long_leases")
async def test_disabled_guards_load_for_each_caller(pair: tuple[Guard, Guard], admin: Redis, key: str) -> None:
    """With `enabled=False` each miss loads, here and elsewhere, and one of them stores."""
    kitchen = Kitchen(is_open=False)
    for guard in pair:
        guard.enabled = False
    calls = [ask(guard, kitchen) for guard in pair for _ in range(3)]
    await kitchen.gate.arrivals(6)
    kitchen.gate.open()
    answers = await asyncio.gather(*calls)

    assert len({*answers}) == 6
    assert [0, 0] == [guard.stats().l2_waits for guard in pair]
    assert (await bytes_at(admin, f"{key}:v"))[-6:].decode() in answers
    assert not await admin.exists(f"{key}:l")


@pytest.mark.usefixtures("long_leases")
async def test_stored_value_that_will_not_do_is_loaded_once(pair: tuple[Guard, Guard], admin: Redis, key: str) -> None:
    """Bytes that are no value are passed over by all, and replaced by one."""
    await admin.set(f"{key}:v", b"garbage")
    kitchen = Kitchen(is_open=False)
    calls = [ask(guard, kitchen) for guard in pair]
    await until(lambda: any(is_expecting(guard, OP) for guard in pair), "one to wait")
    await kitchen.gate.arrivals(1)
    kitchen.gate.open()

    assert ["soup 1"] * 2 == await asyncio.gather(*calls)
    assert kitchen.loads == 1


async def test_garbage_that_is_replaced_by_garbage_is_given_up(
    make_guard: MakeGuard, admin: Redis, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is offered one worthless value after the other loads for themselves, and does not store."""
    clock = ManualClock()
    async with make_guard(clock=clock) as guard:
        store = tier_of(guard).store
        acquire = store.acquire

        async def restless(request: AcquireRequest) -> Any:
            mark_key = f"sg1:{{{guard._namespace}:}}:t"
            mark = await bytes_at(admin, mark_key) if await admin.exists(mark_key) else b"x" * 11
            worthless = seal(f"{guard._namespace}:{OP}", b"\xff", new_token(), None, [mark], fingerprint_for(str))
            await admin.set(f"{key}:v", worthless)
            return await acquire(request)

        monkeypatch.setattr(store, "acquire", restless)

        assert await ask(guard, Kitchen()) == "soup 1"
        assert not await admin.exists(f"{key}:l")
        assert (await bytes_at(admin, f"{key}:v")).endswith(b"\xff")
        clock.advance(1)
        assert guard.peek(OP) is None


@pytest.mark.usefixtures("long_leases")
async def test_refresh_takes_the_right_from_another(pair: tuple[Guard, Guard], admin: Redis, key: str) -> None:
    """A load elsewhere, begun before a refresh, is not stored after it, nor remembered there."""
    first, second = pair
    slow, new = Kitchen(is_open=False), Kitchen()
    new.dishes = iter(["stew"])
    call = ask(first, slow)
    await slow.gate.arrivals(1)

    assert await refreshing(second, new)() == "stew"
    slow.gate.open()

    assert await call == "soup 1"
    assert first.peek(OP) is None
    assert b"stew" in await bytes_at(admin, f"{key}:v")


@pytest.mark.usefixtures("long_leases")
async def test_refresh_wakes_whoever_waited_for_the_load_that_it_replaces(make_guard: MakeGuard) -> None:
    """Those who waited for a load elsewhere get what the refresh stored."""
    async with make_guard() as first, make_guard() as second, make_guard() as third:
        slow, new = Kitchen(is_open=False), Kitchen()
        new.dishes = iter(["stew"])
        call = ask(first, slow)
        await slow.gate.arrivals(1)
        follower = ask(second, slow)
        await until(lambda: is_expecting(second, OP), "the other to wait")

        await refreshing(third, new)()

        assert await follower == "stew"
        slow.gate.open()
        await call


async def test_failed_refresh_leaves_what_was_stored(pair: tuple[Guard, Guard], admin: Redis, key: str) -> None:
    """When the load of a refresh fails, both tiers keep what they had, and the right is given back."""
    first, second = pair
    broken = Kitchen()
    broken.error = ValueError("out of soup")
    await ask(first, Kitchen())
    await ask(second, Kitchen())

    with pytest.raises(ValueError, match="out of soup"):
        await refreshing(first, broken)()

    assert first.peek(OP) is not None
    assert second.peek(OP) is not None
    assert await admin.exists(f"{key}:v")
    await until_gone(admin, f"{key}:l")


async def test_without_a_server_each_loads_for_itself(valkey: ValkeyServer) -> None:
    """When the server is gone, calls are answered by the loader, and remembered for a second at most."""
    clock = ManualClock()
    kitchen = Kitchen()
    async with Guard(valkey.url, clock=clock) as first, Guard(valkey.url, clock=clock) as second:
        valkey.kill()
        await until(lambda: not is_up(first) and not is_up(second), "both to notice")

        assert ["soup 1", "soup 2"] == [await ask(first, kitchen), await ask(second, kitchen)]
        with pytest.raises(InvalidationPending) as pending:
            await refreshing(first, kitchen)()
        assert pending.value.value == "soup 3"
        entries = [first.peek(OP), second.peek(OP)]
        clock.advance(1)

        assert ["soup 3", "soup 2"] == [entry and entry.value for entry in entries]
        assert [None, None] == [first.peek(OP), second.peek(OP)]


async def test_frozen_server_makes_a_load_s_own_value_short_lived(valkey: ValkeyServer) -> None:
    """A server that does not answer in time is gone without, though the bus has not noticed yet."""
    clock = ManualClock()
    async with Guard(valkey.url, clock=clock, deadline=0.05) as guard:
        valkey.freeze()

        assert await ask(guard, Kitchen()) == "soup 1"
        assert is_up(guard)
        assert guard.peek(OP) is not None
        clock.advance(1)
        assert guard.peek(OP) is None
        valkey.thaw()


async def test_server_that_dies_during_a_load_costs_nothing_but_the_store(valkey: ValkeyServer) -> None:
    """The value goes to whoever waits, though it could not be stored, nor the right be given back."""
    kitchen = Kitchen(is_open=False)
    async with Guard(valkey.url) as guard:
        call = ask(guard, kitchen)
        await kitchen.gate.arrivals(1)
        valkey.kill()
        kitchen.gate.open()

        assert await call == "soup 1"
        assert guard.stats().l2_errors >= 1
