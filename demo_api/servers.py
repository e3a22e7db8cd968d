"""Throwaway Valkey and Postgres servers that never outlive their owner.

The servers belong to a guardian, a child process in a session of its own that waits on a pipe to
its owner. However the owner ends (return, Ctrl-C, crash, SIGKILL), the pipe closes, and the
guardian stops the servers and deletes their folder.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HOST: Final = "127.0.0.1"
# Seconds that a guardian, and any other process, may take to end.
STOP_TIMEOUT: Final = 20.0
END_TIMEOUT: Final = 10.0
POLL_INTERVAL: Final = 0.005
# The line that tells a guardian to start its servers again.
REVIVE: Final = "revive\n"


class ServerError(Exception):
    """An embedded server cannot run here; the message has the reason, and a remedy."""


@dataclass(frozen=True, slots=True)
class ServerUrls:
    """Where the embedded servers listen; empty for one that was not asked for."""

    redis: str = ""
    postgres: str = ""


@contextmanager
def embedded_servers(*, redis: bool = True, postgres: bool = True) -> Generator[ServerUrls]:
    """Run a Valkey and a Postgres on free ports of the loopback interface.

    Args:
        redis: Whether to start the Valkey.
        postgres: Whether to start the Postgres.

    Yields:
        The URLs of the servers, which answer by then.

    Raises:
        ServerError: If a wheel is missing or a server does not start.
    """
    wanted = ["--redis"] * redis + ["--postgres"] * postgres
    if not wanted:
        yield ServerUrls()
        return
    with guardian(wanted) as (started, _):
        yield ServerUrls(redis=started.get("redis", ""), postgres=started.get("postgres", ""))


@contextmanager
def valkey_server(*arguments: str, port: int | None = None) -> Generator["ValkeyServer"]:
    """Run a single Valkey, such as ``valkey_server("--requirepass", "secret")``.

    Args:
        arguments: Command-line options of valkey-server.
        port: The port to listen on; a free one if it is ``None``.

    Yields:
        The server, which answers by then.

    Raises:
        ServerError: If the wheel is missing or the server does not start.
    """
    server = ValkeyServer(*arguments, port=port)
    try:
        server.start()
        yield server
    finally:
        server.stop()


class ValkeyServer:
    """A Valkey to be killed, frozen, and started again on the same port."""

    def __init__(self, *arguments: str, port: int | None = None, config: str | None = None) -> None:
        self.port = free_port() if port is None else port
        self._arguments = arguments
        self._config = [] if config is None else ["--redis-config", config]
        self._guardian = ExitStack()
        self._revive: Callable[[], dict[str, Any]] | None = None
        self._pid = 0

    def __repr__(self) -> str:
        return f"<ValkeyServer port {self.port}, pid {self._pid}>"

    @property
    def url(self) -> str:
        """The URL of the server, without credentials."""
        return f"redis://{HOST}:{self.port}/0"

    def start(self, *arguments: str) -> None:
        """Start the server, empty; one that runs is stopped first.

        Args:
            arguments: Command-line options that replace the earlier ones, if there are any.
        """
        self.stop()
        self._arguments = arguments or self._arguments
        wanted = ["--redis", "--redis-port", str(self.port), *self._config, "--", *self._arguments]
        started, self._revive = self._guardian.enter_context(guardian(wanted))
        self._pid = started["redis_pid"]

    def revive(self) -> None:
        """Start the killed server again, with the files that it left."""
        assert self._revive is not None, "not started yet"
        self._pid = self._revive()["redis_pid"]

    def stop(self) -> None:
        """Stop the server, which may be killed or frozen, and wait until it is gone."""
        self._guardian.close()

    def kill(self) -> None:
        """Kill the server as a crash would, and wait until its port refuses connections."""
        os.kill(self._pid, signal.SIGKILL)
        wait_until(lambda: not is_listening(self.port), "the killed Valkey to be gone")

    def freeze(self) -> None:
        """Suspend the server: the port accepts connections, but nothing is answered."""
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the frozen server go on."""
        os.kill(self._pid, signal.SIGCONT)


@contextmanager
def guardian(wanted: Sequence[str]) -> Generator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Run a guardian; yield its report on the servers, and a function that starts them again.

    Args:
        wanted: Command-line options of `demo_api.guardian`.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "demo_api.guardian", *wanted],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        # Otherwise Ctrl-C would stop the servers before their owner is done with them.
        start_new_session=True,
    )

    def listen() -> dict[str, Any]:
        assert process.stdout is not None
        started: dict[str, Any] = json.loads(process.stdout.readline() or '{"error": "the guardian died"}')
        if "error" in started:
            raise ServerError(started["error"])
        return started

    def revive() -> dict[str, Any]:
        assert process.stdin is not None
        process.stdin.write(REVIVE)
        process.stdin.flush()
        return listen()

    try:
        yield listen(), revive
    finally:
        # Closing the pipe may not suffice, because a forked child can hold it open.
        process.communicate("stop\n", timeout=STOP_TIMEOUT)


def end_process(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to *process* if it still runs, and kill it if it does not end in time."""
    process.send_signal(number)
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def is_listening(port: int) -> bool:
    """Return whether *port* of the loopback interface accepts connections."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def wait_until(is_so: Callable[[], bool], what: str, deadline: float = 10.0) -> None:
    """Poll *is_so* until it holds.

    Args:
        is_so: The condition.
        what: What is waited for, for the error's text.
        deadline: Seconds after which to give up.

    Raises:
        ServerError: If *is_so* does not hold in time.
    """
    give_up_at = time.monotonic() + deadline
    while not is_so():
        if time.monotonic() > give_up_at:
            message = f"waited {deadline:g} s in vain for {what}"
            raise ServerError(message)
        time.sleep(POLL_INTERVAL)
