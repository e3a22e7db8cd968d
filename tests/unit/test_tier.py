import asyncio
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any

import pytest
from leasing import LeasingDouble, Server

from stampede_guard._l2 import access as asking_module
from stampede_guard._l2 import unconfirmed as pending_module
from stampede_guard._l2.lease import Found, Lease
from stampede_guard._l2.tier import Tier, key_of
from stampede_guard._stats import Counters
from stampede_guard.stores import LOST_TOGETHER, Refused, Stored
from stampede_guard.stores._breaker import Breaker
from stampede_guard.stores._envelope import seal, tokens_of
from stampede_guard.testing import FaultStore, Gate, ManualClock

Pause = Callable[[], Awaitable[None]]
Logged = Callable[[], list[str]]

OP = "menu-7"
FILL = "f" * 22  # the token of the flight that stored it


class NotedStore(FaultStore):
    """A store that notes what it is asked, in order."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.asked: list[str] = []

    async def read(self, key: str) -> Stored | None:
        self.asked.append("read")
        return await super().read(key)

    async def write(self, key: str, envelope: bytes, ttl: float) -> None:
        self.asked.append("write")
        await super().write(key, envelope, ttl)

    async def delete(self, key: str) -> None:
        self.asked.append("delete")
        await super().delete(key)


class Rig:
    """A tier, its store, its clock and its counters."""

    def __init__(self, concurrency: int = 64) -> None:
        self.clock = ManualClock()
        self.store = NotedStore(self.clock)
        self.store.concurrency = concurrency
        self.tier = Tier(self.store, "menus", 100, self.clock)
        self.counters = Counters()

    def lease(self, op: str = OP) -> Lease:
        return Lease(self.tier, op, (), 2, 60, self.counters)

    async def read(self, op: str = OP) -> bytes | None:
        found = await self.lease(op).acquire(lambda payload: (payload,))
        return found.payload if isinstance(found, Found) else None

    async def fill(self, payload: bytes = b"soup", op: str = OP, *, holds: bool = True) -> bool:
        lease = self.lease(op)
        await lease.take_over()
        return await lease.fill(payload, 60, None, lambda: holds, "menu")

    async def delete(self, op: str = OP) -> bool:
        return await self.tier.send(self.tier.invalidation(op)).wait()

    @property
    def breaker(self) -> Breaker:
        """The breaker of the store's one node."""
        return self.tier.access.breaker("FaultStore")

    @property
    def counted(self) -> dict[str, int]:
        """What was counted."""
        counts = {name: getattr(self.counters, name) for name in Counters.__slots__}
        return {name: count for name, count in counts.items() if count}


@pytest.fixture
def rig() -> Rig:
    """Return a tier over an empty store."""
    return Rig()


@pytest.fixture
def narrow() -> Rig:
    """Return a tier over a store that does one thing at a time."""
    return Rig(concurrency=1)


# What comes back


async def test_what_was_filled_says_by_whom(rig: Rig) -> None:
    """Whoever stored a value without having asked for one has a token too, each another."""
    tokens: list[bytes] = []
    for _ in range(2):
        await rig.fill()
        ((envelope, _),) = rig.store.contents.values()
        tokens += [token.strip(b"\0") for token in tokens_of(envelope)]

    assert ([22, 22], 2) == ([*map(len, tokens)], len({*tokens}))


async def test_what_was_filled_is_read(rig: Rig) -> None:
    """A payload comes back as it was, with the seconds that it has left."""
    await rig.fill()
    rig.clock.advance(20)

    assert Found("SOUP", b"soup", 40, age=20) == await rig.lease().acquire(lambda payload: (payload.decode().upper(),))
    assert {} == rig.counted


async def test_what_was_not_filled_is_to_be_loaded(rig: Rig) -> None:
    """Where nothing is stored, whoever asks may load; over a plain store several may."""
    assert ["own", "own"] == [await rig.lease().acquire(lambda payload: (payload,)) for _ in range(2)]
    assert {} == rig.counted


