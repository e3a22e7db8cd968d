"""Tags: names of many ops at once.

A tag is the text that an f-string makes of its template: `"restaurant:{restaurant_id}"` with 7 is `"restaurant:7"`.
Unlike in keys, nothing is escaped, so that the tag built from a function's template is the same text as the tag that a
caller writes. Two templates may produce the same tag; its invalidation then drops more than necessary.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import InvalidKey
from .names import qualified_name
from .source import compile_like, parameters_of
from .spec import shortened
from .template import Template

BuildTags = Callable[..., tuple[str, ...]]

_MAX_TAGS = 16
_ADDRESS = re.compile(r"<[^<>]* at 0x[0-9A-Fa-f]+>")
_PLACEHOLDER = re.compile(r"\{([^\W\d]\w*)(?:\.[^\W\d]\w*)*\}")


def check_tags(owner: str, tags: Sequence[str]) -> None:
    """Check that *tags* is a sequence of tags, and not too long.

    Raises:
        InvalidKey: it is not.
    """
    if not isinstance(tags, list | tuple) or not all(isinstance(tag, str) and tag for tag in tags):
        message = f"{owner}: tags={tags!r}; give a tuple of strings, none of them empty"
        raise InvalidKey(message)
    if len(tags) > _MAX_TAGS:
        message = f"{owner}: {len(tags)} tags; give at most {_MAX_TAGS}"
        raise InvalidKey(message)


def compile_tags(function: Callable[..., Any], tags: Sequence[str]) -> BuildTags | None:
    """Return how to build the tags of a call of *function*, or `None` if it has none.

    Raises:
        InvalidKey: a template is malformed, or names no parameter; or there are too many.
    """
    check_tags(qualified_name(function), tags)
    if not tags:
        return None
    names = {parameter.name for parameter in parameters_of(function)}
    sources: list[str] = []
    for tag in tags:
        template = Template.parse_tag(tag)
        for name in sorted(template.names - names):
            message = f"{qualified_name(function)}: the tag {tag!r} uses {name!r}, which is no parameter of it"
            raise InvalidKey(message)
        sources.append(source_of(template))
    # No invalidation can name an empty tag.
    body = f"return tuple([_sg_shortened(_sg_tag) for _sg_tag in ({', '.join(sources)},) if _sg_tag])"
    build: BuildTags = compile_like(function, (body,), {"_sg_write": write_value, "_sg_shortened": shortened})
    return build


def source_of(template: Template) -> str:
    """Return the source of an f-string that fills *template*, with `write_value` as `_sg_write`."""
    pieces = [
        f"{{_sg_write({part})}}" if position % 2 else part.replace("{", "{{").replace("}", "}}")
        for position, part in enumerate(template.parts)
    ]
    return f"f{''.join(pieces)!r}"


def write_value(value: Any) -> str:
    """Return the text of *value* in a tag, as an f-string writes it.

    Raises:
        InvalidKey: an f-string writes its address, or is unable to write it, as an `int` of very many digits.
    """
    try:
        if value.__class__ is str or value.__class__ is int:
            return str(value)
        text = format(value)
    except ValueError as error:
        raise _has_no_text(value, f"has no text ({error})") from error
    if _ADDRESS.search(text):
        raise _has_no_text(value, "has no text but its address")
    return text


def _has_no_text(value: object, why: str) -> InvalidKey:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    remedy = "use an attribute in the tag, as in '…:{user.id}'"
    return InvalidKey(f"an argument of type {kind} {why}, so no tag can name it: {remedy}")


def resolve_tag(tag: object, values: Mapping[str, object]) -> str:
    """Return *tag* itself, or filled with *values* if there are any.

    Raises:
        InvalidKey: *tag* is not a string, or empty, or *values* are given that are not those of its placeholders.
    """
    if not isinstance(tag, str) or not tag:
        message = f"tag={tag!r}: a tag is a string, and not empty"
        raise InvalidKey(message)
    return shortened(Template.parse_tag(tag).fill(values, write_value) if values else tag)


def placeholder_in(text: str) -> str | None:
    """Return the name in the first placeholder of *text*, if there is one."""
    found = _PLACEHOLDER.search(text) if "{" in text else None
    return None if found is None else found[1]
