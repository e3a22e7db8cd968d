"""Headers of answers: what an HTTP cache makes of them, and conditional requests."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from waiting import eventually

from stampede_guard import Answer, ConfigurationError, Guard, coalesce, coalesce_many
from stampede_guard._memory import entity_tags
from stampede_guard.http import is_not_modified, response_headers
from stampede_guard.testing import Gate, ManualClock

SECONDS = st.floats(0, 1e6)
LIFE = st.floats(-1e6, 1e6)  # what is left of it; negative when it is over
ROUNDING = 2.0  # seconds by which a cache may be too careful, as headers have whole seconds


def answer_with(etag: Callable[[], str | None] = lambda: '"x"', **known: Any) -> Answer[str]:
    """Return an answer, by default one of which nothing is known."""
    freshness: dict[str, Any] = {
        "age": None,
        "fresh_for": 0.0,
        "stale_for": 0.0,
        "error_for": 0.0,
        "overdue": 0.0,
        **known,
    }
    kept: dict[str, Any] = {"_kept": "soup", "_for_caller": str, "_find_etag": etag}
    return Answer("memory", is_stale=freshness["overdue"] > 0, **freshness, **kept)


def in_a_cache(headers: dict[str, str], resident: float) -> dict[str, float]:
    """Return what a cache knows of a response *resident* seconds after it was received without delay.

    RFC 9111: section 4.2.1, lifetime; 4.2.3, current age. RFC 5861: sections 3 and 4.
    """
    parts = (part.partition("=") for part in headers["Cache-Control"].split(", "))
    directives = {name: seconds for name, _, seconds in parts}
    left = int(directives["max-age"]) - (int(headers.get("Age", 0)) + resident)
    names = ("stale-while-revalidate", "stale-if-error")
    return {"fresh": left, **{name: left + int(directives.get(name, 0)) for name in names}}


@settings(deadline=None)
@given(life=LIFE, since_then=SECONDS | st.none(), stale_for=SECONDS, error_for=SECONDS)
@example(life=-5.1, since_then=0.3, stale_for=60.0, error_for=0.0)
@example(life=-0.5, since_then=None, stale_for=60.0, error_for=0.0)
def test_a_cache_keeps_nothing_for_longer_than_the_guard(
    life: float, since_then: float | None, stale_for: float, error_for: float
) -> None:
    """By the calculation of RFC 9111, freshness and windows end when the guard's do, or up to two seconds before."""
    fresh_for, overdue = max(life, 0.0), max(-life, 0.0)
    age = None if since_then is None else overdue + since_then
    answer = answer_with(age=age, fresh_for=fresh_for, overdue=overdue, stale_for=stale_for, error_for=error_for)

    left = in_a_cache(response_headers(answer), 0.0)

    for name, window in (("fresh", 0.0), ("stale-while-revalidate", stale_for), ("stale-if-error", error_for)):
        assert life + window - ROUNDING <= left[name] <= life + window + 1e-6


@pytest.mark.parametrize(
    ("known", "headers"),
    [
        ({"age": 4.9, "fresh_for": 6.9}, {"Age": "4", "Cache-Control": "private, max-age=10"}),
        ({"age": 0.0, "fresh_for": 0.0}, {"Age": "0", "Cache-Control": "private, max-age=0"}),
        ({"fresh_for": 6.9}, {"Cache-Control": "private, max-age=6"}),
        (
            {"age": 4, "fresh_for": 6, "stale_for": 60, "error_for": 3600},
            {"Age": "4", "Cache-Control": "private, max-age=10, stale-while-revalidate=60, stale-if-error=3600"},
        ),
        (
            {"age": 30, "overdue": 20, "stale_for": 60},
            {"Age": "30", "Cache-Control": "private, max-age=10, stale-while-revalidate=60"},
        ),
        (
            {"overdue": 19.5, "error_for": 60},
            {"Age": "20", "Cache-Control": "private, max-age=0, stale-if-error=60"},
        ),
    ],
)
def test_headers(known: Any, headers: dict[str, str]) -> None:
    """`max-age` is the whole life and `Age` what has passed of it; windows of zero are left out."""
    assert {**headers, "ETag": '"x"'} == response_headers(answer_with(**known))


