"""The entries of one event loop, with their tags and sizes.

A `cachetools.TTLCache` has one TTL for all entries, and an insert removes all that expired together; an `LRUCache`
moves an entry at each hit. So each slot has its own instants, and a hit sets a flag in it. `Cache` counts the entries
and calls `popitem` when there are too many; the order of evictions is that of `queues`.
"""

from collections import OrderedDict
from collections.abc import Sequence

from cachetools import Cache

from .._speed.forms import Slot
from .epochs import EntryCounters
from .queues import Queues

OVERHEAD = 400  # bytes: what an entry takes beside its value, about


class Share:
    """What one operation has in memory.

    Attributes:
        entries: How many entries.
        size: Their bytes; 0 where they are not measured.
        limited: The ops of those that have a largest share, in the order in which they were put.
    """

    __slots__ = ("entries", "limited", "size")

    def __init__(self) -> None:
        self.entries = 0
        self.size = 0
        self.limited: OrderedDict[str, None] = OrderedDict()


class Entries(Cache[str, Slot]):
    """The slots by op, and the ops by tag.

    Args:
        maxsize: How many there are at most.
        max_size: How many bytes they have at most; `None` if they are not measured.

    Attributes:
        slots: The same slots in a plain dict: a look-up in a cache of `cachetools` costs a call or two.
        ops: The ops in no order: each one's slot has its place.
        size: The bytes of all entries.
        shares: What each operation has, by its counters.
        margins: Seconds by which an entry counts as old before its life is over, of those that do.
    """

    def __init__(self, maxsize: int, max_size: int | None = None) -> None:
        super().__init__(maxsize)
        self.slots: dict[str, Slot] = {}
        self.ops: list[str] = []
        self.size = 0
        self.shares: dict[EntryCounters | None, Share] = {}
        self._max_size = max_size
        self._sizes: dict[str, int] = {}
        self._tags: dict[str, Sequence[str]] = {}
        self.margins: dict[str, float] = {}
        self._ops_by_tag: dict[str, set[str]] = {}
        self._queues = Queues(self.slots)
        self._removed: list[Slot] = []

    def add(self, op: str, slot: Slot, tags: Sequence[str] = (), size: int = 0, max_share: float | None = None) -> None:
        """Store *slot* under *op*, in place of what was there.

        Args:
            op: The op id.
            slot: A new slot.
            tags: The tags of the entry.
            size: Bytes of its value, where these are measured. One that is larger than it may be is not stored.
            max_share: Fraction of the memory that the entries of its operation may take, if that is limited.
        """
        self._remove(op)
        size = 0 if self._max_size is None else size + OVERHEAD
        share = self.shares.get(slot.generation.counters)
        if share is None:
            share = self.shares[slot.generation.counters] = Share()
        if self._make_room(share, size, max_share):
            self._link(op, slot, tags)
            share.entries += 1
            if max_share is not None:
                share.limited[op] = None
            if self._max_size is not None:
                self._sizes[op] = size
                self.size += size
                share.size += size
        self._clear_removed()

    def _make_room(self, share: Share, size: int, max_share: float | None) -> bool:
        """Evict what has to go for an entry of *size* bytes; return whether it may be stored at all."""
        if self._max_size is not None and size > self._max_size * (max_share or 1):
            return False
        if max_share is not None:
            limited, most = share.limited, max(int(max_share * self.maxsize), 1)
            while limited and (len(limited) >= most or self._exceeds(share.size + size, max_share)):
                op = next(iter(limited))
                self._queues.discard(op)
                self._note_eviction(self._unlink(op))
        while self._max_size is not None and self.size + size > self._max_size:
            self.popitem()
        return True

    def _exceeds(self, size: int, max_share: float = 1.0) -> bool:
        return self._max_size is not None and size > self._max_size * max_share

    def tags_of(self, op: str) -> Sequence[str]:
        """Return the tags of *op*."""
        return self._tags.get(op, ())

    def tagged(self, tag: str) -> tuple[str, ...]:
        """Return the ops that have *tag*."""
        return tuple(self._ops_by_tag.get(tag, ()))

    def discard(self, op: str) -> None:
        """Remove *op*, if it is there."""
        self._remove(op)
        self._clear_removed()

    def expire(self, op: str) -> None:
        """Remove *op*, which is there and over."""
        counters = self.slots[op].generation.counters
        if counters is not None:
            counters.expirations += 1
        self.discard(op)

    def popitem(self) -> tuple[str, Slot]:
        """Evict the entry whose turn it is."""
        op = self._queues.evict()
        slot = self._unlink(op)
        self._note_eviction(slot)
        return op, slot

    @staticmethod
    def _note_eviction(slot: Slot) -> None:
        if slot.generation.counters is not None:
            slot.generation.counters.evictions += 1

    def _remove(self, op: str) -> None:
        if op in self.slots:
            self._queues.discard(op)
            self._unlink(op)

    def _link(self, op: str, slot: Slot, tags: Sequence[str]) -> None:
        self[op] = self.slots[op] = slot
        self._queues.add(op)
        slot.place = len(self.ops)
        self.ops.append(op)
        if tags:
            # Two templates may produce the same tag.
            self._tags[op] = tags = tuple(dict.fromkeys(tags))
            for tag in tags:
                self._ops_by_tag.setdefault(tag, set()).add(op)

    def _unlink(self, op: str) -> Slot:
        """Undo what `add` did, but for the queue that *op* is in."""
        del self[op]
        slot = self.slots[op]
        # The last op takes the place. No call in these lines: a destructor that runs in between may come here, too.
        last = self.ops[-1]
        self.ops[slot.place] = last
        self.slots[last].place = slot.place
        del self.ops[-1]
        del self.slots[op]
        self._removed.append(slot)
        share = self.shares[slot.generation.counters]
        share.entries -= 1
        if share.limited:
            share.limited.pop(op, None)
        if self._max_size is not None:
            size = self._sizes.pop(op)
            self.size -= size
            share.size -= size
        if self.margins:
            self.margins.pop(op, None)
        for tag in self._tags.pop(op, ()) if self._tags else ():
            ops = self._ops_by_tag[tag]
            ops.discard(op)
            if not ops:
                del self._ops_by_tag[tag]
        return slot

    def _clear_removed(self) -> None:
        """Clear the removed slots. This comes last: the destructor of a value may read and write this memory."""
        while self._removed:
            self._removed.pop().clear()
