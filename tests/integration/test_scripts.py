"""Each script alone, on a real server: every reply, and twice with one token."""

import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from onlooker import Onlooker
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from stored import bytes_at

from stampede_guard._codecs.fingerprint import NO_FINGERPRINT
from stampede_guard._tokens import new_mark
from stampede_guard.stores._envelope import seal, token_of, unseal
from stampede_guard.stores._redis import scripts
from stampede_guard.stores._redis.scripts import Script

MINE = "m" * 22
THEIRS = "t" * 22
LAST = 10_000
LATEST = 2**53 - 1

Run = Callable[..., Awaitable[Any]]


@pytest.fixture
def run(admin: Redis) -> Run:
    """Return what runs a script."""

    async def run(script: Script, keys: list[str], *args: str | bytes | int) -> Any:
        return await admin.eval(script.text, len(keys), *keys, *args)

    return run


@pytest.fixture
def acquire(run: Run, key: str) -> Run:
    """Return what runs ACQUIRE for a token."""

    async def acquire(  # noqa: PLR0917  # as the script has it
        token: str,
        lease: int = 60_000,
        unwanted: str = "",
        last: int = LAST,
        previous_token: str = "",
        fingerprint: bytes = NO_FINGERPRINT,
    ) -> Any:
        keys = [f"{key}:v", f"{key}:l"]
        return await run(scripts.ACQUIRE, keys, token, lease, last, unwanted, previous_token, fingerprint)

    return acquire


@pytest.fixture
def fill(run: Run, key: str, namespace: str) -> Run:
    """Return what runs FILL for a token."""

    async def fill(  # what there is to vary
        token: str,
        version: int | None = None,
        *,
        life: int = 60_000,
        always_publish: int = 0,
        payload: bytes = b"soup",
        fingerprint: bytes = NO_FINGERPRINT,
        longest: int = LAST,
    ) -> Any:
        keys = [f"{key}:v", f"{key}:l", f"{key}:g"]
        written = "" if version is None else version
        envelope = seal("menus:menu-7", payload, token, version, (), fingerprint)
        args = token, envelope, life, written, 60_000, namespace, "filled", always_publish, longest
        return await run(scripts.FILL, keys, *args)

    return fill


@pytest.fixture
def renew(run: Run, key: str) -> Run:
    """Return what runs RENEW for a token."""

    async def renew(token: str, lease: int = 60_000) -> Any:
        return await run(scripts.RENEW, [f"{key}:l"], token, lease)

    return renew


@pytest.fixture
def release(run: Run, key: str, namespace: str) -> Run:
    """Return what runs RELEASE for a token."""

    async def release(token: str, *unstored: int) -> Any:
        return await run(scripts.RELEASE, [f"{key}:l"], token, namespace, "released", *unstored)

    return release


@pytest.fixture
def invalidate(run: Run, key: str, namespace: str) -> Run:
    """Return what runs INVALIDATE."""

    async def invalidate(version: int | None = None, life: int = 60_000) -> Any:
        keys = [f"{key}:v", f"{key}:l", f"{key}:g"]
        return await run(scripts.INVALIDATE, keys, "" if version is None else version, life, namespace, "invalidated")

    return invalidate


@pytest.fixture
def mark(run: Run, key: str) -> Run:
    """Return what runs MARK."""

    async def mark(first: str, life: int = 60_000) -> Any:
        return await run(scripts.MARK, [f"{key}:t"], first, life)

    return mark


@pytest.fixture
async def bus(admin: Redis, namespace: str) -> AsyncIterator[Onlooker]:
    """Return who hears what the scripts publish."""
    async with Onlooker(admin, namespace) as onlooker:
        yield onlooker


def envelope_of(token: str, version: int | None = None) -> bytes:
    """Return an envelope as a flight stores it."""
    return seal("menus:menu-7", b"soup", token, version)


@pytest.mark.parametrize("script", [value for value in vars(scripts).values() if isinstance(value, Script)])
async def test_digests_are_what_the_server_computes(script: Script, admin: Redis) -> None:
    """A script is asked for by the digest under which the server files its text."""
    digest = await admin.script_load(script.text)

    assert script.digest == (digest.decode() if isinstance(digest, bytes) else digest)


async def test_acquire_of_nothing_owns(acquire: Run, admin: Redis, key: str) -> None:
    """Where there is neither value nor lease, the token gets the right, for as long as was asked."""
    assert [b"OWN", 0] == await acquire(MINE, 5000)

    assert MINE.encode() == await admin.get(f"{key}:l")
    assert 3000 < await admin.pttl(f"{key}:l") <= 5000
    assert [f"{key}:l".encode()] == await admin.keys(f"{key.replace('{', '?').replace('}', '?')}:*")