@pytest.mark.parametrize(
    ("cache", "headers"),
    [
        ("public", {"Age": "4", "Cache-Control": "public, max-age=10", "ETag": '"x"'}),
        ("no-cache", {"Age": "4", "Cache-Control": "no-cache", "ETag": '"x"'}),
        ("no-store", {"Cache-Control": "no-store"}),
    ],
)
def test_cache_choice(cache: Any, headers: dict[str, str]) -> None:
    """The caller says which caches may keep the response."""
    assert headers == response_headers(answer_with(age=4, fresh_for=6), cache=cache)


def test_variant() -> None:
    """A variant is part of the entity tag; without a tag there is none."""
    assert '"x-de.v2"' == response_headers(answer_with(), variant="de.v2")["ETag"]
    assert "ETag" not in response_headers(answer_with(lambda: None), variant="de.v2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "shared"}, "^cache='shared': give one of 'private', 'public', 'no-cache', 'no-store'$"),
        ({"variant": 'a"b'}, "^variant='a\"b': give visible ASCII characters, and no double quotes$"),
        ({"variant": "ä"}, "^variant='ä': "),
    ],
)
def test_invalid_choices(options: Any, message: str) -> None:
    """A choice that there is not, or a variant that no header can carry, is refused with the remedy."""
    with pytest.raises(ConfigurationError, match=message):
        response_headers(answer_with(), **options)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize(
    ("if_none_match", "matches"),
    [
        ('"x"', True),
        ('W/"x"', True),
        ('"a", W/"x" , "b"', True),
        ('"a","x"', True),
        ('"a,x", "x,b"', False),
        ('"a, x"', False),
        (' "xx"', False),
        ("x", False),
        ('"x', False),
        ("*", True),
        (" * ", True),
        ('"*"', False),
        ("", False),
        (None, False),
    ],
)
def test_if_none_match(method: str, if_none_match: str | None, matches: bool) -> None:
    """Tags are compared weakly, alone and in lists; `*` is any tag; other methods than GET and HEAD never match."""
    assert is_not_modified(method, if_none_match, '"x"') is (matches and method != "POST")


def test_if_none_match_without_a_tag() -> None:
    """A response without a tag matches `*` alone, because there is a response."""
    assert is_not_modified("GET", "*", None)
    assert not is_not_modified("GET", '"None", None', None)


class Bytes:
    """A codec that counts.

    Attributes:
        encoded: How many values were encoded.
        decoded: How many were decoded.
    """

    def __init__(self) -> None:
        self.encoded = self.decoded = 0

    def encode(self, value: str) -> bytes:
        self.encoded += 1
        return value.encode()

    def decode(self, payload: bytes) -> str:
        self.decoded += 1
        return payload.decode()


@pytest.mark.parametrize("isolate", [False, True])
async def test_a_tag_is_computed_once_for_each_entry(isolate: bool, clock: ManualClock) -> None:
    """Callers of one flight and of its entry share a tag, and a new entry has its own; with `isolate` none decodes."""
    codec, gate = Bytes(), Gate()
    values = iter(("soup", "salad", "salad"))

    @coalesce("menu-{menu_id}", guard=Guard(clock=clock), ttl=10, isolate=isolate, codec=codec)
    async def load(menu_id: int) -> str:
        await gate.passage()
        return next(values)

    waiting = [asyncio.ensure_future(load.answer(7)) for _ in range(3)]
    await gate.arrivals(1)
    gate.open()
    answers = [*(await asyncio.gather(*waiting)), await load.answer(7)]
    loading = codec.encoded, codec.decoded
    first = {answer.etag for answer in answers}
    once = codec.encoded, codec.decoded
    assert first == {answer.etag for answer in answers}
    assert once == (codec.encoded, codec.decoded)
    assert loading == once or not isolate

    await load.invalidate(7)
    second = (await load.answer(7)).etag
    assert {second} != first
    assert first == {answers[0].etag}  # its entry has gone: it is computed anew
    await load.invalidate(7)
    assert second == (await load.answer(7)).etag


