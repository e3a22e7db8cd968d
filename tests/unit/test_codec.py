import enum
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, Optional, TypedDict, TypeVar
from uuid import UUID

import attrs
import msgspec
import pydantic
import pytest
from inside import untyped
from typing_extensions import TypeAliasType

from stampede_guard import Codec, ConfigurationError
from stampede_guard._codecs.codec import codec_for
from stampede_guard._codecs.fingerprint import NO_FINGERPRINT
from stampede_guard.stores._envelope import (
    COUNT_AT,
    freshness_of,
    key_digest,
    seal,
    single_value_head,
    token_of,
    tokens_of,
    unseal,
    window_of,
)

T = TypeVar("T")
RestaurantId = NewType("RestaurantId", int)


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Item:
    name: str
    price: Decimal


@attrs.define
class Shop:
    name: str
    colour: Colour


class Menu(msgspec.Struct):
    items: list[Item]
    changed: datetime


class Node(msgspec.Struct):
    number: int
    children: "list[Node]" = []


class Loose(msgspec.Struct):
    name: str
    extra: Any = None


class Point(NamedTuple):
    x: int
    y: int


class Row(TypedDict):
    name: str


class Box(msgspec.Struct, Generic[T]):
    content: T


class Model(pydantic.BaseModel):
    number: int
    nested: "list[Model]" = []


class Plain:
    def __repr__(self) -> str:
        return "Plain()"


NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (bytes, b"\x00raw"),
        (str, "é"),
        (int, 7),
        (float, 1.5),
        (bool, False),
        (type(None), None),
        (int | None, None),
        (Optional[str], "a"),  # noqa: UP045  # the old spelling is used too
        (RestaurantId, 7),
        (Annotated[bytes, "why"], b"a"),
        (Literal["a", "b"], "a"),
        (list[int], [1, 2]),
        (set[int], {1, 2}),
        (tuple[int, str], (1, "a")),
        (tuple[int, ...], (1, 2)),
        (dict[int, list[str]], {1: ["a"]}),
        (bytearray, bytearray(b"a")),
        (Decimal, Decimal("1.50")),
        (UUID, UUID(int=7)),
        (datetime, NOON),
        (date, date(2026, 3, 1)),
        (timedelta, timedelta(seconds=1.5)),
        (Colour, Colour.RED),
        (Item, Item("tea", Decimal("2.50"))),
        (Shop, Shop("north", Colour.RED)),
        (Menu, Menu([Item("tea", Decimal(2))], NOON)),
        (Node, Node(1, [Node(2)])),
        (Point, Point(1, 2)),
        (Row, {"name": "a"}),
        (Box[int], Box(1)),
        (Model, Model(number=1, nested=[Model(number=2)])),
        (list[Model], [Model(number=1)]),
        (Model | None, None),
        (dict[str, list[Model]], {"a": [Model(number=1)]}),
    ],
    ids=str,
)
def test_round_trip(annotation: Any, value: Any) -> None:
    """What an annotation describes comes back as it went, type included."""
    codec = codec_for(annotation)
    back = codec.decode(codec.encode(value))

    assert value == back
    assert type(value) is type(back)


@pytest.mark.parametrize(("annotation", "value"), [(bytes, b"\xff\x00"), (str, "\xff")])
def test_bytes_and_text_pass_through(annotation: Any, value: Any) -> None:
    """Bytes are stored as they are, and text as UTF-8, for others to read."""
    assert (value if annotation is bytes else value.encode()) == codec_for(annotation).encode(value)


class Aliased(pydantic.BaseModel):
    """A model whose fields have other names outside."""

    one: int = pydantic.Field(alias="One")
    two: int = pydantic.Field(validation_alias=pydantic.AliasPath("deep", 0), serialization_alias="Two")
    three: list["Aliased"] = pydantic.Field(default=[], alias="Three")

    @pydantic.computed_field
    @property
    def four(self) -> int:
        return self.one + self.two


class Strict(Aliased):
    """A model that takes nothing else, and goes by its aliases."""

    model_config = pydantic.ConfigDict(extra="forbid", serialize_by_alias=True, validate_by_name=False)


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = pydantic.Field(alias="Kind")


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = pydantic.Field(alias="Kind")


