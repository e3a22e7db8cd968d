"""A cached value, and the instant up to which it is fresh."""

from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Entry(Generic[T_co]):
    """What L1 has for one op.

    Attributes:
        value: What the loader returned, which may be `None`.
        fresh_until: Instant of the guard's monotonic clock, in seconds.
    """

    __slots__ = ("fresh_until", "value")

    def __init__(self, value: T_co, fresh_until: float) -> None:
        self.value = value
        self.fresh_until = fresh_until

    def __repr__(self) -> str:
        # Without the value, which is users' data: entries may get into logs.
        return f"<Entry {type(self.value).__name__} fresh until {self.fresh_until:.3f}>"
