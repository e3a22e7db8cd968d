"""The guard: the data path of one call, readable top to bottom.

```
call ─ 1 L1 ─ 2 scoreboard: join, or launch ─┐
                                             ├ by the store ─ 3 L2 value, or lease ─ 4 wait for another's lease
                                             │                └ 5 loader, in a slot ─ 6 L2 fill ─ 7 L1 put ─ land
                                             └ without L2 ─ 5 loader, in a slot ─ 7 L1 put ─ land
```
Steps 1 and 2 are synchronous; everything after (see `_path`) runs once per op, and belongs to no caller.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeVar, Unpack, cast
from zlib import crc32

from ._after_commit import AfterCommit, Connection
from ._bus.backplane import Backplane
from ._codecs.codec import Codec
from ._flights.limiter import Limiters
from ._flights.scoreboard import Flight, wait_all
from ._keys.spec import MAX_OP_LENGTH, KeySpec, shortened
from ._keys.tags import BuildTags, check_tags
from ._l2.lease import Lease
from ._l2.sender import Confirmation
from ._l2.tier import Tier
from ._loops import Change, LoopState, LoopStates
from ._memory.entry import Entry
from ._memory.epochs import Epochs
from ._memory.l1 import Memory
from ._operations.operation import NO_ANNOTATION, Isolated, Operation, for_caller
from ._operations.options import Duration, Options, count, fraction, seconds, shown, version_number
from ._operations.policy import Policy
from ._operations.registry import Registry
from ._path import LocalLoad, StoredLoad
from ._speed.front import ArgumentCache
from ._stats import Counters, Stats, total
from ._tokens import new_token
from .errors import ConfigurationError, GuardClosed, InvalidKey, invalidation_pending
from .stores import LeasingStore, Store

T = TypeVar("T")

_FETCHES = 256  # sets of options that `fetch` remembers
_BUS_TIMEOUT = 1.0  # seconds that opening a guard waits for its bus


class BatchedLoad(Protocol):
    """What a flight does to load that does so together with others."""

    async def __call__(self) -> Any:
        """Load."""
        ...

    def watch(self, flight: Flight[Any]) -> None:
        """Take note that it is *flight* that will load, unless it lands before."""
        ...


class Guard:
    """Makes concurrent identical calls cost one call; remembers answers in memory and in a store.

    Nothing is connected before the guard is entered with `async with`. A guard without a store needs no
    entering. One guard serves several event loops, each with its own memory, flights and connections.

    Args:
        store: A URL without options (`redis://`, `rediss://`, `unix://`, `redis+sentinel://`, `redis+cluster://`; see
            `RedisStore`), or an asyncio client of redis-py's, or a function that makes a `Store` for each event
            loop, or `None` for this process's memory alone.
        namespace: Keeps this guard's keys in the store apart from others'.
        maxsize: Entries kept in memory, per event loop; what was not used for long goes first.
        deadline: With a URL or a client: seconds that one operation of the store may take; 0.15 by default.
        connect_timeout: With a URL or a client: seconds that getting a connection may take; 0.25 by default.
        max_connections: With a URL or a client: connections to each server, per event loop; 64 by default.
        tracking: With a URL or a client: whether to hear of keys that others than this library write or delete.
        max_bytes: Size of the largest value that is stored or read.
        max_loads: How many loads may run at once, per event loop; the others queue. `None` sets no limit.
        enabled: `False` keeps both tiers but shares no flights: each miss loads for itself.
        rollout: Fraction of all ops, always the same ones, whose flights are shared; the others go as if disabled.
        drain_timeout: Seconds that leaving the guard waits for flights before it cancels them.
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
        deadline: Duration | None = None,
        connect_timeout: Duration | None = None,
        max_connections: int | None = None,
        tracking: bool | None = None,
        max_bytes: int = 1 << 20,
        max_loads: int | None = None,
        enabled: bool = True,
        rollout: float = 1.0,
        drain_timeout: Duration = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._enabled = enabled
        self._rollout = fraction("rollout", rollout)
        self.namespace = _checked_namespace(namespace)
        self._maxsize = count("maxsize", maxsize)
        self._max_bytes = count("max_bytes", max_bytes)
        self._max_loads = None if max_loads is None else count("max_loads", max_loads)
        self._drain_timeout = seconds("drain_timeout", drain_timeout, zero=True)
        self._clock = clock
        given = {
            "deadline": deadline,
            "connect_timeout": connect_timeout,
            "max_connections": max_connections,
            "tracking": tracking,
        }
        self._make_store = _store_maker(store, self._max_bytes, **given)
        self._epochs = Epochs()
        self._sites = LoopStates()
        self._registry = Registry()
        self._fetches: dict[tuple[Any, ...], Operation] = {}

    @property
    def has_store(self) -> bool:
        """Whether there is an L2."""
        return self._make_store is not None

    @property
    def capabilities(self) -> frozenset[str]:
        """What this guard's store can do: `"leases"`, `"backplane"`, `"tags"`, `"versions"`, `"tracking"`.

        Empty without a store.

        Raises:
            GuardClosed: the guard has a store and is not open.
        """
        tier = self._site().tier
        return frozenset() if tier is None else tier.capabilities

    @property
    def enabled(self) -> bool:
        """Whether flights are shared."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = enabled
        self._sites.tell(Change("flights"))

    @property
    def rollout(self) -> float:
        """Fraction of all ops whose flights are shared."""
        return self._rollout

    @rollout.setter
    def rollout(self, share: float) -> None:
        self._rollout = fraction("rollout", share)
        self._sites.tell(Change("flights"))

    def asker(
        self,
        operation: Operation,
        function: Callable[..., Awaitable[Any]],
        build_tags: BuildTags | None,
        front: ArgumentCache | None = None,
        flights_by_arguments: ArgumentCache | None = None,
    ) -> Callable[[str, Any, Any, Any], Any]:
        """Return the first two steps of each call of *function*.

        They take the op, the arguments as a tuple and a dict, and those that memory shows its answer to *front* under,
        which will give the next one itself, and a flight that is up to *flights_by_arguments*. They return what memory
        keeps, or else a flight: one that is up, or a new one. Not async: that saves one coroutine frame per waiter.
        """
        here, counters = self._sites.here, operation.counters

        def ask(op: str, args: Any, kwargs: Any, shown: Any) -> Any:
            site = here() or self._site()
            held = site.memory.get(op)  # 1
            if held is not None:
                counters.l1_hits += 1
                if front is not None and len(op) < MAX_OP_LENGTH and held.value.__class__ is not Isolated:
                    site.memory.note_in(front, shown, held)
                return held.value
            shares = (self._enabled and self._rollout >= 1) or self._shares(op)
            flight = site.joinable(op) if shares else None  # 2; a site's are all of its loop
            if flight is not None:
                counters.joins += 1
                if flights_by_arguments is not None and flight.shown is None and len(op) < MAX_OP_LENGTH:
                    site.memory.note_in(flights_by_arguments, shown, flight.show())
                return flight
            tags = () if build_tags is None else build_tags(*args, **kwargs)
            return self._launch(site, operation, op, partial(function, *args, **kwargs), tags, is_private=not shares)

        return ask

    async def call(  # noqa: PLR0917  # all that there is to a call
        self,
        operation: Operation,
        op: str,
        function: Callable[..., Awaitable[T]],
        args: Any,
        kwargs: Any,
        build_tags: BuildTags | None,
    ) -> T:
        """Return the answer for *op*: from memory, from a flight that is up, or from a new one."""
        kept = self.asker(operation, function, build_tags)(op, args, kwargs, ())
        if isinstance(kept, Flight):
            kept = await kept.wait(operation.policy.wait_timeout)
        answer: T = operation.for_caller(kept)
        return answer

    async def call_all(  # made for `coalesce_many`
        self,
        operation: Operation,
        ops: Sequence[str],
        seat: Callable[[int], BatchedLoad],
        tags: Callable[[int], Sequence[str]],
        shape: Callable[[list[Any]], T],
        *,
        is_refresh: bool = False,
    ) -> T:
        """Return what *shape* makes of the answers for *ops*, each as `call` or `refresh` would give it.

        What has to be loaded gets a *seat*, by its position; all of it is launched before anything is awaited, so
        that those who sit together can load together.
        """
        site = self._site()
        recall = site.memory.get
        answers: list[Any] = []
        flights: dict[int, Flight[Any]] = {}
        for position, op in enumerate(ops):
            held = None if is_refresh else recall(op)
            if held is not None:
                answers.append(operation.for_caller(held.value))
                continue
            answers.append(None)
            ask = partial(seat, position), partial(tags, position)
            flights[position] = self._join_or_launch(site, operation, op, *ask, is_refresh=is_refresh)
        operation.counters.l1_hits += len(answers) - len(flights)
        if flights:
            landed = await wait_all(tuple(flights.values()), operation.policy.wait_timeout)
            for position, kept in zip(flights, landed, strict=True):
                answers[position] = operation.for_caller(kept)
        shaped = shape(answers)
        if is_refresh:
            await _check_replaced({ops[position]: flight for position, flight in flights.items()}, shaped)
        return shaped

    def _join_or_launch(
        self,
        site: LoopState,
        operation: Operation,
        op: str,
        seat: Callable[[], BatchedLoad],
        tags: Callable[[], Sequence[str]],
        *,
        is_refresh: bool,
    ) -> Flight[Any]:
        shares = self._shares(op)
        flight = self._joinable(site, op, is_refresh=is_refresh) if shares else None
        if flight is not None:
            operation.counters.joins += 1
            return flight
        load = seat()
        flight = self._launch(site, operation, op, load, tags(), is_private=not shares, is_refresh=is_refresh)
        load.watch(flight)
        return flight

    @staticmethod
    def _joinable(site: LoopState, op: str, *, is_refresh: bool) -> Flight[Any] | None:
        """Return the flight that a call may join; a refresh only one whose loader has not been called yet."""
        if not is_refresh:
            return site.joinable(op)
        flight = site.board.flights.get(op)
        return None if flight is None or not flight.is_refresh or flight.loader_called else flight

    def _overtake(self, site: LoopState, op: str) -> Flight[Any] | None:
        """Let no flight of *op* that is up be remembered or joined; return the refresh among them, if there is one."""
        flight = site.board.flights.get(op)
        self._epochs.bump(op)
        site.board.forget(op)
        return None if flight is None or not flight.is_refresh else flight

    def launch_batch(
        self, operation: Operation, op: str, is_ready: asyncio.Future[None], load: Callable[[], Awaitable[T]]
    ) -> Flight[T]:
        """Start the flight of a batch: it loads once it *is_ready*, in a slot, and ends with the last that waits."""
        site = self._site()

        async def run(flight: Flight[T]) -> T:
            await is_ready
            limiter = site.limits.of(operation.name, operation.policy.max_loads)
            async with nullcontext() if limiter is None else limiter.slot(flight):
                operation.counters.loads += 1
                return await load()

        # Its waiters are flights of their own, and count for themselves.
        return site.board.launch(op, run, Counters(), "cancel", context=operation.context(), is_private=True)

    def _launch(  # what a flight has to know
        self,
        site: LoopState,
        operation: Operation,
        op: str,
        load: Callable[[], Awaitable[Any]],
        tags: Sequence[str],
        *,
        is_private: bool = False,
        is_refresh: bool = False,
    ) -> Flight[Any]:
        running = self._overtake(site, op) if is_refresh else None
        # The epoch is taken here, before anything is read: what begins after the launch overtakes it.
        epoch, generation = self._epochs.current(op, tags), operation.lineage.generation
        course: LocalLoad
        if operation.policy.l2_ttl is None:
            course, direct_read = LocalLoad(self._sites, site, operation, load, epoch, is_private), None
        else:
            course = direct_read = StoredLoad(self._sites, site, operation, load, epoch, is_private)
            tier = cast("Tier", site.tier)  # no l2_ttl without a store
            lives, fingerprint = (operation.lease_length, operation.max_l2_ttl), operation.fingerprint(tags)
            direct_read.lease = Lease(tier, op, tags, *lives, operation.counters, fingerprint)
        flight = site.board.launch(
            op,
            course.fly,
            operation.counters,
            operation.policy.on_abandon,
            context=operation.context(),
            tags=tags,
            is_private=is_private,
            is_refresh=is_refresh,
            after=None if is_private else running,
            direct_read=direct_read,
        )
        flight.generation = generation
        flight.joinable_until = site.memory.joinable_until()
        return flight

    def _shares(self, op: str) -> bool:
        """Whether callers of *op* share flights: a stable choice, the same in every process."""
        if not self.enabled:
            return False
        return self._rollout >= 1 or crc32(op.encode("utf-8", "surrogatepass")) < self._rollout * 2**32

    async def fetch(
        self,
        op: str,
        load: Callable[[], Awaitable[T]],
        *,
        name: str = "fetch",
        returns: Any = NO_ANNOTATION,
        codec: Codec | None = None,
        tags: Sequence[str] = (),
        **options: Unpack[Options],
    ) -> T:
        """Do for the op id *op* and the function *load* what `@coalesce` does for a call.

        Args:
            op: The op id: whatever the answer depends on has to be in it.
            load: Takes nothing and returns the answer.
            name: What statistics call it, and what `max_loads` belongs to: calls under one name share one limit.
            returns: The answer's type, for a value that is stored or isolated.
            codec: Instead of *returns*.
            tags: What the answer is invalidated by, besides *op*.
            **options: As of `@coalesce`: `ttl`, `l2_ttl`, `jitter`, `load_timeout`, `wait_timeout`, `on_abandon`,
                `isolate`, `inherit_context`, `lease`, `version`, `max_loads`.

        Raises:
            ConfigurationError: an option breaks its rule.
            InvalidKey: *op* is not a string, or empty; or *tags* are no tags.
            StampedeGuardError: as for a decorated function.
        """
        if not isinstance(op, str) or not op:
            message = f"op={op!r}: an op id is a string, and not empty"
            raise InvalidKey(message)
        if not callable(load):
            message = f"{op}: give fetch a function that starts the load, as in `lambda: load(7)`, not {load!r}"
            raise ConfigurationError(message)
        op = shortened(op)
        operation = self._fetching(name, options, returns, codec)
        if operation.policy.version is not None:
            self._check_able(f"{op}: version=", "versions")
        if tags:
            check_tags("fetch", tags)
            self._check_able(f"{op}: tags={tags!r}", "tags")
        written = tuple([self._registry.resolve_tag(tag, {}) for tag in tags])
        return await self.call(operation, op, load, (), {}, (lambda: written) if written else None)

    def _fetching(self, name: str, options: Options, returns: Any, codec: Codec | None) -> Operation:
        """Return the operation of `fetch` under *name* with these options, remembered from the last time."""
        try:
            known_as = (name, frozenset(options.items()), returns, codec)
            operation = self._fetches.get(known_as)
        except TypeError:  # a codec, say, that has no hash
            return self._new_fetching(name, options, returns, codec)
        if operation is None:
            operation = self._new_fetching(name, options, returns, codec)
            if len(self._fetches) >= _FETCHES:
                self._fetches.clear()
            self._fetches[known_as] = operation
        return operation

    def _new_fetching(self, name: str, options: Options, returns: Any, codec: Codec | None) -> Operation:
        if not isinstance(name, str) or not name:
            message = f"name={name!r}: give a string that is not empty"
            raise ConfigurationError(message)
        return self.add_operation(name, Policy.from_options(options), codec=codec, annotation=lambda: returns)

    async def refresh(
        self, operation: Operation, op: str, load: Callable[[], Awaitable[T]], tags: Sequence[str] = ()
    ) -> T:
        """Load now and replace what is cached, with what is read after this call.

        Flights that were up before answer those who wait for them, and are not remembered. A refresh whose load has
        begun is not joined: refreshes that come meanwhile share the next load, which begins when that one is over.
        When the load fails, what was cached stays. When its value cannot be stored, what was cached is invalidated.

        Raises:
            InvalidationPending: it could not be stored, nor has the store confirmed the invalidation (see
                `invalidate`); the error has the `value`.
        """
        site = self._site()
        shares = self._shares(op)
        flight = self._joinable(site, op, is_refresh=True) if shares else None
        if flight is not None:
            operation.counters.joins += 1
        else:
            flight = self._launch(site, operation, op, load, tags, is_private=not shares, is_refresh=True)
        answer: T = operation.for_caller(await flight.wait(operation.policy.wait_timeout))
        await _check_replaced({op: flight}, answer)
        return answer

    async def invalidate(self, op: str, /, *, version: int | None = None, wait: bool = True, **values: object) -> None:
        """Forget *op*: in this process at once, before anything is awaited, then in the store and everywhere.

        Loads that began before, in whatever process, answer those who already wait, and are never stored.
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
        await self.invalidate_op(self._registry.resolve_op(op, values), version=version, wait=wait)

    async def invalidate_op(self, op: str, *, version: int | None = None, wait: bool = True) -> None:
        """Do so for an op that was built, and not spelt out."""
        if version is not None:
            version_number(version)
            self._check_able(f"{op}: version={version!r}", "versions")
        await self._confirm(op, self._announce_op(op, version), wait=wait)

    async def invalidate_all(self, ops: Sequence[str]) -> None:
        """Forget all *ops* as `invalidate` does, all at once.

        Raises:
            InvalidationPending: the store has not confirmed each of them.
        """
        sent = [(op, self._announce_op(op)) for op in ops]
        pending = [op for op, confirmation in sent if confirmation is not None and not await confirmation.wait()]
        if pending:
            raise invalidation_pending(pending, len(sent))

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
        await self._invalidate_tag(self._registry.resolve_tag(tag, values), wait=wait)

    async def _invalidate_tag(self, tag: str, *, wait: bool) -> None:
        self._check_able(f"tag={tag!r}", "tags")
        self._epochs.bump_tag(tag)
        await self._confirm(tag, self._sites.tell(Change("tag", tag, is_stored=True)), wait=wait)

    async def clear(self, *, wait: bool = True) -> None:
        """Forget everything under this guard's namespace, everywhere, in one operation of the store.

        The rest is as for `invalidate`.

        Raises:
            InvalidationPending: the store has not confirmed (see `invalidate`).
            ConfigurationError: the store has no tags, which this rests on.
        """
        self._check_able("clear", "tags")
        self._epochs.bump_all()
        await self._confirm("everything", self._sites.tell(Change("all", is_stored=True)), wait=wait)

    def after_commit(self, connection: Connection) -> AfterCommit:
        """Open a transaction on *connection*, of asyncpg, and invalidate when it has committed.

        `async with guard.after_commit(connection) as after:` and in it `after.invalidate(op)` or
        `after.invalidate_tag(tag)`. What was noted is dropped when the block raises, and with it the transaction.

        Raises:
            InvalidationPending: when the block ends: committed, but the store has not confirmed.
            ConfigurationError: *connection* is in a transaction already.
        """
        tier = self._site().tier
        lacks = frozenset[str]() if tier is None else frozenset({"tags", "versions"}) - tier.capabilities
        return AfterCommit(connection, self.invalidate_op, self._invalidate_tag, lacks, self._registry)

    @property
    def has_bus(self) -> bool:
        """Whether other processes are told of invalidations."""
        return self._site().backplane is not None

    async def forget(self, op: str) -> None:
        """Forget *op* in this process alone, when no other can have it, or there is no way to tell it."""
        self._site()
        self._epochs.bump(op)
        self._sites.tell(Change("op", op))

    def _check_able(self, what: str, capability: str) -> None:
        tier = self._site().tier
        if tier is not None and capability not in tier.capabilities:
            message = f"{what}: {capability} need a Redis store; this guard's {tier.store.name} has none"
            raise ConfigurationError(message)

    def _announce_op(self, op: str, version: int | None = None) -> Confirmation | None:
        """Forget *op* in all loops, and have the store told; not async, as no reader may slip in between."""
        self._site()
        self._epochs.bump(op)
        return self._sites.tell(Change("op", op, version, is_stored=True))

    @staticmethod
    async def _confirm(what: str, confirmation: Confirmation | None, *, wait: bool) -> None:
        if wait and confirmation is not None and not await confirmation.wait():
            raise invalidation_pending([what], 1)

    def peek(self, op: str, /, **values: object) -> Entry[Any] | None:
        """Return this loop's fresh entry of *op* without loading, counting or waiting; *values* as in `invalidate`."""
        return self.peek_op(self._registry.resolve_op(op, values))

    def peek_op(self, op: str, operation: Operation | None = None) -> Entry[Any] | None:
        """Do so for an op that was built, and not spelt out; hand it out as *operation* does."""
        held = self._site().memory.get(op)
        if held is None:
            return None
        value = for_caller(held.value) if operation is None else operation.for_caller(held.value)
        return Entry(value, held.fresh_until)

    def stats(self) -> Stats:
        """Return a snapshot of the counters, in total and of each operation."""
        return total(self._registry.counters.items())

    def add_operation(self, name: str, policy: Policy, **options: Any) -> Operation:
        """Return a new operation of this guard; options are those of `Operation`.

        Raises:
            ConfigurationError: the policy asks for a store that the guard does not have, or no codec can be found.
        """
        if policy.l2_ttl is not None and not self.has_store:
            message = (
                f"{name}: l2_ttl={policy.l2_ttl:g} needs a guard with a store, as in Guard('redis://localhost:6379')"
            )
            raise ConfigurationError(message)
        operation = Operation(name, policy, self._registry.counters_of(name), **options)
        operation.check_codec(is_final=False)
        return operation

    def register(self, owner: object, spec: KeySpec, operation: Operation) -> None:
        """Note that *owner*'s ops belong to *operation*, for as long as *owner* lives.

        Raises:
            InvalidKey: another function's calls could have the same ops.
        """
        if self._registry.add(owner, spec, operation):  # defined anew: what the old function left is not its own
            self._sites.tell(Change("replaced"))

    async def __aenter__(self) -> Self:
        """Open the store's connections for the running loop; a dead store is no reason not to start.

        Raises:
            ConfigurationError: an operation's return annotation cannot be stored.
        """
        for operation in self._registry.operations():
            operation.check_codec(is_final=True)
        site = self._sites.here()
        if site is None:
            site = self._open_site()
        site.depth += 1
        if site.depth == 1 and site.tier is not None:
            try:
                await site.tier.open()
                self._check_capabilities(site.tier)
                if site.backplane is not None:
                    await site.backplane.open(_BUS_TIMEOUT)
            except BaseException:  # cancelled: who was not let in will not leave
                await self._leave(site)
                raise
        return self

    def _check_capabilities(self, tier: Tier) -> None:
        """Check that the store can do what the operations ask for."""
        for operation in self._registry.operations():
            for name, is_asked in (("tags", bool(operation.tags)), ("versions", operation.policy.version is not None)):
                if is_asked and name not in tier.capabilities:
                    message = f"{operation.name}: {name} need a Redis store; this guard's {tier.store.name} has none"
                    raise ConfigurationError(message)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let flights land, for at most `drain_timeout` seconds, and close the running loop's connections."""
        await self._leave(self._site())

    async def _leave(self, site: LoopState) -> None:
        site.depth -= 1
        if site.depth:
            return
        try:
            await site.board.drain(self._drain_timeout)
        finally:  # even if cancelled: no load runs on without its connections
            if not site.depth and self._sites.remove(site):  # nobody came in meanwhile
                site.memory.clear()  # whoever keeps it: it hears of no invalidation, so no front may answer from it
                await self._close(site)

    @staticmethod
    async def _close(site: LoopState) -> None:
        try:
            await site.board.cancel_all()
        finally:
            if site.backplane is not None:
                await site.backplane.aclose()
            if site.tier is not None:
                await site.tier.aclose()

    def _site(self) -> LoopState:
        site = self._sites.here()
        if site is not None:
            return site
        if self.has_store:
            message = (
                "this guard has a store, and is not open in the running event loop. Open it around its use:\n"
                "    async with guard:\n"
                "        ..."
            )
            raise GuardClosed(message)
        return self._open_site()

    def _open_site(self) -> LoopState:
        instance = new_token()  # here, not in __init__: forked workers would take each other's messages for their own
        tier = None
        if self._make_store is not None:
            tier = Tier(self._make_store(), self.namespace, self._max_bytes, self._clock, instance)
        loop = asyncio.get_running_loop()
        memory = Memory(self._maxsize, self._clock, loop)
        site = LoopState(loop, memory, tier, self._epochs, Limiters(self._max_loads))
        if tier is not None and "backplane" in tier.capabilities:
            site.backplane = Backplane(tier, instance, site, self._clock)
        self._sites.add(site)
        return site

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: a guard is connections, flights and perhaps a password; make one in each process."""
        message = "a Guard cannot be pickled; make one in each process"
        raise TypeError(message)

    def __repr__(self) -> str:
        store = "with a store" if self.has_store else "in memory"
        return f"<Guard {self.namespace} {store}{'' if self.enabled else ', disabled'}: {self.stats()!r}>"


async def _check_replaced(refreshes: Mapping[str, Flight[Any]], value: object) -> None:
    """Make sure that what *refreshes* were to replace is gone.

    Raises:
        InvalidationPending: it may still be in the store; the error has their *value*.
    """
    sent = [(op, flight.confirmation) for op, flight in refreshes.items()]
    pending = [op for op, confirmation in sent if confirmation is not None and not await confirmation.wait()]
    if pending:
        raise invalidation_pending(pending, len(sent), "refreshed, but the older value may still be stored: ", value)


def _checked_namespace(namespace: str) -> str:
    if not isinstance(namespace, str) or not re.fullmatch(r"[!-9;-z|~]{1,100}", namespace):
        message = f"namespace={shown(namespace)}: give 1 to 100 printable characters without spaces, colons and braces"
        raise ConfigurationError(message)
    return namespace


def _store_maker(store: Any, max_bytes: int, **options: Any) -> Callable[[], Store | LeasingStore] | None:
    """Return what makes a store for each event loop, having checked what was given."""
    options = {name: option for name, option in options.items() if option is not None}
    if isinstance(store, str) or type(store).__module__.partition(".")[0] in ("redis", "pydantic", "pydantic_core"):
        from .stores.redis import redis_stores  # noqa: PLC0415  # redis-py is an extra

        return redis_stores(store, max_bytes=max_bytes, **options)
    for name in options:
        message = f"{name}= is for a store given by its URL; give it to the store itself"
        raise ConfigurationError(message)
    if store is not None and not callable(store):
        message = (
            f"the store is a {type(store).__name__}; give a URL as a str, a client of redis.asyncio, or what makes a "
            "store: lambda: AiocacheStore(cache)"
        )
        raise ConfigurationError(message)
    return cast("Callable[[], Store | LeasingStore] | None", store)
