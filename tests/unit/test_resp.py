"""Bytes on the way to a Redis server and back."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stampede_guard.stores._redis.resp import ErrorReply, UnexpectedReply, pack, parse

REPLIES: list[tuple[bytes, Any]] = [
    (b"+OK\r\n", b"OK"),
    (b":7\r\n", 7),
    (b":-2\r\n", -2),
    (b"$4\r\nsoup\r\n", b"soup"),
    (b"$4\r\n\r\n\r\n\r\n", b"\r\n\r\n"),
    (b"$0\r\n\r\n", b""),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"*0\r\n", []),
    (b"*4\r\n$3\r\nHIT\r\n:1000\r\n$-1\r\n*1\r\n+OK\r\n", [b"HIT", 1000, None, [b"OK"]]),
    (b"-WRONGTYPE no\r\n", ErrorReply("WRONGTYPE no")),
    (b"-\xff\r\n", ErrorReply("\ufffd")),
]


def test_command() -> None:
    """Words are sent with their lengths in bytes, whatever they are."""
    assert pack(["SET", "käse", b"\r\n", 7]) == b"*4\r\n$3\r\nSET\r\n$5\r\nk\xc3\xa4se\r\n$2\r\n\r\n\r\n$1\r\n7\r\n"


@given(st.lists(st.sampled_from(REPLIES), min_size=1, max_size=12), st.data())
def test_replies_that_come_in_pieces(sent: list[tuple[bytes, Any]], data: st.DataObject) -> None:
    """Wherever replies are cut, the same ones are read, and none is taken for whole before it is."""
    text = b"".join(reply for reply, _ in sent)
    cut = data.draw(st.integers(0, len(text)))
    replies: list[Any] = []

    at, lacking = parse(text[:cut], 0, len(sent), replies)
    first = len(replies)
    is_over = cut == len(text)
    end, rest = parse(text, at, len(sent) - first, replies)

    assert [reply for _, reply in sent] == replies
    assert (len(text), 0) == (end, rest)
    assert (lacking == 0) == is_over
    assert cut + lacking <= len(text)


@pytest.mark.parametrize("before", [b"", b"*3\r\n$3\r\nHIT\r\n:7\r\n"])
def test_long_value_tells_how_much_it_lacks(before: bytes) -> None:
    """By itself or within an array, so that it can be waited for as a whole."""
    text = before + b"$1000000\r\n" + b"x" * 10

    assert parse(text, 0, 1, []) == (0, 1_000_000 - 10 + 2)


def test_no_more_is_read_than_was_asked_for() -> None:
    """What follows is left, for whoever notices that it is too much."""
    replies: list[Any] = []

    assert parse(b":1\r\n:2\r\n", 0, 1, replies) == (4, 0)
    assert replies == [1]


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b">3\r\n",
        b":seven\r\n",
        b"$five\r\n",
        b"$-7\r\n",
        b"*-7\r\n",
        b"*1\r\n" * 500,
        b"\x00" * 100_000,
        b"+" * 100_000,
        b"-+" * 50_000,
    ],
)
def test_nonsense(nonsense: bytes) -> None:
    """What is no reply is refused, and never waited for to its end."""
    with pytest.raises((UnexpectedReply, ValueError)):
        parse(nonsense, 0, 1, [])