async def test_acquire_twice_owns_twice(acquire: Run, admin: Redis, key: str) -> None:
    """With the same token the right is the same, and lasts from now on."""
    await acquire(MINE, 5000)

    assert [b"OWN", 0] == await acquire(MINE, 9000)
    assert MINE.encode() == await admin.get(f"{key}:l")
    assert 7000 < await admin.pttl(f"{key}:l") <= 9000


async def test_acquire_waits_for_another(acquire: Run, admin: Redis, key: str) -> None:
    """Another's lease says how long it lasts, and notes once, however many wait, that somebody does."""
    await acquire(THEIRS, 5000)

    for token in (MINE, MINE, "n" * 22):
        verdict, left = await acquire(token)
        assert verdict == b"WAIT"
        assert 3000 < left <= 5000

    assert f"{THEIRS}w".encode() == await admin.get(f"{key}:l")
    assert await admin.pttl(f"{key}:l") <= 5000


async def test_acquire_again_keeps_the_waiting_in_mind(acquire: Run, admin: Redis, key: str) -> None:
    """The owner who asks a second time does not forget that somebody waits."""
    await acquire(MINE)
    await acquire(THEIRS)

    assert [b"OWN", 0] == await acquire(MINE)
    assert f"{MINE}w".encode() == await admin.get(f"{key}:l")


async def test_acquire_takes_over_from_a_former_token(acquire: Run, admin: Redis, key: str) -> None:
    """A flight whose first request was lost has the right under its new token, if the first came through or not."""
    assert [b"OWN", 0] == await acquire(MINE, previous_token=THEIRS)
    assert MINE.encode() == await admin.get(f"{key}:l")

    await acquire("n" * 22)
    assert [b"OWN", 0] == await acquire(THEIRS, 5000, previous_token=MINE)
    assert f"{THEIRS}w".encode() == await admin.get(f"{key}:l")
    assert await admin.pttl(f"{key}:l") <= 5000
    assert (await acquire("n" * 22, previous_token=MINE))[0] == b"WAIT"
    assert (await acquire(MINE))[0] == b"WAIT"  # the first request, late


async def test_acquire_reads_a_value(acquire: Run, fill: Run, admin: Redis, key: str) -> None:
    """A value comes with its remaining life, and no lease is made."""
    await acquire(THEIRS)
    await fill(THEIRS, life=5000)

    for _ in range(2):
        verdict, life, value = await acquire(MINE)
        assert (b"HIT", envelope_of(THEIRS)) == (verdict, value)
        assert 3000 < life <= 5000
    assert not await admin.exists(f"{key}:l")


async def test_acquire_reads_a_value_while_somebody_loads(acquire: Run, admin: Redis, key: str) -> None:
    """A value wins over a lease, be it one's own or another's, and does not count as waiting."""
    await acquire(THEIRS)
    await admin.set(f"{key}:v", envelope_of("o" * 22))

    assert (await acquire(MINE))[0] == b"HIT"
    assert (await acquire(THEIRS))[0] == b"HIT"
    assert THEIRS.encode() == await admin.get(f"{key}:l")


async def test_acquire_cuts_what_is_too_long(acquire: Run, admin: Redis, key: str) -> None:
    """No more is read than was asked for; a value without an end says so."""
    await admin.set(f"{key}:v", b"x" * 100)

    assert [b"HIT", -1, b"x" * 50] == await acquire(MINE, last=49)


@pytest.mark.parametrize("value", [envelope_of(THEIRS), b"x", b"xxxx", b"x" * 30])
async def test_acquire_passes_over_what_has_been_seen(value: bytes, acquire: Run, admin: Redis, key: str) -> None:
    """What its token says is unwanted, garbage without one included, counts as nothing; another value does not."""
    await admin.set(f"{key}:v", value)
    unwanted = "=" + token_of(value, NO_FINGERPRINT).decode()

    assert (await acquire(MINE))[0] == b"HIT"
    assert [b"OWN", 0] == await acquire(MINE, unwanted=unwanted)
    assert (await acquire(THEIRS, unwanted=unwanted))[0] == b"WAIT"
    await admin.set(f"{key}:v", envelope_of("o" * 22))
    assert (await acquire(MINE, unwanted=unwanted))[0] == b"HIT"


