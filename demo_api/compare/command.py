"""The command: from the arguments to the tables and the report."""

import argparse
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import ValidationError
from rich.console import Console

from ..database import DatabaseError
from ..servers import ServerError
from ..settings import Settings, explain
from .comparison import Comparison
from .ending import BAD_USAGE, FAILED, INTERRUPTED, end_as_by_ctrl_c, fail
from .options import BadOptionError, Options, parse
from .plan import PREBUILT, plan
from .processes import ChildError, allow_many_connections
from .progress import LiveProgress
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
    code = _measure(comparison, options, console)
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


def _measure(comparison: Comparison, options: Options, console: Console) -> int:
    allow_many_connections()
    end_as_by_ctrl_c()
    try:
        with TemporaryDirectory() as folder, LiveProgress(plan(options), console) as progress:
            comparison.run(progress, Path(folder))
    except KeyboardInterrupt:
        return fail("interrupted; what had finished until then:", INTERRUPTED)
    except (ChildError, DatabaseError, ServerError, OSError) as error:
        return fail(str(error), FAILED)
    return 0
