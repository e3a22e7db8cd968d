"""What type checkers must see in the public names. Never executed; read by mypy and pyright, both strict.

A line that must not pass has a `type: ignore`, and both checkers are told to report one that is not needed.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, assert_type

from asyncpg import Connection

from stampede_guard import (
    AdaptiveLimit,
    Coalesced,
    CoalescedMany,
    Codec,
    Entry,
    Guard,
    InvalidationPending,
    Scoreboard,
    StampedeGuardError,
    Stats,
    WaitTimeout,
    coalesce,
    coalesce_many,
)
from stampede_guard.fastapi import AnswerInfo
from stampede_guard.http import is_not_modified, response_headers
from stampede_guard.stores import Store
from stampede_guard.testing import FaultStore, ManualClock

T = TypeVar("T")
tenant: ContextVar[str] = ContextVar("tenant")


@dataclass
class Menu:
    """An answer."""

    restaurant_id: int


class MenuCodec:
    """A codec of a user's own."""

    def encode(self, value: Menu) -> bytes:
        """Return bytes."""
        return str(value.restaurant_id).encode()

    def decode(self, payload: bytes) -> Menu:
        """Return the menu."""
        return Menu(int(payload))


guard = Guard("redis://localhost:6379/0", namespace="menus", deadline=timedelta(milliseconds=150), rollout=0.25)
in_memory = Guard(maxsize=100, clock=ManualClock())
with_store = Guard(lambda: FaultStore(ManualClock()))
codec: Codec = MenuCodec()
store: Store = FaultStore(ManualClock())


# ── Functions ────────────────────────────────────────────────────────────────────────────────────


@coalesce
async def bare(base: str, quote: str = "USD", *, scale: int = 1) -> float:
    """Decorated bare."""
    return len(base + quote) / scale


@coalesce("restaurant-fetch-{restaurant_id}", guard=guard, ttl=5, l2_ttl=timedelta(seconds=10))
async def load_menu(restaurant_id: int) -> Menu:
    """Decorated with a template."""
    return Menu(restaurant_id)


def key_of_menu(restaurant_id: int, db: object) -> str:
    """Return an op."""
    return f"menu-{restaurant_id}"


@coalesce(
    key=key_of_menu,
    jitter=0,
    load_timeout=None,
    wait_timeout=0.5,
    on_abandon="cancel",
    isolate=True,
    ignore=("db",),
    vary=[tenant],
    inherit_context=True,
    codec=MenuCodec(),
)
async def with_everything(restaurant_id: int, db: object) -> Menu | None:
    """Decorated with every option."""
    return None


async def calls() -> None:
    """The result is the function's, and so are the parameters."""
    assert_type(await load_menu(7), Menu)
    assert_type(await load_menu(restaurant_id=7), Menu)
    assert_type(await bare("EUR"), float)
    assert_type(await bare("EUR", quote="CHF", scale=2), float)
    assert_type(await with_everything(7, db=object()), Menu | None)
    assert_type(await asyncio.create_task(load_menu(7)), Menu)
    assert_type(await asyncio.gather(load_menu(7), bare("EUR")), tuple[Menu, float])
    as_function: Callable[[int], Awaitable[Menu]] = load_menu
    assert_type(await as_function(7), Menu)


@coalesce(
    "menu-{restaurant_id}",
    guard=guard,
    tags=("restaurant:{restaurant_id}", "menus"),
    lease=False,
    max_loads=7,
    partition="restaurant:{restaurant_id}",
)
async def load_by_tags(restaurant_id: int) -> Menu:
    """Decorated with tags."""
    return Menu(restaurant_id)


async def wrong_calls() -> None:
    """A call that the function does not allow is an error."""
    await load_menu("x")  # type: ignore[arg-type]
    await load_menu()  # type: ignore[call-arg]
    await load_menu(7, 8)  # type: ignore[call-arg]
    await load_menu(id=7)  # type: ignore[call-arg]
    await bare("EUR", "CHF", 2)  # type: ignore[call-arg]
    await bare("EUR", scale="2")  # type: ignore[arg-type]


async def beside_the_call() -> None:
    """Everything else on the function takes the same arguments."""
    assert_type(load_menu.key(7), str)
    assert_type(load_menu.peek(7), Entry[Menu] | None)
    assert_type(await load_menu.refresh(7), Menu)
    assert_type(await load_menu.fresh(7), Menu)
    assert_type(await load_menu.bypass(7), Menu)
    assert_type(await load_menu.invalidate(7), None)
    assert_type(load_menu.guard, Guard)
    entry = load_menu.peek(7)
    if entry is not None:
        assert_type(entry.value, Menu)
        assert_type(entry.fresh_until, float)
    load_menu.key("x")  # type: ignore[arg-type]
    load_menu.peek("x")  # type: ignore[arg-type]
    await load_menu.refresh("x")  # type: ignore[arg-type]
    await load_menu.bypass("x")  # type: ignore[arg-type]
    await load_menu.invalidate()  # type: ignore[call-arg]


