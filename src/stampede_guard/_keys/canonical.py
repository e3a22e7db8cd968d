"""Values as text in keys: one text for each value.

`canonical` is typed and quoted, for derived keys. `text_of` is the plain text that users expect in a template (`7` for
`7` and for `"7"`), escaped so that it contains no separator and is never empty.
"""

import datetime as dt
import enum
import ipaddress
import math
import pathlib
import string
import types
import uuid
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from decimal import Decimal
from functools import partial
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from ..errors import InvalidKey
from .names import REMEDY, lasting_name, qualified_name

_NAN = "NaN differs from itself, so it cannot be part of a key"
_SAFE = frozenset(string.ascii_letters + string.digits + "_.")
# A subclass of `uuid.UUID` with a memory layout of its own, and no content of its own.
_ASYNCPG_UUID = "asyncpg.pgproto.pgproto.UUID"
# The zone of a datetime in a request: a fixed offset.
_PYDANTIC_ZONE = "pydantic_core._pydantic_core.TzInfo"
# Bits of the longest `int` that is written in decimal: from 640 digits on, an option of Python may forbid it.
_DECIMAL_BITS = 2_048


def canonical(value: Any) -> str:
    """Return a text that no other value of any type has, for a value that is compared by its content.

    Raises:
        InvalidKey: the value has no such text: an arbitrary object, one that is compared by identity or by a method of
            its own, an instance of a class that cannot be found by name, a subclass with more content than its base,
            NaN.
    """
    kind: Any = type(value)
    write = _WRITERS.get(kind)
    if write is not None:
        return write(value)
    if issubclass(kind, type):
        return lasting_name(value)
    if issubclass(kind, enum.Enum):
        return f"{lasting_name(kind)}{_write_member(value, '.{}'.format, '({})'.format)}"
    base = _base_of(value)
    if base is not None:
        named = base if qualified_name(kind) == _ASYNCPG_UUID else kind
        return _write_named(lasting_name(named), base, value)
    names = _compared_fields(kind)
    if names is not None:
        inner = ",".join(f"{name}={canonical(getattr(value, name))}" for name in names)
        return f"{lasting_name(kind)}({inner})"
    message = f"an argument of type {qualified_name(kind)} has no canonical form, so no key can be derived from it: "
    raise InvalidKey(message + REMEDY)


def text_of(value: Any) -> str:
    """Return the text of *value* in a template: values of one type have different texts, those of two types may not.

    Raises:
        InvalidKey: the value has no text (an arbitrary object, a subclass with more content than its base, NaN).
    """
    kind: Any = type(value)
    write = _TEXTS.get(kind)
    if write is not None:
        return write(value)
    if issubclass(kind, enum.Enum):
        return _write_member(value, _escape, lambda written: f"~{_escape(written)}")
    write = _TEXTS.get(_base_of(value))
    return f"~{_escape(canonical(value))}" if write is None else write(value)


def _escape(text: str) -> str:
    if _SAFE.issuperset(text):
        return text
    encoded = text.encode("utf-8", "surrogatepass")
    return "".join(chr(byte) if chr(byte) in _SAFE else f"%{byte:02X}" for byte in encoded)


def _escaped(write: Callable[[Any], str], value: Any) -> str:
    return _escape(write(value))


def _base_of(value: Any) -> type | None:
    """Return the base class that has all the content of *value*; `None` if its class has no base in `_BASES`.

    Raises:
        InvalidKey: it has more content.
    """
    kind = type(value)
    base = next((each for each in kind.__mro__ if each in _BASES), None)
    if base is None:
        return None
    more = sorted(getattr(value, "__dict__", ()))
    if more or not _adds_nothing(kind, base):
        added = f"the attribute {more[0]!r}" if more else "fields of its own"
        message = (
            f"an argument of type {qualified_name(kind)} holds more than the {base.__name__} that it is, "
            f"{added}, so no key can be derived from it: "
        )
        raise InvalidKey(message + REMEDY)
    return base


def _adds_nothing(kind: type, base: type) -> bool:
    """Whether instances of *kind* have no field that those of *base* lack, except a `__dict__`."""
    own = kind.__mro__[: kind.__mro__.index(base)]
    slot = types.MemberDescriptorType
    if any(isinstance(each, slot) for above in own for each in vars(above).values()):
        return False
    # A field of a class in C adds to its size; a reference to a dict or to weak references is no field.
    return kind.__basicsize__ <= type("", (base,), {}).__basicsize__ or qualified_name(kind) == _ASYNCPG_UUID


def _compared_fields(kind: Any) -> Iterable[str] | None:
    """Return the fields by which instances of *kind* are compared; `None` if they are not compared by fields."""
    definer = next(above for above in kind.__mro__ if "__eq__" in vars(above))
    if definer in msgspec.Struct.__mro__[:-1]:
        return kind.__struct_fields__ if kind.__struct_config__.eq else None
    code = getattr(kind.__eq__, "__code__", None)
    if definer is not kind or code is None:
        return None  # a subclass may have fields that its base does not compare
    if is_dataclass(kind) and code.co_filename == "<string>":  # written by the decorator
        return [field.name for field in fields(kind) if field.compare]
    if code.co_filename.startswith("<attrs generated"):
        return [field.name for field in getattr(kind, "__attrs_attrs__", ()) if field.eq]
    return None


