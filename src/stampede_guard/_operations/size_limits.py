"""How much a guard keeps and stores, as users say it."""

from typing import NamedTuple, Self

from .options import count, size


class SizeLimits(NamedTuple):
    """The limits of a guard on its values; those of memory hold for each event loop.

    Attributes:
        maxsize: Entries in memory.
        max_size: Bytes in memory; `None` if they are not measured.
        max_bytes: Size of the largest value that is stored or read.
    """

    maxsize: int
    max_size: int | None
    max_bytes: int

    @property
    def is_measured(self) -> bool:
        """Whether the bytes of entries are known."""
        return self.max_size is not None

    @classmethod
    def checked(cls, maxsize: int, max_size: str | int | None, max_bytes: int) -> Self:
        """Return the limits that these options ask for; *max_size* may have a unit.

        Raises:
            ConfigurationError: one breaks its rule.
        """
        measured = None if max_size is None else size("max_size", max_size)
        return cls(count("maxsize", maxsize), measured, count("max_bytes", max_bytes))
