import asyncio
import logging
import re
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import httpx
import pytest
import uvicorn
from redis import Redis

from demo_api.app import SAMPLE, create_app
from demo_api.models import Menu
from demo_api.seeding import seed
from demo_api.servers import HOST, embedded_servers, free_port, valkey_server, wait_until
from demo_api.settings import Mode, Settings
from demo_api.topologies import valkey_sentinels
from stampede_guard import Guard, Health, Reason

MakeSettings = Callable[..., Settings]
Serve = Callable[[Settings], AbstractContextManager[str]]

EVERY_MODE = pytest.mark.parametrize("mode", ["off", "aiocache", "on"])
READERS = 50


@pytest.fixture
def make_settings(redis_url: str, menus_url: str) -> MakeSettings:
    """Settings of a service that nobody has used yet, with lives longer than a test."""
    unused: dict[str, Any] = {
        "redis_url": redis_url,
        "database_url": menus_url,
        "namespace": uuid4().hex,
        "l1_ttl": 60,
        "l2_ttl": 60,
        "pool_size": 2,
    }

    def make(**changes: Any) -> Settings:
        return Settings(**unused | changes)

    return make


@pytest.fixture
def serve() -> Serve:
    """Runs a service in a thread; gives its base URL."""

    @contextmanager
    def run(settings: Settings) -> Generator[str]:
        # On a busy machine a test may take longer than the five seconds after which an idle connection is closed.
        config = uvicorn.Config(create_app(settings), ws="none", log_level="warning", timeout_keep_alive=60)
        server = uvicorn.Server(config)
        with socket.socket() as listener:
            listener.bind((HOST, 0))
            thread = Thread(target=server.run, args=([listener],))
            thread.start()
            try:
                wait_until(lambda: server.started or not thread.is_alive(), "the service to start")
                yield f"http://{HOST}:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                thread.join()

    return run


@pytest.fixture
def client(serve: Serve, make_settings: MakeSettings) -> Generator[httpx.Client]:
    """A client of a service with the guard on."""
    with serve(make_settings()) as url, httpx.Client(base_url=url) as client:
        yield client


@asynccontextmanager
async def held_back(database_url: str) -> AsyncGenerator[None]:
    """Let no query read a restaurant before the block ends."""
    connection = await asyncpg.connect(database_url)
    try:
        async with connection.transaction():
            await connection.execute("LOCK TABLE stampede_demo.restaurants")
            yield
    finally:
        await connection.close()


@contextmanager
def cuttable(url: str) -> Generator[tuple[str, Callable[[], None]]]:
    """Lead to the server of *url* by another address, until the function that comes with it is called."""
    parts, ends = urlsplit(url), list[socket.socket]()

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 16):
                target.sendall(chunk)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    class Carrier(BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((parts.hostname, parts.port or 5432)) as upstream:
                ends.extend((self.request, upstream))
                back = Thread(target=copy, args=(upstream, self.request))
                back.start()
                copy(self.request, upstream)
                back.join()

    def cut() -> None:
        server.shutdown()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        server.server_close()

    with ThreadingTCPServer((HOST, 0), Carrier) as server:
        accepting = Thread(target=server.serve_forever, args=(0.01,))
        accepting.start()
        login = parts.netloc.rpartition("@")[0]
        try:
            yield parts._replace(netloc=f"{login}@{HOST}:{server.server_address[1]}").geturl(), cut
        finally:
            cut()
            accepting.join()


async def read_at_once(settings: Settings, url: str, loads: int) -> tuple[list[httpx.Response], int]:
    """Read one cold menu many times; Postgres answers nobody before all have asked and *loads* have begun.

    Returns:
        The responses, and how many queries they took.
    """
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as client,
        httpx.AsyncClient(base_url=url) as listener,  # each request of a client looks at all of its connections
        asyncio.timeout(30),
    ):
        stats = before = (await listener.get("/stats")).json()
        async with held_back(settings.database_url):
            reads = [asyncio.create_task(client.get("/restaurants/7/menu")) for _ in range(READERS)]
            while (stats["calls"], stats["loads"]) != (READERS, loads):
                stats = (await listener.get("/stats")).json()
        responses = [await read for read in reads]
        stats = (await listener.get("/stats")).json()
    return responses, stats["postgres_queries"] - before["postgres_queries"]