class Owner(pydantic.BaseModel):
    pet: Cat | Dog = pydantic.Field(discriminator="kind", alias="Pet")


INNER = {"One": 1, "deep": [2]}


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Aliased, Aliased.model_validate({**INNER, "Three": [INNER]})),
        (Strict, Strict.model_validate({**INNER, "Three": [INNER]})),
        (list[Strict], [Strict.model_validate(INNER)]),
        (Owner, Owner.model_validate({"Pet": {"Kind": "dog"}})),
    ],
    ids=str,
)
def test_models_with_aliases(annotation: Any, value: Any) -> None:
    """A model comes back by the names of its fields, and not by their aliases."""
    codec = codec_for(annotation)

    assert value == codec.decode(codec.encode(value))


def test_models_with_aliases_of_an_older_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Pydantic knows no validation by name, aliases have to be the same both ways."""
    validate_json = pydantic.TypeAdapter.validate_json
    by_alias = lambda self, data: validate_json(self, data)  # noqa: E731, PLW0108  # it has no other parameters
    monkeypatch.setattr(pydantic.TypeAdapter, "validate_json", by_alias)
    value = Cat.model_validate({"Kind": "cat"})
    codec = codec_for(Cat)

    assert value == codec.decode(codec.encode(value))
    assert b'{"Kind":"cat"}' == codec.encode(value)


Menus = TypeAliasType("Menus", dict[str, list[int]])
Page = TypeAliasType("Page", tuple[T, T], type_params=(T,))
Json = TypeAliasType("Json", "dict[str, Json] | list[Json] | str | int | None")
Text = TypeAliasType("Text", str)
Models = TypeAliasType("Models", list[Model])


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Any, {"a": [1, None, b"x", 1.5]}),
        (list, [1, "a"]),
        (dict, {1: [2]}),
        (dict[str, Any], {"a": {"b": [1]}}),
        (Loose, Loose("a", {"b": 1})),
        (Menus, {"a": [1]}),
        (list[Menus], [{"a": [1]}]),
        (list[Menus] | None, [{"a": [1]}]),
        (Optional[Menus], {"a": [1]}),  # noqa: UP045  # the old spelling is used too
        (Annotated[list[Menus], "why"], [{"a": [1]}]),
        (Page[int], (1, 2)),
        (Json, {"a": [1, {"b": None}]}),
        (Text, "a"),
        (Models, [Model(number=1)]),
        (dict[str, Models], {"a": [Model(number=1)]}),
        (Literal["a"] | Menus, "a"),
        (tuple[()], ()),
    ],
    ids=str,
)
def test_anything_and_aliases(annotation: Any, value: Any) -> None:
    """What is made of plain values comes back where anything may be, and an alias is what it stands for."""
    codec = codec_for(annotation)

    assert value == codec.decode(codec.encode(value))


@pytest.mark.parametrize(
    ("annotation", "allows_any"),
    [
        (bytes, False),
        (str, False),
        (dict[str, int], False),
        (Node, False),
        (Any, True),
        (dict[str, Any], True),
        (Loose, True),
        (Json, True),
        (Model, False),
        (Aliased, False),
        (list[Model], False),
        (pydantic.create_model("Open", a=(Any, None)), True),
        (pydantic.create_model("Open", a=(dict[str, Any], ...)), True),
        (pydantic.create_model("Open", a=(list[Any], ...)), True),
        (pydantic.create_model("Open", a=(int, ...), __config__={"extra": "allow"}), True),
        (pydantic.create_model("Closed", a=(dict[str, int], {}), b=(int | str | None, None)), False),
    ],
    ids=str,
)
def test_annotations_that_allow_anything(annotation: Any, allows_any: bool) -> None:
    """Whether some part of a value may be anything is known, since then no value says anything of the next."""
    assert allows_any == untyped(codec_for(annotation)).allows_any


def test_every_decoded_value_is_new() -> None:
    """Two callers who decode one payload cannot disturb each other."""
    codec = codec_for(list[int])
    payload = codec.encode([1])

    assert codec.decode(payload) is not codec.decode(payload)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (bytes, "text"),
        (bytes, bytearray(b"a")),
        (bytes, None),
        (str, b"bytes"),
        (str, None),
        (str, "\ud800"),
        (int, 2**64),
        (int, Plain()),
        (Menu, Plain()),
        (list[Model], [1]),
    ],
    ids=str,
)
def test_wrong_values_are_not_encoded(annotation: Any, value: Any) -> None:
    """A value that has no bytes under its annotation raises, so that nothing false is stored."""
    codec = codec_for(annotation)

    with pytest.raises(Exception, match=r".+"):
        codec.encode(value)


@pytest.mark.parametrize(
    ("annotation", "payload"),
    [
        (str, b"\xff"),
        (int, b""),
        (int, b"\xc0"),
        (int, b"\x01\x01"),
        (Menu, b"\x80"),
        (list[int], b"\x91\xa1a"),
        (Model, b"{}"),
        (Model, b"\xff"),
        (list[Model], b'[{"number": "x"}]'),
    ],
    ids=str,
)
def test_foreign_bytes_are_not_decoded(annotation: Any, payload: bytes) -> None:
    """Bytes that are no value of the annotation raise, so that nobody gets something else."""
    codec = codec_for(annotation)

    with pytest.raises(Exception, match=r".+"):
        codec.decode(payload)


@pytest.mark.parametrize(
    ("annotation", "unclear"),
    [
        (object, "object"),
        (Plain, "Plain"),
        (list[Plain], "Plain"),
        (Callable[[], int], ""),
        (int | Colour | Plain, "Plain"),
        (list[Item | Menu], ""),
        (7, ""),
    ],
    ids=str,
)
def test_unclear_annotations_are_refused(annotation: Any, unclear: str) -> None:
    """An annotation that does not say what to decode to is refused, with the part that does not and the way out."""
    with pytest.raises(ConfigurationError, match=rf"cannot be stored: .*{unclear}.*codec="):
        codec_for(annotation)


def test_without_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that never imported Pydantic does not import it for annotations that have no model."""
    monkeypatch.delitem(sys.modules, "pydantic")

    assert 7 == codec_for(int).decode(b"\x07")
    assert "pydantic" not in sys.modules


