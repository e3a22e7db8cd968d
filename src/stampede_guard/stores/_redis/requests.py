"""Requests to a node, and the pipeline that packs many of them."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, Literal

from ..._codecs.fingerprint import NO_FINGERPRINT
from ..._tokens import new_mark
from .. import AcquireRequest, AcquireResult, Refused, Stored
from .._envelope import COUNT_AT, freshness_of, single_value_head
from . import scripts
from .node import Command, Node, Redirected
from .resp import pack
from .scripts import Call

_SHORT = 1 << 14  # bytes of the longest value that travels with others
_ANY_LENGTH = 1 << 62

_KINDS: dict[bytes, Literal["own", "wait", "alone", "backoff"]] = {
    b"OWN": "own",
    b"WAIT": "wait",
    b"ALONE": "alone",
    b"BACKOFF": "backoff",
}
_VALUE = (int, bytes)  # what PTTL and GETRANGE reply
_MARK = ((bytes, type(None)),)  # what GET replies
_LASTING_MARK = (*_MARK, int)  # with PTTL

Marked = dict[tuple[tuple[str, ...], int], tuple[bool, tuple[Any, ...]]]  # whether tags have their marks, and these


class Request:
    """What a pipeline carries, and its reply; awaiting it returns the reply.

    It is a future whose callback runs at once: one of asyncio's runs an iteration of the event loop later. There is at
    most one callback, and none is called after `cancel`.
    """

    __slots__ = ("_callback", "_error", "_reply", "is_done")
    is_long = False
    is_urgent = False
    size = 512  # about

    def __init__(self) -> None:
        self._callback: Callable[[Any], object] | None = None
        self._reply: Any = None
        self._error: Exception | None = None
        self.is_done = False

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call *callback* with this request once it is done."""
        if self.is_done:
            callback(self)
        else:
            self._callback = callback

    def done(self) -> bool:
        """Whether there is a reply, or will be none."""
        return self.is_done

    def finish(self, reply: object, error: Exception | None = None) -> None:
        """Set the reply or the error, unless the request is done."""
        if not self.is_done:
            self.is_done = True
            self._reply = reply
            self._error = error
            callback = self._callback
            if callback is not None:
                self._callback = None
                callback(self)

    def abort(self) -> None:
        """Cancel because the store is closed or the event loop ends; the callback is called."""
        self.finish(_ABORTED, ConnectionError("closed"))

    def cancel(self) -> None:
        """Drop the callback and the reply."""
        self._callback = None
        self.is_done = True

    def cancelled(self) -> bool:
        """Whether the request was aborted."""
        return self._reply is _ABORTED

    def exception(self) -> Exception | None:
        """Return the error."""
        return self._error

    def result(self) -> Any:
        """Return the reply or raise the error."""
        if self._error is not None:
            raise self._error
        return self._reply

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.is_done:
            done = asyncio.get_running_loop().create_future()
            self._callback = partial(_wake, done)
            try:
                yield from done
            except BaseException:
                self.cancel()
                raise
        return self.result()


_ABORTED = object()


def _wake(waiter: asyncio.Future[None], _: Request) -> None:
    if not waiter.done():
        waiter.set_result(None)


class CommandRequest(Request):
    """Commands that are sent as they are.

    Args:
        commands: Each behind the type of its reply.
        is_urgent: Whether it goes into the next pipeline, ahead of the queue.

    Attributes:
        text: The commands' bytes.
        size: How many there are of these.
        kinds: Types of the replies.
    """

    __slots__ = ("is_urgent", "kinds", "size", "text")

    def __init__(self, *commands: Command, is_urgent: bool = False) -> None:
        super().__init__()
        self.is_urgent = is_urgent
        self.text = b"".join([pack(words) for _, *words in commands])
        self.size = len(self.text)
        self.kinds = [kind for kind, *_ in commands]


FollowUp = Callable[["ValueRequest", Any, Sequence[Any]], Coroutine[Any, Any, AcquireResult]]


