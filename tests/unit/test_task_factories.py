import asyncio

import pytest


async def test_task_factory_is_in_force(request: pytest.FixtureRequest) -> None:
    """Under the eager factory a task runs before its creation returns, under the lazy one it does not.

    It is so in tests that do not ask for it by name, as most do not.
    """
    ran = []

    async def note() -> None:
        ran.append("note")

    task = asyncio.create_task(note())

    assert ["note"] * (request.node.callspec.params["task_factory"] == "eager") == ran
    await task
