"""Every async test here runs under each task factory."""

from task_factories import in_force, make_loop, pause, pytest_generate_tests, task_factory

__all__ = ("in_force", "make_loop", "pause", "pytest_generate_tests", "task_factory")
