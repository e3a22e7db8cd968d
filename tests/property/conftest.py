"""Every async test here runs under each task factory; and a busy machine is no reason to fail."""

from hypothesis import HealthCheck, settings
from task_factories import in_force, make_loop, pause, pytest_generate_tests, task_factory

__all__ = ("in_force", "make_loop", "pause", "pytest_generate_tests", "task_factory")

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
