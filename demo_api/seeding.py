"""Fills Postgres with the same 500 menus each time, some 60,000 rows."""

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from .database import SCHEMA, open_pool

RESTAURANTS: Final = 500
SEED: Final = 701064
COLUMNS: Final = {
    "restaurants": ("id", "name", "cuisine", "currency", "updated_at"),
    "categories": ("id", "restaurant_id", "position", "name"),
    "items": ("id", "category_id", "position", "name", "description", "price_cents", "available"),
    "option_groups": ("id", "item_id", "position", "name", "min_choices", "max_choices"),
    "options": ("id", "option_group_id", "position", "name", "price_cents"),
}
Rows = dict[str, list[tuple[Any, ...]]]

OWNERS: Final = ("Rosa's", "Golden", "Blue", "Little", "Royal", "Old Town", "Lucky", "Green", "Silver", "Mama's")
PLACES: Final = ("Garden", "Corner", "Kitchen", "House", "Terrace", "Market", "Lantern", "Harbour", "Table", "Yard")
CATEGORIES: Final = ("Starters", "Salads", "Soups", "Mains", "Specials", "Sides", "Desserts", "Drinks")
DISHES: Final = {
    "Italian": ("Margherita", "Lasagne", "Carbonara", "Risotto", "Gnocchi", "Ravioli", "Calzone", "Saltimbocca"),
    "Mexican": ("Burrito", "Quesadilla", "Tacos", "Enchiladas", "Fajitas", "Pozole", "Tamales", "Chilaquiles"),
    "Indian": ("Butter Chicken", "Biryani", "Palak Paneer", "Dal Makhani", "Vindaloo", "Korma", "Samosas", "Dosa"),
    "Japanese": ("Ramen", "Sashimi", "Katsu Curry", "Udon", "Gyoza", "Donburi", "Okonomiyaki", "Yakitori"),
    "Thai": ("Pad Thai", "Green Curry", "Tom Yum", "Massaman", "Larb", "Papaya Salad", "Satay", "Khao Soi"),
    "American": ("Cheeseburger", "Club Sandwich", "Buffalo Wings", "Mac and Cheese", "Ribs", "Cobb Salad", "Chili"),
}
STYLES: Final = ("Classic", "Spicy", "Grilled", "Smoked", "Crispy", "Slow-Cooked", "House", "Vegan", "Family-Size")
TASTES: Final = ("fresh herbs", "roasted garlic", "toasted almonds", "pickled onions", "lime", "brown butter")
# name: (at least, at most, the choices and what they add to the price in cents)
OPTION_GROUPS: Final = {
    "Size": (1, 1, (("Regular", 0), ("Large", 300))),
    "Side": (1, 1, (("Fries", 0), ("Side Salad", 150), ("Rice", 0))),
    "Extras": (0, 3, (("Extra Cheese", 150), ("Avocado", 250), ("Fried Egg", 175))),
    "Heat": (0, 1, (("Mild", 0), ("Hot", 0))),
}


async def seed(database_url: str, *, force: bool = False) -> int:
    """Create the tables and fill them, all or nothing; keep menus that are there already.

    Args:
        database_url: Where Postgres is.
        force: Whether to drop the menus that are there, and start afresh.

    Returns:
        How many rows were written: 0 if the menus were there already.

    Raises:
        DatabaseError: If Postgres cannot be reached.
    """
    async with open_pool(database_url, size=1) as pool, pool.acquire() as connection:
        async with connection.transaction():
            # Two processes may seed at the same time.
            await connection.execute("SELECT pg_advisory_xact_lock($1)", SEED)
            if force:
                await connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
            if await connection.fetchval("SELECT to_regnamespace($1) IS NOT NULL", SCHEMA):
                return 0
            await connection.execute(f"CREATE SCHEMA {SCHEMA}")
            await connection.execute((Path(__file__).parent / "schema.sql").read_text())
            rows = _menus()
            for table, columns in COLUMNS.items():
                await connection.copy_records_to_table(table, records=rows[table], columns=columns)
        # Without statistics the first query plans would be guesses.
        await connection.execute(f"VACUUM ANALYZE {', '.join(COLUMNS)}")
    return sum(map(len, rows.values()))


def _menus() -> Rows:
    chance = random.Random(SEED)
    rows: Rows = {table: [] for table in COLUMNS}
    for restaurant_id in range(1, RESTAURANTS + 1):
        cuisine = chance.choice(tuple(DISHES))
        name = f"{chance.choice(OWNERS)} {cuisine} {chance.choice(PLACES)}"
        updated_at = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(minutes=chance.randrange(500_000))
        rows["restaurants"].append((restaurant_id, name, cuisine, "USD", updated_at))
        names = sorted(chance.sample(CATEGORIES, chance.randint(5, 7)), key=CATEGORIES.index)
        for position, category in enumerate(names):
            category_id = _append(rows["categories"], restaurant_id, position, category)
            _add_items(rows, category_id, cuisine, chance)
    return rows


def _add_items(rows: Rows, category_id: int, cuisine: str, chance: random.Random) -> None:
    for position in range(chance.randint(3, 7)):
        dish = chance.choice(DISHES[cuisine])
        name = f"{chance.choice(STYLES)} {dish}"
        description = f"{dish} with {' and '.join(chance.sample(TASTES, 2))}"
        price_cents = chance.randrange(350, 2400, 5)
        available = chance.random() < 0.95
        item_id = _append(rows["items"], category_id, position, name, description, price_cents, available)
        groups = chance.sample(tuple(OPTION_GROUPS), chance.choice((0, 1, 1, 1)))
        for group_position, group in enumerate(groups):
            _add_option_group(rows, item_id, group_position, group)


def _add_option_group(rows: Rows, item_id: int, position: int, name: str) -> None:
    at_least, at_most, choices = OPTION_GROUPS[name]
    group_id = _append(rows["option_groups"], item_id, position, name, at_least, at_most)
    for option_position, (choice, price_cents) in enumerate(choices):
        _append(rows["options"], group_id, option_position, choice, price_cents)


def _append(table: list[tuple[Any, ...]], *columns: Any) -> int:
    row_id = len(table) + 1
    table.append((row_id, *columns))
    return row_id
