"""Op ids: built from a call's arguments, compiled once, when the function is decorated.

A compiled builder has the function's own signature, so the interpreter itself fills in defaults
and sorts out keywords. A key that forgets an argument, or writes two different calls alike,
hands one caller's answer to another; so both are refused or escaped:

* every parameter has to be in the key, or be named in `ignore=`;
* in a template, a value is percent-escaped so that it can never contain a separator, and
  each placeholder is fenced by separators; two templates that could still produce one op
  are found by comparing their shapes (`may_collide`);
* a derived key writes each argument in a typed, quoted form: `1`, `1.0`, `True` and `"1"` differ.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass
from hashlib import blake2b
from typing import Any, cast, get_args

from ..errors import InvalidKey
from .canonical import canonical, class_name, text_of
from .names import identity, qualified_name
from .source import annotation_of, compile_like, forwarding, parameters_of
from .template import Shape, Template, followed_by, may_begin_with, may_collide

BuildKey = Callable[..., str]

_KINDS = inspect.Parameter

MAX_OP_LENGTH = 200  # characters: an op that has as many is not kept as it is
_DIGESTED = re.compile(r"~[0-9a-f]{64}~")


def shortened(op: str) -> str:
    """Return *op*, or if it is long, what stands for it everywhere: a digest, and how it begins.

    The digest comes first, where text that a caller adds to another cannot forge it, and what is short is never as
    long: so no op is taken for another.
    """
    if len(op) < MAX_OP_LENGTH or (len(op) == MAX_OP_LENGTH and _DIGESTED.match(op)):
        return op
    digest = blake2b(op.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
    return f"~{digest}~{op}"[:MAX_OP_LENGTH]


def receiver_of(function: Callable[..., Any]) -> str | None:
    """Return `"self"` or `"cls"` if that is the first parameter: the function is a method."""
    parameters = parameters_of(function)
    return parameters[0].name if parameters and parameters[0].name in ("self", "cls") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpec:
    """How one function's ops are built.

    Attributes:
        template: The template, or `None`.
        build: Takes a call's arguments, returns its op.
        is_explicit: Whether a function of the user's builds the ops.
        is_local: Whether ops mean something to this process alone, because an instance is part of them.
        shape: What keeps this function's ops apart from those of others.
        recipe: What the op is made of, beside the arguments.
        arguments: Names of the parameters whose values alone make the op; `None` if something else has a part in it.
    """

    template: Template | None
    build: BuildKey
    is_explicit: bool
    is_local: bool
    shape: Shape
    recipe: tuple[object, ...]
    arguments: tuple[str, ...] | None

    def collides_with(self, other: "KeySpec") -> bool:
        """Whether some call of one and some call of the other have the same op."""
        if self.template is not None and other.template is not None:
            return may_collide(self.shape, other.shape)
        if self.template is other.template:
            return self.shape == other.shape
        spelt, derived = (self, other) if other.template is None else (other, self)
        return not derived.is_explicit and may_begin_with(spelt.shape, f"{derived.shape[0]}(")


def compile_key(  # noqa: PLR0915  # one decision after the other
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
    names = [parameter.name for parameter in parameters_of(function)]
    for name in ignore:
        if name not in names:
            message = f"{qualified_name(function)}: ignore= names {name!r}, which is no parameter of it"
            raise InvalidKey(message)
    template = Template.parse(key) if isinstance(key, str) else None
    spoken_for = {*ignore} if template is None else {*ignore, *template.names}
    receiver = receiver_of(function)
    if receiver in spoken_for or callable(key):
        receiver = None
    is_named = receiver == "cls" and is_shared
    namespace: dict[str, Any] = {"_sg_receiver": class_name if is_named else identity}
    if template is not None:
        _check_complete(function, template, {*ignore, receiver or ""}, names)
        _check_kinds(function, [part for part in template.parts[1::2] if "." not in part])
        body, shape = _template_body(template), template.shape
    elif key is None:
        used = [name for name in names if name not in ignore and name != receiver]
        _check_kinds(function, used)
        body = _derived_body(function, used)
        shape = (qualified_name(function),)
    else:
        namespace["_sg_key"] = _checked(function, cast("BuildKey", key))
        body, shape = _forwarding_body(function), (qualified_name(function), "key")
    if receiver is not None:
        body += f"#{{_sg_receiver({receiver})}}"
        shape = followed_by(shape, "#")
    for position, variable in enumerate(vary):
        namespace[f"_sg_vary_{position}"] = variable
        body += f"@{{_sg_read(_sg_vary_{position})}}"
        shape = followed_by(shape, "@")
    return KeySpec(
        template=template,
        build=_builder(function, f"f{body!r}", namespace),
        is_explicit=callable(key),
        is_local=receiver is not None and not is_named,
        shape=shape,
        recipe=(template and template.text, frozenset(ignore), *vary),
        arguments=None if receiver is not None or vary or callable(key) else _arguments(function, template, ignore),
    )


def _arguments(
    function: Callable[..., Any], template: Template | None, ignore: Sequence[str]
) -> tuple[str, ...] | None:
    """Return the names of the parameters that make the op, if it is made of them as they are."""
    used = [each for each in parameters_of(function) if each.name not in ignore]
    if template is not None:
        expressions = set(template.parts[1::2])
        if expressions != template.names:  # an object's attribute may change
            return None
        used = [each for each in used if each.name in expressions]
    if any(each.kind in (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD) for each in used):
        return None
    return tuple(each.name for each in used)


def _check_complete(function: Callable[..., Any], template: Template, left_out: set[str], names: list[str]) -> None:
    for name in sorted(template.names.difference(names)):
        message = (
            f"{qualified_name(function)}: the key template {template.text!r} uses {name!r}, which is no parameter of it"
        )
        raise InvalidKey(message)
    for name in names:
        if name not in template.names and name not in left_out:
            message = (
                f"{qualified_name(function)}: the key template {template.text!r} leaves out the parameter {name!r}; "
                f"callers that differ in it would share one answer. Put {{{name}}} into the template, or pass "
                f"ignore=({name!r},) if it does not change the answer"
            )
            raise InvalidKey(message)


def _check_kinds(function: Callable[..., Any], names: Sequence[str]) -> None:
    """Check that no annotation promises an argument that has no place in a key: a model of Pydantic's.

    Raises:
        InvalidKey: one does.
    """
    for name in names:
        try:
            model = _model_in(annotation_of(function, name))
        except Exception:  # noqa: BLE001, S112  # no annotation, or one that is only for type checkers
            continue
        if model is not None:
            message = (
                f"{qualified_name(function)}: the parameter {name!r} is a {qualified_name(model)}, a model, "
                f"which has no canonical form: {_remedy_for(name)}"
            )
            raise InvalidKey(message)


def _remedy_for(name: str) -> str:
    return f"pass a key template that names what matters, such as '…-{{{name}.id}}', or key=, or ignore=({name!r},)"


def _model_in(annotation: Any) -> type | None:
    """Return the first model of Pydantic's in an annotation."""
    if (
        isinstance(annotation, type)
        and hasattr(annotation, "__pydantic_core_schema__")
        and not is_dataclass(annotation)
    ):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _template_body(template: Template) -> str:
    """Return an f-string's text; small whole numbers, the usual ids, are written without a call."""
    pieces: list[str] = []
    for position, part in enumerate(template.parts):
        if position % 2 == 0:
            pieces.append(part)
        elif "." in part:
            pieces.append(f"{{_sg_text({part})}}")
        else:
            pieces.append(f"{{{part} if {part}.__class__ is _sg_int and {part} >= 0 else _sg_text({part})}}")
    return "".join(pieces)


