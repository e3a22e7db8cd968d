"""Invalidations that follow a transaction of a real Postgres; plain functions note what a guard would send."""

import asyncio
import gc
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any
from uuid import uuid4
from weakref import ref

import asyncpg
import pytest
from inside import untyped

from stampede_guard import ConfigurationError, Guard, InvalidKey, coalesce
from stampede_guard import _after_commit as module
from stampede_guard._after_commit import AfterCommit
from stampede_guard.errors import InvalidationPending
from stampede_guard.testing import Gate

DEADLINE = 20

Write = Callable[..., Coroutine[Any, Any, None]]

# What asyncpg says of a connection that the server ended: the last is for a query that comes after the server's
# farewell and before the end of the connection.
LOST = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, asyncpg.InternalClientError)


class Sent:
    """Notes what is sent.

    Attributes:
        all: What was sent: ops with their versions, and tags.
        errors: What sending these ops raises.
        gate: If there is one, what is sent waits for it before it is noted.
        look: Run before anything is noted.
    """

    def __init__(self) -> None:
        self.all: list[tuple[str, int | None] | str] = []
        self.errors: dict[str, Exception] = {}
        self.gate: Gate | None = None
        self.look: Callable[[], Awaitable[object]] | None = None

    async def _note(self, name: str, what: tuple[str, int | None] | str) -> None:
        if self.gate is not None:
            await self.gate.passage()
        if self.look is not None:
            await self.look()
        self.all.append(what)
        if name in self.errors:
            raise self.errors[name]

    async def invalidate(self, op: str, *, version: int | None, wait: bool) -> None:
        """Stand for `Guard.invalidate`."""
        assert wait
        await self._note(op, (op, version))

    async def invalidate_tag(self, tag: str, *, wait: bool) -> None:
        """Stand for `Guard.invalidate_tag`."""
        assert wait
        await self._note(tag, tag)

    def after_commit(self, connection: Any) -> AfterCommit:
        """Return what `Guard.after_commit` would."""
        return AfterCommit(connection, self)


@pytest.fixture
def sent() -> Sent:
    """Return what notes the invalidations."""
    return Sent()


@pytest.fixture
def schema() -> str:
    """Return a schema's name of the test's own: tests share a server."""
    return f"test_{uuid4().hex}"


@pytest.fixture
async def watcher(database_url: str, schema: str) -> AsyncIterator[asyncpg.Connection]:
    """Return a connection that looks at what the others do; it has made two menus, at price 5."""
    connection = await asyncpg.connect(database_url, server_settings={"search_path": schema})
    await connection.execute(f"CREATE SCHEMA {schema}")
    await connection.execute("CREATE TABLE menus (id int PRIMARY KEY, price int)")
    await connection.execute("INSERT INTO menus VALUES (1, 5), (2, 5)")
    yield connection
    await connection.execute(f"SET client_min_messages = error; DROP SCHEMA {schema} CASCADE")
    await connection.close()


@pytest.fixture
async def connection(database_url: str, schema: str, watcher: asyncpg.Connection) -> AsyncIterator[asyncpg.Connection]:
    """Return the connection whose transactions are followed; serializable, so that its commits can fail."""
    settings = {"search_path": schema, "default_transaction_isolation": "serializable"}
    connection = await asyncpg.connect(database_url, server_settings=settings)
    yield connection
    connection.terminate()


@pytest.fixture
async def slow_commit(watcher: asyncpg.Connection) -> AsyncIterator[None]:
    """Let the COMMIT of whoever updates a menu wait for an advisory lock, which the watcher holds."""
    await watcher.execute("""
        CREATE FUNCTION waits() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            PERFORM pg_advisory_xact_lock(hashtext(current_schema())); RETURN NULL;
        END $$;
        CREATE CONSTRAINT TRIGGER waits AFTER UPDATE ON menus DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION waits();
        SELECT pg_advisory_lock(hashtext(current_schema()))
    """)
    yield
    await watcher.execute("SELECT pg_advisory_unlock(hashtext(current_schema()))")


