"""Several processes behind a network that is late, or that leads elsewhere: how old answers are, and how many loads."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from time import monotonic
from typing import Any

import pytest
from processes import POLL_INTERVAL, Child, children
from proxying import HOST, Detour
from redis.asyncio import Redis
from rich.console import Console

from demo_api.servers import ValkeyServer, valkey_server
from demo_api.topologies import ask, follows, leads, wait_until

KEYS = 5
SLACK = 1.0  # seconds that a busy machine may add
TRUST = 3.0  # seconds for which memory trusts a bus that it does not hear in time
UNTRUSTED = 1.0  # seconds for which it remembers after that

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

Writes = dict[int, list[tuple[float, int]]]  # by key: when which number was confirmed


@pytest.fixture
def servers() -> Iterator[tuple[ValkeyServer, ValkeyServer, ValkeyServer]]:
    """Return a primary, its replica, and a server that has the truth."""
    at_once = ("--repl-diskless-sync-delay", "0")
    with ExitStack() as running:
        primary, replica, truth = (running.enter_context(valkey_server(*at_once)) for _ in range(3))
        ask(replica, "REPLICAOF", HOST, primary.port)
        wait_until(lambda: follows(replica), "the replica to be connected")
        yield primary, replica, truth


def settings(url: str, truth: ValkeyServer) -> dict[str, Any]:
    """Return the settings of a process."""
    return {"url": url, "truth_url": truth.url, "namespace": "menus", "keys": KEYS, "ttl": 60.0, "l2_ttl": 60.0}


def staleness(reads: list[list[Any]], writes: Writes) -> float:
    """Return by how many seconds the worst of *reads* came after a confirmed invalidation of what it returned."""
    worst = 0.0
    for began, key, number in reads:
        worst = max([worst, *(began - at for at, newer in writes[key] if newer > number)])
    return worst


async def written(writer: Child, writes: Writes, key: int) -> int:
    """Let *writer* write *key*; return how often that was not confirmed at once."""
    answer = await writer.ask("write", key=key)
    writes[key].append((answer["confirmed_at"], answer["number"]))
    return int(answer["refusals"])


async def test_late_bus(servers: tuple[ValkeyServer, ValkeyServer, ValkeyServer]) -> None:
    """A process that hears the bus ten seconds late, and never in silence, answers nothing older than trust lasts."""
    primary, _, truth = servers
    writes: Writes = defaultdict(list)
    async with (
        Detour(primary.port) as detour,
        children("reader.py", [settings(primary.url, truth), *[settings(detour.url, truth)] * 2]) as (writer, *readers),
    ):
        for reader in readers:
            await reader.tell("read", seconds=35)
        await asyncio.gather(*(reader.hears("remembers") for reader in readers))
        for number in range(25):
            detour.lateness = min(10.0, 0.7 * number)  # so that something is heard every other second
            await written(writer, writes, number % KEYS)
            await asyncio.sleep(1)
        answers = [await reader.hears("read") for reader in readers]

    behind = max(staleness(answer["reads"], writes) for answer in answers)
    Console().print(f"late bus: answers behind by at most {behind:.2f} s")
    assert behind <= TRUST + UNTRUSTED + SLACK


def switch(old: ValkeyServer, new: ValkeyServer, detour: Detour) -> None:
    """Let the replica be the primary, and what leads to the old one lead there; connections stay where they are."""
    ask(new, "REPLICAOF", "NO", "ONE")
    ask(old, "REPLICAOF", HOST, 1)  # so that it goes on with what it has
    wait_until(lambda: leads(new) and not leads(old), "the new order")
    detour.port = new.port


async def loads_of(facts: Redis) -> int:
    """Return how many loads have begun."""
    return int(await facts.get("loads") or 0)


async def settled(facts: Redis) -> int:
    """Wait until no load has begun for as long as memory may know what is old; return how many have."""
    loads, since = -1, monotonic()
    async with asyncio.timeout(20):
        while monotonic() - since < TRUST + UNTRUSTED + SLACK:
            before, loads = loads, await loads_of(facts)
            since = since if loads == before else monotonic()
            await asyncio.sleep(POLL_INTERVAL)
    return loads


async def test_address_that_leads_to_another_server(servers: tuple[ValkeyServer, ValkeyServer, ValkeyServer]) -> None:
    """After a switch-over behind one address nothing old is read, few loads are made, and newcomers are right too."""
    old, new, truth = servers
    writes: Writes = defaultdict(list)
    loads: list[int] = []  # before, when all has settled, and at the end
    async with (
        Redis.from_url(truth.url) as facts,
        Detour(old.port) as detour,
        children("reader.py", [settings(detour.url, truth)] * 4) as (writer, *readers),
    ):
        for reader in readers:
            await reader.tell("read", seconds=30)
        await asyncio.gather(*(reader.hears("remembers") for reader in readers))
        loads.append(await loads_of(facts))
        switch(old, new, detour)
        async with asyncio.timeout(10):
            refusals = sum([await written(writer, writes, key) for key in range(KEYS)])
        loads.append(await settled(facts))
        answers = [await reader.hears("read") for reader in readers]
        loads.append(await loads_of(facts))
        async with children("reader.py", [settings(detour.url, truth)]) as (newcomer,):
            late = await newcomer.ask("read", seconds=1)

    behind = max(staleness(answer["reads"], writes) for answer in answers)
    after, at_last = loads[1] - loads[0], loads[2] - loads[1]
    figures = f"{after} loads, then {at_last}; {refusals} refusals; {detour.opened} connections"
    Console().print(f"switch-over: answers behind by at most {behind:.2f} s; {figures}")
    assert behind <= TRUST + UNTRUSTED + SLACK
    assert staleness(late["reads"], writes) == 0.0
    assert after <= KEYS * 4
    assert at_last == 0
