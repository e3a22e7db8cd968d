"""An answer with what is known of its freshness."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

T_co = TypeVar("T_co", covariant=True)

Source = Literal["memory", "store", "load"]


class Previous(NamedTuple):
    """The value that a loader is to replace.

    Attributes:
        value: What an earlier load returned.
        age: Seconds since then; `None` if that is not known.
        version: Its version, if the operation has `version=`.
    """

    value: Any
    age: float | None
    version: int | None


@dataclass(slots=True, eq=False, repr=False)  # not frozen: that would double the cost of a hit
class Answer(Generic[T_co]):
    """The answer to a call, with its freshness.

    Attributes:
        source: Where this call found it: in this process's `"memory"`, in the `"store"`, or by a `"load"`.
        age: Seconds since it was loaded; `None` if that is not known.
        is_stale: Whether its life is over.
        fresh_for: Seconds until its life is over; zero if it is, or if nothing is kept.
        stale_for: Seconds after its life in which it may be the answer while it is refreshed: the option `stale`.
        error_for: Seconds after its life in which it may be the answer if the load fails: `stale_if_error`.
        overdue: Seconds since its life was over; zero if it is not stale.
    """

    source: Source
    age: float | None
    is_stale: bool
    fresh_for: float
    stale_for: float
    error_for: float
    overdue: float
    _kept: Any
    _for_caller: Callable[[Any], Any]
    _find_etag: Callable[[], str | None]

    @property
    def value(self) -> T_co:
        """What the loader returned; with `isolate=True` a copy, decoded anew each time."""
        value: T_co = self._for_caller(self._kept)
        return value

    @property
    def etag(self) -> str | None:
        """A strong entity tag (RFC 9110, section 8.8.3): the digest of the value's bytes, in quotes.

        `None` if the value cannot be encoded. It is computed once for each entry of L1. Where bytes are kept
        (`isolate=True`), nothing is encoded or decoded.

        Raises:
            ConfigurationError: the operation has neither `codec=` nor a return annotation that says how to encode.
        """
        return self._find_etag()

    def __repr__(self) -> str:
        # Without the value, which is users' data: answers may get into logs.
        return f"<Answer from {self.source}, age {self.age}, fresh for {self.fresh_for:.3f} s>"
