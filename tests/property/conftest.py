"""Every async test here runs under each task factory; and a busy machine is no reason to fail."""

from examples import examples
from hypothesis import HealthCheck, settings
from task_factories import in_force, make_loop, pause, pytest_generate_tests, task_factory

__all__ = ("in_force", "make_loop", "pause", "pytest_generate_tests", "task_factory")

settings.register_profile(
    "busy", max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")
