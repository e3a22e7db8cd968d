"""Fingerprints: with which codec and schema a stored value was encoded.

Two releases may store values of one key with different schemas, and bytes of one schema may decode with another. So a
value carries a fingerprint of eight bytes. It is the same in all processes of a release: it depends on names, fields
and options, and not on the order of a set, an address, or the name under which a module was imported.
"""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, get_args, get_origin

import msgspec

NO_FINGERPRINT = bytes(8)

_LITERALS = (type(None), bool, int, float, str, bytes)
_PROSE = frozenset({"description", "examples", "$comment"})  # in a JSON schema, without effect on values
_UNORDERED = frozenset({"required", "enum", "default"})  # lists in a JSON schema that may be made from a set


def fingerprint_of(text: str) -> bytes:
    """Return the fingerprint of a codec that *text* describes."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def with_tags(fingerprint: bytes, tags: Sequence[str]) -> bytes:
    """Return the fingerprint of values with marks of these *tags*, in this order."""
    return blake2b("\0".join(tags).encode("utf-8", "surrogatepass"), key=fingerprint, digest_size=8).digest()


def describe_annotation(annotation: Any) -> str:
    """Return an annotation as text without modules: a module may be imported under several names."""
    arguments = get_args(annotation)
    kind = get_origin(annotation) or annotation
    is_literal = type(kind) in _LITERALS
    name = repr(kind) if is_literal else getattr(kind, "__qualname__", type(kind).__qualname__)
    return f"{name}[{', '.join(map(describe_annotation, arguments))}]" if arguments else name


def describe_type(node: msgspec.inspect.Type) -> str:
    """Return a type as text, as msgspec describes it."""
    return _TypeDescription(node).text


class _TypeDescription:
    """A type as text. The descriptions of classes follow at the end, each once, because they may be recursive.

    Fields are sorted where their order has no meaning.
    """

    def __init__(self, node: msgspec.inspect.Type) -> None:
        self._seen: set[int] = set()
        self._classes: set[str] = set()
        root = self._describe(node)
        self.text = "; ".join([root, *sorted(self._classes)])

    def _describe(self, part: Any) -> str:
        if isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field):
            return self._describe_node(part)
        if isinstance(part, list | tuple | frozenset):
            return f"[{', '.join(map(self._describe, part))}]"
        if isinstance(part, type) and issubclass(part, enum.Enum):
            return f"{part.__qualname__}{sorted(repr(member.value) for member in part)}"
        if type(part) in _LITERALS:
            return repr(part)
        # A class, a factory, or another object.
        return str(getattr(part, "__qualname__", None) or type(part).__qualname__)

    def _describe_node(self, node: Any) -> str:
        cls = getattr(node, "cls", None)
        if cls is None or not hasattr(node, "fields"):
            return self._describe_fields(node)
        if id(node) not in self._seen:
            self._seen.add(id(node))
            self._classes.add(self._describe_fields(node))
        return f"<{cls.__qualname__}>"

    def _describe_fields(self, node: Any) -> str:
        texts = [type(node).__name__]
        for name in node.__struct_fields__:
            value = getattr(node, name)
            if value is None or value is msgspec.NODEFAULT:
                continue  # as with an older msgspec that does not have this field
            texts.append(f"{name}={self._describe_field(node, name, value)}")
        return " ".join(texts)

    def _describe_field(self, node: Any, name: str, value: Any) -> str:
        texts: Iterable[str]
        if name == "fields" and not _is_positional(node):
            texts = [self._describe(each) for each in sorted(value, key=lambda each: each.encode_name)]
        elif name in {"types", "values"}:  # of a union, of a literal
            texts = sorted(map(self._describe, value))
        else:
            return self._describe(value)
        return f"[{', '.join(texts)}]"


def _is_positional(node: Any) -> bool:
    return isinstance(node, msgspec.inspect.NamedTupleType) or getattr(node, "array_like", False)


def canonical_schema(schema: Any, key: str = "") -> str:
    """Return a JSON schema as text, without prose, and sorted where the order has no meaning."""
    if isinstance(schema, Mapping):
        pairs = [(str(name), value) for name, value in schema.items() if key == "properties" or name not in _PROSE]
        return f"{{{', '.join([f'{name}: {canonical_schema(value, name)}' for name, value in sorted(pairs)])}}}"
    if isinstance(schema, list):
        texts = [canonical_schema(each) for each in schema]
        return f"[{', '.join(sorted(texts) if key in _UNORDERED else texts)}]"
    return repr(schema)


def describe_codec(codec: Any, annotation: Callable[[], Any]) -> str:
    """Return *codec* as text: its `fingerprint`, or else its class, its `version`, and the annotation."""
    own = getattr(codec, "fingerprint", None)
    if isinstance(own, str | bytes | int):
        return f"{own!r}"
    try:
        returned = describe_annotation(annotation())
    except Exception:  # noqa: BLE001  # with codec= an annotation is optional, and its names need not be defined
        returned = ""
    return f"{type(codec).__qualname__} {getattr(codec, 'version', '')!r} {returned}"
