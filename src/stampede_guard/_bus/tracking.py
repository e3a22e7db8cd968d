"""Key tracking: checks L1 after other clients write or delete keys.

The server names the keys that were written or deleted, but not the client: this library's own fills are among them.
So the tracker reads back each changed key that is in L1. If the store still has the value that L1 got, L1 keeps it;
otherwise L1 forgets it.
"""

from collections.abc import Callable
from typing import NamedTuple

from .._l2.tier import Tier
from .._memory.l1 import Memory
from ..stores import KeysChanged


class _Remembered(NamedTuple):
    op: str
    token: bytes


class Tracking:
    """The entries of one event loop's L1, by key in the store.

    Args:
        tier: The L2 that they came from.
        memory: The L1.
        forget: Called with an op after its value in the store has changed.
        forget_all: Called when any value may have changed.
    """

    def __init__(
        self, tier: Tier, memory: Memory, forget: Callable[[str], object], forget_all: Callable[[], object]
    ) -> None:
        self._tier = tier
        self._memory = memory
        self._forget = forget
        self._forget_all = forget_all
        self._remembered: dict[str, _Remembered] = {}
        self._changed: set[str] = set()
        self._is_checking = False

    def remember(self, op: str, token: bytes) -> None:
        """Note that L1 got *op*, with the value that the flight with *token* stored."""
        if len(self._remembered) > 2 * self._memory.maxsize:
            self._remembered = {key: each for key, each in self._remembered.items() if each.op in self._memory}
        key = f"{self._tier.key(op)}:v"
        self._remembered[key] = _Remembered(op, token)
        self._check({key})  # it may have changed since it was read

    def on_keys_changed(self, changed: KeysChanged) -> None:
        """Check the entries of the keys that have *changed*."""
        if changed.keys is None:
            self._remembered.clear()
            self._forget_all()
            return
        self._check(self._remembered.keys() & set(changed.keys))

    def _check(self, keys: set[str]) -> None:
        self._changed |= keys
        if self._changed and not self._is_checking:
            self._is_checking = True
            self._tier.run_upkeep(self._check_changed())

    async def _check_changed(self) -> None:
        try:
            while self._changed:
                key = self._changed.pop()
                remembered = self._remembered.get(key)
                if remembered is None or remembered.op not in self._memory:
                    self._remembered.pop(key, None)
                    continue
                tokens = await self._tier.stored_by(key)
                if remembered.token not in tokens and self._remembered.get(key) is remembered:
                    del self._remembered[key]
                    self._forget(remembered.op)
        finally:
            self._is_checking = False
