"""Keys and envelopes: what is different stays different, whatever people pass."""

import struct
from collections.abc import Iterator
from contextvars import Context, ContextVar
from dataclasses import dataclass
from datetime import datetime, time, timedelta, timezone
from decimal import Decimal
from itertools import combinations, product
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import msgspec
import pytest
from arguments import Masked, Moment, Price, Right, Shade
from hypothesis import assume, example, given
from hypothesis import strategies as st

from stampede_guard._codecs.fingerprint import NO_FINGERPRINT
from stampede_guard._keys.canonical import canonical, text_of
from stampede_guard._keys.spec import KeySpec, compile_key
from stampede_guard._keys.template import _SEPARATORS, may_collide
from stampede_guard._operations.operation import Operation
from stampede_guard._operations.policy import Policy
from stampede_guard._stats import Counters
from stampede_guard.stores._envelope import freshness_of, key_digest, seal, unseal

# Magic, digest, number of values, fingerprint; number of marks and length. The store's own is between them.
HEADER = range(29), range(84, 88)  # what `unseal` checks by itself
MARKS_AT = 83  # the number of marks, which its caller checks with the marks
FILL = "f" * 22
marks = st.binary(min_size=11, max_size=11)
tenant: ContextVar[str] = ContextVar("tenant")


class Point(NamedTuple):
    x: Any
    y: Any


class Box(msgspec.Struct):
    content: Any


class Rank(int):
    def __str__(self) -> str:
        return "a rank"

    __repr__ = __str__


@dataclass
class Query:
    text: Any
    page: Any


def dt_with_fold(moment: Any, fold: int) -> Any:
    """Return the first or the second of two times that a clock shows when it is put back."""
    return moment.replace(fold=fold)


# Characters that mean something in a key, in a literal, or to an encoder.
tricky = st.text(st.sampled_from("ab1.~%-:#@,'\"\\()[]{}= \n\0é\u0301\ud800"), max_size=4)
strings = st.one_of(tricky, st.text(st.characters(exclude_categories=()), max_size=4))
fixed = st.builds(timezone, st.sampled_from([timedelta(0), timedelta(hours=1), timedelta(seconds=-7)]))
named = st.builds(timezone, st.just(timedelta(hours=1)), tricky)
zones = st.one_of(st.none(), st.timezones(), fixed, named)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(allow_nan=False),
    strings,
    st.binary(max_size=3),
    st.decimals(allow_nan=False, places=2),
    st.uuids(),
    st.builds(dt_with_fold, st.datetimes(timezones=zones), st.integers(0, 1)),
    st.builds(dt_with_fold, st.times(timezones=zones), st.integers(0, 1)),
    st.dates(),
    st.timedeltas(),
    tricky.map(PurePosixPath),
    strings.map(Masked),
    st.integers(-3, 3).map(Rank),
    st.decimals(allow_nan=False, places=2).map(Price),
    st.dates().map(lambda day: Moment(day.year, day.month, day.day)),
    st.sampled_from([*Shade, Right(0), Right(1), Right(3), Right(8), Right(9)]),
)
hashable = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)
values = st.recursive(
    st.one_of(scalars, hashable),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(hashable, inner, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Box, inner),
        st.builds(Query, inner, inner),
    ),
    max_leaves=6,
)


def content(value: Any) -> Any:  # noqa: PLR0911  # a table of kinds
    """Return what makes *value* different from others, as something to compare: the types, and no text of our own."""
    kind = type(value)
    if isinstance(value, Box | Query):
        return kind, tuple(map(content, (value.content,) if isinstance(value, Box) else (value.text, value.page)))
    if isinstance(value, list | tuple):
        return kind, tuple(map(content, value))
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(content, value))
    if isinstance(value, dict):
        return kind, frozenset((content(key), content(item)) for key, item in value.items())
    if isinstance(value, float):
        return kind, struct.pack(">d", value)
    if isinstance(value, Decimal):
        return kind, value.as_tuple()
    if isinstance(value, datetime | time):
        zone = value.tzinfo
        # A time without a date has no offset in most zones; zone names can be given.
        told = (type(zone), getattr(zone, "key", None) or (zone and zone.tzname(None)))
        return kind, value.replace(tzinfo=None, fold=0), value.fold, value.utcoffset(), told
    return kind, value


async def one(value: Any) -> None:
    """Take one argument."""


async def two(left: Any, right: Any) -> None:
    """Take two."""


async def three(a: Any, b: Any, c: Any) -> None:
    """Take three."""


