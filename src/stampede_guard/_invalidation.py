"""Invalidations: forget in this process, in the store, in other processes.

What happens in this process happens before anything is awaited: no caller may read the old value in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ._l2.sender import Confirmation
from ._loops import Change, LoopStates
from ._memory.epochs import Epochs
from ._operations.operation import Operation
from ._operations.options import version_number
from .errors import invalidation_pending


@dataclass(slots=True, eq=False)
class Invalidator:
    """Carries out the invalidations of one guard."""

    _states: LoopStates
    _epochs: Epochs

    async def invalidate(
        self, op: str, *, version: int | None = None, wait: bool = True, is_soft: bool = False
    ) -> None:
        """Forget *op* everywhere, as `Guard.invalidate` says; or if *is_soft* let it be old, as `Guard.expire` says."""
        if version is not None:
            version_number(version)
            self._states.running().check_able(f"{op}: version={version!r}", "versions")
        await self._confirm(op, self._announce(op, version, is_soft=is_soft), wait=wait)

    async def invalidate_all(self, ops: Sequence[str], *, is_soft: bool = False) -> None:
        """Forget all *ops* everywhere, all at once; or if *is_soft* let them be old.

        Raises:
            InvalidationPending: the store has not confirmed each of them.
        """
        sent = [(op, self._announce(op, is_soft=is_soft)) for op in ops]
        pending = [op for op, confirmation in sent if confirmation is not None and not await confirmation.wait()]
        if pending:
            raise invalidation_pending(pending, len(sent))

    async def invalidate_of(self, operation: Operation, ops: Sequence[str], *, is_soft: bool = False) -> None:
        """Forget *ops* of *operation*, or let them be old: in this process alone, when no other has them, or is told.

        Raises:
            InvalidationPending: the store has not confirmed each of them.
        """
        has_bus = self._states.running().backplane is not None
        if operation.is_local or not (operation.policy.l2_ttl is not None or has_bus):
            for op in ops:
                self.forget(op, is_soft=is_soft)
        else:
            await self.invalidate_all(ops, is_soft=is_soft)

    def forget(self, op: str, *, is_soft: bool = False) -> None:
        """Forget *op* in this process alone, or let it be old."""
        self._epochs.bump(op)
        self._states.tell(Change("old" if is_soft else "op", op))

    async def invalidate_tag(self, tag: str, *, wait: bool = True) -> None:
        """Forget everything that has *tag*, as `Guard.invalidate_tag` says."""
        self._states.running().check_able(f"tag={tag!r}", "tags")
        self._epochs.bump_tag(tag)
        await self._confirm(tag, self._states.tell(Change("tag", tag, is_stored=True)), wait=wait)

    async def clear(self, *, wait: bool = True) -> None:
        """Forget everything, as `Guard.clear` says."""
        self._states.running().check_able("clear", "tags")
        self._epochs.bump_all()
        await self._confirm("everything", self._states.tell(Change("all", is_stored=True)), wait=wait)

    def _announce(self, op: str, version: int | None = None, *, is_soft: bool = False) -> Confirmation | None:
        """Forget *op* in all event loops, or let it be old, and have the store told."""
        self._states.running()  # or raise: the guard is closed
        self._epochs.bump(op)
        return self._states.tell(Change("old" if is_soft else "op", op, version, is_stored=True))

    @staticmethod
    async def _confirm(what: str, confirmation: Confirmation | None, *, wait: bool) -> None:
        if wait and confirmation is not None and not await confirmation.wait():
            raise invalidation_pending([what], 1)
