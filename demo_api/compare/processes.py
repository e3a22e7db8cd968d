"""Child processes that end with the block that started them."""

import os
import resource
import signal
import subprocess
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ..servers import end_process

LINES_OF_LOG: Final = 15
MANY_FILES: Final = 20_000


class ChildError(Exception):
    """A child process failed; the message ends with the last lines of its log."""

    def __init__(self, what: str, log: Path) -> None:
        said = log.read_text(errors="replace").splitlines()[-LINES_OF_LOG:]
        super().__init__("\n".join([f"{what}; it said last:", *said]))


@contextmanager
def child(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, stop_signal: signal.Signals
) -> Generator[subprocess.Popen[bytes]]:
    """Run *command* within the block.

    Args:
        command: The program and its arguments.
        environment: All of its environment variables.
        log: The file that gets what it prints.
        stop_signal: Sent to the process if it still runs at the end of the block.
    """
    process: subprocess.Popen[bytes] | None = None
    try:
        # An interrupt during the start would leave the child running.
        with log.open("wb") as said, _interrupts_held_back():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C reaches only this process, which then stops its children in order.
                start_new_session=True,
            )
        yield process
    finally:
        if process is not None:
            _end(process, stop_signal)


@contextmanager
def _interrupts_held_back() -> Generator[None]:
    """Deliver SIGINT and SIGTERM at the end of the block.

    It takes handlers, because a child would inherit a signal mask.
    """
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    handlers = [(number, signal.signal(number, lambda received, _: held.append(received))) for number in numbers]
    try:
        yield
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
        for received in held:
            signal.raise_signal(received)


def _end(process: subprocess.Popen[bytes], stop_signal: signal.Signals) -> None:
    try:
        end_process(process, stop_signal)
    finally:
        # The child may have started processes itself.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def allow_many_connections() -> None:
    """Raise the limit of open files for this process and its children: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems refuse an unlimited soft limit even if the hard limit is unlimited.
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
