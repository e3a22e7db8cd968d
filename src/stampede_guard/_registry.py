"""Which function's calls have which ops, so that no two functions can share one by accident."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

from ._keys import KeySpec
from ._operation import Operation
from ._stats import Counters
from .errors import InvalidKey


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

    def counters_of(self, name: str) -> Counters:
        """Return the counters under *name*."""
        return self.counters.setdefault(name, Counters())

    def operations(self) -> Iterator[Operation]:
        """Yield the operations of all living functions."""
        for claim in self._claims:
            if claim.owner() is not None:
                yield claim.operation

    def add(self, owner: Any, spec: KeySpec, operation: Operation) -> bool:
        """Claim the ops of *spec* for *owner*; return whether a function of the same name had them before.

        Raises:
            InvalidKey: a function of another name has them, or a living closure of the same name, which may
                answer differently.
        """
        function = owner.__wrapped__
        function = getattr(function, "loader", function)  # of one id: what loads many
        claim = _Claim(
            ref(owner),
            f"{function.__module__}.{function.__qualname__}",
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
