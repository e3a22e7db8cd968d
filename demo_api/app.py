"""The service: what it opens, and in which order."""

import gc
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import asyncpg
from fastapi import FastAPI

from .caching import guarded, through_aiocache
from .database import DatabaseError, open_pool
from .menus import MenuRepository
from .probing import probe
from .routes import Service, ceiling_router, http_caching_router, menu_router, router
from .settings import Settings

# A seeded restaurant with a menu of average length: the ceiling sends as many bytes.
SAMPLE = 9
# The collector's thresholds: allocations per young collection, younger collections per older one.
COLLECT_AFTER = (50_000, 20, 100)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Return the service; nothing is connected before it starts.

    Args:
        settings: By default what the environment says.
    """
    chosen = Settings() if settings is None else settings

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with open_service(chosen) as service:
            app.state.service = service
            with _seldom_collected():
                yield

    app = FastAPI(title="Menus", lifespan=lifespan)
    # FastAPI tries routes in this order, and each try costs some percent of an answer.
    # So the measured route comes first.
    menus = http_caching_router if chosen.http_caching and chosen.guard != "aiocache" else menu_router
    first, last = (ceiling_router, menus) if chosen.ceiling_first else (menus, ceiling_router)
    for each in (first, router, last):
        app.include_router(each)
    return app


@contextmanager
def _seldom_collected() -> Generator[None]:
    """Exclude all current objects from garbage collection, and collect the others seldom.

    Reference counts free the objects of a request. A collection scans all live objects: when menus
    expire together, these include thousands of waiting requests, and each pause adds more of them.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@asynccontextmanager
async def open_service(settings: Settings) -> AsyncGenerator[Service]:
    """Open what the routes use; the cache is closed before the pool, from which it loads.

    Without Redis the service starts as well.

    Raises:
        DatabaseError: If Postgres cannot be used, or holds no menus.
    """
    open_cache = through_aiocache if settings.guard == "aiocache" else guarded
    async with open_pool(settings.database_url, settings.pool_size) as pool:
        menus = MenuRepository(pool)
        prebuilt = await sample(menus)
        async with open_cache(settings, menus) as cache, probe(settings.redis_url) as redis_answers:
            yield Service(settings.guard, menus, cache, pool, redis_answers, prebuilt)


async def sample(menus: MenuRepository) -> bytes:
    """Return a menu of average size.

    Raises:
        DatabaseError: If there is none, or the tables are another release's.
    """
    try:
        menu = await menus.load_menu(SAMPLE)
    except asyncpg.UndefinedTableError:
        menu = None
    except asyncpg.UndefinedColumnError:
        message = "Postgres holds menus of another release: fill it afresh with `python -m demo_api seed --force`"
        raise DatabaseError(message) from None
    if menu is None:
        message = "Postgres holds no menus: fill it with `python -m demo_api seed`"
        raise DatabaseError(message)
    return menu.body
