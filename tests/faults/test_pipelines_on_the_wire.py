"""Batches over a wire that loses, holds and cuts: what goes wrong with one concerns no other."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from proxying import Wire, passes
from redis.asyncio import Redis
from stored import find, pool_of

from stampede_guard._l2.tier import key_of
from stampede_guard._tokens import new_token
from stampede_guard.stores import Stored
from stampede_guard.stores._envelope import seal
from stampede_guard.stores._redis.resp import UnexpectedReply
from stampede_guard.stores.redis import RedisStore
from stampede_guard.testing import Gate


@pytest.fixture
async def keys(namespace: str, admin: Redis) -> list[str]:
    """Return the keys of fifty ops, each with a value of its own."""
    keys = [key_of(namespace, f"menu-{number}") for number in range(50)]
    await admin.mset({f"{key}:v": key for key in keys})
    return keys


@pytest.fixture
async def store(wire: Wire) -> AsyncIterator[RedisStore]:
    """Return a store at the end of the wire."""
    store = RedisStore(wire.url, deadline=5, connect_timeout=5)
    yield store
    await store.aclose()


def values(found: list[Stored | BaseException | None]) -> list[str]:
    """Return what was found."""
    return [each.envelope.decode() for each in found if isinstance(each, Stored)]


@pytest.mark.parametrize("moment", ["before it is sent", "when it is sent"])
async def test_cancelled_asker_among_many(moment: str, wire: Wire, store: RedisStore, keys: list[str]) -> None:
    """One of fifty who leaves takes nothing away: the others have their values, and the connection is in step."""
    gate = Gate()

    async def hold(request: bytes) -> bytes:
        await gate.passage()
        return request

    await store.open()
    wire.on_request = hold
    asking = [asyncio.create_task(find(store, key)) for key in keys]
    if moment == "before it is sent":
        await asyncio.sleep(0)
    else:
        await gate.arrivals(1)
    asking[7].cancel()
    gate.open()
    found = await asyncio.gather(*asking, return_exceptions=True)
    wire.on_request = passes
    again = await asyncio.gather(*(find(store, key) for key in keys))

    assert isinstance(found.pop(7), asyncio.CancelledError)
    assert keys[:7] + keys[8:] == values(found)
    assert keys == values([*again])
    assert 1 == wire.opened


async def test_batch_that_everybody_has_left(wire: Wire, store: RedisStore, keys: list[str]) -> None:
    """Its replies are read and dropped, and the connection is used again."""
    gate = Gate()

    async def hold(request: bytes) -> bytes:
        await gate.passage()
        return request

    await store.open()
    wire.on_request = hold
    asking = [asyncio.create_task(find(store, key)) for key in keys]
    await gate.arrivals(1)
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)
    wire.on_request = passes
    gate.open()
    async with asyncio.timeout(10):
        while pool_of(store)._in_use_connections:
            await asyncio.sleep(0)

    assert keys[:1] == values([await find(store, keys[0])])
    assert 1 == wire.opened


async def test_time_that_runs_out_for_one_batch(wire: Wire, keys: list[str]) -> None:
    """Those whose batch gets no answer time out, each with an error of their own; those after them do not."""
    store, gate = RedisStore(wire.url, deadline=0.2, connect_timeout=5), Gate()

    async def lose(request: bytes) -> bytes:
        if keys[0].encode() in request:
            await gate.passage()
        return request

    await store.open()
    wire.on_request = lose
    lost = [asyncio.create_task(find(store, key)) for key in keys[:20]]
    await gate.arrivals(1)
    found = await asyncio.gather(*(find(store, key) for key in keys[20:]))
    errors = await asyncio.gather(*lost, return_exceptions=True)
    gate.open()
    await store.aclose()

    assert keys[20:] == values([*found])
    assert {TimeoutError} == {type(error) for error in errors}
    assert 20 == len({id(error) for error in errors})


async def test_long_value_holds_nobody_up(wire: Wire, store: RedisStore, keys: list[str], admin: Redis) -> None:
    """While a long value is on its way, those who asked with it have their short ones."""
    gate, requests = Gate(), 0
    await admin.set(f"{keys[0]}:v", b"x" * 100_000)

    async def hold_the_second(request: bytes) -> bytes:
        nonlocal requests
        requests += 1
        if requests == 2:
            await gate.passage()
        return request

    await store.open()
    wire.on_request = hold_the_second
    long = asyncio.create_task(find(store, keys[0]))
    short = await asyncio.gather(*(find(store, key) for key in keys[1:]))
    await gate.arrivals(1)
    is_waiting = not long.done()
    gate.open()
    found = await long

    assert is_waiting
    assert keys[1:] == values([*short])
    assert found is not None
    assert 100_000 == len(found.envelope)


async def test_connection_that_is_cut_under_a_batch(
    wire: Wire, store: RedisStore, keys: list[str], admin: Redis
) -> None:
    """A request that may be sent twice is; one that may not raises an error of its own for each caller."""
    mine = new_token()
    await admin.set(f"{keys[0]}-sealed:v", seal(keys[0], b"soup", mine))
    await store.open()

    async def cut(request: bytes) -> bytes:
        wire.on_request = passes
        wire.reset()
        return b""

    wire.on_request = cut
    renewed = asyncio.gather(*(store.renew([(key, new_token(), 60)]) for key in keys[:10]))
    token = asyncio.ensure_future(store.stored_by(f"{keys[0]}-sealed:v"))
    acquired = asyncio.gather(*(find(store, key) for key in keys[10:20]), return_exceptions=True)
    errors = await acquired

    assert [[False]] * 10 == await renewed
    assert (mine.encode(),) == await token
    assert 10 == len({id(error) for error in errors if isinstance(error, Exception)})
    assert keys == values([*await asyncio.gather(*(find(store, key) for key in keys))])


@pytest.mark.parametrize(("ending", "error"), [("", "ConnectionError"), ("-LOADING later\r\n", "BusyLoadingError")])
async def test_server_that_says_goodbye(
    ending: str, error: str, wire: Wire, store: RedisStore, keys: list[str]
) -> None:
    """A server that closes instead of answering, or says that it does not serve now, has not answered anybody."""

    async def end(request: bytes) -> bytes:
        if ending:
            wire.say(ending.encode() * len(keys))
        else:
            wire.hang_up()
        return b""

    await store.open()
    wire.on_request = end
    errors = await asyncio.gather(*(find(store, key) for key in keys), return_exceptions=True)
    wire.on_request = passes

    assert {error} == {type(each).__name__ for each in errors}
    assert keys == values([*await asyncio.gather(*(find(store, key) for key in keys))])


async def test_operations_that_wait_for_room(wire: Wire, keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """While the only connection is busy, others wait; then they travel together."""
    store, gate = RedisStore(wire.url, deadline=5, connect_timeout=5, max_connections=1), Gate()
    topology: Any = store._topology
    monkeypatch.setattr(topology, "replica", topology.primary)

    async def hold(request: bytes) -> bytes:
        await gate.passage()
        return request

    await store.open()
    wire.on_request = hold
    first = asyncio.create_task(find(store, keys[0]))
    await gate.arrivals(1)
    waiting = asyncio.gather(
        store.renew([(keys[1], new_token(), 60)]), store.read_replica(keys[2], ()), find(store, keys[3])
    )
    await asyncio.sleep(0)
    wire.on_request = passes
    gate.open()
    is_renewed, glimpse, found = await waiting
    await first
    await store.aclose()

    assert [False] == is_renewed
    assert glimpse is not None
    assert values([glimpse.stored, found]) == keys[2:4]
    assert 1 == wire.opened


async def test_glance_that_is_lost(wire: Wire, keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of a replica that is lost with its connection is repeated; one that takes too long is not."""
    store, requests = RedisStore(wire.url, deadline=0.1, connect_timeout=5), 0
    topology: Any = store._topology
    monkeypatch.setattr(topology, "replica", topology.primary)

    async def cut(request: bytes) -> bytes:
        wire.on_request = passes
        wire.reset()
        return b""

    async def lose(request: bytes) -> bytes:
        nonlocal requests
        requests += 1
        return b""

    await store.open()
    wire.on_request = cut
    glimpse = await store.read_replica(keys[0], ())
    wire.on_request = lose
    with pytest.raises(TimeoutError):
        await store.read_replica(keys[0], ())
    await store.aclose()

    assert glimpse is not None
    assert values([glimpse.stored]) == keys[:1]
    assert 1 == requests


async def test_one_reply_too_many(wire: Wire, store: RedisStore, keys: list[str]) -> None:
    """When there is more than was asked for, nobody knows which reply is whose, so nobody gets any."""

    async def add(reply: bytes) -> bytes:
        return reply + b":1\r\n"

    await store.open()
    wire.on_reply = add
    with pytest.raises(UnexpectedReply):
        await find(store, keys[0])
    wire.on_reply = passes

    assert keys == values([*await asyncio.gather(*(find(store, key) for key in keys))])


async def test_value_that_comes_in_pieces(wire: Wire, store: RedisStore, keys: list[str], admin: Redis) -> None:
    """Replies that are cut anywhere on the way are put together."""
    await admin.set(f"{keys[0]}:v", b"x" * 600_000)

    async def dawdle(reply: bytes) -> bytes:
        if len(reply) < 1000:
            for at in range(len(reply) - 1):
                wire.say(reply[at : at + 1])
                await asyncio.sleep(0)
            return reply[-1:]
        return reply

    await store.open()
    wire.on_reply = dawdle
    long, *found = await asyncio.gather(*(find(store, key) for key in keys[:8]))

    assert long is not None
    assert 600_000 == len(long.envelope)
    assert keys[1:8] == values([*found])
