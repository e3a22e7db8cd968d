"""Automatic pipelining: requests of one event-loop iteration to one node are sent together.

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
from typing import Any

from .. import LOST_TOGETHER, StoreOverloaded
from .._timeouts import StallTolerantTimeout
from .node import Node, Request
from .requests import AcquireRequest, CallbackReply, CommandRequest, Pipeline

_MAX_REQUESTS = 128  # in one pipeline
_MAX_BYTES = 1 << 17  # that one pipeline sends; a larger request is sent alone
_QUEUE_TIMEOUT = 5.0  # seconds that an operation waits for a connection before it is given up
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
        self._waiting: deque[CommandRequest | AcquireRequest] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._capacity_waiters: list[asyncio.Future[None]] = []
        self._is_due = False
        self.is_closed = False
        self._hits = 0.0  # share of reads

    @property
    def is_idle(self) -> bool:
        """Whether no pipeline is under way."""
        return not self._running

    @property
    def is_full(self) -> bool:
        """Whether no pipeline can start now; a caller awaits `wait_for_capacity` before it submits."""
        return not self._is_due and len(self._running) >= self._concurrency

    async def wait_for_capacity(self) -> None:
        """Return when a pipeline can start.

        Raises:
            StoreOverloaded: that takes too long.
        """
        try:
            async with StallTolerantTimeout(_QUEUE_TIMEOUT):
                while self.is_full:
                    waiter = self._loop.create_future()
                    self._capacity_waiters.append(waiter)
                    await waiter
        except TimeoutError:
            raise StoreOverloaded from None

    def _wake_waiting(self) -> None:
        queue, self._capacity_waiters = self._capacity_waiters, []
        for waiter in queue:
            if not waiter.done():
                waiter.set_result(None)

    def submit(self, request: CommandRequest | AcquireRequest) -> asyncio.Future[Any]:
        """Return the future of *request*'s answer, which raises if there is none."""
        answer = request.answer = self._loop.create_future()
        self._enqueue(request)
        return answer

    def submit_callback(self, request: AcquireRequest, call: Callable[[], None]) -> CallbackReply:
        """Send *request*, and call *call* once there is an answer or an error; not on a closed store."""
        reply = request.answer = CallbackReply(self._node, request, call)
        self._enqueue(request)
        return reply

    def _enqueue(self, request: CommandRequest | AcquireRequest) -> None:
        if self.is_closed:
            _fail_all([request], ConnectionError("closed"))
            return
        if request.is_urgent:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)
        if not self._is_due:
            self._start_pipeline()

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

    def _pipeline_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if task.cancelled():
            self._is_due = False  # it may not have started; a surplus task finds an empty queue
        self._wake_waiting()
        if self._waiting and not self._is_due:
            self._start_pipeline()

    async def _run_pipeline(self) -> None:
        """Send one pipeline, and then those that are ready when it is answered; requests under way fail together."""
        self._is_due = False
        batch = self._next_requests()
        if not batch:
            return
        pipeline: Pipeline

        async def go_on(replies: list[Any]) -> Request | None:
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

    async def _requests_of_this_tick(self) -> list[CommandRequest | AcquireRequest]:
        """Return the requests that the callers just answered submit in their next step."""
        self._is_due = True
        self._wake_waiting()
        try:
            await asyncio.sleep(0)
        finally:
            self._is_due = False
        return self._next_requests()

    def _fail(self, batch: Sequence[CommandRequest | AcquireRequest], error: Exception) -> None:
        if batch and not self._loop.is_closed():  # else all had been answered, or none can be woken
            self._on_failure()
            _fail_all(batch, error)

    def _abort(self, batch: Iterable[CommandRequest | AcquireRequest]) -> None:
        """Fail the requests of *batch* for good."""
        if self._loop.is_closed():  # no waiter can be woken
            return
        rest: list[CommandRequest | AcquireRequest] = []
        for request in batch:
            if isinstance(request.answer, CallbackReply):
                request.answer.abort()
            else:
                rest.append(request)
        _fail_all(rest, ConnectionError("closed"))

    def _pack(self, batch: Sequence[CommandRequest | AcquireRequest]) -> Pipeline:
        if self._waiting:
            self._start_pipeline()
        return Pipeline(batch, is_hit_likely=self._hits >= (_LIKELY if len(batch) > 1 else _ALMOST_CERTAIN))

    def _dispatch(self, pipeline: Pipeline, replies: list[Any]) -> None:
        self._waiting.extend(pipeline.dispatch(replies))
        if pipeline.reads:
            self._hits += (pipeline.hits / pipeline.reads - self._hits) * min(1, pipeline.reads / _HIT_WINDOW)

    def _next_requests(self) -> list[CommandRequest | AcquireRequest]:
        """Return the requests of the next pipeline, without cancelled ones."""
        batch: list[CommandRequest | AcquireRequest] = []
        room = _MAX_BYTES
        waiting = self._waiting
        while waiting and len(batch) < _MAX_REQUESTS:
            request = waiting[0]
            if request.answer.done():
                waiting.popleft()
                continue
            room -= _MAX_BYTES if request.is_long else request.size
            if room < 0 and batch:
                break
            batch.append(request)
            waiting.popleft()
        return batch

    async def aclose(self) -> None:
        """Fail all requests, and end the pipelines."""
        self.is_closed = True
        self._abort(self._waiting)
        self._waiting.clear()
        tasks = [*self._running]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _fail_all(requests: Iterable[CommandRequest | AcquireRequest], error: Exception) -> None:
    """Fail *requests* without an answer, each with a copy of *error*: a shared traceback would leak between callers."""
    is_first = True
    for request in requests:
        answer = request.answer
        if not answer.done():
            copied = _copy_of(error)
            if not is_first:
                copied.__notes__ = [LOST_TOGETHER]  # not added: a copy shares its notes with the original
            is_first = False
            answer.set_exception(copied)
            if isinstance(answer, asyncio.Future):
                answer.exception()  # retrieved: a waiter that was just cancelled will not do it


def _copy_of(error: Exception) -> Exception:
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001  # one that cannot be copied
        return ConnectionError(type(error).__name__)