async def until_committing(watcher: asyncpg.Connection, pid: int) -> None:
    """Wait until the server is in the middle of that backend's COMMIT."""
    query = "SELECT wait_event_type = 'Lock' AND query LIKE 'COMMIT%' FROM pg_stat_activity WHERE pid = $1"
    async with asyncio.timeout(DEADLINE):
        while not await watcher.fetchval(query, pid):
            await asyncio.sleep(0)


async def until_gone(watcher: asyncpg.Connection, pid: int) -> None:
    """Wait until that backend has ended."""
    async with asyncio.timeout(DEADLINE):
        while await watcher.fetchval("SELECT true FROM pg_stat_activity WHERE pid = $1", pid):
            await asyncio.sleep(0)


@pytest.fixture
def write(connection: asyncpg.Connection, sent: Sent) -> Write:
    """Return what changes the prices, notes *ops* and *tags*, and does what has to be done *then* within the block."""

    async def write(
        *ops: str,
        tags: Sequence[str] = (),
        version: int | None = None,
        then: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        async with sent.after_commit(connection) as after:
            await connection.execute("UPDATE menus SET price = 6")
            for op in ops:
                after.invalidate(op, version=version)
            for tag in tags:
                after.invalidate_tag(tag)
            if then is not None:
                await then()

    return write


@pytest.fixture
def lose(connection: asyncpg.Connection, watcher: asyncpg.Connection) -> Callable[[], Awaitable[None]]:
    """Return what lets the server end the connection."""
    pid = connection.get_server_pid()

    async def lose() -> None:
        await watcher.execute("SELECT pg_terminate_backend($1)", pid)
        await until_gone(watcher, pid)

    return lose


async def price(watcher: asyncpg.Connection, menu: int = 1) -> int:
    """Return what others see."""
    seen: int = await watcher.fetchval("SELECT price FROM menus WHERE id = $1", menu)
    return seen


async def test_sent_once_committed(connection: asyncpg.Connection, watcher: asyncpg.Connection, sent: Sent) -> None:
    """Nothing is sent within the block; when it is, others can see what was written."""
    seen = []

    async def look() -> None:
        seen.append(await price(watcher))

    sent.look = look
    async with sent.after_commit(connection) as after:
        await connection.execute("UPDATE menus SET price = 6")
        after.invalidate("menu-1")
        await asyncio.sleep(0)
        before = (list(sent.all), await price(watcher))

    assert ([], 5) == before
    assert ([("menu-1", None)], [6]) == (sent.all, seen)
    assert not connection.is_in_transaction()


async def test_each_is_sent_once_with_its_highest_version(connection: asyncpg.Connection, sent: Sent) -> None:
    """However often an op or a tag is noted, it is sent once; no version is less than any."""
    async with sent.after_commit(connection) as after:
        for version in (None, 3, None, 7, 5):
            after.invalidate("menu-1", version)
        after.invalidate("menu-2", version=0)
        after.invalidate("menu-2")
        after.invalidate_tag("menus")
        after.invalidate_tag("menus")

    assert [("menu-1", 7), ("menu-2", 0), "menus"] == sent.all


async def test_templates_with_their_values(connection: asyncpg.Connection) -> None:
    """In a block, ops and tags are spelt as for the guard: a template with its values, or the text itself."""
    guard = Guard()

    @coalesce("user-{email}", guard=guard, ttl=60, tags=("domain:{domain}",), ignore=("domain",))
    async def load(email: str, domain: str) -> str:
        return email

    async def fill() -> None:
        for number in range(3):
            await load(f"ada+{number}@example.com", f"{number}.example.com")

    await fill()
    async with guard.after_commit(connection) as after:
        after.invalidate("user-{email}", email="ada+0@example.com")
        after.invalidate_tag("domain:{domain}", domain="1.example.com")
        after.invalidate_tag("domain:2.example.com")
        with pytest.raises(InvalidKey, match="is a template"):
            after.invalidate("user-{email}")
        with pytest.raises(InvalidKey, match="is a template"):
            after.invalidate_tag("domain:{domain}")
        assert all(load.peek(f"ada+{number}@example.com", "") is not None for number in range(3))

    assert all(load.peek(f"ada+{number}@example.com", "") is None for number in range(3))


async def test_nothing_noted_nothing_sent(connection: asyncpg.Connection, sent: Sent) -> None:
    """A block without invalidations is a transaction like any other."""
    async with sent.after_commit(connection):
        assert connection.is_in_transaction()

    assert [] == sent.all


async def test_dropped_with_a_rollback(
    write: Write, connection: asyncpg.Connection, watcher: asyncpg.Connection, sent: Sent
) -> None:
    """A body that raises rolls back: nothing has changed, and nothing is sent."""

    async def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        await write("menu-1", then=fail)

    assert ([], 5) == (sent.all, await price(watcher))
    assert not connection.is_in_transaction()


async def test_dropped_when_the_body_is_cancelled(write: Write, watcher: asyncpg.Connection, sent: Sent) -> None:
    """A caller that is cancelled within the block rolls back."""
    gate = Gate()
    writing = asyncio.create_task(write("menu-1", then=gate.passage))
    await gate.arrivals(1)
    writing.cancel()
    await asyncio.wait([writing])

    assert (True, [], 5) == (writing.cancelled(), sent.all, await price(watcher))


# Commits that fail


async def test_dropped_when_the_commit_is_refused(
    connection: asyncpg.Connection, watcher: asyncpg.Connection, sent: Sent
) -> None:
    """A serialization failure at COMMIT is the server's word that nothing was committed."""

    async def write() -> None:
        async with sent.after_commit(connection) as after:
            total = await connection.fetchval("SELECT sum(price) FROM menus")
            await connection.execute("UPDATE menus SET price = $1 WHERE id = 1", total)
            after.invalidate("menu-1")
            async with watcher.transaction(isolation="serializable"):
                total = await watcher.fetchval("SELECT sum(price) FROM menus")
                await watcher.execute("UPDATE menus SET price = $1 WHERE id = 2", total)

    with pytest.raises(asyncpg.SerializationError) as caught:
        await write()

    assert "COMMIT;" == getattr(caught.value, "query", "")
    assert ([], 5, 10) == (sent.all, await price(watcher, 1), await price(watcher, 2))


async def test_dropped_when_a_deferred_constraint_refuses(
    write: Write, watcher: asyncpg.Connection, sent: Sent
) -> None:
    """So is the violation of a constraint that is checked at COMMIT."""
    await watcher.execute(
        "ALTER TABLE menus ADD FOREIGN KEY (price) REFERENCES menus (id) DEFERRABLE INITIALLY DEFERRED NOT VALID"
    )

    with pytest.raises(asyncpg.ForeignKeyViolationError):
        await write("menu-1")

    assert ([], 5) == (sent.all, await price(watcher))


async def test_sent_when_the_connection_is_lost_in_the_middle_of_the_commit(
    write: Write, connection: asyncpg.Connection, watcher: asyncpg.Connection, slow_commit: None, sent: Sent
) -> None:
    """A backend that ends during COMMIT leaves the outcome unknown: the error goes on, and all is sent."""
    pid = connection.get_server_pid()
    writing = asyncio.create_task(write("menu-1", tags=["menus"], version=3))
    await until_committing(watcher, pid)
    await watcher.execute("SELECT pg_terminate_backend($1)", pid)
    await asyncio.wait([writing])

    error = writing.exception()
    assert isinstance(error, LOST), error
    assert [("menu-1", 3), "menus"] == sent.all


@pytest.mark.parametrize("is_pending", [False, True], ids=["sent", "pending"])
async def test_sent_when_the_connection_is_lost_before_the_commit(
    is_pending: bool, write: Write, lose: Callable[[], Awaitable[None]], watcher: asyncpg.Connection, sent: Sent
) -> None:
    """A caller that cannot even ask for the COMMIT sends too, and learns of the commit if both fail."""
    if is_pending:
        sent.errors["menu-1"] = InvalidationPending("menu-1: not confirmed")

    with pytest.raises(LOST):
        await write("menu-1", then=lose)

    assert ([("menu-1", None)], 5) == (sent.all, await price(watcher))


async def test_lost_connection_in_the_body_is_a_rollback(
    write: Write, lose: Callable[[], Awaitable[None]], connection: asyncpg.Connection, sent: Sent
) -> None:
    """A query that fails with its connection ends the body, so no COMMIT was sent: dropped."""

    async def lose_and_ask() -> None:
        await lose()
        await connection.execute("UPDATE menus SET price = 7")

    with pytest.raises(LOST):
        await write("menu-1", then=lose_and_ask)

    assert [] == sent.all


@pytest.mark.parametrize(
    ("severity", "state", "is_answer"),
    [
        ("ERROR", "40001", True),  # serialization failure
        ("ERROR", "23503", True),  # a deferred constraint
        ("ERROR", "57014", True),  # statement_timeout, in a deferred trigger
        ("FATAL", "57P01", False),  # terminated: it may be after the commit
        ("PANIC", "XX000", False),
        ("ERROR", "57P01", False),  # as a proxy may say of a server that is gone
        ("ERROR", "08006", False),
        ("ERROR", "40003", False),  # statement completion unknown
    ],
)
def test_what_says_that_nothing_was_committed(severity: str, state: str, is_answer: bool) -> None:
    """Only an error of the server after which its connection lives on, and which is not about connections."""
    error = asyncpg.PostgresError.new({"S": "FEHLER", "V": severity, "C": state, "M": "told in any language"})

    assert is_answer is module._was_rolled_back(error)


def test_errors_of_the_driver_say_nothing() -> None:
    """What asyncpg finds out by itself is no answer of the server."""
    errors = [
        asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation"),
        asyncpg.InterfaceError("connection is closed"),
        asyncpg.InternalClientError("cannot switch to state 15; another operation (2) is in progress"),
        ConnectionResetError(),
        TimeoutError(),
        asyncio.CancelledError(),
    ]

    assert [False] * 6 == [module._was_rolled_back(error) for error in errors]


# Cancellation


async def test_cancelled_right_after_the_commit(write: Write, watcher: asyncpg.Connection, sent: Sent) -> None:
    """A caller that is cancelled while the invalidations are on their way leaves at once; they arrive."""
    gate = sent.gate = Gate()
    writing = asyncio.create_task(write("menu-1", "menu-2"))
    await gate.arrivals(2)
    writing.cancel()
    await asyncio.wait([writing])
    left = (writing.cancelled(), list(sent.all))
    gate.open()
    await asyncio.wait(module._tasks_of_loop())

    assert (True, []) == left
    assert ([("menu-1", None), ("menu-2", None)], 6) == (sent.all, await price(watcher))


async def test_cancelled_in_the_middle_of_the_commit(
    write: Write, connection: asyncpg.Connection, watcher: asyncpg.Connection, slow_commit: None, sent: Sent
) -> None:
    """A caller that is cancelled during COMMIT does not know its outcome: it leaves, and all is sent."""
    gate = sent.gate = Gate()
    writing = asyncio.create_task(write("menu-1"))
    await until_committing(watcher, connection.get_server_pid())
    writing.cancel()
    await asyncio.wait([writing])
    left = writing.cancelled()
    await gate.arrivals(1)
    gate.open()
    await asyncio.wait(module._tasks_of_loop())

    assert (True, [("menu-1", None)]) == (left, sent.all)


async def test_failure_that_nobody_waits_for_is_no_complaint(write: Write, sent: Sent) -> None:
    """Pending invalidations of a cancelled caller are nobody's error; the guard repeats them."""
    gate = sent.gate = Gate()
    sent.errors["menu-1"] = InvalidationPending("menu-1: not confirmed")
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))

    writing = asyncio.create_task(write("menu-1"))
    await gate.arrivals(1)
    writing.cancel()
    await asyncio.wait([writing])
    del writing  # its frames hold the tasks that send
    gate.open()
    await asyncio.wait(module._tasks_of_loop())
    await asyncio.sleep(0)
    gc.collect()

    assert ([], set()) == (complaints, module._tasks_of_loop())


