"""Invalidations on their way to the store: some at once, the others in line, until it has confirmed each.

Waiting in line in this process is no failure, however long the line is. What ends it is the store: when a node does
not answer, one invalidation tries it, for the sake of the other processes, and all that wait for that node share its
outcome.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import Context

from ..stores import LeasingStore
from .access import StoreAccess

_AT_ONCE = 256  # invalidations under way: two batches of the Redis store's


class Confirmation:
    """What tells whether the store has confirmed an invalidation, for any number of callers."""

    __slots__ = ("_told",)

    def __init__(self) -> None:
        self._told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def tell(self, *, is_confirmed: bool) -> None:
        """Tell that the store has confirmed it, or that it is left to be repeated."""
        if not self._told.get_loop().is_closed():  # else nothing waits any more
            self._told.set_result(is_confirmed)

    async def wait(self) -> bool:
        """Return whether the store has confirmed; a cancellation of the caller changes nothing."""
        if not self._told.done():
            await asyncio.wait([self._told])
        return self._told.result()


class InvalidationSender:
    """The invalidations that one event loop sends.

    Args:
        store: Where they go.
        access: To the store.
        settle: Carries out what is pending for a key; returns whether the store has confirmed that.
        upkeep: Tasks that closing waits for.
    """

    def __init__(
        self,
        store: LeasingStore,
        access: StoreAccess,
        settle: Callable[[str], Awaitable[bool]],
        upkeep: "set[asyncio.Task[None]]",
    ) -> None:
        self._store = store
        self._access = access
        self._settle = settle
        self._upkeep = upkeep
        self._line: OrderedDict[str, Confirmation] = OrderedDict()
        self._workers = 0
        self._probes: dict[str, Confirmation] = {}  # by node

    def send(self, key: str) -> Confirmation:
        """Have what is pending for *key* carried out; equal ones in the line share a place in it."""
        confirmation = self._line.get(key)
        if confirmation is None:
            confirmation = self._line[key] = Confirmation()
            if self._workers < _AT_ONCE:
                self._start()
        return confirmation

    def _start(self) -> None:
        self._workers += 1
        # Not by the loop's factory, and in an empty context, because it serves all callers.
        loop = asyncio.get_running_loop()
        task = asyncio.Task(self._work(), loop=loop, name="invalidations", context=Context())
        self._upkeep.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._upkeep.discard(task)
        self._workers -= 1
        if not task.cancelled():
            if self._line:  # it came after the worker's last look
                self._start()
        elif not self._workers:
            self._give_up(None)

    async def _work(self) -> None:
        while self._line:
            key, confirmation = self._line.popitem(last=False)
            is_confirmed = False
            try:
                is_confirmed = await self._carry_out(key)
            finally:
                confirmation.tell(is_confirmed=is_confirmed)

    async def _carry_out(self, key: str) -> bool:
        node = self._store.node_of(key)
        breaker = self._access.breaker(node)
        if breaker.is_closed:
            return await self._settle(key)
        probe = self._probes.get(node)
        if probe is not None:
            return await probe.wait() and await self._settle(key)
        probe = self._probes[node] = Confirmation()
        is_confirmed = False
        try:
            is_confirmed = await self._settle(key)
        finally:
            del self._probes[node]
            probe.tell(is_confirmed=is_confirmed)
        if not is_confirmed and not breaker.is_closed:  # a refusal is an answer, and may be of this key alone
            self._give_up(node)
        return is_confirmed

    def _give_up(self, node: str | None) -> None:
        """Leave to be repeated what waits for *node*, or all of it."""
        for key in tuple(self._line):
            if node is None or self._store.node_of(key) == node:
                self._line.pop(key).tell(is_confirmed=False)