@pytest.mark.parametrize("annotation", [bytes, str, int, Model])
def test_codecs_of_our_own_are_codecs(annotation: Any) -> None:
    """What the annotation yields has the shape that `codec=` asks for."""
    assert isinstance(codec_for(annotation), Codec)


# ── The envelope ─────────────────────────────────────────────────────────────────────────────────


FILL = "f" * 22  # the token of the flight that stored it


@pytest.mark.parametrize("payload", [b"", b"a", b"SGv4", bytes(1000)])
@pytest.mark.parametrize("marks", [(), (b"m" * 11,), (b"m" * 11, b"n" * 11)])
def test_envelope(payload: bytes, marks: tuple[bytes, ...]) -> None:
    """What was sealed for a key is unsealed for it, with the marks of its tags."""
    assert (payload, marks, FILL.encode(), 0, 0, 0) == unseal("menu-7", seal("menu-7", payload, FILL, None, marks))


def test_envelope_tells_who_stored_it() -> None:
    """The token of the flight that stored an envelope can be read from it; from anything else nothing that matters."""
    envelope = seal("menu-7", b"payload", FILL)

    assert FILL.encode() == token_of(envelope, NO_FINGERPRINT)
    assert (FILL.encode(),) == tokens_of(envelope)
    for other in (b"x", b"SGv4"):
        assert (b"", ()) == (token_of(other, NO_FINGERPRINT), tokens_of(other))
    assert b"" == token_of(envelope, b"another.")


@pytest.mark.parametrize("key", ["menu-8", "menu-7 ", "", "Menu-7", "menu-\uff17"])
def test_envelope_of_another_key(key: str) -> None:
    """What was sealed for one key cannot be unsealed for another, however alike."""
    assert unseal(key, seal("menu-7", b"payload", FILL)) is None


@pytest.mark.parametrize(
    "envelope",
    [
        b"",
        b"SGv4",
        seal("menu-7", b"payload", FILL)[:-1],
        seal("menu-7", b"payload", FILL) + b"!",
        seal("menu-7", b"payload", FILL)[:83] + b"\1" + seal("menu-7", b"payload", FILL)[84:],
        b"SGv3" + seal("menu-7", b"payload", FILL)[4:],
        b"payload that somebody else wrote under our key",
    ],
)
def test_broken_envelopes(envelope: bytes) -> None:
    """Bytes that were cut, prolonged, or never an envelope, are nothing."""
    assert unseal("menu-7", envelope) is None


