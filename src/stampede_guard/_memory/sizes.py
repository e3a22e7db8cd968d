"""The bytes that a value takes in memory, estimated in microseconds.

Builtin containers are followed by a sample of their items, which speaks for the others. Dataclasses, attrs classes,
`msgspec.Struct`s, Pydantic models and other plain objects are followed by their fields. Anything else is what
`sys.getsizeof` says of it; for an array or a data frame that contains its data.
"""

import sys
from collections import deque
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

_SAMPLE = 8  # items of a container that speak for all
_FIELDS = 32  # of an object that speak for all
_MOST = 20  # objects that are opened
_SHARED = (bool, type(None), type, Enum, FunctionType, BuiltinFunctionType, MethodType, ModuleType)  # no value's own
_ATOMS = frozenset({int, float, complex, str, bytes, bytearray})


def estimate(value: object) -> int:
    """Return about how many bytes *value* takes, with all that it refers to.

    What is referred to twice is counted twice.
    """
    total = opened = 0.0
    queue: deque[tuple[Any, float]] = deque([(value, 1.0)])
    for _ in range(_MOST):
        if not queue:
            return int(total)
        each, weight = queue.popleft()
        own, parts, count = _opened(each)
        total += weight * own
        opened += weight
        for part in parts:
            share = weight * count / len(parts)
            if type(part) in _ATOMS:
                total += share * sys.getsizeof(part)
            elif not isinstance(part, _SHARED):
                queue.append((part, share))
    left = sum(weight for _, weight in queue)  # these are taken to be like the others
    return int(total * (1 + left / opened))


def _opened(value: Any) -> tuple[int, Sequence[Any], int]:
    """Return the bytes of *value* itself, a sample of what it refers to, and how many that are in all."""
    if isinstance(value, _SHARED):
        return 0, (), 0
    size, count = sys.getsizeof(value), 0
    parts: Sequence[Any] = ()
    kind: Any = type(value)
    if isinstance(value, list | tuple):
        count = len(value)
        parts = value[:: count // _SAMPLE or 1]
    elif isinstance(value, dict):
        parts, count = [*chain.from_iterable(islice(value.items(), _SAMPLE))], 2 * len(value)
    elif isinstance(value, set | frozenset | deque):
        parts, count = [*islice(value, _SAMPLE)], len(value)
    elif _is_record(kind):
        fields = [getattr(value, name, None) for name in _slots_of(kind)]
        held = getattr(value, "__dict__", None)
        if held:
            size += sys.getsizeof(held)
            fields += held.values()
        parts, count = fields[:_FIELDS], len(fields)
    return size, parts, count


def _is_record(kind: Any) -> bool:
    """Whether objects of *kind* do not tell their size themselves; msgspec's tell that of their fields' places."""
    return kind.__sizeof__ is object.__sizeof__ or hasattr(kind, "__struct_fields__")


@lru_cache(maxsize=256)
def _slots_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields that objects of *kind* have in slots."""
    named: list[str] = [*getattr(kind, "__struct_fields__", ())]
    for each in () if named else kind.__mro__:
        slots = vars(each).get("__slots__", ())
        named += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in named if name not in {"__dict__", "__weakref__"})