class ValueRequest(Request):
    """A request for the value of an op or for its lease, and for the marks of the op's tags.

    The reply is an `AcquireResult`, if it is complete. Else it is ACQUIRE's reply or its equivalent (`None` for no
    value at a replica) and the marks, from which *follow_up* makes the result when the request is awaited.

    Args:
        node: The node.
        key: The op's; empty if only marks are requested.
        last: Last byte of the value to read.
        tags: Keys of the tags.
        ttl: Milliseconds that marks have to last; none at a replica, which makes none.
        fingerprint: Of the usable values.
        asked: The flight's request; `None` at a replica, which grants no lease.
        follow_up: Completes an incomplete reply; without it the reply is returned as it is.
        margin: Milliseconds by which a value counts as old before it is.

    Attributes:
        stale: Milliseconds; how long the values are stale that a plain read may be answered with at once.
        is_easy: Whether any value is usable, and this node has all marks.
        has_missed: Whether a plain read has found no value.
        is_long: Whether the value is too long to share a pipeline.
    """

    __slots__ = (
        "_follow_up",
        "asked",
        "fingerprint",
        "has_missed",
        "is_easy",
        "is_long",
        "key",
        "last",
        "margin",
        "node",
        "stale",
        "tags",
        "ttl",
    )

    def __init__(  # noqa: PLR0913, PLR0917  # made in a few places, thousands of times a second
        self,
        node: Node,
        key: str,
        last: int,
        tags: tuple[str, ...],
        ttl: int,
        fingerprint: bytes = NO_FINGERPRINT,
        asked: AcquireRequest | None = None,
        follow_up: FollowUp | None = None,
        margin: int = 0,
    ) -> None:
        self._callback = None
        self._reply = None
        self._error = None
        self.is_done = False
        self._follow_up = follow_up
        self.node = node
        self.key = key
        self.last = last
        self.tags = tags
        self.ttl = ttl
        self.fingerprint = fingerprint
        self.stale = 0 if asked is None or not asked.window else round(asked.window * 1000)
        self.margin = margin
        self.asked = asked
        self.is_easy = asked is None or not asked.reject
        self.has_missed = False
        self.is_long = False

    def acquisition(self, longest: int = _ANY_LENGTH) -> Call:
        """Return ACQUIRE, which reads one byte more than *longest* at most."""
        asked = self.asked
        assert asked is not None
        keys = (f"{self.key}:v", f"{self.key}:l")
        last, lease = min(self.last, longest), round(asked.lease * 1000) or 1
        lives = self.stale, self.margin
        args = (asked.token, lease, last, asked.reject, asked.previous_token, self.fingerprint, *lives)
        return Call(list, scripts.ACQUIRE, keys, args)

    @property
    def may_read(self) -> bool:
        """Whether a plain read could answer this."""
        return self.asked is None or (self.asked.reject != b"*" and not (self.has_missed or self.is_long))

    def result(self) -> Any:
        """Return the result, or raise the error.

        Raises:
            InvalidStateError: the result is not complete.
        """
        reply = self._reply
        if reply.__class__ is AcquireResult:
            return reply
        if self._error is None and self._follow_up is not None:
            raise asyncio.InvalidStateError
        return super().result()

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from super().__await__())
        except asyncio.InvalidStateError:
            assert self._follow_up is not None
            reply, marks = self._reply
            return (yield from self._follow_up(self, reply, marks).__await__())


AnyRequest = CommandRequest | ValueRequest


