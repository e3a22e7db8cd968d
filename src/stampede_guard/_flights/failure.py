"""A load's failure: each waiter gets an exception of its own.

`raise` writes to the exception that it raises: frames go into its traceback, notes into its notes. If waiters shared
one object, the locals of one request would appear in another's error report. So each waiter raises a copy whose
traceback begins at the loader's frames. The errors that it is chained to, and those in a group, are copied too, because
a waiter may unwrap and raise them.
"""

import copy
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any, TypeVar

from ..errors import LoadFailed

E = TypeVar("E", bound=BaseException)
_LONGEST = 100  # errors in one chain or group that are copied; what comes after is told by its type
Twins = dict[int, BaseException]  # copies by the id of what they are copies of: chains can be circular


class Failure:
    """The error of one flight, kept as it was raised, and given out as copies."""

    __slots__ = ("_error", "_is_spent", "_traceback")

    def __init__(self, error: Exception) -> None:
        self._error = error
        self._traceback = error.__traceback__
        self._is_spent = False

    def for_waiter(self, *, is_last: bool) -> Exception:
        """Return an exception for one waiter alone.

        The last waiter gets the original. An error that cannot be copied goes to the first waiter, and the others get
        a `LoadFailed` that names its type.
        """
        if is_last and not self._is_spent:
            self._is_spent = True
            return self._error
        mine: Exception | None = _copy(self._error, {})
        if mine is None and not self._is_spent:
            self._is_spent = True
            return self._error
        if mine is None:
            mine = _stand_in(self._error)
        return mine.with_traceback(self._traceback)


def bare_copy(error: E) -> E | None:
    """Return a copy of *error* that holds no frames and no other errors; `None` if it cannot be copied."""
    return _twin(error, {})


def _copy(error: E, twins: Twins) -> E | None:
    """Return a faithful copy of *error*, or `None` if it cannot be copied."""
    twin = _twin(error, twins)
    if twin is None:
        return None
    twins[id(error)] = twin
    twin.__cause__ = _linked(error.__cause__, twins)
    twin.__context__ = _linked(error.__context__, twins)
    twin.__suppress_context__ = error.__suppress_context__
    return twin


def _linked(error: BaseException | None, twins: Twins) -> BaseException | None:
    """Return the copy of an *error* that another one leads to."""
    if error is None:
        return None
    twin = twins.get(id(error))
    if twin is None and len(twins) < _LONGEST:
        twin = _copy(error, twins)
    if twin is None:
        twin = _stand_in(error)
    return twin.with_traceback(error.__traceback__)


def _stand_in(error: BaseException) -> LoadFailed:
    kind = type(error)
    return LoadFailed(f"the load failed with {kind.__module__}.{kind.__qualname__}, which cannot be copied")


def _twin(error: E, twins: Twins) -> E | None:
    """Return a second object like *error*, with the same attributes, and notes of its own."""
    for make in (_regroup,) if isinstance(error, BaseExceptionGroup) else (_remake, _without_init):
        try:
            twin = make(error, twins)
            if twin is None or twin is error or type(twin) is not type(error):
                continue
            twin.__dict__.update(error.__dict__)
            _copy_members(error, twin)
            if "__notes__" in error.__dict__:
                twin.__notes__ = [*error.__notes__]  # a list of its own, or a note would reach all waiters
        except Exception:  # noqa: BLE001, S112  # a user's __reduce__ or __new__ may raise anything
            continue
        return twin
    return None


def _remake(error: E, _: Twins) -> E | None:
    """Copy an error as `copy` does, through its type; `None` if its `__init__` makes something else of its `args`."""
    twin = copy.copy(error)
    if twin.args != error.args and type(error).__reduce__ is not BaseException.__reduce__ and str(twin) == str(error):
        twin.args = error.args  # its type knows how to copy it: Pydantic's is made by a function of other arguments
    return twin if twin.args == error.args else None


def _copy_members(error: BaseException, twin: BaseException) -> None:
    """Copy what is not in the dict: slots, and what exceptions of Python's own hold in C."""
    kinds = type(error).__mro__
    for kind in kinds[: kinds.index(BaseException)]:
        for name, member in vars(kind).items():
            value = getattr(error, name, None) if isinstance(member, MemberDescriptorType) else None
            if value is not None and value is not getattr(twin, name, None):
                with suppress(AttributeError, TypeError):  # it can only be read, and was set when the twin was made
                    setattr(twin, name, value)


def _without_init(error: E, _: Twins) -> E:
    """Copy an error whose `__init__` does not take its own `args`."""
    kind: Any = type(error)
    return kind.__new__(kind, *error.args)  # type: ignore[no-any-return]  # a second E


def _regroup(group: Any, twins: Twins) -> Any:
    """Copy a group with all that it holds."""
    kind: Any = type(group)
    return kind.__new__(kind, group.message, [_linked(error, twins) for error in group.exceptions])
