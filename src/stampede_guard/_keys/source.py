"""Functions compiled from source, with the signature of another function.

The interpreter then fills in defaults and assigns keywords, as with the `__init__` of a dataclass. The only text of the
user's in the source is the names of parameters, which are identifiers.
"""

import inspect
import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import update_wrapper
from inspect import Parameter
from itertools import count
from types import SimpleNamespace
from typing import Any, get_type_hints
from weakref import finalize

from ..errors import NotCoalescable

_numbers = count(1)


def parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of *function*."""
    return list(inspect.signature(function).parameters.values())


def forwarding(parameters: Iterable[Parameter]) -> str:
    """Return the source of the arguments of a call that passes on *parameters* unchanged."""
    return ", ".join([*_positional(parameters), *_by_keyword(parameters, "{0}={0}")])


def as_tuple_and_dict(parameters: Iterable[Parameter]) -> tuple[str, str]:
    """Return the sources of the tuple and of the dict to make such a call with later."""
    return tuple_of(_positional(parameters)), f"{{{', '.join(_by_keyword(parameters, '{0!r}: {0}'))}}}"


def tuple_of(expressions: Iterable[str]) -> str:
    """Return the source of a tuple."""
    return f"({''.join(f'{each}, ' for each in expressions)})"


def _positional(parameters: Iterable[Parameter]) -> list[str]:
    stars = {Parameter.POSITIONAL_ONLY: "", Parameter.POSITIONAL_OR_KEYWORD: "", Parameter.VAR_POSITIONAL: "*"}
    return [stars[each.kind] + each.name for each in parameters if each.kind in stars]


def _by_keyword(parameters: Iterable[Parameter], written: str) -> list[str]:
    forms = {Parameter.KEYWORD_ONLY: written, Parameter.VAR_KEYWORD: "**{0}"}
    return [
        forms[each.kind].replace("{0!r}", repr(each.name)).replace("{0}", each.name)
        for each in parameters
        if each.kind in forms
    ]


def imitate(stand_in: Any, function: Callable[..., Any]) -> None:
    """Give *stand_in* the attributes of *function*, as `functools.wraps` does, except those that its class defines.

    The others are found through `__wrapped__`, which this sets.
    """
    own = {name: value for name, value in vars(function).items() if not hasattr(type(stand_in), name)}
    vars(stand_in).update(own)
    update_wrapper(stand_in, function, updated=())


def annotation_of(function: Callable[..., Any], name: str) -> Any:
    """Evaluate the annotation of one parameter, or of `"return"`.

    The others are left alone: they may use names that only type checkers import.

    Raises:
        KeyError: there is none.
        NameError: a name in it is not defined, or not yet.
    """
    alone = SimpleNamespace(
        __annotations__={name: function.__annotations__[name]},
        __type_params__=getattr(function, "__type_params__", ()),
    )
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return get_type_hints(alone, names, include_extras=True)[name]


class _DefaultName:
    """A default that appears in the source as a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def compile_like(
    function: Callable[..., Any], body: Sequence[str], namespace: Mapping[str, Any], *, is_async: bool = False
) -> Any:
    """Return a function with the name and the parameters of *function*, and with this *body*.

    Args:
        function: The function that callers, errors and tracebacks show.
        body: Lines of source, which use the parameters and the names in *namespace*.
        namespace: Names for the body, each beginning with `_sg_`, and their values.
        is_async: Whether to make a coroutine function.

    Raises:
        NotCoalescable: the name of a parameter begins with `_sg_` too.
    """
    names = dict(namespace)
    signature: list[Parameter] = []
    for parameter in parameters_of(function):
        if parameter.name.startswith("_sg_"):
            message = f"{function.__qualname__}: call the parameter {parameter.name!r} something that is not _sg_…"
            raise NotCoalescable(message)
        default: Any = Parameter.empty
        if parameter.default is not Parameter.empty:
            default = _DefaultName(f"_sg_default_{parameter.name}")
            names[default.name] = parameter.default
        signature.append(parameter.replace(annotation=Parameter.empty, default=default))
    head = f"{'async ' * is_async}def _sg_made{inspect.Signature(signature)}:"
    source = "\n".join((head, *(f"    {line}" for line in body), ""))
    file = f"<stampede_guard {function.__module__}.{function.__qualname__} {next(_numbers)}>"
    exec(compile(source, file, "exec"), names)  # noqa: S102  # as dataclasses do
    made = names["_sg_made"]
    # Set afterwards, because it need not be an identifier, and because the body may use the same name.
    made.__code__ = made.__code__.replace(co_name=function.__name__, co_qualname=function.__qualname__)
    if is_async:  # tracebacks pass through a coroutine, and should show its source
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        finalize(made, linecache.cache.pop, file, None).atexit = False
    made.__name__ = function.__name__
    made.__qualname__ = function.__qualname__  # the TypeError of a wrong call shows it
    made.__module__ = function.__module__
    return made
