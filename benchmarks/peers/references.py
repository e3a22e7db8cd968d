"""The least that a library can cost, and code written by hand."""

import asyncio
import inspect
import time
from contextlib import asynccontextmanager

from cachetools import TTLCache

from benchmarks.peers.peer import BOUND, COALESCING, COUNTERS, MEMORY, OWN_TASK, TTL, Peer, Wrapped
from benchmarks.subjects import Function, Subject, Terms


@asynccontextmanager
async def bare(subject: Subject, _terms: Terms) -> Wrapped:
    """The function itself."""
    yield subject.function


@asynccontextmanager
async def in_a_task(subject: Subject, _terms: Terms) -> Wrapped:
    """The function in a task of its own, awaited."""
    function = subject.function

    async def call(restaurant_id: int) -> str:
        return await asyncio.create_task(function(restaurant_id))

    yield call


@asynccontextmanager
async def event_fan_out(subject: Subject, _terms: Terms) -> Wrapped:
    """One `asyncio.Event` for each key, on which callers wait while the first one loads."""
    function = subject.function
    events: dict[int, asyncio.Event] = {}
    values: dict[int, str] = {}

    async def call(restaurant_id: int) -> str:
        event = events.get(restaurant_id)
        if event is None:
            event = events[restaurant_id] = asyncio.Event()
            try:
                values[restaurant_id] = await function(restaurant_id)
            finally:
                event.set()
        else:
            await event.wait()
        return values[restaurant_id]

    yield call


@asynccontextmanager
async def dict_get(subject: Subject, _terms: Terms) -> Wrapped:
    """A dict alone."""
    function, key, values = subject.function, subject.key, dict[object, str]()

    async def one(restaurant_id: int) -> str:
        value = values.get(restaurant_id)
        if value is None:
            value = values[restaurant_id] = await function(restaurant_id)
        return value

    async def three(restaurant_id: int, language: str, currency: str) -> str:
        value = values.get((restaurant_id, language, currency))
        if value is None:
            value = await function(restaurant_id, language, currency)
            values[restaurant_id, language, currency] = value
        return value

    yield one if len(inspect.signature(key).parameters) == 1 else three


def coalesce_by_hand(function: Function, ttl: float) -> Function:
    """Return what people write by hand: a dict of values that expire, and a task for each load."""
    values: dict[object, tuple[str, float]] = {}
    loads: dict[object, asyncio.Task[str]] = {}

    async def load(key: object, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
        try:
            value = await function(*args, **kwargs)
            values[key] = value, time.monotonic() + ttl
            return value
        finally:
            del loads[key]

    async def call(*args: object, **kwargs: object) -> str:
        key = (args, tuple(sorted(kwargs.items()))) if kwargs else args
        kept = values.get(key)
        if kept is not None and time.monotonic() < kept[1]:
            return kept[0]
        task = loads.get(key)
        if task is None:
            task = loads[key] = asyncio.create_task(load(key, args, kwargs))
        return await asyncio.shield(task)

    return call


@asynccontextmanager
async def by_hand(subject: Subject, terms: Terms) -> Wrapped:
    """The function wrapped by hand."""
    yield coalesce_by_hand(subject.function, terms.ttl)


@asynccontextmanager
async def bare_ttl_cache(subject: Subject, terms: Terms) -> Wrapped:
    """A `TTLCache` of cachetools, on which several others are built."""
    function = subject.function
    cache: TTLCache[int, str] = TTLCache(terms.maxsize, terms.ttl)

    async def call(restaurant_id: int) -> str:
        try:
            return cache[restaurant_id]
        except KeyError:
            value = cache[restaurant_id] = await function(restaurant_id)
            return value

    yield call


_ALL = (TTL, BOUND, COALESCING, COUNTERS, OWN_TASK)

BARE = Peer("bare await", bare, (*_ALL, MEMORY), role="baseline")
IN_A_TASK = Peer("create_task + await", in_a_task, (TTL, BOUND, COALESCING, COUNTERS, MEMORY), role="baseline")
EVENT = Peer("asyncio.Event fan-out", event_fan_out, (TTL, BOUND, COUNTERS, OWN_TASK), role="baseline")
BARE_TTL_CACHE = Peer("bare TTLCache of cachetools", bare_ttl_cache, (COALESCING, COUNTERS, OWN_TASK), role="baseline")
DICT = Peer("dict.get in a coroutine", dict_get, _ALL, role="reference")
BY_HAND = Peer("30 lines by hand", by_hand, (BOUND, COUNTERS), role="reference")

PEERS = (BARE, IN_A_TASK, EVENT, BARE_TTL_CACHE, DICT, BY_HAND)
