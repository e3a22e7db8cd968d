import re
from collections.abc import Callable
from contextvars import Context, ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any

import pytest
from inside import untyped

from stampede_guard import CannotEncode, ConfigurationError
from stampede_guard._operations.operation import NO_ANNOTATION, Operation, for_caller
from stampede_guard._operations.policy import Policy
from stampede_guard._stats import Counters

tenant: ContextVar[str] = ContextVar("tenant")
request_id: ContextVar[str] = ContextVar("request_id")


@dataclass
class Menu:
    number: int


class Reverse:
    """A codec of a user's own."""

    def encode(self, value: str) -> bytes:
        return value[::-1].encode()

    def decode(self, payload: bytes) -> str:
        return payload.decode()[::-1]


class OneWay(Reverse):
    def decode(self, payload: bytes) -> str:
        raise ArithmeticError("no way back")


class Secretive(Reverse):
    def encode(self, value: str) -> bytes:
        raise LookupError(value)


class Array:
    """What compares element by element, as NumPy's do."""

    __slots__ = ("items",)
    __hash__ = untyped(None)

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def __eq__(self, other: object) -> Any:
        raise ValueError("the truth value of an array is ambiguous")


@dataclass
class Loose:
    content: Any


def operation(annotation: Any = NO_ANNOTATION, *, codec: Any = None, vary: Any = (), **options: Any) -> Operation:
    """Return an operation named `menus` whose loader has *annotation*."""
    chosen: Any = {"isolate": True, **options}
    return Operation(
        "menus",
        Policy.from_options(chosen),
        Counters(),
        codec=codec,
        annotation=lambda: annotation,
        vary=vary,
    )


def undefined() -> Any:
    """Stand for an annotation with a name that does not exist yet."""
    raise NameError("name 'Menu' is not defined")


def forward() -> Operation:
    """Return an operation whose annotation is not defined yet."""
    return Operation("menus", Policy(isolate=True), Counters(), annotation=undefined)


# ── Codecs ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("expected", "policy"),
    [(False, Policy()), (False, Policy(ttl=5)), (True, Policy(isolate=True)), (True, Policy(l2_ttl=5))],
)
def test_needs_codec(expected: bool, policy: Policy) -> None:
    """Only what is stored or isolated is ever turned into bytes."""
    assert expected == Operation("menus", policy, Counters()).needs_codec


def test_codec_of_the_annotation() -> None:
    """Without a codec the return annotation decides, once."""
    subject = operation(list[int])

    payload = subject.encode([1])
    assert payload is not None
    assert ([1],) == subject.decode(payload)
    assert subject.codec is subject.codec


def test_codec_of_the_user() -> None:
    """A codec that was given is used, whatever the annotation says."""
    assert b"cba" == operation(int, codec=Reverse()).encode("abc")


@pytest.mark.parametrize("codec", [object(), 7, "json", Reverse], ids=["object", "number", "name", "class"])
def test_what_is_no_codec(codec: Any) -> None:
    """A codec without both methods is refused, and so is a class in place of an instance."""
    with pytest.raises(ConfigurationError, match=r"^menus: codec=.*; give an object with encode\(value\) and decode"):
        operation(codec=codec)


def test_no_annotation() -> None:
    """Values that are stored have to be described."""
    with pytest.raises(
        ConfigurationError, match=r"^menus: its values are stored as bytes; annotate the return type, or pass"
    ):
        operation().check_codec(is_final=False)


def test_unclear_annotation() -> None:
    """The error about an annotation names the operation."""
    with pytest.raises(ConfigurationError, match=r"^menus: its return annotation .*object.* cannot be stored: object"):
        operation(object).check_codec(is_final=False)


def test_annotation_that_is_not_defined_yet() -> None:
    """A name in the annotation may be defined between decoration and first use, and not later."""
    subject = forward()
    subject.check_codec(is_final=False)

    with pytest.raises(ConfigurationError, match=r"^menus: its return annotation is not defined \(name 'Menu'"):
        subject.check_codec(is_final=True)


def test_annotation_that_nobody_needs() -> None:
    """What is never turned into bytes needs no annotation."""
    subject = operation(isolate=False)
    subject.check_codec(is_final=True)

    assert not subject.needs_codec


