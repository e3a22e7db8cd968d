from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import attrs
import msgspec
import pydantic
import pytest
from loaders import refuse, returning

from stampede_guard import Guard

MakeGuard = Callable[..., Guard]


class LocalLoad(Enum):
    STARTER = "starter"
    MAIN = "main"


@dataclass
class Dish:
    name: str
    price: Decimal
    course: LocalLoad = LocalLoad.MAIN
    tags: list[str] = field(default_factory=list)


@attrs.define
class Table:
    number: int
    seats: int | None = None


class Order(msgspec.Struct):
    order_id: UUID
    placed_at: datetime
    dishes: list[Dish] = []


class Menu(pydantic.BaseModel):
    menu_id: int
    dishes: list[str]
    price: Decimal


NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)
ORDER_ID = UUID("6f9619ff-8b86-4d11-b42d-00c04fc964ff")
DISH = Dish("soup", Decimal("4.50"), LocalLoad.STARTER, ["hot", "crème"])
MENU = Menu(menu_id=7, dishes=["soup"], price=Decimal("4.50"))

VALUES: list[tuple[Any, Any]] = [
    (Dish, DISH),
    (Table, Table(3)),
    (Order, Order(ORDER_ID, NOON, [DISH])),
    (Menu, MENU),
    (list[Menu], [MENU, MENU]),
    (Menu | None, None),
    (dict[str, Menu], {"lunch": MENU}),
    (datetime, NOON),
    (date, NOON.date()),
    (timedelta, timedelta(minutes=90)),
    (UUID, ORDER_ID),
    (Decimal, Decimal("0.10")),
    (LocalLoad, LocalLoad.STARTER),
    (bytes, bytes(range(256))),
    (bytes, b""),
    (str, "crème brûlée \N{CUSTARD} \x00 \r\n"),
    (str, ""),
    (None, None),
    (bool, False),
    (int, 0),
    (int | None, None),
    (float, 0.1),
    (int | str, "7"),
    (tuple[int, str], (7, "soup")),
    (set[int], {1, 2, 3}),
    (dict[str, list[Dish]], {"lunch": [DISH]}),
    (dict[int, tuple[Table, ...]], {1: (Table(1), Table(2, 4))}),
    (list[dict[str, Decimal | None]], [{"a": Decimal(1)}, {"b": None}]),
]


@pytest.mark.parametrize(("annotation", "value"), VALUES, ids=[str(annotation) for annotation, _ in VALUES])
async def test_values_come_back_from_the_store(annotation: Any, value: Any, make_guard: MakeGuard) -> None:
    """Another guard reads an equal value of the same type."""
    async with make_guard() as first, make_guard() as second:
        await first.fetch("menu-7", returning(value), l2_ttl=60, returns=annotation)
        answer = await second.fetch("menu-7", refuse, l2_ttl=60, returns=annotation)

    assert value == answer
    assert type(value) is type(answer)


async def test_changed_annotation_is_a_miss(make_guard: MakeGuard) -> None:
    """After a deployment that changed the type, the stored value is loaded anew."""

    async def load_old() -> dict[str, str]:
        return {"name": "soup"}

    async with make_guard() as old, make_guard() as new:
        await old.fetch("menu-7", load_old, l2_ttl=60, returns=dict[str, str])
        answer = await new.fetch("menu-7", returning(DISH), l2_ttl=60, returns=Dish)

    assert answer == DISH
    assert (0, 0, 1) == (new.stats().l2_undecodable, new.stats().l2_hits, new.stats().l2_misses)
