import sys
from array import array
from collections import deque
from dataclasses import dataclass
from enum import Enum
from sys import getsizeof
from typing import Any

import msgspec
import pydantic
import pytest

from stampede_guard._memory import sizes
from stampede_guard._memory.sizes import estimate

TEXT = "x" * 10_000


@dataclass
class Plain:
    name: str


@dataclass(slots=True)
class Slotted:
    name: str


class Single:
    __slots__ = "name"  # noqa: PLC0205  # the other form

    def __init__(self, name: str) -> None:
        self.name = name


class Struct(msgspec.Struct):
    name: str


class Model(pydantic.BaseModel):
    name: str


class Colour(Enum):
    RED = TEXT


@pytest.mark.parametrize(
    "value",
    [
        TEXT,
        [TEXT],
        (TEXT,),
        {TEXT},
        deque([TEXT]),
        {"name": TEXT},
        {TEXT: None},
        [[[(TEXT,)]]],
        Plain(TEXT),
        Slotted(TEXT),
        Single(TEXT),
        Struct(TEXT),
        Model(name=TEXT),
        [Plain(TEXT)],
        array("d", [0.0] * 1_250),
        bytearray(10_000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_value_holds_counts(value: object) -> None:
    """A value of ten kilobytes is estimated at little more, of each kind."""
    assert 10_000 <= estimate(value) < 11_500


@pytest.mark.parametrize("value", [None, True, Colour.RED, Model, len, estimate, [].append, sys])
def test_what_is_shared_counts_nothing(value: object) -> None:
    """What no value has to itself, such as a class or a function, is not counted."""
    assert 0 == estimate(value)
    assert getsizeof([value]) == estimate([value])


@pytest.mark.parametrize(
    "value",
    [
        [f"{'x' * 100}{number}" for number in range(10_000)],
        {f"{'x' * 50}{number}": number + 1_000 for number in range(10_000)},
        [{"number": number + 1_000, "texts": [f"{'x' * 100}{number}"]} for number in range(1_000)],
        [Model(name=f"{'x' * 500}{number}") for number in range(1_000)],
    ],
    ids=["texts", "dict", "dicts", "models"],
)
def test_sample_speaks_for_all(value: Any) -> None:
    """A large container is estimated by a few of its items, to within a third of what it takes."""
    opened: list[object] = []
    original = sizes._opened
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "_opened", lambda each: opened.append(each) or original(each))
        size = estimate(value)

    assert 0.7 * taken_by(value) < size < 1.4 * taken_by(value)
    assert len(opened) <= sizes._MOST


def taken_by(value: Any) -> int:
    """Return the bytes of *value*, all of it."""
    if isinstance(value, dict):
        return getsizeof(value) + sum(map(taken_by, value)) + sum(map(taken_by, value.values()))
    if isinstance(value, list):
        return getsizeof(value) + sum(map(taken_by, value))
    if isinstance(value, Model):
        fields = getsizeof(value.__dict__) + getsizeof(value.__pydantic_fields_set__)
        return getsizeof(value) + fields + getsizeof(value.name) + 2 * getsizeof("name")
    return getsizeof(value)


def test_circles_end() -> None:
    """What holds itself is looked at for a bounded time."""
    circle: list[Any] = []
    circle.append(circle)

    assert 0 < estimate(circle) < 10_000


def test_empty() -> None:
    """Nothing in a container, or in an object, is no error."""
    assert estimate([]) == getsizeof([])
    assert estimate(object()) == getsizeof(object())