# What is pending


async def test_pending_goes_to_the_caller(write: Write, watcher: asyncpg.Connection, sent: Sent) -> None:
    """The one error of the guard is raised as it is, after all were tried; the transaction stays committed."""
    error = sent.errors["menu-1"] = InvalidationPending("menu-1: not confirmed")

    with pytest.raises(InvalidationPending) as caught:
        await write("menu-1", "menu-2")

    assert caught.value is error
    assert ([("menu-1", None), ("menu-2", None)], 6) == (sent.all, await price(watcher))


async def test_several_pending_are_one_error(write: Write, sent: Sent) -> None:
    """It says how many, and names the first few."""
    ops = [f"menu-{number}" for number in range(1, 6)]
    sent.errors = {op: InvalidationPending(f"{op}: not confirmed") for op in ops[1:]}
    message = (
        "committed, but 4 of 6 invalidations, among them menu-2, menu-3, menu-4: not confirmed by the store; "
        "holds in this process, and is repeated until it is"
    )

    with pytest.raises(InvalidationPending) as caught:
        await write(*ops, tags=["menus"])

    assert (message, tuple(ops[1:])) == (str(caught.value), caught.value.pending)
    assert [*((op, None) for op in ops), "menus"] == sent.all


async def test_other_errors_go_first(write: Write, sent: Sent) -> None:
    """An error that repeating will not heal is not hidden by one that it will."""
    sent.errors = {"menu-1": InvalidationPending("menu-1: not confirmed"), "menu-2": ConfigurationError("no store")}

    with pytest.raises(ConfigurationError, match="no store"):
        await write("menu-1", "menu-2")


