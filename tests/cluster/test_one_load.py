"""Several processes ask for one cold key: who loads, who waits, and what happens when the one who loads is lost."""

import asyncio
import re
import signal
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from processes import Child, children, until
from redis.asyncio import Redis

MENU = 7
CALLERS = 1_000
SLACK = 10.0  # seconds that a busy machine may add to a lease that is waited out

Cluster = Callable[..., AbstractAsyncContextManager[list[Child]]]


@pytest.fixture
def cluster(redis_url: str, admin_url: str, namespace: str) -> Cluster:
    """Return what runs a number of worker processes: A, B, C, and so on."""

    def run(number: int, max_bytes: int = 1 << 20, **options: Any) -> AbstractAsyncContextManager[list[Child]]:
        shared = {
            "url": redis_url,
            "admin_url": admin_url,
            "namespace": namespace,
            "options": {"ttl": 30, "l2_ttl": 60, **options},
            "guard": {"deadline": 5, "connect_timeout": 5, "max_bytes": max_bytes},
        }
        return children("worker.py", [{"name": name, **shared} for name in "ABCDEFGHIJ"[:number]])

    return run


class Kept:
    """What Redis holds of the menu."""

    def __init__(self, admin: Redis, namespace: str) -> None:
        self._admin = admin
        self._base = f"sg1:{{{namespace}:menu-{MENU}}}"
        self._count_key = f"loads:{namespace}"

    async def value(self) -> str:
        """Return the loader's answer out of the stored value; empty if there is none."""
        found = re.search(rb"[A-J] \d+ load \d+$", await self._get("v"))
        return found[0].decode() if found else ""

    async def _get(self, suffix: str) -> bytes:
        found = await self._admin.get(f"{self._base}:{suffix}") or b""
        assert isinstance(found, bytes)
        return found

    async def lease(self) -> str:
        """Return the token of the lease; empty if there is none."""
        return (await self._get("l")).decode()

    async def lease_left(self) -> float:
        """Return the seconds that the lease has left."""
        left: int = await self._admin.pttl(f"{self._base}:l")
        return left / 1_000

    async def is_waited_for(self) -> bool:
        """Return whether another process waits for the holder of the lease."""
        return (await self.lease()).endswith("w")

    async def loads(self) -> int:
        """Return how many loads there were in all processes."""
        return int(await self._admin.get(self._count_key) or 0)


@pytest.fixture
def kept(admin: Redis, namespace: str) -> Kept:
    """Return a view of what is stored."""
    return Kept(admin, namespace)


async def lead(child: Child) -> None:
    """Let the process begin a load, and hold it."""
    await child.tell("call", key=MENU, callers=1)
    await child.hears("loading")


async def follow(*followers: Child, callers: int = CALLERS) -> None:
    """Let processes ask for what another loads; returns when each one's callers wait."""
    await asyncio.gather(*(child.tell("call", key=MENU, callers=callers) for child in followers))
    for child in followers:
        called = await child.hears("called")
        assert called["flights"] == 1


async def landed(*some: Child) -> list[dict[str, Any]]:
    """Return what the processes' callers got."""
    return await asyncio.gather(*(child.hears("landed") for child in some))


async def test_one_cold_key_costs_the_cluster_one_load(cluster: Cluster, kept: Kept) -> None:
    """I8: of 8 processes with 1 000 callers each one loads, once, and all 8 000 get that load's answer."""
    async with cluster(8) as workers:
        await asyncio.gather(*(child.tell("call", key=MENU, callers=CALLERS) for child in workers))
        for child in workers:
            assert (await child.hears("called"))["flights"] == 1
        await until(kept.is_waited_for, "a process that waits for the other's load")
        await asyncio.gather(*(child.tell("open") for child in workers))
        answers = [landing["answers"] for landing in await landed(*workers)]
        counts = [await child.ask("count") for child in workers]

    assert await kept.loads() == 1
    assert [{await kept.value(): CALLERS}] * 8 == answers
    assert sum(count["loads"] for count in counts) == 1
    assert await kept.lease() == ""


async def test_killed_leader_costs_one_more_load(cluster: Cluster, kept: Kept) -> None:
    """The process that loads is killed: one of the others loads when the lease has run out, and none waits longer."""
    async with cluster(4) as (leader, *others):
        for child in others:
            await child.tell("open")
        await lead(leader)
        await follow(*others)
        await until(kept.is_waited_for, "a process that waits for the other's load")
        left = await kept.lease_left()
        await leader.kill()
        killed_at = time.monotonic()
        landings = await landed(*others)

    answers = {answer for landing in landings for answer in landing["answers"]}
    waits = [max(landing["instants"]) - killed_at for landing in landings]
    assert await kept.loads() == 2
    assert {await kept.value()} == answers
    assert 0 < left
    assert max(waits) < left + SLACK


