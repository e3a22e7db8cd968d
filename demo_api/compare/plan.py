"""Which runs the comparison consists of, and in which order."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from .options import Options

PREBUILT: Final = "prebuilt"
# At this share of what the server can do at all, a slow answer is due to a stampede and not to a queue.
SHARE_OF_CEILING: Final = 0.6


class Scenario(Enum):
    """A state of the caches; the value is the name of its locustfile."""

    COLD_BOOT = "cold_boot"
    WARMED_UP = "warmed_up"

    @property
    def title(self) -> str:
        """The name for people."""
        return self.value.replace("_", " ").capitalize()


class Shape(Enum):
    """How requests arrive."""

    SATURATION = "saturation"
    CONSTANT_RATE = "constant rate"


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run of one mode."""

    mode: str
    scenario: Scenario
    shape: Shape
    seconds: float

    @property
    def title(self) -> str:
        """The name for people."""
        return f"{self.mode}: {self.scenario.title.lower()}, {self.shape.value}"


def plan(options: Options) -> list[Run]:
    """Return the runs of a comparison, each for a freshly booted service: within each shape, the modes take turns.

    Saturation comes first, since the ceiling that it finds sets the constant rate.
    """
    saturation = [
        Run(mode, scenario, Shape.SATURATION, _seconds(mode, options))
        for scenario in Scenario
        for mode in (*options.modes, PREBUILT)
    ]
    constant_rate = [
        Run(mode, scenario, Shape.CONSTANT_RATE, options.seconds) for scenario in Scenario for mode in options.modes
    ]
    return saturation + constant_rate


def _seconds(mode: str, options: Options) -> float:
    # The prebuilt bytes know no cache that boots or expires: half the time measures them as well.
    return max(options.seconds / 2, 1.0) if mode == PREBUILT else options.seconds
