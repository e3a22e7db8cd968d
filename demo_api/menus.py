"""The menus in Postgres."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import asyncpg

from .database import Connection
from .models import Category, Item, ItemChange, ItemSummary, Menu, Option, OptionGroup, RestaurantSummary

SELECT_MENU: Final = """
SELECT
    restaurant.id AS restaurant_id, restaurant.name AS restaurant, cuisine, currency, updated_at, version,
    category.id AS category_id, category.name AS category,
    item.id AS item_id, item.name AS item, description, item.price_cents, available,
    option_group.id AS group_id, option_group.name AS option_group, min_choices, max_choices,
    option.id AS option_id, option.name AS option, option.price_cents AS option_price_cents
FROM restaurants AS restaurant
LEFT JOIN categories AS category ON category.restaurant_id = restaurant.id
LEFT JOIN items AS item ON item.category_id = category.id
LEFT JOIN option_groups AS option_group ON option_group.item_id = item.id
LEFT JOIN options AS option ON option.option_group_id = option_group.id
WHERE restaurant.id = $1
ORDER BY category.position, item.position, option_group.position, option.position
"""

SELECT_SUMMARIES: Final = """
SELECT
    restaurant.id AS restaurant_id, restaurant.name AS restaurant, cuisine, currency, version,
    count(item.id) FILTER (WHERE available) AS available_items,
    min(item.price_cents) FILTER (WHERE available) AS lowest_price_cents
FROM restaurants AS restaurant
LEFT JOIN categories AS category ON category.restaurant_id = restaurant.id
LEFT JOIN items AS item ON item.category_id = category.id
WHERE restaurant.id = ANY($1)
GROUP BY restaurant.id
"""

UPDATE_ITEM: Final = """
UPDATE items AS item
SET price_cents = coalesce($3, item.price_cents),
    name = coalesce($4, item.name),
    available = coalesce($5, item.available)
FROM categories AS category
WHERE item.id = $2 AND category.id = item.category_id AND category.restaurant_id = $1
RETURNING item.id, item.name, item.price_cents, item.available
"""

# The row stays locked until the commit, so the later commit of two has the higher version.
TOUCH_RESTAURANT: Final = (
    "UPDATE restaurants SET updated_at = now(), version = version + 1 WHERE id = $1 RETURNING version"
)


MAX_ID: Final = 2**31 - 1  # the largest integer of Postgres


@dataclass(frozen=True, slots=True)
class SerializedMenu:
    """A menu as it is sent.

    Attributes:
        version: Its version.
        body: The menu as compact JSON, its version included.
    """

    version: int
    body: bytes


def version_of(menu: SerializedMenu | None) -> int:
    """Return the version of a menu; a missing menu has the lowest, 0."""
    return 0 if menu is None else menu.version


def menu_of(rows: Sequence[asyncpg.Record]) -> Menu:
    """Build a menu from joined rows: one for each option, in the order of the menu.

    A row begins each part that differs from the row before; the columns of a missing part are null.
    """
    part = _part(rows[0], "restaurant_id", "restaurant", "cuisine", "currency", "updated_at", "version")
    menu = Menu(**part, categories=[])
    for row in rows:
        categories = menu.categories
        if _begins(categories, row["category_id"]):
            categories.append(Category(id=row["category_id"], name=row["category"], items=[]))
        items = categories[-1].items if categories else []
        if _begins(items, row["item_id"]):
            part = _part(row, "description", "price_cents", "available")
            items.append(Item(id=row["item_id"], name=row["item"], **part, option_groups=[]))
        groups = items[-1].option_groups if items else []
        if _begins(groups, row["group_id"]):
            part = _part(row, "min_choices", "max_choices")
            groups.append(OptionGroup(id=row["group_id"], name=row["option_group"], **part, options=[]))
        if row["option_id"] is not None:
            option = Option(id=row["option_id"], name=row["option"], price_cents=row["option_price_cents"])
            groups[-1].options.append(option)
    return menu


def _begins(parts: Sequence[Category | Item | OptionGroup], part_id: int | None) -> bool:
    return part_id is not None and (not parts or parts[-1].id != part_id)


def _part(row: asyncpg.Record, *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names}


class MenuRepository:
    """Reads and writes menus, and counts the queries that this takes."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self.queries = 0

    async def load_menu(self, restaurant_id: int) -> SerializedMenu | None:
        """Read the whole menu of a restaurant in one query.

        Args:
            restaurant_id: The restaurant.

        Returns:
            The menu, or ``None`` if there is no such restaurant.
        """
        if restaurant_id > MAX_ID:
            return None
        self.queries += 1
        rows = await self._pool.fetch(SELECT_MENU, restaurant_id)
        if not rows:
            return None
        menu = menu_of(rows)
        return SerializedMenu(menu.version, menu.model_dump_json().encode())

    async def load_summaries(self, restaurant_ids: Sequence[int]) -> dict[int, RestaurantSummary]:
        """Read what a list shows of several restaurants, in one query.

        Args:
            restaurant_ids: Which ones; none larger than ``MAX_ID``.

        Returns:
            The summaries by id; unknown ids are left out.
        """
        self.queries += 1
        rows = await self._pool.fetch(SELECT_SUMMARIES, restaurant_ids)
        return {row["restaurant_id"]: RestaurantSummary(**row) for row in rows}

    async def update_item(
        self, connection: Connection, restaurant_id: int, item_id: int, change: ItemChange
    ) -> ItemSummary | None:
        """Change an item, and give its menu a new version.

        Args:
            connection: In a transaction, because item and version change together.
            restaurant_id: The restaurant with the menu.
            item_id: Which item of that menu.
            change: What to change.

        Returns:
            The item as it is now, or ``None`` if the restaurant has no such item.
        """
        self.queries += 1
        item = await connection.fetchrow(
            UPDATE_ITEM, restaurant_id, item_id, change.price_cents, change.name, change.available
        )
        if item is None:
            return None
        self.queries += 1
        version = await connection.fetchval(TOUCH_RESTAURANT, restaurant_id)
        return ItemSummary(**item, menu_version=version)
