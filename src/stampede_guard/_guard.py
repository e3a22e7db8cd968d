"""`Guard`: options, life cycle, statistics, and the methods that users call."""

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, Unpack

from ._after_commit import AfterCommit, Connection
from ._codecs.codec import Codec
from ._invalidation import Invalidator
from ._keys.spec import KeySpec
from ._loops import Change, LoopStates, make_loop_state, store_maker
from ._memory.entry import Entry
from ._memory.epochs import Epochs
from ._operations.fetches import FetchOperations, abilities_for, checked_op
from ._operations.limits import LoadLimits
from ._operations.operation import NO_ANNOTATION, Operation
from ._operations.options import Duration, MaxLoads, Options, fraction, namespace_name, seconds
from ._operations.policy import Policy
from ._operations.registry import Registry
from ._operations.size_limits import SizeLimits
from ._path import DataPath
from ._readiness.health import Health, health_of
from ._readiness.hot import HotKey, hot_keys
from ._readiness.sharing import warm_hot
from ._readiness.warming import Warmable, WarmUp, warm
from ._stats import Stats, total
from .stores import LeasingStore, Store

T = TypeVar("T")


class Guard:
    """Makes concurrent identical calls cost one call; remembers answers in memory and in a store.

    Nothing is connected before the guard is entered with `async with`. A guard without a store needs no
    entering. One guard serves several event loops, each with its own memory, flights and connections.

    Args:
        store: A URL without options (`redis://`, `rediss://`, `unix://`, `redis+sentinel://`, `redis+cluster://`; see
            `RedisStore`), or an asyncio client of redis-py's, or a function that makes a `Store` for each event
            loop, or `None` for this process's memory alone.
        namespace: Keeps this guard's keys in the store apart from others'.
        maxsize: Entries kept in memory, per event loop; what is used least goes first.
        max_size: Bytes kept in memory, per event loop, besides: `"256MB"`, `"1GiB"` or a number. `None` measures none.
        deadline: With a URL or a client: seconds that one operation of the store may take; 0.15 by default.
        connect_timeout: With a URL or a client: seconds that getting a connection may take; 0.25 by default.
        max_connections: With a URL or a client: connections to each server, per event loop; 64 by default.
        tracking: With a URL or a client: whether to hear of keys that others than this library write or delete.
        max_bytes: Size of the largest value that is stored or read.
        max_loads: How many loads may run at once, per event loop; the others queue. An `AdaptiveLimit` learns the
            number. `None` sets no limit.
        max_queued: How many loads may wait for one of these slots; needs *max_loads*. `None` sets no limit.
        queue_timeout: Seconds that a load waits for its slots; needs *max_loads*. `None` sets no limit.
        enabled: `False` keeps both tiers but shares no flights: each miss loads for itself.
        rollout: Fraction of all ops, always the same ones, whose flights are shared; the others go as if disabled.
        drain_timeout: Seconds that leaving the guard waits for flights before it cancels them.
        defaults: Options of operations that do not give them.
        clock: Monotonic seconds, for tests.

    Raises:
        ConfigurationError: an argument breaks its rule.
    """

    def __init__(  # noqa: PLR0913  # options, each with a default that fits
        self,
        store: object | str | Callable[[], Store | LeasingStore] | None = None,
        *,
        namespace: str = "default",
        maxsize: int = 10_000,
        max_size: str | int | None = None,
        deadline: Duration | None = None,
        connect_timeout: Duration | None = None,
        max_connections: int | None = None,
        tracking: bool | None = None,
        max_bytes: int = 1 << 20,
        max_loads: MaxLoads | None = None,
        max_queued: int | None = None,
        queue_timeout: Duration | None = None,
        enabled: bool = True,
        rollout: float = 1.0,
        drain_timeout: Duration = 5.0,
        defaults: Options | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        rollout = fraction("rollout", rollout)
        self._namespace = namespace_name(namespace)
        sizes = SizeLimits.checked(maxsize, max_size, max_bytes)
        self._limits = LoadLimits.of_guard(max_loads, max_queued, queue_timeout)
        self._drain_timeout = seconds("drain_timeout", drain_timeout, zero=True)
        self._clock = clock
        self._defaults = Policy.checked_defaults(defaults or {})
        times = {"deadline": deadline, "connect_timeout": connect_timeout}
        make_store = store_maker(store, max_bytes, **times, max_connections=max_connections, tracking=tracking)
        epochs = Epochs()
        make_state = partial(make_loop_state, make_store, epochs, namespace, sizes, self._limits, clock)
        self._states = LoopStates(make_state, needs_entering=make_store is not None, is_measured=sizes.is_measured)
        self._path = DataPath(self._states, enabled, rollout)
        self._invalidator = Invalidator(self._states, epochs)
        self._registry = Registry()
        self._fetches = FetchOperations(self._add_operation, self._defaults)

    @property
    def has_store(self) -> bool:
        """Whether there is an L2."""
        return self._states.needs_entering

    @property
    def capabilities(self) -> frozenset[str]:
        """What this guard's store can do: `"leases"`, `"backplane"`, `"tags"`, `"versions"`, `"tracking"`.

        Empty without a store.

        Raises:
            GuardClosed: the guard has a store and is not open.
        """
        tier = self._states.running().tier
        return frozenset() if tier is None else tier.capabilities

    @property
    def enabled(self) -> bool:
        """Whether flights are shared."""
        return self._path.enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._path.enabled = enabled

    @property
    def rollout(self) -> float:
        """Fraction of all ops whose flights are shared."""
        return self._path.rollout

    @rollout.setter
    def rollout(self, share: float) -> None:
        self._path.rollout = fraction("rollout", share)

    async def fetch(
        self,
        op: str,
        load: Callable[[], Awaitable[T]],
        *,
        name: str = "fetch",
        returns: Any = NO_ANNOTATION,
        codec: Codec | None = None,
        tags: Sequence[str] = (),
        partition: str | None = None,
        **options: Unpack[Options],
    ) -> T:
        """Do for the op id *op* and the function *load* what `@coalesce` does for a call.

        Args:
            op: The op id: all that the answer depends on has to be in it.
            load: Takes nothing and returns the answer.
            name: What statistics call it, and what `max_loads` belongs to: calls under one name share one limit.
            returns: The answer's type, for a value that is stored or isolated.
            codec: Instead of *returns*.
            tags: What the answer is invalidated by, besides *op*.
            partition: What shares the slots of `max_loads` evenly with other partitions, such as a tenant.
            **options: As of `@coalesce`, from `ttl` to `max_share`.

        Raises:
            ConfigurationError: an option breaks its rule.
            InvalidKey: *op* is not a string, or empty; or *tags* are no tags.
            StampedeGuardError: as for a decorated function.
        """
        op = checked_op(op, load)
        operation = self._fetches.of(name, options, returns, codec)
        for asked, ability in abilities_for(operation, op, tags, partition):
            self._states.running().check_able(asked, ability)
        written = tuple([self._registry.resolve_tag(tag, {}) for tag in tags])
        return await self._path.get(operation, op, load, (lambda: written) if written else None, partition)

    async def invalidate(self, op: str, /, *, version: int | None = None, wait: bool = True, **values: object) -> None:
        """Forget *op*: in this process at once, before anything is awaited, then in the store and everywhere.

        Loads that began before, in any process, answer the callers that already wait, and are never stored.
        Cancelling this call does not stop the invalidation.

        Args:
            op: The op id, as `.key(…)` of the decorated function returns it; or a key template, with *values*.
            version: The version of what was written: values with lower ones are not stored any more, as a
                database's replica may still return them.
            wait: Whether to wait for the store; if not, nothing is raised.
            **values: Of the template's placeholders: `invalidate("menu-{menu_id}", menu_id=7)`.

        Raises:
            InvalidationPending: the store has not confirmed. Until it has, which this guard tries again and again,
                this process neither reads nor stores the op there; others may see the old value for the
                rest of its life.
            ConfigurationError: *version* is not a whole number from 0 to 2⁵³ - 1.
            InvalidKey: *op* is a template, and *values* are not those of its placeholders.
        """
        await self._invalidator.invalidate(self._registry.resolve_op(op, values), version=version, wait=wait)

    async def expire(self, op: str, /, *, version: int | None = None, wait: bool = True, **values: object) -> None:
        """Let *op* be stale from now on: what `invalidate` does, but old values stay (see `Coalesced.expire`)."""
        op = self._registry.resolve_op(op, values)
        await self._invalidator.invalidate(op, version=version, wait=wait, is_soft=True)

    async def invalidate_tag(self, tag: str, /, *, wait: bool = True, **values: object) -> None:
        """Forget every op that has *tag*, everywhere; however many there are, that is one operation of the store.

        The rest is as for `invalidate`.

        Args:
            tag: The tag, which is the text that an f-string makes of the decorator's template; or that template,
                with *values*.
            wait: Whether to wait for the store.
            **values: Of the template's placeholders: `invalidate_tag("restaurant:{restaurant_id}", restaurant_id=7)`.

        Raises:
            InvalidationPending: the store has not confirmed (see `invalidate`).
            ConfigurationError: the store has no tags.
            InvalidKey: *tag* is not a string, or empty, or a template whose placeholders are not *values*.
        """
        await self._invalidator.invalidate_tag(self._registry.resolve_tag(tag, values), wait=wait)

    async def clear(self, *, wait: bool = True) -> None:
        """Forget everything under this guard's namespace, everywhere, in one operation of the store.

        The rest is as for `invalidate`.

        Raises:
            InvalidationPending: the store has not confirmed (see `invalidate`).
            ConfigurationError: the store has no tags, which this rests on.
        """
        await self._invalidator.clear(wait=wait)

    def after_commit(self, connection: Connection) -> AfterCommit:
        """Open a transaction on *connection*, of asyncpg, and invalidate when it has committed.

        `async with guard.after_commit(connection) as after:` and in it `after.invalidate(op)` or
        `after.invalidate_tag(tag)`. What was noted is dropped when the block raises, and with it the transaction.

        Raises:
            InvalidationPending: when the block ends: committed, but the store has not confirmed.
            ConfigurationError: *connection* is in a transaction already.
        """
        tier = self._states.running().tier
        missing = frozenset[str]() if tier is None else frozenset({"tags", "versions"}) - tier.capabilities
        return AfterCommit(connection, self._invalidator, missing, self._registry)

    def peek(self, op: str, /, **values: object) -> Entry[Any] | None:
        """Return this loop's fresh entry of *op* without loading, counting or waiting; *values* as in `invalidate`."""
        return self._path.peek(self._registry.resolve_op(op, values))

    def stats(self) -> Stats:
        """Return a snapshot of the counters, in total and of each operation."""
        return total(self._registry.counters.items(), self._states.memory_stats())

    async def hot(self, limit: int = 20, *, seconds: Duration = 1.0) -> list[HotKey]:
        """Count the calls of this event loop for so many *seconds*; return the *limit* ops with the most of them.

        While it counts, a hit costs some times what it costs otherwise. At other times nothing is counted.

        Raises:
            ConfigurationError: *limit* is no whole number above zero, or *seconds* not more than zero.
            GuardClosed: the guard has a store and is not open.
        """
        return await hot_keys(self._states, limit, seconds)

    async def warm(
        self,
        function: Warmable,
        calls: Iterable[Any],
        *,
        rate: float | None = 100.0,
        concurrency: int = 10,
        on_progress: Callable[[WarmUp], object] | None = None,
    ) -> WarmUp:
        """Make many calls before traffic comes; return how many were loaded, found and failed. Errors do not stop it.

        Args:
            function: Decorated with this guard. A loader of many is called for batches.
            calls: The only argument of each call, or a tuple of all; ids for a loader of many.
            rate: Loads a second in this process; what memory or the store has is none. `None` sets no limit.
            concurrency: How many calls, or batches, are waited for at once.
            on_progress: Called with what was done so far, again and again.

        Raises:
            ConfigurationError: *function* is none of this guard's, or keeps nothing, or an option breaks its rule.
            GuardClosed: the guard has a store and is not open.
        """
        return await warm(self, function, calls, rate=rate, concurrency=concurrency, on_progress=on_progress)

    async def warm_hot(self, limit: int = 1_000) -> int:
        """Take the values of the ops that the cluster calls most from the store into memory; return how many.

        No loader runs. From then on, until the guard is left, this event loop samples its calls, and shares its list.

        Raises:
            ConfigurationError: *limit* is no whole number above zero, or the guard has no store.
            GuardClosed: the guard is not open.
        """
        return await warm_hot(self._states, self._path, self._registry, limit)

    def health(self) -> Health:
        """Return what is wrong in the running event loop, for a readiness probe; it asks no server.

        Before the guard is entered it says so, unless there is no store.
        """
        return health_of(self._states)

    def _add_operation(self, name: str, policy: Policy, **options: Any) -> Operation:
        """Return a new operation of this guard; options are those of `Operation`.

        Raises:
            ConfigurationError: the policy asks for a store that the guard does not have, or no codec can be found.
        """
        return self._registry.make(name, policy, has_store=self.has_store, limits=self._limits, **options)

    def _register(self, owner: object, spec: KeySpec, operation: Operation) -> None:
        """Note that *owner*'s ops belong to *operation*, or raise `InvalidKey` if another function may have them."""
        if self._registry.add(owner, spec, operation):  # defined anew: what the old function left is not its own
            self._states.tell(Change("replaced"))

    async def __aenter__(self) -> Self:
        """Open the store's connections for the running loop; a dead store is no reason not to start.

        Raises:
            ConfigurationError: an operation's return annotation cannot be stored, or the store reads no values as
                long as `max_bytes`.
        """
        for operation in self._registry.operations():
            operation.check_codec(is_final=True)
        state = self._states.get_or_make()
        state.depth += 1
        try:
            await state.open(self._registry.operations())
        except BaseException:  # cancelled: `__aexit__` will not run if `__aenter__` failed
            await self._states.leave(state, self._drain_timeout)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let flights land, for at most `drain_timeout` seconds, and close the running loop's connections."""
        await self._states.leave(self._states.running(), self._drain_timeout)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: a guard is connections, flights and perhaps a password; make one in each process."""
        message = "a Guard cannot be pickled; make one in each process"
        raise TypeError(message)

    def __repr__(self) -> str:
        store = "with a store" if self.has_store else "in memory"
        return f"<Guard {self._namespace} {store}{'' if self.enabled else ', disabled'}: {self.stats()!r}>"
