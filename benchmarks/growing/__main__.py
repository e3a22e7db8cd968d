"""Measures one question in this process: `python -m benchmarks.growing QUESTION FILE [--quick]`."""

import asyncio
import importlib
import sys
from pathlib import Path

import msgspec

from benchmarks.children import tell
from benchmarks.growing import Setting


def main() -> None:
    """Measure, and write the figures into the file."""
    name, path, *flags = sys.argv[1:]
    measure = importlib.import_module(f"benchmarks.growing.{name}").measure
    found = asyncio.run(measure(Setting(tell, is_quick="--quick" in flags)))
    Path(path).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
