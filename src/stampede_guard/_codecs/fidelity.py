"""The comparison of a decoded copy with the value that was encoded."""

import dataclasses
import functools
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from datetime import datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

_MAX_PARTS = 10_000  # of one value that are compared one by one; the rest is compared by `==`
_ATOMS = frozenset({type(None), bool, int, str, bytes})  # equal ones are the same
# Equal ones may differ (0.0 and -0.0; 1.0 and 1.00), and NaN does not equal itself.
_COMPARED_BY_REPR = (float, complex, Decimal)
_ABSENT: Any = object()


class Comparison:
    """A value beside its decoded copy.

    Attributes:
        difference: Where and how the copy differs, as text for logs, without the values; `None` if it does not.
        is_certain: Whether all parts could be compared; if not, a class has neither an `==` of its own nor attributes.
    """

    def __init__(self, value: object, copy: object) -> None:
        self._left = _MAX_PARTS
        self._declared: dict[type, tuple[str, ...]] = {}
        self.is_certain = True
        found = self._compare(value, copy)
        self.difference = None if found is None else f"the value{found}"

    def _compare(self, ours: Any, theirs: Any) -> str | None:
        """Return the first difference; the caller puts the path to it in front."""
        if ours is theirs:
            return None
        kind, other = _type(ours), _type(theirs)
        if kind is not other:
            if kind is int and other is float and ours == theirs:
                return None  # a type checker accepts an int where a float is annotated
            return f" is a {kind.__qualname__}, and comes back as a {other.__qualname__}"
        if kind in _ATOMS or self._left < 0:
            return self._equal(ours, theirs)
        if isinstance(ours, list | tuple):
            return self._sequences(ours, theirs)
        if isinstance(ours, AbstractSet):  # `==` ignores the types of its members
            ours, theirs = dict.fromkeys(ours), dict.fromkeys(theirs)
        return self._mappings(ours, theirs) if isinstance(ours, Mapping) else self._others(ours, theirs)

    def _sequences(self, ours: Any, theirs: Any) -> str | None:
        if len(ours) != len(theirs):
            return " comes back with another length"
        self._left -= len(ours)
        for position, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            found = None if _is_atom(one, other) else self._compare(one, other)
            if found is not None:
                return f"[{position}]{found}"
        return None

    def _mappings(self, ours: Any, theirs: Any) -> str | None:
        items = {key: (key, value) for key, value in theirs.items()}
        if len(ours) != len(items):
            return " comes back with another length"
        self._left -= len(ours)
        for key, value in ours.items():
            their_key, their_value = items.get(key, (_ABSENT, None))
            found = None if _is_atom(key, their_key) else self._compare(key, their_key)
            if found is not None:
                return f" has a key that{found}"
            found = None if _is_atom(value, their_value) else self._compare(value, their_value)
            if found is not None:
                return f"[…]{found}"
        return None

    def _others(self, ours: Any, theirs: Any) -> str | None:
        kind = type(ours)
        declared = self._declared.get(kind)
        if declared is None:
            declared = self._declared[kind] = _declared_names(kind)
        names = dict.fromkeys((*declared, *getattr(ours, "__dict__", ()), *getattr(theirs, "__dict__", ())))
        if not (names and (declared or _compares_by_identity(kind))):
            return self._equal(ours, theirs)
        self._left -= len(names)
        for name in names:
            one, other = getattr(ours, name, _ABSENT), getattr(theirs, name, _ABSENT)
            if _is_atom(one, other) or _is_cached(kind, name):
                continue
            is_there = one is not _ABSENT and other is not _ABSENT
            found = self._compare(one, other) if is_there else " is lost, or added"
            if found is not None:
                return f".{name}{found}"
        return None

    def _equal(self, ours: Any, theirs: Any) -> str | None:
        if isinstance(ours, _COMPARED_BY_REPR):
            is_same = repr(ours) == repr(theirs)
        elif isinstance(ours, datetime | time):
            is_same = ours == theirs and _moment_of(ours) == _moment_of(theirs)
        else:
            is_same = self._equal_by_class(ours, theirs)
        return None if is_same else f" comes back as another {type(ours).__qualname__}"

    def _equal_by_class(self, ours: Any, theirs: Any) -> bool:
        """Return the result of their class's `==`; true, and not certain, if it has none or raises."""
        try:
            if not _compares_by_identity(type(ours)):
                return bool(ours == theirs)
        except Exception:  # noqa: BLE001, S110  # for example, an array compares element by element
            pass
        self.is_certain = False
        return True


def _is_atom(one: Any, other: Any) -> bool:
    return type(one) is type(other) and type(one) in _ATOMS and one == other


def _type(value: object) -> type:
    """Return the class of *value*; `UUID` also for asyncpg's subclass of it."""
    return UUID if isinstance(value, UUID) else type(value)


def _moment_of(value: datetime | time) -> object:
    """Return what `==` ignores: the offset; without one, `fold`."""
    return value.fold if value.tzinfo is None else value.utcoffset()


def _compares_by_identity(kind: Any) -> bool:
    return kind.__eq__ is object.__eq__


def _declared_names(kind: Any) -> tuple[str, ...]:
    """Return the names of the attributes that a class declares."""
    names: list[str] = [*getattr(kind, "__struct_fields__", ())]
    if dataclasses.is_dataclass(kind):
        names += [field.name for field in dataclasses.fields(kind)]
    names += [field.name for field in getattr(kind, "__attrs_attrs__", ())]
    if hasattr(kind, "__pydantic_fields__"):
        names += ["__pydantic_extra__", "__pydantic_private__"]
    return tuple(names)


def _is_cached(kind: Any, name: str) -> bool:
    return isinstance(getattr(kind, name, None), functools.cached_property)
