"""Envelopes: the stored bytes of one key, with values of several releases."""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from .._codecs.fingerprint import NO_FINGERPRINT

# An envelope has the values of several releases. Its head: magic, digest of the key, number of values. Then an entry
# for each value, the one that was stored last first: fingerprint, milliseconds by which the value expires before the
# envelope, token of the flight that stored it, version, number of marks, length of the body. Then the bodies: marks and
# payload. The scripts read the head and the entries at these offsets.
_HEAD = struct.Struct(">4s16sB")
_ENTRY = struct.Struct(">8sQ22sQBI")
_FIRST = struct.Struct(_HEAD.format + _ENTRY.format[1:])
_MAGIC = b"SGv3"
_TOKEN = slice(16, 38)  # of an entry
_MARK_SIZE = 11  # bytes of a tag's mark
LONGEST_HEADER = _HEAD.size + 4 * _ENTRY.size
COUNT_AT = _HEAD.size - 1  # offset of the number of values


def key_digest(key: str) -> bytes:
    """Return the 16 bytes that bind an envelope to *key*."""
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class UnsealedValue(NamedTuple):
    """A value in an envelope.

    Attributes:
        payload: The encoded value.
        marks: The marks of the op's tags from before the load.
        token: The token of the flight that stored it.
        lag: Seconds by which it expires before the envelope.
    """

    payload: bytes
    marks: tuple[bytes, ...]
    token: bytes
    lag: float


def seal(  # noqa: PLR0917  # the parts of one
    key: str,
    payload: bytes,
    token: str,
    version: int | None = None,
    marks: Sequence[bytes] = (),
    fingerprint: bytes = NO_FINGERPRINT,
) -> bytes:
    """Return *payload* in an envelope that only the op of *key* can open."""
    head = _HEAD.pack(_MAGIC, key_digest(key), 1)
    length = _MARK_SIZE * len(marks) + len(payload)
    entry = _ENTRY.pack(fingerprint, 0, token.encode(), version or 0, len(marks), length)
    return b"".join((head, entry, *marks, payload))


def single_value_head(fingerprint: bytes) -> bytes:
    """Return the bytes at `COUNT_AT` of an envelope with one value, which has *fingerprint*."""
    return b"\1" + fingerprint + bytes(8)


def entry_of(envelope: bytes, fingerprint: bytes) -> int:
    """Return the offset of the entry with *fingerprint*; 0 if there is none, -1 if this is no envelope."""
    if envelope[:4] != _MAGIC or len(envelope) < _HEAD.size or len(envelope) < _entries(envelope).stop:
        return -1
    for at in _entries(envelope):
        if envelope.startswith(fingerprint, at):
            return at
    return 0


def _entries(envelope: bytes) -> range:
    """Return the offsets of the entries."""
    return range(_HEAD.size, _HEAD.size + _ENTRY.size * envelope[COUNT_AT], _ENTRY.size)


def may_have_usable(envelope: bytes, ttl: int, fingerprint: bytes, reject: bytes) -> bool:
    """Whether there may be a value that the flight can use, as ACQUIRE decides it.

    Bytes that are no envelope count as one that may be usable, once: the flight rejects them then.

    Args:
        envelope: The stored bytes, or their beginning.
        ttl: Milliseconds until they expire; below zero if they do not.
        fingerprint: The fingerprint of the values that the flight can use.
        reject: `b""`, or `=` and the token of a value that the flight cannot use.
    """
    at = entry_of(envelope, fingerprint)
    if at <= 0:
        return at < 0 and envelope != b"" and not reject
    _, lag, token, *_ = _ENTRY.unpack_from(envelope, at)
    is_alive: bool = ttl < 0 or lag < ttl
    return is_alive and b"=" + token != reject


def unseal(key: str, envelope: bytes, fingerprint: bytes = NO_FINGERPRINT) -> UnsealedValue | None:
    """Return the value with *fingerprint*; `None` without one, or if this is no complete envelope of *key*."""
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
    start, ends = begins + marks * _MARK_SIZE, begins + length
    if magic != _MAGIC or digest != key_digest(key) or end != len(envelope) or start > ends:
        return None
    return UnsealedValue(
        envelope[start:ends],
        tuple([envelope[mark : mark + _MARK_SIZE] for mark in range(begins, start, _MARK_SIZE)]),
        token,
        lag / 1000,
    )


def _bodies(envelope: bytes, at: int) -> tuple[int, int]:
    """Return the offset of the body of the entry *at* this offset, and the end of the last body."""
    entries = _entries(envelope)
    begins = end = entries.stop
    for other in entries:
        begins = end if other == at else begins
        end += _ENTRY.unpack_from(envelope, other)[-1]
    return begins, end


def token_of(envelope: bytes, fingerprint: bytes) -> bytes:
    """Return the token of the flight that stored the value with *fingerprint*; `b""` without such a value."""
    at = entry_of(envelope, fingerprint)
    return envelope[at:][_TOKEN] if at > 0 else b""


def tokens_of(header: bytes) -> tuple[bytes, ...]:
    """Return the tokens of the flights that stored the values of an envelope with this *header*."""
    if header[:4] != _MAGIC or len(header) < _HEAD.size:
        return ()
    return tuple([header[at:][_TOKEN] for at in _entries(header)])
