"""A pytest plugin that switches off what exists only for speed.

`PYTHONPATH=tests pytest -p plain tests/unit` runs the tests without the part in C, argument caches, eager tasks and
direct reads. They pass, so nothing but speed depends on these. The tests of the switched-off parts are left out.
"""

import os
from pathlib import Path
from typing import Any

os.environ["STAMPEDE_GUARD_PURE"] = "1"  # before the package is imported

from inside import untyped

from stampede_guard import _path
from stampede_guard._flights import flight
from stampede_guard._speed import pure

_THEIRS = {"test_argument_cache.py", "test_direct_reads.py"}


def _note_nothing(*_: Any) -> None:
    """Stand for `ArgumentCache.note`, so that no call is answered by its arguments."""


def _start_nothing(*_: Any) -> bool:
    """Stand for `FlightLoad.start`, so that each flight has a task."""
    return False


pure.ArgumentCache.note = _note_nothing
flight._eager_task = None
untyped(_path.FlightLoad).start = _start_nothing


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the tests of what is switched off."""
    return True if collection_path.name in _THEIRS else None
