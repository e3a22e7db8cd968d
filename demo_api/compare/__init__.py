"""The comparison of the service without and with the guard."""

import argparse

from .options import add_arguments

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Compare the modes; print the results, write the report, return the exit code."""
    from .command import compare  # noqa: PLC0415  # matplotlib would double the start time

    return compare(arguments)
