"""Where the guarded route spends its time: `python -m benchmarks.profile_route [--quick] [--docs]`.

Samples the demo's service with py-spy while Locust asks it for menus that are all in memory, and
draws a flame graph. Compares the route with the one that sends prebuilt bytes: in one process in
turn, and over HTTP.
"""

import argparse
import asyncio
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from http.client import OK
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.flame import Layer, flame_graph, layers, parse
from benchmarks.growing import settle_memory
from benchmarks.growing.page import number, replaced
from benchmarks.growth import DOCS, PAGE, SMOKE_TEST
from benchmarks.model import Figure
from demo_api.app import SAMPLE, create_app
from demo_api.compare.load import generate
from demo_api.compare.options import Options
from demo_api.compare.plan import PREBUILT, Run, Scenario, Shape
from demo_api.compare.processes import ChildError, allow_many_connections
from demo_api.compare.service import Service, running_service
from demo_api.seeding import seed
from demo_api.servers import ServerUrls, embedded_servers
from demo_api.settings import Settings

PICTURE: Final = Path("assets/flame.svg")
MENUS: Final = 20
USERS: Final = 64
REQUESTS: Final = 100  # of a round in one process
LIFE: Final = 3600.0  # seconds: nothing expires during the run
RATE: Final = 200  # samples per second
KINDS: Final = ("restaurants", PREBUILT)


class ProfilingError(Exception):
    """There is no profile; the message has the reason."""


class Found(msgspec.Struct):
    """The results; the ratios are of throughputs, guarded to prebuilt."""

    is_quick: bool
    samples: int
    layers: list[Layer]
    stacks: dict[str, int]
    in_process: Figure
    over_http: Figure


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_route", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test: all of it runs, briefly")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured to FILE")
    parser.add_argument("--read", type=Path, metavar="FILE", help="show earlier results from FILE")
    parser.add_argument(
        "--docs", type=Path, nargs="?", const=DOCS, metavar="FOLDER", help=f"put picture and table into FOLDER, {DOCS}"
    )
    return parser.parse_args(arguments)


def scope_of(kind: str) -> dict[str, Any]:
    """Return the ASGI scope of one GET."""
    path = f"/{kind}/{SAMPLE}/menu"
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }


async def receive() -> dict[str, Any]:
    """Return an empty body."""
    return {"type": "http.request", "body": b"", "more_body": False}


async def send(_: Any) -> None:
    """Take part of an answer, and drop it."""


async def check(message: Any) -> None:
    """Take part of an answer, and check its status."""
    if message.get("status", OK) != OK:
        problem = f"a route answered with status {message['status']}"
        raise ProfilingError(problem)


async def ask(app: Any, kind: str) -> float:
    """Return the CPU seconds of *app* for a round of requests."""
    scopes = [scope_of(kind) for _ in range(REQUESTS)]
    begun_at = time.thread_time()
    for scope in scopes:
        await app(scope, receive, send)
    return time.thread_time() - begun_at


async def in_process(urls: ServerUrls, rounds: int) -> Figure:
    """Return the ratio of the two routes' throughputs, without server and network.

    In each app the route under load is the first.
    """
    async with AsyncExitStack() as opened:
        apps: dict[str, Any] = {}
        for kind in KINDS:
            settings = Settings(
                database_url=urls.postgres,
                redis_url=urls.redis,
                l1_ttl=LIFE,
                l2_ttl=LIFE,
                ceiling_first=kind == PREBUILT,
                http_caching=False,
            )
            app = apps[kind] = create_app(settings)
            await opened.enter_async_context(app.router.lifespan_context(app))
            await app(scope_of(kind), receive, check)
            await ask(app, kind)
        settle_memory()
        ratios = []
        for round_ in range(rounds):
            times = {kind: await ask(apps[kind], kind) for kind in (KINDS if round_ % 2 else reversed(KINDS))}
            ratios.append(times[PREBUILT] / times[KINDS[0]])
    return Figure.of(ratios)


def load(service: Service, mode: str, seconds: float, folder: Path, tick: Callable[[], None]) -> float:
    """Put load on one route; return its right answers per second."""
    asked = Options(seconds=seconds, users=USERS, restaurants=MENUS, modes=(), seed="menu", output=None)
    run = Run(mode, Scenario.WARMED_UP, Shape.SATURATION, seconds)
    return generate(run, service, asked, rate=0, folder=folder, tick=tick).throughput


def over_http(services: dict[str, Service], rounds: int, seconds: float, folder: Path) -> Figure:
    """Return the ratio of the two routes' throughputs, over HTTP.

    In each process the route under load is the first.
    """
    ratios = []
    for round_ in range(rounds):
        order = services if round_ % 2 else reversed(services)
        found = {mode: load(services[mode], mode, seconds, folder, lambda: None) for mode in order}
        ratios.append(found["on"] / found[PREBUILT])
    return Figure.of(ratios)


