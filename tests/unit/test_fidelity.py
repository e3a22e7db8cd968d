import functools
import re
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from math import inf, nan
from typing import Any
from uuid import UUID

import attrs
import msgspec
import pydantic
import pytest
from asyncpg.pgproto import pgproto

from stampede_guard._codecs.fidelity import Comparison

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
UUID_7 = "12345678-1234-5678-1234-567812345678"


@dataclass
class Item:
    name: str
    price: float = 1.0
    note: str = field(default="", compare=False)

    @functools.cached_property
    def shown(self) -> str:
        return f"{self.name} {self.price}"


@dataclass
class Priced(Item):
    tax: float = 0.2


@dataclass(eq=False, slots=True)
class Plain:
    content: Any


@attrs.define
class Shop:
    name: Any


class Menu(msgspec.Struct):
    items: list[Any]


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    content: Any = None
    _cache: Any = pydantic.PrivateAttr(default=None)

    @pydantic.computed_field
    @functools.cached_property
    def shown(self) -> str:
        return str(self.content)


def with_more(**fields: Any) -> Model:
    """Return a model with fields that it does not declare."""
    return Model.model_validate(fields)


class Own:
    def __init__(self, content: Any) -> None:
        self.content = content


class Cents(int):
    pass


class Opaque:
    __slots__ = ()


def with_cache(item: Item) -> Item:
    """Return *item*, having filled its cache."""
    assert item.shown
    return item


def private(model: Model, cache: Any) -> Model:
    """Return *model* with a private attribute."""
    model._cache = cache
    return model


def shown(model: Model) -> Model:
    """Return *model*, having filled its cache."""
    assert model.shown
    return model


@pytest.mark.parametrize(
    ("value", "copy"),
    [
        (None, None),
        ([1, "a", b"b", None, True], [1, "a", b"b", None, True]),
        (nan, float("nan")),
        ([inf, -0.0], [inf, -0.0]),
        (3, 3.0),
        ([1, 2.5], [1.0, 2.5]),
        ({1: 2}, {1.0: 2.0}),
        ({1}, {1.0}),
        (Item("tea", price=3), Item("tea", price=3.0)),
        (Decimal("NaN"), Decimal("NaN")),
        ({"a": [1], 2: "b"}, {2: "b", "a": [1]}),
        ({1, 2}, {2, 1}),
        (NOON, datetime(2026, 3, 1, 12, tzinfo=timezone(timedelta(0)))),
        (pgproto.UUID(UUID_7), UUID(UUID_7)),
        ({pgproto.UUID(UUID_7)}, {UUID(UUID_7)}),
        (Item("tea"), Item("tea")),
        (with_cache(Item("tea")), Item("tea")),
        (Plain([1]), Plain([1])),
        (Shop(Item("tea")), Shop(Item("tea"))),
        (Menu([Item("tea")]), Menu([Item("tea")])),
        (with_more(content=[1], more=2), with_more(content=[1], more=2)),
        (shown(Model(content=[1])), Model(content=[1])),
        (Own([1]), Own([1])),
    ],
)
def test_faithful_copies(value: Any, copy: Any) -> None:
    """A copy of the same types and contents is the value, whether its class can say so or not."""
    comparison = Comparison(value, copy)

    assert comparison.difference is None
    assert comparison.is_certain


@pytest.mark.parametrize(
    ("value", "copy", "difference"),
    [
        (2**53 + 1, float(2**53), "the value is a int, and comes back as a float"),
        (1.0, 1, "the value is a float, and comes back as a int"),
        (Cents(7), 7.0, "the value is a Cents"),
        (True, 1, "the value is a bool"),
        (Cents(7), 7, "the value is a Cents"),
        (0.0, -0.0, "the value comes back as another float"),
        (Decimal("1.0"), Decimal("1.00"), "the value comes back as another Decimal"),
        ((1,), [1], "the value is a tuple"),
        ([1], [1, 2], "the value comes back with another length"),
        ([1, [True]], [1, [1]], r"the value\[1\]\[0\] is a bool"),
        ({"a": 1}, {}, "the value comes back with another length"),
        ({"a": 1}, {"b": 1}, "the value has a key that"),
        ({1: 1}, {True: 1}, "the value has a key that is a int"),
        ({"a": 1}, {"a": 2}, r"the value\[…\] comes back as another int"),
        (OrderedDict(a=1), {"a": 1}, "the value is a OrderedDict"),
        (defaultdict(int, a=1), {"a": 1}, "the value is a defaultdict"),
        ({1}, {True}, "the value has a key that is a int"),
        ({1}, {2}, "the value has a key that"),
        ({1}, {1, 2}, "the value comes back with another length"),
        ({(1, 1)}, {(1, True)}, r"the value has a key that\[1\] is a int"),
        (frozenset({frozenset({1})}), frozenset({frozenset({True})}), "has a key that has a key that is a int"),
        (time(2, fold=1), time(2), "the value comes back as another time"),
        (NOON, NOON.astimezone(timezone(timedelta(hours=1))), "the value comes back as another datetime"),
        (time(12), time(12, tzinfo=UTC), "the value comes back as another time"),
        (Priced("tea"), Item("tea"), "the value is a Priced"),
        ([Priced("tea")], [Item("tea")], r"the value\[0\] is a Priced"),
        (Item("tea", note="x"), Item("tea"), r"the value\.note comes back as another str"),
        (Plain([1]), Plain([2]), r"the value\.content\[0\]"),
        (Shop("a"), Shop("b"), r"the value\.name"),
        (Menu([1]), Menu([2]), r"the value\.items\[0\]"),
        (Model(content=pydantic.SecretStr("a")), Model(content=pydantic.SecretStr("b")), r"the value\.content"),
        (with_more(more=1), Model(), r"the value\.more|__pydantic_extra__"),
        (private(Model(), 1), Model(), "__pydantic_private__"),
        (Own(1), Own(2), r"the value\.content"),
        (Own(1), object.__new__(Own), r"the value\.content is lost, or added"),
    ],
)
def test_copies_that_are_something_else(value: Any, copy: Any, difference: str) -> None:
    """Where a copy differs in type or content is told, without the content."""
    found = Comparison(value, copy).difference

    assert found is not None
    assert re.search(difference, found)


def test_what_cannot_be_compared() -> None:
    """An object without attributes and an equality of its own is neither the same nor something else."""
    comparison = Comparison([Opaque()], [Opaque()])

    assert (None, False) == (comparison.difference, comparison.is_certain)


def test_large_values_are_compared_as_a_whole_beyond_some_thousand_parts() -> None:
    """What comparing costs has a bound; beyond it, equality has to do."""
    value, copy = [*range(11_000), [True]], [*range(11_000), [1]]

    assert Comparison(value, copy).difference is None
    assert Comparison([*value, 1], [*copy, 2]).difference is not None
