import asyncio
import re
import struct
from collections.abc import AsyncIterator, Callable
from functools import partial
from time import monotonic
from typing import Any

import pytest
from inside import tier_of
from loaders import Kitchen, refuse, returning
from redis.asyncio import Redis
from stored import bytes_at, fingerprint_for, in_aiocache

from stampede_guard import ConfigurationError, Guard, GuardClosed, coalesce
from stampede_guard._l2.tier import key_of
from stampede_guard.stores._envelope import key_digest
from stampede_guard.stores.aiocache import AiocacheStore
from stampede_guard.stores.redis import RedisStore
from stampede_guard.testing import FaultStore, Gate, ManualClock

MakeGuard = Callable[..., Guard]

# aiocache calls redis-py by names that it has since changed.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated (close|setex):DeprecationWarning")


@pytest.mark.parametrize(("l2_ttl", "shortest"), [(60, 50_000), (0.7, -2)])
async def test_miss_fills_the_store_for_l2_ttl(
    l2_ttl: float, shortest: int, make_guard: MakeGuard, namespace: str, admin: Redis
) -> None:
    """A loaded value is stored with the life that `l2_ttl` gives it, in milliseconds."""
    async with make_guard() as guard:
        await guard.fetch("menu-7", returning("soup"), l2_ttl=l2_ttl, jitter=0, returns=str)

        assert shortest <= await admin.pttl(f"sg1:{{{namespace}:menu-7}}:v") <= 1_000 * l2_ttl


async def test_jitter_spreads_the_life_in_the_store(make_guard: MakeGuard, namespace: str, admin: Redis) -> None:
    """Values that are filled together do not all expire together, nor far from `l2_ttl`."""
    async with make_guard() as guard:
        for menu_id in range(20):
            await guard.fetch(f"menu-{menu_id}", returning("soup"), l2_ttl=1000, jitter=0.1, returns=str)
    lives = [await admin.ttl(f"sg1:{{{namespace}:menu-{menu_id}}}:v") for menu_id in range(20)]

    assert all(890 < life <= 1100 for life in lives)
    assert len(set(lives)) > 10


@pytest.fixture(params=["Redis", "aiocache's memory", "aiocache over Redis", "FaultStore"])
async def make_any(
    request: pytest.FixtureRequest, redis_url: str, namespace: str, make_guard: MakeGuard
) -> AsyncIterator[MakeGuard]:
    """Return what makes guards over a store that they share, one of each kind."""
    if request.param == "Redis":
        yield make_guard
    elif request.param == "FaultStore":
        store = FaultStore(monotonic)
        yield lambda: Guard(lambda: store, namespace=namespace)
    else:
        async with in_aiocache(redis_url if "Redis" in request.param else None) as cache:
            yield lambda: Guard(lambda: AiocacheStore(cache, deadline=5), namespace=namespace)


@pytest.mark.parametrize(
    ("answer", "returns"),
    [("soup", str), (None, None), (b"", bytes), (bytes(range(256)), bytes)],
    ids=["text", "None", "empty", "any bytes"],
)
async def test_second_guard_reads_what_the_first_loaded(answer: object, returns: Any, make_any: MakeGuard) -> None:
    """A guard elsewhere answers from the store, without loading; `None` and nothing at all are values, too."""
    async with make_any() as first, make_any() as second:
        await first.fetch("menu-7", returning(answer), l2_ttl=60, returns=returns)

        assert answer == await second.fetch("menu-7", refuse, l2_ttl=60, returns=returns)
        here, there = first.stats(), second.stats()
        assert (1, 0) == (here.l2_misses, here.l2_errors)
        assert (1, 0, 0, 0) == (there.l2_hits, there.l2_misses, there.loads, there.l2_errors)


async def test_value_that_was_read_is_remembered(make_any: MakeGuard) -> None:
    """What was read from the store stays in memory for `ttl`, also where no store says how long it has left."""
    async with make_any() as first, make_any() as second:
        await first.fetch("menu-7", returning("soup"), l2_ttl=60, returns=str)
        for _ in range(2):
            await second.fetch("menu-7", refuse, ttl=30, l2_ttl=60, returns=str)

    assert (1, 1) == (second.stats().l2_hits, second.stats().l1_hits)


@pytest.mark.parametrize(("ttl", "lives"), [(30, (1, 3)), (2, (2, 2))], ids=["late", "early"])
async def test_value_that_was_read_lives_no_longer_than_in_the_store(
    ttl: float, lives: tuple[float, float], make_guard: MakeGuard, namespace: str, admin: Redis
) -> None:
    """What has three seconds left in the store gets three in memory, or `ttl` if that is less."""
    clock = ManualClock()
    async with make_guard() as first, make_guard(clock=clock) as second:
        await first.fetch("menu-7", returning("soup"), l2_ttl=60, returns=str)
        await admin.pexpire(f"sg1:{{{namespace}:menu-7}}:v", 3000)
        await second.fetch("menu-7", refuse, ttl=ttl, l2_ttl=60, jitter=0, returns=str)
        entry = second._states.running().memory.get("menu-7")

    assert entry is not None
    assert lives[0] <= entry.fresh_until - clock() <= lives[1]


