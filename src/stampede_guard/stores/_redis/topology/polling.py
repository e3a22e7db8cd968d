"""Asks each of a changing set of nodes again and again, out of the way of the calls that are served."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from contextvars import Context
from random import random
from typing import Any, TypeAlias

from ..node import Node

logger = logging.getLogger("stampede_guard")

_GAP = 0.05  # seconds between two rounds, however much of a hurry there is

Probe: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class Poller:
    """One task that starts a round every *period* seconds, and one for each question that is not answered yet.

    A node that takes long delays only itself: it is not asked again before it has answered or failed.

    Args:
        period: Seconds from one round to the next, shortened at random by up to a quarter.
        questions: Called for each round: whom to ask, and how. What is asked bounds itself in time.
    """

    def __init__(self, period: float, questions: Callable[[], Iterable[tuple[Node, Probe]]]) -> None:
        self._period = period
        self._questions = questions
        self._hurried = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._pending: dict[Node, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin with the first round; does nothing if that was done before."""
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive(), context=Context())

    def hurry(self) -> None:
        """Let the next round begin at once."""
        self._hurried.set()

    def close(self, nodes: Iterable[Node]) -> None:
        """Close the connections of *nodes*, which are asked no more; nobody waits for that."""
        for node in nodes:
            task = asyncio.create_task(_close(node), context=Context())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """End every task; nodes that are being closed are waited for."""
        tasks = [*self._pending.values(), *([] if self._driver is None else [self._driver])]
        for task in tasks:
            task.cancel()
        tasks += self._closing
        if tasks:
            await asyncio.wait(tasks)

    async def _drive(self) -> None:
        while True:
            self._hurried.clear()
            for node, question in self._questions():
                if node not in self._pending:
                    self._ask(node, question)
            await asyncio.sleep(_GAP)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period * (1 - random() / 4) - _GAP):  # noqa: S311  # no secret
                    await self._hurried.wait()

    def _ask(self, node: Node, question: Probe) -> None:
        task = asyncio.create_task(_guarded(node, question), context=Context())
        self._pending[node] = task  # an eager one may be done; its callback comes later all the same
        task.add_done_callback(lambda _: self._pending.pop(node, None))


async def first(found: asyncio.Event, questions: Iterable[Probe]) -> None:
    """Ask all *questions* side by side; return as soon as one of them has *found*, or none of them has."""
    pending: set[asyncio.Task[Any]] = {asyncio.create_task(question(), context=Context()) for question in questions}
    try:
        while pending and not found.is_set():
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)


async def _guarded(node: Node, question: Probe) -> None:
    try:
        await question()
    except Exception as error:  # noqa: BLE001  # a reply of a shape that nobody foresaw
        logger.warning("%s was asked in vain (%s)", node.name, type(error).__name__)


async def _close(node: Node) -> None:
    try:
        await node.aclose()
    except Exception as error:  # noqa: BLE001  # drivers raise more than they document
        logger.debug("%s did not close cleanly (%s)", node.name, type(error).__name__)
