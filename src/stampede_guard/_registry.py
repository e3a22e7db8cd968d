"""Which function's calls have which ops, so that no two functions can share one by accident."""

import gc
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

from ._canonical import text_of
from ._keys import KeySpec, name_of
from ._operation import Operation
from ._stats import Counters
from ._tags import placeholder_in, spell_tag
from ._template import Shape, Template, is_of, resembles
from .errors import InvalidKey

_NAMES = 4096  # that are counted each for itself
_OTHERS = "others"
_BRACES = "{}"  # no template

logger = logging.getLogger("stampede_guard")


@dataclass(frozen=True, slots=True)
class _Claim:
    owner: ref[Any]
    name: str  # of the function, module included
    has_closure: bool
    spec: KeySpec
    operation: Operation


class Registry:
    """One guard's operations. Functions are held weakly, counters for good: they are what was counted."""

    def __init__(self) -> None:
        self.counters: dict[str, Counters] = {}
        self._claims: list[_Claim] = []
        self._warned: set[str] = set()  # templates that ops were taken for

    def counters_of(self, name: str) -> Counters:
        """Return the counters under *name*; when there are very many names, those under "others"."""
        known = self.counters.get(name)
        if known is None:
            if len(self.counters) >= _NAMES:  # as names made of values would be
                name = _OTHERS
            known = self.counters.setdefault(name, Counters())
        return known

    def operations(self) -> Iterator[Operation]:
        """Yield the operations of all living functions."""
        for claim in self._claims:
            if claim.owner() is not None:
                yield claim.operation

    def spell_op(self, op: str, values: Mapping[str, object]) -> str:
        """Return the op that is meant: *op* itself, or the one that it makes of *values* as a key template.

        An op that no call has is not an error, as `fetch` or another process may have it; it is logged once for each
        template that it resembles.

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
            return Template.parse(op).fill(values, text_of)
        self._warn_of_misspelling(op)
        return op

    def spell_tag(self, tag: str, values: Mapping[str, object]) -> str:
        """Return the tag that is meant: *tag* itself, or the one that it makes of *values* as a template.

        A placeholder without a value may be part of a value's text, so it is an error only in the template of a
        function; else it is logged once.

        Raises:
            InvalidKey: *tag* is not a string, or empty, or a template whose placeholders are not *values*.
        """
        placeholder = None if values or not isinstance(tag, str) else placeholder_in(tag)
        if placeholder is None:
            return spell_tag(tag, values)
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
        return tag

    def _specs(self) -> Iterator[KeySpec]:
        """Yield how the ops of all living functions are built."""
        for claim in self._claims:
            if claim.owner() is not None:
                yield claim.spec

    def _warn_of_misspelling(self, op: str) -> None:
        resembled: Template | None = None
        for spec in self._specs():
            if spec.is_explicit or (spec.template is None and op.startswith(str(spec.shape[0]))):
                return
            if spec.template is not None and is_of(spec.shape, op):
                return
            if spec.template is not None and resembles(spec.shape, op):
                resembled = spec.template
        if resembled is not None and resembled.text not in self._warned:
            self._warned.add(resembled.text)
            values = ", ".join(f"{name}=…" for name in sorted(resembled.names))
            logger.warning(
                "an op was spelt out that resembles the template %r, and that none of its calls has: values are "
                "escaped in ops. Take it from .key(…) of the function, or give the template and its values: (%r, %s)",
                resembled.text,
                resembled.text,
                values,
            )

    def add(self, owner: Any, spec: KeySpec, operation: Operation) -> bool:
        """Claim the ops of *spec* for *owner*; return whether a function of the same name had them before.

        Raises:
            InvalidKey: a function of another name has them, or a living closure of the same name, which may
                answer differently.
        """
        function = owner.__wrapped__
        many = getattr(function, "stampede_guard_one_of_many", None)
        function = function if many is None else many.loader
        claim = _Claim(
            ref(owner),
            name_of(function),
            function.__closure__ is not None,
            spec,
            operation,
        )
        rivals = [other for other in self._claims if other.spec.collides_with(spec)]
        for rival in rivals:
            self._settle(claim, rival)
        self._claims = [other for other in self._claims if other not in rivals and other.owner() is not None]
        self._claims.append(claim)
        return bool(rivals)

    def _settle(self, claim: _Claim, rival: _Claim) -> None:
        is_anew = claim.name == rival.name  # a module reloaded, a cell of a notebook run again
        if is_anew and (claim.spec.is_local or claim.spec.is_explicit or not (claim.has_closure and rival.has_closure)):
            return
        if rival.owner() is not None:
            gc.collect()  # it may be garbage, in a cycle
        if rival.owner() is None:
            return
        if is_anew:
            message = (
                f"{claim.name} is decorated again while an earlier one is in use, and both take variables from "
                "around them: they would share answers. Make what differs a parameter, or give each a Guard of its own"
            )
        else:
            message = (
                f"{claim.name} and {rival.name} would share answers: some calls have the same op. Change a template"
            )
        raise InvalidKey(message)


def _check_filled(template: Template, shape: Shape, values: Mapping[str, object]) -> None:
    """Check that *values* make an op of a function whose ops have this *template* and *shape*."""
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
