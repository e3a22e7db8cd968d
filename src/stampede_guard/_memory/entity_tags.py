"""The entity tags of one operation's values, each computed once."""

from collections.abc import Callable
from hashlib import blake2b

from .._speed.forms import Slot

_CAPACITY = 8192  # entries whose tags an operation remembers; when there are more, all are forgotten
_SIZE = 16  # bytes of a digest


class EntityTags:
    """Remembers the tag of each entry of L1 for as long as the entry is there.

    It refers to the slot and not to the value: a slot that has left L1 is empty, and no longer the one that L1 has.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[str, tuple[Slot, str | None]] = {}

    def find(self, op: str, slot: Slot | None, encode: Callable[[], bytes | None]) -> str | None:
        """Return the tag of a value of *op*: the digest of what *encode* returns; `None` if it returns `None`.

        Args:
            op: The op id.
            slot: What L1 has of it, if that is the value.
            encode: Returns the bytes of the value.
        """
        known = self._known.get(op)
        if known is not None and known[0] is slot:
            return known[1]
        payload = encode()
        tag = None if payload is None else f'"{blake2b(payload, digest_size=_SIZE).hexdigest()}"'
        if slot is not None:
            if len(self._known) >= _CAPACITY:
                self._known = {}  # another thread may be reading the old one
            self._known[op] = slot, tag
        return tag