def _write_member(member: Any, by_name: Callable[[str], str], by_value: Callable[[str], str]) -> str:
    """Return the text of a member of an enum: by its name if that leads back to it, else by its value."""
    name = member._name_  # the property `name` may be overridden
    if type(member).__members__.get(name) is member:
        return by_name(name)
    # A combination of flags, or a member made by `_missing_`.
    return by_value(canonical(member._value_))


def _write_int(value: int) -> str:
    return int.__repr__(value) if int.bit_length(value) <= _DECIMAL_BITS else int.__format__(value, "#x")


def _write_decimal(value: Decimal) -> str:
    if Decimal.is_nan(value):
        raise InvalidKey(_NAN)
    return Decimal.__str__(value)


def _write_time(text: str, zone: dt.tzinfo | None, fold: int) -> str:
    return f"{text}{'' if zone is None else _write_zone(zone)}{' fold' * fold}"


def _write_zone(zone: Any) -> str:
    """Return the part of a time's text that tells *zone* from others with the same offset at that time."""
    kind = type(zone)
    if kind is dt.timezone:
        name, usual = zone.tzname(None), dt.timezone(zone.utcoffset(None)).tzname(None)
        return "" if name == usual else f"[{name!r}]"
    if qualified_name(kind) == _PYDANTIC_ZONE:
        return ""
    try:
        # The arguments that make an equal zone elsewhere; raises for one without.
        reduced = zone.__reduce_ex__(2)
        if kind is ZoneInfo:
            return f"[{zone.key}]"
        make, *parts = (str, reduced) if isinstance(reduced, str) else reduced
        return f"[{lasting_name(kind)}{canonical((make.__qualname__, *parts))}]"
    except Exception as error:
        message = f"a time in the zone {zone!r} has no canonical form; use zoneinfo.ZoneInfo or datetime.timezone"
        raise InvalidKey(message) from error


def _write_float(value: float) -> str:
    if math.isnan(value):
        raise InvalidKey(_NAN)
    return float.__repr__(value)


def _write_all(values: Iterable[Any]) -> str:
    return ",".join(map(canonical, values))


def _write_named(name: str, base: type, value: Any) -> str:
    """Return the text of *value* with the name of its type; quoted, unless *base* has a typed text of its own."""
    write = _BY_TEXT.get(base)
    return f"{name}({_WRITERS[base](value) if write is None else repr(write(value))})"


def _write_dict(value: dict[Any, Any]) -> str:
    # Equal dicts may differ in order. The texts are sorted, because the keys may not compare.
    return "{" + ",".join(sorted(f"{canonical(key)}:{canonical(item)}" for key, item in value.items())) + "}"


# Types whose text is unique among their values; a derived key adds the name of the type.
_BY_TEXT: dict[Any, Callable[[Any], str]] = {
    Decimal: _write_decimal,
    uuid.UUID: uuid.UUID.__str__,
    dt.datetime: lambda value: _write_time(dt.datetime.isoformat(value, " "), value.tzinfo, value.fold),
    dt.date: dt.date.isoformat,
    dt.time: lambda value: _write_time(dt.time.isoformat(value), value.tzinfo, value.fold),
    dt.timedelta: dt.timedelta.__str__,
    pathlib.PurePosixPath: str,
    pathlib.PureWindowsPath: str,
    pathlib.PosixPath: str,
    pathlib.WindowsPath: str,
    ipaddress.IPv4Address: str,
    ipaddress.IPv6Address: str,
    ipaddress.IPv4Interface: str,
    ipaddress.IPv6Interface: str,
}
# Types of which a subclass that adds no content may be used. The methods called are those of the base: a subclass may
# override them, and show less than its content.
_BASES = (str, bytes, int, float, tuple, Decimal, uuid.UUID, dt.datetime, dt.date, dt.time, dt.timedelta)

_WRITERS: dict[type, Callable[[Any], str]] = {
    type(None): repr,
    bool: repr,
    int: _write_int,
    str: str.__repr__,
    bytes: bytes.__repr__,
    float: _write_float,
    complex: lambda value: f"complex({_write_float(value.real)},{_write_float(value.imag)})",
    tuple: lambda value: f"({_write_all(tuple.__iter__(value))})",
    list: lambda value: f"[{_write_all(value)}]",
    dict: _write_dict,
    set: lambda value: f"set({','.join(sorted(map(canonical, value)))})",
    frozenset: lambda value: f"frozenset({','.join(sorted(map(canonical, value)))})",
    **{kind: partial(_write_named, qualified_name(kind), kind) for kind in _BY_TEXT},
}

_TEXTS: dict[Any, Callable[[Any], str]] = {
    str: lambda value: _escape(str.__str__(value)) or "~empty",
    int: lambda value: _escape(_write_int(value)),
    type(None): lambda value: f"~{value}",
    bool: lambda value: f"~{value}",
    float: lambda value: _escape(_write_float(value)),
    bytes: lambda value: f"~bytes.{bytes.hex(value)}",
    **{kind: partial(_escaped, write) for kind, write in _BY_TEXT.items()},
}


def class_name(owner: type) -> str:
    """Return the text of a class, the same in every process.

    Raises:
        InvalidKey: a class made inside a function may share its name with others.
    """
    return text_of(lasting_name(owner))
