"""The targets of the comparison, and whether they are met."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from .article import p99_reduction, throughput_gain
from .measurement import Measurement
from .plan import PREBUILT, Scenario, Shape

P99_REDUCTION: Final = {Scenario.COLD_BOOT: 0.83, Scenario.WARMED_UP: 0.87}
THROUGHPUT_GAIN: Final = 1.3
SHARE_OF_PREBUILT: Final = 0.9


@dataclass(frozen=True, slots=True)
class Target:
    """One figure to reach."""

    title: str
    measured: str
    wanted: str
    is_met: bool
    published: str = ""


class Results:
    """The finished runs, by what was run."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._found = {(each.run.mode, each.run.scenario, each.run.shape): each for each in measurements}

    def find(self, mode: str, scenario: Scenario, shape: Shape) -> Measurement | None:
        """Return the run of *mode*, if it is finished."""
        return self._found.get((mode, scenario, shape))

    def pairs(self, mode: str, other: str, shape: Shape) -> Iterator[tuple[Scenario, Measurement, Measurement]]:
        """Yield the runs of two modes, for each scenario in which both are finished."""
        for scenario in Scenario:
            first, second = self.find(mode, scenario, shape), self.find(other, scenario, shape)
            if first and second:
                yield scenario, first, second

    def of(self, scenario: Scenario, shape: Shape) -> list[Measurement]:
        """Return the runs to be compared with each other, in the order in which they were run."""
        return [each for key, each in self._found.items() if key[1:] == (scenario, shape)]


def targets(measurements: Sequence[Measurement], l2_ttl: float) -> list[Target]:
    """Return each target that the finished *measurements* can tell about.

    Args:
        measurements: The finished runs.
        l2_ttl: How many seconds the service kept a menu in L2.
    """
    results = Results(measurements)
    return [
        *_p99_reductions(results),
        *_throughput_gains(results),
        *_shares_of_prebuilt(results),
        *_queries(results, l2_ttl),
        *_leads_over_aiocache(results),
    ]


def _p99_reductions(results: Results) -> Iterator[Target]:
    for scenario, off, on in results.pairs("off", "on", Shape.CONSTANT_RATE):
        wanted = P99_REDUCTION[scenario]
        reduction = 1 - on.p99 / off.p99
        yield Target(
            f"p99 against off: {_title(scenario, Shape.CONSTANT_RATE)}",
            f"{-reduction:+.1%} ({off.p99:,.1f} → {on.p99:,.1f} ms)",
            _change(-wanted),
            reduction >= wanted,
            _change(-p99_reduction(scenario)),
        )


def _throughput_gains(results: Results) -> Iterator[Target]:
    for scenario, off, on in results.pairs("off", "on", Shape.SATURATION):
        gain = on.throughput / off.throughput
        yield Target(
            f"requests/s against off: {_title(scenario, Shape.SATURATION)}",
            f"{gain:.2f}× ({off.throughput:,.0f} → {on.throughput:,.0f})",
            f"≥ {THROUGHPUT_GAIN:.2f}×",
            gain >= THROUGHPUT_GAIN,
            f"{throughput_gain(scenario):.2f}×",
        )


def _shares_of_prebuilt(results: Results) -> Iterator[Target]:
    for scenario, prebuilt, on in results.pairs(PREBUILT, "on", Shape.SATURATION):
        share = on.throughput / prebuilt.throughput
        yield Target(
            f"requests/s against prebuilt: {_title(scenario, Shape.SATURATION)}",
            f"{share:.2f}× ({prebuilt.throughput:,.0f} → {on.throughput:,.0f})",
            f"≥ {SHARE_OF_PREBUILT:.2f}×",
            share >= SHARE_OF_PREBUILT,
        )


def _queries(results: Results, l2_ttl: float) -> Iterator[Target]:
    guarded = [on for scenario, shape in product(Scenario, Shape) if (on := results.find("on", scenario, shape))]
    if guarded:
        # The lifetimes of entries in L2 that a run touches; each may cost one query.
        lifetimes = [on.restaurants * math.ceil(on.duration / l2_ttl) for on in guarded]
        most = max(on.counts.postgres_queries / count for on, count in zip(guarded, lifetimes, strict=True))
        total = sum(on.counts.postgres_queries for on in guarded)
        yield Target(
            "Postgres queries per restaurant and L2 expiry: worst run of on",
            f"{most:.2f} ({total:,} queries in all)",
            "≤ 1",
            most <= 1,
        )


def _leads_over_aiocache(results: Results) -> Iterator[Target]:
    for shape in Shape:
        for scenario, aiocache, on in results.pairs("aiocache", "on", shape):
            measured, is_ahead = f"p99 {aiocache.p99:,.0f} → {on.p99:,.0f} ms", on.p99 < aiocache.p99
            # At a constant rate all modes get the same number of requests.
            if shape is Shape.SATURATION:
                measured += f", {aiocache.throughput:,.0f} → {on.throughput:,.0f}/s"
                is_ahead = is_ahead and on.throughput > aiocache.throughput
            yield Target(f"ahead of aiocache: {_title(scenario, shape)}", measured, "ahead", is_ahead)


def _title(scenario: Scenario, shape: Shape) -> str:
    return f"{scenario.title.lower()}, {shape.value}"


def _change(share: float) -> str:
    return f"{share:+.0%}"
