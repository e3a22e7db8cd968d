"""Invalidations that follow a transaction: collected within it, sent when it has committed.

Sent before the commit, an invalidation is too early: a load that begins between the two reads the old
row, and nothing tells it that it is old. So they wait for the commit, and are dropped with a rollback.
When the outcome is unknown they are sent: one too many costs a load, one too few leaves an old answer.
"""

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakValueDictionary

from ._operations.options import version_number
from .errors import ConfigurationError, InvalidationPending, InvalidKey, invalidation_pending


class Transaction(Protocol):
    """An `asyncpg.transaction.Transaction`, as far as it is used here."""

    async def __aenter__(self) -> object:
        """Begin."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> object:
        """Commit, or roll back if there is an *error*."""
        ...


class Connection(Protocol):
    """An `asyncpg.Connection`, or one lent by a pool."""

    def transaction(self) -> Transaction:
        """Return a transaction, or a savepoint if there is one already."""
        ...

    def is_in_transaction(self) -> bool:
        """Return whether a transaction is open."""
        ...


class SendInvalidation(Protocol):
    """`Guard.invalidate`."""

    async def __call__(self, op: str, /, *, version: int | None, wait: bool) -> None:
        """Invalidate *op*.

        Raises:
            InvalidationPending: it was not acknowledged, and will be repeated.
        """
        ...


class SendTag(Protocol):
    """`Guard.invalidate_tag`."""

    async def __call__(self, tag: str, /, *, wait: bool) -> None:
        """Invalidate what has the *tag*.

        Raises:
            InvalidationPending: it was not acknowledged, and will be repeated.
        """
        ...


class Spelling(Protocol):
    """What knows which ops and tags are meant."""

    def resolve_op(self, op: str, values: Mapping[str, object], /) -> str:
        """Return the op that is meant."""
        ...

    def resolve_tag(self, tag: str, values: Mapping[str, object], /) -> str:
        """Return the tag that is meant."""
        ...


# A server's error says that nothing was committed, but for these: connections (08), shut-downs (57P), and
# "statement completion unknown", which proxies may send in a server's name.
_UNKNOWN = ("08", "57P", "40003")

_ATTRIBUTE = "_stampede_guard_sending"  # of event loops


class InvalidationBuffer:
    """What one block has collected; each with its sender, since blocks of several guards may be nested."""

    def __init__(self) -> None:
        self.is_open = True
        self._ops: dict[tuple[SendInvalidation, str], int | None] = {}
        self._tags: dict[tuple[SendTag, str], None] = {}

    def add_op(self, send: SendInvalidation, op: str, version: int | None) -> None:
        """Note an op; of several versions the highest counts."""
        known = self._ops.setdefault((send, op), version)
        if version is not None and (known is None or known < version):
            self._ops[send, op] = version

    def add_tag(self, send: SendTag, tag: str) -> None:
        """Note a tag."""
        self._tags[send, tag] = None

    def add_all_to(self, other: "InvalidationBuffer") -> None:
        """Note everything in *other* too."""
        for (send, op), version in self._ops.items():
            other.add_op(send, op, version)
        for send_tag, tag in self._tags:
            other.add_tag(send_tag, tag)

    def send(self) -> list[asyncio.Task[None]]:
        """Start to send everything, in tasks of its own: a cancellation of the caller does not reach them."""
        ops = [(op, send(op, version=version, wait=True)) for (send, op), version in self._ops.items()]
        tags = [(tag, send(tag, wait=True)) for send, tag in self._tags]
        tasks = [asyncio.create_task(sending, name=what) for what, sending in (*ops, *tags)]
        for task in tasks:
            _sending().add(task)
            task.add_done_callback(_sent)
        return tasks

    def __repr__(self) -> str:
        return f"<Collected {len(self._ops)} ops, {len(self._tags)} tags{'' if self.is_open else ', closed'}>"


# What the innermost open block of each connection collects. A pool's proxies cannot be referenced weakly, so this
# is; its blocks hold the connection: while the entry is there, no other connection can have that id.
_innermost: WeakValueDictionary[int, InvalidationBuffer] = WeakValueDictionary()


class AfterCommit:
    """A transaction, and the invalidations that are to be sent when it has committed.

    `async with AfterCommit(connection, …) as after:` opens the transaction; within another such block on the
    same connection it opens a savepoint, and hands what it collected to the outer block.
    """

    def __init__(
        self,
        connection: Connection,
        send_invalidation: SendInvalidation,
        send_tag: SendTag,
        lacks: frozenset[str] = frozenset(),
        spelling: Spelling | None = None,
    ) -> None:
        self._connection = connection
        self._send_invalidation = send_invalidation
        self._send_tag = send_tag
        self._lacks = lacks  # what the store cannot do: refused in the block, not when all is committed
        self._spelling = spelling  # of what callers spell out
        self._transaction: Transaction | None = None
        self._outer: InvalidationBuffer | None = None
        self._collected: InvalidationBuffer | None = None

    def invalidate(self, op: str, /, version: int | None = None, **values: object) -> None:
        """Note that *op* is to be invalidated; of several versions of one op the highest counts.

        With *values*, *op* is a template, as for `Guard.invalidate`.

        Raises:
            ConfigurationError: the block is not entered, or has ended, or the store has no versions; or *version* is
                not a whole number from 0 to 2⁵³ - 1.
            InvalidKey: *op* is not a string, or empty; or a template, and *values* are not those of its placeholders.
        """
        collected = self._checked("op", op)
        if self._spelling is not None:
            op = self._spelling.resolve_op(op, values)
        if version is not None:
            version_number(version)  # now: after the commit it would be too late
            self._check_able("versions", op)
        collected.add_op(self._send_invalidation, op, version)

    def invalidate_tag(self, tag: str, /, **values: object) -> None:
        """Note that everything that has the *tag* is to be invalidated.

        With *values*, *tag* is a template, as for `Guard.invalidate_tag`.

        Raises:
            ConfigurationError: the block is not entered, or has ended, or the store has no tags.
            InvalidKey: *tag* is not a string, or empty, or a template whose placeholders are not *values*.
        """
        collected = self._checked("tag", tag)
        if self._spelling is not None:
            tag = self._spelling.resolve_tag(tag, values)
        self._check_able("tags", tag)
        collected.add_tag(self._send_tag, tag)

    def _check_able(self, what: str, name: str) -> None:
        if what in self._lacks:
            message = f"{name}: {what} need a Redis store, which this guard does not have"
            raise ConfigurationError(message)

    def _checked(self, kind: str, name: object) -> InvalidationBuffer:
        """Return what collects *name*, which is one."""
        if self._collected is None or not self._collected.is_open:
            message = (
                f"{kind}={name!r}: this after_commit block is not open, so nothing would send the invalidation; "
                f"call it within the block, or use guard.{'invalidate' if kind == 'op' else 'invalidate_tag'}"
            )
            raise ConfigurationError(message)
        if not isinstance(name, str) or not name:
            message = f"{kind}={name!r}: give a string that is not empty"
            raise InvalidKey(message)
        return self._collected

    async def __aenter__(self) -> Self:
        """Open the transaction, or a savepoint.

        Raises:
            ConfigurationError: the connection is in a transaction that no such block opened.
        """
        if self._transaction is not None:
            message = "this after_commit block was entered before; make one for each transaction"
            raise ConfigurationError(message)
        self._outer = _innermost.get(id(self._connection))
        if self._outer is None and self._connection.is_in_transaction():
            message = (
                "after_commit: the connection is in a transaction already, whose commit would not be seen; "
                "enter after_commit first, in place of connection.transaction(): it opens the transaction"
            )
            raise ConfigurationError(message)
        self._transaction = self._connection.transaction()
        await self._transaction.__aenter__()
        self._collected = _innermost[id(self._connection)] = InvalidationBuffer()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Commit and send, or roll back and drop.

        Raises:
            InvalidationPending: committed, but not all invalidations were acknowledged.
            Exception: what the transaction's end raised.
        """
        assert self._transaction is not None
        assert self._collected is not None
        outer = self._close(self._collected)
        try:
            await self._transaction.__aexit__(kind, error, traceback)
        except BaseException as failure:
            # A savepoint whose end failed has its outer block's fate, and nobody knows that of one which is over.
            if self._outer is not None or (error is None and not _says_rolled_back(failure)):
                tasks = _pass_on(self._collected, outer)
                if isinstance(failure, Exception):
                    await _finish(tasks)
            raise
        if error is None:
            tasks = _pass_on(self._collected, outer)
            await _finish(tasks)
            _raise_failures(tasks)

    def _close(self, collected: InvalidationBuffer) -> InvalidationBuffer | None:
        """Accept no more; return what the outer block collects, if that is still open."""
        collected.is_open = False
        outer = self._outer if self._outer is not None and self._outer.is_open else None
        if outer is None:
            _innermost.pop(id(self._connection), None)  # blocks left in the wrong order: the outer's end took it away
        else:
            _innermost[id(self._connection)] = outer
        return outer

    def __repr__(self) -> str:
        return f"<AfterCommit {self._collected}>"


