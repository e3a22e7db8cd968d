"""What calls cost: round trips and commands, counted on the wire and by the server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from math import inf
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from inside import is_expecting, tier_of
from observing import commands_run, load_scripts
from proxying import CountingProxy
from redis.asyncio import Redis
from waiting import until

from stampede_guard import Guard, _path, coalesce
from stampede_guard._bus import backplane
from stampede_guard._l2.upkeep import HeldLease
from stampede_guard._operations import operation
from stampede_guard._stats import Counters
from stampede_guard.testing import Gate

OP = "menu-7"
ACQUIRED = {"getrange": 1, "get": 1, "set": 1}
FILLED = {"get": 1, "getrange": 1, "del": 1, "set": 1}
MARKED = {"get": 1, "pttl": 1}


class Cost(NamedTuple):
    """What something cost.

    Attributes:
        round_trips: How often a guard had to wait for the server.
        sent: Names of the commands that went over the wire, in order.
        ran: How often the server ran each command, within scripts and without.
    """

    round_trips: int
    sent: list[str]
    ran: dict[str, int]


class Meter:
    """Two guards over one proxy, that have all that a first call needs."""

    def __init__(self, proxy: CountingProxy, admin: Redis, guard: Guard, other: Guard) -> None:
        self.guard = guard
        self.other = other
        self._proxy = proxy
        self._admin = admin

    async def cost(self, action: Callable[[], Awaitable[object]]) -> Cost:
        """Return what *action* costs."""
        before = await commands_run(self._admin)
        self._proxy.restart()
        await action()
        round_trips, sent = self._proxy.round_trips, [*self._proxy.commands]
        ran = await commands_run(self._admin) - before
        del ran["info"]  # our own
        return Cost(round_trips, sent, dict(ran))


def added(*parts: dict[str, int]) -> dict[str, int]:
    """Return the sum of *parts*."""
    return {name: sum(part.get(name, 0) for part in parts) for name in {name for part in parts for name in part}}


def evalsha(times: int) -> dict[str, int]:
    """Return that so many scripts were run."""
    return {"evalsha": times}


@pytest.fixture
async def meter(
    redis_url: str, namespace: str, admin: Redis, unasked: None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Meter]:
    """Return guards that say no word of their own accord, connected, with scripts and marks in place."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 600.0)
    monkeypatch.setattr(operation, "_LEASES", (60.0, 60.0))
    monkeypatch.setattr(_path, "_POLLS", (60.0, 60.0))
    await load_scripts(admin)
    proxy = CountingProxy(urlsplit(redis_url).port or 6379)
    options: dict[str, Any] = {"namespace": namespace, "deadline": 5, "connect_timeout": 5}
    async with proxy, Guard(proxy.url, **options) as guard, Guard(proxy.url, **options) as other:
        for each in (guard, other):
            await ask(each, "warm-up", tags=("menus", "restaurant:3"))
            await ask(each, "warm-up", tags=("menus", "restaurant:3"))
        yield Meter(proxy, admin, guard, other)


async def _settled(guard: Guard) -> None:
    await until(lambda: not tier_of(guard).upkeep, "what nobody waits for")


async def load() -> str:
    """Load."""
    return "soup"


async def fail() -> str:
    """Load nothing."""
    raise ValueError("out of soup")


async def ask(guard: Guard, op: str = OP, **options: Any) -> str:
    """Make a call that looks into the store."""
    return await guard.fetch(op, load, l2_ttl=60, returns=str, **options)


@pytest.mark.parametrize(
    ("options", "commands", "more"),
    [
        ({}, 3, ()),
        ({"version": len}, 3, ({"get": 1},)),  # the lowest version is looked up on the server
        ({"tags": ("menus", "restaurant:3")}, 5, (MARKED, MARKED)),
    ],
    ids=["plain", "version", "tags"],
)
async def test_cold_miss(options: Any, commands: int, more: tuple[Any, ...], meter: Meter) -> None:
    """A miss costs two round trips: the right to load, with the namespace's mark, and the fill; a tag adds none."""
    cost = await meter.cost(lambda: ask(meter.guard, **options))

    assert (2, ["EVALSHA"] * commands) == cost[:2]
    assert added(evalsha(commands), ACQUIRED, MARKED, FILLED, *more) == cost.ran


async def test_cold_miss_of_many_callers(meter: Meter) -> None:
    """A hundred callers of one guard cost what one costs."""
    cost = await meter.cost(lambda: asyncio.gather(*(ask(meter.guard) for _ in range(100))))

    assert (2, ["EVALSHA"] * 3) == cost[:2]


async def test_hit_in_the_store(meter: Meter) -> None:
    """A hit costs one round trip."""
    await ask(meter.other)

    cost = await meter.cost(lambda: ask(meter.guard))

    assert (1, ["EVALSHA"] * 2) == cost[:2]
    assert added(evalsha(2), {"getrange": 1, "pttl": 1}, MARKED) == cost.ran


async def test_hit_with_tags(meter: Meter) -> None:
    """Here too, each tag adds a command, and no round trip."""
    await ask(meter.other, tags=("menus", "restaurant:3"))

    cost = await meter.cost(lambda: ask(meter.guard, tags=("menus", "restaurant:3")))

    assert (1, ["EVALSHA"] * 4) == cost[:2]


async def test_hit_in_memory(meter: Meter) -> None:
    """A hit in memory costs nothing."""
    await ask(meter.guard, ttl=60)

    assert (0, [], {}) == await meter.cost(lambda: ask(meter.guard, ttl=60))


