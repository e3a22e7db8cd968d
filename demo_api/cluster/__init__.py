"""Several service processes on one Redis: what the lease saves."""

import argparse

from .options import add_arguments

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Put load on the processes without and with the lease, and print what was found.

    Args:
        arguments: What `add_arguments` has parsed.

    Returns:
        The exit code: 0, 1 if something failed, 2 for an invalid value, 130 after Ctrl-C.
    """
    from .command import demonstrate  # noqa: PLC0415  # NumPy would slow the start of the service

    return demonstrate(arguments)
