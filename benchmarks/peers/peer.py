"""One candidate: how it is put around a function, and what it cannot do."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal

from benchmarks.subjects import Function, Subject, Terms

Wrap = Callable[[Subject, Terms], AbstractAsyncContextManager[Function]]
Wrapped = AsyncGenerator[Function]

# What the others may lack, as the tables say it.
TTL = "TTL"
BOUND = "bound"
COALESCING = "coalescing"
COUNTERS = "counters"
OWN_TASK = "own task"  # the loader runs inside the first caller, and is cancelled with them
MEMORY = "values kept"


@dataclass(frozen=True, slots=True)
class Peer:
    """A candidate.

    Args:
        name: How the tables call it.
        wrap: Puts it around a function, for as long as the block runs.
        lacks: What of the above it cannot do with these settings.
        distribution: What is installed for it.
        imports: What it needs to import.
        has_redis: Whether it can keep values in Redis.
        is_variant: Whether it keeps values as another candidate does.
        role: What the tables make of it.
    """

    name: str
    wrap: Wrap
    lacks: tuple[str, ...] = ()
    distribution: str = ""
    imports: tuple[str, ...] = ()
    has_redis: bool = False
    is_variant: bool = False
    role: Literal["baseline", "reference", "guard", "peer"] = "peer"
