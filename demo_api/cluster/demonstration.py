"""The same load on the same processes, without and with the lease."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..compare.comparison import Watcher, open_servers
from ..compare.load import generate
from ..compare.measurement import Measurement
from ..compare.plan import Run, Scenario, Shape
from .options import Fleet
from .processes import running_processes

MODES: Final = {"lease off": False, "lease on": True}


@dataclass(frozen=True, slots=True)
class Finding:
    """One run, and how often a process had to do without Redis."""

    measurement: Measurement
    redis_failures: int


class Demonstration:
    """The planned runs, and the finished ones."""

    def __init__(self, fleet: Fleet) -> None:
        self.findings: list[Finding] = []
        self.runs = [Run(mode, Scenario.COLD_BOOT, Shape.SATURATION, fleet.load.seconds) for mode in MODES]
        self._fleet = fleet

    def run(self, watcher: Watcher, folder: Path) -> None:
        """Run both; finished runs are in `findings`, also after an interruption.

        Arguments and errors are those of `Comparison.run`.
        """
        with open_servers() as servers:
            for run in self.runs:
                watcher.booting(run)
                with running_processes(self._fleet, servers, folder, lease=MODES[run.mode]) as processes:
                    tick = watcher.running(run)
                    found = generate(run, processes, self._fleet.load, rate=0.0, folder=folder, tick=tick)
                    self.findings.append(Finding(found, processes.redis_failures()))
                watcher.finished(found)