def types_of_functions() -> None:
    """A coalesced function has a type that can be written down."""
    written: Coalesced[[int], Menu] = load_menu
    assert_type(written.key(7), str)


# ── Functions whose first parameter could be a class ─────────────────────────────────────────────


@coalesce
async def of_object(key: object) -> Menu:
    """Take any object, a class among others."""
    return Menu(hash(key))


@coalesce("any-{key}", ttl=5)
async def of_any(key: Any, scale: int = 1) -> Menu:
    """Take anything, decorated with options."""
    return Menu(hash(key) * scale)


@coalesce
async def of_callable(make: Callable[[], int]) -> Menu:
    """Take a callable, as classes are."""
    return Menu(make())


@coalesce(ttl=5)
async def of_hashable(key: Hashable) -> Menu:
    """Take what has a hash, as classes have."""
    return Menu(hash(key))


@coalesce
async def of_type(kind: type[Menu]) -> Menu:
    """Take a class itself."""
    return kind(7)


@coalesce(ttl=5)
async def of_generic_type(kind: type[T]) -> T:
    """Take a class, and return an instance of it."""
    return kind()


async def calls_with_classes() -> None:
    """A function that takes a class, or could, is a function."""
    assert_type(await of_object(7), Menu)
    assert_type(of_object.key(key=7), str)
    assert_type(await of_any("x", 2), Menu)
    assert_type(await of_any.refresh("x", scale=2), Menu)
    assert_type(await of_callable(lambda: 7), Menu)
    assert_type(await of_hashable((1, 2)), Menu)
    assert_type(await of_type(Menu), Menu)
    assert_type(await of_type.invalidate(kind=Menu), None)
    assert_type(await of_generic_type(int), int)
    written: Coalesced[[object], Menu] = of_object
    assert_type(await written(7), Menu)
    await of_hashable([7])  # type: ignore[arg-type]
    await of_type(int)  # type: ignore[arg-type]
    await of_type()  # type: ignore[call-arg]


# ── Methods ──────────────────────────────────────────────────────────────────────────────────────


class Menus:
    """Has a method of each kind."""

    @coalesce("own-{restaurant_id}", ttl=5)
    async def own(self, restaurant_id: int) -> Menu:
        """Coalesced per instance."""
        return Menu(restaurant_id)

    @coalesce
    async def bare(self, restaurant_id: int) -> Menu:
        """Coalesced bare."""
        return Menu(restaurant_id)

    @coalesce
    @classmethod
    async def of_class(cls, restaurant_id: int) -> Menu:
        """Coalesced per class."""
        return Menu(restaurant_id)

    @coalesce(ttl=5)
    @classmethod
    async def of_class_with_options(cls, restaurant_id: int) -> Menu:
        """Coalesced per class, with options."""
        return Menu(restaurant_id)

    @coalesce
    @staticmethod
    async def alone(restaurant_id: int) -> Menu:
        """Coalesced for all."""
        return Menu(restaurant_id)

    @staticmethod
    @coalesce("static-{restaurant_id}")
    async def alone_inside(restaurant_id: int) -> Menu:
        """Coalesced for all, the other way round."""
        return Menu(restaurant_id)


class More(Menus):
    """Inherits them."""


async def methods(menus: Menus, more: More) -> None:
    """A method is bound, and keeps its parameters but the first."""
    assert_type(await menus.own(7), Menu)
    assert_type(await menus.bare(restaurant_id=7), Menu)
    assert_type(await more.own(7), Menu)
    assert_type(await Menus.own(menus, 7), Menu)
    written: Coalesced[[int], Menu] = menus.own
    assert_type(written.key(7), str)
    assert_type(menus.own.key(7), str)
    assert_type(menus.own.peek(7), Entry[Menu] | None)
    assert_type(await menus.own.refresh(7), Menu)
    assert_type(await menus.own.bypass(7), Menu)
    assert_type(await menus.own.invalidate(7), None)
    await menus.own("x")  # type: ignore[arg-type]
    await menus.own()  # type: ignore[call-arg]
    await menus.own.invalidate(menus, 7)  # type: ignore[call-arg, arg-type]


