"""Values to bytes and back, as the return annotation says.

Pickle is not used: with it, write access to the store would be enough to run code here.
"""

import inspect
import sys
from functools import cached_property, reduce
from operator import or_
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Protocol, get_args, get_origin, get_type_hints, runtime_checkable

import msgspec

from ..errors import ConfigurationError
from .fingerprint import canonical_schema, describe_annotation, describe_type


@runtime_checkable
class Codec(Protocol):
    """Converts the values of one operation to bytes and back."""

    def encode(self, value: Any, /) -> bytes:
        """Return *value* as bytes; raises if it cannot."""
        ...

    def decode(self, payload: bytes, /) -> Any:
        """Return the value; raises if *payload* is none. The exception is counted, and treated as a miss."""
        ...


class _PlainCodec:
    """`bytes` as they are, or `str` as UTF-8."""

    allows_any = False

    def __init__(self, kind: type[bytes] | type[str]) -> None:
        self._kind = kind
        self.fingerprint = "bytes" if kind is bytes else "text"

    def encode(self, value: object) -> bytes:
        if not isinstance(value, self._kind):
            message = f"expected {self._kind.__name__}, got {type(value).__qualname__}"
            raise TypeError(message)
        return value.encode() if isinstance(value, str) else value

    def decode(self, payload: bytes) -> bytes | str:
        return payload if self._kind is bytes else payload.decode()


class _MessagePackCodec:
    """MessagePack through msgspec, which validates against the annotation while it decodes."""

    def __init__(self, annotation: Any) -> None:
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(annotation).decode
        node = msgspec.inspect.type_info(annotation)
        self.fingerprint = f"MessagePack {describe_type(node)}"
        self.allows_any = _part_of(node, msgspec.inspect.AnyType) is not None


class _PydanticCodec:
    """JSON through the annotation's `pydantic.TypeAdapter`, with the names of the fields as keys.

    The aliases for validation and for serialization may differ, so they are used only with Pydantic before 2.11, which
    cannot validate by name.
    """

    def __init__(self, annotation: Any) -> None:
        from pydantic import TypeAdapter  # noqa: PLC0415  # an optional dependency

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
        """JSON schemas for validation and for serialization."""
        from pydantic.json_schema import GenerateJsonSchema  # noqa: PLC0415  # as above

        class SchemaGenerator(GenerateJsonSchema):
            ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # as in the base

            def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Any:  # noqa: ARG002  # it quotes modules
                return {"invalid": schema["type"], "class": describe_annotation(schema.get("cls"))}

        modes: tuple[Literal["validation", "serialization"], ...] = ("validation", "serialization")
        schema = self._adapter.json_schema
        return [schema(mode=mode, by_alias=self._by_alias, schema_generator=SchemaGenerator) for mode in modes]

    @cached_property
    def fingerprint(self) -> str:
        """The text that a fingerprint is computed from."""
        kind = "JSON by alias" if self._by_alias else "JSON by name"
        return " ".join((kind, describe_annotation(self._annotation), *map(canonical_schema, self._schemas)))

    @cached_property
    def allows_any(self) -> bool:
        """Whether some part may have any type."""
        return any(_is_open(schema) for schema in self._schemas)


def codec_for(annotation: Any) -> Codec:
    """Return the codec for *annotation*.

    Builtins, dataclasses, attrs classes, Structs, `datetime`, `UUID`, `Decimal` and `Enum` are encoded by msgspec,
    Pydantic models by their `TypeAdapter`; `bytes` and `str` stay as they are.

    Raises:
        ConfigurationError: the annotation does not say what to decode to.
        NameError: a name in a type alias is not defined yet.
    """
    written_out = _written_out(annotation)
    if written_out is bytes or written_out is str:
        return _PlainCodec(written_out)
    if _mentions_pydantic(written_out):
        return _PydanticCodec(annotation)
    try:
        unclear = _part_of(msgspec.inspect.type_info(written_out), msgspec.inspect.CustomType)
        codec = _MessagePackCodec(written_out)
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
    """Return *annotation* with the values of its type aliases in their places; a recursive alias becomes `Any`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    alias = annotation if origin is None else origin
    if type(alias).__name__ == "TypeAliasType":  # of `typing`, or of `typing_extensions`
        if alias in inside:
            return Any
        # Before Python 3.12 a recursive alias names itself by a string.
        scope = vars(sys.modules[alias.__module__])
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
    """Return *annotation* with other *parts*."""
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


def _part_of(node: Any, kind: type, seen: frozenset[type] = frozenset()) -> Any:
    """Return the first part of a described type that is a *kind*, or `None`."""
    if isinstance(node, kind):
        return node
    if isinstance(node, msgspec.inspect.Type | msgspec.inspect.Field):
        cls = getattr(node, "cls", None)
        if cls in seen:
            return None
        seen = seen | {cls} if cls is not None else seen
        return _part_of([getattr(node, name) for name in node.__struct_fields__], kind, seen)
    if isinstance(node, list | tuple):
        parts: list[Any] = [*node]
        return next((found for part in parts if (found := _part_of(part, kind, seen)) is not None), None)
    return None


def _is_open(schema: object, key: str = "") -> bool:
    """Whether a part of a JSON schema allows any value."""
    if isinstance(schema, list):
        return any(map(_is_open, schema))
    if not isinstance(schema, dict):
        return key == "additionalProperties" and schema is True  # any key
    if key not in {"properties", "$defs"} and not schema.keys() - {"title", "description", "default"}:
        return True
    return any(_is_open(part, name) for name, part in schema.items() if name != "default")