async def test_value_without_expiry_is_not_kept_in_memory(make_guard: MakeGuard, namespace: str, admin: Redis) -> None:
    """A value that somebody made permanent answers, but each time from the store."""
    async with make_guard() as first, make_guard() as second:
        await first.fetch("menu-7", returning("soup"), l2_ttl=60, returns=str)
        await admin.persist(f"sg1:{{{namespace}:menu-7}}:v")
        for _ in range(2):
            await second.fetch("menu-7", refuse, ttl=5, l2_ttl=60, returns=str)

    assert second.stats().l2_hits == 2


async def test_envelope_names_its_op(make_guard: MakeGuard, namespace: str, admin: Redis) -> None:
    """What is stored says by which flight, in which version, for which op and under which marks, before the payload."""
    async with make_guard() as guard:
        await guard.fetch("menu-7", returning(b"soup"), l2_ttl=60, returns=bytes, version=lambda _: 258)
    stored = await bytes_at(admin, f"sg1:{{{namespace}:menu-7}}:v")
    mark = await bytes_at(admin, f"sg1:{{{namespace}:}}:t")
    token = stored[53:75]

    assert re.fullmatch(rb"[\w-]{22}", token)
    assert re.fullmatch(rb"[\w-]{11}", mark)
    version, lengths = b"\x00\x00\x00\x00\x00\x00\x01\x02", b"\x01\x00\x00\x00\x0f"
    head = b"SGv4" + key_digest(f"{namespace}:menu-7") + b"\x01"
    life = struct.unpack_from(">Q", stored, 45)[0]
    entry = fingerprint_for(bytes) + bytes(16) + stored[45:53] + token + version + lengths
    assert 54_000 <= life <= 66_000
    assert head + entry + mark + b"soup" == stored


@pytest.mark.parametrize(
    ("op", "key"),
    [
        ("restaurant-fetch-701064", r"restaurant-fetch-701064"),
        ("menu of the day", r"menu_of_the_day~[0-9a-f]{40}"),
        ("a\r\nDEL b", r"a__DEL_b~[0-9a-f]{40}"),
        ("crème", r"cr_me~[0-9a-f]{40}"),
        ("{x}", r"_x_~[0-9a-f]{40}"),
        ("m" * 199, r"m{199}"),
        ("m" * 201, r"~[0-9a-f]{64}~m{134}"),
    ],
)
async def test_keys_are_readable(op: str, key: str, make_guard: MakeGuard, namespace: str, admin: Redis) -> None:
    """A key carries the format's version, the namespace and the op, made safe if need be."""
    async with make_guard() as guard:
        await guard.fetch(op, returning("soup"), l2_ttl=60, returns=str)
    keys = sorted([found.decode() async for found in admin.scan_iter(f"sg1:{{{namespace}:*", count=1000)], key=len)

    assert len(keys) == 2
    assert keys[0] == f"sg1:{{{namespace}:}}:t"  # the mark of everything under the namespace
    assert re.fullmatch(rf"sg1:\{{{namespace}:{key}\}}:v", keys[1])


@pytest.mark.parametrize("op", ["m" * 140, "m" * 141, "m" * 200, "m" * 10_000, "\x00", "\N{CUSTARD}" * 300])
def test_no_key_is_too_long_for_memcached(op: str) -> None:
    """With the longest namespace, a key still has no more than Memcached's 250 bytes."""
    assert len(key_of("n" * 100, op).encode()) <= 250


async def test_namespaces_are_apart(make_guard: MakeGuard, namespace: str) -> None:
    """Two guards with different namespaces share neither values nor invalidations."""
    async with make_guard() as ours, make_guard(namespace=f"{namespace}-other") as theirs:
        await theirs.fetch("menu-7", returning("theirs"), l2_ttl=60, returns=str)
        answer = await ours.fetch("menu-7", returning("ours"), l2_ttl=60, returns=str)
        await ours.invalidate("menu-7")
        kept = await theirs.fetch("menu-7", refuse, l2_ttl=60, returns=str)

    assert ("ours", "theirs") == (answer, kept)


async def test_op_without_l2_ttl_stays_out_of_the_store(make_guard: MakeGuard, namespace: str, admin: Redis) -> None:
    """An operation of a guard with a store need not use it."""
    async with make_guard() as guard:
        await guard.fetch("menu-7", returning("soup"), ttl=5)
        await guard.fetch("menu-7", returning("soup"), ttl=5)

    assert not await admin.exists(f"sg1:{{{namespace}:menu-7}}:v")


async def test_refresh_replaces_what_is_stored(make_guard: MakeGuard) -> None:
    """A refresh does not read the store, and what it loaded is what others read."""
    served = iter(["old", "new"])
    guard = make_guard()

    @coalesce("menu-{menu_id}", guard=guard, l2_ttl=60)
    async def load_menu(menu_id: int) -> str:
        return next(served)

    async with guard, make_guard() as other:
        await load_menu(7)
        refreshed = await load_menu.refresh(7)
        answer = await other.fetch("menu-7", refuse, l2_ttl=60, returns=str)

    assert ("new", "new") == (refreshed, answer)


