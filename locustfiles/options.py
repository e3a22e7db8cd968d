"""The command line options that all scenarios share, beside Locust's own."""

import argparse

from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

MENU_PATH = "/restaurants/{restaurant_id}/menu"


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return count


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 <= rate < 1e6:
        raise argparse.ArgumentTypeError(f"must be 0 (no fixed rate) or arrivals per second, got {text}")
    return rate


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """Add the shared options to Locust's *parser*, and with that to its web form."""
    group = parser.add_argument_group("Menu load")
    group.add_argument("--restaurants", type=_count, default=20, help="Ask for the ids 1 to this number. [20]")
    group.add_argument("--seed", default="menu", help="The same seed gives the same ids in the same order. [menu]")
    group.add_argument(
        "--rate",
        type=_rate,
        default=0.0,
        help="Arrivals per second and user on a fixed timetable, however slow the answers are."
        " 0 is the closed loop: each user asks again as soon as it has its answer. [0]",
    )
    group.add_argument(
        "--connections", type=_count, default=500, help="Open connections of a user with a fixed --rate. [500]"
    )
    group.add_argument(
        "--hosts", default="", help="Further base URLs of the service, separated by commas; connections take turns."
    )
    group.add_argument("--path", default=MENU_PATH, help=f"What to ask for. [{MENU_PATH}]")
    group.add_argument(
        "--window",
        type=float,
        default=0.0,
        help="Seconds of load once all users have connected; --run-time includes the connecting. [0: no end]",
    )
    group.add_argument("--record", default="", help="Write the raw samples to this file (one for each worker).")


def hosts_of(environment: Environment) -> list[str]:
    """Return all base URLs of the service, `--host` first."""
    further = options_of(environment).hosts.split(",")
    return [str(environment.host), *(host.strip() for host in further if host.strip())]


def options_of(environment: Environment) -> argparse.Namespace:
    """Return the options that *environment* runs with."""
    options = environment.parsed_options
    # Locust parses the options before it loads the users.
    assert isinstance(options, argparse.Namespace)
    return options
