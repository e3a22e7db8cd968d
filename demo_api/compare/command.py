"""The command: from the arguments to the tables and the report."""

import argparse
from datetime import datetime

from pydantic import ValidationError
from rich.console import Console

from ..settings import Settings, explain
from .comparison import Comparison
from .ending import BAD_USAGE, carry_out, fail
from .options import BadOptionError, Options, parse
from .plan import PREBUILT, plan
from .report import Report, write
from .tables import grids, show, target_grid
from .targets import targets


def compare(arguments: argparse.Namespace) -> int:
    """Do what *arguments* ask for, and return the exit code."""
    try:
        options, settings = parse(arguments), Settings()
    except BadOptionError as error:
        return fail(str(error), BAD_USAGE)
    except ValidationError as error:
        return fail(explain(error), BAD_USAGE)
    return _compare(options, settings)


def _compare(options: Options, settings: Settings) -> int:
    console = Console()
    comparison, begun_at = Comparison(options), datetime.now().astimezone()
    code = carry_out(comparison.run, plan(options), console)
    found = comparison.measurements
    if found:
        reached = targets(found, settings.l2_ttl)
        for grid in [*grids(found), target_grid(reached)]:
            show(grid, console)
        rate = comparison.rate if any(each.run.mode == PREBUILT for each in found) else None
        report = Report(options, settings, begun_at, rate, found, reached)
        console.print(report.openness, highlight=False)
        if not code:
            console.print(f"The report is in {write(report)}", highlight=False, soft_wrap=True)
    return code