class Method:
    async def three(self, a: Any, b: Any, c: Any) -> None: ...


@given(st.lists(values, min_size=2, max_size=6))
def test_canonical_is_injective(several: list[Any]) -> None:
    """Values have one text if, and only if, their types and contents are the same, however nested."""
    assert len({content(value) for value in several}) == len({canonical(value) for value in several})


@given(values, values)
@example(1, True)  # noqa: FBT003
@example(1, 1.0)
@example("1", 1)
@example(("a,b",), ("a", "b"))
@example({"a": {1}}, {"a": (1,)})
def test_derived_keys_are_injective(mine: Any, theirs: Any) -> None:
    """Two calls have one derived op if, and only if, their arguments are the same."""
    build = compile_key(one, None).build

    assert (content(mine) == content(theirs)) == (build(mine) == build(theirs))


@given(st.tuples(values, values), st.tuples(values, values))
def test_derived_keys_keep_arguments_apart(mine: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    """No text of one argument reaches into the next."""
    build = compile_key(two, None).build

    assert (content(mine) == content(theirs)) == (build(*mine) == build(*theirs))


@given(st.tuples(strings, strings), st.tuples(strings, strings))
@example(("a-b", "c"), ("a", "b-c"))
@example(("", "-"), ("-", ""))
@example(("~empty", ""), ("", "~empty"))
@example(("é", "x"), ("e\u0301", "x"))
@pytest.mark.parametrize("template", ["{left}-{right}", "{left}:x:{right}", "é{left}-~-{right}-"])
def test_template_keys_are_injective(template: str, mine: tuple[str, str], theirs: tuple[str, str]) -> None:
    """Two calls with strings have one op if, and only if, the strings are the same."""
    build = compile_key(two, template).build

    assert (mine == theirs) == (build(*mine) == build(*theirs))


@given(values)
def test_text_fits_between_separators(value: Any) -> None:
    """The text of a value in a template is never empty, and holds no separator."""
    text = text_of(value)

    assert text
    assert _SEPARATORS.search(text) is None


@given(values)
def test_text_is_plain_ascii(value: Any) -> None:
    """The text of a value holds nothing that a store, a log or a terminal could take for more than text."""
    text = text_of(value)

    assert text.isascii()
    assert text.isprintable()
    assert " " not in text


def small_templates() -> Iterator[KeySpec]:
    """Yield every key of up to three words, with all that may be appended to it."""
    for number in (1, 2, 3):
        for words in product(["a", None], repeat=number):
            for separators in product(["-", "@", "-@", "#"], repeat=number - 1):
                for end in ("", "-"):
                    names = iter("abc")
                    filled = [word or f"{{{next(names)}}}" for word in words]
                    text = "".join(map("".join, zip(filled, [*separators, end], strict=True)))
                    ignored = tuple(names)
                    for function, vary in product([three, Method.three], [(), (tenant,)]):
                        yield compile_key(function, text, ignore=ignored, vary=vary)


def test_templates_that_never_meet_share_no_op() -> None:
    """Two functions whose templates are held apart never have an op in common: all small ones, with each other."""
    instance, context = Method(), Context()
    context.run(tenant.set, "a")
    specs: dict[str, list[KeySpec]] = {}
    for spec in small_templates():
        receiver = [instance] if spec.is_local else []
        for op in {context.run(spec.build, *receiver, *words) for words in product(["a", "-", ""], repeat=3)}:
            specs.setdefault(op, []).append(spec)
    rivals = {(mine.shape, theirs.shape) for sharing in specs.values() for mine, theirs in combinations(sharing, 2)}

    assert len(rivals) > 1_000
    assert [] == [(mine, theirs) for mine, theirs in rivals if not may_collide(mine, theirs)]


word_shapes = st.lists(st.sampled_from(["a", "b", "~empty", None]), min_size=1, max_size=4)


@given(word_shapes, word_shapes)
def test_shapes_that_meet_have_a_text_in_common(mine: list[str | None], theirs: list[str | None]) -> None:
    """Templates are not refused for nothing: when shapes meet, there is a text that fits both."""
    shapes = [tuple(part for word in words for part in (word, "-")) for words in (mine, theirs)]
    fits = len(mine) == len(theirs) and all(a == b or None in (a, b) for a, b in zip(mine, theirs, strict=True))

    assert fits == may_collide(shapes[0], shapes[1])


# ── Envelopes ────────────────────────────────────────────────────────────────────────────────────


@given(
    strings,
    st.binary(max_size=64),
    st.none() | st.integers(0, 2**53 - 1),
    st.lists(marks, max_size=17),
    st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)),
)
def test_envelope_round_trip(
    key: str, payload: bytes, version: int | None, marks: list[bytes], lives: tuple[int, int]
) -> None:
    """What was sealed for a key comes back for it, with the marks of its tags, its window and its life."""
    stale, life = (each / 1000 for each in lives)
    opened = unseal(key, seal(key, payload, FILL, version, marks, stale=stale, life=life))

    assert (payload, tuple(marks), FILL.encode(), 0, stale, life) == opened


