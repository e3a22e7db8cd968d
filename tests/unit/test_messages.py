import pytest

from stampede_guard._l2.messages import Message, unpack, woken
from stampede_guard._tokens import new_token

INSTANCE = "i" * 22


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (b"wmenu-7", Message("w", "", "menu-7")),
        (b"i" + b"i" * 22 + b"menu-7", Message("i", INSTANCE, "menu-7")),
        (b"s" + b"i" * 22 + b"menu-7", Message("s", INSTANCE, "menu-7")),
        (b"t" + b"i" * 22 + b"soups", Message("t", INSTANCE, "soups")),
        (b"c" + b"i" * 22, Message("c", INSTANCE, "")),
        ("iiiiiiiiiiiiiiiiiiiiiiié ü".encode(), Message("i", INSTANCE, "é ü")),
        (b"w\xed\xa0\x80", Message("w", "", "\ud800")),
    ],
    ids=["woken", "invalidated", "stale", "tag", "everything", "not ASCII", "lone surrogate"],
)
def test_messages_are_pinned(packed: bytes, message: Message) -> None:
    """What processes of several versions say to each other stays as it is, and comes back as it went."""
    assert (packed, message) == (message.pack(), unpack(packed))


def test_woken() -> None:
    """A wake-up has no sender: whoever sent it may have waiters too."""
    assert Message("w", "", "menu-7") == woken("menu-7")


@pytest.mark.parametrize(
    "payload",
    [b"", b"x", b"W" + b"i" * 22, b"i", b"c" + b"i" * 21, b"w\xff", b"i" + "é".encode() * 11 + b"menu-7"],
    ids=["empty", "unknown", "upper case", "no sender", "short sender", "not UTF-8", "sender that is none"],
)
def test_what_is_no_message(payload: bytes) -> None:
    """Anything else, a newer version's word too, is told from a message."""
    assert unpack(payload) is None


def test_tokens_differ() -> None:
    """Each token is 22 characters that can stand anywhere in a message or a lease."""
    tokens = {new_token() for _ in range(1_000)}

    assert 1_000 == len(tokens)
    assert {22} == {len(token.encode()) for token in tokens}