async def test_frozen_leader_cannot_store_when_it_thaws(cluster: Cluster, kept: Kept) -> None:
    """A process that was suspended in its load for longer than the lease answers its callers, and stores nothing."""
    async with cluster(3) as (leader, *others):
        for child in others:
            await child.tell("open")
        await lead(leader)
        await follow(*others)
        leader.send(signal.SIGSTOP)
        answers = {answer for landing in await landed(*others) for answer in landing["answers"]}
        stored = await kept.value()
        await leader.tell("open")  # the first thing that it hears: its fill is on its way before it finds out
        leader.send(signal.SIGCONT)
        (late,) = await landed(leader)
        left_alone = await kept.value()
        await leader.tell("call", key=MENU, callers=1)
        (later,) = await landed(leader)

    assert await kept.loads() == 2
    assert {stored} == answers
    assert {f"A {MENU} load 1": 1} == late["answers"]
    assert stored == left_alone
    assert {stored: 1} == later["answers"]


async def test_without_leases_each_process_loads(cluster: Cluster, kept: Kept) -> None:
    """`lease=False`: no process waits for another's load, one's value is stored, and each answers with its own."""
    async with cluster(4, lease=False) as workers:
        await asyncio.gather(*(child.tell("call", key=MENU, callers=CALLERS) for child in workers))
        for child in workers:
            await child.hears("loading")
        for child in workers:
            await child.tell("open")
        answers = [landing["answers"] for landing in await landed(*workers)]

    assert await kept.loads() == 4
    assert [1] * 4 == [len(each) for each in answers]
    assert len({answer for each in answers for answer in each}) == 4
    assert await kept.value() in {answer for each in answers for answer in each}


async def test_failed_load_makes_way_at_once(cluster: Cluster, kept: Kept) -> None:
    """The leader's load fails: its callers get the error, and another process loads without waiting the lease out."""
    async with cluster(3) as (leader, *others):
        for child in others:
            await child.tell("open")
        await leader.ask("fail")
        await lead(leader)
        await follow(*others, callers=1)
        await until(kept.is_waited_for, "a process that waits for the other's load")
        await leader.tell("open")
        (failed,) = await landed(leader)
        left, failed_at = await kept.lease_left(), time.monotonic()
        landings = await landed(*others)

    answers = {answer for landing in landings for answer in landing["answers"]}
    waits = [max(landing["instants"]) - failed_at for landing in landings]
    assert left < 0 or max(waits) < left  # -2 ms: the lease is gone already
    assert {"LookupError": 1} == failed["answers"]
    assert await kept.loads() == 2
    assert {await kept.value()} == answers


async def test_value_that_is_not_stored_makes_way_for_all(cluster: Cluster, kept: Kept) -> None:
    """The leader's value is too long to be stored: all processes that wait for it load at once, and not in turn."""
    async with cluster(4, max_bytes=1) as (leader, *others):
        await lead(leader)
        await follow(*others, callers=10)
        await until(kept.is_waited_for, "a process that waits for the other's load")
        await leader.tell("open")
        async with asyncio.timeout(SLACK):
            for child in others:  # each of them holds its load
                await child.hears("loading")
        for child in others:
            await child.tell("open")
        landings = await landed(leader, *others)

    assert [1, 10, 10, 10] == [sum(landing["answers"].values()) for landing in landings]
    assert [1] * 4 == [len(landing["answers"]) for landing in landings]
    assert ["", 4] == [await kept.value(), await kept.loads()]


async def test_invalidation_elsewhere_overtakes_a_load(cluster: Cluster, kept: Kept) -> None:
    """I3: a load that began before another process invalidated is not stored, and is in no memory."""
    async with cluster(2) as (leader, other):
        await other.tell("open")
        await lead(leader)
        await other.ask("invalidate", key=MENU)
        assert await kept.lease() == ""
        await follow(other, callers=1)
        (fresh,) = await landed(other)
        await leader.tell("open")
        (late,) = await landed(leader)
        await leader.tell("call", key=MENU, callers=1)
        (later,) = await landed(leader)

    assert {f"A {MENU} load 1": 1} == late["answers"]
    assert {f"B {MENU} load 2": 1} == fresh["answers"]
    assert fresh["answers"] == later["answers"]
    assert await kept.loads() == 2


async def test_waiters_find_the_answer_without_the_bus(cluster: Cluster, kept: Kept, admin: Redis) -> None:
    """The bus is cut while processes wait: they ask again by themselves, and nobody loads a second time."""
    async with cluster(3) as (leader, *others):
        await lead(leader)
        await follow(*others)
        await until(kept.is_waited_for, "a process that waits for the other's load")
        killed = await admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        assert killed
        await leader.tell("open")
        answers = {answer for landing in await landed(leader, *others) for answer in landing["answers"]}

    assert await kept.loads() == 1
    assert {await kept.value()} == answers
