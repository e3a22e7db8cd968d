"""What every store that grants leases does: the one in memory, over which the other tests run, and Redis."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import pytest
from leasing import LeasingDouble, Server
from redis.asyncio import Redis

from stampede_guard._codecs.fingerprint import NO_FINGERPRINT
from stampede_guard.stores import AcquireRequest, AcquireResult, Echo, LeasingStore, LoadFailure, Release, Subscription
from stampede_guard.stores._envelope import seal, unseal
from stampede_guard.stores.redis import RedisStore
from stampede_guard.testing import ManualClock

MINE = "m" * 22
THEIRS = "t" * 22
OTHERS = "o" * 22
LATEST = 2**53 - 1


class Rig(NamedTuple):
    """A store, its bus, and one op.

    Attributes:
        expire_lease: Ends the op's lease, as its expiry would.
        end_pause: Lets the pause after a failure be over for a second.
    """

    store: LeasingStore
    subscription: Subscription
    key: str
    expire_lease: Callable[[], Awaitable[Any]]
    end_pause: Callable[[], Awaitable[Any]]

    async def acquire(self, token: str, lease: float = 60, *, tags: tuple[str, ...] = (), **options: Any) -> str:
        """Ask for the value or the lease; return what came of it."""
        return (await self.answer(token, lease, tags=tags, **options)).kind

    async def answer(
        self, token: str, lease: float = 60, *, tags: tuple[str, ...] = (), **options: Any
    ) -> AcquireResult:
        """Ask for the value or the lease."""
        return await self.store.acquire(AcquireRequest(self.key, tags, lease, 60, token=token, **options))

    async def fill(
        self, token: str, version: int | None = None, *, ttl: float = 5, always_publish: bool = False
    ) -> bool:
        """Store the value of the flight with *token*."""
        envelope = seal("menu-7", b"soup", token, version)
        return await self.store.fill(self.key, token, envelope, ttl, version, b"filled", always_publish=always_publish)

    async def put(
        self, token: str, left: float, window: float = 0, life: float = 100, fingerprint: bytes = NO_FINGERPRINT
    ) -> bytes:
        """Store a value that has so many seconds *left*, and is stale in the last *window* of them."""
        await self.acquire(token, reject=b"*")
        envelope = seal("menu-7", b"soup", token, None, (), fingerprint, life=life, stale=window)
        assert await self.store.fill(self.key, token, envelope, left, None, b"filled", always_publish=False)
        return envelope

    async def fail(self, token: str, failure: LoadFailure) -> float:
        """Let the load of *token* fail; return the seconds for which others have to pause, if they have to."""
        (is_released,) = await self.store.release([Release(self.key, token, b"released", failure=failure)])
        assert is_released is True
        answer = await self.answer(OTHERS, margin=LATEST)
        assert (answer.kind, answer.failure) == ("backoff", failure.text)
        return answer.left

    async def ttl(self) -> float:
        """Return the seconds that the value has left, if there is one with the envelope that `fill` has made."""
        kind, stored, *_ = await self.answer(OTHERS)
        assert stored is not None
        assert stored.ttl is not None
        (token,) = await self.stored_by()
        assert ("hit", seal("menu-7", b"soup", token)) == (kind, stored.envelope)
        return stored.ttl

    async def renew(self, token: str, lease: float = 60) -> bool:
        """Renew the lease, if *token* holds it."""
        (is_renewed,) = await self.store.renew([(self.key, token, lease)])
        assert isinstance(is_renewed, bool)
        return is_renewed

    async def release(self, token: str, *, is_unstored: bool = False) -> bool:
        """End the lease, if *token* holds it."""
        (is_released,) = await self.store.release([Release(self.key, token, b"released", is_unstored)])
        assert isinstance(is_released, bool)
        return is_released

    async def invalidate(self, version: int | None = None, *, is_soft: bool = False) -> None:
        """Invalidate the op."""
        await self.store.invalidate(self.key, version, b"invalidated", is_soft=is_soft)

    async def stored_by(self) -> tuple[str, ...]:
        """Return the tokens of the flights whose values are stored."""
        return tuple(token.decode() for token in await self.store.stored_by(f"{self.key}:v"))

    async def published(self) -> list[object]:
        """Return what was published before this call, and since the last one."""
        await self.store.echo(b"now")
        heard: list[object] = [await self.subscription.next()]
        while heard[-1] != Echo(b"now"):
            heard.append(await self.subscription.next())
        return heard[:-1]


@pytest.fixture(params=["memory", "redis"])
async def rig(request: pytest.FixtureRequest, redis_url: str, admin: Redis, namespace: str) -> AsyncIterator[Rig]:
    """Return a store, with nothing in it of the op or its tags."""
    key, server = f"sg1:{{{namespace}:menu-7}}", Server(ManualClock())

    async def pop_lease() -> None:
        server.leases.pop(key, None)

    async def end_pause() -> None:
        marker, is_awaited, _ = server.leases[key]
        server.leases[key] = marker, is_awaited, server.clock() + 59

    is_redis = request.param == "redis"
    store: LeasingStore = RedisStore(redis_url, deadline=5, connect_timeout=5) if is_redis else LeasingDouble(server)
    store.channel = f"sg1:{namespace}:bus"
    async with store.listen() as subscription:
        expire_lease = (lambda: admin.delete(f"{key}:l")) if is_redis else pop_lease
        end = (lambda: admin.pexpire(f"{key}:l", 59_000)) if is_redis else end_pause
        yield Rig(store, subscription, key, expire_lease, end)
    await store.aclose()


# The lease


async def test_first_request_gets_the_lease(rig: Rig) -> None:
    """Where there is neither value nor lease, the request gets the lease; the next ones learn how long it lasts."""
    first = await rig.answer(MINE, 5)
    others = [await rig.answer(token) for token in (THEIRS, THEIRS, OTHERS)]

    assert ("own", None) == (first.kind, first.stored)
    assert [("wait", None)] * 3 == [(answer.kind, answer.stored) for answer in others]
    assert all(3 < answer.left <= 5 for answer in others)


async def test_repeated_request_gets_the_lease_again(rig: Rig) -> None:
    """The holder of the lease, whose answer was lost, gets it anew; who waits is not forgotten."""
    await rig.acquire(MINE, 5)
    await rig.acquire(THEIRS)

    assert "own" == await rig.acquire(MINE, 9)
    assert 7 < (await rig.answer(THEIRS)).left <= 9
    await rig.fill(MINE)
    assert [b"filled"] == await rig.published()


async def test_lease_passes_from_a_previous_token(rig: Rig) -> None:
    """A flight whose first request was not answered gets the lease under its new token; the first token loses it."""
    assert "own" == await rig.acquire(MINE, previous_token=THEIRS)
    await rig.acquire(OTHERS)

    assert "own" == await rig.acquire(THEIRS, 5, previous_token=MINE)
    assert "wait" == await rig.acquire(OTHERS, previous_token=MINE)
    assert "wait" == await rig.acquire(MINE)  # the first request, late
    assert not await rig.fill(MINE)
    assert await rig.fill(THEIRS)
    assert [b"filled"] == await rig.published()


async def test_lease_that_has_expired(rig: Rig) -> None:
    """It can neither be renewed nor used to store; the next request gets a new one."""
    await rig.acquire(MINE)
    await rig.expire_lease()

    assert [False] * 3 == [await rig.renew(MINE), await rig.release(MINE), await rig.fill(MINE)]
    assert ((), "own") == (await rig.stored_by(), await rig.acquire(THEIRS))


async def test_renewal_counts_from_now_on(rig: Rig) -> None:
    """The holder's lease lasts as long as asked, however often it is renewed; who waits is not forgotten."""
    await rig.acquire(MINE, 5)
    await rig.acquire(THEIRS)

    assert [True] * 2 == [await rig.renew(MINE, 9) for _ in range(2)]
    assert 7 < (await rig.answer(THEIRS)).left <= 9
    await rig.release(MINE)
    assert [b"released"] == await rig.published()


