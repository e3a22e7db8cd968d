"""The messages on the bus.

The first byte is the kind, then comes the sender, then the subject:

```
w <op>               the load of op is over: flights that wait for it ask again
i <instance> <op>    op was invalidated
s <instance> <op>    op was soft-invalidated: its value is stale from now on
t <instance> <tag>   everything with this tag was
c <instance>         everything was
```

The instance is one event loop's part of a guard: 22 characters. There are no separators.
"""

from typing import Literal, NamedTuple

Kind = Literal["w", "i", "s", "t", "c"]

_SENDER_LENGTHS = {b"w": 0, b"i": 22, b"s": 22, b"t": 22, b"c": 22}


class Message(NamedTuple):
    """One message.

    Attributes:
        kind: What happened.
        sender: The instance; empty for a wake-up, which concerns the sender's own waiters too.
        subject: The op, or the tag.
    """

    kind: Kind
    sender: str
    subject: str

    def pack(self) -> bytes:
        """Return the bytes to publish."""
        return f"{self.kind}{self.sender}{self.subject}".encode("utf-8", "surrogatepass")


def unpack(payload: bytes) -> Message | None:
    """Return the message, or `None` if *payload* is not one."""
    kind = payload[:1]
    length = _SENDER_LENGTHS.get(kind)
    if length is None or len(payload) <= length:
        return None
    try:
        text = payload.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    sender = text[1 : 1 + length]
    if not sender.isascii():
        return None
    return Message(text[0], sender, text[1 + length :])  # type: ignore[arg-type]  # one of the kinds


def woken(op: str) -> Message:
    """Return the message that the load of *op* is over."""
    return Message("w", "", op)
