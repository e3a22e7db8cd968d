"""Measure the package beside all peers: `python -m benchmarks [--quick] [--only FAMILY,…]`.

Each family of rows is measured in a process of its own, with all its candidates in turn.
"""

import argparse
import importlib.metadata
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.children import Tell, run_child
from benchmarks.machine import machine
from benchmarks.model import Report, Table
from benchmarks.peers import all_peers
from benchmarks.show import bars, show, updated

FAMILIES = ("hits", "waiters", "misses", "memory", "expiry", "redis", "instructions")
LOOPS = ("asyncio", "uvloop")
LOOPED = ("hits", "waiters", "misses", "redis")  # families that depend on the event loop
PAGE = Path("docs/explanation/performance.md")
WIDTH = 160  # columns of tables in a file or a pipe
OTHERS = ("cachetools", "redis", "uvloop", "msgspec")  # their versions matter, too


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=(__doc__ or "").partition("\n")[0])

    def names(known: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            found = text.split(",")
            if unknown := [name for name in found if name not in known]:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: none of {', '.join(known)}")
            return found

        return parse

    parser.add_argument("--quick", action="store_true", help="a smoke test: all of it runs, briefly")
    parser.add_argument("--only", type=names(FAMILIES), default=list(FAMILIES), help=f"of {', '.join(FAMILIES)}")
    parser.add_argument(
        "--loop",
        type=names(LOOPS),
        default=list(LOOPS),
        help=f"of {', '.join(LOOPS)}; for families that depend on it",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured to FILE")
    parser.add_argument(
        "--read", type=Path, nargs="+", default=[], metavar="FILE", help="show earlier results from FILE"
    )
    parser.add_argument(
        "--markdown", type=Path, nargs="?", const=PAGE, metavar="PAGE", help=f"put the tables into PAGE, {PAGE}"
    )
    return parser.parse_args(arguments)


def versions() -> dict[str, str]:
    """Return the installed versions of the measured packages."""
    found: dict[str, str] = {}
    for name in ["stampede-guard", *(peer.distribution for peer in all_peers().values()), *OTHERS]:
        if name and name not in found:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def runs(chosen: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the families to be measured, each with an event loop."""
    return [
        (family, loop)
        for family in chosen.only
        for loop in chosen.loop
        if loop == "asyncio" or (family in LOOPED and not (chosen.quick and family != "hits"))
    ]


def measured(family: str, loop: str, *, is_quick: bool, tell: Tell) -> list[Table] | str:
    """Measure *family* in a process of its own; return its tables, or why there are none."""
    if loop != "asyncio" and find_spec(loop) is None:
        return f"{family}: {loop} is not installed"
    with tempfile.TemporaryDirectory() as folder:
        path, flags = Path(folder) / "tables.json", ["--quick"] if is_quick else []
        if why := run_child("benchmarks.child", family, loop, str(path), *flags, told=tell):
            return f"{family}, {loop}: {why}"
        return msgspec.json.decode(path.read_bytes(), type=list[Table])


def measure(chosen: argparse.Namespace, console: Console) -> Report:
    """Measure the chosen families."""
    report = Report(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        python=platform.python_version(),
        machine=machine(),
        is_quick=chosen.quick,
        versions=versions(),
        tables=[],
    )
    with bars(console) as add:
        for family, loop in runs(chosen):
            tell = add(f"{family}, {loop}")
            found = measured(family, loop, is_quick=chosen.quick, tell=tell)
            if isinstance(found, str):
                report.notes.append(found)
            else:
                report.tables += found
            tell(1.0, "")
    return report


def main() -> None:
    """Measure or read results, print them, and write the files that were asked for."""
    chosen = options()
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    if chosen.read:
        reports = [msgspec.json.decode(path.read_bytes(), type=Report) for path in chosen.read]
    else:
        reports = [measure(chosen, console)]
        if chosen.json:
            chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(reports[0])))
    for report in reports:
        show(report, console)
    if chosen.markdown:
        chosen.markdown.write_text(updated(chosen.markdown.read_text(), reports))
    sys.exit(any("exit" in note for report in reports for note in report.notes))


if __name__ == "__main__":
    main()
