"""The questions of growth; each is measured in one process, started for it alone."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from benchmarks.model import Figure

QUESTIONS: Final = ("keys", "waiters", "processes", "sizes")
PROGRESS: Final = "progress\t"


class Curve(msgspec.Struct):
    """One quantity against size: where it was measured, and what was found there."""

    name: str
    sizes: list[int] = []
    figures: list[Figure] = []
    is_reference: bool = False

    def add(self, size: int, rounds: list[float]) -> None:
        """Add what the *rounds* at *size* come to."""
        self.sizes.append(size)
        self.figures.append(Figure.of(rounds))

    def at(self, size: int) -> Figure | None:
        """Return what was found at *size*."""
        return self.figures[self.sizes.index(size)] if size in self.sizes else None


class Picture(msgspec.Struct):
    """What is drawn on one pair of axes."""

    name: str
    title: str
    quantity: str
    unit: str
    curves: list[Curve]


class Question(msgspec.Struct):
    """One thing that grows, and what that costs."""

    name: str
    title: str
    size: str
    caption: str
    pictures: list[Picture]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a question is to be measured.

    Attributes:
        tell: Takes how much is done, and a word on it.
        is_quick: Whether to show only that it runs.
    """

    tell: Callable[[float, str], None]
    is_quick: bool = False

    def sizes(self, full: int, quick: int, *, base: int = 10, first: int = 1) -> list[int]:
        """Return the powers of *base*, times *first*, up to *full*, or up to *quick* for a smoke test."""
        found = [first]
        while found[-1] * base <= (quick if self.is_quick else full):
            found.append(found[-1] * base)
        return found

    def rounds(self, full: int) -> int:
        """Return how many rounds to take."""
        return 2 if self.is_quick else full


def settle_memory() -> None:
    """Keep the garbage collector away from what is there: it would be charged to what is measured next."""
    gc.collect()
    gc.freeze()
