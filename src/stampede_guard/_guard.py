"""The guard: the data path of one call, readable top to bottom.

```
call ─ 1 L1 ─ 2 scoreboard: join, or launch ─┐
                                             └ _load ─ 3 L2 ─ 5 loader ─ 6 L2 fill ─ 7 L1 put ─ land
```
Steps 1 and 2 are synchronous; everything after runs once per op in a task that belongs to no caller.
(Number 4 is the lease of a cluster; a single process needs none.)
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from random import random
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast
from zlib import crc32

from ._codec import Codec
from ._entry import Entry
from ._epochs import Epochs
from ._keys import KeySpec
from ._memory import Memory
from ._operation import NO_ANNOTATION, Operation, hand_out
from ._policy import Duration, Options, Policy, count, fraction, seconds
from ._registry import Registry
from ._scoreboard import Flight
from ._site import Site, Sites
from ._stats import Stats, total
from .errors import ConfigurationError, GuardClosed, InvalidKey
from .stores import Store
from .stores._tier import Tier

T = TypeVar("T")

_FETCHES = 256  # sets of options that `fetch` remembers


class Guard:
    """Makes concurrent identical calls cost one call; remembers answers in memory and in a store.

    Nothing is connected before the guard is entered with `async with`. A guard without a store needs no
    entering. One guard serves several event loops, each with its own memory, flights and connections.

    Args:
        store: A `redis://`, `rediss://` or `unix://` URL without options, or a function that makes a
            `Store` for each event loop, or `None` for this process's memory alone.
        namespace: Keeps this guard's keys in the store apart from others'.
        maxsize: Entries kept in memory, per event loop; the least recently used go first.
        deadline: With a URL: seconds that one operation of the store may take; 0.15 by default.
        connect_timeout: With a URL: seconds that getting a connection may take; 0.25 by default.
        max_connections: With a URL: connections to the store, per event loop; 64 by default.
        max_bytes: Size of the largest value that is stored or read.
        enabled: `False` keeps both tiers but shares no flights: each miss loads for itself.
        rollout: Fraction of all ops, always the same ones, whose flights are shared; the others go as if disabled.
        drain_timeout: Seconds that leaving the guard waits for flights before it cancels them.
        clock: Monotonic seconds, for tests.

    Raises:
        ConfigurationError: an argument breaks its rule.
    """

    def __init__(  # noqa: PLR0913  # options, each with a default that fits
        self,
        store: str | Callable[[], Store] | None = None,
        *,
        namespace: str = "default",
        maxsize: int = 10_000,
        deadline: Duration | None = None,
        connect_timeout: Duration | None = None,
        max_connections: int | None = None,
        max_bytes: int = 1 << 20,
        enabled: bool = True,
        rollout: float = 1.0,
        drain_timeout: Duration = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.enabled = enabled
        self.rollout = rollout
        self.namespace = _checked_namespace(namespace)
        self._maxsize = count("maxsize", maxsize)
        self._max_bytes = count("max_bytes", max_bytes)
        self._drain_timeout = seconds("drain_timeout", drain_timeout, zero=True)
        self._clock = clock
        given = {"deadline": deadline, "connect_timeout": connect_timeout, "max_connections": max_connections}
        self._make_store = _store_maker(store, self._max_bytes, **given)
        self._epochs = Epochs()
        self._sites = Sites()
        self._registry = Registry()
        self._fetches: dict[tuple[Any, ...], Operation] = {}

    @property
    def has_store(self) -> bool:
        """Whether there is an L2."""
        return self._make_store is not None

    @property
    def rollout(self) -> float:
        """Fraction of all ops whose flights are shared."""
        return self._rollout

    @rollout.setter
    def rollout(self, share: float) -> None:
        self._rollout = fraction("rollout", share)

    async def call(
        self, operation: Operation, op: str, function: Callable[..., Awaitable[T]], args: Any, kwargs: Any
    ) -> T:
        """Return the answer for *op*: from memory, from a flight that is up, or from a new one."""
        site = self._site()
        entry = site.memory.get(op)  # 1
        if entry is not None:
            operation.counters.l1_hits += 1
            hit: T = hand_out(entry.value)
            return hit
        shares = self._shares(op)
        flight = site.board.current(op) if shares else None  # 2
        if flight is not None:
            operation.counters.joins += 1
        else:
            flight = self._launch(site, operation, op, partial(function, *args, **kwargs), is_private=not shares)
        answer: T = hand_out(await flight.wait(operation.policy.wait_timeout))
        return answer

    def _launch(
        self,
        site: Site,
        operation: Operation,
        op: str,
        load: Callable[[], Awaitable[Any]],
        *,
        is_private: bool = False,
        is_refresh: bool = False,
    ) -> Flight[Any]:
        return site.board.launch(
            op,
            # The epoch is taken here, before anything is read: what begins after the launch overtakes it.
            partial(self._load, site, operation, load, self._epochs.of(op)),
            operation.counters,
            operation.policy.on_abandon,
            context=operation.context(),
            is_private=is_private,
            is_refresh=is_refresh,
        )

    async def _load(
        self,
        site: Site,
        operation: Operation,
        load: Callable[[], Awaitable[Any]],
        epoch: tuple[int, int],
        flight: Flight[Any],
    ) -> Any:
        """Read L2 or load, and store; return what is kept for *flight*'s waiters."""
        op, policy, counters = flight.op, operation.policy, operation.counters
        l2_ttl = policy.l2_ttl
        tier = None if l2_ttl is None else site.tier

        def still_holds() -> bool:
            return not flight.landed and self._epochs.of(op) == epoch

        if tier is not None and l2_ttl is not None and not flight.is_refresh:
            stored = await tier.read(op, l2_ttl * (1 + policy.jitter), counters)  # 3
            decoded = None if stored is None else operation.decode(stored.envelope)
            if stored is not None and decoded is not None:
                counters.l2_hits += 1
                kept = operation.isolate(stored.envelope) if policy.isolate else decoded[0]
                if still_holds():
                    self._keep(site, op, kept, policy, stored.life)
                return kept
        with flight.within(policy.load_timeout):  # 5
            counters.loads += 1
            value = await load()
        payload = operation.encode(value) if tier is not None or policy.isolate else b""
        if tier is not None and l2_ttl is not None:
            await tier.fill(op, payload, _spread(l2_ttl, policy.jitter), still_holds, counters)  # 6
        kept = operation.isolate(payload) if policy.isolate else value
        if still_holds():
            self._keep(site, op, kept, policy, None)  # 7
        elif not flight.landed:
            counters.overtaken += 1
        return kept

    @staticmethod
    def _keep(site: Site, op: str, kept: object, policy: Policy, life: float | None) -> None:
        """Put into L1, for no longer than the store's copy has left."""
        if policy.ttl is not None:
            ttl = _spread(policy.ttl, policy.jitter)
            site.memory.put(op, kept, ttl if life is None else min(ttl, life))

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
        returns: Any = NO_ANNOTATION,
        codec: Codec | None = None,
        **options: Unpack[Options],
    ) -> T:
        """Do for the op id *op* and the function *load* what `@coalesce` does for a call.

        Args:
            op: The op id: whatever the answer depends on has to be in it.
            load: Takes nothing and returns the answer.
            returns: The answer's type, for a value that is stored or isolated.
            codec: Instead of *returns*.
            **options: As of `@coalesce`: `ttl`, `l2_ttl`, `jitter`, `load_timeout`, `wait_timeout`, `on_abandon`,
                `isolate`, `inherit_context`.

        Raises:
            ConfigurationError: an option breaks its rule.
            InvalidKey: *op* is not a string, or empty.
            StampedeGuardError: as for a decorated function.
        """
        if not isinstance(op, str) or not op:
            message = f"op={op!r}: an op id is a string, and not empty"
            raise InvalidKey(message)
        if not callable(load):
            message = f"{op}: give fetch a function that starts the load, as in `lambda: load(7)`, not {load!r}"
            raise ConfigurationError(message)
        return await self.call(self._fetching(options, returns, codec), op, load, (), {})

    def _fetching(self, options: Options, returns: Any, codec: Codec | None) -> Operation:
        """Return the operation of `fetch` with these options, remembered from the last time."""
        try:
            known_as = (frozenset(options.items()), returns, codec)
            operation = self._fetches.get(known_as)
        except TypeError:  # a codec, say, that has no hash
            return self._new_fetching(options, returns, codec)
        if operation is None:
            operation = self._new_fetching(options, returns, codec)
            if len(self._fetches) >= _FETCHES:
                self._fetches.clear()
            self._fetches[known_as] = operation
        return operation

    def _new_fetching(self, options: Options, returns: Any, codec: Codec | None) -> Operation:
        return self.add_operation("fetch", Policy.of(options), codec=codec, annotation=lambda: returns)

    async def refresh(self, operation: Operation, op: str, load: Callable[[], Awaitable[T]]) -> T:
        """Load now and replace what is cached; concurrent refreshes of *op* share one load.

        A flight that was up before answers those who wait for it, and is not stored. When the load fails, what was
        cached stays.
        """
        site = self._site()
        shares = self._shares(op)
        flight = site.board.current(op) if shares else None
        if flight is not None and flight.is_refresh:
            operation.counters.joins += 1
        else:
            self._epochs.bump(op)
            site.board.forget(op)
            flight = self._launch(site, operation, op, load, is_private=not shares, is_refresh=True)
        answer: T = hand_out(await flight.wait(operation.policy.wait_timeout))
        return answer

    async def invalidate(self, op: str, *, is_stored: bool = True) -> bool:
        """Forget *op*: in this process at once, before anything is awaited, then in the store.

        Loads that began before answer those who already wait, and are never stored. Cancelling this call does not
        stop the invalidation.

        Returns:
            Whether the store confirmed. If not, this process neither reads nor fills the op there until it
            did; other processes may see the old value for the rest of its `l2_ttl`.
        """
        site = self._site()
        self._epochs.bump(op)
        self._sites.tell(lambda each: each.forget(op))
        if not is_stored:
            return True
        self._sites.tell(lambda each: None if each is site else each.delete(op))  # each orders its own writes
        confirmation = site.delete(op)
        return confirmation is None or await confirmation.wait()

    def peek(self, op: str) -> Entry[Any] | None:
        """Return this loop's fresh entry of *op* without loading, counting or waiting."""
        entry = self._site().memory.get(op)
        return None if entry is None else Entry(hand_out(entry.value), entry.fresh_until)

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
            self._epochs.bump_all()
            self._sites.tell(Site.forget_all)

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
            except BaseException:  # cancelled: who was not let in will not leave
                await self._leave(site)
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let flights land, for at most `drain_timeout` seconds, and close the running loop's connections."""
        await self._leave(self._site())

    async def _leave(self, site: Site) -> None:
        site.depth -= 1
        if site.depth:
            return
        try:
            await site.board.drain(self._drain_timeout)
        finally:  # even if cancelled: no load runs on without its connections
            if not site.depth and self._sites.remove(site):  # nobody came in meanwhile
                await self._close(site)

    @staticmethod
    async def _close(site: Site) -> None:
        try:
            await site.board.ground()
        finally:
            if site.tier is not None:
                await site.tier.aclose()

    def _site(self) -> Site:
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

    def _open_site(self) -> Site:
        tier = None
        if self._make_store is not None:
            tier = Tier(self._make_store(), self.namespace, self._max_bytes, self._clock)
        site = Site(asyncio.get_running_loop(), Memory(self._maxsize, self._clock), tier)
        self._sites.add(site)
        return site

    def __repr__(self) -> str:
        store = "with a store" if self.has_store else "in memory"
        return f"<Guard {self.namespace} {store}{'' if self.enabled else ', disabled'}: {self.stats()!r}>"