async def test_value_that_does_not_decode(rig: Rig) -> None:
    """A payload that is no value is to be loaded anew; it is not read a second time."""
    await rig.fill()

    assert "own" == await rig.lease().acquire(lambda _: None)
    assert ["write", "read"] == rig.store.asked


@pytest.mark.parametrize(
    "envelope",
    [b"", b"x", b"garbage" * 10, seal("menus:menu-8", b"soup", FILL), seal("menus:menu-7", b"soup", FILL)[:-1]],
    ids=["empty", "short", "garbage", "another op's", "cut off"],
)
async def test_foreign_bytes_are_a_miss(envelope: bytes, rig: Rig) -> None:
    """Whatever a store makes up, it is counted, and never an answer."""
    rig.store.contents[f"{key_of('menus', OP)}:v"] = envelope, rig.clock() + 60

    assert await rig.read() is None
    assert {"l2_undecodable": 1} == rig.counted


async def test_payload_that_is_too_large_is_not_read(rig: Rig) -> None:
    """What a more generous process stored is read up to `max_bytes`."""
    for op, size in (("a", 100), ("b", 101)):
        rig.store.contents[f"{key_of('menus', op)}:v"] = seal(f"menus:{op}", b"x" * size, FILL), rig.clock() + 60

    assert (b"x" * 100, None) == (await rig.read("a"), await rig.read("b"))
    assert {"l2_undecodable": 1} == rig.counted


async def test_payload_that_is_too_large_is_not_stored(rig: Rig, logged: Logged) -> None:
    """A value over `max_bytes` is counted, and logged once, whatever is stored in between."""
    for size in (101, 100, 500, 100, 101):
        await rig.fill(b"x" * size)

    assert {"l2_errors": 3} == rig.counted
    assert ["write", "write"] == rig.store.asked
    assert ["menu: a value of 101 bytes is larger than max_bytes=100, so it is not stored"] == logged()


async def test_fill_that_no_longer_holds(rig: Rig) -> None:
    """What was overtaken by the time it is its turn is not written."""
    assert not await rig.fill(holds=False)
    assert [] == rig.store.asked


@pytest.mark.parametrize(
    ("op", "key"),
    [
        ("menu-7", "sg1:{menus:menu-7}"),
        ("a" * 200, f"sg1:{{menus:{'a' * 200}}}"),
        ("a" * 201, f"sg1:{{menus:{'a' * 64}~{blake2b(b'a' * 201, digest_size=20).hexdigest()}}}"),
        ("a b{c}", "sg1:{menus:a_b_c_~c42c7b622a6ce9d33d78ae2a14fdf441bf1b127a}"),
    ],
)
def test_keys_are_readable(op: str, key: str) -> None:
    """An op of up to 200 safe characters stands in its key; another one's beginning does, before a digest."""
    assert key == key_of("menus", op)


def test_keys_are_never_too_long() -> None:
    """Under a long namespace fewer ops are readable: Memcached takes 250 bytes."""
    namespace = "n" * 100

    assert [True, False] == ["a" * size in key_of(namespace, "a" * size) for size in (140, 141)]
    assert 250 >= max(len(f"{key_of(namespace, 'a' * size)}:v") for size in range(1, 300))


def test_keys_differ() -> None:
    """Ops that look alike in a key are told apart by their digests, lone surrogates included."""
    ops = ["a b", "a_b", "a{b", "a\nb", "a" * 201, "a" * 202, "\ud800", "é"]

    assert len(ops) == len({key_of("menus", op) for op in ops})


# A store in trouble