@pytest.mark.parametrize(("mode", "queries"), [("on", 1), ("off", READERS)])
async def test_concurrent_reads_of_a_cold_menu(
    mode: Mode, queries: int, make_settings: MakeSettings, serve: Serve
) -> None:
    """Fifty readers who find nothing cached share one query; when the guard is off, they cost fifty."""
    settings = make_settings(guard=mode)
    with serve(settings) as url:
        responses, queried = await read_at_once(settings, url, loads=queries)

    assert queries == queried
    assert {200} == {response.status_code for response in responses}
    assert 1 == len({response.content for response in responses})


def test_every_mode_serves_the_same_bytes(make_settings: MakeSettings, serve: Serve) -> None:
    """Whatever `GUARD` says, a menu is the same body, first from Postgres and then from the cache."""
    bodies: list[bytes] = []
    for mode in ("off", "aiocache", "on"):
        with serve(make_settings(guard=mode)) as url:
            bodies += [httpx.get(f"{url}/restaurants/11/menu").content for _ in range(2)]

    assert 6 == len(bodies)
    assert 1 == len(set(bodies))


def test_a_menu_has_all_five_levels(client: httpx.Client) -> None:
    """The body is a `Menu` down to the options."""
    response = client.get("/restaurants/1/menu")

    menu = Menu.model_validate_json(response.content)
    groups = [group for category in menu.categories for item in category.items for group in item.option_groups]
    assert "application/json" == response.headers["content-type"]
    assert 1 == menu.restaurant_id
    assert any(group.options for group in groups)


@EVERY_MODE
def test_whoever_reads_after_a_change_sees_it(make_settings: MakeSettings, serve: Serve, mode: Mode) -> None:
    """A change is answered with the new item, and the next read of the cached menu shows it."""
    with serve(make_settings(guard=mode)) as url, httpx.Client(base_url=url) as client:
        item = first_item(client.get("/restaurants/13/menu"))
        price = item["price_cents"] + 5
        changed = client.patch(f"/restaurants/13/items/{item['id']}", json={"price_cents": price})
        seen = first_item(client.get("/restaurants/13/menu"))

    assert 200 == changed.status_code
    assert price == changed.json()["price_cents"]
    assert price == seen["price_cents"]
    assert item["name"] == seen["name"]


@EVERY_MODE
def test_a_change_gives_the_menu_a_new_version(make_settings: MakeSettings, serve: Serve, mode: Mode) -> None:
    """The answer to a change names the next version, and the next read returns a menu of that version."""
    with serve(make_settings(guard=mode)) as url, httpx.Client(base_url=url) as client:
        before = client.get("/restaurants/31/menu").json()
        item_id = before["categories"][0]["items"][0]["id"]
        changed = client.patch(f"/restaurants/31/items/{item_id}", json={"price_cents": 505})
        after = client.get("/restaurants/31/menu").json()

    assert before["version"] + 1 == changed.json()["menu_version"] == after["version"]
    assert "Invalidation" not in changed.headers


def test_a_version_older_than_the_change_is_not_stored(make_settings: MakeSettings, serve: Serve) -> None:
    """What a lagging replica of Postgres would return after a change is answered, and remembered nowhere."""
    settings = make_settings()
    with serve(settings) as url, httpx.Client(base_url=url) as client:
        item = first_item(client.get("/restaurants/37/menu"))
        new = client.patch(f"/restaurants/37/items/{item['id']}", json={"price_cents": 505}).json()["menu_version"]
        asyncio.run(set_version(settings.database_url, 37, new - 1))
        lagging = [client.get("/restaurants/37/menu").json()["version"] for _ in range(3)]
        asyncio.run(set_version(settings.database_url, 37, new))
        before = client.get("/stats").json()["loads"]
        latest = [client.get("/restaurants/37/menu").json()["version"] for _ in range(3)]
        after = client.get("/stats").json()["loads"]

    assert [new - 1] * 3 == lagging
    assert [new] * 3 == latest
    assert 1 == after - before


