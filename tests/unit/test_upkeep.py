import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from leasing import LeasingDouble, Server
from waiting import eventually

from stampede_guard._l2 import upkeep
from stampede_guard._l2.lease import Found, Lease, LeaseLapsed
from stampede_guard._l2.tier import Tier
from stampede_guard._stats import Counters
from stampede_guard.stores import AcquireRequest, AcquireResult, Refused
from stampede_guard.testing import FaultStore, Gate, ManualClock

Pause = Callable[[], Awaitable[None]]


def as_it_is(payload: bytes) -> tuple[Any]:
    """Decode."""
    return (payload,)


class Process:
    """One process of a fleet, whose upkeep looks when the test says so, or is told to be patient."""

    def __init__(self, server: Server) -> None:
        self.clock = server.clock
        self.store = LeasingDouble(server)
        self.tier = Tier(self.store, "menus", 100, server.clock)
        self.counters = Counters()

    def lease(self, op: str = "menu-7") -> Lease:
        """Return what a flight gets."""
        return Lease(self.tier, op, (), 2, 60, self.counters)

    async def owned(self, op: str = "menu-7") -> Lease:
        """Return the lease of a flight that may load."""
        lease = self.lease(op)
        assert "own" == await lease.acquire(as_it_is)
        return lease

    async def after(self, seconds: float) -> None:
        """Let time pass, and what is due by then be done."""
        self.clock.advance(seconds)
        self.look()
        await eventually(lambda: not self.tier.upkeep)

    def look(self) -> None:
        """Look for what is due, as the timer does."""
        self.tier.leases._tick(self.tier.leases._timer_at)

    @property
    def asked(self) -> list[str]:
        """What the store was asked for since this was read."""
        asked, self.store.asked = self.store.asked, []
        return asked

    @property
    def breaker(self) -> Any:
        """The store's breaker."""
        return self.tier.access.breaker("Leasing")


async def fill(lease: Lease) -> bool:
    """Store an answer."""
    return await lease.fill(b"soup", 60, None, lambda: True, "menu")


def key_of(op: str = "menu-7") -> str:
    """Return the base of the op's keys."""
    return f"sg1:{{menus:{op}}}"


@pytest.fixture
def here(server: Server) -> Process:
    """Return a process."""
    return Process(server)


@pytest.fixture
def there(server: Server) -> Process:
    """Return another process."""
    return Process(server)


# Renewals


async def test_lease_is_renewed_from_the_grant_until_the_fill(here: Process, server: Server) -> None:
    """During the whole flight its lease is renewed each quarter of its life; filled, it is not any more."""
    lease = await here.owned()
    for _ in range(12):
        await here.after(0.5)
    asked = here.asked
    stored = await fill(lease)
    await here.after(10)

    assert ["acquire", *["renew"] * 12] == asked
    assert (True, ["fill"], True) == (stored, here.asked, here.tier.leases.is_idle)


async def test_lease_is_renewed_while_its_fill_queues(here: Process, server: Server) -> None:
    """A fill that waits for its turn keeps the lease."""
    lease = await here.owned()
    async with here.tier.turn(key_of()):
        filling = asyncio.create_task(fill(lease))
        for _ in range(5):
            await here.after(0.5)
    assert await filling
    assert ["acquire", *["renew"] * 5, "fill"] == here.asked


async def test_renewals_travel_together(here: Process, server: Server) -> None:
    """Leases that were granted at about the same time are renewed by one request for each 128, by one task."""
    leases = [await here.owned(f"menu-{number}") for number in range(300)]
    here.asked  # noqa: B018
    here.clock.advance(0.5)
    here.look()
    tasks = {task.get_name() for task in here.tier.upkeep}
    count = len(here.tier.upkeep)
    await eventually(lambda: not here.tier.upkeep)

    assert ({"upkeep of leases"}, 1) == (tasks, count)
    assert ["renew 128", "renew 128", "renew 44"] == here.asked
    assert {2.0} == {until - here.clock() for _, _, until in server.leases.values()}
    assert all(lease.is_owned for lease in leases)


async def test_one_timer_for_all_leases(here: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a lease that is due sooner sets the timer anew; looks are a twelfth of a lease's life apart at least."""
    timers: list[float] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda delay, *_, **__: timers.append(round(delay, 3)))
    for number in range(10):
        await here.owned(f"menu-{number}")
        here.clock.advance(0.02)
    set_at_first = [*timers]
    here.clock.advance(0.3)
    await here.after(0)

    assert [0.5] == set_at_first
    assert [0.5, 0.167] == timers  # the second is due after 0.02 s, and is in no hurry


