"""Every async test here runs under each task factory."""

from task_factories import make_loop, pause, pytest_generate_tests, task_factory

__all__ = ("make_loop", "pause", "pytest_generate_tests", "task_factory")