async def test_acquire_seizes(acquire: Run, fill: Run, admin: Redis, key: str) -> None:
    """With `*` the right is taken from whoever has it, whatever is stored, and whoever waits is kept in mind."""
    await acquire(THEIRS)
    await fill(THEIRS)
    await acquire(THEIRS, unwanted=f"={THEIRS}")
    await acquire("n" * 22, unwanted=f"={THEIRS}")

    for _ in range(2):
        assert [b"OWN", 0] == await acquire(MINE, 5000, "*")

    assert f"{MINE}w".encode() == await admin.get(f"{key}:l")
    assert await admin.pttl(f"{key}:l") <= 5000
    assert envelope_of(THEIRS) == await admin.get(f"{key}:v")


async def test_acquire_after_a_lease_expired(acquire: Run, admin: Redis, key: str) -> None:
    """Whoever asks first after the end of a lease gets the next."""
    await acquire(THEIRS, 1)
    while await admin.exists(f"{key}:l"):
        pass

    assert [b"OWN", 0] == await acquire(MINE)


async def test_acquire_takes_a_value_of_a_wrong_type_for_none(acquire: Run, fill: Run, admin: Redis, key: str) -> None:
    """A list where the value should be counts as nothing, and a fill replaces it."""
    await admin.rpush(f"{key}:v", "x")

    assert [b"OWN", 0] == await acquire(MINE)
    assert await fill(MINE) == b"OK"
    assert envelope_of(MINE) == await admin.get(f"{key}:v")


async def test_lease_of_a_wrong_type_is_an_error_until_invalidated(  # noqa: PLR0917  # fixtures
    acquire: Run, renew: Run, release: Run, fill: Run, invalidate: Run, admin: Redis, key: str
) -> None:
    """A list where the lease should be is refused and changed by none but an invalidation."""
    await admin.rpush(f"{key}:l", "x")

    for script in (acquire, renew, release, fill):
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await script(MINE)
    assert await admin.exists(f"{key}:l")
    assert not await admin.exists(f"{key}:v")
    await invalidate()

    assert [b"OWN", 0] == await acquire(MINE)


@pytest.mark.parametrize("garbage", ["x", "x" * 21, "x" * 24])
async def test_garbage_for_a_lease_is_another_s(  # noqa: PLR0917  # fixtures
    garbage: str, acquire: Run, renew: Run, release: Run, fill: Run, admin: Redis, key: str
) -> None:
    """What is no token of ours is waited for, has no end that could be told, and is left as it is."""
    await admin.set(f"{key}:l", garbage)

    assert [b"WAIT", -1] == await acquire(MINE)
    assert (0, 0, b"REJ") == (await renew(MINE), await release(MINE), await fill(MINE))
    assert garbage.encode() == await admin.get(f"{key}:l")


async def test_fill_stores_and_gives_the_right_back(
    acquire: Run, fill: Run, admin: Redis, key: str, bus: Onlooker
) -> None:
    """The owner's value is there for as long as was asked, the lease is not, and nobody is told as nobody waits."""
    await acquire(MINE)

    assert await fill(MINE, life=5000) == b"OK"

    assert envelope_of(MINE) == await admin.get(f"{key}:v")
    assert 3000 < await admin.pttl(f"{key}:v") <= 5000
    assert not await admin.exists(f"{key}:l")
    assert await bus.said() == []


async def test_fill_twice_is_stored_once(acquire: Run, fill: Run, admin: Redis, key: str, bus: Onlooker) -> None:
    """A repeated fill is told that it was stored, and neither prolongs the value nor says so again."""
    await acquire(MINE)
    await acquire(THEIRS)
    await fill(MINE, life=5000)

    assert await fill(MINE, life=9000) == b"DUP"
    assert await admin.pttl(f"{key}:v") <= 5000
    assert await bus.said() == [b"filled"]


@pytest.mark.parametrize(("is_waited_for", "always_publish"), [(True, 0), (False, 1), (True, 1)])
async def test_fill_tells_whoever_waits(
    is_waited_for: bool,  # noqa: FBT001
    always_publish: int,
    acquire: Run,
    fill: Run,
    bus: Onlooker,
) -> None:
    """There is one message when somebody waits, or when all are to know."""
    await acquire(MINE)
    if is_waited_for:
        await acquire(THEIRS)

    await fill(MINE, always_publish=always_publish)

    assert await bus.said() == [b"filled"]


