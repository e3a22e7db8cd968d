"""Values to bytes and back, directed by the return annotation, and the envelope around them.

Never pickle: whoever can write to the store could run code here.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cached_property, reduce
from operator import or_
from types import SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

import msgspec

from ..errors import ConfigurationError
from .fingerprint import canonical_schema, describe_annotation, describe_type


@runtime_checkable
class Codec(Protocol):
    """Turns one operation's values into bytes and back."""

    def encode(self, value: Any, /) -> bytes:
        """Return *value* as bytes; raises if there is no way to."""
        ...

    def decode(self, payload: bytes, /) -> Any:
        """Return the value; raises if *payload* is not one. A raise is counted, and treated as a miss."""
        ...


class _Bytes:
    """Bytes pass through."""

    fingerprint = "bytes"
    is_loose = False

    def encode(self, value: object) -> bytes:
        if not isinstance(value, bytes):
            message = f"expected bytes, got {type(value).__qualname__}"
            raise TypeError(message)
        return value

    def decode(self, payload: bytes) -> bytes:
        return payload


class _Text:
    """Text passes through as UTF-8."""

    fingerprint = "text"
    is_loose = False

    def encode(self, value: object) -> bytes:
        if not isinstance(value, str):
            message = f"expected str, got {type(value).__qualname__}"
            raise TypeError(message)
        return value.encode()

    def decode(self, payload: bytes) -> str:
        return payload.decode()


