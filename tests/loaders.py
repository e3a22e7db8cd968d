"""Loaders: of one value, of none, and a kitchen whose loads are counted and held."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from stampede_guard.testing import Gate

T = TypeVar("T")


def returning(value: T) -> Callable[[], Awaitable[T]]:
    """Return a loader of *value*."""

    async def load() -> T:
        return value

    return load


async def refuse() -> Any:
    """Load nothing: what is asked for has to be there."""
    raise AssertionError("loaded")


class Kitchen:
    """Loads "soup 1", "soup 2" and so on, each of which waits at a gate.

    Args:
        is_open: Whether the gate is open from the start.
        dish: What is loaded; its number follows.

    Attributes:
        gate: Where loads wait.
        error: What loads raise instead, once they have passed.
    """

    def __init__(self, *, is_open: bool = True, dish: str = "soup") -> None:
        self.gate = Gate()
        self.dishes: Iterator[str] = (f"{dish} {number}" for number in range(1, 1_000))
        self.error: Exception | None = None
        if is_open:
            self.gate.open()

    @property
    def loads(self) -> int:
        """How many loads began."""
        return self.gate.arrived

    async def load(self) -> str:
        """Load."""
        dish = next(self.dishes)
        await self.gate.passage()
        if self.error is not None:
            raise self.error
        return dish
