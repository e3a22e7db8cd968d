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

from stampede_guard import Codec, ConfigurationError
from stampede_guard._codec import codec_for, fill_of, key_digest, seal, unseal

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
        (Any, "Any"),
        (object, "object"),
        (list, "Any"),
        (dict, "Any"),
        (dict[str, Any], "Any"),
        (list[list[Any]], "Any"),
        (tuple[int, Any], "Any"),
        (int | list[Any], "Any"),
        (Loose, "Any"),
        (list[Loose], "Any"),
        (Plain, "Plain"),
        (list[Plain], "Plain"),
        (Callable[[], int], ""),
        (list[T], "Any"),
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


@pytest.mark.parametrize("payload", [b"", b"a", b"SGv2", bytes(1000)])
@pytest.mark.parametrize("marks", [(), (b"m" * 11,), (b"m" * 11, b"n" * 11)])
def test_envelope(payload: bytes, marks: tuple[bytes, ...]) -> None:
    """What was sealed for a key is unsealed for it, with the marks of its tags."""
    assert (payload, marks) == unseal("menu-7", seal("menu-7", payload, FILL, None, marks))


def test_envelope_tells_who_stored_it() -> None:
    """The token of the flight that stored an envelope can be read from it; from anything else nothing that matters."""
    assert FILL.encode() == fill_of(seal("menu-7", b"payload", FILL))
    assert b"" == fill_of(b"x")


@pytest.mark.parametrize("key", ["menu-8", "menu-7 ", "", "Menu-7", "menu-\uff17"])
def test_envelope_of_another_key(key: str) -> None:
    """What was sealed for one key cannot be unsealed for another, however alike."""
    assert unseal(key, seal("menu-7", b"payload", FILL)) is None


@pytest.mark.parametrize(
    "envelope",
    [
        b"",
        b"SGv2",
        seal("menu-7", b"payload", FILL)[:-1],
        seal("menu-7", b"payload", FILL) + b"!",
        seal("menu-7", b"payload", FILL)[:50] + b"\1" + seal("menu-7", b"payload", FILL)[51:],
        b"SGv1" + seal("menu-7", b"payload", FILL)[4:],
        b"payload that somebody else wrote under our key",
    ],
)
def test_broken_envelopes(envelope: bytes) -> None:
    """Bytes that were cut, prolonged, or never an envelope, are nothing."""
    assert unseal("menu-7", envelope) is None


def test_envelope_is_pinned() -> None:
    """The wire format stays as it is: magic, token, version, digest, number of marks, length, marks, payload."""
    expected = b"".join((b"SGv2", b"f" * 22, bytes(7), b"\3", key_digest("menu-7"), b"\1", bytes(3), b"\2", b"m" * 11))

    assert expected + b"hi" == seal("menu-7", b"hi", FILL, 3, [b"m" * 11])
    assert 16 == len(key_digest("menu-7"))


def test_digest_of_any_text() -> None:
    """Every string is a key, a lone surrogate too."""
    assert key_digest("\ud800") != key_digest("\ud801")
