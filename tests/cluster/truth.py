"""The source of truth of a run: rows of a Postgres, each with a version that every write raises by one."""

import asyncpg

CONNECTIONS = 4


class Truth:
    """The rows of one run.

    Args:
        pool: Connections to the database.
        table: The run's own table.
    """

    def __init__(self, pool: asyncpg.Pool, table: str) -> None:
        self._pool = pool
        self._select = f'SELECT version FROM "{table}" WHERE key = $1'  # noqa: S608  # the run's own name
        self._select_all = f'SELECT key, version FROM "{table}"'  # noqa: S608  # as above
        self._update = f'UPDATE "{table}" SET version = version + 1 WHERE key = $1 RETURNING version'  # noqa: S608

    @classmethod
    async def create(cls, url: str, table: str, keys: int) -> None:
        """Make the table, with *keys* rows of version 0."""
        connection = await asyncpg.connect(url)
        try:
            await connection.execute(f'CREATE TABLE "{table}" (key int PRIMARY KEY, version int NOT NULL)')
            rows = f'INSERT INTO "{table}" SELECT key, 0 FROM generate_series(0, $1) key'  # noqa: S608  # as above
            await connection.execute(rows, keys - 1)
        finally:
            await connection.close()

    @classmethod
    async def drop(cls, url: str, table: str) -> None:
        """Remove the table."""
        connection = await asyncpg.connect(url)
        try:
            await connection.execute(f'DROP TABLE "{table}"')
        finally:
            await connection.close()

    async def read(self, key: int) -> int:
        """Return the committed version of *key*."""
        version: int = await self._pool.fetchval(self._select, key)
        return version

    async def read_all(self) -> dict[int, int]:
        """Return the committed version of every key, all of one instant."""
        return {row["key"]: row["version"] for row in await self._pool.fetch(self._select_all)}

    async def write(self, key: int) -> int:
        """Commit the next version of *key*, and return it."""
        version: int = await self._pool.fetchval(self._update, key)
        return version


def pool(url: str) -> asyncpg.Pool:
    """Return connections to the database, to be entered."""
    return asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS)
