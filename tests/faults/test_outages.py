"""A server that refuses, is absent, hangs or dies: calls go on, bounded, and the store is taken up again."""

import asyncio
import re
from collections.abc import Callable

import pytest
from stored import find

from demo_api.servers import HOST, ValkeyServer, free_port
from stampede_guard import Guard
from stampede_guard._bus import backplane
from stampede_guard.stores._redis.node import Node
from stampede_guard.stores._redis.topology.base import Single
from stampede_guard.stores.redis import RedisStore
from stampede_guard.testing import ManualClock

Logged = Callable[[], list[str]]

BOUND = 15.0  # seconds: far above any deadline here, on a machine that is busy with many other things
GONE = "Redis does not answer ({}); going on without it, probing again and again"
BACK = "Redis answers again"
DEAF = "the bus connection is lost ({}); until it is back, L1 keeps values for a second at most"
HEARD = "the bus connection is back"

pytestmark = pytest.mark.usefixtures("no_echoes")


async def load() -> str:
    """Load an answer."""
    return "soup"


async def ask(guard: Guard, op: str = "menu-7") -> str:
    """Make a call that looks into the store, and does not stay in memory."""
    return await guard.fetch(op, load, l2_ttl=60, returns=str)


def of_store(lines: list[str]) -> list[str]:
    """Return the lines that are not about the bus, which is up and down at times of its own."""
    return [line for line in lines if not line.startswith("the bus")]


@pytest.mark.parametrize(("host", "reason"), [(HOST, "ConnectionError"), ("no-such-host.invalid", r"\w+Error")])
async def test_calls_go_on_without_a_server(host: str, reason: str, logged: Logged) -> None:
    """Nobody listens, or the name is unknown: answers come from the loader, and the log says so once."""
    async with asyncio.timeout(BOUND), Guard(f"redis://{host}:{free_port()}") as guard:
        answers = [await ask(guard) for _ in range(20)]

    assert ["soup"] * 20 == answers
    assert len(logged()) == 2
    for expected, line in zip((GONE, DEAF), logged(), strict=True):
        assert re.fullmatch(re.escape(expected).replace(r"\{\}", reason), line)


async def test_tls_with_a_server_that_has_none(valkey: ValkeyServer, logged: Logged) -> None:
    """A `rediss://` URL of a plain server is a server that does not answer; nothing is sent in the clear."""
    async with asyncio.timeout(BOUND), Guard(valkey.url.replace("redis", "rediss")) as guard:
        answers = [await ask(guard) for _ in range(5)]

    assert ["soup"] * 5 == answers
    assert [line.partition(" (")[0] for line in (GONE, DEAF)] == [line.partition(" (")[0] for line in logged()]


