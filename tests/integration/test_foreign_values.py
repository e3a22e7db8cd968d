from collections.abc import Callable

import pytest
from loaders import returning
from redis.asyncio import Redis
from stored import bytes_at, fingerprint_for

from stampede_guard import Guard
from stampede_guard.stores._envelope import seal, unseal

MakeGuard = Callable[..., Guard]


async def load() -> dict[str, int]:
    """Load what nobody stored."""
    return {"soup": 450}


FLIGHT = "the-flight-that-stored"  # a token
MARK = b"mark-of-all"
SOUP = b"\x81\xa4soup\x01"
MENU = fingerprint_for(dict[str, int])
HEADER = 88  # bytes in front of the marks


def sealed(namespace: str, payload: bytes, op: str = "menu-7") -> bytes:
    """Return an envelope as the guard makes them."""
    return seal(f"{namespace}:{op}", payload, FLIGHT, None, [MARK], MENU)


FOREIGN: dict[str, Callable[[str], bytes]] = {
    "another program's text": lambda _: b'{"soup": 1}',
    "one byte": lambda _: b"x",
    "a header without a payload": lambda namespace: sealed(namespace, SOUP)[: HEADER + len(MARK)],
    "a header without its mark": lambda namespace: sealed(namespace, SOUP)[:HEADER],
    "a part of a header": lambda namespace: sealed(namespace, SOUP)[: HEADER - 1],
    "truncated": lambda namespace: sealed(namespace, SOUP)[:-1],
    "lengthened": lambda namespace: sealed(namespace, SOUP) + b"\x00",
    "another magic": lambda namespace: b"SGv3" + sealed(namespace, SOUP)[4:],
    "another op's": lambda namespace: sealed(namespace, SOUP, "menu-8"),
    "another namespace's": lambda _: sealed("other", SOUP),
    "no MessagePack": lambda namespace: sealed(namespace, b"\xc1"),
    "another type": lambda namespace: sealed(namespace, b"\x93\x01\x02\x03"),
    "wrong length": lambda namespace: sealed(namespace, b"")[: HEADER - 4] + b"\xff\xff\xff\xff" + MARK + SOUP,
    "more marks than it has": lambda namespace: (
        sealed(namespace, SOUP)[: HEADER - 5] + b"\xff" + sealed(namespace, SOUP)[HEADER - 4 :]
    ),
}


async def test_what_the_guard_would_have_stored_is_a_hit(make_guard: MakeGuard, namespace: str, admin: Redis) -> None:
    """The envelope that the others are variations of is accepted."""
    await admin.set(f"sg1:{{{namespace}:}}:t", MARK, ex=60)
    await admin.set(f"sg1:{{{namespace}:menu-7}}:v", sealed(namespace, SOUP), ex=60)

    async with make_guard() as guard:
        answer = await guard.fetch("menu-7", load, l2_ttl=60, returns=dict[str, int])

    assert answer == {"soup": 1}
    assert guard.stats().l2_hits == 1


@pytest.mark.parametrize("kind", FOREIGN)
async def test_what_is_not_the_ops_value_is_a_miss(
    kind: str, make_guard: MakeGuard, namespace: str, admin: Redis
) -> None:
    """Whatever lies under an op's key, the answer is the op's own; it is counted, and replaced."""
    key = f"sg1:{{{namespace}:menu-7}}:v"
    await admin.set(f"sg1:{{{namespace}:}}:t", MARK, ex=60)
    await admin.set(key, FOREIGN[kind](namespace), ex=60)

    async with make_guard() as guard:
        answer = await guard.fetch("menu-7", load, l2_ttl=60, returns=dict[str, int])
    opened = unseal(f"{namespace}:menu-7", await bytes_at(admin, key), MENU)

    assert answer == {"soup": 450}
    assert (1, 0, 0) == (guard.stats().l2_undecodable, guard.stats().l2_hits, guard.stats().l2_errors)
    assert (b"\x81\xa4soup\xcd\x01\xc2", (MARK,)) == (opened and opened[:2])