async def test_fill_without_the_right_is_refused(
    acquire: Run, fill: Run, admin: Redis, key: str, bus: Onlooker
) -> None:
    """Without a lease, or with another's, nothing is stored or said, twice as much as once, and the other keeps it."""
    for _ in range(2):
        assert await fill(MINE) == b"REJ"
    await acquire(THEIRS)
    for _ in range(2):
        assert await fill(MINE) == b"REJ"

    assert THEIRS.encode() == await admin.get(f"{key}:l")
    assert not await admin.exists(f"{key}:v")
    assert await bus.said() == []


async def test_fill_after_an_invalidation_is_refused(
    acquire: Run, fill: Run, invalidate: Run, admin: Redis, key: str
) -> None:
    """An invalidation takes the right away, also when somebody else has it by then or has filled."""
    await acquire(MINE)
    await invalidate()
    assert await fill(MINE) == b"REJ"

    await acquire(THEIRS)
    assert await fill(MINE) == b"REJ"
    assert await fill(THEIRS) == b"OK"
    assert await fill(MINE) == b"REJ"
    assert envelope_of(THEIRS) == await admin.get(f"{key}:v")


@pytest.mark.parametrize(
    ("lowest", "version", "reply"),
    [
        (7, 6, b"OLD"),
        (7, 7, b"OK"),
        (7, 8, b"OK"),
        (10, 9, b"OLD"),  # as numbers, not as text
        (LATEST, LATEST - 1, b"OLD"),
        (LATEST, LATEST, b"OK"),
        (1, 0, b"OLD"),
        (0, 0, b"OK"),
        (7, None, b"OK"),
    ],
)
async def test_fill_compares_with_the_lowest_version(  # noqa: PLR0917  # fixtures
    lowest: int, version: int | None, reply: bytes, acquire: Run, fill: Run, invalidate: Run, admin: Redis, key: str
) -> None:
    """A version below the lowest acceptable one is not stored, and the right is given back all the same."""
    await invalidate(lowest)
    await acquire(MINE)

    assert reply == await fill(MINE, version)
    assert (reply == b"OK") == await admin.exists(f"{key}:v")
    assert not await admin.exists(f"{key}:l")


@pytest.mark.parametrize(
    ("stored", "version", "reply"),
    [(7, 6, b"OLD"), (7, 7, b"OK"), (10, 9, b"OLD"), (LATEST, LATEST - 1, b"OLD"), (7, None, b"OK"), (None, 0, b"OK")],
)
async def test_fill_compares_with_the_stored_version(  # noqa: PLR0917  # fixtures
    stored: int | None, version: int | None, reply: bytes, acquire: Run, fill: Run, admin: Redis, key: str
) -> None:
    """A value is not replaced by an older one."""
    await acquire(THEIRS)
    await fill(THEIRS, stored)
    await acquire(MINE, unwanted="*")

    assert reply == await fill(MINE, version)
    expected = envelope_of(MINE, version) if reply == b"OK" else envelope_of(THEIRS, stored)
    assert expected == await admin.get(f"{key}:v")


async def test_refresh_that_lost_the_right_drops_the_value(
    acquire: Run, fill: Run, bus: Onlooker, admin: Redis, key: str
) -> None:
    """What a refresh may not replace may be older; another's right to load is newer, and stays."""
    await acquire(THEIRS)
    await fill(THEIRS)
    await acquire(MINE, unwanted="*")
    await acquire(THEIRS, unwanted="*")
    lease = await admin.get(f"{key}:l")

    assert [b"REJ", 0] == [await fill(MINE, always_publish=1), await admin.exists(f"{key}:v")]
    assert lease == await admin.get(f"{key}:l")
    assert [b"OK", b"REJ"] == [await fill(THEIRS), await fill(MINE)]
    assert await admin.exists(f"{key}:v")
    assert await bus.said() == [b"filled"]


@pytest.mark.parametrize("lowest", [None, 8])
async def test_refresh_with_an_old_version_drops_the_value(  # noqa: PLR0917  # fixtures
    lowest: int | None, acquire: Run, fill: Run, bus: Onlooker, admin: Redis, key: str
) -> None:
    """What a refresh may not replace may be older than it; its version is the lowest from now on."""
    await acquire(THEIRS)
    await fill(THEIRS, 7)
    if lowest is not None:
        await admin.set(f"{key}:g", lowest)
    await acquire(MINE, unwanted="*")

    assert [b"OLD", 0] == [await fill(MINE, 6, always_publish=1), await admin.exists(f"{key}:v")]
    assert str(lowest or 7).encode() == await admin.get(f"{key}:g")
    assert 0 < await admin.pttl(f"{key}:g") <= 60_000
    assert await bus.said() == [b"filled"]
    await acquire(THEIRS)
    assert await fill(THEIRS, 6) == b"OLD"


