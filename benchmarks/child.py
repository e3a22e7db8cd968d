"""Measures one family: `python -m benchmarks.child FAMILY LOOP FILE [--quick]`."""

import asyncio
import importlib
import inspect
import logging
import sys
import warnings
from pathlib import Path

import msgspec

from benchmarks.children import tell
from benchmarks.families import Setting


def main() -> None:
    """Measure, and write the tables into the file."""
    family, loop, path, *flags = sys.argv[1:]
    # Some candidates log each failure that the benchmark provokes.
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    measure = importlib.import_module(f"benchmarks.families.{family}").measure
    setting = Setting(tell, is_quick="--quick" in flags, loop=loop)
    if inspect.iscoroutinefunction(measure):
        factory = None if loop == "asyncio" else importlib.import_module(loop).new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            # Some candidates leave exceptions that are never retrieved.
            runner.get_loop().set_exception_handler(lambda *_: None)
            tables = runner.run(measure(setting))
    else:
        tables = measure(setting)
    Path(path).write_bytes(msgspec.json.encode(tables))


if __name__ == "__main__":
    main()
