"""Several service processes on one Redis: what the lease saves."""

import argparse

from .options import add_arguments

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Put load on the processes without and with the lease; print the results, return the exit code."""
    from .command import demonstrate  # noqa: PLC0415  # NumPy would slow the start of the service

    return demonstrate(arguments)
