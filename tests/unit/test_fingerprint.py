import enum
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal, NamedTuple, Optional, TypedDict, TypeVar, Union

import msgspec
import pydantic
import pytest
from inside import untyped
from stored import fingerprint_for
from typing_extensions import TypeAliasType

from stampede_guard._codecs.codec import codec_for
from stampede_guard._codecs.fingerprint import describe_annotation, describe_codec
from stampede_guard._operations.operation import Operation
from stampede_guard._operations.policy import Policy
from stampede_guard._stats import Counters

T = TypeVar("T")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(NamedTuple):
    x: int
    y: int


class Row(TypedDict):
    name: str


@dataclass
class Leaf:
    number: int


@dataclass
class Tree:
    leaf: Leaf
    trees: "list[Tree]" = field(default_factory=list)


Menu = TypeAliasType("Menu", list[int])


class Model(pydantic.BaseModel):
    number: int
    nested: "list[Model]" = []


DIFFERENT: list[Any] = [
    bytes,
    str,
    int,
    float,
    bool,
    type(None),
    int | None,
    Any,
    list,
    list[int],
    list[str],
    set[int],
    frozenset[int],
    tuple[int, ...],
    tuple[int, str],
    tuple[str, int],
    dict[str, int],
    dict[str, Any],
    Literal["a"],
    Literal["a", "b"],
    Colour,
    Point,
    Row,
    Leaf,
    Tree,
    Annotated[int, msgspec.Meta(ge=0)],
    make_dataclass("Leaf", [("number", str)]),
    make_dataclass("Leaf", [("number", int), ("added", int, 7)]),
    make_dataclass("Leaf", [("number", int), ("added", int, 8)]),
    make_dataclass("Branch", [("number", int)]),
    msgspec.defstruct("Leaf", [("number", int)]),
    msgspec.defstruct("Leaf", [("number", int)], tag=True),
    msgspec.defstruct("Leaf", [("number", int)], array_like=True),
    msgspec.defstruct("Leaf", [("number", int), ("price", int)], array_like=True),
    msgspec.defstruct("Leaf", [("price", int), ("number", int)], array_like=True),
    enum.Enum("Colour", {"RED": "red"}),
    Model,
    list[Model],
    pydantic.RootModel[int],
    pydantic.create_model("Model", number=(int, ...)),
    pydantic.create_model("Model", number=(str, ...)),
    pydantic.create_model("Model", number=(pydantic.SecretStr, ...)),
    pydantic.create_model("Model", number=(int, 7)),
    pydantic.create_model("Model", number=(int, ...), added=(int, 7)),
]


def test_shapes_have_fingerprints_of_their_own() -> None:
    """A type that is encoded in another way, or holds another field, has another fingerprint, of eight bytes."""
    fingerprints = [fingerprint_for(annotation) for annotation in DIFFERENT]

    assert len(fingerprints) == len({*fingerprints})
    assert {8} == {*map(len, fingerprints)}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Optional[int], int | None),  # noqa: UP045  # the old spelling is used too
        (Union[int, str], str | int),  # noqa: UP007  # likewise
        (Literal["a", "b"], Literal["b", "a"]),
        (Menu, list[int]),
        (make_dataclass("A", [("a", int), ("b", str)]), make_dataclass("A", [("b", str), ("a", int)])),
        (msgspec.defstruct("A", [("a", int), ("b", str)]), msgspec.defstruct("A", [("b", str), ("a", int)])),
        (TypedDict("A", {"a": int, "b": str}), TypedDict("A", {"b": str, "a": int})),
        (enum.Enum("A", {"X": 1, "Y": 2}), enum.Enum("A", {"Y": 2, "X": 1})),
        (
            pydantic.create_model("A", a=(int, ...), b=(str, ...)),
            pydantic.create_model("A", b=(str, ...), a=(int, ...)),
        ),
        (
            pydantic.create_model("A", a=(int, pydantic.Field(description="one", examples=[1]))),
            pydantic.create_model("A", a=(int, pydantic.Field(description="another"))),
        ),
        (
            pydantic.create_model("A", a=(int, pydantic.Field(alias="x"))),
            pydantic.create_model("A", a=(int, pydantic.Field(alias="y"))),
        ),
    ],
    ids=str,
)
def test_same_shape_written_otherwise(one: Any, other: Any) -> None:
    """An order that has no meaning, another spelling, or a description changes nothing."""
    assert fingerprint_for(one) == fingerprint_for(other)


