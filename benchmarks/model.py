"""The results of a run: tables of figures, and targets."""

from statistics import median, quantiles
from typing import Literal

import msgspec


class Figure(msgspec.Struct, frozen=True):
    """The median of the rounds, and the quartiles beside it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: list[float]) -> "Figure":
        """Return the median and the quartiles of *rounds*."""
        if len(rounds) == 1:
            return cls(rounds[0], rounds[0], rounds[0])
        low, _, high = quantiles(rounds, n=4, method="inclusive")
        return cls(median(rounds), low, high)


class Target(msgspec.Struct, frozen=True):
    """A bound for the package's own rows: for the ratio to the baseline, or for the figure."""

    bound: float
    of: Literal["ratio", "figure"] = "ratio"
    sense: Literal["at most", "at least"] = "at most"

    def is_met(self, figure: float, ratio: float | None) -> bool:
        """Return whether *figure*, *ratio* times the baseline's, meets the target."""
        measured = figure if self.of == "figure" else ratio
        if measured is None:
            return False
        return measured <= self.bound if self.sense == "at most" else measured >= self.bound

    def __str__(self) -> str:
        sign = "≤" if self.sense == "at most" else "≥"
        return f"{sign} {self.bound:g}{'×' if self.of == 'ratio' else ''}"


class Column(msgspec.Struct, frozen=True):
    """One quantity; *has_ratio*: the ratio to the baseline is shown beside it."""

    title: str
    unit: str
    has_ratio: bool = True
    target: Target | None = None
    digits: int = 0


class Row(msgspec.Struct):
    """One candidate's figures, a column each; `None` where there is nothing to measure."""

    name: str
    figures: list[Figure | None]
    role: Literal["baseline", "reference", "guard", "peer"]
    lacks: list[str] = []
    note: str = ""


class Table(msgspec.Struct):
    """Candidates side by side, measured in the same run."""

    family: str
    title: str
    columns: list[Column]
    rows: list[Row]
    caption: str = ""
    loop: str = "asyncio"

    def ratio(self, row: Row, column: int) -> float | None:
        """Return the ratio of *row*'s figure in *column* to the baseline's."""
        own, base = row.figures[column], self.baseline(column)
        return own.median / base.median if own and base and base.median else None

    def baseline(self, column: int) -> Figure | None:
        """Return the figure that the others are compared with."""
        return next((row.figures[column] for row in self.rows if row.role == "baseline"), None)


class Report(msgspec.Struct):
    """One run on one Python."""

    date: str
    python: str
    machine: str
    is_quick: bool
    versions: dict[str, str]
    tables: list[Table]
    notes: list[str] = []


def shortfalls(report: Report) -> list[str]:
    """Return a line for each figure of the package's own that misses its target."""
    return [
        f"{table.family}, {table.loop}: {row.name}, {column.title}: "
        + (f"{ratio:.2f}× " if (ratio := table.ratio(row, at)) is not None else "")
        + f"{figure.median:,.{column.digits}f} {column.unit}, target {column.target}"
        for table in report.tables
        for row in table.rows
        for at, column in enumerate(table.columns)
        if row.role == "guard" and column.target and (figure := row.figures[at])
        if not column.target.is_met(figure.median, table.ratio(row, at))
    ]
