"""A Postgres with menus, for the tests of the service."""

import asyncio

import pytest

from demo_api.seeding import seed


@pytest.fixture(scope="session")
def menus_url(database_url: str) -> str:
    """A Postgres that holds the menus."""
    asyncio.run(seed(database_url))
    return database_url
