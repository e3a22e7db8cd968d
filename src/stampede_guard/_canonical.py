"""One text for each value, and never one for two: what keys are made of.

`canonical` is typed and quoted, for derived keys. `text_of` is the plain text that people expect
in a template (`7` for `7` and for `"7"`), escaped so that it holds no separator and is never empty.
"""

import datetime as dt
import enum
import ipaddress
import itertools
import math
import string
import uuid
import weakref
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from decimal import Decimal
from pathlib import PurePath
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from .errors import InvalidKey

# What stands in a key by its own text, under its type's name.
_BY_TEXT = (
    Decimal,
    uuid.UUID,
    dt.datetime,
    dt.date,
    dt.time,
    dt.timedelta,
    PurePath,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
)
_PLAIN: tuple[Any, ...] = (str, bytes, int, float, tuple)
_NAN = "NaN differs from itself, so it cannot be part of a key"
_SAFE = frozenset(string.ascii_letters + string.digits + "_.")


def canonical(value: Any) -> str:
    """Return a text that no other value has, types told apart, for a value that is compared by its content.

    Raises:
        InvalidKey: the value has no such text (an arbitrary object, one that is compared by identity, NaN).
    """
    kind: Any = type(value)
    write = _WRITERS.get(kind)
    if write is not None:
        return write(value)
    if isinstance(value, type):
        return _lasting_name(value)
    if isinstance(value, enum.Enum):
        return f"{_name(kind)}.{_write_member(value)}"
    if isinstance(value, _BY_TEXT):
        return f"{_name(kind)}({_write_plainly(value)!r})"
    compared = _compared_fields(kind)
    if compared is not None:
        return _write_fields(value, compared)
    for plain in _PLAIN:  # a subclass, such as a NamedTuple, under its own name
        if isinstance(value, plain):
            return f"{_name(kind)}({_WRITERS[plain](value)})"
    message = (
        f"an argument of type {_name(kind)} has no canonical form, so no key can be derived from it: "
        "pass a key template that names what matters, such as '…-{user.id}', or key=, or leave it out with ignore="
    )
    raise InvalidKey(message)


def text_of(value: Any) -> str:  # noqa: PLR0911  # a table of kinds, one line each
    """Return the text of *value* in a template.

    Raises:
        InvalidKey: the value has no text (an arbitrary object, NaN).
    """
    if isinstance(value, enum.Enum):
        value = _write_member(value)
    if isinstance(value, str):
        return _escape(str.__str__(value)) or "~empty"  # a subclass may show less than it holds
    if value is None or isinstance(value, bool):
        return f"~{value}"
    if isinstance(value, int):
        return _escape(int.__repr__(value))
    if isinstance(value, float):
        return _escape(_write_float(value))
    if isinstance(value, bytes):
        return f"~bytes.{bytes.hex(value)}"
    if isinstance(value, _BY_TEXT):
        return _escape(_write_plainly(value))
    return f"~{_escape(canonical(value))}"


def _escape(text: str) -> str:
    if _SAFE.issuperset(text):
        return text
    encoded = text.encode("utf-8", "surrogatepass")  # a lone surrogate is a text too
    return "".join(chr(byte) if chr(byte) in _SAFE else f"%{byte:02X}" for byte in encoded)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _lasting_name(kind: type) -> str:
    name = _name(kind)
    if "<locals>" in name:
        message = f"{name} is made inside a function, so it may have namesakes, and nobody else knows it: pass a key"
        raise InvalidKey(message)
    return name


def _compared_fields(kind: Any) -> Iterable[str] | None:
    """Return the fields by which instances of *kind* are compared, or `None` if it is not by fields."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__ if kind.__struct_config__.eq else None
    if kind.__eq__ is object.__eq__:
        return None
    if is_dataclass(kind):
        return [field.name for field in fields(kind) if field.compare]
    if hasattr(kind, "__attrs_attrs__"):
        return [field.name for field in kind.__attrs_attrs__ if field.eq]
    return None


def _write_member(member: enum.Enum) -> str:
    return member.name or str(member.value)  # a combination of flags may have no name


def _write_plainly(value: Any) -> str:
    if isinstance(value, Decimal) and value.is_nan():
        raise InvalidKey(_NAN)
    zone = getattr(value, "tzinfo", None)
    if isinstance(zone, ZoneInfo):  # two zones may agree now, and differ an hour later
        return f"{value}[{zone.key}]"
    return str(value)


def _write_float(value: float) -> str:
    if math.isnan(value):
        raise InvalidKey(_NAN)
    return float.__repr__(value)


def _write_all(values: Iterable[Any]) -> str:
    return ",".join(map(canonical, values))


def _write_fields(value: Any, names: Iterable[str]) -> str:
    inner = ",".join(f"{name}={canonical(getattr(value, name))}" for name in names)
    return f"{_name(type(value))}({inner})"


def _write_dict(value: dict[Any, Any]) -> str:
    # Equal dicts may differ in order; so the texts are sorted, not the keys, which may not compare.
    return "{" + ",".join(sorted(f"{canonical(key)}:{canonical(item)}" for key, item in value.items())) + "}"


_WRITERS: dict[type, Callable[[Any], str]] = {
    type(None): repr,
    bool: repr,
    int: int.__repr__,  # not `repr`: a subclass may show less than it holds
    str: str.__repr__,
    bytes: bytes.__repr__,
    float: _write_float,
    complex: lambda value: f"complex({_write_float(value.real)},{_write_float(value.imag)})",
    tuple: lambda value: f"({_write_all(tuple.__iter__(value))})",
    list: lambda value: f"[{_write_all(value)}]",
    dict: _write_dict,
    set: lambda value: f"set({','.join(sorted(map(canonical, value)))})",
    frozenset: lambda value: f"frozenset({','.join(sorted(map(canonical, value)))})",
}

_serials: dict[int, tuple[weakref.ref[Any], int]] = {}
_next_serial = itertools.count(1)


def identity(instance: Any) -> str:
    """Return a text that stands for this very object, in this process, and is never used again.

    Not `id()`: that is recycled, and a new object would inherit the answers of a dead one.

    Raises:
        InvalidKey: the object allows no weak reference.
    """
    known = _serials.get(id(instance))
    if known is not None and known[0]() is instance:
        return f"~{known[1]}"
    address = id(instance)
    try:
        reference = weakref.ref(instance, lambda dead: _forget(address, dead))
    except TypeError:
        message = (
            f"{_name(type(instance))} allows no weak reference, so its methods cannot be told apart by instance: "
            "add '__weakref__' to its __slots__, or put {self.attribute} into the key template"
        )
        raise InvalidKey(message) from None
    serial = next(_next_serial)
    _serials[address] = (reference, serial)
    return f"~{serial}"


def _forget(address: int, dead: weakref.ref[Any]) -> None:
    if address in _serials and _serials[address][0] is dead:  # the address may have a new tenant
        del _serials[address]


def class_name(owner: type) -> str:
    """Return the text that stands for a class in every process.

    Raises:
        InvalidKey: a class made inside a function may have namesakes.
    """
    return text_of(_lasting_name(owner))
