"""How menus are cached: what `GUARD` chooses."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from aiocache import RedisCache, cached_stampede
from aiocache.plugins import BasePlugin
from aiocache.serializers import NullSerializer
from redis.asyncio.connection import parse_url

from stampede_guard import Answer, Guard, Health, coalesce, coalesce_many

from .database import UNAVAILABLE, Connection
from .menus import MenuRepository, SerializedMenu, version_of
from .models import RestaurantSummary
from .settings import Settings

AIOCACHE_LEASE: Final = 2
# As many as Redis accepts: redis-py's default is 100, and requests beyond that fail.
AIOCACHE_CONNECTIONS: Final = 10_000


# Takes a restaurant, and the version that its menu has now.
NoteChange: TypeAlias = Callable[[int, int], None]


@dataclass(slots=True)
class Counts:
    """What the reads of menus have cost so far.

    Attributes:
        calls: Reads of a menu.
        executions: Reads that went beyond this process's memory.
        loads: Reads that went on to Postgres.
        redis_reads: Values asked of Redis.
    """

    calls: int = 0
    executions: int = 0
    loads: int = 0
    redis_reads: int = 0


@dataclass(frozen=True, slots=True)
class MenuCache:
    """Menus read through a cache.

    Attributes:
        load: Returns a restaurant's menu, or ``None`` if there is no such restaurant.
        load_summaries: Returns what a list shows of restaurants, by id, in the order asked.
        changing: Opens a transaction; reads after its commit see the changes that were noted in it.
        counts: Returns what the reads have cost so far.
        stats: Returns the guard's own statistics, or ``None`` without a guard.
        health: Returns what is wrong with the guard; without a guard, nothing is.
        answer: Returns a restaurant's menu with its age and freshness; ``None`` without a guard.
    """

    load: Callable[[int], Awaitable[bytes | None]]
    load_summaries: Callable[[Sequence[int]], Awaitable[dict[int, RestaurantSummary]]]
    changing: Callable[[Connection], AbstractAsyncContextManager[NoteChange]]
    counts: Callable[[], Counts]
    stats: Callable[[], dict[str, object] | None] = lambda: None
    health: Callable[[], Health] = Health
    answer: Callable[[int], Awaitable[Answer[SerializedMenu | None]]] | None = None


@asynccontextmanager
async def guarded(settings: Settings, menus: MenuRepository) -> AsyncGenerator[MenuCache]:
    """Read through memory, Redis and Postgres; concurrent reads of one menu share an execution.

    With ``GUARD=off`` each read that misses loads the menu. With ``LEASE=off`` each process loads
    it once for all of its readers.
    """
    guard = Guard(settings.redis_url, namespace=settings.namespace, enabled=settings.guard == "on")

    # No jitter, as in the article: entries that were filled together expire together.
    # A service in production should keep the jitter.
    @coalesce(
        "restaurant-fetch-{restaurant_id}",
        guard=guard,
        ttl=settings.l1_ttl,
        l2_ttl=settings.l2_ttl,
        jitter=0,
        lease=settings.lease,
        version=version_of,
        **_old_values(settings),
    )
    async def load_menu(restaurant_id: int) -> SerializedMenu | None:
        return await menus.load_menu(restaurant_id)

    @coalesce_many(
        "restaurant-summary-{restaurant_id}",
        guard=guard,
        ttl=settings.l1_ttl,
        l2_ttl=settings.l2_ttl,
        jitter=0,
        lease=settings.lease,
        version=lambda summary: summary.version,
    )
    async def load_summaries(restaurant_ids: list[int]) -> dict[int, RestaurantSummary]:
        return await menus.load_summaries(restaurant_ids)

    async def load(restaurant_id: int) -> bytes | None:
        menu = await load_menu(restaurant_id)
        return None if menu is None else menu.body

    @asynccontextmanager
    async def changing(connection: Connection) -> AsyncGenerator[NoteChange]:
        async with guard.after_commit(connection) as after:

            def note_change(restaurant_id: int, version: int) -> None:
                after.invalidate(load_menu.key(restaurant_id), version)
                after.invalidate(load_summaries.key(restaurant_id), version)

            yield note_change

    def counts() -> Counts:
        stats = guard.stats()
        return Counts(stats.calls, stats.executions, stats.loads, stats.l2_reads)

    async with guard:
        stats = (lambda: guard.stats().as_dict(), guard.health)
        yield MenuCache(load, load_summaries, changing, counts, *stats, load_menu.answer)


def _old_values(settings: Settings) -> dict[str, Any]:
    """Return the options for old values, of which there are none unless the settings ask for them."""
    if settings.stale is None and settings.stale_if_error is None:
        return {}
    return {"stale": settings.stale, "stale_if_error": settings.stale_if_error, "stale_on": UNAVAILABLE}


@asynccontextmanager
async def through_aiocache(settings: Settings, menus: MenuRepository) -> AsyncGenerator[MenuCache]:
    """Read through Redis, then Postgres, with aiocache's own protection against stampedes.

    aiocache protects only single values, so lists are read from Postgres.
    """
    counts = Counts()

    class CountReads(BasePlugin):  # type: ignore[misc]  # aiocache has no types
        async def post_get(self, *_: Any, **__: Any) -> None:
            counts.redis_reads += 1

    def op(_: Callable[..., Any], restaurant_id: int) -> str:
        return f"restaurant-fetch-{restaurant_id}"

    def is_none(menu: bytes | None) -> bool:
        return menu is None

    async def read_menu(restaurant_id: int) -> bytes | None:
        counts.loads += 1
        menu = await menus.load_menu(restaurant_id)
        return None if menu is None else menu.body

    load_menu: Any = cached_stampede(
        lease=AIOCACHE_LEASE,
        ttl=settings.l2_ttl,
        key_builder=op,
        # aiocache takes `None` for a miss anyway.
        skip_cache_func=is_none,
        cache=RedisCache,
        namespace=settings.namespace,
        serializer=NullSerializer(encoding=None),
        plugins=[CountReads()],
        pool_max_size=AIOCACHE_CONNECTIONS,
        **_connection(settings.redis_url),
    )(read_menu)

    async def load(restaurant_id: int) -> bytes | None:
        # aiocache keeps nothing in memory, so each call is an execution.
        counts.calls += 1
        counts.executions += 1
        menu: bytes | None = await load_menu(restaurant_id)
        return menu

    @asynccontextmanager
    async def changing(connection: Connection) -> AsyncGenerator[NoteChange]:
        changed: list[int] = []
        async with connection.transaction():
            yield lambda restaurant_id, _version: changed.append(restaurant_id)
        # After the commit, because a read in between would store the old menu again.
        for restaurant_id in changed:
            await load_menu.cache.delete(op(load_menu, restaurant_id))

    try:
        yield MenuCache(load, menus.load_summaries, changing, lambda: counts)
    finally:
        # `cache.close()` calls a method that redis-py has deprecated.
        await load_menu.cache.client.aclose()


def _connection(redis_url: str) -> dict[str, Any]:
    """Return the parts of *redis_url*, as aiocache takes them."""
    parts = parse_url(redis_url)
    username = parts.get("username")
    return {
        "endpoint": parts.get("host", "localhost"),
        "port": parts.get("port", 6379),
        "db": parts.get("db", 0),
        "password": parts.get("password"),
        "connection_pool_kwargs": {"username": username} if username else {},
    }