async def test_refresh_with_an_old_version_and_no_value(
    acquire: Run, fill: Run, invalidate: Run, admin: Redis, key: str
) -> None:
    """Where there is nothing to drop, the lowest version lives no longer for it."""
    await invalidate(7, life=1_000)
    await acquire(MINE, unwanted="*")

    assert await fill(MINE, 6, always_publish=1) == b"OLD"
    assert await admin.pttl(f"{key}:g") <= 1_000


async def test_fill_with_an_old_version_twice(acquire: Run, fill: Run, invalidate: Run, bus: Onlooker) -> None:
    """A repeated fill is refused both times, and all that wait are told once to load, each alone."""
    await invalidate(7)
    await acquire(MINE)
    await acquire(THEIRS)
    await bus.said()

    assert await fill(MINE, 6) == b"OLD"
    assert await fill(MINE, 6) == b"REJ"
    assert await bus.said() == [b"filled"]
    assert [b"ALONE"] * 2 == [(await acquire(token))[0] for token in (THEIRS, MINE)]


@pytest.mark.parametrize(
    "found",
    [
        b"x",
        b"SGv3",
        envelope_of(THEIRS)[:71],
        b"SGv2" + envelope_of(THEIRS, LATEST)[4:],
        struct.pack(">40s", b"\xff" * 40),
    ],
)
async def test_fill_replaces_what_has_no_version(found: bytes, acquire: Run, fill: Run, admin: Redis, key: str) -> None:
    """Garbage, and what another format's header begins, has no version that anything could be too old for."""
    await acquire(MINE)
    await admin.set(f"{key}:v", found)

    assert await fill(MINE, 0) == b"OK"
    assert envelope_of(MINE, 0) == await admin.get(f"{key}:v")


# ── Several releases ─────────────────────────────────────────────────────────────────────────────


RELEASES = [bytes([number]) * 8 for number in range(1, 7)]


async def stored(admin: Redis, key: str) -> list[bytes | None]:
    """Return what each release finds."""
    envelope = await bytes_at(admin, f"{key}:v")
    opened = [unseal("menus:menu-7", envelope, release) for release in RELEASES]
    return [value and value.payload for value in opened]


async def test_values_of_several_releases_stand_side_by_side(acquire: Run, fill: Run, admin: Redis, key: str) -> None:
    """A release finds its own value, also when another stored last; what it has not stored is not there for it."""
    for release, payload in zip(RELEASES[:3], (b"soup", b"", b"salad"), strict=True):
        assert [b"OWN", 0] == await acquire(MINE, fingerprint=release)
        assert await fill(MINE, payload=payload, fingerprint=release) == b"OK"
        assert (await acquire(MINE, fingerprint=release))[0] == b"HIT"

    assert [b"soup", b"", b"salad", None, None, None] == await stored(admin, key)
    assert [b"OWN", 0] == await acquire(MINE, fingerprint=RELEASES[3])


async def test_value_of_a_release_replaces_its_last(acquire: Run, fill: Run, admin: Redis, key: str) -> None:
    """A release has one value of an op at a time."""
    for payload in (b"soup", b"salad"):
        for release in RELEASES[:2]:
            await acquire(MINE, fingerprint=release, unwanted="*")
            await fill(MINE, payload=payload, fingerprint=release)

    assert [b"salad"] * 2 + [None] * 4 == await stored(admin, key)
    assert 2 == (await admin.get(f"{key}:v") or b"")[20]


async def test_releases_are_bounded(acquire: Run, fill: Run, admin: Redis, key: str) -> None:
    """Of five releases, the one that stored longest ago has to go."""
    for release in RELEASES[:5]:
        await acquire(MINE, fingerprint=release)
        await fill(MINE, fingerprint=release)

    assert [None] + [b"soup"] * 4 + [None] == await stored(admin, key)


async def test_bytes_of_releases_are_bounded(acquire: Run, fill: Run, admin: Redis, key: str) -> None:
    """What would not be read at once with the new value is dropped."""
    for release, payload in zip(RELEASES[:3], (bytes(100), bytes(300), bytes(100)), strict=True):
        await acquire(MINE, fingerprint=release)
        await fill(MINE, payload=payload, fingerprint=release, longest=560)

    assert [None, bytes(300), bytes(100)] == (await stored(admin, key))[:3]
    assert len(await admin.get(f"{key}:v") or b"") <= 560