def sampled(service: Service, seconds: float, folder: Path) -> str:
    """Return py-spy's samples of *service* under load, one stack a line."""
    path, process = folder / "stacks.txt", service.get("/stats")["process"]
    # The service is stopped for each sample, so that stacks are whole. Native frames are left out,
    # because they take far longer.
    command = ["--pid", process, "--duration", math.ceil(seconds), "--rate", RATE, "--output", path]
    flags = ["--format", "raw", "--function", "--full-filenames"]
    words = [str(word) for word in (_py_spy(), "record", *command, *flags)]
    # The service is warm by then, and the users have connected.
    begins_at = service.counts().calls + 2 * MENUS
    running: list[subprocess.Popen[str]] = []

    def begin() -> None:
        if not running and service.counts().calls > begins_at:
            running.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))  # noqa: S603

    # Longer than the sampling, because `begin` is called only twice a second.
    load(service, "on", seconds + 2.0, folder, begin)
    said = running[0].communicate(timeout=seconds + 30)[0] if running else "the load was over too soon"
    if not path.exists():
        message = f"py-spy could not sample the service; it has to be allowed to trace other processes:\n{said}"
        raise ProfilingError(message)
    return path.read_text()


def _py_spy() -> str:
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        message = "py-spy is not installed: `pip install py-spy`, or use `nox -s growth`"
        raise ProfilingError(message)
    return found


def measure(*, is_quick: bool, console: Console) -> Found:
    """Measure both ratios, and sample the service."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console) as progress,
        embedded_servers() as urls,
        TemporaryDirectory() as name,
    ):
        task = progress.add_task("in one process", total=3)
        folder, lives = Path(name), {"L1_TTL": str(LIFE), "L2_TTL": str(LIFE)}
        asyncio.run(seed(urls.postgres))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            ratio = runner.run(in_process(urls, 4 if is_quick else 200))
        progress.update(task, description="over HTTP", completed=1)
        allow_many_connections()
        with (
            running_service("on", urls, folder / "on.log", lives) as on,
            running_service(PREBUILT, urls, folder / "prebuilt.log", lives) as prebuilt,
        ):
            services = {"on": on, PREBUILT: prebuilt}
            ratio_over_http = over_http(services, 1 if is_quick else 12, 1.0 if is_quick else 3.0, folder)
            progress.update(task, description="under py-spy", completed=2)
            stacks = parse(sampled(on, 1.0 if is_quick else 15.0, folder))
        progress.update(task, completed=3)
    samples = sum(count for _, count in stacks)
    lines = {";".join(f"{frame.layer}|{frame.name}" for frame in stack): count for stack, count in stacks}
    return Found(is_quick, samples, layers(stacks), lines, ratio, ratio_over_http)


def table(found: Found) -> list[list[str]]:
    """Return the head and the rows: what each layer took."""
    rows = [["layer", "in its own code", "with what it calls"]]
    rows += [[each.name, f"{each.own:.1%}", f"{each.inclusive:.1%}"] for each in found.layers]
    return rows


def ratios(found: Found) -> str:
    """Return the sentence about the two routes."""

    def said(figure: Figure) -> str:
        return f"{number(figure.median)} ({number(figure.low)}–{number(figure.high)})"

    return (
        f"Guarded to prebuilt, requests per second: {said(found.in_process)} in one process without a server, "
        f"{said(found.over_http)} over HTTP with {USERS} connections."
    )


def write(found: Found, docs: Path) -> None:
    """Put the picture into the documentation, and the table into its page."""
    picture, page = docs / PICTURE, docs / PAGE
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(flame_graph(found.stacks))
    head, *body = table(found)
    lines = [
        SMOKE_TEST if found.is_quick else "",
        f"![Flame graph of the guarded route](../{PICTURE})",
        "",
        f"{found.samples:,} samples of the service under load; width is time, and what a frame calls stands above it.",
        "",
        *(f"| {' | '.join(row)} |" for row in (head, ["---", "---:", "---:"], *body)),
        "",
        ratios(found),
    ]
    page.write_text(replaced(page.read_text(), "route", "\n".join(lines).strip()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or read results, print them, write the files asked for; return the exit status."""
    chosen, console = options(arguments), Console()
    try:
        found = (
            msgspec.json.decode(chosen.read.read_bytes(), type=Found)
            if chosen.read
            else measure(is_quick=chosen.quick, console=console)
        )
    except (ChildError, ProfilingError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    if chosen.json and not chosen.read:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    for row in table(found):
        console.print("{:<24}{:>18}{:>20}".format(*row), markup=False, highlight=False)
    console.print(ratios(found), markup=False, highlight=False)
    if found.is_quick:
        console.print(SMOKE_TEST)
    if chosen.docs:
        write(found, chosen.docs)
        console.print(f"written: {chosen.docs / PICTURE}, {chosen.docs / PAGE}", markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