class Pipeline:
    """Questions to one node, packed.

    What is likely to be there is read by plain commands, which take the server a third of the time of scripts
    take. For a value that is not there after all, or a mark that is not, or will not be for long, the scripts follow.

    Args:
        batch: The questions.
        is_hit_likely: Whether most values are there.

    Attributes:
        said: The bytes to send, and the types of the replies.
        reads: How many requests asked for a value that was not known to be missing.
        hits: How many of these found one.
    """

    def __init__(self, batch: Sequence[AnyRequest], *, is_hit_likely: bool) -> None:
        self._commands: list[CommandRequest] = []
        self._reads: list[ValueRequest] = []
        self._acquisitions: list[ValueRequest] = []
        self._mark_reads: list[ValueRequest] = []  # for marks only
        self._longest = _SHORT if len(batch) > 1 else _ANY_LENGTH
        self.reads = self.hits = 0
        self._sets: dict[tuple[tuple[str, ...], int], None] = {}
        self._sort(batch, is_hit_likely=is_hit_likely)
        self._marks = [*dict.fromkeys((tag, ttl) for tags, ttl in self._sets for tag in tags)]
        self._uses_plain_reads = not (self._acquisitions or self._mark_reads)
        # Marks come last: none is older than the value that it is compared with.
        text: list[bytes] = []
        kinds: list[Any] = [*_VALUE * len(self._reads)]
        if self._uses_plain_reads:
            text.append(_reading(self._reads, self._longest, self._marks))
            for _, ttl in self._marks:
                kinds += _LASTING_MARK if ttl else _MARK
        else:
            text.append(_reading(self._reads, self._longest, ()))
            commands = [each.acquisition(self._longest).by_digest() for each in self._acquisitions]
            for tag, ttl in self._marks:
                commands.append(marking(tag, ttl).by_digest() if ttl else (_MARK[0], "GET", tag))
            text += [pack(words) for _, *words in commands]
            kinds += [kind for kind, *_ in commands]
        for each in self._commands:
            text.append(each.text)
            kinds += each.kinds
        self.request = b"".join(text), kinds

    def _sort(self, batch: Sequence[AnyRequest], *, is_hit_likely: bool) -> None:
        self._sent_at = time.monotonic()
        for each in batch:
            if isinstance(each, CommandRequest):
                self._commands.append(each)
                continue
            self._sets[each.tags, each.ttl] = None
            if not each.key:
                self._mark_reads.append(each)
            elif each.asked is None or (is_hit_likely and each.may_read):
                self._reads.append(each)
            else:
                self._acquisitions.append(each)

    def dispatch(self, replies: list[Any]) -> list[ValueRequest]:
        """Give each request its part of *replies*; return the requests that have to be sent again."""
        values = 2 * len(self._reads)
        first_mark = values + len(self._acquisitions)
        end, marks = self._read_marks(replies, first_mark)
        again: list[ValueRequest] = []
        fingerprint, stale, alone, hits = b"", 0, b"", 0
        for request, ttl, value in zip(self._reads, replies[0:values:2], replies[1:values:2], strict=True):
            has_marks, marks_here = marks[request.tags, request.ttl]
            if request.fingerprint is not fingerprint or request.stale != stale:  # there are few
                fingerprint, stale = request.fingerprint, request.stale
                alone = single_value_head(fingerprint, stale)
            is_whole = value.__class__ is bytes and ttl.__class__ is int and len(value) <= self._longest
            if (
                is_whole
                and has_marks
                and request.is_easy
                and ttl > stale + request.margin
                and value.startswith(alone, COUNT_AT)
            ):
                # The common case, kept short.
                hits += 1
                request.finish(AcquireResult("hit", Stored(value, ttl / 1000), 0.0, marks_here))
            else:
                self._settle(request, _as_acquired(request, ttl, value), (has_marks, marks_here), again)
        self.reads += hits
        self.hits += hits
        for request, reply in zip(self._acquisitions, replies[values:first_mark], strict=True):
            self._settle(request, reply, marks[request.tags, request.ttl], again)
        for request in self._mark_reads:
            request.finish((None, marks[request.tags, request.ttl][1]))
        for each in self._commands:
            start, end = end, end + len(each.kinds)
            each.finish(replies[start:end])
        # The task that called this may live on; the values need not.
        self._reads, self._acquisitions = [], []
        return again

    def _read_marks(self, replies: list[Any], at: int) -> tuple[int, Marked]:
        """Return where in *replies* the marks end, which begin at *at*, and for each set of tags those that it has."""
        found: dict[tuple[str, int], Any] = {}
        for tag, ttl in self._marks:
            found[tag, ttl] = replies[at]
            at += 1
            if ttl and self._uses_plain_reads:
                if replies[at].__class__ is not int or replies[at] < ttl / 2:
                    found[tag, ttl] = None  # MARK has to make or extend it
                at += 1
        marks_of: Marked = {}
        for tags, ttl in self._sets:
            marks = tuple([found[tag, ttl] for tag in tags])
            marks_of[tags, ttl] = all(mark.__class__ is bytes for mark in marks), marks
        return at, marks_of

    def _settle(
        self, request: ValueRequest, reply: Any, marks_of: tuple[bool, tuple[Any, ...]], again: list[ValueRequest]
    ) -> None:
        """Give *request* its answer, unless it has to be sent again."""
        has_marks, marks = marks_of
        is_answer = reply.__class__ is list
        is_hit = is_answer and reply[0] == b"HIT"
        if request.asked is None or not (request.asked.reject or request.has_missed or request.is_long):
            self.reads += 1
            self.hits += is_hit
        length = len(reply[2]) if is_answer and len(reply) > 2 else 0  # noqa: PLR2004  # with a value
        if self._longest < length and self._longest < request.last:
            request.is_long = True
            again.append(request)
        elif (reply is None or (self._uses_plain_reads and not has_marks)) and request.asked is not None:
            request.has_missed = True
            again.append(request)
        elif has_marks and request.is_easy and is_answer:
            request.finish(as_result(reply, marks, self._sent_at))
        else:
            request.finish((reply, marks))


