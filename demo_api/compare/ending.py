"""How a command ends: its exit code, and the reason."""

import signal
from types import FrameType
from typing import Final

from rich.console import Console

FAILED: Final = 1
BAD_USAGE: Final = 2
INTERRUPTED: Final = 130


def fail(why: str, code: int) -> int:
    """Print *why* to standard error, and return *code*."""
    Console(stderr=True).print(why, markup=False, highlight=False, soft_wrap=True)
    return code


def end_as_by_ctrl_c() -> None:
    """Handle SIGTERM as Ctrl-C, so that the children are stopped then as well."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
