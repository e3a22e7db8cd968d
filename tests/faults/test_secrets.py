"""Whatever goes wrong, no password, address, key or value is told to anybody."""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import Enum
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
from loaders import returning
from pydantic import AnyUrl, RedisDsn, Secret, SecretBytes, SecretStr, TypeAdapter

from demo_api.servers import HOST, ValkeyServer, free_port, valkey_server
from stampede_guard import ConfigurationError, Guard, InvalidationPending, LoadCancelled, coalesce
from stampede_guard.stores._redis.client import describe
from stampede_guard.stores.redis import RedisStore
from stampede_guard.testing import Gate

PASSWORD = "canary-password"  # a canary
CANARIES = (PASSWORD, "canary-value", "canary-op", "canary-user", "canary-space")


async def load() -> bytes:
    """Load a secret."""
    return b"canary-value"


async def use(guard: Guard) -> str:
    """Use the guard in every way; return everything that it shows of itself."""
    shown = [repr(guard)]
    async with guard:
        for op in ("canary-op-1", "canary-op-2"):
            for _ in range(3):
                await guard.fetch(op, load, l2_ttl=60, returns=bytes)
            with suppress(InvalidationPending):
                await guard.invalidate(op)
        with suppress(InvalidationPending):
            await guard.clear()
        tier = guard._states.running().tier
        assert tier is not None
        assert isinstance(tier.store, RedisStore)
        node = tier.store._topology.primary("")
        shown += [repr(each) for each in (guard, guard.stats(), tier, tier.store, tier.store._topology, node)]
        shown += [repr(tier.access), repr(tier.access.breaker(node.name)), repr(guard._states.running().backplane)]
        shown += [repr(guard.stats().as_dict())]
    return "".join(shown)


async def healthy(_: ValkeyServer) -> None:
    """Change nothing."""


async def frozen(server: ValkeyServer) -> None:
    """Let the server hang."""
    server.freeze()


async def dead(server: ValkeyServer) -> None:
    """Kill the server."""
    server.kill()


