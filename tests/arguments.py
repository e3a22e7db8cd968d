"""Values that tests pass and keep: of classes that show less than they hold, and one whose end does something."""

from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from enum import Enum, IntFlag


class Right(IntFlag):
    READ = 1
    WRITE = 2


class Masked(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "***"

    __repr__ = __str__


class Price(Decimal):
    """Shows less than it holds, and holds no more than its base."""

    __slots__ = ()

    def __str__(self) -> str:
        return "a price"

    __repr__ = __str__


class Moment(datetime):
    def isoformat(self, sep: str = "T", timespec: str = "auto") -> str:
        return "a moment"

    __str__ = __repr__ = isoformat


class Shade(Enum):
    LIGHT = 1
    DARK = 2

    @property
    def name(self) -> str:
        return "a shade"

    __str__ = __repr__ = lambda self: "a shade"


class Ending:
    """A value whose end does something."""

    def __init__(self, do: Callable[[], object]) -> None:
        self._do = do

    def __del__(self) -> None:
        self._do()