async def test_memory_alone(meter: Meter) -> None:
    """What is not to be stored does not bother the store."""
    assert (0, [], {}) == await meter.cost(lambda: meter.guard.fetch(OP, load, ttl=60))


async def test_entry_whose_tag_was_invalidated(meter: Meter) -> None:
    """An entry that is there and not valid costs one round trip more than none: it is asked for without it."""
    await ask(meter.other, tags=("menus",))
    await meter.other.invalidate_tag("menus")

    cost = await meter.cost(lambda: ask(meter.guard, tags=("menus",)))

    assert (3, ["EVALSHA"] * 7) == cost[:2]


@pytest.mark.parametrize(
    ("version", "more"), [(None, {}), (7, {"get": 1, "pexpire": 1, "set": 1})], ids=["plain", "version"]
)
async def test_invalidation(version: int | None, more: dict[str, int], meter: Meter) -> None:
    """An invalidation costs one round trip and one message; the lowest version is kept by the same script."""
    await ask(meter.guard)

    cost = await meter.cost(lambda: meter.guard.invalidate(OP, version=version))

    assert (1, ["EVALSHA"]) == cost[:2]
    assert {"evalsha": 1, "del": 1, "publish": 1} | more == cost.ran


@pytest.mark.parametrize("is_tag", [True, False], ids=["tag", "clear"])
async def test_invalidation_of_many(is_tag: bool, meter: Meter) -> None:
    """So does one of all entries with a tag, and one of everything."""
    guard = meter.guard

    cost = await meter.cost(lambda: guard.invalidate_tag("menus") if is_tag else guard.clear())

    assert (1, ["EVALSHA"]) == cost[:2]
    assert {"evalsha": 1, "time": 1, "pexpire": 1, "set": 1, "publish": 1} == cost.ran


async def test_refresh(meter: Meter) -> None:
    """A refresh costs what a miss costs, and one message; it reads what it is to replace."""

    @coalesce(OP, guard=meter.guard, l2_ttl=60)
    async def refreshed() -> str:
        return "soup"

    await refreshed()
    cost = await meter.cost(refreshed.refresh)

    assert (2, ["EVALSHA"] * 3) == cost[:2]
    assert added(evalsha(3), ACQUIRED, {"pttl": 1}, MARKED, FILLED, {"publish": 1}) == cost.ran


async def test_failed_load(meter: Meter) -> None:
    """A load that fails costs as many round trips as one that does not: the right is given back."""

    async def action() -> None:
        with pytest.raises(ValueError, match="out of soup"):
            await meter.guard.fetch(OP, fail, l2_ttl=60, returns=str)
        await _settled(meter.guard)

    cost = await meter.cost(action)

    assert (2, ["EVALSHA"] * 3) == cost[:2]
    assert added(evalsha(3), ACQUIRED, MARKED, {"get": 1, "del": 1}) == cost.ran


async def test_wait_for_another_guard_s_load(meter: Meter) -> None:
    """Whoever waits asks once, once more when they listen, and when they are woken: three round trips."""
    gate = Gate()

    async def slow() -> str:
        await gate.passage()
        return "soup"

    leader = asyncio.create_task(meter.other.fetch(OP, slow, l2_ttl=60, returns=str))
    await gate.arrivals(1)

    async def wait() -> None:
        follower = asyncio.create_task(ask(meter.guard))
        await until(lambda: is_expecting(meter.guard, OP), "the wait")
        await until(lambda: len(meter._proxy.commands) == 4, "the second look")
        gate.open()
        assert ["soup", "soup"] == await asyncio.gather(leader, follower)

    cost = await meter.cost(wait)

    # The leader's fill is among them.
    assert (3 + 1, ["EVALSHA"] * (6 + 1)) == cost[:2]
    assert cost.ran["publish"] == 1
    assert cost.ran["append"] == 1


async def test_scripts_that_the_server_has_forgotten(meter: Meter, admin: Redis) -> None:
    """After a restart each script is sent in full once: that costs a round trip each, and the next miss none."""
    await admin.script_flush()

    first = await meter.cost(lambda: ask(meter.guard))
    second = await meter.cost(lambda: ask(meter.guard, "menu-8"))

    assert (5, ["EVALSHA", "EVALSHA", "EVAL", "EVAL", "EVALSHA", "EVAL"]) == first[:2]
    assert (2, ["EVALSHA"] * 3) == second[:2]


async def test_echo(meter: Meter) -> None:
    """An echo is one command."""
    cost = await meter.cost(lambda: tier_of(meter.guard).echo(b"word"))

    assert (1, ["PUBLISH"], {"publish": 1}) == cost


async def test_renewal(meter: Meter) -> None:
    """The renewals of many leases are one round trip."""
    gate = Gate()

    async def slow() -> str:
        await gate.passage()
        return "soup"

    leader = asyncio.create_task(meter.guard.fetch(OP, slow, l2_ttl=60, returns=str))
    await gate.arrivals(1)
    upkeep = tier_of(meter.guard).leases
    lost: list[str] = []

    async def look() -> None:
        for token in "ab":  # not the leader's token: nothing is prolonged
            upkeep.hold(HeldLease(OP, token, 60.0, -inf, Counters(), partial(lost.append, token)))
        upkeep._tick(upkeep._timer_at)
        await _settled(meter.guard)

    cost = await meter.cost(look)

    assert (1, ["EVALSHA"] * 2, {"evalsha": 2, "get": 2}) == cost
    assert {*lost} == {"a", "b"}
    gate.open()
    await leader
