"""The questions of growth, each measured in a process of its own."""

import gc
from dataclasses import dataclass
from typing import Final

import msgspec

from benchmarks.children import Tell
from benchmarks.model import Figure

QUESTIONS: Final = ("keys", "waiters", "processes", "sizes")


class Curve(msgspec.Struct):
    """One quantity against size: the sizes, and the figures there."""

    name: str
    sizes: list[int] = []
    figures: list[Figure] = []
    is_reference: bool = False

    def add(self, size: int, rounds: list[float]) -> None:
        """Add the figure of *rounds* at *size*."""
        self.sizes.append(size)
        self.figures.append(Figure.of(rounds))

    def at(self, size: int) -> Figure | None:
        """Return the figure at *size*, if it was measured."""
        return self.figures[self.sizes.index(size)] if size in self.sizes else None


class Picture(msgspec.Struct):
    """The curves on one pair of axes."""

    name: str
    title: str
    quantity: str
    unit: str
    curves: list[Curve]


class Question(msgspec.Struct):
    """One thing that grows, and the cost of its growth."""

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
        tell: Takes the progress, 0 to 1, and a description.
        is_quick: Whether it is a smoke test.
    """

    tell: Tell
    is_quick: bool = False

    def sizes(self, full: int, quick: int, *, base: int = 10, first: int = 1) -> list[int]:
        """Return *first* times the powers of *base*, up to *full*, or to *quick* in a smoke test."""
        found = [first]
        while found[-1] * base <= (quick if self.is_quick else full):
            found.append(found[-1] * base)
        return found

    def rounds(self, full: int) -> int:
        """Return how many rounds to take."""
        return 2 if self.is_quick else full


def settle_memory() -> None:
    """Exclude all current objects from garbage collection, which the next round would pay for."""
    gc.collect()
    gc.freeze()
