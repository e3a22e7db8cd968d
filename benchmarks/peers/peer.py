"""A candidate: how it wraps a function, and what it lacks."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal

from benchmarks.subjects import Function, Subject, Terms

Wrap = Callable[[Subject, Terms], AbstractAsyncContextManager[Function]]
Wrapped = AsyncGenerator[Function]

# What a candidate may lack, in the words of the tables.
TTL = "TTL"
BOUND = "bound"
COALESCING = "coalescing"
COUNTERS = "counters"
# Without it, the loader runs inside the first caller and is cancelled with that one.
OWN_TASK = "own task"
MEMORY = "values kept"


@dataclass(frozen=True, slots=True)
class Peer:
    """A candidate.

    Args:
        name: Its name in the tables.
        wrap: Puts it around a function while the block runs.
        lacks: Which of the above it lacks with these settings.
        distribution: The distribution that is installed for it.
        imports: The modules that it needs to import.
        has_redis: Whether it can keep values in Redis.
        is_variant: Whether it keeps values as another candidate does.
        role: Its role in the tables.
    """

    name: str
    wrap: Wrap
    lacks: tuple[str, ...] = ()
    distribution: str = ""
    imports: tuple[str, ...] = ()
    has_redis: bool = False
    is_variant: bool = False
    role: Literal["baseline", "reference", "guard", "peer"] = "peer"
