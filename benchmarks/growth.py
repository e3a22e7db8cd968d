"""Measure cost against size: `python -m benchmarks.growth [--quick] [--only QUESTION,…] [--docs]`.

The questions are keys in memory, waiters on one key, processes on one Redis, and sizes of a value.
Each is measured in a process of its own.
"""

import argparse
import platform
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.children import Tell, run_child
from benchmarks.growing import QUESTIONS, Question
from benchmarks.growing.page import file_of, markdown, replaced, show
from benchmarks.growing.pictures import draw
from benchmarks.machine import machine
from benchmarks.show import bars
from stampede_guard import is_compiled

DOCS = Path("docs")
PAGE = Path("explanation/growth.md")
ASSETS = Path("assets")
WIDTH = 200  # columns of tables in a file or a pipe
SMOKE_TEST = "A smoke test: the figures show only that everything runs."


class Report(msgspec.Struct):
    """One run."""

    date: str
    machine: str
    is_quick: bool
    questions: list[Question]


class MeasuringError(Exception):
    """A question could not be measured; the message ends with the last output of its process."""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what the command line asks for."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in QUESTIONS]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: none of {', '.join(QUESTIONS)}")
        return found

    parser = argparse.ArgumentParser(prog="nox -s growth --", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test: all of it runs, briefly")
    parser.add_argument("--only", type=names, default=list(QUESTIONS), help=f"of {', '.join(QUESTIONS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured to FILE")
    parser.add_argument("--read", type=Path, metavar="FILE", help="show earlier results from FILE")
    parser.add_argument(
        "--docs",
        type=Path,
        nargs="?",
        const=DOCS,
        metavar="FOLDER",
        help=f"put pictures and tables into FOLDER, {DOCS}",
    )
    return parser.parse_args(arguments)


def measured(name: str, *, is_quick: bool, tell: Tell) -> Question:
    """Measure one question in a process of its own.

    Raises:
        MeasuringError: If the process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, flags = Path(folder) / "question.json", ["--quick"] if is_quick else []
        if why := run_child("benchmarks.growing", name, str(path), *flags, told=tell):
            message = f"{name}: {why}"
            raise MeasuringError(message)
        return msgspec.json.decode(path.read_bytes(), type=Question)


def measure(chosen: argparse.Namespace, console: Console) -> Report:
    """Measure the chosen questions."""
    form = "with the compiled part" if is_compiled else "without the compiled part"
    place = f"{machine()}, Python {platform.python_version()}, {form}"
    report = Report(datetime.now(UTC).strftime("%Y-%m-%d"), place, chosen.quick, [])
    with bars(console) as add:
        for name in chosen.only:
            tell = add(name)
            report.questions.append(measured(name, is_quick=chosen.quick, tell=tell))
            tell(1.0, "")
    return report


def write(report: Report, docs: Path) -> list[Path]:
    """Put pictures and tables into the documentation; return the files that were written."""
    page, written = docs / PAGE, [docs / PAGE]
    text = page.read_text()
    said = f"Measured on {report.date}, on {report.machine}."
    text = replaced(text, "machine", f"{said} {SMOKE_TEST}" if report.is_quick else said)
    for question in report.questions:
        text = replaced(text, question.name, markdown(question, f"../{ASSETS}"))
        for picture in question.pictures:
            path = docs / ASSETS / file_of(picture)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(draw(question, picture))
            written.append(path)
    page.write_text(text)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or read results, print them, write the files asked for; return the exit status."""
    chosen = options(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    try:
        report = msgspec.json.decode(chosen.read.read_bytes(), type=Report) if chosen.read else measure(chosen, console)
    except MeasuringError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    if chosen.json and not chosen.read:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    for question in report.questions:
        show(question, console)
    if report.is_quick:
        console.print(SMOKE_TEST)
    if chosen.docs:
        for path in write(report, chosen.docs):
            console.print(f"written: {path}", markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
