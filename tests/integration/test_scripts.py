"""The scripts on a real server: what they make of keys that no store has written, and how long keys live."""

import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from observing import ChannelListener
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

    async def acquire(
        token: str, *, unwanted: str = "", last: int = LAST, fingerprint: bytes = NO_FINGERPRINT, window: int = 0
    ) -> Any:
        keys = [f"{key}:v", f"{key}:l"]
        return await run(scripts.ACQUIRE, keys, token, 60_000, last, unwanted, "", fingerprint, window, 0)

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
        window: int = 0,
    ) -> Any:
        keys = [f"{key}:v", f"{key}:l", f"{key}:g"]
        written = "" if version is None else version
        lives = {"life": life / 1000, "stale": window / 1000}
        envelope = seal("menus:menu-7", payload, token, version, (), fingerprint, **lives)
        args = token, envelope, life + window, written, 60_000, namespace, "filled", always_publish, longest
        return await run(scripts.FILL, keys, *args)

    return fill


@pytest.fixture
def renew(run: Run, key: str) -> Run:
    """Return what runs RENEW for a token."""

    async def renew(token: str) -> Any:
        return await run(scripts.RENEW, [f"{key}:l"], token, 60_000)

    return renew


@pytest.fixture
def release(run: Run, key: str, namespace: str) -> Run:
    """Return what runs RELEASE for a token."""

    async def release(token: str, left: str = "", first: int = 1000, longest: int = 30_000) -> Any:
        return await run(scripts.RELEASE, [f"{key}:l"], token, namespace, "released", left, first, longest)

    return release


@pytest.fixture
def invalidate(run: Run, key: str, namespace: str) -> Run:
    """Return what runs INVALIDATE."""

    async def invalidate(version: int | None = None, life: int = 60_000, *, is_soft: bool = False) -> Any:
        keys = [f"{key}:v", f"{key}:l", f"{key}:g"]
        args = "" if version is None else version, life, namespace, "invalidated", int(is_soft)
        return await run(scripts.INVALIDATE, keys, *args)

    return invalidate


@pytest.fixture
def mark(run: Run, key: str) -> Run:
    """Return what runs MARK."""

    async def mark(first: str, life: int = 60_000) -> Any:
        return await run(scripts.MARK, [f"{key}:t"], first, life)

    return mark


@pytest.fixture
async def bus(admin: Redis, namespace: str) -> AsyncIterator[ChannelListener]:
    """Return who hears what the scripts publish."""
    async with ChannelListener(admin, namespace) as listener:
        yield listener


def envelope_of(token: str, version: int | None = None) -> bytes:
    """Return an envelope as a flight stores it."""
    return seal("menus:menu-7", b"soup", token, version, life=60)


@pytest.mark.parametrize("script", [value for value in vars(scripts).values() if isinstance(value, Script)])
async def test_digests_are_what_the_server_computes(script: Script, admin: Redis) -> None:
    """A script is asked for by the digest under which the server files its text."""
    digest = await admin.script_load(script.text)

    assert script.digest == (digest.decode() if isinstance(digest, bytes) else digest)


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


async def test_lowest_version_of_a_dropped_value_expires(acquire: Run, fill: Run, admin: Redis, key: str) -> None:
    """A refresh that drops a newer value leaves its version as the lowest, for as long as an invalidation would."""
    await acquire(THEIRS)
    await fill(THEIRS, 7)
    await acquire(MINE, unwanted="*")

    assert await fill(MINE, 6, always_publish=1) == b"OLD"
    assert await admin.get(f"{key}:g") == b"7"
    assert 0 < await admin.pttl(f"{key}:g") <= 60_000


async def test_refresh_with_an_old_version_and_no_value(
    acquire: Run, fill: Run, invalidate: Run, admin: Redis, key: str
) -> None:
    """Where there is nothing to drop, the lowest version lives no longer for it."""
    await invalidate(7, life=1_000)
    await acquire(MINE, unwanted="*")

    assert await fill(MINE, 6, always_publish=1) == b"OLD"
    assert await admin.pttl(f"{key}:g") <= 1_000


