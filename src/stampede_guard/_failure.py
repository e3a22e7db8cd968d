"""One load's failure, told to each waiter with an exception object of their own.

`raise` writes to the exception that it raises: frames go into its traceback, notes into its
notes. Were one object shared, the locals of one request would show up in another's error
report. So each waiter raises a copy whose traceback begins at the loader's frames.
"""

import copy
from types import TracebackType

from .errors import LoadFailed


class Failure:
    """The error of one flight, kept pristine, and handed out as copies."""

    __slots__ = ("_error", "_is_spent", "_traceback")

    def __init__(self, error: Exception) -> None:
        self._error = error
        self._traceback: TracebackType | None = error.__traceback__
        self._is_spent = False

    def for_waiter(self, *, is_last: bool) -> Exception:
        """Return an exception that nobody else holds.

        The last waiter may have the original. An error that refuses to be copied goes to whoever
        comes first; the others get a `LoadFailed` that names its type.
        """
        if is_last and not self._is_spent:
            self._is_spent = True
            return self._error
        mine = _copy(self._error)
        if mine is None and not self._is_spent:
            self._is_spent = True
            return self._error
        if mine is None:
            kind = type(self._error)
            mine = LoadFailed(f"the load failed with {kind.__module__}.{kind.__qualname__}, which cannot be copied")
        return mine.with_traceback(self._traceback)


def _copy(error: Exception) -> Exception | None:
    """Return a faithful copy of *error*, or `None` when there is no making one."""
    for make in (copy.copy, _without_init):
        try:
            twin = make(error)
        except Exception:  # noqa: BLE001, S112  # a user's __reduce__ or __new__ may raise anything
            continue
        if type(twin) is type(error) and twin.args == error.args:
            break
    else:
        return None
    twin.__dict__.update(error.__dict__)
    if "__notes__" in error.__dict__:
        twin.__notes__ = [*error.__notes__]  # a list: shared, a note would reach everybody
    twin.__cause__ = error.__cause__
    twin.__context__ = error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    return twin


def _without_init(error: Exception) -> Exception:
    """Copy an error whose `__init__` does not take its own `args`."""
    kind = type(error)
    return kind.__new__(kind, *error.args)
