"""Several processes refresh, read and invalidate one op while things go wrong: does any of them read an old value?"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any

import pytest
from processes import Child, children, until
from proxying import HOST, Detour
from redis.asyncio import Redis
from rich.console import Console

from demo_api.servers import ValkeyServer, free_port, valkey_server
from demo_api.topologies import ask, follows, wait_until

OLD, NEW = 1, 2
WATCH = 1.5  # seconds for which reads go on after all is settled
SLACK = 1.0  # seconds in which other processes hear of it; a busy machine takes long
LOAD_TIME = 1.0
CROWD = 8

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

Run = Callable[..., AbstractAsyncContextManager[list[Child]]]


class Truth:
    """The number that loaders read."""

    def __init__(self, admin: Redis, namespace: str) -> None:
        self.key = f"truth:{namespace}"
        self._admin = admin

    async def become(self, number: int) -> None:
        """Be another number from now on."""
        await self._admin.set(self.key, number)


@pytest.fixture
async def truth(admin: Redis, namespace: str) -> AsyncIterator[Truth]:
    """Return the truth, which is old at first; it has a server without faults."""
    truth = Truth(admin, namespace)
    await truth.become(OLD)
    yield truth
    await admin.delete(truth.key)


@pytest.fixture
def run(admin_url: str, namespace: str, truth: Truth) -> Run:
    """Return what runs processes, one for each of some URLs."""

    def run(
        *urls: str, guard: dict[str, Any] | None = None, **settings: Any
    ) -> AbstractAsyncContextManager[list[Child]]:
        shared = {
            "truth_url": admin_url,
            "truth_key": truth.key,
            "namespace": namespace,
            "options": {"ttl": 60, "l2_ttl": 60},
            "guard": guard or {},
            **settings,
        }
        return children("refresher.py", [{"url": url, **shared} for url in urls])

    return run


async def all_know(number: int, *some: Child) -> None:
    """Let each process read once."""
    assert [number] * len(some) == [(await child.ask("call"))["number"] for child in some]


async def begin_refresh(child: Child) -> int:
    """Let a process refresh, and hold the load; return what that has read."""
    await child.ask("hold")
    await child.tell("refresh")
    return int((await child.hears("held"))["number"])


async def go_on(child: Child) -> dict[str, Any]:
    """Let the load that a process holds end, and no other be held; return what came of the refresh."""
    await child.ask("let_pass")
    await child.ask("open")
    return await child.hears("refresh")


async def old_after(instants: Mapping[Child, Any]) -> dict[Child, float]:
    """Return for how long after its instant each process still read the old number; they stop reading."""
    await asyncio.sleep(WATCH)
    latest: dict[Child, float] = {}
    for child, at in instants.items():
        reads = (await child.ask("stop"))["reads"]
        assert reads[-1][0] > at + WATCH / 2
        latest[child] = max([0.0, *(began - at for began, number in reads if number < NEW)])
    return latest


async def watch(*some: Child) -> None:
    """Let processes read on and on."""
    for child in some:
        await child.ask("read_on")


def judge(name: str, refresher: Child, latest: dict[Child, float]) -> None:
    """Let the process that has refreshed read nothing old at all, and the others only until they hear of it."""
    others = max(late for child, late in latest.items() if child is not refresher)
    Console().print(f"{name}: old for {latest[refresher]:.3f} s in the same process, {others:.3f} s in others")
    assert latest[refresher] == 0.0
    assert others < SLACK


async def test_refresh_after_a_commit_in_one_process(run: Run, redis_url: str, truth: Truth) -> None:
    """A refresh that comes while an older one loads answers with what is new, and no process reads the old again."""
    async with run(*[redis_url] * 3) as (first, *others):
        await all_know(OLD, first, *others)
        assert await begin_refresh(first) == OLD
        await truth.become(NEW)
        await first.tell("refresh")
        await first.ask("let_pass")
        await first.ask("open")
        answers = [await first.hears("refresh") for _ in range(2)]
        await watch(first, *others)
        at = max(answer["at"] for answer in answers)
        latest = await old_after(dict.fromkeys((first, *others), at))

    assert [OLD, NEW] == sorted(answer["number"] for answer in answers)
    judge("refresh after a commit, one process", first, latest)


async def test_refresh_after_a_commit_in_two_processes(run: Run, redis_url: str, truth: Truth) -> None:
    """An older refresh of another process, which ends later, stores nothing and leaves nothing old."""
    async with run(*[redis_url] * 3) as (older, newer, reader):
        await all_know(OLD, older, newer, reader)
        assert await begin_refresh(older) == OLD
        await truth.become(NEW)
        await newer.tell("refresh")
        answer = await newer.hears("refresh")
        late = await go_on(older)
        await watch(older, newer, reader)
        latest = await old_after({newer: answer["at"], older: late["at"], reader: late["at"]})

    assert [OLD, NEW] == [late["number"], answer["number"]]
    judge("refresh after a commit, two processes", newer, latest)


@pytest.mark.parametrize("seconds", [0.3, 0.6])
@pytest.mark.parametrize("when", ["before the load", "before the fill"])
async def test_refresh_while_the_server_hangs(when: str, seconds: float, run: Run, truth: Truth) -> None:
    """What could not be stored is invalidated: in this process at once, and elsewhere when that is confirmed."""
    with valkey_server() as server:
        async with run(*[server.url] * 3) as (first, *others):
            await all_know(OLD, first, *others)
            await truth.become(NEW)
            if when == "before the fill":
                assert await begin_refresh(first) == NEW
            await watch(*others)
            server.freeze()
            asyncio.get_running_loop().call_later(seconds, server.thaw)
            if when == "before the fill":
                answer = await go_on(first)
            else:
                answer = await first.ask("refresh")
            await watch(first)
            settled = await first.hears("settled")
            at = {first: answer["at"], **dict.fromkeys(others, max(answer["at"], settled["at"]))}
            latest = await old_after(at)

    assert answer["number"] == NEW
    judge(f"server hangs for {seconds} s {when} (pending: {answer['is_pending']})", first, latest)


async def test_refresh_with_a_value_that_is_too_long(run: Run, redis_url: str, truth: Truth) -> None:
    """A new value that is too long to be stored leaves no older one, which was not."""
    short = run(redis_url, guard={"max_bytes": 100})
    long = run(*[redis_url] * 2, guard={"max_bytes": 100}, length=200)
    async with short as (previous_token,), long as (first, other):
        await all_know(OLD, previous_token, first, other)
        await truth.become(NEW)
        await watch(other)
        await first.tell("refresh")
        answer = await first.hears("refresh")
        await watch(first, previous_token)
        latest = await old_after(dict.fromkeys((first, previous_token, other), answer["at"]))

    assert answer["number"] == NEW
    judge("refresh with a value that is too long", first, latest)


@pytest.mark.parametrize("how", ["evicted", "seized"])
async def test_refresh_that_loses_its_lease(  # noqa: PLR0917  # fixtures
    how: str, run: Run, redis_url: str, truth: Truth, admin: Redis, namespace: str
) -> None:
    """The old value goes also when another process has taken the lease, and its refresh fails."""
    async with run(*[redis_url] * 3) as (first, other, reader):
        await all_know(OLD, first, other, reader)
        await truth.become(NEW)
        assert await begin_refresh(first) == NEW
        if how == "evicted":
            assert await admin.delete(f"sg1:{{{namespace}:menu}}:l")
        else:
            await other.ask("fail")
            assert (await other.ask("refresh"))["number"] == 0
        answer = await go_on(first)
        readers = [first, reader] if how == "seized" else [first, other, reader]  # the other one's loads fail
        await watch(*readers)
        latest = await old_after(dict.fromkeys(readers, answer["at"]))

    assert answer["number"] == NEW
    judge(f"refresh whose lease is {how}", first, latest)


async def test_refresh_with_a_replica_that_lags(run: Run, truth: Truth) -> None:
    """The process that has refreshed reads what it has stored, and not what a replica has."""
    with ExitStack() as running:
        at_once = ("--repl-diskless-sync-delay", "0")
        primary, replica = (running.enter_context(valkey_server(*at_once)) for _ in range(2))
        async with Detour(primary.port) as detour:
            await asyncio.to_thread(_follow, replica, detour.listens_at)
            url = f"redis://{HOST}:{primary.port},{HOST}:{replica.port}"
            async with run(url, options={"l2_ttl": 60}) as (first,), Redis(port=replica.port) as behind:
                await watch(first)
                await until(lambda: _answers(behind), "the replica to be read from")
                await truth.become(NEW)
                detour.flows.clear()
                answer = await first.ask("refresh")
                latest = await old_after({first: answer["at"]})

    assert answer["number"] == NEW
    assert latest[first] == 0.0


async def _answers(replica: Redis) -> bool:
    return "cmdstat_getrange" in await replica.info("commandstats")


def _follow(replica: ValkeyServer, port: int) -> None:
    ask(replica, "REPLICAOF", HOST, port)
    wait_until(lambda: follows(replica), "the replica to be connected")


async def test_flight_from_before_the_bus_was_cut(run: Run, truth: Truth) -> None:
    """A process that hears of no invalidation lets newcomers join no load that began before its bus was cut."""
    with valkey_server() as server:
        async with (
            Detour(server.port) as detour,
            Redis(port=server.port) as admin,
            run(detour.url, server.url) as (deaf, writer),
        ):
            await deaf.ask("hold")
            await deaf.tell("call")
            assert (await deaf.hears("held"))["number"] == OLD
            detour.port = free_port()  # where nothing answers
            assert await admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub") == 2
            await truth.become(NEW)
            await writer.ask("invalidate")
            await deaf.ask("let_pass")
            await deaf.tell("call")
            newcomer = await deaf.hears("call", patience=5)
            await deaf.ask("open")
            first = await deaf.hears("call")
            await all_know(NEW, deaf, writer)

    assert [NEW, OLD] == [newcomer["number"], first["number"]]


async def test_values_that_are_not_stored_are_loaded_side_by_side(run: Run, redis_url: str) -> None:
    """Of eight processes that ask for a value that is too long, the last waits for two loads, and not for eight."""
    async with run(*[redis_url] * CROWD, guard={"max_bytes": 1}, length=2, load_time=LOAD_TIME) as crowd:
        started = asyncio.get_running_loop().time()  # monotonic, and one clock for all processes
        await asyncio.gather(*(child.tell("call") for child in crowd))
        instants = [(await child.hears("call"))["at"] - started for child in crowd]

    Console().print(f"{CROWD} processes, {LOAD_TIME} s a load, not stored: the last answer after {max(instants):.2f} s")
    assert max(instants) < 4 * LOAD_TIME
