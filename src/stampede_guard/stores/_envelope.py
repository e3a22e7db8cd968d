"""The bytes that a store keeps: values of several releases, and whose they are."""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from .._codecs.fingerprint import NO_FINGERPRINT

# An envelope holds the values of several releases side by side. Its head: magic, digest of the key, number of values.
# For each value, the one that was stored last first: fingerprint, milliseconds by which it ends before the envelope,
# token of the flight that stored it, version, number of marks, length of the body. Then the bodies: marks and payload.
# The scripts read all of these where they are.
_HEAD = struct.Struct(">4s16sB")
_ENTRY = struct.Struct(">8sQ22sQBI")
_FIRST = struct.Struct(_HEAD.format + _ENTRY.format[1:])
_MAGIC = b"SGv3"
_TOKEN = slice(16, 38)  # of an entry
_MARK = 11  # bytes of a tag's mark
LONGEST_HEADER = _HEAD.size + 4 * _ENTRY.size
COUNT_AT = _HEAD.size - 1  # where `single_value_head` stands


def key_digest(key: str) -> bytes:
    """Return the 16 bytes that bind an envelope to *key*."""
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Unsealed(NamedTuple):
    """A value in an envelope.

    Attributes:
        payload: The encoded value.
        marks: Marks that the op's tags had before it was loaded.
        token: That of the flight that stored it.
        lag: Seconds by which it ends before the envelope does.
    """

    payload: bytes
    marks: tuple[bytes, ...]
    token: bytes
    lag: float


def seal(  # noqa: PLR0917  # what there is in one
    key: str,
    payload: bytes,
    token: str,
    version: int | None = None,
    marks: Sequence[bytes] = (),
    fingerprint: bytes = NO_FINGERPRINT,
) -> bytes:
    """Return *payload* in an envelope that says whose it is, so that no other op can ever open it."""
    head = _HEAD.pack(_MAGIC, key_digest(key), 1)
    length = _MARK * len(marks) + len(payload)
    entry = _ENTRY.pack(fingerprint, 0, token.encode(), version or 0, len(marks), length)
    return b"".join((head, entry, *marks, payload))


def single_value_head(fingerprint: bytes) -> bytes:
    """Return what an envelope has from its 21st byte on if it holds one value, with *fingerprint*."""
    return b"\1" + fingerprint + bytes(8)


def entry_of(envelope: bytes, fingerprint: bytes) -> int:
    """Return where the entry with *fingerprint* begins; 0 if there is none, -1 if this is no envelope."""
    if envelope[:4] != _MAGIC or len(envelope) < _HEAD.size + _ENTRY.size * envelope[COUNT_AT]:
        return -1
    for at in range(_HEAD.size, _HEAD.size + _ENTRY.size * envelope[COUNT_AT], _ENTRY.size):
        if envelope.startswith(fingerprint, at):
            return at
    return 0


def may_have_usable(envelope: bytes, life: int, fingerprint: bytes, unwanted: bytes) -> bool:
    """Whether there may be a value that will do, as ACQUIRE sees it; what is no envelope is worth one look.

    Args:
        envelope: What is stored, or its beginning.
        life: Milliseconds that it has left; below zero if it has no end.
        fingerprint: Of the values that will do.
        unwanted: Nothing, or `=` and the token of the one that will not.
    """
    at = entry_of(envelope, fingerprint)
    if at <= 0:
        return at < 0 and envelope != b"" and not unwanted
    _, lag, token, *_ = _ENTRY.unpack_from(envelope, at)
    is_alive: bool = life < 0 or lag < life
    return is_alive and b"=" + token != unwanted


def unseal(key: str, envelope: bytes, fingerprint: bytes = NO_FINGERPRINT) -> Unsealed | None:
    """Return the value with *fingerprint*, or `None` if this is not, whole, what was stored for *key*."""
    if len(envelope) < _FIRST.size:
        return None
    magic, digest, values, first, *entry = _FIRST.unpack_from(envelope)
    begins, end = _FIRST.size, _FIRST.size + entry[-1]
    if values != 1 or first != fingerprint:
        at = entry_of(envelope, fingerprint)
        if at <= 0:
            return None
        _, *entry = _ENTRY.unpack_from(envelope, at)
        begins, end = _bodies(envelope, at)
    lag, token, _, marks, length = entry
    start, ends = begins + marks * _MARK, begins + length
    if magic != _MAGIC or digest != key_digest(key) or end != len(envelope) or start > ends:
        return None
    return Unsealed(
        envelope[start:ends],
        tuple([envelope[mark : mark + _MARK] for mark in range(begins, start, _MARK)]),
        token,
        lag / 1000,
    )


def _bodies(envelope: bytes, at: int) -> tuple[int, int]:
    """Return where the body of the entry begins that stands *at*, and where the last one ends."""
    begins = end = _HEAD.size + _ENTRY.size * envelope[COUNT_AT]
    for other in range(_HEAD.size, begins, _ENTRY.size):
        begins = end if other == at else begins
        end += _ENTRY.unpack_from(envelope, other)[-1]
    return begins, end


def token_of(envelope: bytes, fingerprint: bytes) -> bytes:
    """Return the token of the flight that stored the value with *fingerprint*; nothing if there is none."""
    at = entry_of(envelope, fingerprint)
    return envelope[at:][_TOKEN] if at > 0 else b""


def tokens_of(header: bytes) -> tuple[bytes, ...]:
    """Return the tokens of the flights whose values stand in an envelope with this *header*."""
    if header[:4] != _MAGIC or len(header) < _HEAD.size:
        return ()
    entries = range(_HEAD.size, _HEAD.size + _ENTRY.size * header[COUNT_AT], _ENTRY.size)
    return tuple([header[at:][_TOKEN] for at in entries])