async def test_breaker_opens_after_three_failures(
    valkey: ValkeyServer, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen server costs three deadlines; after that nobody waits for it."""
    lost: list[Node] = []
    monkeypatch.setattr(Single, "failed", lambda _, node: lost.append(node))
    async with Guard(valkey.url, clock=ManualClock()) as guard:
        await ask(guard)
        valkey.freeze()

        async with asyncio.timeout(BOUND):
            answers = [await ask(guard) for _ in range(1000)]
        lost_in_all = len(lost)

    assert ["soup"] * 1000 == answers
    assert (
        3 == lost_in_all
    )  # requests; what travels along, to release rights that may have been given, is lost with them
    assert logged() == [GONE.format("TimeoutError")]


async def test_operation_on_an_open_connection_has_its_own_deadline(valkey: ValkeyServer) -> None:
    """However long the patience with connecting, an operation on an open connection ends by its own deadline."""
    store = RedisStore(valkey.url, deadline=0.05, connect_timeout=10 * BOUND)
    await store.open()
    valkey.freeze()

    async with asyncio.timeout(BOUND):
        with pytest.raises(TimeoutError):
            await find(store, "menu-7")
    await store.aclose()


async def test_server_frozen_from_the_beginning_delays_the_start_by_a_deadline(
    valkey: ValkeyServer, logged: Logged
) -> None:
    """Entering the guard takes no longer than connecting may, and raises nothing."""
    valkey.freeze()

    async with asyncio.timeout(BOUND), Guard(valkey.url, clock=ManualClock()) as guard:
        answer = await ask(guard)

    assert answer == "soup"
    assert logged() == [GONE.format("TimeoutError"), DEAF.format("TimeoutError")]


async def test_probe_closes_the_breaker(valkey: ValkeyServer, logged: Logged) -> None:
    """When the frozen server goes on, the next probe finds out, and what was stored answers again."""
    clock = ManualClock()
    async with Guard(valkey.url, clock=clock) as guard:
        await ask(guard)
        valkey.freeze()
        for _ in range(5):
            await ask(guard)

        valkey.thaw()
        clock.advance(2)
        await ask(guard)

    assert guard.stats().l2_hits == 1
    assert logged() == [GONE.format("TimeoutError"), BACK]


async def test_one_probe_at_a_time(valkey: ValkeyServer, logged: Logged) -> None:
    """When the pause is over, one call asks the frozen server; the others go without."""
    clock = ManualClock()
    async with Guard(valkey.url, clock=clock) as guard:
        valkey.freeze()
        for _ in range(5):
            await ask(guard)
        errors = guard.stats().l2_errors

        clock.advance(2)
        answers = await asyncio.gather(*(ask(guard, f"menu-{menu_id}") for menu_id in range(50)))

    assert ["soup"] * 50 == answers
    assert guard.stats().l2_errors == errors + 1
    assert len(logged()) == 1


async def test_many_calls_at_once_on_a_frozen_server_are_bounded(valkey: ValkeyServer) -> None:
    """A thousand ops at the moment of freezing wait for deadlines, not for each other."""
    async with Guard(valkey.url, max_connections=4) as guard:
        await ask(guard)
        valkey.freeze()

        async with asyncio.timeout(BOUND):
            answers = await asyncio.gather(*(ask(guard, f"menu-{menu_id}") for menu_id in range(1000)))

    assert ["soup"] * 1000 == answers


async def test_killed_server_is_used_again_when_it_is_back(valkey: ValkeyServer, logged: Logged) -> None:
    """Killed among calls and started again on the same port: no call fails, and the store is filled again."""
    clock = ManualClock()
    async with Guard(valkey.url, clock=clock) as guard:
        before = [await ask(guard) for _ in range(5)]
        running = [asyncio.create_task(ask(guard, f"menu-{menu_id}")) for menu_id in range(50)]
        valkey.kill()
        during = await asyncio.gather(*running) + [await ask(guard) for _ in range(5)]
        valkey.start()
        clock.advance(2)
        after = [await ask(guard) for _ in range(5)]
        stats = guard.stats()

    assert ["soup"] * 65 == before + during + after
    assert stats.l2_hits == 8
    assert [line.partition("(")[0] for line in of_store(logged())] == ["Redis does not answer ", BACK]


async def test_server_that_comes_up_after_the_guard_is_used(logged: Logged) -> None:
    """A guard that was entered without a server takes it up when it is there."""
    clock = ManualClock()
    server = ValkeyServer()
    async with Guard(server.url, clock=clock) as guard:
        await ask(guard)
        server.start()
        try:
            clock.advance(2)
            await ask(guard)
            await ask(guard)
        finally:
            server.stop()

    assert guard.stats().l2_hits == 1
    assert of_store(logged()) == [GONE.format("ConnectionError"), BACK]


async def until(logged: Logged, line: str) -> None:
    """Wait until the log says so."""
    async with asyncio.timeout(20):
        while line not in logged():
            await asyncio.sleep(0)


async def test_server_that_is_back_is_found_though_nobody_asks(
    valkey: ValkeyServer, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeats notice that the server is gone and that it is back, and the bus is taken up again."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 0.05)
    async with Guard(valkey.url, deadline=0.05, connect_timeout=0.1, clock=ManualClock()) as guard:
        await ask(guard)
        valkey.kill()
        await until(logged, GONE.format("ConnectionError"))
        valkey.start()
        await until(logged, BACK)
        await until(logged, HEARD)
        await ask(guard)
        await ask(guard)

    assert (2, 1) == (guard.stats().loads, guard.stats().l2_hits)
    assert {GONE.format("ConnectionError"), DEAF.format("ConnectionError"), BACK, HEARD} == {*logged()}


async def test_server_that_hangs_is_told_by_its_silence(
    valkey: ValkeyServer, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen server closes no connection: the bus counts as lost when even our own heartbeats are not heard."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 0.05)
    monkeypatch.setattr(backplane, "_TRUST", 0.2)
    async with Guard(valkey.url, deadline=0.05, connect_timeout=0.1, clock=ManualClock()) as guard:
        await guard.fetch("menu-7", load, ttl=60, l2_ttl=60, returns=str)
        was_kept = guard.peek("menu-7") is not None
        valkey.freeze()
        await until(logged, DEAF.format("silence"))
        is_kept = guard.peek("menu-7") is not None
        valkey.thaw()
        await until(logged, HEARD)

    assert (True, False) == (was_kept, is_kept)


class Callers:
    """Callers that never stop asking, each op with an answer of its own."""

    def __init__(self, guard: Guard, clock: ManualClock) -> None:
        self.answered = 0
        self.wrong: list[str] = []
        self._guard = guard
        self._clock = clock

    async def call(self, number: int) -> None:
        """Ask on until cancelled."""
        while True:
            op = f"menu-{number}-{self.answered % 7}"
            answer = await self._guard.fetch(op, lambda op=op: asyncio.sleep(0, op), l2_ttl=60, returns=str)
            self.wrong.extend([answer] * (answer != op))
            self.answered += 1
            self._clock.advance(0.01)
            await asyncio.sleep(0)

    async def answers(self, number: int) -> None:
        """Wait for so many more answers."""
        aim = self.answered + number
        while self.answered < aim:
            await asyncio.sleep(0)


async def test_i6_outages_change_no_answer(valkey: ValkeyServer) -> None:
    """Callers that ask on while the server freezes, goes on, dies and comes back get their own answers."""
    clock = ManualClock()
    async with asyncio.timeout(6 * BOUND), Guard(valkey.url, clock=clock, deadline=0.05, connect_timeout=0.05) as guard:
        callers = Callers(guard, clock)
        calling = [asyncio.create_task(callers.call(number)) for number in range(8)]
        for change in (valkey.freeze, valkey.thaw, valkey.kill, valkey.start):
            await callers.answers(200)
            change()
        await callers.answers(200)
        for task in calling:
            task.cancel()
        await asyncio.wait(calling)

    assert callers.wrong == []
    assert all(task.cancelled() for task in calling)
    assert guard.stats().in_flight == 0


async def test_leaving_the_guard_with_a_frozen_server_is_bounded(valkey: ValkeyServer) -> None:
    """Closing connections does not wait for a server that does not answer."""
    guard = Guard(valkey.url)
    await guard.__aenter__()
    await ask(guard)
    valkey.freeze()

    async with asyncio.timeout(BOUND):
        await guard.__aexit__(None, None, None)
