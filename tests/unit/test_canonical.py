import enum
import gc
import struct
import sys
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from io import BytesIO
from ipaddress import IPv4Address, IPv4Interface, IPv6Address
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Self
from uuid import UUID
from zoneinfo import ZoneInfo

import asyncpg.pgproto.pgproto as postgres
import attrs
import msgspec
import pytest
from arguments import Masked, Moment, Price, Right, Shade
from inside import untyped
from pydantic import TypeAdapter

from stampede_guard import InvalidKey
from stampede_guard._keys import names
from stampede_guard._keys.canonical import canonical, class_name, text_of
from stampede_guard._keys.names import identity, module_name


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int
    y: int


class UserId(int):
    pass


class Slug(str):
    __slots__ = ()


class MaskedNumber(int):
    def __int__(self) -> int:
        return 0

    __index__ = __int__

    def __str__(self) -> str:
        return "***"

    __repr__ = __str__


@dataclass(frozen=True)
class Query:
    text: str
    page: int = 1
    trace: str = field(default="", compare=False)


@dataclass(eq=False)
class Session:
    url: str


@attrs.frozen
class Filter:
    tag: str
    trace: str = attrs.field(default="", eq=False)


@attrs.define(eq=False)
class Pool:
    size: int


class Place(msgspec.Struct):
    lat: float
    lon: float


class Handle(msgspec.Struct, eq=False):
    number: int


class Plain:
    pass


Made = make_dataclass("Made", ["a"], namespace={"__module__": __name__})


class Day(date):
    def isoformat(self) -> str:
        return "a day"

    __str__ = __repr__ = isoformat


class Ticket(UUID):
    def __str__(self) -> str:
        return "a ticket"

    __repr__ = __str__


class Status(enum.StrEnum):
    OPEN = "open"

    @classmethod
    def _missing_(cls, value: object) -> "Status":
        made = str.__new__(cls, value)
        made._name_, made._value_ = "UNKNOWN", str(value)
        return made


class Money(Decimal):
    currency: str

    def __new__(cls, amount: str, currency: str) -> Self:
        made = super().__new__(cls, amount)
        made.currency = currency
        return made


class Quoted(str):
    __slots__ = ("quote",)

    def __new__(cls, text: str, quote: str) -> Self:
        made = super().__new__(cls, text)
        made.quote = quote
        return made


class LocatedPath(PurePosixPath):
    __slots__ = ()


class Undecorated(Query):
    def __init__(self, text: str, tenant: str) -> None:
        super().__init__(text)
        object.__setattr__(self, "tenant", tenant)

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)

    __hash__ = untyped(None)


class Heir(Query):
    pass


@dataclass
class Judged:
    text: str

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = untyped(None)


@attrs.define
class JudgedFilter:
    tag: str

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = untyped(None)


class JudgedPlace(Place):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = untyped(None)


class Offset(tzinfo):
    """A zone that can be made again from its arguments."""

    def __init__(self, hours: int) -> None:
        self.hours = hours

    def utcoffset(self, moment: datetime | None) -> timedelta:
        return timedelta(hours=self.hours)

    dst = utcoffset

    def tzname(self, moment: datetime | None) -> str:
        return "a zone"

    def __reduce__(self) -> Any:
        return Offset, (self.hours,)


class Known(Offset):
    def __reduce__(self) -> str:
        return "KNOWN"


class Unsettled(Offset):
    def __reduce__(self) -> Any:
        return Unsettled, (Plain(),)


# The smallest file of a zone: no transition, and one offset, of zero.
ZONE_FILE = b"TZif" + bytes(16) + struct.pack(">6l", 0, 0, 0, 0, 1, 4) + struct.pack(">lBB", 0, 0, 0) + b"UTC\0"
BERLIN, PARIS = ZoneInfo("Europe/Berlin"), ZoneInfo("Europe/Paris")
NOON = datetime(2026, 3, 1, 12, tzinfo=BERLIN)
MODULE = __name__


