"""The functions that the candidates wrap, and their values."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any

VALUE = "menu " * 20
LIFE = 3600.0

Function = Callable[..., Coroutine[Any, Any, str]]


@dataclass(frozen=True, slots=True)
class Subject:
    """A function to be cached.

    Args:
        function: The function.
        key: Returns the key of a call, for peers that take a key function.
        template: The same key as a template, for peers that take one.
    """

    function: Function
    key: Callable[..., Hashable]
    template: str


@dataclass(frozen=True, slots=True)
class Terms:
    """How long values live, how many there may be, and with a URL in which Redis."""

    ttl: float = LIFE
    maxsize: int = 10_000
    url: str = ""


def one_argument() -> Subject:
    """Return a function of one argument, which returns at once."""

    async def menu(restaurant_id: int) -> str:
        return VALUE if restaurant_id is not None else ""

    return subject_of(menu)


def subject_of(function: Function) -> Subject:
    """Return *function*, with `restaurant_id` for its parameter, as a subject."""

    def key(restaurant_id: int) -> int:
        return restaurant_id

    return Subject(function, key, "menu:{restaurant_id}")


def three_arguments() -> Subject:
    """Return a function of three arguments, which returns at once."""

    async def menu(restaurant_id: int, language: str, currency: str) -> str:
        return VALUE if restaurant_id is not None and language and currency else ""

    def key(restaurant_id: int, language: str, currency: str) -> tuple[int, str, str]:
        return restaurant_id, language, currency

    return Subject(menu, key, "menu:{restaurant_id}:{language}:{currency}")


class Slow:
    """A loader that is still running when the last of its callers arrives; counts its runs.

    It lasts some iterations of the event loop without sleeping, so that only the callers cost time.
    """

    ITERATIONS = 25

    def __init__(self) -> None:
        self.runs = 0

    def subject(self) -> Subject:
        """Return the loader as a function to be cached."""

        async def menu(restaurant_id: int) -> str:
            self.runs += 1
            for _ in range(self.ITERATIONS):
                await asyncio.sleep(0)
            return VALUE if restaurant_id is not None else ""

        return subject_of(menu)
