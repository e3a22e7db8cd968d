"""Key templates: text with placeholders between separators.

A value is escaped so that it contains no separator (`canonical.text_of`). So an op can be split into literals and
values in one way only, and the shapes of two templates show whether both can produce the same op.
"""

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from keyword import iskeyword
from operator import attrgetter
from typing import Any, TypeAlias

from ..errors import InvalidKey

# Words and separators in turn; `None` stands for a placeholder.
Shape: TypeAlias = tuple[str | None, ...]

_SEPARATORS = re.compile(r"([^A-Za-z0-9_.~%]+)")


@dataclass(frozen=True, slots=True)
class Template:
    """A key template: literal text and `{parameter.attribute}` placeholders.

    Attributes:
        text: The template as it was written.
        parts: Literals and expressions in turn: `("menu-", "menu.id", "-", "lang", "")`.
    """

    text: str
    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Template":
        """Parse the template of a key.

        Raises:
            InvalidKey: it is not a template, or a placeholder touches a letter or another placeholder.
        """
        template = cls(text, _parts_of(text, "key template"))
        template._check_separators()
        return template

    @classmethod
    def parse_tag(cls, text: str) -> "Template":
        """Parse the template of a tag, where placeholders need no separators.

        Raises:
            InvalidKey: it is not a template.
        """
        return cls(text, _parts_of(text, "tag"))

    def fill(self, values: Mapping[str, object], write: Callable[[Any], str]) -> str:
        """Return the text with *values*, which are given by name, each written by *write*.

        Raises:
            InvalidKey: *values* are not those of the placeholders.
        """
        for name in sorted(self.names ^ values.keys()):
            lack = "lacks the value of" if name in self.names else "has no"
            message = f"{self.text!r} {lack} {{{name}}}: give the values of its placeholders, and no others"
            raise InvalidKey(message)
        pieces = list(self.parts)
        for position in range(1, len(pieces), 2):
            name, _, path = pieces[position].partition(".")
            pieces[position] = write(attrgetter(path)(values[name]) if path else values[name])
        return "".join(pieces)

    def _check_separators(self) -> None:
        if not self.text.strip() or re.search(r"[{}%]|\s", "".join(self.parts[::2])):
            message = f"the key template {self.text!r} is empty, or has a space, a brace or a % in its text"
            raise InvalidKey(message)
        for position in range(1, len(self.parts), 2):
            before, after = self.parts[position - 1], self.parts[position + 1]
            is_first, is_last = position == 1, position == len(self.parts) - 2
            is_apart_before = _SEPARATORS.match(before[-1:]) or (is_first and not before)
            is_apart_after = _SEPARATORS.match(after) or (is_last and not after)
            if not is_apart_before or not is_apart_after:
                message = f"the key template {self.text!r} needs a separator, such as - or :, around each placeholder"
                raise InvalidKey(message)

    @property
    def names(self) -> set[str]:
        """The names of its parameters."""
        return {expression.partition(".")[0] for expression in self.parts[1::2]}

    @property
    def shape(self) -> Shape:
        """Words and separators in turn, with `None` for each placeholder."""
        shape: list[str | None] = []
        for position, part in enumerate(self.parts):
            if position % 2:
                shape.append(None)
            else:
                shape += [word for word in _SEPARATORS.split(part) if word]
        return tuple(shape)


def _parts_of(text: str, kind: str) -> tuple[str, ...]:
    """Return the literals and expressions of a template in turn.

    Raises:
        InvalidKey: it is not a template.
    """
    parts: list[str] = []
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError as error:
        message = f"the {kind} {text!r} is malformed: {error}"
        raise InvalidKey(message) from None
    literal = ""
    for before, expression, spec, conversion in pieces:
        literal += before
        if expression is None:
            continue
        if spec or conversion:
            message = f"the {kind} {text!r} formats {{{expression}}}; values are written one way only"
            raise InvalidKey(message)
        if not all(name.isidentifier() and not iskeyword(name) for name in expression.split(".")):
            message = f"the {kind} {text!r} has {{{expression}}}; give a parameter, or one of its attributes"
            raise InvalidKey(message)
        parts += [literal, expression]
        literal = ""
    return (*parts, literal)


def followed_by(shape: Shape, separator: str) -> Shape:
    """Return *shape* with *separator* and another placeholder after it."""
    last = shape[-1]
    if last is None or _is_word(last):
        return (*shape, separator, None)
    # A shape has several separators in a row as one.
    return (*shape[:-1], last + separator, None)


def may_collide(mine: Shape, theirs: Shape) -> bool:
    """Whether some text has both shapes."""
    return len(mine) == len(theirs) and all(
        a == b or (a is None and _is_word(b)) or (b is None and _is_word(a)) for a, b in zip(mine, theirs, strict=True)
    )


def may_begin_with(shape: Shape, text: str) -> bool:
    """Whether some text with this *shape* begins with *text*, which ends with a separator."""
    *words, end = filter(None, _SEPARATORS.split(text))
    fits = all(a == b or (a is None and _is_word(b)) for a, b in zip(shape, words, strict=False))
    return fits and len(shape) > len(words) and (shape[len(words)] or "").startswith(end)


def _is_word(part: str | None) -> bool:
    return part is None or not _SEPARATORS.fullmatch(part)


@lru_cache(maxsize=1024)
def _pattern_of(shape: Shape) -> re.Pattern[str]:
    return re.compile("".join(r"[A-Za-z0-9_.~%]+" if part is None else re.escape(part) for part in shape))


def matches(shape: Shape, text: str) -> bool:
    """Whether a template with this *shape* can produce *text*."""
    return _pattern_of(shape).fullmatch(text) is not None


def resembles(shape: Shape, text: str) -> bool:
    """Whether *text* has the literals of *shape* in order, as a text whose values were not escaped."""
    if shape[0] is None:
        return False  # with a placeholder first, too many texts would
    position = 0
    for literal in filter(None, shape):
        found = text.find(literal, position)
        if found < 0 or (position == 0 and found):
            return False
        position = found + len(literal)
    return shape[-1] is None or text.endswith(shape[-1])