@pytest.mark.parametrize(
    ("expected", "value"),
    [
        ("None", None),
        ("True", True),
        ("1", 1),
        ("-1", -1),
        ("1.0", 1.0),
        ("inf", float("inf")),
        ("complex(1.0,-2.0)", 1 - 2j),
        ("'1'", "1"),
        ('"it\'s"', "it's"),
        (r"'\ud800'", "\ud800"),
        ("b'1'", b"1"),
        ("(1,'a')", (1, "a")),
        ("()", ()),
        ("[1,[2]]", [1, [2]]),
        ("{'a':1,'b':2}", {"b": 2, "a": 1}),
        ("set(1,2)", {2, 1}),
        ("frozenset()", frozenset()),
        ("decimal.Decimal('1.0')", Decimal("1.0")),
        ("uuid.UUID('00000000-0000-0000-0000-000000000007')", UUID(int=7)),
        ("datetime.date('2026-03-01')", date(2026, 3, 1)),
        ("datetime.datetime('2026-03-01 12:00:00+00:00')", datetime(2026, 3, 1, 12, tzinfo=UTC)),
        ("datetime.datetime('2026-03-01 12:00:00+01:00[Europe/Berlin]')", NOON),
        ("datetime.time('12:00:00')", time(12)),
        ("datetime.timedelta('1:00:00')", timedelta(hours=1)),
        ("ipaddress.IPv4Address('10.0.0.1')", IPv4Address("10.0.0.1")),
        ("ipaddress.IPv6Address('::1')", IPv6Address("::1")),
        ("ipaddress.IPv4Interface('10.0.0.1/8')", IPv4Interface("10.0.0.1/8")),
        (f"{MODULE}.Colour.RED", Colour.RED),
        (f"{MODULE}.Level.LOW", Level.LOW),
        ("arguments.Right(3)", Right.READ | Right.WRITE),
        ("arguments.Right(8)", Right(8)),
        (f"{MODULE}.Point((1,2))", Point(1, 2)),
        (f"{MODULE}.UserId(7)", UserId(7)),
        (f"{MODULE}.Slug('a')", Slug("a")),
        (f"{MODULE}.Query(text='a',page=1)", Query("a")),
        (f"{MODULE}.Filter(tag='a')", Filter("a")),
        (f"{MODULE}.Place(lat=1.0,lon=2.0)", Place(1.0, 2.0)),
        (f"{MODULE}.Plain", Plain),
        ("builtins.int", int),
    ],
)
def test_canonical_writes_a_value(expected: str, value: Any) -> None:
    """What is compared by its content has a text, which names its type unless the text shows it."""
    assert expected == canonical(value)


@pytest.mark.parametrize(
    "values",
    [
        (1, 1.0, True, "1", b"1", Decimal(1), UserId(1), Level.LOW, 1 + 0j),
        ("", b"", None, (), [], {}, set(), frozenset()),
        (("a", "b"), ("a,b",), ("a','b",), "a','b", ["a", "b"]),
        ({"a": 1}, {"a:1"}, [("a", 1)], {"a": "1"}),
        ("é", "e\u0301", "e"),
        (PurePosixPath("a/b"), PureWindowsPath("a/b"), "a/b"),
        (Right(0), Right(8), Right(16), Right.READ, Right(9)),
        (time(12, tzinfo=BERLIN), time(12, tzinfo=PARIS), time(12)),
        (NOON, NOON.astimezone(PARIS), NOON.astimezone(timezone(timedelta(hours=1)))),
        (
            NOON.replace(tzinfo=timezone(timedelta(hours=1))),
            NOON.replace(tzinfo=timezone(timedelta(hours=1), "CET")),
            NOON.replace(tzinfo=ZoneInfo("CET")),
            NOON.replace(tzinfo=Offset(1)),
            NOON.replace(tzinfo=Known(1)),
            NOON.replace(fold=1),
        ),
        (time(0), time(0, fold=1)),
        (Status.OPEN, Status("shut"), Status("lost")),
        (0.0, -0.0),
        (Query("a"), Query("a", 2), ("a", 1)),
    ],
    ids=lambda values: repr(values[0]),
)
def test_canonical_tells_apart(values: tuple[Any, ...]) -> None:
    """Values that a function could answer differently have different texts."""
    assert len(values) == len({canonical(value) for value in values})