async def test_each_release_s_value_has_its_life(acquire: Run, fill: Run, admin: Redis, key: str) -> None:
    """The envelope lives as long as its longest value; a value that is over before is not found, nor kept."""
    for release, life in zip(RELEASES[:3], (60_000, 400, 30_000), strict=True):
        await acquire(MINE, fingerprint=release)
        await fill(MINE, life=life, fingerprint=release)
    opened = [unseal("menus:menu-7", await bytes_at(admin, f"{key}:v"), release) for release in RELEASES[:3]]
    left = [(await admin.pttl(f"{key}:v")) / 1000 - value.lag for value in opened if value]

    assert pytest.approx([60, 0.4, 30], abs=0.39) == left
    while (await acquire(MINE, fingerprint=RELEASES[1]))[0] == b"HIT":
        pass
    assert (await acquire(MINE, fingerprint=RELEASES[2]))[0] == b"HIT"
    await fill(MINE, fingerprint=RELEASES[3])
    assert [b"soup", None, b"soup", b"soup"] == (await stored(admin, key))[:4]


async def test_refresh_drops_what_other_releases_have(acquire: Run, fill: Run, admin: Redis, key: str) -> None:
    """What is loaded because the answer has changed stands alone: the others' values are older."""
    for release in RELEASES[:2]:
        await acquire(MINE, fingerprint=release)
        await fill(MINE, fingerprint=release)

    await acquire(MINE, fingerprint=RELEASES[0], unwanted="*")
    await fill(MINE, fingerprint=RELEASES[0], always_publish=1)

    assert [b"soup", None] == (await stored(admin, key))[:2]


async def test_invalidation_is_one_for_all_releases(
    acquire: Run, fill: Run, invalidate: Run, admin: Redis, key: str
) -> None:
    """It drops all values and the lease, whichever release has it."""
    for release in RELEASES[:2]:
        await acquire(MINE, fingerprint=release)
        await fill(MINE, fingerprint=release)
    await acquire(MINE, fingerprint=RELEASES[2])
    await invalidate()

    assert await fill(MINE, fingerprint=RELEASES[2]) == b"REJ"
    assert not await admin.exists(f"{key}:v", f"{key}:l")


async def test_fill_of_one_release_is_known_again(acquire: Run, fill: Run) -> None:
    """A fill that is repeated was accepted, also when another release has stored since."""
    for token, release in ((MINE, RELEASES[0]), (THEIRS, RELEASES[1])):
        await acquire(token, fingerprint=release)
        await fill(token, fingerprint=release)

    assert await fill(MINE, fingerprint=RELEASES[0]) == b"DUP"
    assert await fill(MINE, fingerprint=RELEASES[1]) == b"REJ"


async def test_versions_are_those_of_a_release(acquire: Run, fill: Run, admin: Redis, key: str) -> None:
    """A stored version is the lowest for its own release; what it means to another is unknown."""
    await acquire(MINE, fingerprint=RELEASES[0])
    await fill(MINE, 1_700_000_000, fingerprint=RELEASES[0])
    for version, reply in ((7, b"OK"), (6, b"OLD")):
        await acquire(MINE, fingerprint=RELEASES[1], unwanted="*")
        assert reply == await fill(MINE, version, fingerprint=RELEASES[1])

    assert [b"soup", b"soup"] == (await stored(admin, key))[:2]


@pytest.mark.parametrize("change", ["cut", "too many", "of another op"])
async def test_envelope_that_is_not_whole_is_replaced(
    change: str, acquire: Run, fill: Run, admin: Redis, key: str
) -> None:
    """Nothing is kept of an envelope that was changed."""
    foreign = {
        "cut": seal("menus:menu-7", b"soup", THEIRS, fingerprint=RELEASES[0])[:-1],
        "too many": seal("menus:menu-7", b"soup", THEIRS, fingerprint=RELEASES[0]).replace(b"\x01", b"\x05", 1) * 9,
        "of another op": seal("menus:menu-8", b"soup", THEIRS, fingerprint=RELEASES[0]),
    }
    await acquire(MINE, fingerprint=RELEASES[1])
    await admin.set(f"{key}:v", foreign[change], ex=60)

    assert await fill(MINE, fingerprint=RELEASES[1]) == b"OK"
    assert seal("menus:menu-7", b"soup", MINE, fingerprint=RELEASES[1]) == await admin.get(f"{key}:v")