def as_result(reply: Any, marks: tuple[bytes, ...], sent_at: float | None = None) -> AcquireResult:
    """Return ACQUIRE's *reply* as the result of a request that was *sent_at* that instant."""
    kind, left = reply[0], reply[1]
    left = left / 1000 if left > 0 else 0.0
    if kind == b"HIT":
        return AcquireResult("hit", Stored(reply[2], left), 0.0, marks)
    if len(reply) == 2:  # noqa: PLR2004  # without a value or a text
        return AcquireResult(_KINDS[kind], None, left, marks, sent_at)
    _, _, value, ttl, *text = reply
    stored = Stored(value, ttl / 1000 if ttl > 0 else 0.0) if value else None
    return AcquireResult(_KINDS[kind], stored, left, marks, sent_at, b"".join(text).decode("ascii", "replace"))


def _as_acquired(request: ValueRequest, ttl: Any, value: Any) -> Any:
    """Return what ACQUIRE would have replied; `None` if there is no fresh value."""
    if value.__class__ is bytes and ttl.__class__ is int:
        unwanted = b"" if request.asked is None else request.asked.reject
        freshness = freshness_of(value, ttl, request.fingerprint, unwanted, margin=request.margin)
        return [b"HIT", ttl, value] if freshness == "fresh" else None
    refusal = ttl if isinstance(ttl, Refused) else value
    return refusal if request.asked is None or isinstance(refusal, Redirected) else None


def _reading(requests: Sequence[ValueRequest], longest: int, marks: Sequence[tuple[str, int]]) -> bytes:
    """Return PTTL and GETRANGE for each of *requests*, and then GET, and PTTL if it has to last, for each of *marks*.

    The ttl first: should the value be replaced in between, it is the older one's, and not too long.
    """
    text: list[str] = []
    last = min(requests[0].last, longest) if requests else 0  # of one store, so all have the same
    bounds = f"$1\r\n0\r\n${len(str(last))}\r\n{last}\r\n"
    for request in requests:
        key = request.key
        length = 2 + (len(key) if key.isascii() else len(key.encode()))
        text.append(
            f"*2\r\n$4\r\nPTTL\r\n${length}\r\n{key}:v\r\n*4\r\n$8\r\nGETRANGE\r\n${length}\r\n{key}:v\r\n{bounds}"
        )
    for tag, ttl in marks:
        length = len(tag) if tag.isascii() else len(tag.encode())
        text.append(f"*2\r\n$3\r\nGET\r\n${length}\r\n{tag}\r\n")
        if ttl:
            text.append(f"*2\r\n$4\r\nPTTL\r\n${length}\r\n{tag}\r\n")
    return "".join(text).encode()


def marking(tag: str, ttl: int) -> Call:
    """Return MARK."""
    return Call(bytes, scripts.MARK, (tag,), (new_mark(), ttl))
