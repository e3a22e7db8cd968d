"""Questions that are asked together travel together: counted on the wire, against a real server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from time import monotonic
from typing import Any, TypeVar

import pytest
from proxying import CountingProxy
from redis.asyncio import Redis
from redis.asyncio.connection import Connection
from stored import find, pool_of, put

from stampede_guard._tokens import new_token
from stampede_guard.stores import AcquireRequest, AcquireResult, Refused, Release, Stored
from stampede_guard.stores import redis as stores_redis
from stampede_guard.stores._envelope import seal
from stampede_guard.stores._redis.node import ConnectionLimits, Node
from stampede_guard.stores._redis.topology.factory import make_topology
from stampede_guard.stores._redis.urls import parse_url
from stampede_guard.stores.redis import RedisStore

T = TypeVar("T")

LONG = b"x" * 100_000


@pytest.fixture
async def store(proxy: CountingProxy, namespace: str, unasked: None) -> AsyncIterator[RedisStore]:
    """Return a store behind it, with as many connections as it may need."""
    store = RedisStore(proxy.url, deadline=5, connect_timeout=5)
    store.channel = f"sg1:{namespace}:bus"
    pool = pool_of(store)
    for connection in [await pool.get_connection() for _ in range(8)]:
        await pool.release(connection)
    proxy.restart()
    yield store
    await store.aclose()


@pytest.fixture
async def keys(namespace: str, admin: Redis) -> list[str]:
    """Return the keys of two hundred ops, each with a value of its own."""
    keys = [f"sg1:{{{namespace}:menu-{number}}}" for number in range(200)]
    await admin.mset({f"{key}:v": key for key in keys})
    return keys


@pytest.fixture
def tag(namespace: str) -> str:
    """Return the key of a tag's mark."""
    return f"sg1:{{{namespace}:}}:t"


async def together(*questions: Awaitable[T]) -> list[T]:
    """Ask all *questions* in one iteration of the loop."""
    return await asyncio.gather(*questions)


async def acquire(store: RedisStore, key: str, *tags: str, reject: bytes = b"") -> AcquireResult:
    """Ask for the value or the lease, and for marks that have to last a minute."""
    return await store.acquire(AcquireRequest(key, tags, 60, 60, reject=reject))


async def expect_hits(store: RedisStore, proxy: CountingProxy, key: str) -> None:
    """Find a value so often that the next one is expected to be there."""
    for _ in range(8):
        await together(*(find(store, key) for _ in range(50)))
    proxy.restart()


def contents(found: Sequence[Stored | None]) -> list[bytes]:
    """Return what was found."""
    return [stored.envelope for stored in found if stored is not None]


def envelopes(found: Sequence[AcquireResult]) -> list[bytes]:
    """Return what was found."""
    return [verdict.stored.envelope for verdict in found if verdict.stored is not None]


async def test_reads_of_one_iteration_are_one_request(
    store: RedisStore, proxy: CountingProxy, keys: list[str], tag: str
) -> None:
    """Fifty ops that are asked for at once cost one round trip, and their common mark is asked for once."""
    found = await together(*(acquire(store, key, tag) for key in keys[:50]))

    assert [key.encode() for key in keys[:50]] == envelopes(found)
    assert 1 == len({verdict.marks for verdict in found})
    assert (1, ["EVALSHA"] * 51) == (proxy.round_trips, proxy.commands)


async def test_changes_of_one_iteration_are_one_request(
    store: RedisStore, proxy: CountingProxy, keys: list[str], admin: Redis
) -> None:
    """So do fills, renewals, releases and invalidations, in any mixture, and each gets its own answer."""
    token = new_token()
    await together(*(store.acquire(AcquireRequest(key, (), 60, 60, token=token, reject=b"*")) for key in keys[:3]))
    proxy.restart()

    outcomes = await together(
        store.fill(keys[0], token, seal("menu-7", b"soup", token), 60, None, b"w", always_publish=False),
        store.fill(keys[1], new_token(), seal("menu-7", b"soup", token), 60, None, b"w", always_publish=False),
        store.renew([(keys[1], token, 60)]),
        store.renew([(keys[1], new_token(), 60)]),
        store.release([Release(keys[2], token, b"w")]),
        store.invalidate(keys[3], None, b"w"),
        find(store, keys[4]),
    )

    assert [True, False, [True], [False], [True], None] == outcomes[:-1]
    assert (1, ["EVALSHA"] * 7) == (proxy.round_trips, proxy.commands)
    assert not await admin.exists(f"{keys[2]}:l", f"{keys[3]}:v")