# ── Encoding ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("annotation", "value", "why"),
    [
        (bytes, "text", r"a builtins\.str, .*\(TypeError: expected bytes, got str\)"),
        (list[int], object(), r"a builtins\.object, .*\(TypeError: "),
        (str, None, r"a builtins\.NoneType, .*\(TypeError: "),
        (int, 2**64, r"a builtins\.int, .*\(OverflowError: "),
        (int, "seven", r"a builtins\.str, .*\(ValidationError: Expected `int`, got `str`\)"),
        (list[int], (7,), r"a builtins\.tuple, .*: the value is a tuple, and comes back as a list;"),
        (float, 2**53 + 1, r"a builtins\.int, .*: the value is a int, and comes back as a float;"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),
)
@pytest.mark.parametrize("options", [{"isolate": True}, {"isolate": False, "l2_ttl": 60}])
def test_value_that_cannot_be_stored(
    options: dict[str, Any], annotation: Any, value: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A value that would not come back as it is has no bytes; that is counted, and logged once for its type."""
    subject = operation(annotation, **options)

    assert [None, None] == [subject.encode(value) for _ in range(2)]
    assert 2 * ("l2_ttl" in options) == subject.counters.l2_unstorable
    (logged,) = caplog.messages
    assert re.match(rf"menus: the loader returned {why}", logged)


@pytest.mark.parametrize("codec", [OneWay(), Secretive()])
def test_codec_that_raises(codec: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Any error of a codec of one's own means that the value is not stored; its text may quote the value."""
    assert operation(codec=codec).encode("hunter2") is None
    assert "hunter2" not in caplog.text
    assert "Error)" in caplog.text


@pytest.mark.parametrize("options", [{"isolate": True}, {"isolate": False}])
def test_each_type_of_values_is_proven(options: dict[str, Any]) -> None:
    """That one value could be stored proves nothing of another type, such as a `None` that nobody mentioned."""
    subject = operation(Menu, **options)

    assert subject.encode(Menu(7)) is not None
    assert subject.encode(None) is None
    assert subject.encode(Menu(7)) is not None


def test_each_isolated_value_is_proven() -> None:
    """What callers will get decoded is decoded before anybody gets it."""
    subject = operation(list[int])

    assert subject.encode([7]) is not None
    assert subject.encode(["seven"]) is None


@pytest.mark.parametrize("annotation", [Any, dict[str, Any], list[Loose]])
def test_each_value_that_may_be_anything_is_proven(annotation: Any) -> None:
    """Where an annotation allows anything, the last value says nothing of the next."""
    subject = operation(annotation, isolate=False)

    assert subject.encode([Loose(7)] if annotation == list[Loose] else {"a": 1}) is not None
    assert subject.encode([Loose((7,))] if annotation == list[Loose] else {"a": (1,)}) is None


def test_values_are_sampled() -> None:
    """Of values whose type has proved faithful one in 64 is compared; once one was not, all are."""
    subject = operation(list[int], isolate=False)
    wrong: Any = ["seven"]
    answers = [subject.encode([7]), *(subject.encode(wrong) for _ in range(64))]

    assert [False] * 63 + [True] * 2 == [answer is None for answer in answers]
    assert subject.encode([7]) is not None
    assert subject.encode(wrong) is None


def test_types_are_remembered_up_to_a_bound() -> None:
    """Classes that are made at run time do not fill the memory."""
    subject = operation(Any, isolate=False)
    for number in range(100):
        subject.encode(type(f"Menu{number}", (), {})())

    assert len(subject._survives) <= 64


def test_arrays_and_other_values_without_an_equality() -> None:
    """What cannot be compared is stored if its copy is encoded as the same bytes."""

    class Pickled:
        def encode(self, value: Array) -> bytes:
            return repr(value.items).encode()

        def decode(self, payload: bytes) -> Array:
            return Array(eval(payload)[: self.most])  # noqa: S307  # a test's own bytes

        most = 2

    subject = operation(codec=Pickled(), isolate=False)

    assert subject.encode(Array([1, 2])) is not None
    subject = operation(codec=Pickled(), isolate=False)
    assert subject.encode(Array([1, 2, 3])) is None


def test_shared_values_are_proven_once() -> None:
    """Where a value that cannot be read back is a miss, values of a type that was proven are not decoded."""

    class Counting(Reverse):
        decoded = 0

        def decode(self, payload: bytes) -> str:
            self.decoded += 1
            return super().decode(payload)

    codec = Counting()
    subject = operation(codec=codec, isolate=False)
    subject.encode("abc")
    subject.encode("def")

    assert 1 == codec.decoded


# ── Decoding ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [None, 0, 7])
def test_decoded_value_comes_in_a_tuple(value: int | None) -> None:
    """Any value is a value, `None` too."""
    subject = operation(int | None)

    assert (value,) == subject.decode(subject.encode(value) or b"")


def test_foreign_bytes_are_a_miss() -> None:
    """Bytes that the codec refuses are no value, and counted."""
    subject = operation(int)

    assert subject.decode(b"garbage") is None
    assert 1 == subject.counters.l2_undecodable


def test_codec_that_raises_anything_is_a_miss() -> None:
    """Whatever a user's codec raises over foreign bytes, it is a miss."""
    assert operation(codec=OneWay()).decode(b"abc") is None


def test_hand_out_as_it_is() -> None:
    """Everybody gets the same object by default."""
    value = [7]

    assert for_caller(value) is value


def test_hand_out_copies() -> None:
    """Isolated values are decoded for each caller."""
    subject = operation(list[int])
    kept = subject.isolate_value([7], subject.encode([7]))
    mine, theirs = for_caller(kept), for_caller(kept)
    mine.append(8)

    assert [7] == theirs


def test_hand_out_copies_of_what_cannot_be_stored() -> None:
    """An isolated value that its codec would change is copied in another way, and so is not changed."""
    subject = operation(list[int])
    value: Any = [(7,)]
    kept = subject.isolate_value(value, subject.encode(value))
    value.append(8)
    mine, theirs = for_caller(kept), for_caller(kept)
    mine.append(9)

    assert [(7,)] == theirs


def test_isolated_value_that_cannot_be_copied() -> None:
    """A value that is to be isolated, and that nothing can copy, is an error that names the operation and the type."""
    subject = operation(list[int])

    with pytest.raises(CannotEncode, match=r"^menus: isolate=True .* _thread\.lock, which neither") as caught:
        subject.isolate_value(Lock(), None)

    assert isinstance(caught.value.__cause__, TypeError)


# ── Contexts ─────────────────────────────────────────────────────────────────────────────────────


def in_a_request(look: Callable[[], Any]) -> Any:
    """Return what *look* returns where both context variables are set."""

    def run() -> Any:
        tenant.set("acme")
        request_id.set("r1")
        return look()

    return Context().run(run)


def test_context_is_clean() -> None:
    """A load sees none of the launching caller's context variables."""
    assert in_a_request(operation(isolate=False).context) is None


@pytest.mark.parametrize(
    ("options", "seen"),
    [({"vary": [tenant]}, {tenant: "acme"}), ({"inherit_context": True}, {tenant: "acme", request_id: "r1"})],
    ids=["vary", "inherit_context"],
)
def test_context_of_a_load(options: dict[str, Any], seen: dict[Any, str]) -> None:
    """A load sees the variables that are part of the key, or a copy of everything if it is meant to."""
    assert seen == dict(in_a_request(operation(isolate=False, **options).context))


def test_repr() -> None:
    """An operation tells its name."""
    assert "<Operation menus>" == repr(operation())


# ── What the store is told of a load ─────────────────────────────────────────────────────────────


def test_no_versions() -> None:
    """Values of an operation without `version=` have none."""
    assert operation(int).version_of(7) is None


def test_version_of_a_value() -> None:
    """`version=` tells the version of each value."""
    assert 7 == operation(Menu, version=lambda menu: menu.number).version_of(Menu(7))


@pytest.mark.parametrize("version", [-1, 1.5, None, "7"])
def test_version_that_is_none(version: object) -> None:
    """A `version=` function that returns no version is an error that names the operation and what it returned."""
    with pytest.raises(ConfigurationError, match=r"^menus: its version= function returned version=.*: give a whole"):
        operation(Menu, version=lambda _: version).version_of(Menu(7))


@pytest.mark.parametrize(
    ("length", "loads"),
    [(2, []), (2, [0.1]), (3, [5]), (10, [5] * 50), (10, [1_000]), (2, [1_000] + [0] * 50)],
    ids=["none yet", "short", "one long", "long", "very long", "short by now"],
)
def test_lease_length(length: float, loads: list[float]) -> None:
    """A lease lasts for three times what loads take on average, the later ones counting more: from 2 s to 10 s."""
    subject = operation(int)

    for duration in loads:
        subject.note_load(duration)

    assert pytest.approx(length) == subject.lease_length


def test_tags() -> None:
    """An operation knows the templates of its tags."""
    assert ("menus",) == Operation("menus", Policy(), Counters(), tags=["menus"]).tags