@pytest.mark.parametrize(
    ("value", "equal"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({0, 8}, {8, 0}),  # they share a slot, so each set yields first what came first
        (frozenset([0, 8]), frozenset([8, 0])),
        (Query("a", trace="x"), Query("a", trace="y")),
        (Filter("a", trace="x"), Filter("a", trace="y")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_canonical_of_equals_is_equal(value: Any, equal: Any) -> None:
    """Neither an order that equality ignores, nor a field that it ignores, shows in the text."""
    assert canonical(value) == canonical(equal)


@pytest.mark.parametrize(
    "value",
    [
        Plain(),
        [Plain()],
        {"a": Plain()},
        Session("redis://"),
        Pool(4),
        Handle(1),
        bytearray(b"a"),
        range(3),
        len,
        test_canonical_of_equals_is_equal,
    ],
    ids=lambda value: type(value).__name__,
)
def test_canonical_refuses_what_has_no_content(value: Any) -> None:
    """What is compared by identity, or could be changed behind our back, is refused, however deep it lies."""
    with pytest.raises(InvalidKey, match="pass a key template"):
        canonical(value)


@pytest.mark.parametrize("write", [canonical, text_of])
@pytest.mark.parametrize(
    ("one", "two"), [(Masked("one"), Masked("two")), (MaskedNumber(1), MaskedNumber(2))], ids=["text", "number"]
)
def test_what_is_hidden_from_view_counts(write: Any, one: Any, two: Any) -> None:
    """A secret that does not show itself in logs is told apart from another all the same."""
    assert write(one) != write(two)


@pytest.mark.parametrize("write", [canonical, text_of])
@pytest.mark.parametrize(
    ("one", "two"),
    [
        (Price("1"), Price("2")),
        (Day(2026, 3, 1), Day(2026, 3, 2)),
        (Moment(2026, 3, 1), Moment(2026, 3, 2)),
        (Moment(2026, 3, 1, tzinfo=UTC), Moment(2026, 3, 1)),
        (Ticket(int=1), Ticket(int=2)),
        (Shade.LIGHT, Shade.DARK),
        (Status("shut"), Status("lost")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_class_shows_does_not_count(write: Any, one: Any, two: Any) -> None:
    """A class that overrides how its values look changes nothing about which values differ."""
    assert write(one) != write(two)


@pytest.mark.parametrize("write", [canonical, text_of])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Money("1", "EUR"), r"Money holds more than the Decimal that it is, the attribute 'currency', .*pass a key"),
        (Quoted("a", "'"), r"Quoted holds more than the str that it is, fields of its own"),
    ],
    ids=["attribute", "slot"],
)
def test_subclass_that_holds_more_is_refused(write: Any, value: Any, message: str) -> None:
    """A subclass may differ in what its base does not show, so its values have no text."""
    with pytest.raises(InvalidKey, match=message):
        write(value)


@pytest.mark.parametrize(
    "value",
    [
        Undecorated("a", "acme"),
        Heir("a"),
        Judged("a"),
        JudgedFilter("a"),
        JudgedPlace(1.0, 2.0),
        LocatedPath("a"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_a_comparison_of_its_own_is_refused(value: Any) -> None:
    """Where the fields do not decide alone whether two are equal, they are no key."""
    with pytest.raises(InvalidKey, match="pass a key template"):
        canonical(value)


@pytest.mark.parametrize("kind", ["value", "member"])
def test_namesakes_are_refused(kind: str) -> None:
    """Values of a class that a function makes are refused: another class may have the same name."""

    @dataclass
    class Local:
        number: int

    class Choice(enum.Enum):
        ONE = 1

    value: Any = {"value": Local(1), "member": Choice.ONE}[kind]
    with pytest.raises(InvalidKey, match=r"is made inside a function, so it may have namesakes.*pass a key template"):
        canonical(value)


@pytest.mark.parametrize("write", [canonical, text_of])
@pytest.mark.parametrize(
    "zone", [Unsettled(1), ZoneInfo.from_file(BytesIO(ZONE_FILE), key="Europe/Berlin")], ids=["unsettled", "file"]
)
def test_zone_without_a_form_is_refused(write: Any, zone: Any) -> None:
    """A time in a zone that cannot be told from others is refused."""
    with pytest.raises(InvalidKey, match=r"a time in the zone .* use zoneinfo.ZoneInfo or datetime.timezone"):
        write(datetime(2026, 3, 1, tzinfo=zone))


def test_driver_and_framework_types_are_those_of_the_library() -> None:
    """What asyncpg reads and what Pydantic parses has the key of its equal in the standard library."""
    moment = TypeAdapter(datetime).validate_python("2026-03-01T12:00:00+01:00")

    assert canonical(UUID(int=7)) == canonical(postgres.UUID(UUID(int=7).bytes))
    assert text_of(UUID(int=7)) == text_of(postgres.UUID(UUID(int=7).bytes))
    assert canonical(datetime(2026, 3, 1, 12, tzinfo=timezone(timedelta(hours=1)))) == canonical(moment)


@pytest.mark.parametrize(
    ("expected", "spec", "file"),
    [
        ("app.worker", SimpleNamespace(name="app.worker"), "/srv/app/worker.py"),
        ("server", None, "/nowhere/server.py"),
        ("__main__", None, None),
    ],
    ids=["module", "script", "notebook"],
)
@pytest.mark.parametrize("name", ["__main__", "__mp_main__"])
def test_main_is_the_module_that_was_started(
    name: str, expected: str, spec: Any, file: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs as the program goes by the name that others import it by, where it has one."""
    module = ModuleType(name)
    module.__spec__ = spec
    if file is not None:
        module.__file__ = file
    monkeypatch.setitem(sys.modules, name, module)

    assert (expected if expected != "__main__" else name) == module_name(name)
    assert MODULE == module_name(MODULE)


def test_script_in_a_package_goes_by_its_packages_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that lies in a package is what the package's other modules import."""
    for package in ("app", "app/jobs"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    module = ModuleType("__main__")
    module.__file__ = str(tmp_path / "app/jobs/nightly.py")
    monkeypatch.setitem(sys.modules, "__main__", module)

    assert "app.jobs.nightly" == module_name("__main__")


def test_canonical_names_the_refused_type() -> None:
    """The error says which type of argument it was."""
    with pytest.raises(InvalidKey, match=rf"of type {MODULE}\.Plain has no canonical form"):
        canonical(Plain())


@pytest.mark.parametrize("write", [canonical, text_of])
@pytest.mark.parametrize("value", [float("nan"), Decimal("NaN"), Decimal("sNaN"), complex(0, float("nan"))])
def test_nan_is_refused(write: Any, value: Any) -> None:
    """A value that differs from itself cannot find its answer again."""
    with pytest.raises(InvalidKey, match="NaN"):
        write(value)


def test_canonical_refuses_classes_with_possible_namesakes() -> None:
    """Two classes made by one factory have one name, so neither can stand in a key."""

    class Local:
        pass

    with pytest.raises(InvalidKey, match=r"is made inside a function"):
        canonical(Local)


def test_canonical_writes_generated_dataclasses() -> None:
    """A dataclass needs no source of its own, but a name by which it can be found."""
    assert f"{MODULE}.Made(a=1)" == canonical(Made(1))
    with pytest.raises(InvalidKey, match="Made cannot be found under its name"):
        canonical(make_dataclass("Made", ["a"], namespace={"__module__": MODULE})(1))


@pytest.mark.parametrize(
    ("expected", "value"),
    [
        ("7", 7),
        ("7", "7"),
        ("7", UserId(7)),
        ("%2D7", -7),
        ("1.5", 1.5),
        ("1e%2D07", 1e-07),
        ("~True", True),
        ("~None", None),
        ("None", "None"),
        ("%7ENone", "~None"),
        ("~empty", ""),
        ("%7Eempty", "~empty"),
        ("a%2Db", "a-b"),
        ("a%252Db", "a%2Db"),
        ("%C3%A9", "é"),
        ("%ED%A0%80", "\ud800"),
        ("a%0D%0A", "a\r\n"),
        ("~bytes.", b""),
        ("~bytes.ff00", b"\xff\x00"),
        ("RED", Colour.RED),
        ("LOW", Level.LOW),
        ("~3", Right.READ | Right.WRITE),
        ("~8", Right(8)),
        ("2026%2D03%2D01", date(2026, 3, 1)),
        ("1.50", Decimal("1.50")),
        ("a%2Fb", PurePosixPath("a/b")),
        ("~%281%2C2%29", (1, 2)),
        ("~%5B%5D", []),
        (f"~{MODULE}.Plain", Plain),
    ],
)
def test_text_of(expected: str, value: Any) -> None:
    """In a template a value has the text that people expect, escaped; what has none of its own begins with a tilde."""
    assert expected == text_of(value)


def test_text_of_refuses_objects() -> None:
    """An object without a canonical form has no text either."""
    with pytest.raises(InvalidKey, match="pass a key template"):
        text_of(Plain())


def test_identity_is_stable() -> None:
    """One object has one identity for as long as it lives."""
    instance = Plain()

    assert identity(instance) == identity(instance)


def test_identities_differ() -> None:
    """Two objects that are alive have two identities, even when they are equal."""
    one, two = Query("a"), Query("a")

    assert identity(one) != identity(two)


def test_identities_are_never_recycled() -> None:
    """A new object at the address of a dead one gets an identity that nobody had before."""
    seen: list[str] = []
    addresses: set[int] = set()
    for _ in range(100):
        instance = Plain()
        addresses.add(id(instance))
        seen.append(identity(instance))
        del instance

    assert len(seen) == len(set(seen))
    assert len(addresses) < len(seen)  # addresses were recycled, or the test shows nothing


def test_identity_does_not_keep_its_object() -> None:
    """Nothing remains of an object that nobody else holds."""
    gc.collect()  # what other tests have left
    before = len(names._serials)
    instance = Plain()
    identity(instance)
    del instance
    gc.collect()

    assert before == len(names._serials)


def test_identity_survives_a_late_farewell() -> None:
    """The farewell of a dead object leaves the identity of the new tenant of its address alone."""
    tenant = Plain()
    mine = identity(tenant)
    reference, _ = names._serials[id(tenant)]
    names._forget(id(tenant), names.weakref.ref(Query))
    names._forget(-1, reference)

    assert mine == identity(tenant)


def test_identity_of_a_new_tenant_is_new() -> None:
    """An entry left behind under a recycled address is not taken for the new object's."""
    tenant, dead = Plain(), Query("a")
    names._serials[id(tenant)] = (names.weakref.ref(dead), 0)

    assert identity(tenant) != "~0"


class SlottedStruct(msgspec.Struct):
    city: str = "Rome"


class SlottedByHand:
    __slots__ = ("city",)


SlottedBase: Any = make_dataclass("SlottedBase", ["city"], slots=True)


class SlottedBelow(SlottedBase):
    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("Rome")


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (SlottedStruct, "give its class weakref=True, or put"),
        (lambda: make_dataclass("Shop", ["city"], slots=True)("Rome"), "give its class weakref_slot=True, or put"),
        (
            lambda: attrs.make_class("Shop", ["city"], slots=True, weakref_slot=False)("Rome"),
            "give its class weakref_slot=True, or put",
        ),
        (SlottedByHand, "add '__weakref__' to its __slots__, or put"),
        (SlottedBelow, "add '__weakref__' to its __slots__, or put"),
        (lambda: Point(1, 2), "by instance: put"),
    ],
    ids=["Struct", "dataclass", "attrs", "by hand", "below a dataclass", "tuple"],
)
def test_identity_needs_weak_references(make: Any, remedy: str) -> None:
    """An object that cannot be referred to weakly is refused, with the ways out that its class has."""
    thing = make()

    with pytest.raises(InvalidKey, match=rf"allows no weak reference.*{remedy} \{{self\.attribute\}} into the key"):
        identity(thing)


class WeakStruct(msgspec.Struct, weakref=True):
    city: str = "Rome"


@pytest.mark.parametrize(
    "make",
    [
        WeakStruct,
        lambda: make_dataclass("Shop", ["city"], slots=True, weakref_slot=True)("Rome"),
        lambda: attrs.make_class("Shop", ["city"], slots=True, weakref_slot=True)("Rome"),
    ],
    ids=["Struct", "dataclass", "attrs"],
)
def test_the_remedies_make_an_identity(make: Any) -> None:
    """An instance of a class that was changed as the error says has an identity."""
    thing = make()

    assert identity(thing) == identity(thing)


def test_class_name() -> None:
    """A class goes by the name that every process knows it under."""
    assert f"{MODULE}.Plain" == class_name(Plain)


def test_class_name_refuses_local_classes() -> None:
    """A class that a function makes has no name that others could know."""

    class Local:
        pass

    with pytest.raises(InvalidKey, match="Local is made inside a function"):
        class_name(Local)