def _derived_body(function: Callable[..., Any], names: Sequence[str]) -> str:
    values = [f"{{{name} if {name}.__class__ is _sg_int else _sg_canonical({name})}}" for name in names]
    return f"{qualified_name(function)}({','.join(values)})"


def _forwarding_body(function: Callable[..., Any]) -> str:
    return f"{{_sg_key({forwarding(parameters_of(function))})}}"


def _checked(function: Callable[..., Any], key: BuildKey) -> BuildKey:
    """Return *key*, its signature checked now and its answers at each call."""
    owner = qualified_name(function)
    if not callable(key):
        message = f"{owner}: key={key!r}; give a template or a function"
        raise InvalidKey(message)
    if inspect.iscoroutinefunction(key):
        message = f"{owner}: its key function is async; a key is built without waiting"
        raise InvalidKey(message)
    plain = [p for p in parameters_of(function) if p.kind not in (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD)]
    try:
        inspect.signature(key).bind(
            *(p.name for p in plain if p.kind is not _KINDS.KEYWORD_ONLY),
            **{p.name: p.name for p in plain if p.kind is _KINDS.KEYWORD_ONLY},
        )
    except (TypeError, ValueError) as error:
        message = f"{owner}: its key function cannot take the same arguments: {error}"
        raise InvalidKey(message) from None

    def checked(*args: Any, **kwargs: Any) -> str:
        op = key(*args, **kwargs)
        if not isinstance(op, str) or not op:
            message = f"{owner}: its key function returned {op!r}; an op id is a string, and not empty"
            raise InvalidKey(message)
        return op

    return checked


def _read(variable: ContextVar[Any]) -> str:
    try:
        return text_of(variable.get())
    except LookupError:
        message = f"vary= names the context variable {variable.name!r}, which has no value here; set it first"
        raise InvalidKey(message) from None


def _builder(function: Callable[..., Any], op: str, namespace: dict[str, Any]) -> Any:
    """Return a function with the parameters of *function* that returns the value of the expression *op*."""
    namespace |= {"_sg_int": int, "_sg_text": text_of, "_sg_canonical": canonical, "_sg_read": _read}
    namespace |= {"_sg_len": len, "_sg_shortened": shortened}
    body = f"_sg_op = {op}", f"return _sg_op if _sg_len(_sg_op) < {MAX_OP_LENGTH} else _sg_shortened(_sg_op)"
    return compile_like(function, body, namespace)