async def class_methods(menus: Menus) -> None:
    """A class method is bound to its class."""
    assert_type(await Menus.of_class(7), Menu)
    assert_type(await menus.of_class(7), Menu)
    assert_type(await More.of_class_with_options(7), Menu)
    assert_type(await Menus.of_class.refresh(7), Menu)
    assert_type(await Menus.of_class.invalidate(7), None)
    await Menus.of_class("x")  # type: ignore[arg-type]


async def static_methods() -> None:
    """A static method is bound to nothing (taken from an instance, pyright alone knows that)."""
    assert_type(await Menus.alone(7), Menu)
    assert_type(await Menus.alone_inside(7), Menu)
    assert_type(await Menus.alone_inside.refresh(7), Menu)
    await Menus.alone("x")  # type: ignore[arg-type]


# ── Many ids ─────────────────────────────────────────────────────────────────────────────────────


@coalesce_many("menu-{menu_id}", guard=guard, ttl=60, l2_ttl=300, max_batch=100, max_wait=timedelta(0))
async def load_menus(menu_ids: list[int]) -> dict[int, Menu]:
    """Decorated with options."""
    return {menu_id: Menu(menu_id) for menu_id in menu_ids}


@coalesce_many
async def names_of(codes: Sequence[str]) -> Mapping[str, str | None]:
    """Decorated bare."""
    return dict.fromkeys(codes)


class Shop:
    """Has a loader of many among its methods."""

    @coalesce_many("shop-{menu_id}", ttl=60)
    async def load(self, menu_ids: list[int]) -> dict[int, Menu]:
        """Decorated with options."""
        return {menu_id: Menu(menu_id) for menu_id in menu_ids}

    @coalesce_many
    async def bare(self, menu_ids: list[int]) -> dict[int, Menu]:
        """Decorated bare."""
        return {menu_id: Menu(menu_id) for menu_id in menu_ids}


async def many(shop: Shop) -> None:
    """The types of ids and of values are the loader's."""
    written: CoalescedMany[int, Menu] = load_menus
    assert_type(await written([1, 2]), dict[int, Menu])
    assert_type(await load_menus({1, 2}), dict[int, Menu])
    assert_type(await load_menus(range(3)), dict[int, Menu])
    assert_type(await load_menus.one(1), Menu | None)
    assert_type(await load_menus.one.refresh(1), Menu | None)
    assert_type(await load_menus.refresh([1]), dict[int, Menu])
    assert_type(await load_menus.fresh([1]), dict[int, Menu])
    assert_type(await load_menus.bypass([1]), dict[int, Menu])
    assert_type(await load_menus.invalidate(1, 2), None)
    assert_type(load_menus.peek(1), Entry[Menu | None] | None)
    assert_type(load_menus.key(1), str)
    assert_type(load_menus.tags(1), tuple[str, ...])
    assert_type(load_menus.guard, Guard)
    assert_type(await names_of(["a"]), dict[str, str | None])
    assert_type(await shop.load([1]), dict[int, Menu])
    assert_type(await shop.bare.one(1), Menu | None)


async def wrong_many(shop: Shop) -> None:
    """Ids are of the loader's type, and several."""
    await load_menus(["x"])  # type: ignore[list-item]
    await load_menus(1)  # type: ignore[arg-type]
    await load_menus.one("x")  # type: ignore[arg-type]
    await load_menus.invalidate("x")  # type: ignore[arg-type]
    load_menus.key([1])  # type: ignore[arg-type]
    await shop.load(["x"])  # type: ignore[list-item]


async def of_one(menu_id: int) -> dict[int, Menu]:
    """Take no list."""
    return {menu_id: Menu(menu_id)}


coalesce_many(of_one)  # type: ignore[arg-type]
coalesce_many(load_menu)  # type: ignore[arg-type]
coalesce_many(max_batch="7")  # type: ignore[call-overload]
coalesce_many(ignore=("db",))  # type: ignore[call-overload]


# ── Wrong decorations ────────────────────────────────────────────────────────────────────────────


def sync(restaurant_id: int) -> Menu:
    """Not async."""
    return Menu(restaurant_id)


coalesce(sync)  # type: ignore[arg-type]
coalesce(ttl="5")  # type: ignore[call-overload]
coalesce(on_abandon="stop")  # type: ignore[call-overload]
coalesce(tags=(7,))  # type: ignore[arg-type]
coalesce(version=7)  # type: ignore[call-overload]
coalesce(max_loads="7")  # type: ignore[call-overload]
coalesce(partition=7, max_loads=7)  # type: ignore[call-overload]
coalesce(tll=5)  # type: ignore[call-overload]
coalesce(vary=tenant)  # type: ignore[call-overload]
coalesce(codec=7)  # type: ignore[call-overload]


