"""The command: from the arguments to the table."""

import argparse

from pydantic import ValidationError
from rich.console import Console

from ..compare.ending import BAD_USAGE, FAILED, carry_out, fail
from ..compare.options import BadOptionError
from ..compare.tables import show
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
    code = carry_out(demonstration.run, demonstration.runs, console)
    if demonstration.findings:
        show(grid(fleet, demonstration.findings), console)
    if code:
        return code
    return (
        FAILED if any(each.measurement.errors + each.measurement.unanswered for each in demonstration.findings) else 0
    )