def _pass_on(collected: InvalidationBuffer, outer: InvalidationBuffer | None) -> list[asyncio.Task[None]]:
    """Leave it to the outer block, or start to send it if there is none."""
    if outer is None:
        return collected.send()
    collected.add_all_to(outer)
    return []


def _says_rolled_back(error: BaseException) -> bool:
    """Return whether *error* is the server's word that the COMMIT failed; asyncpg's own have no severity."""
    state = getattr(error, "sqlstate", None)
    return getattr(error, "severity_en", None) == "ERROR" and not str(state).startswith(_UNKNOWN)


def _sending() -> set[asyncio.Task[None]]:
    """Return what the running loop sends: referenced, or it could be collected before it is done.

    By the loop itself, as a task holds its loop: one that is closed meanwhile is let go of.
    """
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] | None = getattr(loop, _ATTRIBUTE, None)
    if tasks is None:
        tasks = set()
        setattr(loop, _ATTRIBUTE, tasks)
    return tasks


def _sent(task: asyncio.Task[None]) -> None:
    _sending().discard(task)
    if not task.cancelled():
        task.exception()  # looked at: the caller may have been cancelled, and nobody else asks


async def _finish(tasks: list[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)


def _raise_failures(tasks: list[asyncio.Task[None]]) -> None:
    """Raise why invalidations were not acknowledged: one error, however many are pending."""
    pending: list[InvalidationPending] = []
    names: list[str] = []
    for task in tasks:
        what = task.get_name()
        failure = InvalidationPending(f"{what}: cancelled", pending=[what]) if task.cancelled() else task.exception()
        if isinstance(failure, InvalidationPending):
            pending.append(failure)
            names.append(what)
        elif failure is not None:
            raise failure
    if len(pending) == 1:
        raise pending[0]
    if pending:
        raise invalidation_pending(names, len(tasks), "committed, but ")
