"""Fingerprints: which codec and which schema a stored value was encoded by.

Two releases may store values of one key in different shapes, and many shapes decode as each other. So a value carries
eight bytes that name its shape. They are the same in every process of a release: made of names, fields and options,
never of an order that a hash seed decides, an address, or the name under which a module was imported.
"""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, get_args, get_origin

import msgspec

NO_FINGERPRINT = bytes(8)

_PLAIN = (type(None), bool, int, float, str, bytes)
_PROSE = frozenset({"description", "examples", "$comment"})  # of a JSON schema: changes nothing
_UNORDERED = frozenset({"required", "enum", "default"})  # lists whose order may come from a set


def fingerprint_of(text: str) -> bytes:
    """Return the fingerprint of what *text* describes."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def with_tags(fingerprint: bytes, tags: Sequence[str]) -> bytes:
    """Return the fingerprint of values that carry marks of these *tags*, in this order."""
    return blake2b("\0".join(tags).encode("utf-8", "surrogatepass"), key=fingerprint, digest_size=8).digest()


def describe_annotation(annotation: Any) -> str:
    """Return an annotation as text that holds no module: a class may be imported under several names."""
    arguments = get_args(annotation)
    kind = get_origin(annotation) or annotation
    name = repr(kind) if type(kind) in _PLAIN else getattr(kind, "__qualname__", type(kind).__qualname__)
    return f"{name}[{', '.join(map(describe_annotation, arguments))}]" if arguments else name


def describe_type(node: msgspec.inspect.Type) -> str:
    """Return what msgspec knows of a type, as text."""
    return _Description(node).text


class _Description:
    """Text about a described type. Classes are named in it, and told at its end, each once: they may hold themselves.

    The order of fields is left out where it has no meaning.
    """

    def __init__(self, node: msgspec.inspect.Type) -> None:
        self._met: set[int] = set()
        self._classes: set[str] = set()
        root = self._of(node)
        self.text = "; ".join([root, *sorted(self._classes)])

    def _of(self, part: Any) -> str:
        if isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field):
            return self._of_node(part)
        if isinstance(part, list | tuple | frozenset):
            return f"[{', '.join(map(self._of, part))}]"
        if isinstance(part, type) and issubclass(part, enum.Enum):
            return f"{part.__qualname__}{sorted(repr(member.value) for member in part)}"
        if type(part) in _PLAIN:
            return repr(part)
        return str(getattr(part, "__qualname__", None) or type(part).__qualname__)  # a class, a factory, an object

    def _of_node(self, node: Any) -> str:
        cls = getattr(node, "cls", None)
        if cls is None or not hasattr(node, "fields"):
            return self._told(node)
        if id(node) not in self._met:
            self._met.add(id(node))
            self._classes.add(self._told(node))
        return f"<{cls.__qualname__}>"

    def _told(self, node: Any) -> str:
        told = [type(node).__name__]
        for name in node.__struct_fields__:
            value = getattr(node, name)
            if value is None or value is msgspec.NODEFAULT:
                continue  # as it is where an older msgspec does not know of it
            told.append(f"{name}={self._ordered(node, name, value)}")
        return " ".join(told)

    def _ordered(self, node: Any, name: str, value: Any) -> str:
        texts: Iterable[str]
        if name == "fields" and not _is_positional(node):
            texts = [self._of(each) for each in sorted(value, key=lambda each: each.encode_name)]
        elif name in {"types", "values"}:  # of a union, of a literal
            texts = sorted(map(self._of, value))
        else:
            return self._of(value)
        return f"[{', '.join(texts)}]"


def _is_positional(node: Any) -> bool:
    return isinstance(node, msgspec.inspect.NamedTupleType) or getattr(node, "array_like", False)


def canonical_schema(schema: Any, key: str = "") -> str:
    """Return a JSON schema as text, without prose, and without an order that has no meaning."""
    if isinstance(schema, Mapping):
        pairs = [(str(name), value) for name, value in schema.items() if key == "properties" or name not in _PROSE]
        return f"{{{', '.join([f'{name}: {canonical_schema(value, name)}' for name, value in sorted(pairs)])}}}"
    if isinstance(schema, list):
        texts = [canonical_schema(each) for each in schema]
        return f"[{', '.join(sorted(texts) if key in _UNORDERED else texts)}]"
    return repr(schema)


def describe_codec(codec: Any, annotation: Callable[[], Any]) -> str:
    """Return what is known of *codec*: its `fingerprint`, or else its class, its `version`, and the annotation."""
    own = getattr(codec, "fingerprint", None)
    if isinstance(own, str | bytes | int):
        return f"{own!r}"
    try:
        returned = describe_annotation(annotation())
    except Exception:  # noqa: BLE001  # with a codec= it need not be there, nor be defined
        returned = ""
    return f"{type(codec).__qualname__} {getattr(codec, 'version', '')!r} {returned}"