async def test_timer_that_was_overtaken(here: Process) -> None:
    """A timer that another has replaced does nothing."""
    await here.owned()
    here.clock.advance(0.5)
    here.tier.leases._tick(here.tier.leases._timer_at + 1)

    assert ["acquire"] == here.asked
    assert set() == here.tier.upkeep


async def test_timer_fires_by_itself(server: Server) -> None:
    """The event loop runs the timer without any call."""
    loop = asyncio.get_running_loop()
    store = LeasingDouble(server)
    lease = Lease(Tier(store, "menus", 100, loop.time), "menu-7", (), 0.003, 60, Counters())
    await lease.acquire(as_it_is)
    await eventually(lambda: "renew" in store.asked)

    assert lease.is_owned


async def test_renewal_does_not_queue(here: Process) -> None:
    """A renewal takes no slot: thousands of operations that wait for one do not delay it."""
    await here.owned()
    for _ in range(here.store.concurrency):
        here.tier.access.reserve("Leasing")
    await here.after(0.5)

    assert ["acquire", "renew"] == here.asked


async def test_lease_that_was_lost(here: Process, server: Server) -> None:
    """A flight that learns that its lease is gone renews no more, does not store, and its value is not kept."""
    lease = await here.owned()
    server.leases.clear()
    await here.after(0.5)
    lost = lease.is_owned
    kept = await fill(lease)
    await here.after(0.5)

    assert (False, False, True) == (lost, kept, here.tier.leases.is_idle)
    assert ["acquire", "renew"] == here.asked


async def test_loss_that_is_learnt_after_the_flight(here: Process, server: Server) -> None:
    """A renewal that is answered when its flight is over has no effect; nor has one that was not sent by then."""
    lease, other = await here.owned(), await here.owned("menu-8")
    server.leases.clear()
    gate = here.store.gate = Gate()
    here.clock.advance(0.5)
    here.look()
    other.release_soon()  # before the task of the renewals has begun
    await gate.arrivals(1)
    lease.release_soon()
    gate.open()
    await eventually(lambda: not here.tier.upkeep)

    assert ["acquire", "acquire", "renew", "release", "release"] == here.asked


async def test_renewal_that_is_not_answered(here: Process, server: Server) -> None:
    """It is repeated soon, while the lease has some life left; the flight goes on as its owner."""
    lease = await here.owned()
    here.store.error = OSError("down")
    await here.after(0.5)
    here.store.error = None
    await here.after(0.17)

    assert (True, ["acquire", "renew", "renew"], 1) == (lease.is_owned, here.asked, here.counters.l2_errors)
    assert 2 == server.leases[key_of()][2] - here.clock()


async def test_renewal_that_is_refused(
    here: Process, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], list[str]]
) -> None:
    """A refusal concerns one lease: it is counted and logged, and tried again in time."""
    lease, other = await here.owned(), await here.owned("menu-8")

    async def refuse(rights: Any) -> list[bool | Exception]:
        return [Refused("BUSY") if key == key_of() else True for key, _, _ in rights]

    monkeypatch.setattr(here.store, "renew", refuse)
    await here.after(0.5)

    assert (True, True, 1) == (lease.is_owned, other.is_owned, here.counters.l2_errors)
    assert ["Leasing refuses to renew: BUSY"] == logged()


async def test_lease_of_a_busy_process_lasts_longer(here: Process, server: Server) -> None:
    """When the event loop is late for a renewal, the lease is renewed for longer, up to 10 s: it may be late again."""
    lives: list[float] = []
    await here.owned()
    for late in (0.5, 1.5, 0.5, 5):
        await here.after(late)
        lives.append(server.leases[key_of()][2] - here.clock())

    assert [2, 6, 5.5, 10] == lives  # the third time nothing was due


# A right that has ended before the load begins


async def test_right_that_is_old_when_it_is_heard_of(here: Process, server: Server) -> None:
    """The life of a lease begins when it was asked for, not when the event loop came to read the answer."""
    gate = here.store.gate = Gate()
    lease = here.lease()
    asking = asyncio.create_task(lease.acquire(as_it_is))
    await gate.arrivals(1)
    here.clock.advance(2)
    gate.open()
    answer = await asking

    with pytest.raises(LeaseLapsed):
        lease.check()
    again = await lease.acquire(as_it_is)
    lease.check()
    assert ("own", "own") == (answer, again)
    assert await fill(lease)


