"""Envelopes: the stored bytes of one key, with values of several releases."""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from .._codecs.fingerprint import NO_FINGERPRINT

# An envelope has the values of several releases. Its head: magic, digest of the key, number of values. Then an entry
# for each value, the one that was stored last first: fingerprint; milliseconds by which the value expires before the
# envelope; milliseconds at the end of its life in which it is stale; milliseconds for which it was fresh when it was
# stored; token of the flight that stored it, version, number of marks, length of the body. Then the bodies: marks and
# payload. The scripts read the head and the entries at these offsets.
_HEAD = struct.Struct(">4s16sB")
_ENTRY = struct.Struct(">8sQQQ22sQBI")
_FIRST_BODY = _HEAD.size + _ENTRY.size  # offset of the body of a value that is alone
_MAGIC = b"SGv4"
_TOKEN = slice(32, 54)  # of an entry
_NEVER_STALE = bytes(16)  # lag and stale of an envelope's only value
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
        stale: Seconds at the end of its life in which it is stale.
        life: Seconds for which it was fresh when it was stored.
    """

    payload: bytes
    marks: tuple[bytes, ...]
    token: bytes
    lag: float
    stale: float
    life: float


def seal(  # noqa: PLR0917  # the parts of one
    key: str,
    payload: bytes,
    token: str,
    version: int | None = None,
    marks: Sequence[bytes] = (),
    fingerprint: bytes = NO_FINGERPRINT,
    *,
    life: float = 0.0,
    stale: float = 0.0,
) -> bytes:
    """Return *payload* in an envelope that only the op of *key* can open.

    It is to be stored for *life* and *stale* seconds together.
    """
    head = _HEAD.pack(_MAGIC, key_digest(key), 1)
    length = _MARK_SIZE * len(marks) + len(payload)
    lives = round(stale * 1000), round(life * 1000)
    entry = _ENTRY.pack(fingerprint, 0, *lives, token.encode(), version or 0, len(marks), length)
    return b"".join((head, entry, *marks, payload))


def window_of(envelope: bytes) -> float:
    """Return the seconds in which the last value that was stored is stale, at the end of its life."""
    _, _, stale, *_ = _ENTRY.unpack_from(envelope, _HEAD.size)
    return float(stale / 1000)


def single_value_head(fingerprint: bytes, stale: int = 0) -> bytes:
    """Return the bytes at `COUNT_AT` of an envelope with one value.

    Args:
        fingerprint: The value's.
        stale: Milliseconds at the end of its life in which it is stale.
    """
    return b"\1" + fingerprint + (bytes(8) + stale.to_bytes(8) if stale else _NEVER_STALE)


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


def freshness_of(  # noqa: PLR0917  # as ACQUIRE has it
    envelope: bytes, ttl: float, fingerprint: bytes, reject: bytes = b"", window: float = 0, margin: float = 0
) -> Literal["fresh", "old", ""]:
    """Return whether the value that a flight can use is fresh, or old and still usable; `""` if it is neither.

    Bytes that are no envelope count as a fresh value, once: the flight rejects them then.

    Args:
        envelope: The stored bytes, or their beginning.
        ttl: Milliseconds until they expire; below zero if they do not.
        fingerprint: The fingerprint of the values that the flight can use.
        reject: `b""`, or `=` and the token of a value that the flight cannot use, or `*`.
        window: Milliseconds for which the flight can use a value that is not fresh any more.
        margin: Milliseconds by which a value counts as old before it is.
    """
    at = entry_of(envelope, fingerprint)
    if at <= 0:
        return "fresh" if at < 0 and envelope != b"" and not reject else ""
    _, lag, stale, _, token, *_ = _ENTRY.unpack_from(envelope, at)
    left = ttl - lag
    if b"=" + token == reject:
        return ""
    if ttl < 0 or left > stale + margin:
        return "fresh"
    return "old" if left > max(stale - window, 0) else ""


def unseal(key: str, envelope: bytes, fingerprint: bytes = NO_FINGERPRINT) -> UnsealedValue | None:
    """Return the value with *fingerprint*; `None` without one, or if this is no complete envelope of *key*."""
    if not envelope.startswith(_MAGIC + key_digest(key)):
        return None
    is_alone = envelope.startswith(b"\1" + fingerprint, COUNT_AT) and len(envelope) >= _FIRST_BODY
    at = _HEAD.size if is_alone else entry_of(envelope, fingerprint)
    if at <= 0:
        return None
    _, lag, stale, life, token, _, count, length = _ENTRY.unpack_from(envelope, at)
    begins, end = (_FIRST_BODY, _FIRST_BODY + length) if is_alone else _bodies(envelope, at)
    start, ends = begins + count * _MARK_SIZE, begins + length
    if end != len(envelope) or start > ends:
        return None
    marks: tuple[bytes, ...] = (envelope[begins:start],)
    if count != 1:  # most values have one
        marks = tuple([envelope[mark : mark + _MARK_SIZE] for mark in range(begins, start, _MARK_SIZE)])
    return UnsealedValue(envelope[start:ends], marks, token, lag / 1000, stale / 1000, life / 1000)


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
