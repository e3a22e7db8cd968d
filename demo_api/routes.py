"""What the service answers."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import asyncpg
from fastapi import APIRouter, HTTPException, Path, Query, Request, Response
from fastapi.responses import JSONResponse

from stampede_guard import InvalidationPending
from stampede_guard.fastapi import AnswerInfo

from .caching import MenuCache
from .menus import MAX_ID, MenuRepository, SerializedMenu
from .models import ItemChange, ItemSummary, Menu, RestaurantList
from .probing import PROBE_TIMEOUT
from .settings import Mode

Id = Annotated[int, Path(ge=0, le=MAX_ID)]
MAX_LISTED = 100
# Reasons for which another process is the better choice.
OWN_TROUBLES = frozenset({"not_open", "load_overdue", "loads_queued"})

logger = logging.getLogger(__name__)
# FastAPI tries every route of a router for each request, so the compared routes have own routers.
menu_router = APIRouter()
http_caching_router = APIRouter()
ceiling_router = APIRouter()
router = APIRouter()


@dataclass(frozen=True, slots=True)
class Service:
    """What the routes use; opened when the application starts.

    Attributes:
        mode: What `GUARD` says.
        menus: The menus in Postgres.
        cache: The menus read through the cache.
        pool: Connections to Postgres, to ask whether it answers.
        redis_answers: Returns whether Redis answers.
        prebuilt: A menu that is sent without being read.
    """

    mode: Mode
    menus: MenuRepository
    cache: MenuCache
    pool: asyncpg.Pool
    redis_answers: Callable[[], Awaitable[bool]]
    prebuilt: bytes


def service_of(request: Request) -> Service:
    """Return what the application opened when it started."""
    service: Service = request.app.state.service
    return service


@menu_router.get("/restaurants/{restaurant_id}/menu", responses={200: {"model": Menu}})
async def read_menu(restaurant_id: Id, request: Request) -> Response:
    """Return the menu of a restaurant, which may be some seconds old."""
    menu = await service_of(request).cache.load(restaurant_id)
    if menu is None:
        raise HTTPException(404, f"There is no restaurant {restaurant_id}")
    return Response(menu, media_type="application/json")


@http_caching_router.get("/restaurants/{restaurant_id}/menu", responses={200: {"model": Menu}, 304: {}})
async def read_menu_with_headers(restaurant_id: Id, request: Request, info: AnswerInfo) -> Response:
    """Return the menu of a restaurant, with its age and its life; 304 if the client has it already."""
    load = service_of(request).cache.answer
    assert load is not None  # this route is for guarded menus alone
    answer = await load(restaurant_id)
    if answer.value is None:
        raise HTTPException(404, f"There is no restaurant {restaurant_id}")
    return info.respond(answer, _sent, cache="public")


def _sent(menu: SerializedMenu | None) -> Response:
    assert menu is not None
    return Response(menu.body, media_type="application/json")


@router.get("/restaurants")
async def list_restaurants(
    ids: Annotated[str, Query(description="Ids, separated by commas", examples=["1,2,3"])], request: Request
) -> RestaurantList:
    """Return the summaries of restaurants in the order of the ids; they may be some seconds old."""
    asked = list(dict.fromkeys(ids_in(ids)))
    found = await service_of(request).cache.load_summaries(asked)
    return RestaurantList(
        restaurants=[found[restaurant_id] for restaurant_id in asked if restaurant_id in found],
        missing=[restaurant_id for restaurant_id in asked if restaurant_id not in found],
    )


def ids_in(text: str) -> list[int]:
    """Return the ids in *text*.

    Raises:
        HTTPException: If one is invalid, or there are too many.
    """
    pieces = text.split(",")
    if len(pieces) > MAX_LISTED:
        raise HTTPException(422, f"ids: {len(pieces)} ids; give at most {MAX_LISTED}")
    for piece in pieces:
        # The length is checked first, because `int` is slow with very long numbers.
        if not (piece.isascii() and piece.isdigit() and len(piece) <= len(str(MAX_ID)) and int(piece) <= MAX_ID):
            raise HTTPException(422, f"ids: {piece[:20]!r} is no id; give numbers up to {MAX_ID}, separated by commas")
    return [int(piece) for piece in pieces]


@ceiling_router.get("/prebuilt/{restaurant_id}/menu", responses={200: {"model": Menu}})
async def read_prebuilt_menu(restaurant_id: Id, request: Request) -> Response:  # noqa: ARG001  # parsed, as above
    """Return bytes made at start-up: the ceiling of this server, for comparison."""
    return Response(service_of(request).prebuilt, media_type="application/json")


@router.patch("/restaurants/{restaurant_id}/items/{item_id}")
async def change_item(
    restaurant_id: Id, item_id: Id, change: ItemChange, request: Request, response: Response
) -> ItemSummary:
    """Change an item; each read of the menu after the answer shows the change, unless an HTTP cache answers it.

    With the header `Invalidation: pending`, reads through other processes may show the old menu:
    the change is made, but the store of the cache has not confirmed the invalidation.
    """
    service = service_of(request)
    try:
        async with service.pool.acquire() as connection, service.cache.changing(connection) as note_change:
            item = await service.menus.update_item(connection, restaurant_id, item_id, change)
            if item is not None:
                note_change(restaurant_id, item.menu_version)
    except InvalidationPending as pending:
        # Raised after the commit: the change is made, and on an error the client would repeat it.
        logger.warning("restaurant %d was changed, and %s", restaurant_id, pending)
        response.headers["Invalidation"] = "pending"
    if item is None:
        raise HTTPException(404, f"Restaurant {restaurant_id} has no item {item_id}")
    return item


@router.get("/stats")
async def read_stats(request: Request) -> dict[str, Any]:
    """Return what the reads have cost since the start."""
    service = service_of(request)
    return {
        "mode": service.mode,
        "process": os.getpid(),
        **asdict(service.cache.counts()),
        "postgres_queries": service.menus.queries,
        "guard": service.cache.stats(),
    }


@router.get("/healthz")
async def is_alive() -> dict[str, str]:
    """Answer: the process is up."""
    return {"status": "ok"}


@router.get("/health")
async def read_health(request: Request) -> JSONResponse:
    """Say what is wrong with the guard. Its status is 503 only for what is wrong with this process alone.

    While Redis is down, each instance goes on without it. If each said 503, none would be left.
    """
    health = service_of(request).cache.health()
    is_unready = any(reason.code in OWN_TROUBLES for reason in health.reasons)
    return JSONResponse(health.as_dict(), status_code=503 if is_unready else 200)


@router.get("/readyz")
async def is_ready(request: Request) -> JSONResponse:
    """Say whether menus can be served, and which server is missing if one is."""
    service = service_of(request)
    postgres, redis = await _postgres_answers(service.pool), await service.redis_answers()
    can_do_without_redis = service.mode != "aiocache"
    status = "ready" if postgres and redis else "degraded" if postgres and can_do_without_redis else "unavailable"
    answers = {True: "answers", False: "does not answer"}
    content = {"status": status, "postgres": answers[postgres], "redis": answers[redis]}
    return JSONResponse(content, status_code=503 if status == "unavailable" else 200)


async def _postgres_answers(pool: asyncpg.Pool) -> bool:
    try:
        # The timeout includes the wait for a connection of a busy pool.
        async with asyncio.timeout(PROBE_TIMEOUT):
            await pool.fetchval("SELECT 1")
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return False
    return True