@pytest.mark.parametrize("error", [OSError("down"), RuntimeError("a bug"), TimeoutError(), AttributeError("closed")])
async def test_store_that_fails(error: Exception, rig: Rig, logged: Logged) -> None:
    """Whatever a driver raises is a miss, an unfilled answer, an unconfirmed delete; the third opens the breaker."""
    rig.store.error = error

    outcomes = [await rig.read(), await rig.fill(), await rig.delete()]

    assert [None, True, False] == outcomes
    assert {"l2_errors": 2} == rig.counted  # invalidations are upkeep, and counted nowhere
    name = type(error).__name__
    assert [f"FaultStore does not answer ({name}); going on without it, probing again and again"] == logged()


async def test_open_breaker_spares_the_store(rig: Rig) -> None:
    """A store that does not answer is asked for nothing, until a probe is due."""
    rig.store.error = OSError("down")
    for _ in range(3):
        await rig.read()
    await rig.read()
    await rig.fill()
    rig.store.error = None
    rig.clock.advance(0.2)
    await rig.read()
    await rig.fill()

    assert ["read"] * 4 + ["write"] == rig.store.asked
    assert {"l2_errors": 3, "l2_skips": 2} == rig.counted


async def test_operations_that_were_lost_together(rig: Rig) -> None:
    """They are one failure of their node; should one of them be the probe, there is another in its time."""
    together = OSError("lost")
    together.add_note(LOST_TOGETHER)
    rig.store.error = together
    for _ in range(5):
        await rig.read()
    before = rig.breaker.state, rig.counted["l2_errors"]
    rig.breaker.trip("test")
    rig.clock.advance(0.2)
    await rig.read()
    probed = rig.breaker.state
    rig.clock.advance(0.2)
    rig.store.error = None
    await rig.read()

    assert (("closed", 5), "open", "closed") == (before, probed, rig.breaker.state)


async def test_one_probe_at_a_time(rig: Rig, pause: Pause) -> None:
    """While a probe is out, everybody else goes without the store, and without waiting."""
    rig.store.error = OSError("down")
    for _ in range(3):
        await rig.read()
    rig.clock.advance(0.2)
    rig.store.gate, rig.store.error = Gate(), None
    probe = asyncio.create_task(rig.read())
    await rig.store.gate.arrivals(1)
    others = [await rig.read() for _ in range(5)]
    rig.store.gate.open()
    await probe

    assert ([None] * 5, 4) == (others, len(rig.store.asked))
    assert "closed" == rig.breaker.state


async def test_cancelled_probe(rig: Rig) -> None:
    """A probe that is cancelled leaves the way free for the next one."""
    rig.store.error = OSError("down")
    for _ in range(3):
        await rig.read()
    rig.clock.advance(0.2)
    rig.store.gate, rig.store.error = Gate(), None
    probe = asyncio.create_task(rig.read())
    await rig.store.gate.arrivals(1)
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    rig.store.gate = None
    rig.clock.advance(0.2)
    await rig.read()

    assert "closed" == rig.breaker.state


async def test_refusals_are_answers(rig: Rig, logged: Logged) -> None:
    """A store that says no is alive: it is counted, logged once, and asked again."""
    rig.store.error = Refused("OOM")

    for _ in range(5):
        await rig.fill()

    assert {"l2_errors": 5} == rig.counted
    assert ("closed", 5) == (rig.breaker.state, len(rig.store.asked))
    assert ["FaultStore refuses to write: OOM"] == logged()


async def test_refusals_of_writes_and_reads_are_told_apart(rig: Rig, logged: Logged) -> None:
    """A store that may be read and not written says so once, not at each turn."""
    for _ in range(5):
        rig.store.error = None
        await rig.read()
        rig.store.error = Refused("READONLY")
        await rig.fill()

    assert ["FaultStore refuses to write: READONLY"] == logged()


async def test_end_of_refusals(rig: Rig, logged: Logged) -> None:
    """After ten quiet seconds a yes is the end of it; a store that is almost full says yes and no by turns."""
    for refusal in (Refused("OOM"), None, Refused("OOM"), None):
        rig.store.error = refusal
        rig.clock.advance(9)
        await rig.fill()
    rig.clock.advance(1)
    await rig.fill()
    await rig.fill()

    assert ["FaultStore refuses to write: OOM", "FaultStore accepts to write again"] == logged()


