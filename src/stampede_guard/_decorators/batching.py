"""Batches: flights that are about to load share one call.

Each id has an ordinary flight, with its own lease, fence, tags and time-outs. Only the last step is shared: instead
of running a loader of its own, a flight joins a batch. A batch is a flight too, which only the flights of its ids join.
So it takes a slot for loads, it is cancelled when its last waiter has left, and a loader that waits for itself is
found.

The store does not reply for all ids in the same tick. So a batch that was asked for as a whole is sent when the store
has replied for each of its ids: with a value, or with the lease. It does not wait for an id that another process loads.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from .._flights.flight import Flight, running_flight
from .._flights.waiting import wait_one
from .._guard import Guard
from .._keys.canonical import text_of
from .._operations.operation import Operation
from ..errors import WrongAnswer

Loader = Callable[..., Coroutine[Any, Any, Mapping[Any, Any]]]
Args = tuple[Any, ...]  # of a call for one id: the id, after the instance if the loader is a method


class Batch:
    """One call of the loader: its ids, and its flight."""

    __slots__ = ("flight", "ids", "is_ready")

    flight: Flight[dict[Any, Any]]

    def __init__(self) -> None:
        self.ids: dict[Any, Flight[Any] | None] = {}  # with the flights that wait for them
        self.is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self) -> None:
        """Let the loader be called, for the ids that are there when it gets its slot."""
        if not self.is_ready.done():  # all its waiters have left
            self.is_ready.set_result(None)

    async def value_of(self, one_id: Any) -> Any:
        """Wait for the value of an id; `None` if it has none."""
        try:
            values = await wait_one(self.flight)
        finally:
            self.ids.pop(one_id, None)  # an id whose flight leaves early is not loaded: it has no other waiter
        return values.get(one_id)


class BatchWindow:
    """The time in which flights that reach their loads join the same batches.

    Args:
        loader: Whose batches these are.
        group: What the flights have in common.
    """

    __slots__ = ("_batches", "_expected", "_group", "_is_closed", "_is_closing", "_loader")

    def __init__(self, loader: "BatchLoader", group: Hashable) -> None:
        self._loader = loader
        self._group = group
        self._batches: list[Batch] = []
        self._expected = 0
        self._is_closing = False
        self._is_closed = False

    def expect(self) -> None:
        """Count a flight that will join, or land without a load."""
        self._expected += 1

    def settle(self) -> None:
        """Stop waiting for one of those: it has joined or landed, or waits for another process."""
        self._expected -= 1
        if self._expected == 0:
            if self._is_closed:
                self._send_all()
            elif not self._is_closing:  # the store had all values
                self._loader.close_window(self._group)

    def join(self, args: Args) -> Batch:
        """Return the batch that the flight of *args* is in from now on."""
        if not self._is_closing:
            self._is_closing = True
            self._loader.call_soon(self._close)
        batch = self._batches[-1] if self._batches else None
        # An id that is in already has another flight, which was forgotten or is private: each has its own load.
        if batch is None or batch.flight.landed or args[-1] in batch.ids:
            batch = self._loader.launch(args)
            self._batches.append(batch)
        batch.ids[args[-1]] = running_flight()
        if len(batch.ids) == self._loader.max_batch:
            self._batches.remove(batch)
            batch.send()
        return batch

    def _close(self) -> None:
        """Let no other flight in, and send the batches when all expected flights have settled."""
        self._loader.close_window(self._group)
        self._is_closed = True
        if self._expected == 0:
            self._send_all()

    def _send_all(self) -> None:
        for batch in self._batches:
            batch.send()
        self._batches.clear()


class BatchedLoad:
    """What the flight of one id calls to load: its part in a batch."""

    __slots__ = ("_args", "_has_begun", "_loader", "_window")

    def __init__(self, loader: "BatchLoader", args: Args) -> None:
        self._loader = loader
        self._args = args
        self._window: BatchWindow | None = None  # that expects it
        self._has_begun = False

    async def __call__(self) -> Any:
        """Load."""
        self._has_begun = True
        if self._window is None:  # not expected: its flight was up before, or is late
            return await self._loader.load(*self._args)
        batch = self._window.join(self._args)
        self._settle()
        return await batch.value_of(self._args[-1])

    def watch(self, flight: Flight[Any]) -> None:
        """Let others expect *flight*, until it has landed, or waits for a load in another process."""
        if flight.is_over or flight.waits_elsewhere or self._has_begun:
            return
        self._window = self._loader.window_of(self._args)
        self._window.expect()
        flight.on_settled = self._settle

    def _settle(self) -> None:
        if self._window is not None:
            window, self._window = self._window, None
            window.settle()


class BatchLoader:
    """The batches of one operation.

    Args:
        loader: Takes a list of ids, after the instance if it is a method; returns a mapping.
        max_batch: How many ids it is called with at most.
        max_wait: Seconds that the first flight waits for others; if zero, until the end of the tick.
    """

    def __init__(self, loader: Loader, max_batch: int, max_wait: float) -> None:
        self.max_batch = max_batch
        self.max_wait = max_wait
        self._loader = loader
        self._open: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, BatchWindow]] = WeakKeyDictionary()

    def serve(self, guard: Guard, operation: Operation, key: Callable[..., str]) -> None:
        """Load for *operation*, whose ops *key* builds."""
        self._guard = guard
        self._operation = operation
        self._key = key
        operation.is_batched = True

    async def load(self, *args: Any) -> Any:
        """Load one id, together with others that are to be loaded."""
        return await self.window_of(args).join(args).value_of(args[-1])

    def window_of(self, args: Args) -> BatchWindow:
        """Return the open window of those that can be loaded together with *args*.

        They have the instance in common, and what the loader sees of their contexts.
        """
        windows = self._windows()
        group = tuple(map(id, args[:-1])), tuple(text_of(variable.get()) for variable in self._operation.vary)
        window = windows.get(group)
        if window is None:
            window = windows[group] = BatchWindow(self, group)
        return window

    def launch(self, args: Args) -> Batch:
        """Return a new batch, which begins with *args*; its flight waits until it is sent."""
        batch = Batch()
        load = partial(self._load_all, args[:-1], batch.ids)
        op = f"{self._key(*args)} (batch)"
        batch.flight = self._guard._path.launch_batch(self._operation, op, batch.is_ready, load)
        return batch

    async def load_alone(self, *args: Any) -> Any:
        """Load one id for one caller alone, in no batch."""
        return (await self._load_all(args[:-1], {args[-1]: None})).get(args[-1])

    async def load_aside(self, receiver: Args, ids: Sequence[Any]) -> dict[Any, Any]:
        """Load *ids* for one caller, as many at once as the loader may be called with."""
        values: dict[Any, Any] = {}
        for first in range(0, len(ids), self.max_batch):
            values |= await self._load_all(receiver, dict.fromkeys(ids[first : first + self.max_batch]))
        return values

    async def _load_all(self, receiver: Args, ids: Mapping[Any, Flight[Any] | None]) -> dict[Any, Any]:
        asked = dict.fromkeys(ids)
        for flight in ids.values():
            if flight is not None:
                flight.loader_called = True
        answer = await self._loader(*receiver, list(asked))
        if not isinstance(answer, Mapping):
            message = f"{self._operation.name}: the loader returned a {type(answer).__qualname__}, not a mapping of ids"
            raise WrongAnswer(message)
        values = dict(answer)
        if not values.keys() <= asked.keys():
            one_id = next(one_id for one_id in values if one_id not in asked)
            message = (
                f"{self._operation.name}: the loader returned {one_id!r}, which it was not asked for; "
                f"it was asked for {next(iter(asked))!r}, among others. Return what was asked for, under the same ids"
            )
            raise WrongAnswer(message)
        return values

    def call_soon(self, close: Callable[[], None]) -> None:
        """Call *close* when other flights have had the time to join."""
        loop = asyncio.get_running_loop()
        if self.max_wait:
            loop.call_later(self.max_wait, close)
        else:
            loop.call_soon(close)

    def close_window(self, group: Hashable) -> None:
        """Let no other flight into the open window of *group*."""
        del self._windows()[group]

    def _windows(self) -> dict[Hashable, BatchWindow]:
        """Return the open windows of the running loop."""
        return self._open.setdefault(asyncio.get_running_loop(), {})
