"""The operations of a guard: each function has ops of its own."""

import gc
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any
from weakref import ref

from .._keys.canonical import text_of
from .._keys.names import qualified_name
from .._keys.spec import KeySpec, shortened
from .._keys.tags import placeholder_in, resolve_tag
from .._keys.template import Shape, Template, matches, resembles
from .._memory.epochs import Lineage
from .._stats import Counters
from ..errors import ConfigurationError, InvalidKey
from .limits import LoadLimits
from .operation import Operation
from .policy import Policy

_MAX_NAMES = 4096  # with counters of their own
_OTHERS = "others"
_BRACES = "{}"  # marks the warning of a tag with braces; no template is called so
_MAX_DEAD = 1024  # functions that are gone, while memory still has values of theirs

logger = logging.getLogger("stampede_guard")


@dataclass(slots=True, eq=False)
class _Claim:
    """The claim of one function to its ops.

    Attributes:
        owner: The decorated function.
        name: The name of the function, with its module.
        code: Its code object; compiled again, it is another one.
        module: The identity of its module's namespace.
        run: The outermost code of its module that ran when it was decorated; two functions of one run are different.
        has_closure: Whether it uses variables of an enclosing function.
        spec: How its ops are built.
        operation: The operation that they belong to.
        lineage: The generations of the function.
    """

    owner: ref[Any]
    name: str
    code: ref[CodeType]
    module: int
    run: ref[CodeType] | None
    has_closure: bool
    spec: KeySpec
    operation: ref[Operation]
    lineage: Lineage

    @classmethod
    def from_owner(cls, owner: Any, spec: KeySpec, operation: Operation) -> "_Claim":
        """Return the claim of *owner* to the ops of *spec*, with weak references only to what the function owns."""
        functions = _functions_of(owner)
        innermost = functions[-1]
        return cls(
            owner=ref(owner),
            name=qualified_name(functions[0]),
            code=ref(innermost.__code__),
            module=id(innermost.__globals__),
            run=_run_of(innermost.__globals__),
            has_closure=any(each.__closure__ is not None for each in functions),
            spec=replace(spec, build=str),
            operation=ref(operation),
            lineage=operation.lineage,
        )

    @property
    def is_in_use(self) -> bool:
        """Whether the decorated function still exists."""
        for generation in range(3):  # it may be garbage in a cycle; young garbage is found quickly
            if self.owner() is None:
                break
            gc.collect(generation)
        return self.owner() is not None

    def has_code_of(self, other: "_Claim") -> bool:
        """Whether this is the definition of *other*, run once more."""
        return self.name == other.name and self.code() is other.code() and self.module == other.module

    def reloads(self, other: "_Claim") -> bool:
        """Whether this is another definition of the same function: its module was reloaded, or its cell run again."""
        theirs = other.owner()
        if self.name != other.name or self.has_code_of(other) or theirs is None:
            return False
        if self.run is not None and other.run is not None and self.run() is other.run():
            return False
        mine = self.owner()
        assert mine is not None
        new, old = _functions_of(mine)[-1], _functions_of(theirs)[-1]
        return new.__globals__ is old.__globals__ or _is_of_one_file(new.__code__, old.__code__)