async def test_cancelled_sending_is_pending(write: Write, sent: Sent) -> None:
    """Whoever cancels the sending, at shut-down, does not cancel the caller."""
    gate = sent.gate = Gate()

    writing = asyncio.create_task(write("menu-1"))
    await gate.arrivals(1)
    for task in module._tasks_of_loop():
        task.cancel()

    with pytest.raises(InvalidationPending):
        await writing


# Savepoints


async def test_inner_block_joins_the_outer(
    connection: asyncpg.Connection, watcher: asyncpg.Connection, sent: Sent
) -> None:
    """What an inner block collected is sent with the outer's, when that has committed."""
    async with sent.after_commit(connection) as outer:
        outer.invalidate("menu-1", version=3)
        async with sent.after_commit(connection) as inner:
            await connection.execute("UPDATE menus SET price = 6")
            inner.invalidate("menu-1", version=4)
            inner.invalidate_tag("menus")
        outer.invalidate("menu-2")
        before = (list(sent.all), await price(watcher))

    assert ([], 5) == before
    assert ([("menu-1", 4), ("menu-2", None), "menus"], 6) == (sent.all, await price(watcher))


async def test_inner_rollback_drops_the_inner(
    connection: asyncpg.Connection, watcher: asyncpg.Connection, sent: Sent
) -> None:
    """A savepoint that is rolled back takes its invalidations with it, and no others."""
    async with sent.after_commit(connection) as outer:
        outer.invalidate("menu-1")
        await connection.execute("UPDATE menus SET price = 6 WHERE id = 1")

        async def write() -> None:
            async with sent.after_commit(connection) as inner:
                inner.invalidate("menu-2")
                await connection.execute("UPDATE menus SET price = 6 WHERE id = 2")
                await connection.execute("INSERT INTO menus VALUES (1, 7)")

        with pytest.raises(asyncpg.UniqueViolationError):
            await write()
        async with sent.after_commit(connection) as inner:
            inner.invalidate("menu-3")

    assert [("menu-1", None), ("menu-3", None)] == sent.all
    assert (6, 5) == (await price(watcher, 1), await price(watcher, 2))


