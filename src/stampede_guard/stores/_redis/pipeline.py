"""Batches: what the tasks of one iteration of the event loop ask of a node travels together.

The first to ask starts a task; when that has its turn, whoever was ready to ask has asked. So nobody waits for
a batch to fill, and who is alone travels as if there were none of this. A batch is bounded in questions and
bytes, and has a connection to itself: the next one does not wait for its answers.

Everybody waits on a future of their own. A question that is given up before it is sent is not sent; one that is
given up later is answered to nobody, and neither its connection nor the others notice.
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

_QUESTIONS = 128  # in one batch
_BYTES = 1 << 17  # that one batch sends; what is larger by itself travels by itself
_QUEUE = 5.0  # seconds that an operation waits for a connection before it is given up
# Share of looks that found a value lately, from which on the next ones are expected to. Among others that saves time;
# whoever is alone would pay for an error with a round trip, which is longer than what they save.
_LIKELY, _CERTAIN = 0.75, 0.98
_MEMORY = 64  # looks that this share is taken from, about


class Pipeliner:
    """What one event loop asks of one node.

    Args:
        node: The node.
        concurrency: How many batches may be under way at once; what is asked meanwhile makes the next.
        on_failure: Called when one of them was not answered.

    Attributes:
        is_closed: Whether nobody is answered any more.
    """

    def __init__(self, node: Node, concurrency: int, on_failure: Callable[[], None]) -> None:
        self._node = node
        self._concurrency = concurrency
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[CommandRequest | AcquireRequest] = deque()
        self._under_way: set[asyncio.Task[None]] = set()
        self._queue: list[asyncio.Future[None]] = []  # of those who wait until there is room
        self._is_due = False
        self.is_closed = False
        self._hits = 0.0  # share of looks

    @property
    def is_idle(self) -> bool:
        """Whether nobody is waiting for anything."""
        return not self._under_way

    @property
    def is_full(self) -> bool:
        """Whether no batch can set out now; whoever is about to ask waits for `room` first."""
        return not self._is_due and len(self._under_way) >= self._concurrency

    async def room(self) -> None:
        """Return when a batch can set out.

        Raises:
            StoreOverloaded: that takes too long.
        """
        try:
            async with StallTolerantTimeout(_QUEUE):
                while self.is_full:
                    turn = self._loop.create_future()
                    self._queue.append(turn)
                    await turn
        except TimeoutError:
            raise StoreOverloaded from None

    def _admit(self) -> None:
        queue, self._queue = self._queue, []
        for turn in queue:
            if not turn.done():
                turn.set_result(None)

    def ask(self, question: CommandRequest | AcquireRequest) -> asyncio.Future[Any]:
        """Return the future of *question*'s answer, which raises if there is none."""
        answer = question.answer = self._loop.create_future()
        self._put(question)
        return answer

    def tell(self, look: AcquireRequest, call: Callable[[], None]) -> CallbackReply:
        """Put *look*, and have *call* called once there is an answer or none; not on a store that is closed."""
        told = look.answer = CallbackReply(self._node, look, call)
        self._put(look)
        return told

    def _put(self, question: CommandRequest | AcquireRequest) -> None:
        if self.is_closed:
            _tell([question], ConnectionError("closed"))
            return
        if question.is_urgent:
            self._waiting.appendleft(question)
        else:
            self._waiting.append(question)
        if not self._is_due:
            self._set_out()

    def _set_out(self) -> None:
        if len(self._under_way) < self._concurrency:
            self._is_due = True
            # Not by the loop's factory: an eager task would leave with the first question alone. And in a context
            # that is nobody's.
            task = asyncio.Task(self._travel(), loop=self._loop, name=f"batch for {self._node.name}", context=Context())
            self._under_way.add(task)
            task.add_done_callback(self._arrive)

    def _arrive(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if task.cancelled():
            self._is_due = False  # it may not even have begun; a task too many finds nothing to carry
        self._admit()
        if self._waiting and not self._is_due:
            self._set_out()

    async def _travel(self) -> None:
        """Carry one batch, and then those that are ready when it is answered; what is under way fails together."""
        self._is_due = False
        batch = self._next()
        if not batch:
            return
        parcel: Pipeline

        async def go_on(replies: list[Any]) -> Request | None:
            nonlocal batch, parcel
            self._deliver(parcel, replies)
            batch = []  # answered
            if not self._is_due:
                batch = await self._those_who_ask_at_once()
            if not batch:
                return None
            parcel = self._pack(batch)
            return parcel.said

        try:
            parcel = self._pack(batch)
            await self._node.converse(parcel.said, go_on)
        except Exception as error:  # noqa: BLE001  # drivers raise more than they document
            self._fail(batch, error)
        except BaseException:  # cancelled, as at the end of the event loop, or even after that
            self._cut(batch)
            raise

    async def _those_who_ask_at_once(self) -> list[CommandRequest | AcquireRequest]:
        """Return what is asked by those who have just been answered, when each of them has had a turn."""
        self._is_due = True
        self._admit()
        try:
            await asyncio.sleep(0)
        finally:
            self._is_due = False
        return self._next()

    def _fail(self, batch: Sequence[CommandRequest | AcquireRequest], error: Exception) -> None:
        if batch and not self._loop.is_closed():  # else everybody had been answered, or nobody is left
            self._on_failure()
            _tell(batch, error)

    def _cut(self, batch: Iterable[CommandRequest | AcquireRequest]) -> None:
        """Let nobody of *batch* wait any more, nor begin anything new."""
        if self._loop.is_closed():  # and nobody does
            return
        rest: list[CommandRequest | AcquireRequest] = []
        for question in batch:
            if isinstance(question.answer, CallbackReply):
                question.answer.cut()
            else:
                rest.append(question)
        _tell(rest, ConnectionError("closed"))

    def _pack(self, batch: Sequence[CommandRequest | AcquireRequest]) -> Pipeline:
        if self._waiting:
            self._set_out()
        return Pipeline(batch, is_hit_likely=self._hits >= (_LIKELY if len(batch) > 1 else _CERTAIN))

    def _deliver(self, parcel: Pipeline, replies: list[Any]) -> None:
        self._waiting.extend(parcel.open(replies))
        if parcel.looks:
            self._hits += (parcel.hits / parcel.looks - self._hits) * min(1, parcel.looks / _MEMORY)

    def _next(self) -> list[CommandRequest | AcquireRequest]:
        """Return what travels together; leave out what was given up."""
        batch: list[CommandRequest | AcquireRequest] = []
        room = _BYTES
        waiting = self._waiting
        while waiting and len(batch) < _QUESTIONS:
            question = waiting[0]
            if question.answer.done():
                waiting.popleft()
                continue
            room -= _BYTES if question.is_long else question.size
            if room < 0 and batch:
                break
            batch.append(question)
            waiting.popleft()
        return batch

    async def aclose(self) -> None:
        """Answer nobody any more."""
        self.is_closed = True
        self._cut(self._waiting)
        self._waiting.clear()
        tasks = [*self._under_way]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _tell(questions: Iterable[CommandRequest | AcquireRequest], error: Exception) -> None:
    """Tell everybody who has no answer yet, each by an exception of their own: a shared one would tell of others."""
    is_first = True
    for question in questions:
        answer = question.answer
        if not answer.done():
            twin = _twin(error)
            if not is_first:
                twin.__notes__ = [LOST_TOGETHER]  # not added: a copy shares its notes with the original
            is_first = False
            answer.set_exception(twin)
            if isinstance(answer, asyncio.Future):
                answer.exception()  # seen: who was cancelled just now will not look


def _twin(error: Exception) -> Exception:
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001  # one that cannot be made again from its arguments
        return ConnectionError(type(error).__name__)
