"""The menu as the service sends it, and the changes it accepts."""

from datetime import datetime
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Cents = Annotated[int, Field(ge=0, le=10_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=120)]


class Option(BaseModel):
    """One choice within a group, such as "extra cheese"."""

    id: int
    name: str
    price_cents: Cents


class OptionGroup(BaseModel):
    """A question to the guest about one item, such as "which size?"."""

    id: int
    name: str
    min_choices: int
    max_choices: int
    options: list[Option]


class Item(BaseModel):
    """A dish or a drink."""

    id: int
    name: str
    description: str
    price_cents: Cents
    available: bool
    option_groups: list[OptionGroup]


class Category(BaseModel):
    """A part of the menu, such as "Starters"."""

    id: int
    name: str
    items: list[Item]


class Menu(BaseModel):
    """All that one restaurant offers."""

    restaurant_id: int
    restaurant: str
    cuisine: str
    currency: str
    updated_at: datetime
    version: int
    categories: list[Category]


class RestaurantSummary(BaseModel):
    """A restaurant in a list; its version is that of the menu."""

    restaurant_id: int
    restaurant: str
    cuisine: str
    currency: str
    version: int
    available_items: int
    lowest_price_cents: int | None


class RestaurantList(BaseModel):
    """Restaurants in the order in which they were asked for, and the unknown ids."""

    restaurants: list[RestaurantSummary]
    missing: list[int]


class ItemChange(BaseModel):
    """The changes of an item; a field that is left out keeps its value."""

    model_config = ConfigDict(extra="forbid")

    price_cents: Annotated[int, Field(gt=0, le=10_000_000)] | None = None
    name: Name | None = None
    available: bool | None = None

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.price_cents is None and self.name is None and self.available is None:
            message = "give at least one of price_cents, name, available"
            raise ValueError(message)
        return self


class ItemSummary(BaseModel):
    """The answer to a change: the item without its options, and the new version of the menu."""

    id: int
    name: str
    price_cents: int
    available: bool
    menu_version: int