async def test_lease_of_another_flight(rig: Rig) -> None:
    """It is neither renewed nor released, nor is its message published; nor is a lease made that is not there."""
    before = await rig.renew(MINE), await rig.release(MINE)
    await rig.acquire(THEIRS, 5)
    await rig.acquire(MINE)
    after = [(await rig.renew(MINE, 9), await rig.release(MINE)) for _ in range(2)]

    assert [(False, False)] * 3 == [before, *after]
    assert (await rig.answer(MINE)).left <= 5
    assert [] == await rig.published()


async def test_lease_of_a_refresh(rig: Rig) -> None:
    """A request that rejects any value takes the lease from its holder, who can no longer store."""
    await rig.acquire(THEIRS)
    await rig.fill(THEIRS)
    for token in (OTHERS, "w" * 22):
        await rig.acquire(token, reject=b"=" + THEIRS.encode())

    assert ["own"] * 2 == [await rig.acquire(MINE, reject=b"*") for _ in range(2)]
    assert (False, (THEIRS,)) == (await rig.renew(OTHERS), await rig.stored_by())
    assert [False, True] == [await rig.fill(token) for token in (OTHERS, MINE)]
    assert ([b"filled"], (MINE,)) == (await rig.published(), await rig.stored_by())


# The value


async def test_stored_value_is_found(rig: Rig) -> None:
    """Every request gets the envelope and the seconds that it has left, and no lease."""
    await rig.acquire(THEIRS)
    await rig.fill(THEIRS)

    assert all([3 < await rig.ttl() <= 5 for _ in range(2)])
    assert not await rig.renew(OTHERS)


