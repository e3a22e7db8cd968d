"""The comparison in the article's terms, as rows and terminal tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .article import WITH, WITHOUT, Published
from .measurement import PERCENTILES, Measurement
from .plan import Scenario, Shape
from .targets import Results, Target

STYLES: Final = {"met": "green", "MISSED": "bold red"}


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: a title, the columns' titles, and rows; the first cell of a row is its name."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    has_numbers: bool = True


def grids(measurements: Sequence[Measurement]) -> list[Grid]:
    """Return one table for each scenario and load shape that has a finished run."""
    results = Results(measurements)
    pairs = [(scenario, shape) for shape in Shape for scenario in Scenario]
    return [_grid(scenario, shape, found) for scenario, shape in pairs if (found := results.of(scenario, shape))]


def _grid(scenario: Scenario, shape: Shape, measurements: list[Measurement]) -> Grid:
    # The article's load had no fixed rate.
    published = [WITHOUT[scenario], WITH[scenario]] if shape is Shape.SATURATION else []
    titles = [each.run.mode for each in measurements] + ["article off", "article on"][: len(published)]
    columns = [_of_measurement(each) for each in measurements] + [_of_article(each) for each in published]
    names = list(columns[0])
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    return Grid(f"{scenario.title}, {shape.value} (latencies in ms)", ("", *titles), rows)


def _of_measurement(found: Measurement) -> dict[str, str]:
    milliseconds = found.milliseconds
    return {
        "Requests": f"{found.requests:,}",
        "Requests/s": f"{found.throughput:,.0f}",
        "Slowest": _latency(float(milliseconds.max())),
        "Fastest": _latency(float(milliseconds.min())),
        "Average": _latency(float(milliseconds.mean())),
        **{f"p{percent}": _latency(found.percentile(percent)) for percent in PERCENTILES},
        "Errors": f"{found.errors:,}",
        "Unanswered": f"{found.unanswered:,}",
        "Loads": f"{found.counts.loads:,}",
        "Redis reads": f"{found.counts.redis_reads:,}",
        "Postgres queries": f"{found.counts.postgres_queries:,}",
    }


def _of_article(found: Published) -> dict[str, str]:
    return {
        "Requests": f"{found.requests:,}",
        "Requests/s": f"{found.throughput:,.0f}",
        "Slowest": _latency(found.slowest),
        "Fastest": _latency(found.fastest),
        "Average": _latency(found.average),
        **{f"p{percent}": _latency(milliseconds) for percent, milliseconds in found.percentiles.items()},
        "Errors": "0",
    }


def _latency(milliseconds: float) -> str:
    return f"{milliseconds:,.1f}"


def target_grid(found: Sequence[Target]) -> Grid:
    """Return the table of the targets."""
    rows = [
        (each.title, each.measured, each.wanted, each.published, "met" if each.is_met else "MISSED") for each in found
    ]
    return Grid("Figures to reach", ("", "measured", "wanted", "article", ""), rows, has_numbers=False)


def show(grid: Grid, console: Console) -> None:
    """Print *grid* on *console*."""
    table = Table(title=grid.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(grid.columns):
        table.add_column(column, justify="right" if index and grid.has_numbers else "left")
    for row in grid.rows:
        table.add_row(*row, style=STYLES.get(row[-1]))
    console.print(table)