async def test_question_that_queued(here: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that tells when the question was sent is believed: the queue before that is not part of the lease."""
    acquire = here.store.acquire

    async def late(request: AcquireRequest) -> AcquireResult:
        here.clock.advance(5)
        return (await acquire(request))._replace(sent_at=time.monotonic())

    monkeypatch.setattr(here.store, "acquire", late)
    lease = await here.owned()

    lease.check()
    assert lease._held is not None
    assert 2 == pytest.approx(lease._held.ends_at - here.clock(), abs=0.5)


async def test_renewed_right_is_current(here: Process) -> None:
    """A right whose renewal was confirmed is good for as long again; one that was lost is not."""
    lease = await here.owned()
    await here.after(1.9)
    await here.after(1.9)
    lease.check()
    here.store.error = OSError("down")
    await here.after(10)

    with pytest.raises(LeaseLapsed):
        lease.check()


async def test_right_that_was_lost_is_asked_for_again(here: Process, there: Process, server: Server) -> None:
    """A flight that has lost its lease before it loads asks again: another one loads by now, so it waits."""
    lease = await here.owned()
    server.leases.clear()
    theirs = await there.owned()
    await here.after(0.5)
    with pytest.raises(LeaseLapsed):
        lease.check()
    waiting = await lease.acquire(as_it_is)
    await fill(theirs)

    found = await lease.acquire(as_it_is)
    assert isinstance(found, Found)
    assert ("wait", b"soup") == (waiting, found.value)


async def test_answer_that_was_lost_before_it_was_looked_at(here: Process, server: Server, pause: Pause) -> None:
    """The right that a look brought may be gone when the flight's task begins: it asks again."""
    lease = here.lease()
    assert lease.start(lambda _: None)
    await eventually(lambda: server.leases)
    await pause()
    assert lease.result(as_it_is) is None
    server.leases.clear()
    await here.after(0.5)
    answer = await lease.acquire(as_it_is)

    assert ("own", ["acquire", "renew", "acquire"]) == (answer, here.asked)


async def test_who_never_had_the_right_has_lost_nothing(here: Process, there: Process) -> None:
    """A flight that loads beside another, without an answer, or over a plain store may load."""
    await there.owned()
    beside = here.lease()
    await beside.acquire(as_it_is)
    here.store.error = Refused("LOADING")
    blind = here.lease()
    await blind.acquire(as_it_is)
    plain = Lease(Tier(FaultStore(ManualClock()), "menus", 100, ManualClock()), "menu-7", (), 2, 60, Counters())
    await plain.acquire(as_it_is)

    for lease in (beside, blind, plain):
        lease.check()
        assert lease._held is None


# Releases


async def test_release_of_a_lease_that_was_granted(here: Process, server: Server) -> None:
    """One confirmed release is enough; nothing is owed after that."""
    lease = await here.owned()
    lease.release_soon()
    owed = not here.tier.leases.is_idle
    await eventually(lambda: not here.tier.upkeep)
    await here.after(10)

    assert (True, True, {}) == (owed, here.tier.leases.is_idle, server.leases)
    assert ["acquire", "release"] == here.asked


async def test_releases_of_one_moment_travel_together(here: Process, server: Server) -> None:
    """Flights that end in one iteration of the event loop cost one request."""
    leases = [await here.owned(f"menu-{number}") for number in range(5)]
    here.asked  # noqa: B018
    for lease in leases:
        lease.release_soon()
    await eventually(lambda: not here.tier.upkeep)

    assert (["release 5"], {}) == (here.asked, server.leases)


async def test_release_that_is_not_answered_is_repeated(here: Process, server: Server) -> None:
    """A lease that could not be given back is given back as soon as the store answers again, and counts once."""
    lease = await here.owned()
    here.store.error = OSError("down")
    lease.release_soon()
    await eventually(lambda: not here.tier.upkeep)
    await here.after(0.2)
    here.store.error = None
    await here.after(0.2)

    assert (["acquire", "release", "release", "release"], {}) == (here.asked, server.leases)
    assert (1, True) == (here.counters.l2_errors, here.tier.leases.is_idle)


async def test_release_behind_an_open_breaker_is_not_lost(here: Process, server: Server) -> None:
    """It waits until a probe may be sent, and may be the probe."""
    lease = await here.owned()
    here.breaker.trip("a test")
    lease.release_soon()
    await eventually(lambda: not here.tier.upkeep)
    asked = here.asked
    await here.after(0.25)

    assert (["acquire"], ["release"], {}, "closed") == (asked, here.asked, server.leases, here.breaker.state)


async def test_lease_that_may_be_granted_late(here: Process, server: Server) -> None:
    """A request that ran out of time may be executed when the release has been: that is repeated for a lease's life."""
    here.store.error = TimeoutError()
    lease = here.lease()
    await lease.acquire(as_it_is)
    await eventually(lambda: not here.tier.upkeep)
    here.store.error = None
    lease.release_soon()
    await here.after(0.2)
    server.leases[key_of()] = lease._token, False, here.clock() + 2  # now
    here.asked  # noqa: B018
    await here.after(0.4)

    assert (["release"], {}, True) == (here.asked, server.leases, here.tier.leases.is_idle)


async def test_lease_that_was_not_granted_at_all(here: Process, server: Server) -> None:
    """When the life of a lease has passed since the store answered again, nothing is owed any more."""
    here.store.error = TimeoutError()
    await here.lease().acquire(as_it_is)
    for _ in range(20):
        await here.after(0.5)
    still_owed = not here.tier.leases.is_idle
    here.store.error = None
    here.asked  # noqa: B018
    for _ in range(30):
        await here.after(0.25)

    assert (True, True) == (still_owed, here.tier.leases.is_idle)
    assert {"release"} == {*here.asked}


async def test_store_that_never_answers_again(here: Process) -> None:
    """What is owed to it is forgotten after a minute."""
    here.store.error = TimeoutError()
    await here.lease().acquire(as_it_is)
    for _ in range(65):
        await here.after(1)

    assert here.tier.leases.is_idle


async def test_lease_under_the_token_of_a_request_that_was_lost(
    here: Process, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is repeated under another token may be executed after all: the first token's is released too."""
    acquire, tokens = here.store.acquire, []

    async def lose_the_first(request: AcquireRequest) -> AcquireResult:
        tokens.append(request.token)
        if len(tokens) == 1:
            raise ConnectionResetError
        return await acquire(request)

    monkeypatch.setattr(here.store, "acquire", lose_the_first)
    lease = await here.owned()
    lease.release_soon()
    await eventually(lambda: not here.tier.upkeep)
    server.leases[key_of()] = tokens[0], False, here.clock() + 2
    here.asked  # noqa: B018
    await here.after(0.2)

    assert (["release"], {}, True) == (here.asked, server.leases, here.tier.leases.is_idle)


async def test_release_that_is_refused(
    here: Process, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], list[str]]
) -> None:
    """A refusal is logged once, and the release repeated until the lease has expired."""

    async def refuse(rights: Any) -> list[bool | Exception]:
        here.store.asked.append("refused")
        return [Refused("NOPERM")] * len(rights)

    monkeypatch.setattr(here.store, "release", refuse)
    lease = await here.owned()
    lease.release_soon()
    await eventually(lambda: not here.tier.upkeep)
    for _ in range(16):
        await here.after(0.25)

    assert ["acquire", *["refused"] * 4] == here.asked
    assert (True, ["Leasing refuses to release: NOPERM"]) == (here.tier.leases.is_idle, logged())
    assert 1 == here.counters.l2_errors


