"""Child processes that measure, and report their progress line by line."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

Tell = Callable[[float, str], None]

REPOSITORY: Final = Path(__file__).parents[1]
PROGRESS: Final = "progress\t"


def tell(done: float, said: str) -> None:
    """Report the progress to the parent process."""
    print(f"{PROGRESS}{done:.3f}\t{said}", flush=True)  # noqa: T201  # the parent reads it


def run_child(module: str, *arguments: str, told: Tell) -> str:
    """Run *module* in a process of its own; return why it failed, or nothing.

    Args:
        module: Its name, as `python -m` takes it.
        arguments: Its arguments.
        told: Takes the progress that the process reports.
    """
    command = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(  # noqa: S603  # a module of this package
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=REPOSITORY
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(PROGRESS):
                    _, done, said = line.rstrip("\n").split("\t")
                    told(float(done), said)
        errors.seek(0)
        return f"exit {child.returncode}\n{errors.read()[-2000:]}" if child.returncode else ""