async def test_value_is_found_while_another_flight_loads(rig: Rig) -> None:
    """A request that can use the value gets it, and does not count as waiting."""
    await rig.acquire(THEIRS)
    await rig.fill(THEIRS)
    await rig.acquire(MINE, reject=b"=" + THEIRS.encode())

    assert ["hit"] * 2 == [await rig.acquire(token) for token in (OTHERS, MINE)]
    await rig.fill(MINE)
    assert [] == await rig.published()


async def test_rejected_value_is_not_found_again(rig: Rig) -> None:
    """A request that names the flight of a value gets the lease, or waits; any other value is a hit."""
    rejected = b"=" + THEIRS.encode()
    await rig.acquire(THEIRS)
    await rig.fill(THEIRS)

    assert ["hit", "own", "wait"] == [
        await rig.acquire(THEIRS),
        await rig.acquire(MINE, reject=rejected),
        await rig.acquire(OTHERS, reject=rejected),
    ]
    await rig.fill(MINE)
    assert "hit" == await rig.acquire(OTHERS, reject=rejected)


@pytest.mark.parametrize("waiting", [0, 1, 2])
@pytest.mark.parametrize("end", ["fill", "fill of a refresh", "release"])
async def test_end_of_a_load_is_published_if_a_flight_waits(end: str, waiting: int, rig: Rig) -> None:
    """There is one message, however many wait and however often the end is repeated; a refresh always publishes."""
    await rig.acquire(MINE)
    for _ in range(waiting):
        await rig.acquire(THEIRS)

    for _ in range(2):
        await (rig.release(MINE) if end == "release" else rig.fill(MINE, always_publish=end == "fill of a refresh"))

    message = b"released" if end == "release" else b"filled"
    assert [message] * (waiting > 0 or end == "fill of a refresh") == await rig.published()
    assert ("own" if end == "release" else "hit") == await rig.acquire(THEIRS)


async def test_repeated_fill_was_stored(rig: Rig) -> None:
    """A fill whose answer was lost is confirmed; the lease is gone, and the value lives no longer."""
    await rig.acquire(MINE)

    assert [True] * 2 == [await rig.fill(MINE, ttl=ttl) for ttl in (5, 9)]
    assert (False, (MINE,), True) == (await rig.renew(MINE), await rig.stored_by(), await rig.ttl() <= 5)


async def test_fill_without_the_lease_is_refused(rig: Rig) -> None:
    """Without a lease, or with another flight's, nothing is stored or published, and the lease stays."""
    before = [await rig.fill(MINE) for _ in range(2)]
    await rig.acquire(THEIRS)

    assert [False] * 4 == [*before, *[await rig.fill(MINE) for _ in range(2)]]
    assert ((), []) == (await rig.stored_by(), await rig.published())
    assert await rig.renew(THEIRS)


