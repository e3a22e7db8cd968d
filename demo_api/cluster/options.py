"""The flags of the demonstration, checked before anything starts."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..compare.options import MAX_USERS, BadOptionError, Options, parse_count, parse_seconds
from ..seeding import RESTAURANTS
from ..settings import Settings

INSTANCES: Final = "4"
# Each process has a pool of connections, and Postgres accepts a hundred.
MAX_PROCESSES: Final = 8
# Defaults for the environment: short, so that a run contains several expiries.
LIVES: Final = {"L1_TTL": "1", "L2_TTL": "2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The processes, and the load on them.

    Attributes:
        instances: How many instances, each with a port of its own.
        workers: In how many processes each of them runs.
        lives: The lives of entries, as environment variables.
        l2_ttl: How many seconds a menu stays in L2.
        load: The load, the same without and with the lease.
    """

    instances: int
    workers: int
    lives: Mapping[str, str]
    l2_ttl: float
    load: Options

    @property
    def title(self) -> str:
        """The processes, in words."""
        return f"{self.instances} instances" if self.workers == 1 else f"1 instance with {self.workers} workers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `cluster` to *parser*.

    Values stay text here; `parse` checks them, and reports an error in one line.
    """
    add = parser.add_argument
    add("--instances", default="", help=f"instances of the service, 2 to {MAX_PROCESSES} [{INSTANCES}]")
    add("--workers", default="", help=f"instead: one instance with so many workers, 2 to {MAX_PROCESSES}")
    add("--seconds", default="11", help="length of each of the two runs; several times the L2 TTL [%(default)s]")
    add("--users", default="100", help="users, spread over the processes [%(default)s]")
    add("--restaurants", default="10", help=f"menus that are asked for, 1 to {RESTAURANTS} [%(default)s]")
    add("--seed", default="menu", help="the same seed asks for the same ids in the same order [%(default)s]")


def parse(arguments: argparse.Namespace) -> Fleet:
    """Return what *arguments* and the environment ask for.

    Raises:
        BadOptionError: If a value breaks its rule.
        ValidationError: If a variable of the environment does.
    """
    if arguments.instances and arguments.workers:
        raise BadOptionError("--instances and --workers: give one of them")
    lives = {name: os.environ.get(name) or life for name, life in LIVES.items()}
    given: dict[str, Any] = {name.lower(): life for name, life in lives.items()}
    l2_ttl = Settings(**given).l2_ttl
    seconds = parse_seconds(arguments.seconds)
    if seconds <= l2_ttl:
        raise BadOptionError(f"--seconds {arguments.seconds}: must be longer than the L2 TTL, {l2_ttl:g}")
    return Fleet(
        instances=1 if arguments.workers else _processes("--instances", arguments.instances or INSTANCES),
        workers=_processes("--workers", arguments.workers) if arguments.workers else 1,
        lives=lives,
        l2_ttl=l2_ttl,
        load=Options(
            seconds=seconds,
            users=parse_count("--users", arguments.users, MAX_USERS),
            restaurants=parse_count("--restaurants", arguments.restaurants, RESTAURANTS),
            modes=(),
            seed=arguments.seed,
            output=None,
        ),
    )


def _processes(flag: str, text: str) -> int:
    return parse_count(flag, text, MAX_PROCESSES, least=2)
