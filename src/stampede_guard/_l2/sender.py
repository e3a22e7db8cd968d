"""Sends invalidations to the store: some concurrently, the others in a queue.

A long queue in this process is no failure. But when a node does not answer, one invalidation is sent as a probe, and
all that wait for that node share its outcome.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import Context

from ..stores import LeasingStore
from .access import StoreAccess

_MAX_WORKERS = 256  # invalidations under way: two pipelines of the Redis store


class Confirmation:
    """The outcome of an invalidation, for any number of callers."""

    __slots__ = ("_outcome",)

    def __init__(self) -> None:
        self._outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def set(self, *, is_confirmed: bool) -> None:
        """Note that the store has confirmed the invalidation, or that it will be repeated."""
        if not self._outcome.get_loop().is_closed():  # else no caller is left
            self._outcome.set_result(is_confirmed)

    async def wait(self) -> bool:
        """Return whether the store has confirmed; a cancellation of the caller changes nothing."""
        if not self._outcome.done():
            await asyncio.wait([self._outcome])
        return self._outcome.result()


class InvalidationSender:
    """The invalidations that one event loop sends.

    Args:
        store: The store.
        access: To the store.
        carry_out: Carries out the pending invalidation of a key; returns whether the store has confirmed it.
        upkeep: Tasks that closing waits for.
    """

    def __init__(
        self,
        store: LeasingStore,
        access: StoreAccess,
        carry_out: Callable[[str], Awaitable[bool]],
        upkeep: "set[asyncio.Task[None]]",
    ) -> None:
        self._store = store
        self._access = access
        self._carry_out = carry_out
        self._upkeep = upkeep
        self._queue: OrderedDict[str, Confirmation] = OrderedDict()
        self._workers = 0
        self._probes: dict[str, Confirmation] = {}  # by name of the node

    def send(self, key: str) -> Confirmation:
        """Queue the pending invalidation of *key*; equal ones in the queue share a place in it."""
        confirmation = self._queue.get(key)
        if confirmation is None:
            confirmation = self._queue[key] = Confirmation()
            if self._workers < _MAX_WORKERS:
                self._start()
        return confirmation

    def _start(self) -> None:
        self._workers += 1
        # Without the loop's factory, and in an empty context, because the task serves all callers.
        loop = asyncio.get_running_loop()
        task = asyncio.Task(self._work(), loop=loop, name="invalidations", context=Context())
        self._upkeep.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._upkeep.discard(task)
        self._workers -= 1
        if not task.cancelled():
            if self._queue:  # an invalidation that was queued after the worker's last step
                self._start()
        elif not self._workers:
            self._give_up(None)

    async def _work(self) -> None:
        while self._queue:
            key, confirmation = self._queue.popitem(last=False)
            is_confirmed = False
            try:
                is_confirmed = await self._send(key)
            finally:
                confirmation.set(is_confirmed=is_confirmed)

    async def _send(self, key: str) -> bool:
        node = self._store.node_of(key)
        breaker = self._access.breaker(node)
        if breaker.is_closed:
            return await self._carry_out(key)
        probe = self._probes.get(node)
        if probe is not None:
            return await probe.wait() and await self._carry_out(key)
        probe = self._probes[node] = Confirmation()
        is_confirmed = False
        try:
            is_confirmed = await self._carry_out(key)
        finally:
            del self._probes[node]
            probe.set(is_confirmed=is_confirmed)
        # A refusal closes the breaker: it is an answer, and may concern this key only.
        if not is_confirmed and not breaker.is_closed:
            self._give_up(node)
        return is_confirmed

    def _give_up(self, node: str | None) -> None:
        """End the wait of the invalidations for *node*, or of all: they are repeated later."""
        for key in tuple(self._queue):
            if node is None or self._store.node_of(key) == node:
                self._queue.pop(key).set(is_confirmed=False)