async def test_value_of_before_its_mark_changed_is_a_miss(make_guard: MakeGuard, namespace: str, admin: Redis) -> None:
    """An envelope that is whole, but was made before everything was cleared, is replaced; there is nothing to count."""
    await admin.set(f"sg1:{{{namespace}:}}:t", b"later-mark.", ex=60)
    await admin.set(f"sg1:{{{namespace}:menu-7}}:v", sealed(namespace, SOUP), ex=60)

    async with make_guard() as guard:
        answer = await guard.fetch("menu-7", load, l2_ttl=60, returns=dict[str, int])

    assert answer == {"soup": 450}
    assert (0, 0, 1) == (guard.stats().l2_undecodable, guard.stats().l2_hits, guard.stats().l2_misses)


async def test_key_of_another_type_is_a_miss(
    make_guard: MakeGuard, namespace: str, admin: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """A list under an op's key is a miss, and replaced, and no reason to think ill of the server."""
    key = f"sg1:{{{namespace}:menu-7}}:v"
    await admin.rpush(key, "soup")

    async with make_guard() as guard:
        answer = await guard.fetch("menu-7", load, l2_ttl=60, returns=dict[str, int])

    assert answer == {"soup": 450}
    assert (1, 0) == (guard.stats().l2_misses, guard.stats().l2_errors)
    assert await admin.type(key) == b"string"
    assert caplog.messages == []


@pytest.mark.parametrize("place", ["menu-7}:l", "}:t"])
async def test_foreign_value_elsewhere_costs_no_answer(
    place: str, make_guard: MakeGuard, namespace: str, admin: Redis
) -> None:
    """A list where a lease or a mark belongs is in the way of storing, not of answering."""
    await admin.rpush(f"sg1:{{{namespace}:{place}", "soup")

    async with make_guard() as guard:
        answers = [await guard.fetch("menu-7", load, l2_ttl=60, returns=dict[str, int]) for _ in range(2)]
        await guard.invalidate("menu-7")
        await guard.clear()
        answers += [await guard.fetch("menu-7", load, l2_ttl=60, returns=dict[str, int]) for _ in range(2)]

    assert [{"soup": 450}] * 4 == answers
    assert (3, 1) == (guard.stats().loads, guard.stats().l2_hits)  # an invalidation clears the way


async def test_i7_envelope_copied_to_another_op_is_refused(make_guard: MakeGuard, namespace: str, admin: Redis) -> None:
    """A value that was copied by hand to another op's key never answers for it."""

    async def load_other() -> dict[str, int]:
        return {"salad": 700}

    async with make_guard() as first, make_guard() as second:
        await first.fetch("menu-7", load, l2_ttl=60, returns=dict[str, int])
        await admin.copy(f"sg1:{{{namespace}:menu-7}}:v", f"sg1:{{{namespace}:menu-8}}:v")
        answer = await second.fetch("menu-8", load_other, l2_ttl=60, returns=dict[str, int])

    assert answer == {"salad": 700}
    assert second.stats().l2_undecodable == 1


async def test_codec_that_raises_on_stored_bytes_is_a_miss(make_guard: MakeGuard) -> None:
    """A codec of one's own may raise what it likes on bytes that it does not know."""

    class Shouting:
        fingerprint = "text"  # or so it says

        def encode(self, value: str) -> bytes:
            return value.upper().encode()

        def decode(self, payload: bytes) -> str:
            if not payload.isupper():
                raise RuntimeError("not shouted")
            return payload.decode().lower()

    async with make_guard() as first, make_guard() as second:
        await first.fetch("menu-7", returning("soup"), l2_ttl=60, returns=str)
        answer = await second.fetch("menu-7", returning("salad"), l2_ttl=60, codec=Shouting())

    assert answer == "salad"
    assert second.stats().l2_undecodable == 1