def test_menus_are_for_http_caches(make_settings: MakeSettings, serve: Serve) -> None:
    """A menu comes with age, life and entity tag; a client that has it gets 304, until it changes."""
    path = "/restaurants/53/menu"
    with serve(make_settings(stale=30, stale_if_error=3600)) as url, httpx.Client(base_url=url) as client:
        first = client.get(path)
        known = {"If-None-Match": first.headers["ETag"]}
        same = client.get(path, headers=known)
        item = first_item(first)
        client.patch(f"/restaurants/53/items/{item['id']}", json={"price_cents": item["price_cents"] + 5})
        changed = client.get(path, headers=known)

    assert ("0", (200, 304, 200)) == (first.headers["Age"], tuple(each.status_code for each in (first, same, changed)))
    assert re.fullmatch(
        r"public, max-age=(59|60), stale-while-revalidate=30, stale-if-error=3600", first.headers["Cache-Control"]
    )
    assert (b"", first.headers["ETag"]) == (same.content, same.headers["ETag"])
    assert first.headers["ETag"] != changed.headers["ETag"]


@pytest.mark.parametrize("window", ["stale", "stale_if_error"])
def test_old_menus_during_an_outage(make_settings: MakeSettings, serve: Serve, menus_url: str, window: str) -> None:
    """While Postgres cannot be reached a menu is old, says so to HTTP caches, and can still be 304."""
    lives: dict[str, float] = {"l1_ttl": 0.05, "l2_ttl": 0.05, window: 3600}
    with (
        cuttable(menus_url) as (through, cut),
        serve(make_settings(database_url=through, **lives)) as url,
        httpx.Client(base_url=url) as client,
    ):
        first = client.get("/restaurants/59/menu")
        cut()
        wait_until(lambda: client.get("/restaurants/59/menu").headers["Age"] != "0", "the menu to be old")
        old = client.get("/restaurants/59/menu")
        same = client.get("/restaurants/59/menu", headers={"If-None-Match": first.headers["ETag"]})

    directive = {"stale": "stale-while-revalidate", "stale_if_error": "stale-if-error"}[window]
    assert (200, first.content, first.headers["ETag"]) == (old.status_code, old.content, old.headers["ETag"])
    assert f"public, max-age=0, {directive}=3600" == old.headers["Cache-Control"]
    assert (304, old.headers["Cache-Control"]) == (same.status_code, same.headers["Cache-Control"])
    assert int(same.headers["Age"]) >= 1


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_change_without_redis_is_made(
    make_settings: MakeSettings, serve: Serve, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis dies after a menu was cached: the change is committed, answered as pending, logged, and seen here."""
    with valkey_server() as valkey, serve(make_settings(guard=mode, redis_url=valkey.url)) as url:
        item = first_item(httpx.get(f"{url}/restaurants/41/menu"))
        price = item["price_cents"] + 5
        valkey.kill()
        with caplog.at_level(logging.WARNING, "demo_api"):
            changed = httpx.patch(f"{url}/restaurants/41/items/{item['id']}", json={"price_cents": price})
        seen = first_item(httpx.get(f"{url}/restaurants/41/menu"))

    said = [record.message for record in caplog.records if record.name == "demo_api.routes"]
    assert (200, "pending") == (changed.status_code, changed.headers["Invalidation"])
    assert price == changed.json()["price_cents"] == seen["price_cents"]
    assert 1 == len(said)
    assert said[0].startswith("restaurant 41 was changed, and ")


@pytest.mark.parametrize(("lease", "loads"), [(True, 1), (False, 2)])
async def test_processes_share_a_load_unless_the_lease_is_off(
    make_settings: MakeSettings, serve: Serve, *, lease: bool, loads: int
) -> None:
    """Of two services that are asked for one cold menu at once, the second waits for the first, or loads too."""
    settings = make_settings(lease=lease)
    async with asyncio.timeout(30), httpx.AsyncClient(timeout=30) as client:
        with serve(settings) as first, serve(settings) as second:
            async with held_back(settings.database_url):
                reads = [asyncio.create_task(client.get(f"{url}/restaurants/43/menu")) for url in (first, second)]
                begun: list[int] = []
                while 2 != sum(begun):  # both are waiting: for Postgres, or for each other
                    stats = [(await client.get(f"{url}/stats")).json() for url in (first, second)]
                    begun = [each["loads"] + (each["guard"]["l2_waits"] if lease else 0) for each in stats]
            responses = [await read for read in reads]
            stats = [(await client.get(f"{url}/stats")).json() for url in (first, second)]

    assert loads == sum(each["loads"] for each in stats) == sum(each["postgres_queries"] - 1 for each in stats)
    assert 1 == len({response.content for response in responses})


@EVERY_MODE
def test_a_list_of_restaurants(make_settings: MakeSettings, serve: Serve, mode: Mode) -> None:
    """A list has the restaurants in the order asked, each once, and says which ids none has; cold and cached."""
    with serve(make_settings(guard=mode)) as url, httpx.Client(base_url=url) as client:
        answers = [client.get("/restaurants?ids=5,3,9999,5,4").json() for _ in range(2)]
        menu = client.get("/restaurants/3/menu").json()

    items = [item for category in menu["categories"] for item in category["items"] if item["available"]]
    expected = {
        "restaurant_id": 3,
        **{name: menu[name] for name in ("restaurant", "cuisine", "currency", "version")},
        "available_items": len(items),
        "lowest_price_cents": min(item["price_cents"] for item in items),
    }
    assert [5, 3, 4] == [restaurant["restaurant_id"] for restaurant in answers[0]["restaurants"]]
    assert [9999] == answers[0]["missing"]
    assert expected == answers[0]["restaurants"][1]
    assert answers[0] == answers[1]


def test_a_list_costs_one_query_for_what_is_not_cached(make_settings: MakeSettings, serve: Serve) -> None:
    """Of a hundred restaurants, those that no list has shown yet are read together; a second process finds them all."""
    settings = make_settings()
    queries: list[int] = []
    first_ids, all_ids = (",".join(map(str, range(1, last))) for last in (41, 101))
    for ids in ((first_ids, all_ids, all_ids), (all_ids,)):
        with serve(settings) as url, httpx.Client(base_url=url) as client:
            for each in ids:
                before = client.get("/stats").json()["postgres_queries"]
                client.get(f"/restaurants?ids={each}").raise_for_status()
                queries.append(client.get("/stats").json()["postgres_queries"] - before)

    assert [1, 1, 0, 0] == queries


@EVERY_MODE
def test_a_list_shows_a_change(make_settings: MakeSettings, serve: Serve, mode: Mode) -> None:
    """After a change was answered, neither the list nor the menu is an old one; nor in another process."""
    settings = make_settings(guard=mode)
    with serve(settings) as url, serve(settings) as other, httpx.Client() as client:
        item = first_item(client.get(f"{url}/restaurants/47/menu"))
        before = [client.get(f"{each}/restaurants?ids=46,47").json()["restaurants"] for each in (url, other)]
        change = {"available": not item["available"], "price_cents": 1}
        changed = client.patch(f"{url}/restaurants/47/items/{item['id']}", json=change).json()["menu_version"]
        after = client.get(f"{url}/restaurants?ids=46,47").json()["restaurants"]
        wait_until(
            lambda: changed == client.get(f"{other}/restaurants?ids=47").json()["restaurants"][0]["version"],
            "the other process to hear of it",
        )
        menu = client.get(f"{url}/restaurants/47/menu").json()

    assert before[0] == before[1]
    assert before[0][0] == after[0]
    assert changed == before[0][1]["version"] + 1 == after[1]["version"] == menu["version"]
    assert 1 == abs(before[0][1]["available_items"] - after[1]["available_items"])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("", "'' is no id; give numbers up to 2147483647, separated by commas"),
        ("1,,2", "'' is no id"),
        ("1,seven", "'seven' is no id"),
        ("-1", "'-1' is no id"),
        ("1, 2", "' 2' is no id"),
        ("1;DROP TABLE menus", "'1;DROP TABLE menus' is no id"),
        ("\u0663", "is no id"),
        (str(2**31), "'2147483648' is no id"),
        ("9" * 1000, "'99999999999999999999' is no id"),
        (",".join(["1"] * 101), "101 ids; give at most 100"),
    ],
)
def test_a_list_of_what_cannot_be_ids(client: httpx.Client, ids: str, message: str) -> None:
    """Nonsense, numbers that Postgres could not hold and lists without end are refused before anything is read."""
    response = client.get("/restaurants", params={"ids": ids})

    assert 422 == response.status_code
    assert message in response.json()["detail"]


def test_a_list_without_ids(client: httpx.Client) -> None:
    """Which restaurants has to be said."""
    assert 422 == client.get("/restaurants").status_code


def test_a_change_of_name_and_availability(client: httpx.Client) -> None:
    """Whatever else the change names is changed, too."""
    item = first_item(client.get("/restaurants/17/menu"))
    client.patch(f"/restaurants/17/items/{item['id']}", json={"name": "Soup of the Day", "available": False})

    seen = first_item(client.get("/restaurants/17/menu"))
    assert ("Soup of the Day", False, item["price_cents"]) == (seen["name"], seen["available"], seen["price_cents"])


@pytest.mark.parametrize("change", [{}, {"price_cents": 0}, {"name": ""}, {"price_cents": None}, {"cost": 5}])
def test_a_change_that_makes_no_sense_is_refused(client: httpx.Client, change: dict[str, Any]) -> None:
    """Nothing to change, a price of nothing, no name, an unknown field: 422."""
    assert 422 == client.patch("/restaurants/1/items/1", json=change).status_code


def test_an_item_of_another_restaurant_cannot_be_changed(client: httpx.Client) -> None:
    """An item is found through its own restaurant alone."""
    item = first_item(client.get("/restaurants/19/menu"))

    response = client.patch(f"/restaurants/20/items/{item['id']}", json={"price_cents": 1})

    assert 404 == response.status_code
    assert item == first_item(client.get("/restaurants/19/menu"))
    assert 1 == client.get("/stats").json()["loads"]


@EVERY_MODE
def test_an_unknown_restaurant(make_settings: MakeSettings, serve: Serve, mode: Mode) -> None:
    """An id that no restaurant has is 404, with the reason."""
    with serve(make_settings(guard=mode)) as url:
        response = httpx.get(f"{url}/restaurants/9999/menu")

    assert 404 == response.status_code
    assert {"detail": "There is no restaurant 9999"} == response.json()


def test_that_a_restaurant_is_unknown_is_remembered(client: httpx.Client) -> None:
    """Asking again for an unknown restaurant costs no second query."""
    for _ in range(3):
        client.get("/restaurants/9999/menu")

    assert 1 == client.get("/stats").json()["loads"]


@pytest.mark.parametrize("restaurant_id", ["-1", "seven", "7.5", str(2**31), "9" * 30])
def test_an_id_that_cannot_be_one(client: httpx.Client, restaurant_id: str) -> None:
    """Nonsense and numbers that Postgres could not hold are refused before anything is read."""
    assert 422 == client.get(f"/restaurants/{restaurant_id}/menu").status_code


def test_the_prebuilt_menu_is_a_real_one(client: httpx.Client) -> None:
    """The ceiling sends the very bytes that the service would read, and reads nothing."""
    real = client.get(f"/restaurants/{SAMPLE}/menu")
    before = client.get("/stats").json()

    prebuilt = client.get("/prebuilt/1/menu")

    assert (real.content, real.headers["content-type"]) == (prebuilt.content, prebuilt.headers["content-type"])
    assert before == client.get("/stats").json()


@pytest.mark.parametrize("mode", ["off", "on"])
def test_the_statistics_add_up(make_settings: MakeSettings, serve: Serve, mode: Mode) -> None:
    """What memory does not answer is an execution, and an L2 hit or a load; Redis counts the same reads."""
    with valkey_server() as valkey, Redis(port=valkey.port) as redis:
        settings = make_settings(guard=mode, redis_url=valkey.url)
        with serve(settings) as url, httpx.Client(base_url=url) as client:
            for restaurant_id in (1, 2, 3, 1, 2, 1):
                client.get(f"/restaurants/{restaurant_id}/menu")
            first = client.get("/stats").json()
        with serve(settings) as url, httpx.Client(base_url=url) as client:
            for restaurant_id in (1, 2, 4):
                client.get(f"/restaurants/{restaurant_id}/menu")
            second = client.get("/stats").json()
        looks = commands(redis, "getrange")

    assert mode == first["mode"]
    assert (6, 3, 3, 3) == tuple(first[name] for name in ("calls", "executions", "loads", "redis_reads"))
    assert 3 == first["guard"]["l1_hits"]
    assert (3, 3, 1, 3) == tuple(second[name] for name in ("calls", "executions", "loads", "redis_reads"))
    assert 2 == second["guard"]["l2_hits"]
    assert (3 + 3) + (3 + 1) == looks  # each read looks at the value once, and so does each fill


def test_the_statistics_of_aiocache(make_settings: MakeSettings, serve: Serve) -> None:
    """Each call is a read of Redis, and a cold one reads once more behind the lease; Redis counts the same."""
    with valkey_server() as valkey, Redis(port=valkey.port) as redis:
        settings = make_settings(guard="aiocache", redis_url=valkey.url)
        with serve(settings) as url, httpx.Client(base_url=url) as client:
            client.get("/restaurants/1/menu")
            cold, reads_before = client.get("/stats").json(), commands(redis, "get")
            for _ in range(4):
                client.get("/restaurants/1/menu")
            warm, reads_after = client.get("/stats").json(), commands(redis, "get")

    names = ("calls", "executions", "loads", "redis_reads", "guard")
    assert (1, 1, 1, 2, None) == tuple(cold[name] for name in names)
    assert (5, 5, 1, 6, None) == tuple(warm[name] for name in names)
    assert 4 == reads_after - reads_before


@EVERY_MODE
def test_a_service_with_everything_is_ready(make_settings: MakeSettings, serve: Serve, mode: Mode) -> None:
    """With Postgres and Redis there, every mode says so."""
    with serve(make_settings(guard=mode)) as url:
        response = httpx.get(f"{url}/readyz")

    assert 200 == response.status_code
    assert {"status": "ready", "postgres": "answers", "redis": "answers"} == response.json()


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_service_does_without_redis(make_settings: MakeSettings, serve: Serve, mode: Mode) -> None:
    """When Redis dies, the service is degraded, and still serves menus that it has never read."""
    with valkey_server() as valkey, serve(make_settings(guard=mode, redis_url=valkey.url)) as url:
        valkey.kill()
        ready, menu = httpx.get(f"{url}/readyz"), httpx.get(f"{url}/restaurants/23/menu")

    assert (200, "degraded", "does not answer") == (ready.status_code, ready.json()["status"], ready.json()["redis"])
    assert 200 == menu.status_code


def test_a_service_tells_of_its_guard(make_settings: MakeSettings, serve: Serve) -> None:
    """Without Redis the guard names the server that is missing, and the service is still to be used."""
    with valkey_server() as valkey, serve(make_settings(redis_url=valkey.url)) as url:
        before = httpx.get(f"{url}/health")
        valkey.kill()
        wait_until(lambda: not httpx.get(f"{url}/health").json()["is_healthy"], "the loss of Redis")
        after = httpx.get(f"{url}/health")

    assert (200, {"is_healthy": True, "reasons": []}) == (before.status_code, before.json())
    assert 200 == after.status_code
    assert {reason["code"] for reason in after.json()["reasons"]} <= {"bus_lost", "store_unavailable"}


@pytest.mark.parametrize(("code", "status"), [("load_overdue", 503), ("bus_lost", 200)])
def test_a_service_is_unready_for_reasons_of_its_own(
    code: Any, status: int, make_settings: MakeSettings, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what another process would do better takes a process out of use."""
    monkeypatch.setattr(Guard, "health", lambda _: Health((Reason(code, "so it is"),)))
    with serve(make_settings()) as url:
        response = httpx.get(f"{url}/health")

    assert status == response.status_code
    assert [{"code": code, "text": "so it is"}] == response.json()["reasons"]


def test_a_service_behind_sentinels(make_settings: MakeSettings, serve: Serve) -> None:
    """The service is ready while the sentinels' primary answers, and ready again once there is a new one."""
    with valkey_sentinels(replicas=1) as valkeys, serve(make_settings(redis_url=valkeys.url)) as url:
        ready = httpx.get(f"{url}/readyz").json()["status"]
        valkeys.primary.freeze()
        hanging = httpx.get(f"{url}/readyz", timeout=30).json()["status"]
        valkeys.primary.kill()
        wait_until(lambda: "ready" == httpx.get(f"{url}/readyz").json()["status"], "the new primary", deadline=30)

    assert ("ready", "degraded") == (ready, hanging)


def test_aiocache_does_not_do_without_redis(make_settings: MakeSettings, serve: Serve) -> None:
    """Its lease lives in Redis alone, so without Redis the service asks for no more traffic."""
    with valkey_server() as valkey, serve(make_settings(guard="aiocache", redis_url=valkey.url)) as url:
        valkey.kill()
        ready = httpx.get(f"{url}/readyz")

    assert (503, "unavailable") == (ready.status_code, ready.json()["status"])


def test_a_service_starts_without_redis(
    make_settings: MakeSettings, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """A Redis that is not there at the start is worth a warning, and no reason not to serve."""
    settings = make_settings(redis_url=f"redis://127.0.0.1:{free_port()}/0")
    with caplog.at_level(logging.WARNING), serve(settings) as url:
        ready, menu = httpx.get(f"{url}/readyz"), httpx.get(f"{url}/restaurants/29/menu")

    assert "degraded" == ready.json()["status"]
    assert 200 == menu.status_code
    assert {"stampede_guard"} == {record.name for record in caplog.records}
    assert 1 == sum("Redis does not answer" in record.message for record in caplog.records)


def test_a_service_cannot_do_without_postgres(make_settings: MakeSettings, serve: Serve) -> None:
    """When Postgres dies, the service is alive but not ready."""
    with ExitStack() as service:
        with embedded_servers(redis=False) as urls:
            asyncio.run(seed(urls.postgres))
            url = service.enter_context(serve(make_settings(database_url=urls.postgres)))
        alive, ready = httpx.get(f"{url}/healthz"), httpx.get(f"{url}/readyz")

    assert (200, {"status": "ok"}) == (alive.status_code, alive.json())
    assert 503 == ready.status_code
    assert {"status": "unavailable", "postgres": "does not answer", "redis": "answers"} == ready.json()


async def set_version(database_url: str, restaurant_id: int, version: int) -> None:
    """Set the version of a menu behind the service's back."""
    connection = await asyncpg.connect(database_url)
    try:
        statement = "UPDATE stampede_demo.restaurants SET version = $2 WHERE id = $1"
        await connection.execute(statement, restaurant_id, version)
    finally:
        await connection.close()


def first_item(response: httpx.Response) -> dict[str, Any]:
    """Return the first item of a menu."""
    item: dict[str, Any] = response.json()["categories"][0]["items"][0]
    return item


def commands(redis: Redis, *names: str) -> int:
    """Return how often the server has run the commands."""
    stats: dict[str, Any] = redis.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names)
