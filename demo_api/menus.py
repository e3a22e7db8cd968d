"""The menus in Postgres."""

from typing import Final

import asyncpg

from .models import ItemChange, ItemSummary, Menu

# Postgres puts the tree together: one round trip and no row of it repeated, as joins over five levels would.
SELECT_MENU: Final = """
SELECT json_build_object(
    'restaurant_id', restaurant.id,
    'restaurant', restaurant.name,
    'cuisine', restaurant.cuisine,
    'currency', restaurant.currency,
    'updated_at', restaurant.updated_at,
    'categories', ARRAY(
        SELECT json_build_object('id', category.id, 'name', category.name, 'items', ARRAY(
            SELECT json_build_object(
                'id', item.id,
                'name', item.name,
                'description', item.description,
                'price_cents', item.price_cents,
                'available', item.available,
                'option_groups', ARRAY(
                    SELECT json_build_object(
                        'id', option_group.id,
                        'name', option_group.name,
                        'min_choices', option_group.min_choices,
                        'max_choices', option_group.max_choices,
                        'options', ARRAY(
                            SELECT json_build_object('id', id, 'name', name, 'price_cents', price_cents)
                            FROM options WHERE option_group_id = option_group.id ORDER BY position
                        )
                    )
                    FROM option_groups AS option_group WHERE item_id = item.id ORDER BY position
                )
            )
            FROM items AS item WHERE category_id = category.id ORDER BY position
        ))
        FROM categories AS category WHERE restaurant_id = restaurant.id ORDER BY position
    )
)
FROM restaurants AS restaurant WHERE restaurant.id = $1
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

TOUCH_RESTAURANT: Final = "UPDATE restaurants SET updated_at = now() WHERE id = $1"


MAX_ID: Final = 2**31 - 1  # the largest integer of Postgres


class MenuRepository:
    """Reads and writes menus, and counts the queries that this takes."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self.queries = 0

    async def load_menu(self, restaurant_id: int) -> bytes | None:
        """Read the whole menu of a restaurant in one query.

        Args:
            restaurant_id: Whose menu.

        Returns:
            The menu as compact JSON, or ``None`` if there is no such restaurant.
        """
        if restaurant_id > MAX_ID:
            return None
        self.queries += 1
        found: str | None = await self._pool.fetchval(SELECT_MENU, restaurant_id)
        if found is None:
            return None
        return Menu.model_validate_json(found).model_dump_json().encode()

    async def update_item(self, restaurant_id: int, item_id: int, change: ItemChange) -> ItemSummary | None:
        """Change an item, and note on its restaurant that the menu changed, in one transaction.

        Args:
            restaurant_id: Whose menu.
            item_id: Which item of that menu.
            change: What to change.

        Returns:
            The item as it is now, or ``None`` if the restaurant has no such item.
        """
        async with self._pool.acquire() as connection, connection.transaction():
            self.queries += 1
            item = await connection.fetchrow(
                UPDATE_ITEM, restaurant_id, item_id, change.price_cents, change.name, change.available
            )
            if item is None:
                return None
            self.queries += 1
            await connection.execute(TOUCH_RESTAURANT, restaurant_id)
        return ItemSummary.model_validate(dict(item))