@pytest.mark.parametrize("reject", [b"", b"*"])
async def test_old_value_that_is_too_long_for_a_batch(
    reject: bytes, store: RedisStore, proxy: CountingProxy, keys: list[str]
) -> None:
    """It is read in a round trip of its own, and the lease is the same flight's."""
    token, payload = new_token(), bytes(1 << 15)
    envelope = seal("menu-7", payload, token, stale=60)
    await store.acquire(AcquireRequest(keys[0], (), 60, 60, token=token, reject=b"*"))
    await store.fill(keys[0], token, envelope, 60, None, b"w", always_publish=False)
    proxy.restart()
    request = AcquireRequest(keys[0], (), 60, 60, reject=reject, window=60)

    async def ask() -> AcquireResult:
        return await store.acquire(request)

    found, _ = await together(ask(), acquire(store, keys[1]))

    assert ("own", envelope) == (found.kind, found.stored and found.stored.envelope)
    assert (2, ["EVALSHA"] * 3) == (proxy.round_trips, proxy.commands)
    assert [True] == await store.renew([(keys[0], request.token, 60)])


@pytest.mark.parametrize(("margin", "commands"), [(0, ["PTTL", "GETRANGE"]), (99, ["PTTL", "GETRANGE", "EVALSHA"])])
async def test_value_with_a_window_is_read_without_scripts(
    margin: float, commands: list[str], store: RedisStore, proxy: CountingProxy, keys: list[str]
) -> None:
    """A plain read is enough for a fresh value; for an old one, the request for the lease follows."""
    token = new_token()
    envelope = seal("menu-7", b"soup", token, stale=60)
    await store.acquire(AcquireRequest(keys[0], (), 60, 60, token=token, reject=b"*"))
    await store.fill(keys[0], token, envelope, 120, None, b"w", always_publish=False)
    await expect_hits(store, proxy, keys[1])

    found = await store.acquire(AcquireRequest(keys[0], (), 60, 60, window=60, margin=margin))

    assert ("own" if margin else "hit", envelope) == (found.kind, found.stored and found.stored.envelope)
    assert commands == proxy.commands


async def test_values_that_are_expected_are_read_without_scripts(
    store: RedisStore, proxy: CountingProxy, keys: list[str], tag: str
) -> None:
    """Once most looks found a value, the next ones are plain reads; what is not there is asked for once more."""
    absent = f"{keys[0]}-absent"
    await acquire(store, keys[0], tag)
    await expect_hits(store, proxy, keys[0])

    found = await together(*(acquire(store, key, tag) for key in [*keys[:10], absent]))

    assert [key.encode() for key in keys[:10]] == envelopes(found)
    assert ("own", 1) == (found[-1].kind, len({verdict.marks for verdict in found}))
    assert 2 == proxy.round_trips
    assert [*["PTTL", "GETRANGE"] * 11, "GET", "PTTL", "EVALSHA", "EVALSHA"] == proxy.commands


async def test_unwanted_value_is_not_read_again(store: RedisStore, proxy: CountingProxy, keys: list[str]) -> None:
    """A plain read does not pass off as a hit what the flight has seen and cannot use, nor a value to be replaced."""
    token = new_token()
    await put(store, keys[0], seal("menu-7", b"soup", token))
    await put(store, keys[2], seal("menu-7", b"salad", new_token()))
    await expect_hits(store, proxy, keys[0])

    seen, replaced, other = await together(
        acquire(store, keys[0], reject=b"=" + token.encode()),
        acquire(store, keys[1], reject=b"*"),
        acquire(store, keys[2], reject=b"=" + token.encode()),
    )

    assert ["own", "own", "hit"] == [seen.kind, replaced.kind, other.kind]


@pytest.mark.parametrize("state", ["absent", "old"])
async def test_mark_that_is_read_lasts(  # noqa: PLR0917
    state: str, store: RedisStore, proxy: CountingProxy, keys: list[str], tag: str, admin: Redis
) -> None:
    """A mark that is not there, or not for long any more, is made or prolonged before anybody goes by it."""
    if state == "old":
        await admin.set(tag, "m" * 11, px=20_000)
    await expect_hits(store, proxy, keys[0])

    found = await together(*(acquire(store, key, tag) for key in keys[:5]))

    assert [key.encode() for key in keys[:5]] == envelopes(found)
    assert {(await admin.get(tag),)} == {verdict.marks for verdict in found}
    assert 50_000 < await admin.pttl(tag) <= 60_000


