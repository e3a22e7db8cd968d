"""The table of the demonstration's results."""

import math
from collections.abc import Sequence
from typing import Final

from ..compare.tables import Grid
from .demonstration import Finding
from .options import Fleet

PROMISED: Final = 1.0


def per_expiry(count: int, finding: Finding, l2_ttl: float) -> float:
    """Return *count* for each restaurant and each life of its menu in L2 that the run touched."""
    found = finding.measurement
    return count / (found.restaurants * math.ceil(found.duration / l2_ttl))


def grid(fleet: Fleet, findings: Sequence[Finding]) -> Grid:
    """Return the table of the finished runs, beside the promise of I8 with the lease."""
    columns = [_column(finding, fleet.l2_ttl) for finding in findings]
    is_kept = all(
        per_expiry(finding.measurement.counts.loads, finding, fleet.l2_ttl) <= PROMISED for finding in findings[1:]
    )
    verdict = ("≤ 1", "met" if is_kept else "MISSED") if len(findings) > 1 else ("≤ 1", "")
    promises = {"Loads per menu and expiry": verdict, "Postgres queries per menu and expiry": verdict}
    rows = [
        (name, *(column[name] for column in columns), *promises.get(name, ("", ""))) for name in (columns or [{}])[0]
    ]
    titles = [finding.measurement.run.mode for finding in findings]
    return Grid(f"{fleet.title}, L2 TTL {fleet.l2_ttl:g} s", ("", *titles, "promised (I8)", ""), rows)


def _column(finding: Finding, l2_ttl: float) -> dict[str, str]:
    found = finding.measurement
    counts = found.counts
    return {
        "Loads per menu and expiry": f"{per_expiry(counts.loads, finding, l2_ttl):.2f}",
        "Postgres queries per menu and expiry": f"{per_expiry(counts.postgres_queries, finding, l2_ttl):.2f}",
        "Loads": f"{counts.loads:,}",
        "Postgres queries": f"{counts.postgres_queries:,}",
        "Requests": f"{found.requests:,}",
        "Requests/s": f"{found.throughput:,.0f}",
        "p50, ms": f"{found.percentile(50):,.1f}",
        "p99, ms": f"{found.p99:,.1f}",
        "Slowest, ms": f"{found.percentile(100):,.1f}",
        "Failed requests": f"{found.errors + found.unanswered:,}",
        "Redis did not answer": f"{finding.redis_failures:,}",
    }
