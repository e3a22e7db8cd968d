"""One run: Locust in its own process, and the service's counts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from .measurement import Measurement, Moment, Samples
from .options import Options
from .plan import PREBUILT, Run, Shape
from .processes import ChildError, child
from .service import REPOSITORY, Counts

LOCUSTFILES: Final = REPOSITORY / "locustfiles"
POLL_INTERVAL: Final = 0.5
# Seconds for late answers after the window; an overloaded mode would need minutes.
DRAIN: Final = 5
# Seconds that Locust may take to start, connect and drain.
PATIENCE: Final = 90.0


class Target(Protocol):
    """A service, in one process or several."""

    @property
    def urls(self) -> Sequence[str]:
        """The base URLs, over which the users are spread."""
        ...

    def counts(self) -> Counts:
        """Return the service's counts so far."""
        ...


def generate(
    run: Run, service: Target, options: Options, *, rate: float, folder: Path, tick: Callable[[], None]
) -> Measurement:
    """Run one scenario against *service*, and return the result.

    Args:
        run: What to run.
        service: The service, in the run's mode.
        options: The load, the same for each mode.
        rate: Arrivals per second, if the run has a constant rate.
        folder: Where the samples and Locust's log go.
        tick: Called about twice a second until the run ends.

    Raises:
        ChildError: If Locust fails.
    """
    recorded, log = folder / "samples.f64", folder / "locust.log"
    recorded.unlink(missing_ok=True)
    command = _command(run, service.urls, options, rate, recorded)
    before = service.counts()
    # Locust has nothing to clean up, so it is killed if it has to end early.
    with child(command, environment=os.environ, log=log, stop_signal=signal.SIGKILL) as locust:
        moments = list(_follow(locust, service, run.seconds + PATIENCE, tick))
    if locust.returncode or not recorded.exists():
        raise ChildError(f"Locust ended with code {locust.returncode}", log)
    samples = Samples.read(recorded)
    if not samples.due_at.size:
        raise ChildError("Locust made no request", log)
    begun_at = float(samples.due_at.min())
    curve = [Moment(at - begun_at, counts.since(before)) for at, counts in moments if at >= begun_at]
    return Measurement(run, options.restaurants, samples, service.counts().since(before), curve)


def _follow(
    locust: subprocess.Popen[bytes], service: Target, patience: float, tick: Callable[[], None]
) -> Iterator[tuple[float, Counts]]:
    give_up_at = time.monotonic() + patience
    # When the time is up, the end of the caller's block kills Locust.
    while time.monotonic() < give_up_at:
        with suppress(subprocess.TimeoutExpired):
            locust.wait(POLL_INTERVAL)
            return
        yield time.perf_counter(), service.counts()
        tick()


def _command(run: Run, hosts: Sequence[str], options: Options, rate: float, recorded: Path) -> list[str]:
    path = f"/{PREBUILT if run.mode == PREBUILT else 'restaurants'}/{{restaurant_id}}/menu"
    users = options.users if run.shape is Shape.SATURATION else 1
    flags = {
        "-f": LOCUSTFILES / f"{run.scenario.value}.py",
        "--host": hosts[0],
        "--hosts": ",".join(hosts[1:]),
        "--users": users,
        "--spawn-rate": users,
        "--window": run.seconds,
        "--stop-timeout": DRAIN,
        # Failed requests are counted, and do not end the comparison.
        "--exit-code-on-error": 0,
        "--loglevel": "WARNING",
        "--restaurants": options.restaurants,
        "--seed": options.seed,
        "--rate": rate if run.shape is Shape.CONSTANT_RATE else 0,
        "--connections": options.users,
        "--path": path,
        "--record": recorded,
    }
    arguments = [str(word) for flag in flags.items() for word in flag]
    return [sys.executable, "-m", "locust", "--headless", "--only-summary", *arguments]