async def test_number_of_questions_in_a_request_is_bounded(
    store: RedisStore, proxy: CountingProxy, keys: list[str]
) -> None:
    """Of 150 questions no more than 128 travel together."""
    found = await together(*(find(store, key) for key in keys[:150]))

    assert [key.encode() for key in keys[:150]] == [stored.envelope for stored in found if stored is not None]
    assert (2, 150) == (proxy.round_trips, len(proxy.commands))


async def test_bytes_of_a_request_are_bounded(store: RedisStore, proxy: CountingProxy, keys: list[str]) -> None:
    """Of six fills of 60 KB, two travel together; a larger one travels by itself, and arrives."""
    token = new_token()
    await together(*(store.acquire(AcquireRequest(key, (), 60, 60, token=token, reject=b"*")) for key in keys[:7]))
    proxy.restart()

    sizes = [60_000] * 6 + [500_000]
    stored = await together(
        *(
            store.fill(key, token, bytes(size), 60, None, b"w", always_publish=False)
            for key, size in zip(keys, sizes, strict=False)
        )
    )

    assert [True] * 7 == stored
    assert 4 == proxy.round_trips
    found = await find(store, keys[6])
    assert found is not None
    assert 500_000 == len(found.envelope)


@pytest.mark.parametrize("is_expected", [False, True])
async def test_long_value_travels_by_itself(
    is_expected: bool, store: RedisStore, proxy: CountingProxy, keys: list[str], admin: Redis
) -> None:
    """Among others only its beginning is read; alone it is read as a whole, in a round trip of its own."""
    await admin.set(f"{keys[3]}:v", LONG)
    if is_expected:
        await expect_hits(store, proxy, keys[0])

    found = await together(*(find(store, key) for key in keys[:10]))

    assert [LONG] == contents(found[3:4])
    assert [key.encode() for key in keys[:3]] == contents(found[:3])
    assert 2 == proxy.round_trips
    proxy.restart()
    assert [LONG] == contents([await find(store, keys[3])])
    assert 1 == proxy.round_trips


@pytest.mark.parametrize("is_expected", [False, True])
async def test_refused_key_is_its_own_trouble(  # noqa: PLR0917
    is_expected: bool,
    store: RedisStore,
    proxy: CountingProxy,
    keys: list[str],
    tag: str,
    admin: Redis,
) -> None:
    """A key that is none of ours, in the midst of others, is refused to whoever asked for it, and to nobody else."""
    await admin.delete(f"{keys[2]}:v")
    await admin.rpush(f"{keys[2]}:l", "no lease")
    await admin.delete(f"{keys[3]}:v")
    await admin.rpush(f"{keys[3]}:v", "no value")
    await acquire(store, keys[0], tag)  # there is a mark
    if is_expected:
        await expect_hits(store, proxy, keys[0])

    found = await asyncio.gather(*(acquire(store, key, tag) for key in keys[:10]), return_exceptions=True)
    refused = found.pop(2)

    assert isinstance(refused, Refused)
    assert "WRONGTYPE" == str(refused)
    assert ["hit", "hit", "own", *["hit"] * 6] == [each.kind for each in found if isinstance(each, AcquireResult)]


async def test_refused_mark_is_told_to_each_who_has_the_tag(
    store: RedisStore, keys: list[str], tag: str, admin: Redis
) -> None:
    """Who has another tag does not suffer, and no two callers get one exception."""
    await admin.rpush(tag, "no mark")

    first, second, third = await asyncio.gather(
        acquire(store, keys[0], tag),
        acquire(store, keys[1], tag),
        acquire(store, keys[2], f"{tag}2"),
        return_exceptions=True,
    )

    assert ["WRONGTYPE", "WRONGTYPE"] == [str(first), str(second)]
    assert first is not second
    assert isinstance(third, AcquireResult)


async def test_forgotten_scripts_are_taught_to_all_at_once(
    store: RedisStore, proxy: CountingProxy, keys: list[str], admin: Redis
) -> None:
    """When the server has forgotten a script, those who wanted it send its text together."""
    await admin.script_flush()

    found = await together(*(find(store, key) for key in keys[:20]))

    assert [key.encode() for key in keys[:20]] == [stored.envelope for stored in found if stored is not None]
    assert (2, ["EVALSHA"] * 20 + ["EVAL"] * 20) == (proxy.round_trips, proxy.commands)