@pytest.mark.parametrize(
    "found",
    [
        b"x",
        b"SGv4",
        envelope_of(THEIRS)[:87],
        b"SGv3" + envelope_of(THEIRS, LATEST)[4:],
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
    assert seal("menus:menu-7", b"soup", MINE, fingerprint=RELEASES[1], life=60) == await admin.get(f"{key}:v")


# ── Leases, and what failed loads leave in their place ───────────────────────────────────────────


@pytest.mark.parametrize(
    ("there", "is_refresh", "then"),
    [
        (None, False, f"{MINE}0"),
        ("?3OSError", False, f"{MINE}3"),
        ("?3OSError", True, f"{MINE}3"),
        ("?9" + "E" * 64, False, f"{MINE}9"),
        ("!", True, f"{MINE}0"),
        (MINE, False, f"{MINE}0"),  # of a release that counts no failures
        (f"{MINE}w", False, f"{MINE}0w"),
        (f"{MINE}4w", False, f"{MINE}4w"),
        (THEIRS, True, f"{MINE}0"),
        (f"{THEIRS}w", True, f"{MINE}0w"),
        (f"{THEIRS}4w", True, f"{MINE}4w"),
    ],
)
async def test_lease_has_the_number_of_failures(  # noqa: PLR0917  # fixtures
    there: str | None,
    is_refresh: bool,
    then: str,
    acquire: Run,
    admin: Redis,
    key: str,
) -> None:
    """The grant takes it over from a lease, or from a marker whose pause is over, or that never ends."""
    if there:
        await admin.set(f"{key}:l", there)

    assert [b"OWN", 0] == await acquire(MINE, unwanted="*" if is_refresh else "")
    assert then.encode() == await admin.get(f"{key}:l")


@pytest.mark.parametrize(
    ("there", "then"),
    [
        (THEIRS, f"{THEIRS}w"),
        (f"{THEIRS}0", f"{THEIRS}0w"),
        (f"{THEIRS}0w", f"{THEIRS}0w"),
        (f"{THEIRS}w", f"{THEIRS}w"),
    ],
)
async def test_waiting_flight_is_noted_once(there: str, then: str, acquire: Run, admin: Redis, key: str) -> None:
    """The lease says so, also one of a release that counts no failures."""
    await admin.set(f"{key}:l", there, px=60_000)

    assert [b"WAIT"] * 2 == [(await acquire(MINE))[0] for _ in range(2)]
    assert then.encode() == await admin.get(f"{key}:l")


@pytest.mark.parametrize(
    ("lease", "first", "longest", "marker", "pause"),
    [
        (f"{MINE}0", 1000, 30_000, b"?1OSError", 1000),
        (f"{MINE}4w", 1055, 30_000, b"?5OSError", 16_880),
        (f"{MINE}8", 1000, 33_333, b"?9OSError", 33_333),
        (f"{MINE}9", 1, 30_000, b"?9OSError", 512),
        (f"{MINE}w", 1000, 30_000, b"?1OSError", 1000),
    ],
)
async def test_marker_outlives_its_pause(  # noqa: PLR0917  # the parts of a case
    lease: str,
    first: int,
    longest: int,
    marker: bytes,
    pause: int,
    acquire: Run,
    release: Run,
    admin: Redis,
    key: str,
    bus: ChannelListener,
) -> None:
    """It lasts for a minute longer, so that the failures are known by then."""
    await admin.set(f"{key}:l", lease, px=60_000)

    assert (1, 0) == (await release(MINE, "?OSError", first, longest), await release(MINE, "?OSError"))
    left = await admin.pttl(f"{key}:l")
    assert pause + 58_000 < left <= pause + 60_000
    assert marker == await admin.get(f"{key}:l")
    assert [b"released"] * lease.endswith("w") == await bus.said()
    await admin.pexpire(f"{key}:l", 70_000)
    kind, ends, value, _, text = await acquire(THEIRS)
    assert (b"BACKOFF", b"", b"OSError") == (kind, value, text)
    assert 8_000 < ends <= 10_000
    await admin.pexpire(f"{key}:l", 60_000)
    assert [b"OWN", 0] == await acquire(THEIRS)


# ── Values that are not fresh any more ───────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("life", "window", "kind"), [(5000, 5000, b"HIT"), (1, 60_000, b"ALONE"), (1, 5000, None), (0, 0, None)]
)
async def test_acquire_without_the_lease_s_key(  # noqa: PLR0917  # fixtures
    life: int, window: int, kind: bytes | None, run: Run, acquire: Run, fill: Run, admin: Redis, key: str
) -> None:
    """Where the lease may be at another node, a value that can be used is read, and an old one gives no right."""
    if life:
        await acquire(MINE)
        await fill(MINE, life=life, window=window)
        await admin.pexpire(f"{key}:v", min(window + life, 50_000) - (life == 1))
    args = THEIRS, 60_000, LAST, "", "", NO_FINGERPRINT, 20_000 if window > 5000 else 0, 0

    if kind is None:
        with pytest.raises(ResponseError, match="without the value"):
            await run(scripts.ACQUIRE, [f"{key}:v"], *args)
    else:
        assert kind == (await run(scripts.ACQUIRE, [f"{key}:v"], *args))[0]


async def test_soft_invalidation_rewrites_what_is_left(  # noqa: PLR0917  # fixtures
    acquire: Run, fill: Run, invalidate: Run, admin: Redis, key: str, bus: ChannelListener
) -> None:
    """Fingerprint, token, version and payload stay; what was left of its fresh life is taken from its life."""
    await acquire(MINE)
    await fill(MINE, 258, life=60_000, window=30_000, payload=b"soup")
    await admin.pexpire(f"{key}:v", 80_000)  # ten seconds later
    for _ in range(2):
        await invalidate(is_soft=True)
    opened = unseal("menus:menu-7", await bytes_at(admin, f"{key}:v"))

    assert opened is not None
    assert (b"soup", (), MINE.encode(), 0, 30) == opened[:5]
    assert 10 <= opened.life < 12
    assert 28_000 < await admin.pttl(f"{key}:v") <= 30_000
    assert [b"invalidated"] * 2 == await bus.said()
    await acquire(THEIRS)
    assert b"OLD" == await fill(THEIRS, 257)


@pytest.mark.parametrize(
    "found",
    [
        b"x",
        b"SGv4",
        b"SGv4" + bytes(17),
        b"SGv3" + envelope_of(MINE)[4:],
        seal("menus:menu-7", b"soup", MINE, stale=9)[:80],
        seal("menus:menu-7", b"soup", MINE, stale=9).replace(b"\x01", b"\x05", 1) * 9,
        envelope_of(MINE),
    ],
)
@pytest.mark.parametrize("is_lasting", [False, True])
async def test_soft_invalidation_of_what_has_no_window(
    found: bytes, is_lasting: bool, invalidate: Run, admin: Redis, key: str
) -> None:
    """It is deleted, as is a value that would never expire: that is not one of ours."""
    await admin.set(f"{key}:v", seal("menus:menu-7", b"soup", MINE, stale=9) if is_lasting else found)
    if not is_lasting:
        await admin.pexpire(f"{key}:v", 60_000)

    assert await invalidate(is_soft=True) == 1
    assert not await admin.exists(f"{key}:v")


async def test_soft_invalidation_of_a_wrong_type(invalidate: Run, admin: Redis, key: str) -> None:
    """A list where the value should be is deleted."""
    await admin.rpush(f"{key}:v", "x")

    assert await invalidate(is_soft=True) == 1
    assert not await admin.exists(f"{key}:v")


async def test_windows_of_releases_stay_as_they_are(
    acquire: Run, fill: Run, invalidate: Run, admin: Redis, key: str
) -> None:
    """Beside the new value, the others keep window and life; after a soft invalidation those with a window are left."""
    for release, window in zip(RELEASES[:4], (30_000, 0, 90_000, 10_000), strict=True):
        await acquire(MINE, fingerprint=release)
        await fill(MINE, life=60_000, window=window, fingerprint=release)

    async def lives() -> list[tuple[float, float, float] | None]:
        envelope, left = await bytes_at(admin, f"{key}:v"), await admin.pttl(f"{key}:v") / 1000
        opened = [unseal("menus:menu-7", envelope, release) for release in RELEASES[:4]]
        return [each and (round(left - each.lag), each.stale, round(each.life)) for each in opened]

    before = await lives()
    await invalidate(is_soft=True)

    assert [(90, 30, 60), (60, 0, 60), (150, 90, 60), (70, 10, 60)] == before
    assert [(30, 30, 0), None, (90, 90, 0), (10, 10, 0)] == await lives()


async def test_invalidate_raises_the_lowest_version(invalidate: Run, admin: Redis, key: str) -> None:
    """The lowest version rises, never falls, and is kept for a while after the last that named one."""
    await invalidate()
    assert not await admin.exists(f"{key}:g")
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
    is_list: bool,
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
    left: int | None, is_prolonged: bool, mark: Run, admin: Redis, key: str
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
    kind: str, run: Run, admin: Redis, key: str, namespace: str, bus: ChannelListener
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
