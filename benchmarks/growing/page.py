"""The figures as tables, for the terminal and for the page.

In the page they stand between marks; the prose around the marks stays as it is.
"""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table as Grid

from benchmarks.growing import Picture, Question
from benchmarks.model import Figure

END = "<!-- end of figures -->"


def begin(name: str) -> str:
    """Return the mark in front of the figures of *name*."""
    return f"<!-- figures: {name}; written by the command, not by hand -->"


def number(value: float) -> str:
    """Return *value* with three significant digits, or as a whole number from 100 on."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.3g}"  # noqa: PLR2004  # three digits


def cell(figure: Figure | None) -> str:
    """Return the median, and the quartiles if they differ from it."""
    if figure is None:
        return "–"
    low, middle, high = number(figure.low), number(figure.median), number(figure.high)
    return middle if low == middle == high else f"{middle} ({low}–{high})"


def heading(picture: Picture, name: str) -> str:
    """Return the heading of a column."""
    return f"{name}, {picture.unit}".removesuffix(", ")


def rows(question: Question) -> Iterator[list[str]]:
    """Yield the head of the table, and a row for each size."""
    columns = [(picture, curve) for picture in question.pictures for curve in picture.curves]
    yield [question.size, *(heading(picture, curve.name) for picture, curve in columns)]
    for size in columns[0][1].sizes:
        yield [f"{size:,} {question.unit}".rstrip(), *(cell(curve.at(size)) for _, curve in columns)]


def show(question: Question, console: Console) -> None:
    """Print the table of *question*."""
    head, *body = rows(question)
    grid = Grid(title=question.title, caption=question.caption)
    for name in head:
        grid.add_column(name, justify="right")
    for row in body:
        grid.add_row(*row)
    console.print(grid)


def markdown(question: Question, pictures: str) -> str:
    """Return the pictures and the table; *pictures* is their folder, seen from the page."""
    head, *body = rows(question)
    lines = [f"![{each.title}]({pictures}/{file_of(each)})" for each in question.pictures]
    lines += ["", question.caption, ""]
    lines += [f"| {' | '.join(row)} |" for row in (head, ["---:"] * len(head), *body)]
    return "\n".join(lines)


def file_of(picture: Picture) -> str:
    """Return the name of the file that *picture* is in."""
    return f"growth-{picture.name}.svg"


def replaced(page: str, name: str, figures: str) -> str:
    """Return *page* with *figures* between the marks of *name*.

    Raises:
        ValueError: If the page has no such marks.
    """
    before, begins, rest = page.partition(begin(name))
    _, ends, after = rest.partition(END)
    if not begins or not ends:
        message = f"the page has no {begin(name)} … {END}"
        raise ValueError(message)
    return f"{before}{begins}\n\n{figures}\n\n{END}{after}"