async def test_glances_travel_together(  # noqa: PLR0917
    store: RedisStore, proxy: CountingProxy, keys: list[str], tag: str, admin: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of a replica are one request too, and for a long value one more."""
    topology: Any = store._topology
    monkeypatch.setattr(topology, "replica", topology.primary)
    await admin.set(f"{keys[1]}:v", LONG)
    await admin.set(tag, "m" * 11)
    await admin.delete(f"{keys[2]}:v")

    found = await together(*(store.read_replica(key, (tag,)) for key in keys[:4]))

    assert [keys[0].encode(), LONG, keys[3].encode()] == envelopes([each for each in found if each is not None])
    assert found[2] is None
    assert [(b"m" * 11,)] * 3 == [each.marks for each in found if each is not None]
    assert (2, [*["PTTL", "GETRANGE"] * 4, "GET", "PTTL", "GETRANGE", "GET"]) == (proxy.round_trips, proxy.commands)


async def test_replica_that_refuses_is_no_answer(
    store: RedisStore, keys: list[str], admin: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a replica has no value to give, for whatever reason, nothing is found there, and the primary will know."""
    topology: Any = store._topology
    monkeypatch.setattr(topology, "replica", topology.primary)
    await admin.delete(f"{keys[0]}:v")
    await admin.rpush(f"{keys[0]}:v", "no value")

    refused, found = await together(*(store.read_replica(key, ()) for key in keys[:2]))

    assert refused is None
    assert found is not None
    assert [keys[1].encode()] == envelopes([found])


async def test_marks_may_be_elsewhere(  # noqa: PLR0917
    store: RedisStore, keys: list[str], tag: str, admin: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value comes from one replica and the marks from another, side by side."""
    here: Any = store._topology
    there = make_topology(parse_url(redis_url), ConnectionLimits(), monotonic)
    monkeypatch.setattr(here, "replica", lambda key: (there if key == tag else here).primary(key))
    await admin.set(tag, "m" * 11)

    found = await store.read_replica(keys[0], (tag,))
    await there.aclose()

    assert found is not None
    assert [keys[0].encode()] == envelopes([found])
    assert (b"m" * 11,) == found.marks


async def test_nothing_is_left_of_a_batch(store: RedisStore, keys: list[str]) -> None:
    """When everybody has an answer, no task, future or connection is in use."""
    await together(*(find(store, key) for key in keys))
    (batches,) = store._pipeliners.values()
    async with asyncio.timeout(10):
        while not batches.is_idle:
            await asyncio.sleep(0)

    assert not batches._waiting
    assert not pool_of(store)._in_use_connections
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("batch for")]


async def test_closed_store_answers_nobody(store: RedisStore, keys: list[str]) -> None:
    """Who is waiting when the store is closed is told so, sent or not."""
    asking = [asyncio.ensure_future(find(store, key)) for key in keys]
    await asyncio.sleep(0)  # everybody has asked; nothing is sent
    await store.aclose()
    answers = await asyncio.gather(*asking, return_exceptions=True)

    assert {ConnectionError} == {type(answer) for answer in answers}


async def test_nobody_asks_again_when_the_store_is_closed(store: RedisStore, keys: list[str]) -> None:
    """What may be asked twice is not when it was closing that kept it from an answer: no task begins, no connection."""
    asking = [asyncio.ensure_future(store.renew([(key, new_token(), 60)])) for key in keys]
    await asyncio.sleep(0)  # everybody has asked
    await store.aclose()
    answers = await asyncio.gather(*asking, return_exceptions=True)

    assert {ConnectionError} == {type(answer) for answer in answers}
    assert not [connection for connection in pool_of(store)._available_connections if connection.is_connected]
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("batch for")]


async def test_nodes_that_are_gone_are_forgotten(
    store: RedisStore, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a store knows of its nodes is bounded: those that nobody asks anything make room."""
    monkeypatch.setattr(stores_redis, "_MAX_PIPELINERS", 1)
    node = store._topology.primary("")
    other = Node("Redis 2", Connection, {}, ConnectionLimits())

    store._pipeliner_of(other)
    found = await find(store, keys[0])

    assert found is not None
    assert [node] == [*store._pipeliners]