@pytest.mark.parametrize("fault", [healthy, frozen, dead])
@pytest.mark.parametrize("login", [f"default:{PASSWORD}", f"canary-user:{PASSWORD}", f":{PASSWORD}-wrong"])
async def test_nothing_is_told(
    login: str, fault: Callable[[ValkeyServer], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """With right and wrong logins, on a healthy, hanging and dead server, logs and reprs hold no secret."""
    caplog.set_level(logging.DEBUG)
    with valkey_server("--requirepass", PASSWORD, "--maxmemory", "1") as server:
        url = f"redis://{login}@{HOST}:{server.port}/1"
        await fault(server)
        async with asyncio.timeout(20):
            shown = await use(Guard(url, namespace="canary-space", deadline=0.1, connect_timeout=0.1))

    told = caplog.text + "".join(repr(record.args) for record in caplog.records)
    assert [canary for canary in CANARIES if canary in told] == []
    assert [canary for canary in (PASSWORD, "canary-value", "canary-user", str(server.port)) if canary in shown] == []


async def test_loaders_error_drags_no_store_error_along(caplog: pytest.LogCaptureFixture) -> None:
    """An error of the loader that follows one of the store has neither cause nor context from there."""

    async def fail() -> bytes:
        raise LookupError("no such menu")

    async with Guard(f"redis://:{PASSWORD}@{HOST}:{free_port()}") as guard:
        with pytest.raises(LookupError) as failure:
            await guard.fetch("menu-7", fail, l2_ttl=60, returns=bytes)

    assert failure.value.__cause__ is None
    assert failure.value.__context__ is None


async def test_key_of_a_load_that_does_not_end_is_not_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning about a load that ignores its cancellation does not have its key."""
    monkeypatch.setattr("stampede_guard._flights.scoreboard._GRACE", 0.001)
    gate, has_begun = Gate(), Gate()

    async def load_on() -> None:
        try:
            await has_begun.passage()
        except asyncio.CancelledError:
            await gate.passage()

    async with Guard(drain_timeout=0) as guard:
        call = asyncio.create_task(guard.fetch("canary-op", load_on))
        await has_begun.arrivals(1)
    with pytest.raises(LoadCancelled):
        await call
    gate.open()

    assert ["1 load ignores its cancellation; left behind at shut-down"] == caplog.messages
    assert "canary-op" not in "".join(repr(record.args) for record in caplog.records)


class Dish(Enum):
    SOUP = "soup"


class Lunch(msgspec.Struct, tag=True):
    dish: str


class Dinner(msgspec.Struct, tag=True):
    dish: str


class Menu(msgspec.Struct, forbid_unknown_fields=True):
    dish: str = "soup"


class Refusal(msgspec.MsgspecError):
    """An error of the user's own."""


class Checked(msgspec.Struct):
    dish: str

    def __post_init__(self) -> None:
        if self.dish != "soup":
            raise ValueError(self.dish)


class CheckedSize(msgspec.Struct):
    dish: str

    def __post_init__(self) -> None:
        raise OverflowError(self.dish)


class Quoting:
    """A codec of the user's own, whose errors quote the value."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def encode(self, value: object) -> bytes:
        raise self._error(f"no {value}")

    def decode(self, payload: bytes) -> object:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("options", "value"),
    [
        pytest.param({"returns": list[Literal["soup"]]}, ["canary-value"], id="literal"),
        pytest.param({"returns": list[Literal[7]]}, [70017001], id="number"),
        pytest.param({"returns": Dish}, "canary-value", id="enum"),
        pytest.param({"returns": Lunch | Dinner}, {"type": "canary-value"}, id="tag of a union"),
        pytest.param({"returns": Menu}, {"canary-value": 7}, id="unknown field"),
        pytest.param({"returns": dict[str, int]}, {"canary-value": "7"}, id="key of a dictionary"),
        pytest.param({"returns": Checked}, {"dish": "canary-value"}, id="check of a class"),
        pytest.param({"returns": CheckedSize}, {"dish": "canary-value"}, id="another error of a class"),
        pytest.param({"returns": str}, "canary-value \ud800", id="text that UTF-8 lacks"),
        *[
            pytest.param({"codec": Quoting(error)}, "canary-value", id=error.__name__)
            for error in (TypeError, OverflowError, UnicodeError, ValueError, msgspec.ValidationError, Refusal)
        ],
    ],
)
async def test_value_that_cannot_be_stored_is_not_quoted(
    options: Any, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning about a value that cannot be stored names its type, and quotes no part of it."""
    async with Guard() as guard:
        assert value == await guard.fetch("menu-7", returning(value), isolate=True, **options)

    (told,) = caplog.messages
    assert "which is not stored" in told
    assert [quoted for quoted in ("canary-value", "70017001", "ud800") if quoted in told] == []


URL = f"redis://canary-user:{PASSWORD}@{HOST}:6379/1"
WRONG: Any = URL


@pytest.mark.parametrize("make", [RedisDsn, AnyUrl, SecretStr, Secret[RedisDsn]], ids=lambda make: make.__name__)
async def test_url_of_pydantic(make: Any) -> None:
    """A URL as settings have it is one; its secret form too."""
    given = TypeAdapter(make).validate_python(URL)
    described = describe(given)

    assert (f"{HOST}", 6379) == described.addresses[0]
    assert PASSWORD == described.options["password"]
    assert Guard(given).has_store
    assert PASSWORD not in repr(described)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda: Guard(URL.encode()), id="bytes"),
        pytest.param(lambda: Guard([URL]), id="list"),
        pytest.param(lambda: Guard(SimpleNamespace(url=URL)), id="object"),
        pytest.param(lambda: Guard(SecretBytes(URL.encode())), id="secret bytes"),
        pytest.param(lambda: Guard(TypeAdapter(AnyUrl).validate_python(URL.replace("redis", "http"))), id="no Redis"),
        pytest.param(lambda: RedisStore(URL.encode()), id="bytes for a store"),
        pytest.param(lambda: Guard("redis://localhost", namespace=URL), id="namespace"),
        pytest.param(lambda: Guard("redis://localhost", deadline=WRONG), id="duration"),
        pytest.param(lambda: Guard(maxsize=WRONG), id="count"),
        pytest.param(lambda: Guard(rollout=WRONG), id="fraction"),
        pytest.param(lambda: Guard("redis://localhost", tracking=WRONG), id="flag"),
        pytest.param(lambda: coalesce(on_abandon=WRONG), id="choice"),
        pytest.param(lambda: coalesce(guard=WRONG), id="guard"),
    ],
)
def test_misplaced_url_is_not_shown(wrong: Callable[[], object]) -> None:
    """Wherever a URL is given by mistake, the error says what was expected, and shows nothing of it."""
    with pytest.raises(ConfigurationError) as failure:
        wrong()

    told = "".join(traceback.format_exception(failure.value.with_traceback(None)))
    assert [secret for secret in (PASSWORD, "canary-user", HOST) if secret in told] == []