# ── Without a decorator ──────────────────────────────────────────────────────────────────────────


async def guards() -> None:
    """A guard is entered as itself, and fetches what the load returns."""
    async with guard as entered:
        assert_type(entered, Guard)
        assert_type(await guard.fetch("op-7", lambda: load_menu.bypass(7), ttl=5), Menu)
        assert_type(await guard.fetch("op-8", with_nothing, l2_ttl=5, returns=Menu), Menu | None)
        assert_type(await guard.invalidate("op-7"), None)
        assert_type(
            await guard.fetch("op-8", with_nothing, name="menus", max_loads=AdaptiveLimit(3), partition="7"),
            Menu | None,
        )
        await guard.fetch("op-8", with_nothing, name=7)  # type: ignore[arg-type]
        await guard.fetch(7, with_nothing)  # type: ignore[arg-type]
        await guard.fetch("op-9", load_menu)  # type: ignore[arg-type]
        await guard.fetch("op-9", sync)  # type: ignore[arg-type]
    guard.enabled = False
    guard.rollout = 0.5
    stats = guard.stats()
    assert_type(stats, Stats)
    assert_type(stats.calls, int)
    assert_type(stats.operations["op"].loads, int)
    assert_type(stats.as_dict(), dict[str, object])


async def invalidations(connection: Connection) -> None:
    """Whatever is invalidated, nothing is returned; what is raised when it is not confirmed is the package's."""
    assert_type(await guard.invalidate("op-7", version=7, wait=False), None)
    assert_type(await guard.invalidate_tag("menus", wait=False), None)
    assert_type(await guard.invalidate("menu-{menu_id}", menu_id=7, version=7), None)
    assert_type(await guard.invalidate_tag("restaurant:{restaurant_id}", restaurant_id=7, wait=False), None)
    assert_type(guard.peek("menu-{menu_id}", menu_id=7), Entry[Any] | None)
    assert_type(await guard.clear(wait=False), None)
    assert_type(guard.capabilities, frozenset[str])
    assert_type(load_by_tags.tags(7), tuple[str, ...])
    try:
        async with guard.after_commit(connection) as after:
            after.invalidate(load_menu.key(7), version=7)
            after.invalidate_tag("menus")
            after.invalidate_tag("restaurant:{restaurant_id}", restaurant_id=7)
            after.invalidate(7)  # type: ignore[arg-type]
    except InvalidationPending as error:
        caught: StampedeGuardError = error
        raise caught from None
    await guard.fetch("op-7", with_nothing, tags=("menus",), lease=False, version=lambda _: 7, max_loads=3)
    await guard.invalidate("op-7", version="7")  # type: ignore[arg-type]
    await guard.invalidate_tag(7)  # type: ignore[arg-type]
    await guard.fetch("op-7", with_nothing, tags=(7,))  # type: ignore[arg-type]
    guard.after_commit(store)  # type: ignore[arg-type]
    load_by_tags.tags("x")  # type: ignore[arg-type]


async def with_nothing() -> Menu | None:
    """Return nothing."""
    return None


async def scoreboards() -> None:
    """The bare debouncer returns what the load returns."""
    board = Scoreboard(load_timeout=timedelta(seconds=1), wait_timeout=0.5, on_abandon="cancel")
    assert_type(await board.debounce("menu-7", lambda: load_menu.bypass(7)), Menu)
    assert_type(await board.debounce("menu-7", with_nothing), Menu | None)
    assert_type(board.stats(), Stats)
    await board.debounce(7, with_nothing)  # type: ignore[arg-type]
    await board.debounce("menu-7", sync)  # type: ignore[arg-type]


async def errors() -> None:
    """A timeout of one's own is a `TimeoutError`."""
    try:
        await load_menu(7)
    except WaitTimeout as error:
        caught: TimeoutError = error
        raise caught from None


async def http_caching(info: AnswerInfo, method: str) -> None:
    """A route returns the value, or what is made of it."""
    answer = await load_menu.answer(7)
    assert_type(info.respond(answer), Menu)
    assert_type(info.respond(answer, lambda menu: menu.restaurant_id, cache="no-cache", variant="v2"), int)
    info.respond(answer, cache="shared")  # type: ignore[call-overload]
    headers = response_headers(answer, cache="public")
    assert_type(is_not_modified(method, None, headers.get("ETag")), bool)


def plain(guard: Guard, values: dict[str, Any]) -> None:
    """Options that are put together elsewhere may be passed on."""
    coalesce("menu-{restaurant_id}", guard=guard, **values)
