"""Functions that are written as source, under the signature of another function.

So the interpreter itself fills in defaults and sorts out keywords, as in the `__init__` of a dataclass. Only names of
parameters, which are identifiers, get into the source: nothing that a user wrote is run.
"""

import inspect
import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import update_wrapper
from itertools import count
from types import SimpleNamespace
from typing import Any, get_type_hints
from weakref import finalize

from ..errors import NotCoalescable

_KINDS = inspect.Parameter
_numbers = count(1)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of *function*."""
    return list(inspect.signature(function).parameters.values())


def forwarding(parameters: Iterable[inspect.Parameter]) -> str:
    """Return the arguments of a call that passes on *parameters* as they came."""
    return ", ".join([*_positional(parameters), *_by_keyword(parameters, "{0}={0}")])


def as_tuple_and_dict(parameters: Iterable[inspect.Parameter]) -> tuple[str, str]:
    """Return the sources of the tuple and of the dict with which such a call can be made later."""
    return tuple_of(_positional(parameters)), f"{{{', '.join(_by_keyword(parameters, '{0!r}: {0}'))}}}"


def tuple_of(expressions: Iterable[str]) -> str:
    """Return the source of a tuple."""
    return f"({''.join(f'{each}, ' for each in expressions)})"


def _positional(parameters: Iterable[inspect.Parameter]) -> list[str]:
    stars = {_KINDS.POSITIONAL_ONLY: "", _KINDS.POSITIONAL_OR_KEYWORD: "", _KINDS.VAR_POSITIONAL: "*"}
    return [stars[each.kind] + each.name for each in parameters if each.kind in stars]


def _by_keyword(parameters: Iterable[inspect.Parameter], written: str) -> list[str]:
    forms = {_KINDS.KEYWORD_ONLY: written, _KINDS.VAR_KEYWORD: "**{0}"}
    return [
        forms[each.kind].replace("{0!r}", repr(each.name)).replace("{0}", each.name)
        for each in parameters
        if each.kind in forms
    ]


def imitate(stand_in: Any, function: Callable[..., Any]) -> None:
    """Let *stand_in* look like *function*, as `functools.wraps` does; keep what its class defines.

    An attribute of the function that is called like a method of the stand-in is found through `__wrapped__`.
    """
    own = {name: value for name, value in vars(function).items() if not hasattr(type(stand_in), name)}
    vars(stand_in).update(own)
    update_wrapper(stand_in, function, updated=())  # which sets `__wrapped__` too


def annotation_of(function: Callable[..., Any], name: str) -> Any:
    """Evaluate the annotation of a parameter, or of `"return"`, alone: others may name what only type checkers import.

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


class _Verbatim:
    """A default that is written into the source as a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def compile_like(
    function: Callable[..., Any], body: Sequence[str], namespace: Mapping[str, Any], *, is_async: bool = False
) -> Any:
    """Return a function with the name and the parameters of *function*, whose body is these lines.

    Args:
        function: What it looks like, to its callers, in errors and in tracebacks.
        body: Lines of source; they can use the parameters and the names in *namespace*.
        namespace: The rest of what the body uses; its names begin with `_sg_`.
        is_async: Whether it is a coroutine function.

    Raises:
        NotCoalescable: a parameter has such a name too.
    """
    names = dict(namespace)
    signature: list[inspect.Parameter] = []
    for parameter in parameters_of(function):
        if parameter.name.startswith("_sg_"):
            message = f"{function.__qualname__}: call the parameter {parameter.name!r} something that is not _sg_…"
            raise NotCoalescable(message)
        default: Any = _KINDS.empty
        if parameter.default is not _KINDS.empty:
            default = _Verbatim(f"_sg_default_{parameter.name}")
            names[default.name] = parameter.default
        signature.append(parameter.replace(annotation=_KINDS.empty, default=default))
    head = f"{'async ' * is_async}def _sg_made{inspect.Signature(signature)}:"
    source = "\n".join((head, *(f"    {line}" for line in body), ""))
    file = f"<stampede_guard {function.__module__}.{function.__qualname__} {next(_numbers)}>"
    exec(compile(source, file, "exec"), names)  # noqa: S102  # as dataclasses do
    made = names["_sg_made"]
    # Set afterwards, as a name may be anything: that of a lambda, a keyword, or one that the body uses.
    made.__code__ = made.__code__.replace(co_name=function.__name__, co_qualname=function.__qualname__)
    if is_async:  # tracebacks go through a coroutine, and should show what it says
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        finalize(made, linecache.cache.pop, file, None).atexit = False
    made.__name__ = function.__name__
    made.__qualname__ = function.__qualname__  # a wrong call is reported under the function's own name
    made.__module__ = function.__module__
    return made