def _checked_namespace(namespace: str) -> str:
    if not isinstance(namespace, str) or not re.fullmatch(r"[!-9;-z|~]{1,100}", namespace):
        message = f"namespace={namespace!r}: give 1 to 100 printable characters without spaces, colons and braces"
        raise ConfigurationError(message)
    return namespace


def _store_maker(store: Any, max_bytes: int, **options: Any) -> Callable[[], Store] | None:
    """Return what makes a store for each event loop, having checked what was given."""
    options = {name: option for name, option in options.items() if option is not None}
    if isinstance(store, str):
        from .stores.redis import redis_stores  # noqa: PLC0415  # redis-py is an extra

        return redis_stores(store, max_bytes=max_bytes, **options)
    for name in options:
        message = f"{name}= is for a store given by its URL; give it to the store itself"
        raise ConfigurationError(message)
    if store is not None and not callable(store):
        message = f"store={store!r}: give a URL, or a function that makes a store: lambda: AiocacheStore(cache)"
        raise ConfigurationError(message)
    return cast("Callable[[], Store] | None", store)


def _spread(life: float, jitter: float) -> float:
    """Lengthen or shorten *life* at random, so that what was filled together does not expire together."""
    return life * (1 + jitter * (2 * random() - 1))  # noqa: S311  # no secret