async def test_refresh_that_lost_the_lease_drops_the_value(rig: Rig) -> None:
    """What a refresh may not replace may be older; the lease of another flight is newer, and stays."""
    await rig.acquire(THEIRS)
    await rig.fill(THEIRS)
    for token in (MINE, OTHERS):
        await rig.acquire(token, reject=b"*")

    assert (False, ()) == (await rig.fill(MINE, always_publish=True), await rig.stored_by())
    assert [True, False] == [await rig.fill(token) for token in (OTHERS, MINE)]
    assert ((OTHERS,), [b"filled"]) == (await rig.stored_by(), await rig.published())


# Invalidation


async def test_invalidation_drops_value_and_lease(rig: Rig) -> None:
    """Both are gone, and it is published, also if there was nothing."""
    await rig.acquire(MINE)
    await rig.fill(MINE)
    await rig.acquire(MINE, reject=b"*")
    for _ in range(2):
        await rig.invalidate()

    assert ((), False) == (await rig.stored_by(), await rig.renew(MINE))
    assert [b"invalidated"] * 2 == await rig.published()


async def test_i3_fill_after_an_invalidation_is_refused(rig: Rig) -> None:
    """Also when another flight has the lease by then, or has stored."""
    await rig.acquire(MINE)
    await rig.invalidate()
    before = await rig.fill(MINE)
    await rig.acquire(THEIRS)

    assert [False, False, True, False] == [before, *[await rig.fill(token) for token in (MINE, THEIRS, MINE)]]
    assert (THEIRS,) == await rig.stored_by()


# Versions


@pytest.mark.parametrize(
    ("lowest", "version", "is_stored"),
    [
        (7, 6, False),
        (7, 7, True),
        (7, 8, True),
        (10, 9, False),  # as numbers, not as text
        (LATEST, LATEST - 1, False),
        (LATEST, LATEST, True),
        (1, 0, False),
        (0, 0, True),
        (7, None, True),
        (None, 0, True),
    ],
)
@pytest.mark.parametrize("source", ["invalidation", "value"])
async def test_version_that_is_too_low(
    source: str, lowest: int | None, version: int | None, is_stored: bool, rig: Rig
) -> None:
    """A value older than an invalidation asked for, or than the stored one, is not stored; the lease ends."""
    if source == "value":
        await rig.acquire(THEIRS)
        await rig.fill(THEIRS, lowest)
    else:
        await rig.invalidate(lowest)
    await rig.acquire(MINE, reject=b"*")

    assert (is_stored, False) == (await rig.fill(MINE, version), await rig.renew(MINE))
    assert ((MINE,) if is_stored else (THEIRS,) if source == "value" else ()) == await rig.stored_by()


async def test_lowest_version_never_falls(rig: Rig) -> None:
    """An invalidation that names a lower version, or none, leaves it as it is."""
    for version in (7, 10, 9, None):
        await rig.invalidate(version)

    for version, is_stored in ((9, False), (10, True)):
        await rig.acquire(MINE)
        assert is_stored == await rig.fill(MINE, version)


@pytest.mark.parametrize("lowest", [None, 5, 8])
async def test_refresh_with_an_old_version_drops_the_value(lowest: int | None, rig: Rig) -> None:
    """What a refresh may not replace may be older than it; the higher version is the lowest from then on."""
    await rig.acquire(THEIRS)
    await rig.fill(THEIRS, 7)
    if lowest == 8:
        await rig.invalidate(lowest)
        await rig.published()
    await rig.acquire(MINE, reject=b"*")

    assert (False, ()) == (await rig.fill(MINE, 6, always_publish=True), await rig.stored_by())
    assert [b"filled"] == await rig.published()
    await rig.acquire(THEIRS)
    assert not await rig.fill(THEIRS, 6)


# A value that was not stored


@pytest.mark.parametrize("reason", ["release", "version"])
async def test_value_that_was_not_stored_lets_others_load_alone(reason: str, rig: Rig) -> None:
    """For a second all requests are told to load alone, and no token has a lease there; repeated, nothing changes."""
    await rig.invalidate(7)
    await rig.acquire(MINE)
    await rig.acquire(THEIRS)
    await rig.published()
    message = b"released" if reason == "release" else b"filled"

    ended = [await (rig.release(MINE, is_unstored=True) if reason == "release" else rig.fill(MINE, 6)) for _ in "12"]
    answers = [await rig.answer(token) for token in (THEIRS, MINE, THEIRS)]

    assert [reason == "release", False] == ended
    assert ["alone"] * 3 == [answer.kind for answer in answers]
    assert all(0 < answer.left <= 1 for answer in answers)
    assert [False] * 3 == [await rig.renew(MINE), await rig.release(THEIRS), await rig.fill(THEIRS)]
    assert [message] == await rig.published()
    await rig.expire_lease()
    assert "own" == await rig.acquire(THEIRS)