@given(*[st.integers(0, 1000)] * 5)
def test_freshness_never_returns(ttl: int, stale: int, window: int, margin: int, later: int) -> None:
    """As time passes a value is fresh, then old, then neither; a smaller window or margin never makes it older."""
    envelope = seal("menu-7", b"soup", FILL, stale=stale / 1000)

    def freshness(ttl: int, window: int, margin: int) -> int:
        found = freshness_of(envelope, max(ttl, 0), NO_FINGERPRINT, b"", window, margin)
        return ("", "old", "fresh").index(found)

    now = freshness(ttl, window, margin)
    assert freshness(ttl - later, window, margin) <= now
    assert freshness(ttl, window + later, margin) >= now
    assert freshness(ttl, window, margin + later) <= now
    assert (now == 2) == (ttl > stale + margin)
    assert now or ttl <= max(stale - window, 0)


@given(strings, strings, st.binary(max_size=64))
def test_envelope_of_another_key_is_refused(mine: str, theirs: str, payload: bytes) -> None:
    """What was sealed for one key is nothing for another."""
    assume(mine != theirs)

    assert unseal(theirs, seal(mine, payload, FILL)) is None


@given(strings, st.binary(max_size=64), st.sampled_from([*HEADER[0], *HEADER[1]]), st.integers(1, 255))
def test_changed_header_is_refused(key: str, payload: bytes, position: int, change: int) -> None:
    """With another magic, digest, number of values, fingerprint or length, the envelope is nothing."""
    envelope = bytearray(seal(key, payload, FILL))
    envelope[position] ^= change

    assert unseal(key, bytes(envelope)) is None


@given(strings, st.binary(max_size=64), st.lists(marks, max_size=3), st.integers(1, 255))
@example("", bytes(11), [], 1)
@example("", b"", [bytes(11)], 1)
def test_changed_number_of_marks_changes_the_marks(key: str, payload: bytes, sealed: list[bytes], change: int) -> None:
    """With another number of marks, the envelope is nothing or has other marks, which its reader takes for a miss."""
    envelope = bytearray(seal(key, payload, FILL, marks=sealed))
    envelope[MARKS_AT] ^= change
    opened = unseal(key, bytes(envelope))

    assert opened is None or opened.marks != tuple(sealed)


@given(strings, st.binary(max_size=64), st.data())
def test_cut_or_prolonged_envelope_is_refused(key: str, payload: bytes, data: st.DataObject) -> None:
    """An envelope that did not arrive whole, or was followed by something else, is nothing."""
    envelope = seal(key, payload, FILL)
    cut = envelope[: data.draw(st.integers(0, len(envelope) - 1))]
    prolonged = envelope + data.draw(st.binary(min_size=1, max_size=8))

    assert unseal(key, cut) is None
    assert unseal(key, prolonged) is None


@given(strings, st.binary(max_size=64))
def test_foreign_bytes_are_no_envelope(key: str, foreign: bytes) -> None:
    """Bytes that somebody else wrote are nothing, and never an error."""
    assert unseal(key, foreign) is None


@given(st.lists(strings, min_size=2, max_size=6, unique=True))
def test_digests_differ(keys: list[str]) -> None:
    """Two keys have two digests."""
    assert len(keys) == len({key_digest(key) for key in keys})


@pytest.mark.parametrize(
    "annotation", [bytes, str, int, list[dict[str, int]], Decimal, Point, tuple[int, str]], ids=str
)
@given(foreign=st.binary(max_size=64))
def test_foreign_payloads_never_raise(annotation: Any, foreign: bytes) -> None:
    """Whatever bytes a store gives back, they are a value of the annotation, or a miss that is counted."""
    operation = Operation("fuzz", Policy(isolate=True), Counters(), annotation=lambda: annotation)
    decoded = operation.decode(foreign)

    assert operation.counters.l2_undecodable == (decoded is None)
