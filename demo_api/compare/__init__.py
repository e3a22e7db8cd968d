"""The comparison of the service without and with the guard."""

import argparse

from .options import add_arguments

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Compare the modes, print what was found, and write the report.

    Args:
        arguments: What `add_arguments` has parsed.

    Returns:
        The exit code: 0, 1 if something failed, 2 for an invalid value, 130 after Ctrl-C.
    """
    from .command import compare  # noqa: PLC0415  # matplotlib would double the start time

    return compare(arguments)