async def test_value_that_was_not_stored_and_that_no_flight_waits_for(rig: Rig) -> None:
    """The next flight may store what it loads."""
    await rig.acquire(MINE)

    assert (True, "own") == (await rig.release(MINE, is_unstored=True), await rig.acquire(THEIRS))


@pytest.mark.parametrize("change", ["refresh", "invalidation"])
async def test_change_ends_the_second_of_loading_alone(change: str, rig: Rig) -> None:
    """A refresh gets the lease in spite of it, and an invalidation ends it; what is loaded then is stored."""
    await rig.acquire(MINE)
    await rig.acquire(THEIRS)
    await rig.release(MINE, is_unstored=True)

    if change == "invalidation":
        await rig.invalidate()
    assert "own" == await rig.acquire(THEIRS, reject=b"*" if change == "refresh" else b"")
    assert (True, "hit") == (await rig.fill(THEIRS), await rig.acquire(MINE))


# Values that are not fresh any more


async def be_told(rig: Rig, kind: str) -> None:
    """Let the next request that finds no fresh value get *kind*."""
    if kind != "own":
        await rig.acquire(THEIRS, reject=b"*")
    if kind == "alone":
        await rig.acquire(OTHERS, reject=b"=" + MINE.encode())
        await rig.release(THEIRS, is_unstored=True)
    if kind == "backoff":
        await rig.fail(THEIRS, LoadFailure(10, 30, "OSError"))


@pytest.mark.parametrize(
    ("left", "stale", "window", "margin", "expected"),
    [
        (60, 0, 0, 0, "fresh"),
        (60, 10, 0, 0, "fresh"),
        (5, 10, 10, 0, "old"),
        (5, 10, 99, 0, "old"),
        (5, 10, 6, 0, "old"),
        (5, 10, 4, 0, "too old"),
        (5, 10, 0, 0, "too old"),
        (60, 10, 0, 45, "fresh"),
        (60, 10, 0, 55, "old"),
        (60, 0, 0, 70, "old"),
    ],
)
@pytest.mark.parametrize("kind", ["own", "wait", "alone", "backoff"])
async def test_value_is_fresh_or_old_or_too_old(  # noqa: PLR0917  # the parts of a case
    left: float, stale: float, window: float, margin: float, expected: str, kind: str, rig: Rig
) -> None:
    """A fresh value is a hit; an old one comes with the lease, or with its denial; one that is too old is none."""
    envelope = await rig.put(MINE, left, stale)
    if expected != "fresh":
        await be_told(rig, kind)

    answer = await rig.answer(OTHERS, window=window, margin=margin)

    assert answer.kind == ("hit" if expected == "fresh" else kind)
    assert (answer.stored and answer.stored.envelope) == (None if expected == "too old" else envelope)
    assert answer.stored is None or left - 2 < (answer.stored.ttl or 0) <= left
    assert (kind == "own" and expected != "fresh") == await rig.renew(OTHERS)


async def test_old_value_that_was_seen(rig: Rig) -> None:
    """A request that names its flight does not get it again."""
    await rig.put(THEIRS, 5, 10)

    answer = await rig.answer(MINE, window=10, reject=b"=" + THEIRS.encode())

    assert ("own", None) == (answer.kind, answer.stored)


@pytest.mark.parametrize(
    ("left", "stale", "is_found"), [(60, 0, True), (60, 10, True), (5, 10, True), (3, 10, False), (0, 0, False)]
)
async def test_refresh_gets_what_it_is_to_replace(left: float, stale: float, is_found: bool, rig: Rig) -> None:
    """Beside the lease it gets the value, fresh or old, unless that is too old."""
    envelope = await rig.put(THEIRS, left, stale) if left else None

    answer = await rig.answer(MINE, window=6, reject=b"*")

    assert ("own", envelope if is_found else None) == (answer.kind, answer.stored and answer.stored.envelope)