async def test_releases_that_are_owed_are_bounded(here: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """When there are too many the oldest is given up: its lease expires."""
    monkeypatch.setattr(upkeep, "_MAX_OWED", 2)
    leases = [await here.owned(f"menu-{number}") for number in range(3)]
    here.store.error = OSError("down")
    for lease in leases:
        lease.release_soon()
    await eventually(lambda: not here.tier.upkeep)

    assert [lease._token for lease in leases[1:]] == [*here.tier.leases._owed]


# Closing


async def test_closing_tries_once_more(here: Process, server: Server) -> None:
    """What is owed when the store is closed is tried once more, and then forgotten; no timer comes after that."""
    lease = await here.owned()
    here.store.error = OSError("down")
    lease.release_soon()
    await eventually(lambda: not here.tier.upkeep)
    here.store.error = None
    await here.tier.aclose()

    assert ({}, True) == (server.leases, here.store.is_closed)
    assert ["acquire", "release", "release"] == here.asked


async def test_flight_that_ends_after_closing(here: Process) -> None:
    """A flight that outlives its tier has no store left to ask."""
    lease = await here.owned()
    await here.tier.aclose()
    lease.release_soon()
    await here.lease("menu-8").acquire(as_it_is)

    assert (set(), True) == (here.tier.upkeep, here.tier.leases.is_idle)
