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


@dataclass(frozen=True, slots=True)
class Boot:
    """One fresh start of the service, and what is run on it."""

    mode: str
    runs: tuple[Run, ...]


def plan(options: Options) -> list[Boot]:
    """Return the boots of a comparison: the modes take turns within each shape.

    Saturation comes first, since the ceiling that it finds sets the constant rate.
    """
    # The prebuilt bytes know no cache that boots or expires: half the time measures them as well.
    ceiling = _boot(PREBUILT, Shape.SATURATION, max(options.seconds / 2, 1.0))
    saturation = [_boot(mode, Shape.SATURATION, options.seconds) for mode in options.modes]
    constant = [_boot(mode, Shape.CONSTANT_RATE, options.seconds) for mode in options.modes]
    return [*saturation, ceiling, *constant]


def _boot(mode: str, shape: Shape, seconds: float) -> Boot:
    return Boot(mode, tuple(Run(mode, scenario, shape, seconds) for scenario in Scenario))
