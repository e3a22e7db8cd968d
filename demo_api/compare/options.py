"""The flags of the comparison, checked before anything starts."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..seeding import RESTAURANTS

MODES: Final = ("off", "aiocache", "on")
MAX_USERS: Final = 4000
SHORTEST_WINDOW: Final = 1.0


class BadOptionError(Exception):
    """A flag has an invalid value; the message names the value and the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One comparison: the same load for every mode."""

    seconds: float
    users: int
    restaurants: int
    modes: tuple[str, ...]
    seed: str
    output: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `compare` to *parser*.

    Values stay text here; `parse` checks them, and reports an error in one line.
    """
    add = parser.add_argument
    add("--seconds", default="11", help="length of each measured run; longer than the L2 TTL [%(default)s]")
    add("--users", default="2000", help="users at saturation, and connections at the constant rate [%(default)s]")
    add("--restaurants", default="20", help=f"menus that are asked for, 1 to {RESTAURANTS} [%(default)s]")
    add("--modes", default=",".join(MODES), help="modes to compare, in this order [%(default)s]")
    add("--seed", default="menu", help="the same seed asks for the same ids in the same order [%(default)s]")
    add("--output", default="", metavar="DIR", help="folder of the report [reports/<time>]")


def parse(arguments: argparse.Namespace) -> Options:
    """Return the options that *arguments* ask for.

    Raises:
        BadOptionError: If a value breaks its rule.
    """
    output = Path(arguments.output).resolve() if arguments.output else None
    if output is not None and output.exists() and not output.is_dir():
        raise BadOptionError(f"--output {arguments.output}: that is a file, and must be a folder")
    return Options(
        seconds=parse_seconds(arguments.seconds),
        users=parse_count("--users", arguments.users, MAX_USERS),
        restaurants=parse_count("--restaurants", arguments.restaurants, RESTAURANTS),
        modes=_modes(arguments.modes),
        seed=arguments.seed,
        output=output,
    )


def parse_seconds(text: str) -> float:
    """Return the length of a window.

    Raises:
        BadOptionError: If it is not a number, or too small.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not SHORTEST_WINDOW <= seconds < math.inf:
        raise BadOptionError(f"--seconds {text}: must be a number of at least {SHORTEST_WINDOW:g}")
    return seconds


def parse_count(flag: str, text: str, most: int, least: int = 1) -> int:
    """Return the whole number that *flag* was given.

    Raises:
        BadOptionError: If *text* is not a whole number from *least* to *most*.
    """
    try:
        count = int(text)
    except ValueError:
        count = least - 1
    if not least <= count <= most:
        raise BadOptionError(f"{flag} {text}: must be a whole number from {least} to {most}")
    return count


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(mode.strip() for mode in text.split(","))
    for mode in modes:
        if mode not in MODES:
            raise BadOptionError(f"--modes {text}: {mode!r} is none of {', '.join(MODES)}")
    if len(set(modes)) < len(modes):
        raise BadOptionError(f"--modes {text}: each mode may be named once")
    return modes