async def test_outer_rollback_drops_all(connection: asyncpg.Connection, sent: Sent) -> None:
    """An inner block that succeeded has its outer block's fate."""

    async def write() -> None:
        async with sent.after_commit(connection):
            async with sent.after_commit(connection) as inner:
                inner.invalidate("menu-1")
            raise KeyError

    with pytest.raises(KeyError):
        await write()

    assert [] == sent.all


async def test_three_deep(connection: asyncpg.Connection, sent: Sent) -> None:
    """The innermost joins the middle, and is dropped with that."""
    async with sent.after_commit(connection) as outer:
        outer.invalidate("outer")

        async def write() -> None:
            async with sent.after_commit(connection) as middle:
                middle.invalidate("middle")
                async with sent.after_commit(connection) as inner:
                    inner.invalidate("inner")
                raise KeyError

        with pytest.raises(KeyError):
            await write()

    assert [("outer", None)] == sent.all


async def test_savepoint_that_was_not_released_has_the_outer_blocks_fate(
    connection: asyncpg.Connection, sent: Sent
) -> None:
    """A savepoint whose end failed may be committed with the outer block, so its invalidations are sent with that."""
    async with sent.after_commit(connection):

        async def write() -> None:
            async with sent.after_commit(connection) as inner:
                inner.invalidate("menu-1")
                await connection.execute(f"RELEASE SAVEPOINT {untyped(inner)._transaction._id}")

        with pytest.raises(asyncpg.PostgresError):
            await write()

    assert [("menu-1", None)] == sent.all