async def test_invalidate_removes_from_the_store(make_any: MakeGuard) -> None:
    """After an invalidation the store holds nothing, and the next call loads; a second one is confirmed as well."""
    kitchen = Kitchen()
    async with make_any() as guard:
        await guard.fetch("menu-7", kitchen.load, ttl=5, l2_ttl=60, returns=str)
        for _ in range(2):
            await guard.invalidate("menu-7")
        answer = await guard.fetch("menu-7", kitchen.load, ttl=5, l2_ttl=60, returns=str)

        assert ("soup 2", 2) == (answer, guard.stats().l2_misses)
        assert [] == tier_of(guard).pending.all()


@pytest.mark.parametrize("place", ["here", "elsewhere"])
async def test_i3_overtaken_load_is_not_stored(place: str, make_guard: MakeGuard, namespace: str, admin: Redis) -> None:
    """A load that an invalidation overtook, here or elsewhere, answers its caller, and is stored nowhere."""
    gate = Gate()

    async def load() -> str:
        await gate.passage()
        return "old"

    async with make_guard() as guard, make_guard() as other:
        call = asyncio.create_task(guard.fetch("menu-7", load, ttl=60, l2_ttl=60, returns=str))
        await gate.arrivals(1)
        await (guard if place == "here" else other).invalidate("menu-7")
        gate.open()
        answer = await call
        kept = guard._states.running().memory.get("menu-7")

    assert ("old", None) == (answer, kept)
    assert not await admin.exists(f"sg1:{{{namespace}:menu-7}}:v")


@pytest.mark.parametrize(("size", "stored"), [(1000, 1), (1001, 0)])
async def test_values_over_max_bytes_are_not_stored(
    size: int, stored: int, make_guard: MakeGuard, namespace: str, admin: Redis
) -> None:
    """A payload of `max_bytes` is stored, one byte more is answered but not stored."""
    async with make_guard(max_bytes=1000) as guard:
        answer = await guard.fetch("menu-7", returning(b"x" * size), l2_ttl=60, returns=bytes)

    assert len(answer) == size
    assert await admin.exists(f"sg1:{{{namespace}:menu-7}}:v") == stored
    assert guard.stats().l2_errors == 1 - stored


@pytest.mark.parametrize(("size", "loads"), [(1000, 0), (1001, 1), (1020, 1), (100_000, 1)])
async def test_values_over_max_bytes_are_not_read(size: int, loads: int, make_guard: MakeGuard) -> None:
    """Of what a more generous process stored, only payloads of up to `max_bytes` are read."""
    async with make_guard() as generous, make_guard(max_bytes=1000) as thrifty:
        await generous.fetch("menu-7", returning(b"x" * size), l2_ttl=60, returns=bytes)
        answer = await thrifty.fetch("menu-7", returning(b"x" * size), l2_ttl=60, returns=bytes)

    assert len(answer) == size
    assert (loads, loads) == (thrifty.stats().loads, thrifty.stats().l2_undecodable)


@pytest.mark.parametrize(("of_store", "of_guard"), [(1000, 1000), (2000, 1000)])
async def test_what_the_guard_stores_the_store_reads(
    of_store: int, of_guard: int, redis_url: str, namespace: str
) -> None:
    """A value of the guard's `max_bytes` is read by a store with the same limit, or with a higher one."""
    make = partial(RedisStore, redis_url, deadline=5, connect_timeout=5, max_bytes=of_store)
    loads = 0
    for _ in range(2):
        async with Guard(make, namespace=namespace, max_bytes=of_guard) as guard:
            await guard.fetch("menu-7", returning(b"x" * of_guard), l2_ttl=60, returns=bytes)
            loads += guard.stats().loads

    assert 1 == loads


async def test_guard_stores_nothing_that_the_store_does_not_read() -> None:
    """A guard whose `max_bytes` is higher than its store's is not opened: its longest values could not be read."""
    guard = Guard(lambda: RedisStore("redis://localhost", max_bytes=1000), max_bytes=1001)

    with pytest.raises(ConfigurationError, match=r"^max_bytes=1,001: .*Redis reads values of at most 1,000 bytes"):
        async with guard:
            pass
    with pytest.raises(GuardClosed):
        guard.peek("menu-7")


async def test_one_log_line_about_large_values(make_guard: MakeGuard, caplog: pytest.LogCaptureFixture) -> None:
    """However many values of different sizes are too large, between ones that are not, the log says so once."""
    async with make_guard(max_bytes=1000) as guard:
        for size in (2000, 10, 3000, 20, 4000):

            async def load(size: int = size) -> bytes:
                return b"x" * size

            await guard.fetch(f"menu-{size}", load, l2_ttl=60, returns=bytes)

    assert len(caplog.messages) == 1
    assert "max_bytes=1,000" in caplog.messages[0]
