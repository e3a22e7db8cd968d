"""The figures of DoorDash's article, which the comparison reproduces."""

from dataclasses import dataclass
from typing import Final

from .plan import Scenario


@dataclass(frozen=True, slots=True)
class Published:
    """One summary of the article; latencies are in milliseconds."""

    requests: int
    throughput: float
    slowest: float
    fastest: float
    average: float
    percentiles: dict[int, float]


WITHOUT: Final = {
    Scenario.COLD_BOOT: Published(
        887_495, 14_777.03, 6908.89, 0.55, 135.10, {50: 84.08, 75: 112.40, 90: 170.33, 95: 254.05, 99: 1549.95}
    ),
    Scenario.WARMED_UP: Published(
        1_053_108, 17_329.60, 8058.86, 0.38, 114.43, {50: 78.63, 75: 98.37, 90: 122.91, 95: 158.75, 99: 1474.71}
    ),
}
WITH: Final = {
    Scenario.COLD_BOOT: Published(
        1_156_274, 19_257.79, 1731.10, 32.23, 103.68, {50: 92.63, 75: 113.26, 90: 147.19, 95: 178.08, 99: 264.65}
    ),
    Scenario.WARMED_UP: Published(
        1_321_340, 21_998.87, 578.69, 36.04, 90.77, {50: 87.01, 75: 99.63, 90: 112.48, 95: 124.60, 99: 176.08}
    ),
}


def p99_reduction(scenario: Scenario) -> float:
    """Return the share by which the article's debouncer reduced the p99."""
    return 1 - WITH[scenario].percentiles[99] / WITHOUT[scenario].percentiles[99]


def throughput_gain(scenario: Scenario) -> float:
    """Return how many times more requests per second the article's debouncer answered."""
    return WITH[scenario].throughput / WITHOUT[scenario].throughput
