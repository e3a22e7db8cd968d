"""Every async test here runs under each task factory."""

import pytest
from leasing import Server
from task_factories import in_force, make_loop, pause, pytest_generate_tests, task_factory

from stampede_guard.testing import ManualClock

__all__ = ("in_force", "make_loop", "pause", "pytest_generate_tests", "task_factory")


@pytest.fixture
def server(clock: ManualClock) -> Server:
    """Return the store server of a test's processes, in memory and empty."""
    return Server(clock)
