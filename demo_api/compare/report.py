"""The report of a comparison: an offline page, JSON and a picture."""

import json
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..settings import Settings
from .figures import comparison_picture, pictures
from .measurement import PERCENTILES, Measurement
from .options import Options
from .plan import SHARE_OF_CEILING
from .service import REPOSITORY
from .tables import grids, target_grid
from .targets import Target

REPORTS: Final = REPOSITORY / "reports"
LIBRARIES: Final = ("stampede-guard", "aiocache", "asyncpg", "fastapi", "locust", "redis", "uvicorn", "uvloop")


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a finished comparison, and its conditions."""

    options: Options
    settings: Settings
    begun_at: datetime
    rate: float | None
    measurements: Sequence[Measurement]
    targets: Sequence[Target]

    @property
    def openness(self) -> str:
        """The conditions of the measurement, for readers of the numbers."""
        rate = f"{self.rate:,.0f} arrivals/s, {SHARE_OF_CEILING:.0%} of the ceiling" if self.rate else "not run"
        short = self.options.seconds <= self.settings.l2_ttl
        return (
            f"The load generator, the service, Redis and Postgres shared the {os.cpu_count()} cores of one machine,"
            " so each mode's figures contain what its queries take from the generator."
            f" Each mode got the same load: {self.options.users} users at saturation, ids 1 to"
            f" {self.options.restaurants} in the same order. Constant rate: {rate}; there a latency counts from"
            " when its request was due, so that it includes the delay of a stalled service."
            f" Entries live {self.settings.l1_ttl:g} s in L1 and {self.settings.l2_ttl:g} s in L2;"
            f" each measured run took {self.options.seconds:g} s, the prebuilt ones half of that."
            f"{' Too short to see each entry expire from L2: choose a longer --seconds.' if short else ''}"
        )


def write(report: Report) -> Path:
    """Write *report* and return the page's path.

    Args:
        report: What to write. By default it goes to a folder named after its time,
            and a copy to `reports/latest`.
    """
    folder = report.options.output or REPORTS / f"{report.begun_at:%Y-%m-%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(as_json(report), indent=1) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(_page(report), encoding="utf-8")
    if picture := comparison_picture(report.measurements):
        (folder / "comparison.svg").write_text(picture, encoding="utf-8")
    if report.options.output is None:
        shutil.rmtree(REPORTS / "latest", ignore_errors=True)
        shutil.copytree(folder, REPORTS / "latest")
        folder = REPORTS / "latest"
    return folder / "report.html"


def as_json(report: Report) -> dict[str, Any]:
    """Return *report* as plain values."""
    options = asdict(report.options)
    del options["output"]
    settings = report.settings
    return {
        "begun_at": report.begun_at.isoformat(timespec="seconds"),
        "machine": _machine(),
        "options": options,
        "settings": {"l1_ttl": settings.l1_ttl, "l2_ttl": settings.l2_ttl, "pool_size": settings.pool_size},
        "rate": report.rate,
        "runs": [_run(each) for each in report.measurements],
        "targets": [asdict(each) for each in report.targets],
    }


def _run(found: Measurement) -> dict[str, Any]:
    milliseconds = found.milliseconds
    return {
        "mode": found.run.mode,
        "scenario": found.run.scenario.value,
        "shape": found.run.shape.value,
        "seconds": found.duration,
        "requests": found.requests,
        "requests_per_second": found.throughput,
        "errors": found.errors,
        "unanswered": found.unanswered,
        "latency_ms": {
            "slowest": float(milliseconds.max()),
            "fastest": float(milliseconds.min()),
            "average": float(milliseconds.mean()),
            **{f"p{percent}": found.percentile(percent) for percent in PERCENTILES},
        },
        "counts": asdict(found.counts),
        "curve": [{"at": moment.at, **asdict(moment.counts)} for moment in found.curve],
    }


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in LIBRARIES},
    }


def _page(report: Report) -> str:
    environment = Environment(
        loader=PackageLoader(__name__.rpartition(".")[0], ""), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("report.html.j2").render(
        report=report,
        machine=_machine(),
        targets=target_grid(report.targets),
        grids=grids(report.measurements),
        pictures=pictures(report.measurements),
    )
