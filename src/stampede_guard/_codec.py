"""Values to bytes and back, directed by the return annotation, and the envelope around them.

Never pickle: whoever can write to the store could run code here.
"""

import struct
import sys
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, get_args, runtime_checkable

import msgspec

from .errors import ConfigurationError

# Magic, token of the flight that stored it, version, digest of the key, number of marks, length of the payload.
# The scripts read the first three where they are.
_HEADER = struct.Struct(">4s22sQ16sBI")
_MAGIC = b"SGv2"
_MARK = 11  # bytes of a tag's mark


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

    def encode(self, value: object) -> bytes:
        if not isinstance(value, bytes):
            message = f"expected bytes, got {type(value).__qualname__}"
            raise TypeError(message)
        return value

    def decode(self, payload: bytes) -> bytes:
        return payload


class _Text:
    """Text passes through as UTF-8."""

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

    def encode(self, value: object) -> bytes:
        return self._encoder.encode(value)

    def decode(self, payload: bytes) -> Any:
        return self._decoder.decode(payload)


class _Pydantic:
    """JSON through the annotation's `pydantic.TypeAdapter`."""

    def __init__(self, annotation: Any) -> None:
        from pydantic import TypeAdapter  # noqa: PLC0415  # only whoever returns its models has it

        self._adapter = TypeAdapter[Any](annotation)

    def encode(self, value: object) -> bytes:
        return self._adapter.dump_json(value, warnings="error")

    def decode(self, payload: bytes) -> Any:
        return self._adapter.validate_json(payload)


def codec_for(annotation: Any) -> Codec:
    """Return the codec that *annotation* asks for.

    Builtins, dataclasses, attrs, Structs, `datetime`, `UUID`, `Decimal` and `Enum` go through
    msgspec, Pydantic models through their `TypeAdapter`; `bytes` and `str` pass through.

    Raises:
        ConfigurationError: the annotation does not say what to decode to.
    """
    if annotation is bytes:
        return _Bytes()
    if annotation is str:
        return _Text()
    if _mentions_pydantic(annotation):
        return _Pydantic(annotation)
    try:
        described = msgspec.inspect.type_info(annotation)
        codec = _MessagePack(annotation)
    except TypeError as error:
        message = f"{annotation!r} cannot be stored: {error}; annotate a supported type, or pass codec="
        raise ConfigurationError(message) from error
    unclear = _unclear(described)
    if unclear is not None:
        message = (
            f"{annotation!r} cannot be stored: {unclear} does not say what to decode to; name a type, or pass codec="
        )
        raise ConfigurationError(message)
    return codec


def _mentions_pydantic(annotation: Any) -> bool:
    pydantic = sys.modules.get("pydantic")  # a model's class cannot exist without it
    if pydantic is None:
        return False
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return True
    return any(_mentions_pydantic(part) for part in get_args(annotation))


def _unclear(node: Any, seen: frozenset[type] = frozenset()) -> str | None:
    """Return what in a described type would come back as something else, or `None`."""
    if isinstance(node, msgspec.inspect.AnyType):
        return "Any"
    if isinstance(node, msgspec.inspect.CustomType):
        return node.cls.__qualname__
    if isinstance(node, msgspec.inspect.Type | msgspec.inspect.Field):
        cls = getattr(node, "cls", None)
        if cls in seen:
            return None
        seen = seen | {cls} if cls is not None else seen
        return _unclear([getattr(node, name) for name in node.__struct_fields__], seen)
    if isinstance(node, list | tuple):
        parts: list[Any] = [*node]
        return next((found for part in parts if (found := _unclear(part, seen)) is not None), None)
    return None


def key_digest(key: str) -> bytes:
    """Return the 16 bytes that bind an envelope to *key*."""
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Opened(NamedTuple):
    """What an envelope held.

    Attributes:
        payload: The encoded value.
        marks: Marks that the op's tags had before it was loaded.
    """

    payload: bytes
    marks: tuple[bytes, ...]


def seal(key: str, payload: bytes, fill: str, version: int | None = None, marks: Sequence[bytes] = ()) -> bytes:
    """Return *payload* in an envelope that says whose it is, so that no other op can ever open it."""
    header = _HEADER.pack(_MAGIC, fill.encode(), version or 0, key_digest(key), len(marks), len(payload))
    return b"".join((header, *marks, payload))


def unseal(key: str, envelope: bytes) -> Opened | None:
    """Return what is inside, or `None` if this is not, whole, what was stored for *key*."""
    if len(envelope) < _HEADER.size:
        return None
    magic, _, _, digest, marks, length = _HEADER.unpack_from(envelope)
    start = _HEADER.size + marks * _MARK
    if magic != _MAGIC or digest != key_digest(key) or length != len(envelope) - start:
        return None
    return Opened(envelope[start:], tuple([envelope[at : at + _MARK] for at in range(_HEADER.size, start, _MARK)]))


def fill_of(envelope: bytes) -> bytes:
    """Return the token in what may or may not be an envelope."""
    return envelope[4:26]
