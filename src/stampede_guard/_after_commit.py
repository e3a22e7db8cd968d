"""Invalidations that follow a transaction: collected in it, sent after its commit.

An invalidation that is sent before the commit is too early: a load that begins between the two reads the old row, and
is stored. So invalidations are sent after the commit, and dropped after a rollback. When the outcome is unknown, they
are sent: an unneeded invalidation costs a load, a missing one leaves stale data.
"""

import asyncio
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakValueDictionary

from ._operations.options import version_number
from ._operations.registry import Registry
from .errors import ConfigurationError, InvalidationPending, InvalidKey, invalidation_pending


class Transaction(Protocol):
    """The part of `asyncpg.transaction.Transaction` that is used here."""

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


class TransactionInvalidator(Protocol):
    """The part of an `Invalidator` that is used here. Both methods raise `InvalidationPending`."""

    async def invalidate(self, op: str, *, version: int | None, wait: bool) -> None:
        """Invalidate *op*."""

    async def invalidate_tag(self, tag: str, *, wait: bool) -> None:
        """Invalidate every op that has *tag*."""


# An error of the server means that nothing was committed, except these: connection failures (08), shut-downs (57P),
# and "statement completion unknown", which a proxy may send in the name of the server.
_OUTCOME_UNKNOWN = ("08", "57P", "40003")

_TASKS_ATTRIBUTE = "_stampede_guard_sending"  # of an event loop


class InvalidationBuffer:
    """The invalidations of one block, each with its invalidator: blocks of several guards may be nested."""

    def __init__(self) -> None:
        self.is_open = True
        self._ops: dict[tuple[TransactionInvalidator, str], int | None] = {}
        self._tags: dict[tuple[TransactionInvalidator, str], None] = {}

    def add_op(self, invalidator: TransactionInvalidator, op: str, version: int | None) -> None:
        """Add an op; of several versions of it, the highest counts."""
        known = self._ops.setdefault((invalidator, op), version)
        if version is not None and (known is None or known < version):
            self._ops[invalidator, op] = version

    def add_tag(self, invalidator: TransactionInvalidator, tag: str) -> None:
        """Add a tag."""
        self._tags[invalidator, tag] = None

    def add_all_to(self, other: "InvalidationBuffer") -> None:
        """Add all of these to *other*."""
        for (invalidator, op), version in self._ops.items():
            other.add_op(invalidator, op, version)
        for invalidator, tag in self._tags:
            other.add_tag(invalidator, tag)

    def send(self) -> list[asyncio.Task[None]]:
        """Start to send all of these, in tasks of their own, which a cancellation of the caller does not reach."""
        ops = [(op, each.invalidate(op, version=version, wait=True)) for (each, op), version in self._ops.items()]
        tags = [(tag, each.invalidate_tag(tag, wait=True)) for each, tag in self._tags]
        tasks = [asyncio.create_task(sending, name=what) for what, sending in (*ops, *tags)]
        for task in tasks:
            _tasks_of_loop().add(task)
            task.add_done_callback(_task_done)
        return tasks

    def __repr__(self) -> str:
        closed = "" if self.is_open else ", closed"
        return f"<InvalidationBuffer {len(self._ops)} ops, {len(self._tags)} tags{closed}>"


# The buffer of the innermost open block of each connection, by the connection's id. References to a pool's proxies
# cannot be weak, so those to buffers are. A block holds its connection, so no other one has its id meanwhile.
_innermost: WeakValueDictionary[int, InvalidationBuffer] = WeakValueDictionary()


