"""The pictures of the report, as SVG text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Final

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from .measurement import Measurement, Numbers
from .plan import Scenario, Shape
from .targets import Results

# Readable on white and on a dark page alike, since the pictures have no background of their own.
INK: Final = "#777d86"
COLOURS: Final = {"off": "#d8504d", "aiocache": "#c98a1b", "on": "#1f9e89", "prebuilt": INK}
# `Any`, because matplotlib's own type lists each of its 300 keys.
STYLE: Final[Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "font.size": 9,
    "grid.alpha": 0.3,
    "grid.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "savefig.transparent": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
BIN: Final = 0.1
SHOWN_PERCENTILES: Final = (50, 90, 99, 99.9, 99.99)


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: what it shows, what to look at, and its SVG."""

    title: str
    caption: str
    svg: str


def pictures(measurements: Sequence[Measurement]) -> list[Picture]:
    """Return the pictures that the finished *measurements* give."""
    results = Results(measurements)
    drawn: list[Picture] = []
    for shape in reversed(Shape):
        for scenario in Scenario:
            if found := results.of(scenario, shape):
                drawn.extend(_pictures_of(f"{scenario.title}, {shape.value}", found))
    return drawn


def comparison_picture(measurements: Sequence[Measurement]) -> str | None:
    """Return the README's picture, p99 over time at a constant rate; `None` without such a run."""
    results = Results(measurements)
    columns = [(scenario, found) for scenario in Scenario if (found := results.of(scenario, Shape.CONSTANT_RATE))]
    if not columns:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        for axis, (scenario, found) in zip(axes, columns, strict=True):
            for each in found:
                seconds, values = over_time(each, 99)
                axis.plot(seconds, values, color=COLOURS[each.run.mode], label=f"{each.run.mode}: {each.p99:,.0f} ms")
            _finish(axis, f"{scenario.title}: p99 of the run and over time", "seconds")
            axis.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=len(found), fontsize=7, handlelength=1.2)
        _logarithmic_latency(axes[0], "p99 of each 0.1 s")

    return _svg(draw, (9, 3.6))


def over_time(found: Measurement, percent: float) -> tuple[Numbers, Numbers]:
    """Return a percentile of the latency in ms, for each tenth of a second with due requests."""
    bins = (found.offset // BIN).astype(int)
    order = np.argsort(bins, kind="stable")
    numbers, starts = np.unique(bins[order], return_index=True)
    groups = np.split(found.milliseconds[order], starts[1:])
    return numbers * BIN, np.array([np.percentile(group, percent) for group in groups])


def _pictures_of(title: str, found: list[Measurement]) -> list[Picture]:
    return [
        Picture(
            f"{title}: latency over time",
            "The line is the median of each tenth of a second; the band reaches up to its slowest request."
            " Where it rises, entries have expired.",
            _svg(lambda figure: _draw_latency_over_time(figure, found), (9, 1.6 * len(found) + 0.6)),
        ),
        Picture(
            f"{title}: distribution of the latency",
            "Left, how many requests took how long. Right, the latency that a share of the requests did not exceed.",
            _svg(lambda figure: _draw_distribution(figure, found), (9, 3.2)),
        ),
        Picture(
            f"{title}: calls against executions",
            "How often the cached function was called, how often it ran, and how many queries reached Postgres.",
            _svg(lambda figure: _draw_counts(figure, found), (9, 2.8)),
        ),
    ]


def _draw_latency_over_time(figure: Figure, found: list[Measurement]) -> None:
    axes = figure.subplots(len(found), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axis, each in zip(axes, found, strict=True):
        seconds, median = over_time(each, 50)
        _, slowest = over_time(each, 100)
        colour = COLOURS[each.run.mode]
        axis.fill_between(seconds, median, slowest, color=colour, alpha=0.3, linewidth=0)
        axis.plot(seconds, median, color=colour, linewidth=1)
        _finish(axis, each.run.mode, "")
        _logarithmic_latency(axis, "")
    axes[-1].set_xlabel("seconds")


def _draw_distribution(figure: Figure, found: list[Measurement]) -> None:
    left, right = figure.subplots(1, 2)
    slowest = max(float(each.milliseconds.max()) for each in found)
    fastest = min(float(each.milliseconds.min()) for each in found)
    edges = np.geomspace(fastest, slowest, 60)
    tails = 1 - np.geomspace(1, 1e-4, 200)
    for each in found:
        look = {"color": COLOURS[each.run.mode], "label": each.run.mode}
        left.hist(each.milliseconds, bins=edges, histtype="step", **look)
        right.plot(1 / (1 - tails), np.percentile(each.milliseconds, tails * 100), **look)
    left.set(xscale="log", yscale="log", ylabel="requests")
    left.xaxis.set_major_formatter(FuncFormatter(_plain))
    _finish(left, "", "latency, ms")
    right.set(xscale="log", xticks=[1 / (1 - percent / 100) for percent in SHOWN_PERCENTILES])
    right.set_xticklabels([f"{percent:g} %" for percent in SHOWN_PERCENTILES])
    _finish(right, "", "share of the requests")
    _logarithmic_latency(right, "latency")
    left.legend()


def _draw_counts(figure: Figure, found: list[Measurement]) -> None:
    axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axis, each in zip(axes, found, strict=True):
        seconds = [moment.at for moment in each.curve]
        axis.plot(seconds, [moment.counts.calls for moment in each.curve], color=INK, label="calls")
        executions = [moment.counts.executions for moment in each.curve]
        axis.plot(seconds, executions, color=COLOURS[each.run.mode], label="executions")
        queries = [moment.counts.postgres_queries for moment in each.curve]
        axis.plot(seconds, queries, color=COLOURS[each.run.mode], linestyle=":", label="Postgres queries")
        axis.set_yscale("symlog", linthresh=10)
        axis.yaxis.set_major_formatter(FuncFormatter(_plain))
        _finish(axis, each.run.mode, "seconds")
    axes[0].legend(fontsize=8)


def _finish(axis: Axes, title: str, xlabel: str) -> None:
    axis.set_title(title)
    axis.set_xlabel(xlabel)
    axis.grid(visible=True)


def _logarithmic_latency(axis: Axes, what: str) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(_plain))
    axis.set_ylabel(f"{what}, ms".removeprefix(", "))


def _plain(value: float, _position: int | None = None) -> str:
    return f"{value:,g}"


def _svg(draw: Callable[[Figure], None], size: tuple[float, float]) -> str:
    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        written = StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue()
    return text[text.index("<svg") :]
