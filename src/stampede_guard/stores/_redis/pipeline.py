"""Automatic pipelining: requests of one loop iteration travel together.

The first request starts a task. When that task runs, the other requests of the same iteration have been submitted, so
no request waits for a pipeline to fill. A pipeline is bounded in requests and bytes, and has a connection of its own,
so the next pipeline does not wait for its replies.

Each request has an answer of its own. A request that is cancelled before it is sent is not sent; the reply to one that
is cancelled later is dropped, which affects neither the connection nor the other requests.
"""

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from typing import Any, TypeVar

from .. import LOST_TOGETHER, StoreOverloaded
from .node import Node
from .node import Request as Sent
from .requests import AnyRequest, CommandRequest, Pipeline, ValueRequest

R = TypeVar("R", CommandRequest, ValueRequest)

_MAX_REQUESTS = 128  # in one pipeline
_MAX_BYTES = 1 << 17  # that one pipeline sends; a larger request is sent alone
_QUEUE_TIMEOUT = 5.0  # seconds without a free connection after which waiting requests are given up
_QUEUE_LOOKS = 2  # in that time
# Recent hit ratio above which values are read with plain commands instead of ACQUIRE. In a pipeline the threshold is
# lower: a wrong guess costs one extra round trip, and a lone request gains too little to risk it.
_LIKELY, _ALMOST_CERTAIN = 0.75, 0.98
_HIT_WINDOW = 64  # reads that the ratio is taken from, about


class Pipeliner:
    """The pipelines of one event loop to one node.

    Args:
        node: The node.
        concurrency: How many pipelines may be under way at once; later requests form the next one.
        on_failure: Called when a pipeline was not answered.

    Attributes:
        is_closed: Whether requests fail at once.
    """

    def __init__(self, node: Node, concurrency: int, on_failure: Callable[[], None]) -> None:
        self._node = node
        self._concurrency = concurrency
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[AnyRequest] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._sent = 0  # pipelines
        self._timer: asyncio.TimerHandle | None = None  # while requests wait for a connection
        self._is_due = False
        self.is_closed = False
        self._hits = 0.0  # share of reads

    @property
    def is_idle(self) -> bool:
        """Whether no pipeline is under way."""
        return not self._running

    def submit(self, request: R) -> R:
        """Send *request*, which is done once there is a reply or an error; return it."""
        if self.is_closed:
            request.finish(None, ConnectionError("closed"))
            return request
        if request.is_urgent:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)
        if not self._is_due:
            self._start_pipeline()
        return request

    def _start_pipeline(self) -> None:
        if len(self._running) < self._concurrency:
            self._is_due = True
            # Not by the loop's factory: an eager task would send the first request alone. And in an empty
            # context.
            task = asyncio.Task(
                self._run_pipeline(), loop=self._loop, name=f"batch for {self._node.name}", context=Context()
            )
            self._running.add(task)
            task.add_done_callback(self._pipeline_done)
        elif self._timer is None:
            self._watch_queue(0, self._sent)

    def _watch_queue(self, looks: int, sent: int) -> None:
        """Give up what waits, if none of it was sent for too long; a stall of the event loop is one look at most."""
        if looks == _QUEUE_LOOKS and sent == self._sent:
            waiting, self._waiting = self._waiting, deque()
            _fail_all(waiting, StoreOverloaded())
        looks = looks + 1 if sent == self._sent else 0
        self._timer = None
        if self._waiting:
            pause = _QUEUE_TIMEOUT / _QUEUE_LOOKS
            self._timer = self._loop.call_later(pause, self._watch_queue, looks, self._sent, context=Context())

    def _pipeline_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if task.cancelled():
            self._is_due = False  # it may not have started; a surplus task finds an empty queue
        if self._waiting and not self._is_due:
            self._start_pipeline()

    async def _run_pipeline(self) -> None:
        """Send one pipeline, and then those that are ready when it is answered; requests under way fail together."""
        self._is_due = False
        batch = self._next_requests()
        if not batch:
            return
        pipeline: Pipeline

        async def go_on(replies: list[Any]) -> Sent | None:
            nonlocal batch, pipeline
            self._dispatch(pipeline, replies)
            batch = []  # answered
            if not self._is_due:
                batch = await self._requests_of_this_tick()
            if not batch:
                return None
            pipeline = self._pack(batch)
            return pipeline.request

        try:
            pipeline = self._pack(batch)
            await self._node.exchange_many(pipeline.request, go_on)
        except Exception as error:  # noqa: BLE001  # drivers raise more than they document
            self._fail(batch, error)
        except BaseException:  # cancelled, as at the end of the event loop, or even after that
            self._abort(batch)
            raise

    async def _requests_of_this_tick(self) -> list[AnyRequest]:
        """Return the requests that the callers just answered submit in their next step."""
        self._is_due = True
        try:
            await asyncio.sleep(0)
        finally:
            self._is_due = False
        return self._next_requests()

    def _fail(self, batch: Sequence[AnyRequest], error: Exception) -> None:
        if batch and not self._loop.is_closed():  # else all had been answered, or none can be woken
            self._on_failure()
            _fail_all(batch, error)

    def _abort(self, batch: Iterable[AnyRequest]) -> None:
        """Fail the requests of *batch* for good."""
        if not self._loop.is_closed():  # else no waiter can be woken
            for request in batch:
                request.abort()

    def _pack(self, batch: Sequence[AnyRequest]) -> Pipeline:
        self._sent += 1
        if self._waiting:
            self._start_pipeline()
        return Pipeline(batch, is_hit_likely=self._hits >= (_LIKELY if len(batch) > 1 else _ALMOST_CERTAIN))

    def _dispatch(self, pipeline: Pipeline, replies: list[Any]) -> None:
        self._waiting.extend(pipeline.dispatch(replies))
        if pipeline.reads:
            self._hits += (pipeline.hits / pipeline.reads - self._hits) * min(1, pipeline.reads / _HIT_WINDOW)

    def _next_requests(self) -> list[AnyRequest]:
        """Return the requests of the next pipeline, without cancelled ones."""
        batch: list[AnyRequest] = []
        room = _MAX_BYTES
        waiting = self._waiting
        while waiting and len(batch) < _MAX_REQUESTS:
            request = waiting.popleft()
            if request.is_done:
                continue
            room -= _MAX_BYTES if request.is_long else request.size
            if room < 0 and batch:
                waiting.appendleft(request)
                break
            batch.append(request)
        return batch

    async def aclose(self) -> None:
        """Fail all requests, and end the pipelines."""
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting = self._waiting, deque()
        self._abort(waiting)
        tasks = [*self._running]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _fail_all(requests: Iterable[AnyRequest], error: Exception) -> None:
    """Fail *requests* without an answer, each with a copy of *error*: a shared traceback would leak between callers."""
    is_first = True
    for request in requests:
        if not request.done():
            copied = _copy_of(error)
            if not is_first:
                copied.__notes__ = [LOST_TOGETHER]  # not added: a copy shares its notes with the original
            is_first = False
            request.finish(None, copied)


def _copy_of(error: Exception) -> Exception:
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001  # one that cannot be copied
        return ConnectionError(type(error).__name__)