A, B, C = (name * 8 for name in (b"a", b"b", b"c"))  # releases


async def put_releases(rig: Rig) -> None:
    """Store the values of three releases: a fresh one, an old one, and one that is never stale."""
    await rig.put("a" * 22, 60, 50, fingerprint=A)
    await rig.put("b" * 22, 5, 10, fingerprint=B)
    await rig.put("c" * 22, 30, 0, fingerprint=C)


async def lives(rig: Rig) -> list[tuple[str, int, int] | str]:
    """Return for each release what it is told, and the seconds that its value has left, and its age, if it gets one."""
    told: list[tuple[str, int, int] | str] = []
    for fingerprint in (A, B, C):
        answer = await rig.answer(MINE, fingerprint=fingerprint, window=99)
        if answer.stored is None:
            told.append(answer.kind)
            continue
        opened = unseal("menu-7", answer.stored.envelope, fingerprint)
        assert opened is not None
        left = (answer.stored.ttl or 0) - opened.lag
        told.append((answer.kind, round(left), round(opened.life - left + opened.stale)))
    return told


async def test_each_release_has_its_own_window(rig: Rig) -> None:
    """Of values in one envelope, each is fresh, or old, by its own life."""
    await put_releases(rig)

    assert [("hit", 60, 90), ("own", 5, 105), ("hit", 30, 70)] == await lives(rig)


# Soft invalidation


async def test_soft_invalidation_of_several_releases(rig: Rig) -> None:
    """Each value keeps its age, and has no more left than its window; what has none is gone."""
    await put_releases(rig)
    for _ in range(2):
        await rig.invalidate(is_soft=True)

    assert [("own", 50, 90), ("own", 5, 105), "own"] == await lives(rig)
    assert {"a" * 22, "b" * 22} == {*await rig.stored_by()}


@pytest.mark.parametrize(("left", "stale", "kept"), [(60, 10, 10), (5, 10, 5), (60, 0, 0), (0, 0, 0)])
async def test_value_is_stale_after_a_soft_invalidation(left: float, stale: float, kept: float, rig: Rig) -> None:
    """It stays for its window, and no longer than before, however often that is repeated; all of it is published."""
    if left:
        await rig.put(THEIRS, left, stale)
    for _ in range(3):
        await rig.invalidate(is_soft=True)

    assert [b"invalidated"] * 3 == await rig.published()
    assert ("own", None) == ((none := await rig.answer(MINE)).kind, none.stored)
    answer = await rig.answer(MINE, window=10)
    assert "own" == answer.kind
    assert kept - 2 < (0 if answer.stored is None else answer.stored.ttl or 0) <= kept
    assert (True, "hit") == (await rig.fill(MINE), await rig.acquire(THEIRS))


@pytest.mark.parametrize("is_refilled", [False, True])
async def test_i3_fill_after_a_soft_invalidation_is_refused(is_refilled: bool, rig: Rig) -> None:
    """A load that began before loses its lease, also when another flight has stored since; the stale value stays."""
    await rig.put(OTHERS, 60, 10)
    await rig.acquire(MINE, reject=b"=" + OTHERS.encode())
    await rig.invalidate(is_soft=True)
    if is_refilled:
        assert "own" == await rig.acquire(THEIRS)
        assert await rig.fill(THEIRS)

    assert not await rig.fill(MINE)
    assert (THEIRS if is_refilled else OTHERS,) == await rig.stored_by()


@pytest.mark.parametrize(("version", "is_stored"), [(6, False), (7, True)])
async def test_soft_invalidation_with_a_version(version: int, is_stored: bool, rig: Rig) -> None:
    """Lower versions are not stored from then on, also in place of the stale value."""
    await rig.put(THEIRS, 60, 10)
    await rig.invalidate(7, is_soft=True)
    await rig.acquire(MINE)

    assert is_stored == await rig.fill(MINE, version)
    assert (MINE if is_stored else THEIRS,) == await rig.stored_by()


# A load that failed


FAILURE = LoadFailure(10, 65, "TimeoutError")


async def pauses(rig: Rig, number: int, failure: LoadFailure = FAILURE) -> list[int]:
    """Return the seconds to pause for after each of so many failures."""
    found = []
    for _ in range(number):
        assert "own" == await rig.acquire(MINE)
        found.append(round(await rig.fail(MINE, failure)))
        await rig.end_pause()
    return found


