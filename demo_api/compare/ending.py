"""How a command ends: its exit code, and the reason.

The exit code is 0, 1 if something failed, 2 for an invalid value, and 130 after Ctrl-C.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Final

from rich.console import Console

from ..database import DatabaseError
from ..servers import ServerError
from .plan import Run
from .processes import ChildError, allow_many_connections
from .progress import LiveProgress

FAILED: Final = 1
BAD_USAGE: Final = 2
INTERRUPTED: Final = 130


def carry_out(run: Callable[[LiveProgress, Path], None], planned: list[Run], console: Console) -> int:
    """Call *run* with a live progress of the *planned* runs and a folder; return the exit code."""
    allow_many_connections()
    _end_as_by_ctrl_c()
    try:
        with TemporaryDirectory() as folder, LiveProgress(planned, console) as progress:
            run(progress, Path(folder))
    except KeyboardInterrupt:
        return fail("interrupted; what had finished until then:", INTERRUPTED)
    except (ChildError, DatabaseError, ServerError, OSError) as error:
        return fail(str(error), FAILED)
    return 0


def fail(why: str, code: int) -> int:
    """Print *why* to standard error, and return *code*."""
    Console(stderr=True).print(why, markup=False, highlight=False, soft_wrap=True)
    return code


def _end_as_by_ctrl_c() -> None:
    """Handle SIGTERM as Ctrl-C, so that the children are stopped then as well."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