async def test_renew_prolongs_one_s_own(acquire: Run, renew: Run, admin: Redis, key: str) -> None:
    """The owner's lease lasts from now on, however often it is asked, and whoever waits is kept in mind."""
    await acquire(MINE, 5000)
    await acquire(THEIRS)

    for _ in range(2):
        assert await renew(MINE, 9000) == 1
    assert f"{MINE}w".encode() == await admin.get(f"{key}:l")
    assert 7000 < await admin.pttl(f"{key}:l") <= 9000


async def test_renew_leaves_another_s(acquire: Run, renew: Run, admin: Redis, key: str) -> None:
    """A lease that is gone is not made anew, and another's is not prolonged."""
    assert await renew(MINE) == 0
    assert not await admin.exists(f"{key}:l")

    await acquire(THEIRS, 5000)
    for _ in range(2):
        assert await renew(MINE, 9000) == 0
    assert await admin.pttl(f"{key}:l") <= 5000


async def test_release_gives_the_right_back(acquire: Run, release: Run, admin: Redis, key: str, bus: Onlooker) -> None:
    """The lease is gone; repeated, there is nothing to do; nobody is told, as nobody waits."""
    await acquire(MINE)

    assert [1, 0] == [await release(MINE), await release(MINE)]
    assert not await admin.exists(f"{key}:l")
    assert await bus.said() == []


async def test_release_tells_whoever_waits(acquire: Run, release: Run, bus: Onlooker) -> None:
    """There is one message, however often it is repeated; the next flight that asks gets the right to load."""
    await acquire(MINE)
    await acquire(THEIRS)

    await release(MINE)
    await release(MINE)

    assert await bus.said() == [b"released"]
    assert [b"OWN", 0] == await acquire(THEIRS)


async def test_release_without_the_value_lets_the_others_load_alone(  # noqa: PLR0917  # fixtures
    acquire: Run, fill: Run, renew: Run, release: Run, bus: Onlooker, admin: Redis, key: str
) -> None:
    """For a second all that ask are told to load alone, and no token has a right there; repeated, nothing changes."""
    await acquire(MINE)
    await acquire(THEIRS)

    assert [1, 0] == [await release(MINE, 1), await release(MINE, 1)]
    answers = [await acquire(token) for token in (THEIRS, MINE, THEIRS)]
    assert [b"ALONE"] * 3 == [kind for kind, _ in answers]
    assert all(0 < left <= 1_000 for _, left in answers)
    assert [0, 0, b"REJ"] == [await renew(MINE), await release(THEIRS), await fill(THEIRS)]
    assert await bus.said() == [b"released"]
    await admin.pexpire(f"{key}:l", 1)
    while (answer := await acquire(THEIRS))[0] == b"ALONE":
        pass
    assert [b"OWN", 0] == answer


async def test_release_without_the_value_and_without_others(acquire: Run, release: Run) -> None:
    """If no flight waits, the next one may store what it loads."""
    await acquire(MINE)

    assert await release(MINE, 1) == 1
    assert [b"OWN", 0] == await acquire(THEIRS)


@pytest.mark.parametrize("how", ["refresh", "invalidation"])
async def test_word_of_a_value_that_was_not_stored_stops_nothing(
    how: str, acquire: Run, fill: Run, release: Run, invalidate: Run
) -> None:
    """A refresh takes the right in spite of it, and an invalidation removes it; what is loaded then is stored."""
    await acquire(MINE)
    await acquire(THEIRS)
    await release(MINE, 1)

    if how == "invalidation":
        await invalidate()
    assert [b"OWN", 0] == await acquire(THEIRS, unwanted="*" if how == "refresh" else "")
    assert await fill(THEIRS) == b"OK"
    assert (await acquire(MINE))[0] == b"HIT"


async def test_release_leaves_another_s(acquire: Run, release: Run, admin: Redis, key: str, bus: Onlooker) -> None:
    """What somebody else has is not given back, and nobody is told."""
    await acquire(THEIRS)
    await acquire(MINE)

    assert await release(MINE) == 0
    assert f"{THEIRS}w".encode() == await admin.get(f"{key}:l")
    assert await bus.said() == []


async def test_invalidate_drops_value_and_lease(  # noqa: PLR0917  # fixtures
    acquire: Run, fill: Run, invalidate: Run, admin: Redis, key: str, bus: Onlooker
) -> None:
    """Both are gone and all are told, also if there was nothing; without a version none is kept."""
    await acquire(MINE)
    await fill(MINE)
    await acquire(MINE, unwanted="*")

    assert [1, 1] == [await invalidate(), await invalidate()]
    assert not await admin.exists(f"{key}:v", f"{key}:l", f"{key}:g")
    assert await bus.said() == [b"invalidated"] * 2


