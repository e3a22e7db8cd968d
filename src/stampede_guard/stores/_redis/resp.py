"""RESP 2: packs commands and parses replies.

redis-py connects, logs in and encrypts. Requests are packed and replies are parsed here, because redis-py awaits each
line of each reply by itself, which costs more than the rest of a pipeline.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

_MAX_LINE = 1 << 16  # bytes
_MAX_DEPTH = 8  # arrays within arrays
_BULK, _INTEGER, _ARRAY, _SIMPLE, _ERROR = b"$:*+-"
_MINUS = _ERROR  # in front of the length of a null


class UnexpectedReply(Exception):  # noqa: N818  # the log shows the name
    """The bytes are no reply, or of another type than the command's replies: they belong to another command."""


class ErrorReply(NamedTuple):
    """An error, as a reply.

    Attributes:
        text: The server's text, which may quote keys and values.
    """

    text: str


class _Incomplete(Exception):  # noqa: N818  # control flow of this module
    """The reply is not complete.

    Args:
        lacking: How many bytes it lacks at least.
    """

    def __init__(self, lacking: int = 1) -> None:
        super().__init__()
        self.lacking = lacking


def pack(words: Iterable[Any]) -> bytes:
    """Return the command of *words*: bytes as they are, other objects as text."""
    sent = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n%b" % (len(sent), b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in sent]))


def parse(buffer: bytes, at: int, number: int, replies: list[Any]) -> tuple[int, int]:
    """Append up to *number* replies from *buffer*, which begin at *at*.

    Returns:
        Where the next reply begins, and how many bytes it lacks at least.

    Raises:
        UnexpectedReply: the bytes are no reply.
        ValueError: a length or an integer is no number.
    """
    find, append, size = buffer.find, replies.append, len(buffer)
    for _ in range(number):  # the two common types, without a call
        end = find(b"\r\n", at)
        kind = buffer[at] if end > at else 0
        if kind == _BULK and buffer[at + 1] != _MINUS:
            stop = end + 2 + int(buffer[at + 1 : end])
            if stop + 2 > size:
                return at, stop + 2 - size
            append(buffer[end + 2 : stop])
            at = stop + 2
        elif kind == _INTEGER:
            append(int(buffer[at + 1 : end]))
            at = end + 2
        else:
            try:
                reply, at = _parse_any(buffer, at, 0)
            except _Incomplete as incomplete:
                return at, incomplete.lacking
            append(reply)
    return at, 0


def _parse_any(buffer: bytes, at: int, depth: int) -> tuple[Any, int]:
    """Return the reply that begins at *at*, and where the next one does."""
    end = buffer.find(b"\r\n", at)
    if end < 0:
        if len(buffer) - at > _MAX_LINE:
            raise UnexpectedReply
        raise _Incomplete
    kind, word, at = buffer[at], buffer[at + 1 : end], end + 2
    if kind == _INTEGER:
        return int(word), at
    if kind == _SIMPLE:
        return word, at
    if kind == _ERROR:
        return ErrorReply(word.decode(errors="replace")), at
    if kind not in {_BULK, _ARRAY} or depth > _MAX_DEPTH:
        raise UnexpectedReply
    return _parse_sized(buffer, at, kind, int(word), depth)


def _parse_sized(buffer: bytes, at: int, kind: int, size: int, depth: int) -> tuple[Any, int]:
    if size < -1:
        raise UnexpectedReply
    if size < 0:
        return None, at
    if kind == _BULK:
        stop = at + size
        if stop + 2 > len(buffer):
            raise _Incomplete(stop + 2 - len(buffer))
        return buffer[at:stop], stop + 2
    found: list[Any] = []
    for _ in range(size):
        reply, at = _parse_any(buffer, at, depth + 1)
        found.append(reply)
    return found, at