class AfterCommit:
    """A transaction, and the invalidations to send after its commit.

    `async with AfterCommit(connection, …) as after:` opens the transaction. Within another such block on the same
    connection it opens a savepoint, and passes its invalidations to the outer block.

    Args:
        connection: The connection.
        invalidator: That of the guard.
        missing: Capabilities that the store lacks; using one is an error in the block, before the commit.
        registry: Resolves templates; without one, ops and tags are taken as they are.
    """

    def __init__(
        self,
        connection: Connection,
        invalidator: TransactionInvalidator,
        missing: frozenset[str] = frozenset(),
        registry: Registry | None = None,
    ) -> None:
        self._connection = connection
        self._invalidator = invalidator
        self._missing = missing
        self._registry = registry
        self._transaction: Transaction | None = None
        self._outer: InvalidationBuffer | None = None
        self._buffer: InvalidationBuffer | None = None

    def invalidate(self, op: str, /, version: int | None = None, **values: object) -> None:
        """Invalidate *op* after the commit; of several versions of one op, the highest counts.

        With *values*, *op* is a template, as for `Guard.invalidate`.

        Raises:
            ConfigurationError: the block is not entered, or has ended, or the store has no versions; or *version* is
                not a whole number from 0 to 2⁵³ - 1.
            InvalidKey: *op* is not a string, or empty; or a template, and *values* are not those of its placeholders.
        """
        buffer = self._open_buffer("op", op)
        if self._registry is not None:
            op = self._registry.resolve_op(op, values)
        if version is not None:
            version_number(version)  # now: after the commit an error would be too late
            self._check_able("versions", op)
        buffer.add_op(self._invalidator, op, version)

    def invalidate_tag(self, tag: str, /, **values: object) -> None:
        """Invalidate every op that has *tag* after the commit.

        With *values*, *tag* is a template, as for `Guard.invalidate_tag`.

        Raises:
            ConfigurationError: the block is not entered, or has ended, or the store has no tags.
            InvalidKey: *tag* is not a string, or empty, or a template whose placeholders are not *values*.
        """
        buffer = self._open_buffer("tag", tag)
        if self._registry is not None:
            tag = self._registry.resolve_tag(tag, values)
        self._check_able("tags", tag)
        buffer.add_tag(self._invalidator, tag)

    def _check_able(self, what: str, name: str) -> None:
        if what in self._missing:
            message = f"{name}: {what} need a Redis store, which this guard does not have"
            raise ConfigurationError(message)

    def _open_buffer(self, kind: str, name: object) -> InvalidationBuffer:
        """Return the buffer for the op or tag *name*, having checked both.

        Raises:
            ConfigurationError: the block is not open.
            InvalidKey: *name* is not a string, or empty.
        """
        if self._buffer is None or not self._buffer.is_open:
            message = (
                f"{kind}={name!r}: this after_commit block is not open, so nothing would send the invalidation; "
                f"call it within the block, or use guard.{'invalidate' if kind == 'op' else 'invalidate_tag'}"
            )
            raise ConfigurationError(message)
        if not isinstance(name, str) or not name:
            message = f"{kind}={name!r}: give a string that is not empty"
            raise InvalidKey(message)
        return self._buffer

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
        self._buffer = _innermost[id(self._connection)] = InvalidationBuffer()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Commit and send, or roll back and drop.

        Raises:
            InvalidationPending: committed, but not all invalidations are confirmed.
            Exception: the error of the commit or the rollback.
        """
        assert self._transaction is not None
        assert self._buffer is not None
        outer = self._close(self._buffer)
        try:
            await self._transaction.__aexit__(kind, error, traceback)
        except BaseException as failure:
            # A savepoint whose end failed has the outcome of its outer block, which is unknown if that is over.
            if self._outer is not None or (error is None and not _was_rolled_back(failure)):
                tasks = _send_or_pass_on(self._buffer, outer)
                if isinstance(failure, Exception):
                    await _wait_for(tasks)
            raise
        if error is None:
            tasks = _send_or_pass_on(self._buffer, outer)
            await _wait_for(tasks)
            _raise_failures(tasks)

    def _close(self, buffer: InvalidationBuffer) -> InvalidationBuffer | None:
        """Close *buffer*; return that of the outer block, if it is still open."""
        buffer.is_open = False
        outer = self._outer if self._outer is not None and self._outer.is_open else None
        if outer is None:
            # Already gone if the blocks were left in the wrong order.
            _innermost.pop(id(self._connection), None)
        else:
            _innermost[id(self._connection)] = outer
        return outer

    def __repr__(self) -> str:
        return f"<AfterCommit {self._buffer}>"


def _send_or_pass_on(buffer: InvalidationBuffer, outer: InvalidationBuffer | None) -> list[asyncio.Task[None]]:
    """Pass *buffer* to the outer block, or start to send it if there is none."""
    if outer is None:
        return buffer.send()
    buffer.add_all_to(outer)
    return []


def _was_rolled_back(error: BaseException) -> bool:
    """Whether *error* came from the server, for a failed COMMIT; errors of asyncpg itself have no severity."""
    state = getattr(error, "sqlstate", None)
    return getattr(error, "severity_en", None) == "ERROR" and not str(state).startswith(_OUTCOME_UNKNOWN)


def _tasks_of_loop() -> set[asyncio.Task[None]]:
    """Return the tasks that send for the running loop, so that they are not garbage-collected before they are done.

    They are an attribute of the loop, because a task holds its loop: anything else would keep a closed loop alive.
    """
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] | None = getattr(loop, _TASKS_ATTRIBUTE, None)
    if tasks is None:
        tasks = set()
        setattr(loop, _TASKS_ATTRIBUTE, tasks)
    return tasks


def _task_done(task: asyncio.Task[None]) -> None:
    _tasks_of_loop().discard(task)
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it


async def _wait_for(tasks: list[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)


def _raise_failures(tasks: list[asyncio.Task[None]]) -> None:
    """Raise the error of the invalidations that are not confirmed: one for all of them."""
    pending: list[InvalidationPending] = []
    names: list[str] = []
    for task in tasks:
        what = task.get_name()
        if task.cancelled():
            failure: BaseException | None = InvalidationPending(f"{what}: cancelled", pending=[what])
        else:
            failure = task.exception()
        if isinstance(failure, InvalidationPending):
            pending.append(failure)
            names.append(what)
        elif failure is not None:
            raise failure
    if len(pending) == 1:
        raise pending[0]
    if pending:
        raise invalidation_pending(names, len(tasks), "committed, but ")
