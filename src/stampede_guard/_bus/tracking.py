"""Key tracking: what others write or delete in Redis without telling the bus.

The server says which keys were touched, by whom it does not say: our own fills are among them. So an op that
is in L1 and was touched is looked at again: what stands in the store is still what was remembered, or else
it is forgotten.
"""

from collections.abc import Callable
from typing import NamedTuple

from .._l2.tier import Tier
from .._memory.l1 import Memory
from .._stats import Counters
from ..stores import KeysChanged

_UNCOUNTED = Counters()  # for upkeep, which is nobody's call


class _Remembered(NamedTuple):
    op: str
    token: bytes


class Tracking:
    """What one event loop's L1 holds, by key.

    Args:
        tier: Whom to ask.
        memory: The L1.
        forget: Called with an op that is not any more what was remembered.
        forget_all: Called when anything may have changed.
    """

    def __init__(
        self, tier: Tier, memory: Memory, forget: Callable[[str], object], forget_all: Callable[[], object]
    ) -> None:
        self._tier = tier
        self._memory = memory
        self._forget = forget
        self._forget_all = forget_all
        self._held: dict[str, _Remembered] = {}
        self._touched: set[str] = set()
        self._looking = False

    def remember(self, op: str, token: bytes) -> None:
        """Note that L1 got *op*, as the flight with *token* had stored it."""
        if len(self._held) > 2 * self._memory.maxsize:
            self._held = {key: held for key, held in self._held.items() if held.op in self._memory}
        key = f"{self._tier.key(op)}:v"
        self._held[key] = _Remembered(op, token)
        self._examine({key})  # it may have been touched before we held it

    def hear(self, touched: KeysChanged) -> None:
        """Have a look at what was *touched*, if it is held."""
        if touched.keys is None:
            self._held.clear()
            self._forget_all()
            return
        self._examine(self._held.keys() & set(touched.keys))

    def _examine(self, keys: set[str]) -> None:
        self._touched |= keys
        if self._touched and not self._looking:
            self._looking = True
            self._tier.look_after(self._look())

    async def _look(self) -> None:
        try:
            while self._touched:
                key = self._touched.pop()
                held = self._held.get(key)
                if held is None or held.op not in self._memory:
                    self._held.pop(key, None)
                    continue
                tokens = await self._tier.stored_by(key, _UNCOUNTED)
                if held.token not in tokens and self._held.get(key) is held:
                    del self._held[key]
                    self._forget(held.op)
        finally:
            self._looking = False
