"""Loads, wake-ups and reads of more and more processes on one Redis."""

import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import monotonic
from typing import IO, Any

import msgspec

from benchmarks.growing import Curve, Picture, Question, Setting
from benchmarks.growing.worker import CALLERS, LIFE, LOAD, READERS
from demo_api.servers import embedded_servers

FOLDER = Path(__file__).parents[2]
STOP_TIMEOUT = 20.0
AHEAD = 0.05  # seconds within which all processes have read their command


class Process:
    """A worker, and the two pipes to it."""

    def __init__(self, url: str) -> None:
        self._popen = subprocess.Popen(  # noqa: S603  # a module of this package
            [sys.executable, "-m", "benchmarks.growing.worker", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=FOLDER,
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._to: IO[bytes] = self._popen.stdin
        self._from: IO[bytes] = self._popen.stdout

    def tell(self, what: str, *arguments: object) -> None:
        """Send it the command *what*."""
        self._to.write(msgspec.json.encode([what, arguments]) + b"\n")
        self._to.flush()

    def hear(self) -> dict[str, Any]:
        """Return its answer to a command, or to its start."""
        answer: dict[str, Any] = msgspec.json.decode(self._from.readline() or b'{"error": "a worker died"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def stop(self) -> None:
        """End it."""
        try:
            self._popen.communicate(timeout=STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.communicate()


@contextmanager
def processes(url: str, count: int) -> Generator[list[Process]]:
    """Run *count* workers within the block, all of them ready."""
    started: list[Process] = []
    try:
        started.extend(Process(url) for _ in range(count))
        for process in started:
            process.hear()
        yield started
    finally:
        for process in started:
            process.stop()


def told(workers: Sequence[Process], what: str, *arguments: object) -> list[dict[str, Any]]:
    """Send the command *what* to all *workers*; return their answers."""
    for worker in workers:
        worker.tell(what, *arguments)
    return [worker.hear() for worker in workers]


class Expiries:
    """Rounds in which one key has expired in Redis, and all callers ask for it at once."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.loads: list[float] = []
        self.medians: list[float] = []
        self.slowest: list[float] = []

    def round(self, workers: Sequence[Process]) -> None:
        """Let the key expire, and let all call."""
        answers = told(workers, "expire", self._kind, monotonic() + LIFE + AHEAD)
        ended_at = [at for answer in answers for at in answer["ended_at"]]
        answered_at = [at for answer in answers for at in answer["answered_at"]]
        self.loads.append(len(ended_at))
        if ended_at:
            late = [(at - min(ended_at)) * 1e3 for at in answered_at]
            self.medians.append(median(late))
            self.slowest.append(max(late))


async def measure(setting: Setting) -> Question:
    """Measure with processes that were all started before; those beyond a size are idle."""
    sizes = setting.sizes(16, 2, base=2)
    loads = {"leases": Curve("with leases"), "no leases": Curve("without leases", is_reference=True)}
    wake, slowest = Curve("median of the callers"), Curve("the last caller")
    reads = Curve("reads of all processes")
    seconds = 0.3 if setting.is_quick else 1.0
    with embedded_servers(postgres=False) as urls, processes(urls.redis, sizes[-1]) as workers:
        told(workers[:1], "warm")
        for number, count in enumerate(sizes):
            some = workers[:count]
            setting.tell(number / len(sizes), f"{count} processes, expiries")
            for kind, curve in loads.items():
                expiries = Expiries(kind)
                for _ in range(setting.rounds(11)):
                    expiries.round(some)
                curve.add(count, expiries.loads)
                if kind == "leases":
                    wake.add(count, expiries.medians)
                    slowest.add(count, expiries.slowest)
            setting.tell((number + 0.7) / len(sizes), f"{count} processes, reads")
            found = []
            for _ in range(setting.rounds(3)):
                answers = told(some, "read", monotonic() + AHEAD, seconds)
                found.append(sum(answer["reads"] for answer in answers) / seconds)
            reads.add(count, found)
    caption = (
        "One server, one key that expires in Redis and is in no process's memory; "
        f"{CALLERS} callers in each process ask for it at once, and a load takes {LOAD * 1e3:.0f} ms. "
        "Wake-up is the time from the end of the first load, in any process, to a caller's answer. "
        "Reads are of values that Redis holds and no process keeps in memory, "
        f"{READERS} readers in each process."
    )
    return Question(
        "processes",
        "Processes on one Redis",
        "processes",
        caption,
        [
            Picture("processes-loads", "Loads of each expiry", "loads", "", list(loads.values())),
            Picture("processes-wake-up", "From the load to the answers", "time", "ms", [wake, slowest]),
            Picture("processes-reads", "Reads from Redis", "reads", "1/s", [reads]),
        ],
    )