async def test_inner_block_that_outlives_the_outer_sends_by_itself(connection: asyncpg.Connection, sent: Sent) -> None:
    """Blocks that are left in the wrong order lose nothing, and leave the connection usable."""
    outer, inner = sent.after_commit(connection), sent.after_commit(connection)
    await outer.__aenter__()
    await inner.__aenter__()
    inner.invalidate("menu-1")
    await outer.__aexit__(None, None, None)
    before = list(sent.all)
    with pytest.raises(asyncpg.PostgresError):  # the server knows of no savepoint any more
        await inner.__aexit__(None, None, None)
    async with sent.after_commit(connection) as after:
        after.invalidate("menu-2")

    assert ([], [("menu-1", None), ("menu-2", None)]) == (before, sent.all)


async def test_blocks_of_two_guards(connection: asyncpg.Connection, sent: Sent) -> None:
    """An inner block of another guard is sent by that guard, when the outer block has committed."""
    other = Sent()

    async with sent.after_commit(connection) as ours:
        ours.invalidate("menu-1")
        async with other.after_commit(connection) as theirs:
            theirs.invalidate("menu-1", version=3)
            theirs.invalidate_tag("menus")
        before = list(other.all)

    assert [] == before
    assert ([("menu-1", None)], [("menu-1", 3), "menus"]) == (sent.all, other.all)


async def test_connections_of_a_pool(database_url: str, sent: Sent) -> None:
    """Blocks nest on a lent connection; when it is lent again nothing is left of them."""
    async with asyncpg.create_pool(database_url, min_size=1, max_size=1) as pool:
        for number in range(3):
            async with pool.acquire() as lent, sent.after_commit(lent) as outer:
                outer.invalidate(f"outer-{number}")
                async with sent.after_commit(lent) as inner:
                    inner.invalidate(f"inner-{number}")
        async with pool.acquire() as first:
            async with sent.after_commit(first):
                pass
            async with first.transaction():
                with pytest.raises(ConfigurationError):
                    await sent.after_commit(first).__aenter__()

    assert [(f"{kind}-{number}", None) for number in range(3) for kind in ("outer", "inner")] == sent.all
    assert 0 == len(module._innermost)


async def test_two_connections_know_nothing_of_each_other(
    connection: asyncpg.Connection, watcher: asyncpg.Connection, sent: Sent
) -> None:
    """A block within another one's, on another connection, is a transaction of its own."""
    async with sent.after_commit(connection) as first:
        first.invalidate("first")
        async with sent.after_commit(watcher) as second:
            second.invalidate("second")
        before = list(sent.all)

    assert [("second", None)] == before
    assert [("second", None), ("first", None)] == sent.all


async def test_connection_is_not_kept(database_url: str, sent: Sent) -> None:
    """A block that was entered and never left holds its connection no longer than itself."""
    connection = await asyncpg.connect(database_url)
    block = sent.after_commit(connection)
    await block.__aenter__()
    connection.terminate()
    await until_closed(connection)
    watched = ref(connection)
    del connection, block
    gc.collect()

    assert watched() is None
    assert 0 == len(module._innermost)


