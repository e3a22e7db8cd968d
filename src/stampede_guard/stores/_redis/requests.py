"""What travels to a node together: the bytes of many questions, and who gets which of the replies."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..._codecs.fingerprint import NO_FINGERPRINT
from ..._tokens import new_mark, new_token
from .. import AcquireResult, Refused, Stored
from .._envelope import COUNT_AT, may_have_usable, single_value_head
from . import scripts
from .node import Command, Node, Redirected
from .resp import pack
from .scripts import Call

_SHORT = 1 << 14  # bytes of the longest value that travels with others
_ANY_LENGTH = 1 << 62

_KINDS: dict[bytes, Literal["own", "wait", "alone"]] = {b"OWN": "own", b"WAIT": "wait", b"ALONE": "alone"}
_VALUE = (int, bytes)  # what PTTL and GETRANGE reply
_MARK = ((bytes, type(None)),)  # what GET replies
_LASTING_MARK = (*_MARK, int)  # with PTTL

Marked = dict[tuple[tuple[str, ...], int], tuple[bool, tuple[Any, ...]]]  # whether tags have their marks, and these


class CommandRequest:
    """Commands, as they are.

    Args:
        commands: Each behind the type of its reply.
        is_urgent: Whether it travels with the next batch, however many wait.

    Attributes:
        answer: The replies.
        text: The commands' bytes.
        size: How many there are of these.
        kinds: Types of the replies.
    """

    __slots__ = ("answer", "is_urgent", "kinds", "size", "text")
    answer: asyncio.Future[list[Any]]
    is_long = False

    def __init__(self, *commands: Command, is_urgent: bool = False) -> None:
        self.is_urgent = is_urgent
        self.text = b"".join([pack(words) for _, *words in commands])
        self.size = len(self.text)
        self.kinds = [kind for kind, *_ in commands]


class AcquireRequest:
    """A flight's question for the value of an op, or else for the right to load it, and for the marks of its tags.

    Args:
        key: The op's; empty if only marks are asked for.
        rights: Arguments of ACQUIRE but for the length: token, or nothing for a new one once it is needed, lease in
            milliseconds, what is not wanted, previous token; `None` at a replica, which gives no rights.
        last: Last byte of the value to read.
        tags: Keys of the tags.
        life: Milliseconds that marks have to last; none at a replica, which makes none.
        fingerprint: Of the values that will do.

    Attributes:
        alone: What an envelope has in its 21st byte and after it if such a value is all that it holds.
        answer: The verdict, if nothing stands against it; else what ACQUIRE replied, or would have (`None` for no
            value at a replica), and the marks.
        is_easy: Whether any value will do, and no other node has some of the marks.
        has_missed: Whether there was no value a moment ago.
        is_long: Whether the value is too long to travel with others.
    """

    __slots__ = (
        "alone",
        "answer",
        "fingerprint",
        "has_missed",
        "is_easy",
        "is_long",
        "key",
        "last",
        "life",
        "rights",
        "tags",
    )
    answer: "asyncio.Future[AcquireResult | tuple[Any, Sequence[Any]]] | CallbackReply"
    size = 512  # about
    is_urgent = False

    def __init__(  # noqa: PLR0917  # made in a few places, thousands of times a second
        self,
        key: str,
        rights: tuple[str, int, bytes, str] | None,
        last: int,
        tags: tuple[str, ...],
        life: int,
        fingerprint: bytes = NO_FINGERPRINT,
    ) -> None:
        self.key = key
        self.fingerprint = fingerprint
        self.alone = single_value_head(fingerprint)
        self.rights = rights
        self.last = last
        self.tags = tags
        self.life = life
        self.is_easy = rights is None or not rights[2]
        self.has_missed = False
        self.is_long = False

    def acquisition(self, longest: int = _ANY_LENGTH) -> Call:
        """Return ACQUIRE, which reads one byte more than *longest* at most."""
        if not self.token:
            self.take_token(new_token())
        assert self.rights is not None
        token, lease, unwanted, previous_token = self.rights
        keys = (f"{self.key}:v", f"{self.key}:l")
        args = (token, lease, min(self.last, longest), unwanted, previous_token, self.fingerprint)
        return Call(list, scripts.ACQUIRE, keys, args)

    @property
    def token(self) -> str:
        """The flight's; empty as long as none was needed."""
        return "" if self.rights is None else self.rights[0]

    def take_token(self, token: str) -> None:
        """Ask for the right to load under *token*, unless it has one already."""
        if self.rights is not None and not self.rights[0]:
            self.rights = token, *self.rights[1:]

    def may_read(self) -> bool:
        """Whether a plain read could answer this."""
        return self.rights is None or (self.rights[2] != b"*" and not (self.has_missed or self.is_long))


class _Answered:
    """What a look has in place of its answer once that was told: the two would hold each other, and the value."""

    def done(self) -> bool:
        return True