async def test_pause_grows_with_each_failure(rig: Rig) -> None:
    """It doubles, up to the longest; failures are counted on after the pause, but not beyond nine."""
    assert [10, 20, 40, 65, 65] == await pauses(rig, 5)
    await rig.invalidate()
    assert [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 512, 512] == await pauses(rig, 12, LoadFailure(1, 9999, "OSError"))


@pytest.mark.parametrize("end", ["fill", "invalidation", "soft invalidation", "expiry"])
async def test_count_of_failures_ends(end: str, rig: Rig) -> None:
    """After a value that was stored, an invalidation, or a minute without a load, the first pause is the next."""
    await pauses(rig, 2)
    if end == "fill":
        await rig.acquire(MINE)
        await rig.fill(MINE)
        await rig.acquire(MINE, reject=b"*")
    elif end == "expiry":
        await rig.expire_lease()
        await rig.acquire(MINE)
    else:
        await rig.invalidate(is_soft=end == "soft invalidation")
        await rig.acquire(MINE)

    assert 10 == round(await rig.fail(MINE, FAILURE))


async def test_failure_is_told_for_the_whole_pause(rig: Rig) -> None:
    """No request gets the lease, and no token has it; a release or a fill that comes late changes nothing."""
    await rig.acquire(MINE)
    left = await rig.fail(MINE, FAILURE)

    assert [False] * 2 == [await rig.release(token) for token in (MINE, THEIRS)]
    assert [False] * 4 == [await rig.fill(MINE), await rig.fill(THEIRS), await rig.renew(MINE), await rig.renew(THEIRS)]
    again = [await rig.answer(token) for token in (MINE, THEIRS, MINE)]
    assert [("backoff", "TimeoutError")] * 3 == [(answer.kind, answer.failure) for answer in again]
    assert all(left - 2 < answer.left <= left for answer in again)


@pytest.mark.parametrize("waiting", [0, 2])
async def test_failure_wakes_the_flights_that_wait(waiting: int, rig: Rig) -> None:
    """They learn of it at once; where none waits, nothing is published."""
    await rig.acquire(MINE)
    for _ in range(waiting):
        await rig.acquire(THEIRS)

    await rig.fail(MINE, FAILURE)

    assert [b"released"] * (waiting > 0) == await rig.published()


async def test_refresh_ignores_a_pause(rig: Rig) -> None:
    """It gets the lease, with the number of failures, and its own failure is one more."""
    await rig.acquire(MINE)
    await rig.fail(MINE, FAILURE)

    assert "own" == await rig.acquire(THEIRS, reject=b"*")
    assert "own" == await rig.acquire(MINE, previous_token=THEIRS)
    assert "wait" == await rig.acquire(OTHERS)
    assert 20 == round(await rig.fail(MINE, FAILURE))


@pytest.mark.parametrize(
    ("reason", "text"), [("", ""), ("E" * 99, "E" * 64), ("Out of\nsoup\x00é", "Out_of_soup__"), ("w", "w")]
)
async def test_text_of_a_failure(reason: str, text: str, rig: Rig) -> None:
    """What is not safe, or too long, is left out."""
    await rig.acquire(MINE)
    failure = LoadFailure(10, 65, reason)

    await rig.fail(MINE, failure)

    assert text == failure.text


# Tags


async def test_mark_of_a_tag_stays_until_it_is_invalidated(rig: Rig) -> None:
    """Every request gets the same mark; each invalidation makes another one, and is published."""
    tag, other = (rig.key.replace("menu-7", name) + ":t" for name in ("menus", "soups"))
    marks = [(await rig.answer(MINE, tags=(tag, other))).marks for _ in range(2)]
    for random in (b"another one", b"yet another"):
        await rig.store.invalidate_tag(tag, random, 60, b"tagged")
        marks.append((await rig.answer(MINE, tags=(tag, other))).marks)

    assert marks[0] == marks[1]
    assert [3, 1] == [len({pair[position] for pair in marks}) for position in range(2)]
    assert {11} == {len(mark) for pair in marks for mark in pair}
    assert [b"tagged"] * 2 == await rig.published()
