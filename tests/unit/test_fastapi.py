"""Routes of FastAPI that answer with answers."""

from collections.abc import AsyncIterator
from typing import Annotated

import httpx
import pytest
from fastapi import Depends, FastAPI, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from stampede_guard import Guard, coalesce
from stampede_guard.fastapi import AnswerInfo, Responder
from stampede_guard.testing import ManualClock


class Menu(BaseModel):
    """An answer."""

    number: int


class Codec:
    """A codec that counts what it decodes."""

    def __init__(self) -> None:
        self.decoded = 0

    def encode(self, value: Menu) -> bytes:
        return str(value.number).encode()

    def decode(self, payload: bytes) -> Menu:
        self.decoded += 1
        return Menu(number=int(payload))


@pytest.fixture
def codec() -> Codec:
    """Return the codec of the menus."""
    return Codec()


@pytest.fixture
async def client(clock: ManualClock, codec: Codec) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of a service with a route for each use."""
    guard, app = Guard(clock=clock), FastAPI()

    @coalesce("menu-{menu_id}", guard=guard, ttl=10, jitter=0, isolate=True, codec=codec)
    async def load_menu(menu_id: int) -> Menu:
        return Menu(number=menu_id)

    def as_json(menu: Menu) -> Response:
        return JSONResponse({"n": menu.number}, headers={"Cache-Control": "immutable", "X-Kind": "own"})

    @app.api_route("/menus/{menu_id}", methods=["GET", "HEAD", "POST"])
    async def read(menu_id: int, response: Response, info: AnswerInfo) -> Menu:
        response.headers["Vary"] = "Accept-Language"
        response.set_cookie("a", "1")
        response.set_cookie("b", "2")
        return info.respond(await load_menu.answer(menu_id))

    @app.get("/rendered/{menu_id}")
    async def render(menu_id: int, info: AnswerInfo) -> Response:
        return info.respond(await load_menu.answer(menu_id), as_json, cache="public", variant="json")

    @app.get("/numbers/{menu_id}")
    async def number(menu_id: int, info: Annotated[AnswerInfo, Depends()]) -> int:
        return info.respond(await load_menu.answer(menu_id), lambda menu: menu.number, cache="no-store")

    @app.get("/missing/{menu_id}")
    async def miss(menu_id: int, response: Response, info: AnswerInfo) -> Menu:
        response.status_code = 404
        return info.respond(await load_menu.answer(menu_id))

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://menus") as client:
        yield client


async def test_headers_and_value(client: httpx.AsyncClient, clock: ManualClock) -> None:
    """A response has the value, the headers of the answer, and those that the route has set."""
    await client.get("/menus/7")
    clock.advance(4)
    response = await client.get("/menus/7")

    assert (200, {"number": 7}) == (response.status_code, response.json())
    assert ("4", "private, max-age=10") == (response.headers["Age"], response.headers["Cache-Control"])
    assert "Accept-Language" == response.headers["Vary"]


async def test_not_modified(client: httpx.AsyncClient, clock: ManualClock, codec: Codec) -> None:
    """A client that has the value gets 304 with the headers of 200 and no body, and nothing is decoded."""
    first = await client.get("/menus/7")
    clock.advance(4)
    codec.decoded = 0
    known = [("If-None-Match", '"a", "b"'), ("If-None-Match", first.headers["ETag"])]
    response = await client.get("/menus/7", headers=known)

    assert (304, b"", 0) == (response.status_code, response.content, codec.decoded)
    names = ("ETag", "Cache-Control", "Vary")
    assert [first.headers[name] for name in names] == [response.headers[name] for name in names]
    assert "4" == response.headers["Age"]
    assert 2 == len(response.headers.get_list("Set-Cookie"))
    assert not {"Content-Type", "Content-Length"} & {name.title() for name in response.headers}


@pytest.mark.parametrize(
    ("method", "path", "tag", "status"),
    [
        ("HEAD", "/menus/7", "*", 304),
        ("POST", "/menus/7", "*", 200),
        ("GET", "/menus/8", '"a"', 200),
        ("GET", "/missing/7", "*", 404),
        ("GET", "/rendered/7", "*", 304),
    ],
)
async def test_conditions(client: httpx.AsyncClient, method: str, path: str, tag: str, status: int) -> None:
    """Only GET and HEAD are conditional, and only a response that would be a success."""
    assert status == (await client.request(method, path, headers={"If-None-Match": tag})).status_code


async def test_own_response(client: httpx.AsyncClient) -> None:
    """A response that the route makes itself gets the headers too; its own of the same names give way."""
    response = await client.get("/rendered/7")
    again = await client.get("/rendered/7", headers={"If-None-Match": f"W/{response.headers['ETag']}"})

    assert {"n": 7} == response.json()
    assert ["public, max-age=10"] == response.headers.get_list("Cache-Control", split_commas=False)
    assert "own" == response.headers["X-Kind"]
    assert response.headers["ETag"].endswith('-json"')
    assert (304, response.headers["ETag"]) == (again.status_code, again.headers["ETag"])


async def test_value_of_another_type(client: httpx.AsyncClient) -> None:
    """What is rendered may be a value, which FastAPI makes a response of; the dependency may also be spelled out."""
    response = await client.get("/numbers/7")

    assert (7, "no-store") == (response.json(), response.headers["Cache-Control"])
    assert "ETag" not in response.headers


def test_the_dependency_is_called_in_the_event_loop() -> None:
    """The alias names a coroutine function: FastAPI would call a class in a thread."""
    (dependency,) = AnswerInfo.__metadata__  # type: ignore[attr-defined]

    assert Responder is AnswerInfo.__origin__  # type: ignore[attr-defined]
    assert dependency.dependency.__code__.co_flags & 0x80  # inspect.CO_COROUTINE