_PROCESS = """
import enum, sys
from dataclasses import dataclass
from typing import Literal, TypedDict
import pydantic
sys.path[:0] = {paths!r}
from stored import fingerprint_for

@dataclass
class Leaf:
    number: int
    kinds: set[Literal["a", "b", "c"]]

class Kind(enum.StrEnum):
    A = "a"
    B = "b"

class Menu(pydantic.BaseModel):
    model_config = {{"arbitrary_types_allowed": True}}
    leaf: Leaf
    kinds: frozenset[Kind] = frozenset(Kind)
    other: object = object()

class Row(TypedDict, total=False):
    kind: Kind
    leaf: Leaf | None

print(*[fingerprint_for(kind).hex() for kind in (Leaf, Menu, Row, dict[Kind, Leaf | None])])
"""


def test_fingerprints_are_the_same_in_every_process() -> None:
    """Neither the seed of hashes nor the name of the module changes one."""
    text = _PROCESS.format(paths=[path for path in sys.path if "tests" in path])
    module = f"import types; exec({text!r}, vars(sys.modules.setdefault('app', types.ModuleType('app'))))"
    commands = [(text, "0"), (text, "1"), (f"import sys; {module}", "2")]
    answers = [
        subprocess.check_output([sys.executable, "-c", command], env={"PYTHONHASHSEED": seed})
        for command, seed in commands
    ]

    assert 1 == len({*answers}), answers
    assert 4 == len({*answers[0].split()})


class Strange(pydantic.BaseModel):
    """A model whose schema JSON cannot say."""

    call: Callable[[], int] | None = None


def test_model_that_has_no_json_schema() -> None:
    """What no JSON schema can say is named instead."""
    assert fingerprint_for(Strange) == fingerprint_for(Strange)
    assert "invalid" in untyped(codec_for(Strange)).fingerprint


class Own:
    def encode(self, value: str) -> bytes:
        return value.encode()

    def decode(self, payload: bytes) -> str:
        return payload.decode()


class Second(Own):
    version = 2


class Printed(Own):
    fingerprint = "print"


class WithMethod(Own):
    def fingerprint(self) -> str:
        return "not this"


def test_codec_of_one_s_own() -> None:
    """A codec is known by its fingerprint, or by its class, its version and the annotation."""
    assert "'print'" == describe_codec(Printed(), lambda: int)
    texts = [describe_codec(codec, lambda: int) for codec in (Own(), Second(), WithMethod())]
    texts += [describe_codec(Own(), lambda: list[str]), describe_codec(Own(), undefined)]

    assert len(texts) == len({*texts})


def undefined() -> Any:
    """Stand for an annotation with a name that does not exist yet."""
    raise NameError("Menu")


@pytest.mark.parametrize(
    ("annotation", "name"),
    [(int, "int"), (list[dict[str, Colour]], "list[dict[str, Colour]]"), (Literal["a"], "Literal['a']"), (7, "7")],
)
def test_names_hold_no_module_and_no_address(annotation: Any, name: str) -> None:
    """An annotation is named as it is written, wherever its classes come from."""
    assert name == describe_annotation(annotation).removeprefix("typing.")
    assert "object" == describe_annotation(object())


def test_tags_are_part_of_it() -> None:
    """A value carries a mark of each tag, so other tags are another shape; the last of them is computed once."""
    subject = Operation("menus", Policy(l2_ttl=60), Counters(), annotation=lambda: int)
    shapes = [subject.fingerprint(tags) for tags in ((), ("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",))]

    assert len(shapes) == len({*shapes})
    assert subject.fingerprint(()) is subject.fingerprint(())
    assert subject.fingerprint(("a",)) == fingerprint_for(int, "a")
