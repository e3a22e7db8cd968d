"""Op ids: built from a call's arguments, compiled once, when the function is decorated.

A compiled builder has the function's own signature, so the interpreter itself fills in defaults
and sorts out keywords. A key that forgets an argument, or writes two different calls alike,
hands one caller's answer to another; so both are refused or escaped:

* every parameter has to be in the key, or be named in `ignore=`;
* in a template, a value is percent-escaped so that it can never contain a separator, and
  each placeholder is fenced by separators; two templates that could still produce one op
  are found by comparing their shapes (`may_meet`);
* a derived key writes each argument in a typed, quoted form: `1`, `1.0`, `True` and `"1"` differ.
"""

import inspect
import re
import string
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ._canonical import canonical, class_name, identity, text_of
from .errors import InvalidKey

BuildKey = Callable[..., str]

_SEPARATORS = re.compile(r"([^A-Za-z0-9_.~%]+)")
_KINDS = inspect.Parameter


@dataclass(frozen=True, slots=True)
class Template:
    """A key template: literal text and `{parameter.attribute}` placeholders.

    Attributes:
        text: As it was written.
        parts: Literal and expression by turns: `("menu-", "menu.id", "-", "lang", "")`.
    """

    text: str
    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Template":
        """Parse *text*.

        Raises:
            InvalidKey: it is not a template, or a placeholder touches a letter or another placeholder.
        """
        parts: list[str] = []
        try:
            pieces = list(string.Formatter().parse(text))
        except ValueError as error:
            message = f"the key template {text!r} is malformed: {error}"
            raise InvalidKey(message) from None
        literal = ""
        for before, expression, spec, conversion in pieces:
            literal += before
            if expression is None:
                continue
            if spec or conversion:
                message = f"the key template {text!r} formats {{{expression}}}; values are written one way only"
                raise InvalidKey(message)
            if not all(name.isidentifier() for name in expression.split(".")):
                message = f"the key template {text!r} has {{{expression}}}; give a parameter, or one of its attributes"
                raise InvalidKey(message)
            parts += [literal, expression]
            literal = ""
        parts.append(literal)
        template = cls(text, tuple(parts))
        template._check_fences()
        return template

    def _check_fences(self) -> None:
        if not self.text.strip() or re.search(r"[{}%]|\s", "".join(self.parts[::2])):
            message = f"the key template {self.text!r} is empty, or has a space, a brace or a % in its text"
            raise InvalidKey(message)
        for position, literal in enumerate(self.parts[::2]):
            touches_before = position > 0 and not (literal == "" and position == len(self.parts) // 2)
            touches_after = position < len(self.parts) // 2 and not (literal == "" and position == 0)
            if (touches_before and not _SEPARATORS.match(literal)) or (
                touches_after and not _SEPARATORS.match(literal[-1:])
            ):
                message = f"the key template {self.text!r} needs a separator, such as - or :, around each placeholder"
                raise InvalidKey(message)

    @property
    def names(self) -> set[str]:
        """The parameters that it uses."""
        return {expression.partition(".")[0] for expression in self.parts[1::2]}

    @property
    def shape(self) -> tuple[str | None, ...]:
        """Words and separators by turns, `None` for a word that a placeholder fills."""
        shape: list[str | None] = []
        for position, part in enumerate(self.parts):
            if position % 2:
                shape.append(None)
            else:
                shape += [word for word in _SEPARATORS.split(part) if word]
        return tuple(shape)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of *function*."""
    return list(inspect.signature(function).parameters.values())


def receiver_of(function: Callable[..., Any]) -> str | None:
    """Return `"self"` or `"cls"` if that is the first parameter: the function is a method."""
    parameters = parameters_of(function)
    return parameters[0].name if parameters and parameters[0].name in ("self", "cls") else None


def name_of(function: Callable[..., Any]) -> str:
    """Return the module and qualified name of *function*."""
    return f"{function.__module__}.{function.__qualname__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpec:
    """How one function's ops are built.

    Attributes:
        template: The template, or `None`.
        build: Takes a call's arguments, returns its op.
        is_explicit: Whether a function of the user's builds the ops.
        is_local: Whether ops mean something to this process alone, because an instance is part of them.
        family: What keeps this function's ops apart from those of others.
    """

    template: Template | None
    build: BuildKey
    is_explicit: bool
    is_local: bool
    family: tuple[str | None, ...]

    def collides_with(self, other: "KeySpec") -> bool:
        """Whether some call of one and some call of the other have the same op."""
        if self.template is None or other.template is None:
            return self.family == other.family
        return may_meet(self.family, other.family)


def compile_key(
    function: Callable[..., Any],
    key: str | BuildKey | None,
    *,
    ignore: Sequence[str] = (),
    vary: Sequence[ContextVar[Any]] = (),
    is_shared: bool = False,
) -> KeySpec:
    """Return how to build the ops of *function*, from a template, a callable, or all its arguments.

    Args:
        function: Whose calls are keyed.
        key: Template, callable, or `None` to derive the key.
        ignore: Parameters that do not change the answer.
        vary: Context variables that do.
        is_shared: Whether other processes will see the ops, so that a class has to go by its name.

    Raises:
        InvalidKey: a name is unknown, a parameter is left out, the template is malformed or ambiguous.
    """
    parameters = parameters_of(function)
    names = [parameter.name for parameter in parameters]
    for name in ignore:
        if name not in names:
            message = f"{name_of(function)}: ignore= names {name!r}, which is no parameter of it"
            raise InvalidKey(message)
    receiver = receiver_of(function)
    is_named = receiver == "cls" and is_shared
    namespace: dict[str, Any] = {
        "_sg_text": text_of,
        "_sg_canonical": canonical,
        "_sg_receiver": class_name if is_named else identity,
        "_sg_vary": _read,
    }
    template, has_receiver = None, False
    if key is None:
        has_receiver = receiver is not None and receiver not in ignore
        values = [_derived(name) for name in names if name not in ignore and not (has_receiver and name == receiver)]
        body = f"{name_of(function)}({','.join(values)})"
        family: tuple[str | None, ...] = (name_of(function),)
    elif isinstance(key, str):
        template = Template.parse(key)
        has_receiver = receiver is not None and receiver not in template.names and receiver not in ignore
        _check_complete(function, template, {*ignore, *((receiver,) if has_receiver else ())}, names)
        body = "".join(_placed(part) if position % 2 else part for position, part in enumerate(template.parts))
        family = template.shape
    else:
        namespace["_sg_key"] = _checked(function, key)
        body = f"{{_sg_key({', '.join(map(_forwarded, parameters))})}}"
        family = (name_of(function), "key")
    if has_receiver:
        body += f"#{{_sg_receiver({receiver})}}"
        family += ("#", None)
    for position, variable in enumerate(vary):
        namespace[f"_sg_vary_{position}"] = variable
        body += f"@{{_sg_vary(_sg_vary_{position})}}"
        family += ("@", None)
    return KeySpec(
        template=template,
        build=_compile(function, body, namespace),
        is_explicit=callable(key),
        is_local=has_receiver and not is_named,
        family=family,
    )


def may_meet(mine: tuple[str | None, ...], theirs: tuple[str | None, ...]) -> bool:
    """Whether two shapes have a text in common."""
    return len(mine) == len(theirs) and all(
        a == b or (a is None and _is_word(b)) or (b is None and _is_word(a)) for a, b in zip(mine, theirs, strict=True)
    )


def _is_word(part: str | None) -> bool:
    return part is None or not _SEPARATORS.fullmatch(part)


def _check_complete(function: Callable[..., Any], template: Template, left_out: set[str], names: list[str]) -> None:
    for name in sorted(template.names.difference(names)):
        message = f"{name_of(function)}: the key template {template.text!r} uses {name!r}, which is no parameter of it"
        raise InvalidKey(message)
    for name in names:
        if name not in template.names and name not in left_out:
            message = (
                f"{name_of(function)}: the key template {template.text!r} leaves out the parameter {name!r}; callers "
                f"that differ in it would share one answer. Put {{{name}}} into the template, or pass "
                f"ignore=({name!r},) if it does not change the answer"
            )
            raise InvalidKey(message)


def _derived(name: str) -> str:
    return f"{{{name} if {name}.__class__ is int else _sg_canonical({name})}}"


def _placed(expression: str) -> str:
    if "." not in expression:
        return f"{{{expression} if {expression}.__class__ is int and {expression} >= 0 else _sg_text({expression})}}"
    return f"{{_sg_text({expression})}}"


def _forwarded(parameter: inspect.Parameter) -> str:
    if parameter.kind is _KINDS.KEYWORD_ONLY:
        return f"{parameter.name}={parameter.name}"
    return {_KINDS.VAR_POSITIONAL: "*", _KINDS.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name


def _checked(function: Callable[..., Any], key: BuildKey) -> BuildKey:
    """Return *key*, its signature checked now and its answers at each call."""
    if not callable(key):
        message = f"{name_of(function)}: key={key!r}; give a template or a function"
        raise InvalidKey(message)
    plain = [p for p in parameters_of(function) if p.kind not in (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD)]
    try:
        inspect.signature(key).bind(
            *(p.name for p in plain if p.kind is not _KINDS.KEYWORD_ONLY),
            **{p.name: p.name for p in plain if p.kind is _KINDS.KEYWORD_ONLY},
        )
    except (TypeError, ValueError) as error:
        message = f"{name_of(function)}: its key function cannot take the same arguments: {error}"
        raise InvalidKey(message) from None

    def checked(*args: Any, **kwargs: Any) -> str:
        op = key(*args, **kwargs)
        if not isinstance(op, str) or not op:
            message = f"{name_of(function)}: its key function returned {op!r}; an op id is a string, and not empty"
            raise InvalidKey(message)
        return op

    return checked


def _read(variable: ContextVar[Any]) -> str:
    try:
        return text_of(variable.get())
    except LookupError:
        message = f"vary= names the context variable {variable.name!r}, which has no value here; set it, or give it a default"
        raise InvalidKey(message) from None


class _Verbatim:
    """A default that is written into the source as a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def _compile(function: Callable[..., Any], body: str, namespace: dict[str, Any]) -> BuildKey:
    """Compile an f-string over the parameters of *function*, under its signature and its name.

    Only identifiers stand between braces here, so nothing that a user wrote is run.
    """
    signature = []
    for parameter in parameters_of(function):
        default: Any = _KINDS.empty
        if parameter.default is not _KINDS.empty:
            default = _Verbatim(f"_sg_default_{parameter.name}")
            namespace[default.name] = parameter.default
        signature.append(parameter.replace(annotation=_KINDS.empty, default=default))
    source = f"def build{inspect.Signature(signature)}:\n    return f{body!r}"
    exec(source, namespace)  # noqa: S102  # as dataclasses and attrs do
    build: BuildKey = namespace["build"]
    build.__name__ = function.__name__
    build.__qualname__ = function.__qualname__  # a wrong call is reported under the function's own name
    return build