class Registry:
    """The operations of one guard. References to functions are weak; counters are kept for good."""

    def __init__(self) -> None:
        self.counters: dict[str, Counters] = {}
        self._claims: list[_Claim] = []
        self._warned: set[str] = set()  # templates, each in one warning at most

    def counters_of(self, name: str) -> Counters:
        """Return the counters of *name*; of "others" when there are too many names."""
        known = self.counters.get(name)
        if known is None:
            if len(self.counters) >= _MAX_NAMES:
                name = _OTHERS
            known = self.counters.setdefault(name, Counters())
        return known

    def make(self, name: str, policy: Policy, *, has_store: bool, limits: LoadLimits, **options: Any) -> Operation:
        """Return a new operation, which counts under *name*; *limits* are the guard's, options those of `Operation`.

        Raises:
            ConfigurationError: the policy asks for a store or a limit that the guard does not have, or no codec can be
                found.
        """
        if policy.l2_ttl is not None and not has_store:
            message = f"{name}: l2_ttl= needs a guard with a store, as in Guard('redis://localhost:6379')"
            raise ConfigurationError(message)
        policy.limits.check_timeout(name, limits)
        operation = Operation(name, policy, self.counters_of(name), **options)
        operation.check_codec(is_final=False)
        return operation

    def operations(self) -> Iterator[Operation]:
        """Yield the operations of all functions that exist."""
        for claim in self._claims:
            operation = claim.operation()
            if operation is not None and claim.owner() is not None:
                yield operation

    def resolve_op(self, op: str, values: Mapping[str, object]) -> str:
        """Return *op* itself, or if there are *values*, *op* as a key template filled with them.

        An op that no call has is not an error, because `fetch` or another process may use it. It is logged once for
        each template that it resembles.

        Raises:
            InvalidKey: *op* is a template, and *values* are not those of its placeholders, or do not make the op.
        """
        if not isinstance(op, str) or not op:
            message = f"op={op!r}: an op id is a string, and not empty"
            raise InvalidKey(message)
        if "{" in op:
            for spec in self._specs():
                if spec.template is not None and spec.template.text == op:
                    _check_filled(spec.template, spec.shape, values)
        if values:
            return shortened(Template.parse(op).fill(values, text_of))
        self._warn_of_misspelling(op)
        return shortened(op)

    def resolve_tag(self, tag: str, values: Mapping[str, object]) -> str:
        """Return *tag* itself, or if there are *values*, *tag* as a template filled with them.

        A placeholder without a value is an error only in the template of a function. In other tags it may be part of a
        value, and is logged once.

        Raises:
            InvalidKey: *tag* is not a string, or empty, or a template whose placeholders are not *values*.
        """
        placeholder = None if values or not isinstance(tag, str) else placeholder_in(tag)
        if placeholder is None:
            return resolve_tag(tag, values)
        if any(tag in operation.tags for operation in self.operations()):
            message = (
                f"tag={tag!r} is a template: pass the values of its placeholders too, "
                f"as in ({tag!r}, {placeholder}=…), or put an f in front of the text"
            )
            raise InvalidKey(message)
        if _BRACES not in self._warned:
            self._warned.add(_BRACES)
            logger.warning(
                "a tag with a placeholder in braces was given without the value, and means itself: "
                "if that is not intended, put an f in front of it, or give the value by its name"
            )
        return shortened(tag)

    def _specs(self) -> Iterator[KeySpec]:
        """Yield the key specs of all functions that exist."""
        for claim in self._claims:
            if claim.owner() is not None:
                yield claim.spec

    def _warn_of_misspelling(self, op: str) -> None:
        resembled: Template | None = None
        for spec in self._specs():
            if spec.is_explicit or (spec.template is None and op.startswith(str(spec.shape[0]))):
                return
            if spec.template is not None and matches(spec.shape, op):
                return
            if spec.template is not None and resembles(spec.shape, op):
                resembled = spec.template
        if resembled is not None and resembled.text not in self._warned:
            self._warned.add(resembled.text)
            values = ", ".join(f"{name}=…" for name in sorted(resembled.names))
            logger.warning(
                "an op resembles the template %r, and no call of that template has it: values are escaped "
                "in ops. Take the op from .key(…) of the function, or give the template and its values: (%r, %s)",
                resembled.text,
                resembled.text,
                values,
            )

    def add(self, owner: Any, spec: KeySpec, operation: Operation) -> bool:
        """Claim the ops of *spec* for *owner*; return whether this replaces another definition.

        The values and running loads of the replaced definition are answers no more.

        Raises:
            InvalidKey: another function in use has these ops, and may answer differently.
        """
        claim = _Claim.from_owner(owner, spec, operation)
        rivals = [other for other in self._claims if other.spec.collides_with(spec)]
        replaced = [rival for rival in rivals if _replaces(claim, rival)]
        for rival in replaced:
            rival.lineage.start_generation(operation.counters)
        # That of a rival which is not replaced comes last, and counts: the function was decorated again.
        for rival in sorted(rivals, key=lambda each: each not in replaced):
            operation.lineage = claim.lineage = rival.lineage
        self._claims = [other for other in self._claims if other not in rivals]
        dead = [other for other in self._claims if other.owner() is None]
        for forgotten in dead[:-_MAX_DEAD]:
            forgotten.lineage.start_generation()
            self._claims.remove(forgotten)
        self._claims.append(claim)
        return bool(replaced)


def _replaces(claim: _Claim, rival: _Claim) -> bool:
    """Return whether *claim* replaces *rival*: the values of *rival* may not be answers of *claim*.

    Raises:
        InvalidKey: *rival* is in use, and would share answers with *claim*.
    """
    is_again = claim.has_code_of(rival) and claim.spec.recipe == rival.spec.recipe
    # The ops of different instances are different.
    if is_again and (claim.spec.is_local or not claim.has_closure):
        return False
    # A key function of the user decides which ops are shared.
    if (claim.name == rival.name and claim.spec.is_explicit) or claim.reloads(rival) or not rival.is_in_use:
        return True
    if is_again:
        message = (
            f"{claim.name} is decorated again while an earlier one is in use, and both take variables from "
            "around them: they would share answers. Make what differs a parameter, or give each a Guard of its own"
        )
    elif claim.name == rival.name:
        message = (
            f"{claim.name} is defined, or decorated with other key options, while an earlier function of that name "
            "is in use: they would share answers. Rename one, or give them key templates that differ"
        )
    else:
        message = f"{claim.name} and {rival.name} would share answers: some calls have the same op. Change a template"
    raise InvalidKey(message)


def _functions_of(owner: Any) -> list[FunctionType]:
    """Return the function that was decorated, and those that it wraps."""
    function = owner.__wrapped__
    many = getattr(function, "stampede_guard_one_of_many", None)
    function = function if many is None else many.loader
    functions = []
    while isinstance(function, FunctionType):
        functions.append(function)
        function = getattr(function, "__wrapped__", None)
    return functions


def _run_of(module: dict[str, Any]) -> ref[CodeType] | None:
    """Return the outermost code on the stack that runs in the namespace *module*: the module, a cell, or a function.

    Code that is compiled again, as for a reload, is another object.
    """
    found = None
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  # there is no other way to the callers
    while frame is not None:
        if frame.f_globals is module:
            found = frame.f_code
        frame = frame.f_back
    return None if found is None else ref(found)


def _is_of_one_file(mine: CodeType, theirs: CodeType) -> bool:
    files = mine.co_filename, theirs.co_filename
    return not files[0].startswith("<") and Path(files[0]).resolve() == Path(files[1]).resolve()


def _check_filled(template: Template, shape: Shape, values: Mapping[str, object]) -> None:
    """Check that *values* make an op of a function with this *template* and *shape*.

    Raises:
        InvalidKey: they do not.
    """
    if not values:
        message = (
            f"op={template.text!r} is a template: pass the values of its placeholders too, "
            f"as in ({template.text!r}, {min(template.names)}=…)"
        )
        raise InvalidKey(message)
    if shape != template.shape:
        message = (
            f"{template.text!r}: the ops of this function also tell a context variable or the instance; "
            "take the op from its .key(…)"
        )
        raise InvalidKey(message)