def test_envelope_is_pinned() -> None:
    """The wire format stays as it is, from the magic to the payload."""
    head = b"SGv4" + key_digest("menu-7") + b"\1"
    lives = b"".join((bytes(8), bytes(6), b"\x01\xf4", bytes(6), b"\x03\xe8"))  # lag, stale, life
    entry = b"".join((b"ffffffff", lives, b"f" * 22, bytes(7), b"\3", b"\1", bytes(3), b"\x0d"))
    sealed = seal("menu-7", b"hi", FILL, 3, [b"m" * 11], b"ffffffff", life=1.0, stale=0.5)

    assert head + entry + b"m" * 11 + b"hi" == sealed
    assert (b"hi", (b"m" * 11,), FILL.encode(), 0.0, 0.5, 1.0) == unseal("menu-7", sealed, b"ffffffff")
    assert sealed.startswith(single_value_head(b"ffffffff", 500), COUNT_AT)
    assert 0.5 == window_of(sealed)
    assert 16 == len(key_digest("menu-7"))


OURS, THEIRS = b"our own.", b"others'."


SOUP = seal("menu-7", b"soup", FILL, fingerprint=OURS)
STALE = seal("menu-7", b"soup", FILL, fingerprint=OURS, life=9, stale=1)  # the last second of ten


@pytest.mark.parametrize(
    ("envelope", "ttl", "reject", "window", "margin", "expected"),
    [
        (SOUP, 1000, b"", 0, 0, "fresh"),
        (SOUP, -1, b"", 0, 0, "fresh"),
        (SOUP, 1000, b"=" + FILL.encode(), 9000, 0, ""),
        (SOUP, 1000, b"=" + b"o" * 22, 0, 0, "fresh"),
        (SOUP, 1000, b"*", 0, 0, "fresh"),
        (seal("menu-7", b"soup", FILL, fingerprint=THEIRS), 1000, b"", 9000, 0, ""),
        (b"garbage", 1000, b"", 0, 0, "fresh"),
        (b"garbage", 1000, b"=", 9000, 0, ""),
        (b"garbage", 1000, b"*", 9000, 0, ""),
        (b"SGv4", 1000, b"", 0, 0, "fresh"),
        (b"SGv4" + bytes(16), 1000, b"=", 0, 0, ""),
        (b"", -2, b"", 0, 0, ""),
        (SOUP[:29] + b"\0\0\0\0\0\0\3\xe8" + bytes(59), 1000, b"", 0, 0, ""),
        (SOUP[:29] + b"\0\0\0\0\0\0\3\xe8" + bytes(59), 1001, b"", 0, 0, "fresh"),
        (STALE, 1001, b"", 0, 0, "fresh"),
        (STALE, -1, b"", 0, 0, "fresh"),
        (STALE, 1000, b"", 0, 0, ""),
        (STALE, 1000, b"", 1, 0, "old"),
        (STALE, 1000, b"=" + FILL.encode(), 1, 0, ""),
        (STALE, 1, b"", 1000, 0, "old"),
        (STALE, 1, b"", 2000, 0, "old"),
        (STALE, 0, b"", 2000, 0, ""),
        (STALE, 601, b"", 400, 0, "old"),
        (STALE, 600, b"", 400, 0, ""),
        (STALE, 1500, b"", 0, 500, "old"),
        (STALE, 1501, b"", 0, 500, "fresh"),
        (SOUP, 500, b"", 0, 500, "old"),
        (SOUP, 501, b"", 0, 500, "fresh"),
    ],
)
def test_freshness(  # noqa: PLR0917  # the parts of a case
    envelope: bytes, ttl: int, reject: bytes, window: int, margin: int, expected: str
) -> None:
    """A value is fresh until its own window begins, or a margin before, then old for the shorter of two windows.

    One that has been seen is neither; garbage is, once.
    """
    assert expected == freshness_of(envelope, ttl, OURS, reject, window, margin)


def test_digest_of_any_text() -> None:
    """Every string is a key, a lone surrogate too."""
    assert key_digest("\ud800") != key_digest("\ud801")
