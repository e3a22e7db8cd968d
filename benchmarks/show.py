"""Reports, for the terminal and for the documentation."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from benchmarks.children import Tell
from benchmarks.model import Column, Figure, Report, Row, Table, shortfalls

BEGIN = "<!-- figures: written by the command, not by hand -->"
END = "<!-- end of figures -->"

_LOOPS = {"asyncio": "asyncio's event loop"}


@contextmanager
def bars(console: Console) -> Iterator[Callable[[str], Tell]]:
    """Yield a function that adds a bar with a title, and returns what moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def add(title: str) -> Tell:
            task = progress.add_task(title, total=1.0, said="")
            return lambda done, said: progress.update(task, completed=done, said=said)

        yield add


def number(value: float, digits: int) -> str:
    """Return *value* with so many digits, and thousands apart."""
    return f"{value:,.{digits}f}"


def spread(figure: Figure, column: Column) -> str:
    """Return the quartiles, or nothing if there was one round."""
    if figure.low == figure.high:
        return ""
    return f"{number(figure.low, column.digits)}–{number(figure.high, column.digits)}"


def ratio_text(ratio: float | None) -> str:
    """Return *ratio* with two decimals, or none from 10 on."""
    if ratio is None:
        return "–"
    return f"{ratio:,.2f}" if ratio < 10 else f"{ratio:,.0f}"  # noqa: PLR2004  # of two digits


def headings(table: Table) -> list[str]:
    """Return the headings of the columns."""
    found = ["candidate"]
    for column in table.columns:
        unit = f", {column.unit}" if column.unit else ""
        found.append(f"{column.title}{unit}")
        if column.has_ratio:
            found.append("×")
    return [*found, "lacks"]


def cells(table: Table, row: Row) -> list[tuple[str, bool | None]]:
    """Return a row's texts, and with each whether it meets its target, if it has one."""
    found: list[tuple[str, bool | None]] = []
    for at, column in enumerate(table.columns):
        figure = row.figures[at]
        if figure is None:
            found += [("–", None)] * (2 if column.has_ratio else 1)
            continue
        ratio = table.ratio(row, at)
        target = column.target if row.role == "guard" else None
        is_met = target.is_met(figure.median, ratio) if target else None
        aim = f" (target {target})" if target else ""
        quartiles = spread(figure, column)
        text = number(figure.median, column.digits) + (f" ({quartiles})" if quartiles else "")
        if column.has_ratio:
            found += [(text, None), (ratio_text(ratio) + aim, is_met)]
        else:
            found.append((text + aim, is_met))
    return found


def remark(row: Row) -> str:
    """Return the remark beside a row's figures."""
    return "; ".join(part for part in (row.note, ", ".join(row.lacks)) if part)


def show(report: Report, console: Console) -> None:
    """Print the tables, and the figures that miss their targets."""
    for table in report.tables:
        loop = f", {table.loop}" if table.loop != "asyncio" else ""
        grid = Grid(title=f"{table.title}{loop}, Python {report.python}", caption=table.caption)
        for at, heading in enumerate(headings(table)):
            is_text = at == 0 or heading == "lacks"
            grid.add_column(heading, justify="left" if is_text else "right", no_wrap=at == 0)
        for row in table.rows:
            texts = [
                text if is_met is None else f"[{'green' if is_met else 'red'}]{text}[/]"
                for text, is_met in cells(table, row)
            ]
            grid.add_row(row.name, *texts, remark(row), style="bold" if row.role == "guard" else "")
        console.print(grid)
    for note in report.notes:
        console.print(note, style="red", markup=False)
    if report.is_quick:
        console.print("A smoke test: the figures show only that everything runs.")
    elif missed := shortfalls(report):
        console.print("Short of their targets:", style="bold")
        for line in missed:
            console.print(f"  {line}", markup=False, highlight=False)
    else:
        console.print("All targets are met.")


def _markdown_row(texts: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _markdown_table(table: Table) -> list[str]:
    heads = headings(table)
    lines = [
        _markdown_row(heads),
        _markdown_row("---" if at == 0 or head == "lacks" else "---:" for at, head in enumerate(heads)),
    ]
    for row in table.rows:
        name = f"**{row.name}**" if row.role == "guard" else row.name
        lines.append(_markdown_row([name, *(text for text, _ in cells(table, row)), remark(row)]))
    return lines


def _aims(reports: list[Report]) -> list[str]:
    """Return a table of the targets and the measured figures."""
    lines = [_markdown_row(("figure", "Python", "loop", "target", "measured")), "| --- | --- | --- | --- | --- |"]
    for report in reports:
        for table in report.tables:
            for row in table.rows:
                for at, column in enumerate(table.columns):
                    figure, target = row.figures[at], column.target
                    if row.role != "guard" or figure is None or target is None:
                        continue
                    ratio = table.ratio(row, at)
                    measured = (
                        f"{ratio_text(ratio)}×"
                        if target.of == "ratio"
                        else f"{number(figure.median, column.digits)} {column.unit}"
                    )
                    verdict = "" if target.is_met(figure.median, ratio) else ", short of it"
                    lines.append(
                        _markdown_row(
                            (
                                f"{table.title}: {row.name}, {column.title}",
                                report.python,
                                table.loop,
                                str(target) + (f" {column.unit}" if target.of == "figure" else ""),
                                measured + verdict,
                            )
                        )
                    )
    return lines


def markdown(reports: list[Report]) -> str:
    """Return the text between the marks of the page."""
    lines = [BEGIN, "", "## The targets", "", *_aims(reports), ""]
    origin = ""
    for report in reports:
        versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
        measured = f"Measured on {report.date}, on {report.machine}, with {versions}."
        # Families that were run one by one stand under one heading.
        if f"{report.python} {measured}" != origin:
            lines += [f"## Python {report.python}", "", measured, ""]
            origin = f"{report.python} {measured}"
        if report.is_quick:
            lines += ["A smoke test: these figures show only that everything runs.", ""]
        lines += [f"{note}\n" for note in report.notes]
        for table in report.tables:
            lines += [f"### {table.title}, {_LOOPS.get(table.loop, table.loop)}, {report.python}", ""]
            if table.caption:
                lines += [table.caption, ""]
            if table.rows:
                lines += [*_markdown_table(table), ""]
    return "\n".join([*lines, END])


def updated(page: str, reports: list[Report]) -> str:
    """Return *page* with the figures of *reports* between its marks."""
    before, begins, rest = page.partition(BEGIN)
    _, ends, after = rest.partition(END)
    if not begins or not ends:
        message = f"the page has no {BEGIN} … {END}"
        raise ValueError(message)
    return before + markdown(reports) + after
