"""The argument cache: answers repeated calls before their op id is built.

A hit in L1 has four costs that a dict does not have: building the op, moving the entry to the end of the order of
use, reading an exact clock, and finding out which event loop is running. The argument cache saves the first two, and
makes the others cheaper. Its table leads from a call's arguments to the slot of their entry in L1. An entry gets there
once L1 has answered that very call, and L1 clears the slot when the entry is dropped, expires or is evicted. A call
whose arguments are not plain, whose loop is another, or whose entry may not be fresh is a `MISS`, which L1 answers.

`pure.py` is the reference. `_fast.c` is its twin. It is compiled where there is a compiler when the package is built,
and used unless the environment variable `STAMPEDE_GUARD_PURE` is set.
"""

import os
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from . import pure
from .pure import MISS, ArgumentCache, FunctionProxy, HitCounter, Slot, Validity

__all__ = ("MISS", "ArgumentCache", "FunctionProxy", "HitCounter", "Slot", "Validity", "is_compiled")

is_compiled = False

if not TYPE_CHECKING and not os.environ.get("STAMPEDE_GUARD_PURE"):
    with suppress(ImportError):  # there was no compiler, or none was wanted
        _fast = import_module(f"{__package__}._fast")
        is_compiled = _fast.FORM == pure.FORM  # else it was compiled from another release's source
        if is_compiled:
            MISS, HitCounter, Slot, Validity = _fast.MISS, _fast.HitCounter, _fast.Slot, _fast.Validity
            ArgumentCache, FunctionProxy = _fast.ArgumentCache, _fast.FunctionProxy