async def test_invalidate_raises_the_lowest_version(invalidate: Run, admin: Redis, key: str) -> None:
    """The lowest version rises, never falls, and is kept for a while after the last that named one."""
    for version in (7, 10, 9, LATEST, 10):
        assert await invalidate(version, 5000) == 1
    assert f"{LATEST}".encode() == await admin.get(f"{key}:g")
    assert 3000 < await admin.pttl(f"{key}:g") <= 5000

    await invalidate()
    assert f"{LATEST}".encode() == await admin.get(f"{key}:g")
    await invalidate(10, 9000)
    assert 7000 < await admin.pttl(f"{key}:g") <= 9000


async def test_invalidate_drops_what_has_a_wrong_type(invalidate: Run, admin: Redis, key: str) -> None:
    """Whatever there is goes."""
    await admin.rpush(f"{key}:v", "x")
    await admin.rpush(f"{key}:l", "x")

    assert await invalidate() == 1
    assert not await admin.exists(f"{key}:v", f"{key}:l")


@pytest.mark.parametrize("is_list", [False, True], ids=["text", "list"])
async def test_garbage_for_a_lowest_version_is_none(  # noqa: PLR0917  # fixtures
    is_list: bool,  # noqa: FBT001
    acquire: Run,
    fill: Run,
    invalidate: Run,
    admin: Redis,
    key: str,
) -> None:
    """What is no number forbids nothing, and is replaced by the next invalidation with a version."""
    await (admin.rpush(f"{key}:g", "x") if is_list else admin.set(f"{key}:g", "x"))
    await acquire(MINE)

    assert await fill(MINE, 0) == b"OK"
    assert await invalidate(0) == 1
    assert await admin.get(f"{key}:g") == b"0"


async def test_mark_is_made_once(mark: Run, admin: Redis, key: str) -> None:
    """The first mark stays, and lasts for as long as was asked."""
    first, second = await mark("first", 5000), await mark("second", 5000)

    assert first == second == await admin.get(f"{key}:t")
    assert len(first) == 11
    assert 3000 < await admin.pttl(f"{key}:t") <= 5000


@pytest.mark.parametrize(("left", "is_prolonged"), [(2000, True), (4000, False), (None, True)])
async def test_mark_is_prolonged_when_it_nears_its_end(
    left: int | None,
    is_prolonged: bool,  # noqa: FBT001
    mark: Run,
    admin: Redis,
    key: str,
) -> None:
    """With less than half of its life left, a mark that is asked for gets a whole one again."""
    await admin.set(f"{key}:t", "first", px=left)

    assert await mark("second", 6000) == b"first"
    assert (5000 < await admin.pttl(f"{key}:t") <= 6000) == is_prolonged


async def test_mark_never_comes_back(mark: Run, admin: Redis, key: str) -> None:
    """A request that is executed again, long after, makes another mark of the same random bytes."""
    first = await mark("first")
    await admin.delete(f"{key}:t")

    assert first != await mark("first")


async def test_mark_of_a_wrong_type_is_an_error(mark: Run, admin: Redis, key: str) -> None:
    """A list where the mark should be is refused."""
    await admin.rpush(f"{key}:t", "x")

    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await mark("first")


@pytest.mark.parametrize("kind", ["none", "text", "list"])
async def test_invalidate_tag_replaces_the_mark(  # noqa: PLR0917  # fixtures
    kind: str, run: Run, admin: Redis, key: str, namespace: str, bus: Onlooker
) -> None:
    """Whatever was there, the mark is a new one each time, for as long as was asked; all are told."""
    if kind == "text":
        await admin.set(f"{key}:t", "first")
    elif kind == "list":
        await admin.rpush(f"{key}:t", "x")

    marks = set()
    for _ in range(2):
        assert await run(scripts.INVALIDATE_TAG, [f"{key}:t"], "second", 5000, namespace, "tagged") == 1
        marks.add(await admin.get(f"{key}:t"))

    assert [11, 11] == [len(mark) for mark in marks]
    assert 3000 < await admin.pttl(f"{key}:t") <= 5000
    assert await bus.said() == [b"tagged"] * 2


def test_bytes_for_marks_are_random() -> None:
    """No two requests for a mark ever bring the same bytes."""
    assert 1000 == len({new_mark() for _ in range(1000)})