async def until_closed(connection: asyncpg.Connection) -> None:
    """Wait until the loop has let go of a terminated connection."""
    async with asyncio.timeout(DEADLINE):
        while not connection.is_closed():
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)


# Misuse


async def test_transaction_of_somebody_else(connection: asyncpg.Connection, sent: Sent) -> None:
    """Within a transaction that no such block opened, its commit would go unseen: the error says what to do."""
    async with connection.transaction():
        with pytest.raises(ConfigurationError, match="enter after_commit first"):
            await sent.after_commit(connection).__aenter__()
    await connection.execute("BEGIN")
    with pytest.raises(ConfigurationError, match="enter after_commit first"):
        await sent.after_commit(connection).__aenter__()
    await connection.execute("ROLLBACK")

    async with sent.after_commit(connection), connection.transaction(), sent.after_commit(connection) as inner:
        inner.invalidate("menu-1")

    assert [("menu-1", None)] == sent.all


async def test_use_outside_the_block(connection: asyncpg.Connection, sent: Sent) -> None:
    """Before and after the block, nothing would send what is noted: an error says so."""
    after = sent.after_commit(connection)
    with pytest.raises(ConfigurationError, match=r"op='menu-1': .* not open.* guard\.invalidate$"):
        after.invalidate("menu-1")
    async with after:
        after.invalidate("menu-1")
        within = repr(after)
    with pytest.raises(ConfigurationError, match=r"tag='menus': .* guard\.invalidate_tag$"):
        after.invalidate_tag("menus")
    with pytest.raises(ConfigurationError, match="make one for each transaction"):
        await after.__aenter__()

    assert [("menu-1", None)] == sent.all
    assert (
        "<AfterCommit <InvalidationBuffer 1 ops, 0 tags>>",
        "<AfterCommit <InvalidationBuffer 1 ops, 0 tags, closed>>",
    ) == (
        within,
        repr(after),
    )


@pytest.mark.parametrize("wrong", [None, 7, "", b"menu-1"])
async def test_wrong_names(connection: asyncpg.Connection, sent: Sent, wrong: Any) -> None:
    """An op or a tag that cannot be one is refused where it is given, not after the commit."""
    async with sent.after_commit(connection) as after:
        with pytest.raises(InvalidKey, match="op="):
            after.invalidate(wrong)
        with pytest.raises(InvalidKey, match="tag="):
            after.invalidate_tag(wrong)

    assert [] == sent.all


@pytest.mark.parametrize("wrong", ["3", 1.5, True, -1, 1 << 53])
async def test_wrong_versions(connection: asyncpg.Connection, sent: Sent, wrong: Any) -> None:
    """So is a version that is no whole number in its range, with the error that `Guard.invalidate` raises."""
    async with sent.after_commit(connection) as after, Guard() as guard:
        with pytest.raises(ConfigurationError, match=r"^version=") as failure:
            after.invalidate("menu-1", wrong)
        with pytest.raises(ConfigurationError, match=rf"^{re.escape(str(failure.value))}$"):
            await guard.invalidate("menu-1", version=wrong)

    assert [] == sent.all


async def test_transaction_that_does_not_begin(connection: asyncpg.Connection, sent: Sent) -> None:
    """A connection that is closed gives its own error, and no block is left behind."""
    await connection.close()

    with pytest.raises(asyncpg.InterfaceError):
        await sent.after_commit(connection).__aenter__()

    assert 0 == len(module._innermost)


def test_loop_closed_while_it_sends() -> None:
    """An event loop that is closed before all is sent is let go of."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # that a task is left pending is what this is about

    class Hanging(Sent):
        async def invalidate(self, op: str, *, version: int | None, wait: bool) -> None:
            await asyncio.Event().wait()

    async def begin() -> None:
        buffer = module.InvalidationBuffer()
        buffer.add_op(Hanging(), "menu-7", None)
        buffer.send()
        await asyncio.sleep(0)

    loop.run_until_complete(begin())
    loop.close()
    forgotten = ref(loop)
    del loop
    gc.collect()

    assert forgotten() is None
