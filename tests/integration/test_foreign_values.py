from collections.abc import Callable

import pytest
from redis.asyncio import Redis

from stampede_guard import Guard
from stampede_guard._codec import key_digest, seal

MakeGuard = Callable[..., Guard]


async def load() -> dict[str, int]:
    """Load what nobody stored."""
    return {"soup": 450}


def sealed(namespace: str, payload: bytes) -> bytes:
    """Return an envelope as the guard makes them."""
    return seal(f"{namespace}:menu-7", payload)


FOREIGN: dict[str, Callable[[str], bytes]] = {
    "another program's text": lambda _: b'{"soup": 1}',
    "one byte": lambda _: b"x",
    "a header without a payload": lambda namespace: sealed(namespace, b"\x81\xa4soup\x01")[:24],
    "truncated": lambda namespace: sealed(namespace, b"\x81\xa4soup\x01")[:-1],
    "lengthened": lambda namespace: sealed(namespace, b"\x81\xa4soup\x01") + b"\x00",
    "another magic": lambda namespace: b"SGv2" + sealed(namespace, b"\x81\xa4soup\x01")[4:],
    "another op's": lambda namespace: seal(f"{namespace}:menu-8", b"\x81\xa4soup\x01"),
    "another namespace's": lambda _: seal("other:menu-7", b"\x81\xa4soup\x01"),
    "no MessagePack": lambda namespace: sealed(namespace, b"\xc1"),
    "another type": lambda namespace: sealed(namespace, b"\x93\x01\x02\x03"),
    "wrong length": lambda namespace: b"SGv1" + key_digest(f"{namespace}:menu-7") + b"\xff\xff\xff\xff" + b"\x80",
}


@pytest.mark.parametrize("kind", FOREIGN)
async def test_what_is_not_the_ops_value_is_a_miss(
    kind: str, make_guard: MakeGuard, namespace: str, admin: Redis
) -> None:
    """Whatever lies under an op's key, the answer is the op's own; it is counted, and replaced."""
    key = f"sg1:{{{namespace}:menu-7}}:v"
    await admin.set(key, FOREIGN[kind](namespace), ex=60)

    async with make_guard() as guard:
        answer = await guard.fetch("menu-7", load, l2_ttl=60, returns=dict[str, int])

    assert answer == {"soup": 450}
    assert (1, 0, 0) == (guard.stats().l2_undecodable, guard.stats().l2_hits, guard.stats().l2_errors)
    assert sealed(namespace, b"\x81\xa4soup\xcd\x01\xc2") == await admin.get(key)


async def test_key_of_another_type_is_a_miss(
    make_guard: MakeGuard, namespace: str, admin: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """A list under an op's key is a miss, counted and replaced, and no reason to think ill of the server."""
    key = f"sg1:{{{namespace}:menu-7}}:v"
    await admin.rpush(key, "soup")

    async with make_guard() as guard:
        answer = await guard.fetch("menu-7", load, l2_ttl=60, returns=dict[str, int])

    assert answer == {"soup": 450}
    assert (1, 0) == (guard.stats().l2_undecodable, guard.stats().l2_errors)
    assert await admin.type(key) == b"string"
    assert caplog.messages == []


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
        def encode(self, value: str) -> bytes:
            return value.upper().encode()

        def decode(self, payload: bytes) -> str:
            if not payload.isupper():
                raise RuntimeError("not shouted")
            return payload.decode().lower()

    async def load_soup() -> str:
        return "soup"

    async def load_salad() -> str:
        return "salad"

    async with make_guard() as first, make_guard() as second:
        await first.fetch("menu-7", load_soup, l2_ttl=60, returns=str)
        answer = await second.fetch("menu-7", load_salad, l2_ttl=60, codec=Shouting())

    assert answer == "salad"
    assert second.stats().l2_undecodable == 1
