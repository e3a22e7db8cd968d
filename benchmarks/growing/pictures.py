"""One small picture for each quantity, as SVG, on logarithmic axes."""

from io import StringIO
from itertools import cycle

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.growing import Curve, Picture, Question
from demo_api.compare.figures import INK, STYLE

# Distinct for colour-blind readers too, on white and on dark pages.
COLOURS = ("#1f9e89", "#c98a1b", "#7b7fd0", "#d8504d")
DASHES = ("--", ":")  # of references
SIZE = (5.2, 3.0)
# Text stays text, in the reader's own font, and the same figures make the same file.
OWN_STYLE = {**STYLE, "svg.fonttype": "none", "svg.hashsalt": "growth"}


def short(value: float, _position: int | None = None) -> str:
    """Return *value* in few characters, as 10 k or 1 M."""
    for unit, name in ((1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def draw(question: Question, picture: Picture) -> str:
    """Return *picture* of *question* as SVG text; bands show the quartiles."""
    with rc_context(OWN_STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        colours, dashes = iter(COLOURS), cycle(DASHES)
        for curve in picture.curves:
            look = (INK, next(dashes)) if curve.is_reference else (next(colours), "-")
            _plot(axes, curve, *look)
        sizes = picture.curves[0].sizes
        axes.set(xscale="log", yscale="log", title=picture.title)
        axes.set_xticks(sizes, labels=[short(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(short))
        axes.yaxis.set_minor_formatter(NullFormatter())
        if _is_flat(picture):
            axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            axes.yaxis.set_minor_formatter(FuncFormatter(short))
        axes.set_xlabel(f"{question.size}, {question.unit}".removesuffix(", "))
        axes.set_ylabel(f"{picture.quantity}, {picture.unit}".removesuffix(", "))
        axes.grid(visible=True)
        if len(picture.curves) > 1:
            axes.legend(fontsize=8)
        written = StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue()
    return text[text.index("<svg") :]


def _plot(axes: Axes, curve: Curve, colour: str, style: str) -> None:
    medians = [found.median for found in curve.figures]
    axes.plot(curve.sizes, medians, style, color=colour, marker="o", markersize=3, label=curve.name)
    low, high = [found.low for found in curve.figures], [found.high for found in curve.figures]
    axes.fill_between(curve.sizes, low, high, color=colour, alpha=0.2, linewidth=0)


def _is_flat(picture: Picture) -> bool:
    """Return whether the values span so few powers of ten that ticks between them fit."""
    medians = [found.median for curve in picture.curves for found in curve.figures if found.median > 0]
    return bool(medians) and max(medians) < 30 * min(medians)
