"""Op ids: built from a call's arguments, by a compiled function.

The builder is compiled once, when the function is decorated. It has the function's own signature, so the interpreter
fills in defaults and assigns keywords. A key that leaves out an argument, or that is the same for two different calls,
would give one caller's answer to another. So:

* every parameter has to be in the key, or be named in `ignore=`;
* in a template, a value is percent-escaped and contains no separator, and separators stand around each placeholder;
  two templates that could still produce one op are found by comparing their shapes (`may_collide`);
* a derived key writes each argument in a typed, quoted form: `1`, `1.0`, `True` and `"1"` differ.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass
from hashlib import blake2b
from inspect import Parameter
from typing import Any, cast, get_args

from ..errors import InvalidKey
from .canonical import canonical, class_name, text_of
from .names import identity, qualified_name
from .source import annotation_of, compile_like, forwarding, parameters_of
from .template import Shape, Template, followed_by, may_begin_with, may_collide

BuildKey = Callable[..., str]

MAX_OP_LENGTH = 200  # characters, from which on an op is shortened
_WRITTEN_IN_PLACE = 1 << 63  # whole numbers below this, the usual ids, are written without a call
_DIGESTED = re.compile(r"~[0-9a-f]{64}~")


def shortened(op: str) -> str:
    """Return *op*, or if it is long, the text that replaces it everywhere: a digest, and the beginning of *op*.

    No two ops get the same text: the digest comes first, where no argument can forge it, and a short op is never as
    long.
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
    """How the ops of one function are built.

    Attributes:
        template: The template, or `None`.
        build: Takes a call's arguments, returns its op.
        is_explicit: Whether a key function of the user builds the ops.
        is_local: Whether the ops are valid in this process only, because an instance is part of them.
        shape: The words and separators that tell this function's ops from those of others.
        recipe: The key options; with others, the same function builds other ops.
        arguments: Names of the parameters whose values alone make the op; `None` if anything else is part of it.
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
        written, derived = (self, other) if other.template is None else (other, self)
        return not derived.is_explicit and may_begin_with(written.shape, f"{derived.shape[0]}(")


def compile_key(  # noqa: PLR0915  # one decision after the other
    function: Callable[..., Any],
    key: str | BuildKey | None,
    *,
    ignore: Sequence[str] = (),
    vary: Sequence[ContextVar[Any]] = (),
    is_shared: bool = False,
) -> KeySpec:
    """Return how to build the ops of *function*: from a template, by a key function, or from all its arguments.

    Args:
        function: The decorated function.
        key: Template, key function, or `None` to derive the key.
        ignore: Parameters that do not change the answer.
        vary: Context variables that do.
        is_shared: Whether other processes see the ops, so that a class is written by its name.

    Raises:
        InvalidKey: a name is unknown, a parameter is left out, the template is malformed or ambiguous.
    """
    names = [parameter.name for parameter in parameters_of(function)]
    for name in ignore:
        if name not in names:
            message = f"{qualified_name(function)}: ignore= names {name!r}, which is no parameter of it"
            raise InvalidKey(message)
    template = Template.parse(key) if isinstance(key, str) else None
    receiver = receiver_of(function)
    if callable(key) or receiver in ignore or (template is not None and receiver in template.names):
        receiver = None
    is_named = receiver == "cls" and is_shared
    namespace: dict[str, Any] = {"_sg_receiver": class_name if is_named else identity}
    if template is not None:
        _check_complete(function, template, {*ignore, receiver or ""}, names)
        _check_annotations(function, [part for part in template.parts[1::2] if "." not in part])
        body, shape = _template_body(template), template.shape
    elif key is None:
        used = [name for name in names if name not in ignore and name != receiver]
        _check_annotations(function, used)
        body, shape = _derived_body(function, used), (qualified_name(function),)
    else:
        namespace["_sg_key"] = _checked_key_function(function, cast("BuildKey", key))
        body = f"{{_sg_key({forwarding(parameters_of(function))})}}"
        shape = (qualified_name(function), "key")
    if receiver is not None:
        body += f"#{{_sg_receiver({receiver})}}"
        shape = followed_by(shape, "#")
    for position, variable in enumerate(vary):
        namespace[f"_sg_vary_{position}"] = variable
        body += f"@{{_sg_read(_sg_vary_{position})}}"
        shape = followed_by(shape, "@")
    is_plain = receiver is None and not vary and not callable(key)
    return KeySpec(
        template=template,
        build=_builder(function, f"f{body!r}", namespace),
        is_explicit=callable(key),
        is_local=receiver is not None and not is_named,
        shape=shape,
        recipe=(template and template.text, frozenset(ignore), *vary),
        arguments=_arguments(function, template, ignore) if is_plain else None,
    )


def _arguments(
    function: Callable[..., Any], template: Template | None, ignore: Sequence[str]
) -> tuple[str, ...] | None:
    """Return the names of the parameters that make the op, if it is made of their plain values only."""
    used = [each for each in parameters_of(function) if each.name not in ignore]
    if template is not None:
        expressions = set(template.parts[1::2])
        if expressions != template.names:
            return None  # the attribute of an object may change
        used = [each for each in used if each.name in expressions]
    if any(each.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for each in used):
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


def _check_annotations(function: Callable[..., Any], names: Sequence[str]) -> None:
    """Check that no parameter is annotated as a Pydantic model, which has no canonical form.

    Raises:
        InvalidKey: one is.
    """
    for name in names:
        try:
            model = _model_in(annotation_of(function, name))
        except Exception:  # noqa: BLE001, S112  # no annotation, or one that is only for type checkers
            continue
        if model is not None:
            message = (
                f"{qualified_name(function)}: the parameter {name!r} is a {qualified_name(model)}, a model, which has "
                "no canonical form: pass a key template that names what matters, such as "
                f"'…-{{{name}.id}}', or key=, or ignore=({name!r},)"
            )
            raise InvalidKey(message)


def _model_in(annotation: Any) -> type | None:
    """Return the first Pydantic model in an annotation."""
    if isinstance(annotation, type) and hasattr(annotation, "__pydantic_core_schema__"):
        return None if is_dataclass(annotation) else annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _template_body(template: Template) -> str:
    """Return the text of an f-string for the op."""
    pieces: list[str] = []
    for position, part in enumerate(template.parts):
        if position % 2 == 0:
            pieces.append(part)
        elif "." in part:
            pieces.append(f"{{_sg_text({part})}}")
        else:
            is_plain = f"{part}.__class__ is _sg_int and 0 <= {part} < {_WRITTEN_IN_PLACE}"
            pieces.append(f"{{{part} if {is_plain} else _sg_text({part})}}")
    return "".join(pieces)


def _derived_body(function: Callable[..., Any], names: Sequence[str]) -> str:
    low, high = -_WRITTEN_IN_PLACE, _WRITTEN_IN_PLACE
    values = [
        f"{{{name} if {name}.__class__ is _sg_int and {low} < {name} < {high} else _sg_canonical({name})}}"
        for name in names
    ]
    return f"{qualified_name(function)}({','.join(values)})"


def _checked_key_function(function: Callable[..., Any], key: BuildKey) -> BuildKey:
    """Return *key*, with its signature checked now and its result checked at each call."""
    owner = qualified_name(function)
    if not callable(key):
        message = f"{owner}: key={key!r}; give a template or a function"
        raise InvalidKey(message)
    if inspect.iscoroutinefunction(key):
        message = f"{owner}: its key function is async; a key is built without waiting"
        raise InvalidKey(message)
    plain = [p for p in parameters_of(function) if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    try:
        inspect.signature(key).bind(
            *(p.name for p in plain if p.kind is not Parameter.KEYWORD_ONLY),
            **{p.name: p.name for p in plain if p.kind is Parameter.KEYWORD_ONLY},
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