class _MessagePack:
    """MessagePack through msgspec, which validates against the annotation as it decodes."""

    def __init__(self, annotation: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(annotation)
        node = msgspec.inspect.type_info(annotation)
        self.fingerprint = f"MessagePack {describe_type(node)}"
        self.is_loose = _holds(node, _is_any) is not None

    def encode(self, value: object) -> bytes:
        return self._encoder.encode(value)

    def decode(self, payload: bytes) -> Any:
        return self._decoder.decode(payload)


class _Pydantic:
    """JSON through the annotation's `pydantic.TypeAdapter`, under the names of the fields.

    Not under their aliases: those for validation and for serialization may differ. Pydantic before 2.11 cannot be told
    to validate by name, so there the aliases have to do.
    """

    def __init__(self, annotation: Any) -> None:
        from pydantic import TypeAdapter  # noqa: PLC0415  # only whoever returns its models has it

        self._annotation = annotation
        self._adapter = TypeAdapter[Any](annotation)
        self._by_alias = "by_name" not in inspect.signature(self._adapter.validate_json).parameters
        self._names: dict[str, Any] = {} if self._by_alias else {"by_name": True, "by_alias": False}

    def encode(self, value: object) -> bytes:
        return self._adapter.dump_json(value, by_alias=self._by_alias, round_trip=True, warnings="error")

    def decode(self, payload: bytes) -> Any:
        return self._adapter.validate_json(payload, **self._names)

    @cached_property
    def _schemas(self) -> list[Any]:
        """JSON schemas of what is read and of what is written."""
        from pydantic.json_schema import GenerateJsonSchema  # noqa: PLC0415  # as above

        class Generate(GenerateJsonSchema):
            ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # as they have it

            def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Any:  # noqa: ARG002  # it holds modules
                return {"invalid": schema["type"], "class": describe_annotation(schema.get("cls"))}

        modes: tuple[Literal["validation", "serialization"], ...] = ("validation", "serialization")
        schema = self._adapter.json_schema
        return [schema(mode=mode, by_alias=self._by_alias, schema_generator=Generate) for mode in modes]

    @cached_property
    def fingerprint(self) -> str:
        """What a fingerprint is made of."""
        kind = "JSON by alias" if self._by_alias else "JSON by name"
        return " ".join((kind, describe_annotation(self._annotation), *map(canonical_schema, self._schemas)))

    @cached_property
    def is_loose(self) -> bool:
        """Whether some part may be anything."""
        return any(_is_open(schema) for schema in self._schemas)


def codec_for(annotation: Any) -> Codec:
    """Return the codec that *annotation* asks for.

    Builtins, dataclasses, attrs, Structs, `datetime`, `UUID`, `Decimal` and `Enum` go through
    msgspec, Pydantic models through their `TypeAdapter`; `bytes` and `str` pass through.

    Raises:
        ConfigurationError: the annotation does not say what to decode to.
        NameError: a name in a type alias is not defined yet.
    """
    written_out = _written_out(annotation)
    if written_out is bytes:
        return _Bytes()
    if written_out is str:
        return _Text()
    if _mentions_pydantic(written_out):
        return _Pydantic(annotation)
    try:
        unclear = _holds(msgspec.inspect.type_info(written_out), _is_custom)
        codec = _MessagePack(written_out)
    except TypeError as error:
        message = (
            f"{annotation!r} cannot be stored: {error}; annotate a supported type, write out what an alias inside "
            "a class stands for, or pass codec="
        )
        raise ConfigurationError(message) from error
    if unclear is not None:
        message = (
            f"{annotation!r} cannot be stored: {unclear.cls.__qualname__} does not say what to decode to; "
            "name a type, or pass codec="
        )
        raise ConfigurationError(message)
    return codec


def _written_out(annotation: Any, inside: tuple[Any, ...] = ()) -> Any:
    """Return *annotation* with what its type aliases stand for; one that stands for itself may be anything."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    alias = annotation if origin is None else origin
    if type(alias).__name__ == "TypeAliasType":  # there are two, of `typing` and of `typing_extensions`
        if alias in inside:
            return Any
        scope = vars(sys.modules[alias.__module__])  # in which it names itself, before Python 3.12 as a text
        value = get_type_hints(SimpleNamespace(__annotations__={"value": alias.__value__}), scope, include_extras=True)
        value = value["value"]
        return _written_out(value[arguments] if arguments else value, (*inside, alias))
    if origin is None or origin is Literal:
        return annotation
    parts = tuple([_written_out(each, inside) for each in arguments])
    if parts == arguments:
        return annotation
    return _made_of(annotation, origin, parts)


def _made_of(annotation: Any, origin: Any, parts: tuple[Any, ...]) -> Any:
    """Return what *annotation* is, of other *parts*."""
    if origin is UnionType:
        return reduce(or_, parts)
    if origin is Annotated:
        return Annotated[(parts[0], *annotation.__metadata__)]
    return annotation.copy_with(parts) if hasattr(annotation, "copy_with") else origin[parts]


def _mentions_pydantic(annotation: Any) -> bool:
    pydantic = sys.modules.get("pydantic")  # a model's class cannot exist without it
    if pydantic is None:
        return False
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return True
    return any(_mentions_pydantic(part) for part in get_args(annotation))


def _holds(node: Any, is_it: Callable[[Any], bool], seen: frozenset[type] = frozenset()) -> Any:
    """Return the part of a described type that *is_it*, or `None`."""
    if is_it(node):
        return node
    if isinstance(node, msgspec.inspect.Type | msgspec.inspect.Field):
        cls = getattr(node, "cls", None)
        if cls in seen:
            return None
        seen = seen | {cls} if cls is not None else seen
        return _holds([getattr(node, name) for name in node.__struct_fields__], is_it, seen)
    if isinstance(node, list | tuple):
        parts: list[Any] = [*node]
        return next((found for part in parts if (found := _holds(part, is_it, seen)) is not None), None)
    return None


def _is_custom(node: Any) -> bool:
    return isinstance(node, msgspec.inspect.CustomType)


def _is_any(node: Any) -> bool:
    return isinstance(node, msgspec.inspect.AnyType)


def _is_open(schema: object, key: str = "") -> bool:
    """Whether a part of a JSON schema says nothing."""
    if isinstance(schema, list):
        return any(map(_is_open, schema))
    if not isinstance(schema, dict):
        return key == "additionalProperties" and schema is True  # any key
    if key not in {"properties", "$defs"} and not schema.keys() - {"title", "description", "default"}:
        return True
    return any(_is_open(part, name) for name, part in schema.items() if name != "default")
