"""Connections to Postgres."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import urlsplit

import asyncpg

# A schema of its own keeps the tables apart from the database's others.
SCHEMA: Final = "stampede_demo"
CONNECT_TIMEOUT: Final = 5.0
# What asyncpg raises while Postgres cannot be reached.
UNAVAILABLE: Final = (OSError, TimeoutError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError)

# asyncpg's classes take type parameters only in its stubs.
if TYPE_CHECKING:
    Connection: TypeAlias = asyncpg.pool.PoolConnectionProxy[asyncpg.Record]
else:
    Connection = asyncpg.pool.PoolConnectionProxy


class DatabaseError(Exception):
    """Postgres cannot be used; the message names its address, and never shows the password."""


@asynccontextmanager
async def open_pool(database_url: str, size: int) -> AsyncGenerator[asyncpg.Pool]:
    """Open *size* connections, and close them on the way out.

    Args:
        database_url: Where Postgres is, such as ``postgresql://user:password@host:5432/name``.
        size: How many connections.

    Raises:
        DatabaseError: If the URL is invalid, or Postgres does not answer or refuses.
    """
    place = _place(database_url)
    try:
        pool = await asyncpg.create_pool(
            database_url,
            min_size=size,
            max_size=size,
            timeout=CONNECT_TIMEOUT,
            server_settings={"search_path": SCHEMA, "application_name": SCHEMA},
        )
    except (OSError, asyncpg.PostgresError) as error:
        reason = str(error) or type(error).__name__
        message = f"Postgres at {place} cannot be used ({reason}); check DATABASE_URL"
        raise DatabaseError(message) from error
    except (ValueError, asyncpg.InterfaceError):
        raise _not_a_url() from None
    async with pool:
        yield pool


def _place(database_url: str) -> str:
    """Return the host and port that *database_url* names."""
    try:
        authority = urlsplit(database_url).netloc
    except ValueError:
        raise _not_a_url() from None
    if "@" in database_url and "@" not in authority:
        raise _not_a_url()
    return authority.rpartition("@")[2] or "its default address"


def _not_a_url() -> DatabaseError:
    # Without the parser's own message, which shows part of a password that is not quoted.
    return DatabaseError(
        "DATABASE_URL is not of the form postgresql://user:password@host:5432/name "
        "(special characters in the password are written like %2F)"
    )
