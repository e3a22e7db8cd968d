"""Probes a changing set of nodes periodically, in the background."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from contextvars import Context
from random import random
from typing import Any, TypeAlias

from ..node import Node

logger = logging.getLogger("stampede_guard")

_MIN_PAUSE = 0.05  # seconds between two rounds

Probe: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class Poller:
    """One task that starts a round of probes every *period* seconds, and one task for each probe that is under way.

    A slow node delays only its own probes: the next one is sent after the last has ended.

    Args:
        period: Seconds from one round to the next, shortened at random by up to a quarter.
        probes: Called for each round; returns the nodes and the probe of each, which has a deadline of its own.
    """

    def __init__(self, period: float, probes: Callable[[], Iterable[tuple[Node, Probe]]]) -> None:
        self._period = period
        self._probes = probes
        self._is_due = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._pending: dict[Node, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin with the first round; does nothing the second time."""
        if self._driver is None:
            self._driver = asyncio.create_task(self._run(), context=Context())

    def poll_now(self) -> None:
        """Begin the next round at once."""
        self._is_due.set()

    def close_nodes(self, nodes: Iterable[Node]) -> None:
        """Close the connections of *nodes* in the background."""
        for node in nodes:
            task = asyncio.create_task(_close(node), context=Context())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """End every task; wait until the nodes of `close_nodes` are closed."""
        tasks = [*self._pending.values(), *([] if self._driver is None else [self._driver])]
        for task in tasks:
            task.cancel()
        tasks += self._closing
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self) -> None:
        while True:
            self._is_due.clear()
            for node, probe in self._probes():
                if node not in self._pending:
                    self._start_probe(node, probe)
            await asyncio.sleep(_MIN_PAUSE)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period * (1 - random() / 4) - _MIN_PAUSE):  # noqa: S311  # no secret
                    await self._is_due.wait()

    def _start_probe(self, node: Node, probe: Probe) -> None:
        task = asyncio.create_task(_guarded(node, probe), context=Context())
        self._pending[node] = task  # an eager one may be done; its callback still runs in a later iteration
        task.add_done_callback(lambda _: self._pending.pop(node, None))


async def first(found: asyncio.Event, probes: Iterable[Probe]) -> None:
    """Run all *probes* concurrently; return once one of them has set *found*, or all have ended."""
    pending: set[asyncio.Task[Any]] = {asyncio.create_task(probe(), context=Context()) for probe in probes}
    try:
        while pending and not found.is_set():
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)


async def _guarded(node: Node, probe: Probe) -> None:
    try:
        await probe()
    except Exception as error:  # noqa: BLE001  # a reply of an unforeseen shape
        logger.warning("a probe of %s failed (%s)", node.name, type(error).__name__)


async def _close(node: Node) -> None:
    try:
        await node.aclose()
    except Exception as error:  # noqa: BLE001  # drivers raise more than they document
        logger.debug("%s did not close cleanly (%s)", node.name, type(error).__name__)