async def test_another_reason_is_news(rig: Rig, logged: Logged) -> None:
    """A refusal with another reason is logged too."""
    for reason in ("OOM", "READONLY"):
        rig.store.error = Refused(reason)
        await rig.fill()

    assert ["FaultStore refuses to write: OOM", "FaultStore refuses to write: READONLY"] == logged()


async def test_operations_queue_for_the_store(narrow: Rig, pause: Pause) -> None:
    """A store that does one thing at a time is asked one thing at a time, in the order of arrival."""
    gate = narrow.store.gate = Gate()
    calls = [asyncio.create_task(narrow.read(op)) for op in "abc"]
    await pause()
    before = gate.arrived
    gate.open()

    assert [None] * 3 == await asyncio.gather(*calls)
    assert (1, 3) == (before, gate.arrived)


async def test_queue_that_is_too_long(narrow: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that waits too long for a turn goes without the store, with its node not to blame. Deletes wait on."""
    monkeypatch.setattr(asking_module, "_QUEUE_TIMEOUT", 0.001)
    gate = narrow.store.gate = Gate()
    first = asyncio.create_task(narrow.read("a"))
    await gate.arrivals(1)
    deletion = asyncio.create_task(narrow.delete("c"))
    outcome = await narrow.read("b")
    gate.open()
    await first

    assert (None, True) == (outcome, await deletion)
    assert {"l2_skips": 1} == narrow.counted
    assert "closed" == narrow.breaker.state


async def test_queue_for_a_store_that_turns_out_dead(narrow: Rig) -> None:
    """When the store fails, those who queue for it leave as soon as that is known, unasked."""
    gate = narrow.store.gate = Gate()
    calls = [asyncio.create_task(narrow.read(op)) for op in "abcdefg"]
    await gate.arrivals(1)
    narrow.store.error = OSError("down")
    gate.open()
    await asyncio.gather(*calls)

    assert {"l2_errors": 3, "l2_skips": 4} == narrow.counted


async def test_cancelled_in_the_queue(narrow: Rig, pause: Pause) -> None:
    """Whoever leaves the queue, or the store, leaves room for the next."""
    gate = narrow.store.gate = Gate()
    calls = [asyncio.create_task(narrow.read(op)) for op in "abc"]
    await pause()
    for call in calls[:2]:
        call.cancel()
    gate.open()

    assert await calls[2] is None
    assert ({}, ["read", "read"]) == (narrow.counted, narrow.store.asked)


async def test_store_that_does_not_open(rig: Rig, logged: Logged) -> None:
    """A store that is dead at the start is not asked until a probe is due."""
    rig.store.error = OSError("down")
    await rig.tier.open()
    await rig.read()

    assert [] == rig.store.asked
    assert 1 == len(logged())


async def test_store_that_opens(rig: Rig, logged: Logged) -> None:
    """A store that answers at the start is nothing to talk of."""
    await rig.tier.open()

    assert ("closed", []) == (rig.breaker.state, logged())


async def test_store_that_does_not_close(rig: Rig, logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails as it is closed is logged, without its text, and nobody's error."""
    await rig.tier.aclose()

    async def fail() -> None:
        raise OSError("redis://user:password@host is gone")

    monkeypatch.setattr(rig.tier.store, "aclose", fail)
    await rig.tier.aclose()

    assert ["FaultStore did not close cleanly (OSError)"] == logged()


# The order of writes


async def test_delete_waits_for_the_fill_before_it(rig: Rig) -> None:
    """A delete is sent when the fill that is under way has been answered, or it could overtake it."""
    gate = rig.store.gate = Gate()
    fill = asyncio.create_task(rig.fill())
    await gate.arrivals(1)
    rig.store.gate = None
    delete = asyncio.create_task(rig.delete())
    await asyncio.sleep(0)
    before = [*rig.store.asked]
    gate.open()

    assert await delete
    await fill
    assert (["write"], ["write", "delete"], {}) == (before, rig.store.asked, rig.store.contents)


async def test_other_ops_do_not_wait(rig: Rig) -> None:
    """Each op has an order of its own."""
    gate = rig.store.gate = Gate()
    fill = asyncio.create_task(rig.fill())
    await gate.arrivals(1)
    rig.store.gate = None

    assert await rig.delete("menu-8")
    gate.open()
    await fill


async def test_order_is_kept_for_no_longer_than_needed(rig: Rig) -> None:
    """Nothing remains of ops that nobody writes."""
    for number in range(20):
        await rig.fill(op=f"menu-{number}")
        await rig.delete(f"menu-{number}")

    assert (0, 0) == (len(rig.tier._writes), len(rig.tier.pending.all()))


async def test_reader_of_an_op_that_is_being_invalidated(rig: Rig) -> None:
    """A reader waits for the delete that is under way: what was stored before is not an answer any more."""
    await rig.fill()
    gate = rig.store.gate = Gate()
    delete = asyncio.create_task(rig.delete())
    await gate.arrivals(1)
    rig.store.gate = None
    reader = asyncio.create_task(rig.read())
    await asyncio.sleep(0)
    early = reader.done()
    gate.open()

    assert (False, True, None) == (early, await delete, await reader)


async def test_reader_does_not_overtake_a_fill_with_a_pending_delete(rig: Rig) -> None:
    """1. An old fill is under way. 2. An invalidation arrives. 3. A reader comes: it is served after both."""
    gate = rig.store.gate = Gate()
    fill = asyncio.create_task(rig.fill(b"old"))
    await gate.arrivals(1)
    rig.store.gate = None
    delete = asyncio.create_task(rig.delete())
    await asyncio.sleep(0)
    reader = asyncio.create_task(rig.read())
    await asyncio.sleep(0)
    gate.open()

    assert (None, True) == (await reader, await delete)
    await fill
    assert ["write", "delete", "read"] == rig.store.asked


async def test_second_invalidation_is_not_covered_by_the_first(rig: Rig) -> None:
    """A delete that was sent before an invalidation does not confirm it: another one is sent."""
    first, second = Gate(), Gate()
    rig.store.gate = first
    one = asyncio.create_task(rig.delete())
    await first.arrivals(1)
    rig.store.gate = second
    two = asyncio.create_task(rig.delete())
    await asyncio.sleep(0)
    reader = asyncio.create_task(rig.read())
    first.open()
    confirmed = await one
    await second.arrivals(1)
    early = reader.done()
    second.open()

    assert (True, False, True, None) == (confirmed, early, await two, await reader)
    assert ["delete", "delete", "read"] == rig.store.asked


async def test_one_delete_serves_all_who_asked_before_it(rig: Rig) -> None:
    """Invalidations that queue up behind a write are confirmed by one delete together."""
    gate = rig.store.gate = Gate()
    fill = asyncio.create_task(rig.fill())
    await gate.arrivals(1)
    rig.store.gate = None
    deletes = [asyncio.create_task(rig.delete()) for _ in range(5)]
    await asyncio.sleep(0)
    gate.open()

    assert [True] * 5 == await asyncio.gather(*deletes)
    await fill
    assert ["write", "delete"] == rig.store.asked


# Invalidations that the store did not confirm


async def test_unconfirmed_op_is_neither_read_nor_filled(rig: Rig) -> None:
    """Until the store has deleted it, an op is kept out of it: its old value may still be there."""
    await rig.fill(b"old")
    rig.store.error = Refused("READONLY")
    confirmed = await rig.delete()
    rig.store.asked.clear()
    outcomes = [await rig.read(), await rig.fill(b"new")]

    assert (False, [None, True]) == (confirmed, outcomes)
    assert ["delete", "delete"] == rig.store.asked


@pytest.mark.parametrize("is_read", [True, False])
async def test_pending_delete_comes_first(is_read: bool, rig: Rig) -> None:
    """When the store is back, the next who needs it deletes, and then reads or fills."""
    await rig.fill(b"old")
    rig.store.error = OSError("down")
    await rig.delete()
    rig.store.error = None
    rig.store.asked.clear()
    assert await (rig.read() if is_read else rig.fill(b"new")) is (None if is_read else True)
    assert ["delete", "read" if is_read else "write"] == rig.store.asked
    assert (b"new" if not is_read else None) == await rig.read()


async def test_delete_is_tried_with_an_open_breaker(rig: Rig) -> None:
    """An invalidation is sent though the store seems dead, for the sake of the other processes; it may close it."""
    rig.breaker.trip("OSError")

    assert await rig.delete()
    assert ["delete"] == rig.store.asked
    assert "closed" == rig.breaker.state


async def test_pending_delete_is_not_sent_to_a_dead_store(rig: Rig) -> None:
    """Who reads an op that awaits its invalidation does not wait for a dead store either, and may be its probe."""
    rig.store.error = OSError("down")
    for _ in range(3):
        await rig.delete()
    skipped = [await rig.read() for _ in range(5)]
    rig.store.error = None
    rig.clock.advance(0.2)
    await rig.read()

    assert [None] * 5 == skipped
    assert ["delete"] * 4 + ["read"] == rig.store.asked


async def test_too_many_unconfirmed_ops(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """When there is no room to remember another, nothing is read or stored until all that was there has expired."""
    monkeypatch.setattr(pending_module, "_MAX_UNCONFIRMED", 2)
    for op in "abcd":
        await rig.fill(op=op)
    rig.store.error = Refused("READONLY")
    for op in "abbc":
        await rig.delete(op)
    rig.store.error = None
    blind = [await rig.read(op) for op in "abcd"]
    skips = rig.counters.l2_skips
    await rig.fill(b"new", "d")
    rig.clock.advance(59)
    blind.append(await rig.read("d"))
    rig.clock.advance(1)
    await rig.fill(b"new", "d")

    assert ([None] * 5, 4) == (blind, skips)
    assert (None, b"new") == (await rig.read("a"), await rig.read("d"))


async def test_cancelled_delete_is_still_pending(rig: Rig) -> None:
    """A delete whose caller was cancelled goes on, and the next reader waits for it."""
    await rig.fill(b"old")
    gate = rig.store.gate = Gate()
    delete = asyncio.create_task(rig.delete())
    await gate.arrivals(1)
    delete.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delete
    gate.open()

    assert await rig.read() is None
    assert {} == rig.store.contents


# What no store answered


@pytest.mark.parametrize("verb", ["take_over", "let go"])
async def test_what_is_not_asked_is_no_answer(verb: str, rig: Rig, pause: Pause) -> None:
    """A plain store that fails is found out, though rights that nobody gives are taken and given back in between."""
    rig.store.error = OSError("down")

    for _ in range(3):
        lease = rig.lease()
        await lease.take_over()
        assert await lease.fill(b"soup", 60, None, lambda: True, "menu")
        if verb == "let go":
            lease.release_soon()
            await pause()

    assert "open" == rig.breaker.state


async def test_late_answers_are_no_answers(rig: Rig, pause: Pause) -> None:
    """A plain store that takes too long is found out, though there is time for anything between its failures."""
    rig.store.error = TimeoutError()

    for _ in range(3):
        await rig.read()
        await pause()

    assert ("open", ["read"] * 3) == (rig.breaker.state, rig.store.asked)


# A store with leases, tags and a bus


class Fleet:
    """One process of a fleet."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.server = Server(self.clock)
        self.store = LeasingDouble(self.server)
        self.tier = Tier(self.store, "menus", 100, self.clock, "h" * 22)
        self.counters = Counters()

    async def invalidate(self, *ops: str) -> list[bool]:
        """Return which were confirmed, of invalidations that were announced together."""
        sent = [self.tier.send(self.tier.invalidation(op)) for op in ops]
        return [await confirmation.wait() for confirmation in sent]


@pytest.fixture
def fleet() -> Fleet:
    """Return a process over a store with leases."""
    return Fleet()


def test_channel_is_the_namespaces(fleet: Fleet) -> None:
    """Guards of one namespace share a bus, and what their store can do is theirs."""
    assert "sg1:menus:bus" == fleet.store.channel
    assert fleet.store.capabilities == fleet.tier.capabilities


@pytest.mark.parametrize(
    ("tag", "key"),
    [("soups", "sg1:{menus:soups}:t"), ("", "sg1:{menus:}:t"), ("a b", "sg1:{menus:a_b~")],
)
def test_keys_of_tags(tag: str, key: str, fleet: Fleet) -> None:
    """A tag's mark has a key like an op's; the empty tag is everybody's."""
    assert fleet.tier.tag_key(tag).startswith(key)


async def test_too_many_to_remember_are_everything(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """When too many wait to be confirmed, everything is invalidated instead; each is confirmed when that is."""
    monkeypatch.setattr(pending_module, "_MAX_UNCONFIRMED", 2)

    confirmed = await fleet.invalidate("a", "b", "c")

    assert ([True] * 3, []) == (confirmed, fleet.tier.pending.all())
    assert ["invalidate tag"] == fleet.store.asked


async def test_too_many_to_remember_are_not_confirmed_by_nobody(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the invalidation that took their place is not confirmed, none of them is."""
    monkeypatch.setattr(pending_module, "_MAX_UNCONFIRMED", 2)
    fleet.store.error = OSError("down")

    assert [False] * 3 == await fleet.invalidate("a", "b", "c")
    assert 1 == len(fleet.tier.pending.all())


async def test_settling_all(fleet: Fleet) -> None:
    """What is not confirmed is tried again; while the store is down one tries for all, and then all have to wait."""
    fleet.store.error = OSError("down")
    await fleet.invalidate(*"abcde")
    fleet.store.asked.clear()
    await fleet.tier.repeat_invalidations()
    while_down = len(fleet.store.asked)
    fleet.store.error = None
    await fleet.tier.repeat_invalidations()

    assert (1, 1 + 5) == (while_down, len(fleet.store.asked))
    assert [] == fleet.tier.pending.all()


async def test_another_server_may_have_lost_what_was_confirmed(fleet: Fleet) -> None:
    """After a change of servers, what was confirmed lately is said again, once."""
    await fleet.invalidate("a", "b")
    await fleet.tier.repeat_invalidations()
    before = len(fleet.store.asked)
    fleet.store.generation += 1
    for _ in range(2):
        await fleet.tier.repeat_invalidations()

    assert (2, 4) == (before, len(fleet.store.asked))


async def test_server_that_changes_while_it_confirms(fleet: Fleet) -> None:
    """What was confirmed by a server that has a successor by then is said to that one too."""
    gate = fleet.store.gate = Gate()
    invalidation = asyncio.create_task(fleet.invalidate("a"))
    await gate.arrivals(1)
    fleet.store.generation += 1
    gate.open()

    assert [True] == await invalidation
    assert ["invalidate", "invalidate"] == fleet.store.asked
    assert [] == fleet.tier.pending.all()


async def test_echo(fleet: Fleet) -> None:
    """An echo is sent even when the breaker is open, and whether it was is told."""
    fleet.tier.access.breaker("Leasing").trip("OSError")
    said = [await fleet.tier.echo(b"word")]
    fleet.store.error = OSError("down")
    said.append(await fleet.tier.echo(b"word"))

    assert ([True, False], ["echo", "echo"]) == (said, fleet.store.asked)


async def test_who_stored_it(fleet: Fleet) -> None:
    """The token of what is stored is told, or nothing if there is no answer."""
    lease = Lease(fleet.tier, OP, (), 2, 60, fleet.counters)
    await lease.acquire(lambda payload: (payload,))
    await lease.fill(b"soup", 60, None, lambda: True, "menu")
    key = f"{fleet.tier.key(OP)}:v"
    found = await fleet.tier.stored_by(key), await fleet.tier.stored_by("nothing")
    fleet.store.error = OSError("down")

    assert ((lease.stored_by,), ()) == found
    assert await fleet.tier.stored_by(key) == ()


async def test_each_node_has_a_breaker(fleet: Fleet) -> None:
    """A dead node does not keep others from being asked."""
    fleet.tier.access.breaker("another node").trip("OSError")
    lease = Lease(fleet.tier, OP, (), 2, 60, fleet.counters)

    assert "own" == await lease.acquire(lambda payload: (payload,))
    assert ["open", "closed"] == [fleet.tier.access.breaker(node).state for node in ("another node", "Leasing")]


async def test_node_of_a_mark_that_does_not_answer(fleet: Fleet) -> None:
    """An op whose marks are at a dead node goes on without the store, until a request to it has been answered."""
    nodes = "tags' node", "Leasing"
    fleet.tier.access.breaker("tags' node").trip("OSError")
    acquired = [await Lease(fleet.tier, OP, (), 2, 60, fleet.counters).acquire(lambda payload: (payload,))]
    was_asked = [*fleet.store.asked]
    states = [[fleet.tier.access.breaker(node).state for node in nodes]]
    fleet.clock.advance(1)
    acquired.append(await Lease(fleet.tier, OP, (), 2, 60, fleet.counters).acquire(lambda payload: (payload,)))
    states.append([fleet.tier.access.breaker(node).state for node in nodes])

    assert (["unavailable", "own"], [], 1) == (acquired, was_asked, fleet.counters.l2_skips)
    assert [["open", "closed"], ["closed", "closed"]] == states


async def test_no_node_is_probed_while_another_is_skipped(fleet: Fleet) -> None:
    """A probe of the key's node that is not sent, because the node of a mark is skipped, is tried again later."""
    fleet.tier.access.breaker("Leasing").trip("OSError")
    fleet.clock.advance(0.5)
    fleet.tier.access.breaker("tags' node").trip("OSError")
    acquired = [await Lease(fleet.tier, OP, (), 2, 60, fleet.counters).acquire(lambda payload: (payload,))]
    fleet.clock.advance(1)
    acquired.append(await Lease(fleet.tier, OP, (), 2, 60, fleet.counters).acquire(lambda payload: (payload,)))

    assert ["unavailable", "own"] == acquired


async def test_upkeep_that_is_over_at_once(fleet: Fleet) -> None:
    """What ended as its task was created, as eager tasks do, is not waited for."""
    loop = asyncio.get_running_loop()
    factory = loop.get_task_factory()

    def at_once(loop: asyncio.AbstractEventLoop, upkeep: Any, **_: object) -> Any:
        with pytest.raises(StopIteration):
            upkeep.send(None)
        done: Any = loop.create_future()
        done.set_result(None)
        done.set_name = lambda _: None
        return done

    async def nothing() -> None: ...

    loop.set_task_factory(at_once)
    fleet.tier.run_upkeep(nothing())
    loop.set_task_factory(factory)

    assert set() == fleet.tier.upkeep


async def test_closing_waits_for_upkeep(fleet: Fleet, pause: Pause) -> None:
    """What was begun is ended before the connections are closed."""
    gate = Gate()
    fleet.tier.run_upkeep(gate.passage())
    await pause()
    closing = asyncio.create_task(fleet.tier.aclose())
    await pause()
    early = fleet.store.is_closed
    gate.open()
    await closing

    assert (False, True, set()) == (early, fleet.store.is_closed, fleet.tier.upkeep)
