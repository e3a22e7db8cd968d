"""The runs of a comparison, and their order."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from .options import SHORTEST_WINDOW, Options

PREBUILT: Final = "prebuilt"
# At this share of the server's ceiling, a slow answer is due to a stampede and not to a queue.
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
    """Return the runs, each for a freshly booted service; the modes take turns within a shape.

    Saturation comes first, because its ceiling sets the constant rate.
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
    # Half the time suffices for the prebuilt bytes, because they come from no cache.
    return max(options.seconds / 2, SHORTEST_WINDOW) if mode == PREBUILT else options.seconds