_ANSWERED: Any = _Answered()


class CallbackReply:
    """Stands for the future of a look's answer where nobody sleeps on one: it calls who asked.

    Args:
        node: The node that is asked.
        look: The look.
        call: Called once there is an answer.

    Attributes:
        error: Why there is none.
        is_aborted: Whether nobody will ask again either, since the store is closed, or the event loop ends.
    """

    __slots__ = ("_answer", "_call", "error", "is_aborted", "look", "node")

    def __init__(self, node: Node, look: AcquireRequest, call: Callable[[], None]) -> None:
        self.node = node
        self.look = look
        self._call: Callable[[], None] | None = call
        self._answer: Any = None
        self.error: Exception | None = None
        self.is_aborted = False

    def done(self) -> bool:
        """Whether there is an answer, or will be none."""
        return self._call is None

    def set_result(self, answer: Any) -> None:
        """Be the answer."""
        self._answer = answer
        self._tell()

    def set_exception(self, error: Exception) -> None:
        """Be no answer."""
        self.error = error
        self._tell()

    def cut(self) -> None:
        """Be the end of it."""
        self.is_aborted = True
        self._tell()

    def _tell(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        self.look.answer = _ANSWERED
        call()

    @property
    def token(self) -> str:
        """The look's."""
        return self.look.token

    @property
    def result(self) -> AcquireResult | None:
        """The answer, if nothing stands against it."""
        return self._answer if self._answer.__class__ is AcquireResult else None

    def reply(self) -> Any:
        """Return the answer or raise why there is none."""
        if self.error is not None:
            raise self.error
        return self._answer


class Pipeline:
    """Questions to one node, packed.

    What is likely to be there is read by plain commands, which take the server a third of the time that scripts
    take. For a value that is not there after all, or a mark that is not, or will not be for long, the scripts follow.

    Args:
        batch: The questions.
        is_hit_likely: Whether most values are there.

    Attributes:
        said: The bytes to send, and the types of the replies.
        looks: How many asked for a value, and had no reason to expect none.
        hits: How many of them got one.
    """

    def __init__(self, batch: Sequence[CommandRequest | AcquireRequest], *, is_hit_likely: bool) -> None:
        self._questions: list[CommandRequest] = []
        self._reads: list[AcquireRequest] = []
        self._acquisitions: list[AcquireRequest] = []
        self._rest: list[AcquireRequest] = []  # which ask for marks alone
        self._longest = _SHORT if len(batch) > 1 else _ANY_LENGTH
        self.looks = self.hits = 0
        self._sets: dict[tuple[tuple[str, ...], int], None] = {}
        self._sort(batch, is_hit_likely=is_hit_likely)
        self._marks = [*dict.fromkeys((tag, life) for tags, life in self._sets for tag in tags)]
        self._reads_marks = not (self._acquisitions or self._rest)
        # Marks come last: none is older than the value that it is compared with.
        text: list[bytes] = []
        kinds: list[Any] = [*_VALUE * len(self._reads)]
        if self._reads_marks:
            text.append(_reading(self._reads, self._longest, self._marks))
            for _, life in self._marks:
                kinds += _LASTING_MARK if life else _MARK
        else:
            text.append(_reading(self._reads, self._longest, ()))
            commands = [each.acquisition(self._longest).by_digest() for each in self._acquisitions]
            for tag, life in self._marks:
                commands.append(marking(tag, life).by_digest() if life else (_MARK[0], "GET", tag))
            text += [pack(words) for _, *words in commands]
            kinds += [kind for kind, *_ in commands]
        for question in self._questions:
            text.append(question.text)
            kinds += question.kinds
        self.said = b"".join(text), kinds

    def _sort(self, batch: Sequence[CommandRequest | AcquireRequest], *, is_hit_likely: bool) -> None:
        self._sent_at = time.monotonic()
        for each in batch:
            if isinstance(each, CommandRequest):
                self._questions.append(each)
                continue
            self._sets[each.tags, each.life] = None
            if not each.key:
                self._rest.append(each)
            elif each.rights is None or (is_hit_likely and each.may_read()):
                self._reads.append(each)
            else:
                self._acquisitions.append(each)

    def open(self, replies: list[Any]) -> list[AcquireRequest]:
        """Answer everybody; return who has to ask again."""
        values = 2 * len(self._reads)
        first_mark = values + len(self._acquisitions)
        end, marks = self._open_marks(replies, first_mark)
        again: list[AcquireRequest] = []
        for look, life, value in zip(self._reads, replies[0:values:2], replies[1:values:2], strict=True):
            has_marks, marks_here = marks[look.tags, look.life]
            is_whole = value.__class__ is bytes and life.__class__ is int and len(value) <= self._longest
            if is_whole and has_marks and look.is_easy and value.startswith(look.alone, COUNT_AT):
                # What most looks come to, without further ado.
                self.looks += 1
                self.hits += 1
                if not look.answer.done():
                    left = life / 1000 if life > 0 else 0.0
                    look.answer.set_result(AcquireResult("hit", Stored(value, left), 0.0, marks_here))
            else:
                self._settle(look, _as_acquired(look, life, value), (has_marks, marks_here), again)
        for look, reply in zip(self._acquisitions, replies[values:first_mark], strict=True):
            self._settle(look, reply, marks[look.tags, look.life], again)
        for look in self._rest:
            _answer(look.answer, (None, marks[look.tags, look.life][1]))
        for question in self._questions:
            start, end = end, end + len(question.kinds)
            _answer(question.answer, replies[start:end])
        return again

    def _open_marks(self, replies: list[Any], at: int) -> tuple[int, Marked]:
        """Return where in *replies* the marks end, which begin at *at*, and for each set of tags those that it has."""
        found: dict[tuple[str, int], Any] = {}
        for tag, life in self._marks:
            found[tag, life] = replies[at]
            at += 1
            if life and self._reads_marks:
                if replies[at].__class__ is not int or replies[at] < life / 2:
                    found[tag, life] = None  # MARK has to see to it
                at += 1
        marked: Marked = {}
        for tags, life in self._sets:
            marks = tuple([found[tag, life] for tag in tags])
            marked[tags, life] = all(mark.__class__ is bytes for mark in marks), marks
        return at, marked

    def _settle(
        self, look: AcquireRequest, reply: Any, marked: tuple[bool, tuple[Any, ...]], again: list[AcquireRequest]
    ) -> None:
        """Give *look* its answer, unless it has to ask again."""
        has_marks, marks = marked
        is_hit = reply.__class__ is list and len(reply) == 3  # noqa: PLR2004  # HIT, its life, the value
        if look.rights is None or not (look.rights[2] or look.has_missed or look.is_long):
            self.looks += 1
            self.hits += is_hit
        if is_hit and self._longest < len(reply[2]) and self._longest < look.last:
            look.is_long = True
            again.append(look)
        elif (reply is None or (self._reads_marks and not has_marks)) and look.rights is not None:
            look.has_missed = True
            again.append(look)
        elif has_marks and look.is_easy and reply.__class__ is list:
            _answer(look.answer, as_verdict(reply, marks, self._sent_at))
        else:
            _answer(look.answer, (reply, marks))


def as_verdict(reply: Any, marks: tuple[bytes, ...], sent_at: float | None = None) -> AcquireResult:
    """Return what ACQUIRE's *reply* says to a question that was *sent_at* that instant."""
    kind, left = reply[0], reply[1]
    left = left / 1000 if left > 0 else 0.0
    if kind == b"HIT":
        return AcquireResult("hit", Stored(reply[2], left), 0.0, marks)
    return AcquireResult(_KINDS[kind], None, left, marks, sent_at)


def _answer(answer: asyncio.Future[Any] | CallbackReply, outcome: object) -> None:
    if not answer.done():
        answer.set_result(outcome)


def _as_acquired(look: AcquireRequest, life: Any, value: Any) -> Any:
    """Return what ACQUIRE would have replied, or `None` if that is not known: there is no value that will do."""
    if value.__class__ is bytes and life.__class__ is int:
        unwanted = b"" if look.rights is None else look.rights[2]
        return [b"HIT", life, value] if may_have_usable(value, life, look.fingerprint, unwanted) else None
    refusal = life if isinstance(life, Refused) else value
    return refusal if look.rights is None or isinstance(refusal, Redirected) else None


def _reading(looks: Sequence[AcquireRequest], longest: int, marks: Sequence[tuple[str, int]]) -> bytes:
    """Return PTTL and GETRANGE for each of *looks*, and then GET, and PTTL if it has to last, for each of *marks*.

    The life first: should the value be replaced in between, it is the older one's, and not too long.
    """
    text: list[str] = []
    for look in looks:
        key = f"{look.key}:v"
        length = len(key) if key.isascii() else len(key.encode())
        last = min(look.last, longest)
        text.append(
            f"*2\r\n$4\r\nPTTL\r\n${length}\r\n{key}\r\n"
            f"*4\r\n$8\r\nGETRANGE\r\n${length}\r\n{key}\r\n$1\r\n0\r\n${len(str(last))}\r\n{last}\r\n"
        )
    for tag, life in marks:
        length = len(tag) if tag.isascii() else len(tag.encode())
        text.append(f"*2\r\n$3\r\nGET\r\n${length}\r\n{tag}\r\n")
        if life:
            text.append(f"*2\r\n$4\r\nPTTL\r\n${length}\r\n{tag}\r\n")
    return "".join(text).encode()


def marking(tag: str, life: int) -> Call:
    """Return MARK."""
    return Call(bytes, scripts.MARK, (tag,), (new_mark(), life))