async def test_tags_of_many_entries(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation remembers so many tags and not more; then it computes them again."""
    monkeypatch.setattr(entity_tags, "_CAPACITY", 2)
    codec = Bytes()

    @coalesce("menu-{menu_id}", guard=Guard(clock=clock), ttl=10, codec=codec)
    async def load(menu_id: int) -> str:
        return f"soup {menu_id}"

    tags = [(await load.answer(menu_id)).etag for menu_id in (1, 2, 3)]
    before = codec.encoded
    again = [(await load.answer(menu_id)).etag for menu_id in (3, 1)]

    assert [tags[2], tags[0]] == again
    assert 1 == codec.encoded - before


async def test_tag_of_what_is_not_kept(clock: ManualClock) -> None:
    """A value that no tier keeps has a tag, and one that cannot be encoded has none."""

    @coalesce(guard=Guard(clock=clock))
    async def load(value: str) -> str:
        return value

    assert (await load.answer("soup")).etag == (await load.answer("soup")).etag != (await load.answer("salad")).etag

    @coalesce("thing-{menu_id}", guard=Guard(clock=clock), ttl=10)
    async def load_thing(menu_id: int) -> dict[str, Any]:
        return {"thing": object()}

    assert (await load_thing.answer(7)).etag is None


async def test_tag_of_a_value_that_has_no_encoding(clock: ManualClock) -> None:
    """Without a codec, an annotation that does not say how to encode is an error that says what to give."""

    @coalesce("untyped-{menu_id}", guard=Guard(clock=clock), ttl=10)
    async def load(menu_id: int) -> object:
        return "soup"

    answer = await load.answer(7)
    with pytest.raises(ConfigurationError, match="name a type, or pass codec="):
        response_headers(answer)


async def test_old_answers_tell_for_how_long_they_are_over(clock: ManualClock) -> None:
    """A stale answer has the seconds since its life was over; before the end of it an early one has none."""
    gate = Gate()

    async def load(menu_id: int) -> str:
        if clock() > 1_000:
            await gate.passage()
        return "soup"

    guard = Guard(clock=clock, defaults={"ttl": 10, "jitter": 0})
    stale = coalesce("stale-{menu_id}", guard=guard, stale=60)(load)
    await stale(7)
    clock.advance(12)
    answer = await stale.answer(7)

    assert (True, 2, 12, 0) == (answer.is_stale, answer.overdue, answer.age, answer.fresh_for)
    assert "private, max-age=10, stale-while-revalidate=60" == response_headers(answer)["Cache-Control"]
    gate.open()
    await eventually(lambda: not guard.stats().in_flight)


async def test_early_answers_are_fresh(clock: ManualClock) -> None:
    """A value that is refreshed early is fresh until its life is over."""
    gate = Gate()

    @coalesce("early-{menu_id}", guard=Guard(clock=clock), ttl=10, jitter=0, early=1e6, stale_if_error=60)
    async def load(menu_id: int) -> str:
        if clock() > 1_000:
            await gate.passage()
        return "soup"

    load._operation.note_load(10)  # so that the value is due after half of its life
    await load(7)
    clock.advance(6)
    answer = await load.answer(7)

    assert (False, 0, 6, 4) == (answer.is_stale, answer.overdue, answer.age, answer.fresh_for)
    assert 1 == load.guard.stats().stale
    gate.open()
    await eventually(lambda: not load.guard.stats().in_flight)


async def test_answer_of_one_of_many(clock: ManualClock) -> None:
    """A loader of many has answers for one id, which may be that there is none."""

    @coalesce_many("menu-{menu_id}", guard=Guard(clock=clock), ttl=10, jitter=0)
    async def load_menus(menu_ids: list[int]) -> dict[int, str]:
        return {menu_id: "soup" for menu_id in menu_ids if menu_id < 8}

    await load_menus([7, 8])
    clock.advance(4)
    known, unknown = await asyncio.gather(load_menus.one.answer(7), load_menus.one.answer(8))

    assert ("memory", "soup", 4, 6) == (known.source, known.value, known.age, known.fresh_for)
    assert unknown.value is None
    assert None not in {known.etag, unknown.etag}
    assert known.etag != unknown.etag
