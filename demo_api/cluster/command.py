"""The command: from the arguments to the table."""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import ValidationError
from rich.console import Console

from ..compare.ending import BAD_USAGE, FAILED, INTERRUPTED, end_as_by_ctrl_c, fail
from ..compare.options import BadOptionError
from ..compare.processes import ChildError, allow_many_connections
from ..compare.progress import LiveProgress
from ..compare.tables import show
from ..database import DatabaseError
from ..servers import ServerError
from ..settings import explain
from .demonstration import Demonstration
from .options import parse
from .tables import grid


def demonstrate(arguments: argparse.Namespace) -> int:
    """Do what *arguments* ask for, and return the exit code."""
    try:
        fleet = parse(arguments)
    except BadOptionError as error:
        return fail(str(error), BAD_USAGE)
    except ValidationError as error:
        return fail(explain(error), BAD_USAGE)
    console = Console()
    demonstration = Demonstration(fleet)
    code = _measure(demonstration, console)
    if demonstration.findings:
        show(grid(fleet, demonstration.findings), console)
    if code:
        return code
    return (
        FAILED if any(each.measurement.errors + each.measurement.unanswered for each in demonstration.findings) else 0
    )


def _measure(demonstration: Demonstration, console: Console) -> int:
    allow_many_connections()
    end_as_by_ctrl_c()
    try:
        with TemporaryDirectory() as folder, LiveProgress(demonstration.runs, console) as progress:
            demonstration.run(progress, Path(folder))
    except KeyboardInterrupt:
        return fail("interrupted; what had finished until then:", INTERRUPTED)
    except (ChildError, DatabaseError, ServerError, OSError) as error:
        return fail(str(error), FAILED)
    return 0
