import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from leasing import LeasingDouble, Server
from waiting import eventually

from stampede_guard._l2.lease import Found, Lease, OldValue
from stampede_guard._l2.messages import Message, woken
from stampede_guard._l2.tier import Tier
from stampede_guard._stats import Counters
from stampede_guard.stores import AcquireRequest, AcquireResult, LoadFailure, Refused, Stored, StoreOverloaded
from stampede_guard.stores._envelope import seal
from stampede_guard.testing import Gate, ManualClock

Pause = Callable[[], Awaitable[None]]

OP = "menu-7"
KEY = "sg1:{menus:menu-7}"
EVERYTHING, SOUPS = "sg1:{menus:}:t", "sg1:{menus:soups}:t"
HERE, THERE = "h" * 22, "t" * 22


def as_it_is(payload: bytes) -> tuple[Any]:
    """Decode."""
    return (payload,)


class Process:
    """One process of a fleet: a way to the server, and a tier over it."""

    def __init__(self, server: Server, instance: str) -> None:
        self.store = LeasingDouble(server)
        self.tier = Tier(self.store, "menus", 100, server.clock, instance)
        self.counters = Counters()

    def lease(self, *tags: str, length: float = 2, window: float = 0, margin: float = 0) -> Lease:
        """Return what a flight gets."""
        return Lease(self.tier, OP, tags, length, 60, self.counters, window=window, margin=margin)

    async def owned(self, *tags: str, length: float = 2) -> Lease:
        """Return the lease of a flight that may load."""
        lease = self.lease(*tags, length=length)
        assert "own" == await lease.acquire(as_it_is)
        return lease

    async def invalidate(self, *, version: int | None = None, is_soft: bool = False) -> bool:
        """Invalidate the op; return whether that is confirmed."""
        invalidation = self.tier.invalidation(OP, version, is_soft=is_soft)
        self.tier.announce(invalidation)
        return await self.tier.send(invalidation).wait()

    async def invalidate_tag(self, tag: str) -> bool:
        """Invalidate a tag; return whether that is confirmed."""
        invalidation = self.tier.tag_invalidation(tag)
        self.tier.announce(invalidation)
        return await self.tier.send(invalidation).wait()


async def fill(lease: Lease, payload: bytes = b"soup", version: int | None = None, *, holds: bool = True) -> bool:
    """Store an answer."""
    return await lease.fill(payload, 60, version, lambda: holds, "menu")


@pytest.fixture
def here(server: Server) -> Process:
    """Return a process."""
    return Process(server, HERE)


@pytest.fixture
def there(server: Server) -> Process:
    """Return another process."""
    return Process(server, THERE)


# Who loads


async def test_one_of_two_loads(here: Process, there: Process) -> None:
    """The first who finds nothing may load, the second learns for how long that is; filled, both find the value."""
    mine, theirs = await here.owned(), there.lease()
    answers = [await theirs.acquire(as_it_is)]
    stored = await fill(mine)
    answers.append(await theirs.acquire(as_it_is))

    assert (True, ["wait", Found(b"soup", b"soup", 60)], 2) == (stored, answers, theirs.left)
    assert (False, False) == (mine.is_owned, theirs.is_owned)
    assert theirs.stored_by == mine.stored_by


async def test_who_waits_is_woken(here: Process, there: Process, server: Server) -> None:
    """The end of a load is published if somebody waits for it, and only then."""
    await fill(await here.owned())
    server.values.clear()
    unheard = [*server.published]
    lease = await here.owned()
    await there.lease().acquire(as_it_is)
    await fill(lease)

    assert ([], [woken(OP).pack()]) == (unheard, server.published)


async def test_load_that_failed(here: Process, there: Process, server: Server) -> None:
    """When a load ends without a value the right is given back, and whoever waits is woken."""
    mine, theirs = await here.owned(), there.lease()
    before = await theirs.acquire(as_it_is)
    mine.release_soon()
    await eventually(lambda: server.published)

    assert ("wait", False) == (before, mine.is_owned)
    assert [woken(OP).pack()] == server.published
    assert "own" == await theirs.acquire(as_it_is)


async def test_what_is_not_owned_is_not_given_back(here: Process, there: Process, pause: Pause) -> None:
    """Who waits, or has filled, has nothing to give back."""
    mine, theirs = await here.owned(), there.lease()
    await theirs.acquire(as_it_is)
    await fill(mine)
    for lease in (mine, theirs):
        lease.release_soon()
    await pause()

    assert (["acquire", "fill"], ["acquire"]) == (here.store.asked, there.store.asked)


async def test_release_that_the_store_does_not_answer(here: Process) -> None:
    """A right that cannot be given back expires; closing waits for the attempt."""
    gate = here.store.gate = Gate()
    asking = asyncio.create_task(here.owned())
    gate.open()
    lease = await asking
    gate = here.store.gate = Gate()
    here.store.error = OSError("down")
    lease.release_soon()
    await gate.arrivals(1)
    closing = asyncio.create_task(here.tier.aclose())
    await asyncio.sleep(0)
    early = closing.done()
    gate.open()
    await closing

    assert (False, True, set()) == (early, here.store.is_closed, here.tier.upkeep)
    assert 1 == here.counters.l2_errors


async def test_refresh_takes_the_right_to_load(here: Process, there: Process, server: Server) -> None:
    """Who seizes may load, whatever is stored and whoever loads; that one's fill is refused, and everybody is told."""
    await fill(await there.owned(), b"old")
    server.values.clear()
    theirs = await there.owned()
    mine = here.lease()
    await mine.take_over()
    seized = mine.is_owned
    outcomes = await fill(theirs, b"late"), await fill(mine, b"new")

    assert (True, (False, True)) == (seized, outcomes)
    assert [Message("i", HERE, OP).pack()] == server.published
    assert Found(b"new", b"new", 60) == await there.lease().acquire(as_it_is)


async def test_blind(here: Process) -> None:
    """Without an answer of the store the flight loads without the right to store, and knows that it knows nothing."""
    here.store.error = TimeoutError()
    asking, seizing = here.lease(), here.lease()
    answer = await asking.acquire(as_it_is)
    await seizing.take_over()
    kept = [await fill(asking), await fill(seizing, version=7)]

    assert ("unavailable", [True, True]) == (answer, kept)
    assert [(True, False)] * 2 == [(lease.is_store_unavailable, lease.is_owned) for lease in (asking, seizing)]
    assert ["acquire"] * 2 == [what for what in here.store.asked if what != "release"]


async def test_value_that_will_not_do_is_seen_once(here: Process, server: Server) -> None:
    """A value that cannot be opened is not sent a second time; who saw it may load anew."""
    server.values[KEY] = seal("menus:menu-8", b"salad", THERE), server.clock() + 60

    assert "own" == await here.lease().acquire(as_it_is)
    assert (["acquire"] * 2, 1) == (here.store.asked, here.counters.l2_undecodable)


async def test_values_that_will_not_do_have_an_end(
    here: Process, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that has another value that will not do each time is given up after some."""
    acquire = here.store.acquire

    async def another(request: AcquireRequest) -> AcquireResult:
        server.values[KEY] = seal("menus:menu-8", b"salad", f"{len(here.store.asked):022}"), server.clock() + 60
        return await acquire(request)

    monkeypatch.setattr(here.store, "acquire", another)

    assert "unavailable" == await here.lease().acquire(as_it_is)
    assert 8 == here.store.asked.count("acquire")


async def test_request_that_was_lost(here: Process, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was lost with its connection is asked for once more, as another flight that inherits from the first."""
    acquire, tokens = here.store.acquire, []

    async def lost(request: AcquireRequest) -> AcquireResult:
        tokens.append(request.token)
        verdict = await acquire(request)
        if len(tokens) == 1:
            raise ConnectionResetError
        return verdict

    monkeypatch.setattr(here.store, "acquire", lost)
    lease = await here.owned()

    assert (2, 0) == (len(set(tokens)), here.counters.l2_errors)
    assert tokens[1] == server.leases[KEY][0]
    assert await fill(lease)


@pytest.mark.parametrize(
    ("error", "times"),
    [(ConnectionResetError(), 2), (TimeoutError(), 1), (Refused("LOADING"), 1), (StoreOverloaded(), 1)],
    ids=repr,
)
async def test_requests_that_are_not_repeated(error: Exception, times: int, here: Process) -> None:
    """A caller waits for one deadline, or once for room, not twice; and a no is a no."""
    here.store.error = error

    assert "unavailable" == await here.lease().acquire(as_it_is)
    assert times == here.store.asked.count("acquire")


@pytest.mark.parametrize("how", ["asks", "seizes"])
async def test_answer_that_came_too_late(
    how: str, here: Process, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right that was given after the deadline is given back: its flight does not know of it."""
    acquire = here.store.acquire

    async def late(request: AcquireRequest) -> AcquireResult:
        await acquire(request)
        raise TimeoutError

    monkeypatch.setattr(here.store, "acquire", late)
    lease = here.lease()
    await (lease.take_over() if how == "seizes" else lease.acquire(as_it_is))
    await eventually(lambda: not server.leases)

    assert (True, ["acquire", "release"]) == (lease.is_store_unavailable, here.store.asked)


# Fences


async def test_load_that_an_invalidation_overtook(here: Process, there: Process, server: Server) -> None:
    """What began before an invalidation in whatever process is not stored, however much later it comes."""
    lease = await here.owned()
    confirmed = await there.invalidate()

    assert (True, False, {}) == (confirmed, await fill(lease), server.values)
    assert [Message("i", THERE, OP).pack()] == server.published


async def test_the_token_tells_better_than_this_process(here: Process, server: Server) -> None:
    """Where leases fence, what this process heard of late is no reason not to store."""
    assert await fill(await here.owned(), holds=False)
    assert [KEY] == list(server.values)


async def test_invalidation_on_its_way_comes_before_the_fill(here: Process, server: Server) -> None:
    """A fill of an op whose invalidation is not confirmed sends that first, and is then refused."""
    lease = await here.owned()
    here.store.error = OSError("down")
    confirmed = await here.invalidate()
    here.store.error = None

    assert (False, False, {}) == (confirmed, await fill(lease), server.values)
    assert ["acquire", "invalidate", "invalidate", "fill"] == here.store.asked


async def test_fill_that_the_store_does_not_answer(here: Process) -> None:
    """A value that may or may not have been stored is the one to remember, for now; the right is given back."""
    lease = await here.owned()
    here.store.error = OSError("down")

    assert await fill(lease)
    assert (True, True) == (lease.is_owned, lease.is_store_unavailable)


@pytest.mark.parametrize(("version", "is_store_unavailable"), [(None, False), (7, True)])
async def test_value_that_is_too_large(version: int | None, is_store_unavailable: bool, here: Process) -> None:
    """What is not stored is remembered; if it has a version, which nobody compared, not for long."""
    lease = await here.owned()

    assert await fill(lease, bytes(101), version)
    assert (is_store_unavailable, ["acquire"]) == (lease.is_store_unavailable, here.store.asked)


@pytest.mark.parametrize(
    ("envelope", "was_undecodable"),
    [
        (seal("menus:menu-7", b"soup", THERE, marks=[b"mark-000000"]), False),
        (seal("menus:menu-7", b"salad", THERE, marks=[b"mark-000000"]), True),
        (seal("menus:menu-7", b"soup", THERE, marks=[b"another one"]), False),
        (seal("menus:menu-8", b"soup", THERE), True),
        (b"garbage", True),
    ],
    ids=["good", "not decodable", "old mark", "another op's", "garbage"],
)
async def test_garbage_is_told_from_a_miss(
    envelope: bytes, was_undecodable: bool, here: Process, server: Server
) -> None:
    """Whether there was something that is no value of the op's is known afterwards."""
    server.values[KEY] = envelope, server.clock() + 60
    lease = here.lease()
    await lease.acquire(lambda payload: (payload,) if payload == b"soup" else None)

    assert was_undecodable == lease.was_undecodable


@pytest.mark.parametrize(
    ("versions", "is_stored"), [((5, 6), True), ((5, 5), True), ((5, 4), False), ((None, 0), True), ((5, None), True)]
)
async def test_versions(
    versions: tuple[int | None, int | None], is_stored: bool, here: Process, there: Process
) -> None:
    """A version that is lower than what was invalidated for is not stored; one that is not known is."""
    await there.invalidate(version=versions[0])

    assert is_stored == await fill(await here.owned(), version=versions[1])


@pytest.mark.parametrize(("version", "kept"), [(None, True), (7, False)])
async def test_version_that_nobody_compared(version: int | None, kept: bool, here: Process, there: Process) -> None:
    """What was loaded beside another's load is remembered, unless it has a version that might be too low."""
    await there.owned()
    lease = here.lease()
    await lease.acquire(as_it_is)

    assert kept == await fill(lease, version=version)
    assert ["acquire"] == here.store.asked


# Tags


async def test_value_is_good_while_its_tags_are(here: Process, there: Process) -> None:
    """A value is found while the marks of its tags, and everybody's, are those that it was loaded under."""
    await fill(await here.owned("soups", "hot"))
    before = await there.lease("soups", "hot").acquire(as_it_is)
    confirmed = await there.invalidate_tag("soups")

    assert (Found(b"soup", b"soup", 60), True) == (before, confirmed)
    assert "own" == await here.lease("soups", "hot").acquire(as_it_is)
    assert 0 == here.counters.l2_undecodable


async def test_other_tags_do_not_matter(here: Process) -> None:
    """An invalidation of a tag that a value does not have leaves it."""
    await fill(await here.owned("soups"))
    await here.invalidate_tag("salads")

    assert Found(b"soup", b"soup", 60) == await here.lease("soups").acquire(as_it_is)


async def test_clearing(here: Process, there: Process, server: Server) -> None:
    """The invalidation of everything is that of a tag that every value has."""
    await fill(await here.owned())
    await there.invalidate_tag("")

    assert "own" == await here.lease().acquire(as_it_is)
    assert [Message("c", THERE, "").pack()] == server.published
    assert [EVERYTHING] == list(server.marks)


async def test_load_that_an_invalidation_of_its_tag_overtook(here: Process, there: Process) -> None:
    """What began before is stored under the old mark, and so by nobody found."""
    lease = await here.owned("soups")
    await there.invalidate_tag("soups")
    await fill(lease)

    assert "own" == await there.lease("soups").acquire(as_it_is)


async def test_tag_whose_invalidation_is_not_confirmed(here: Process, server: Server) -> None:
    """Until it is, nothing that has the tag is read or stored; it is sent first."""
    await fill(await here.owned("soups"))
    here.store.error = Refused("READONLY")
    confirmed = await here.invalidate_tag("soups")
    answers = [await here.lease("soups").acquire(as_it_is)]
    here.store.error = None
    here.store.asked.clear()
    answers.append(await here.lease("soups").acquire(as_it_is))

    assert (False, ["unavailable", "own"]) == (confirmed, answers)
    assert ["invalidate tag", "acquire", "acquire"] == here.store.asked  # the second knows the value that will not do
    assert {EVERYTHING, SOUPS} == set(server.marks)


async def test_each_invalidation_makes_a_mark_of_its_own(here: Process, server: Server) -> None:
    """No mark comes back, not even after the server lost them all."""
    marks = set()
    for _ in range(5):
        await here.invalidate_tag("soups")
        marks.add(server.marks.pop(SOUPS))

    assert (5, {11}) == (len(marks), {len(mark) for mark in marks})


# Values that are not fresh any more


async def fill_once(process: Process, *tags: str, life: float = 60, window: float = 30) -> None:
    """Store an answer that has a window."""
    lease = await process.owned(*tags)
    assert await lease.fill(b"soup", life, None, lambda: True, "menu", window=window)


async def test_value_is_fresh_for_its_life(here: Process, clock: ManualClock) -> None:
    """What is found is fresh for its life, however long its window; after that it is the old value."""
    await fill_once(here)
    clock.advance(20)

    lease = here.lease(window=30)
    assert Found(b"soup", b"soup", 40, 30, 20) == await lease.acquire(as_it_is)
    assert lease.old is None


@pytest.mark.parametrize("window", [20, 30, 99])
@pytest.mark.parametrize("kind", ["own", "wait", "backoff"])
async def test_old_value_comes_with_the_answer(
    window: float, kind: str, here: Process, there: Process, clock: ManualClock
) -> None:
    """Whichever flight is to load, each is told the old value, its age, and how long the flight can use it."""
    await fill_once(here)
    clock.advance(65)
    if kind != "own":
        mine = await there.owned()
        if kind == "backoff":
            mine.failure = LoadFailure(10, 30, "OSError")
            mine.release_soon()
            await eventually(lambda: not there.tier.leases._owed)

    lease = here.lease(window=window)
    assert kind == await lease.acquire(as_it_is)
    assert OldValue(b"soup", b"soup", 65, -5, 15 if window == 20 else 25) == lease.old
    assert (10, "OSError") == (lease.left, lease.paused_for) or kind != "backoff"


async def test_old_value_is_forgotten_once_it_is_over(here: Process, there: Process, clock: ManualClock) -> None:
    """A later answer without it says that its window is over; a fresh value is then stored as ever."""
    await fill_once(here)
    clock.advance(65)
    mine, theirs = here.lease(window=10), there.lease(window=10)
    answers = [await lease.acquire(as_it_is) for lease in (mine, theirs)]
    had = mine.old, theirs.old
    clock.advance(10)
    answers.append(await theirs.acquire(as_it_is))

    assert ["own", "wait", "own"] == answers
    assert (True, None) == (None not in had, theirs.old)


async def test_margin(here: Process, clock: ManualClock) -> None:
    """A flight for which the value counts as old before it is may load, and knows for how long the value is fresh."""
    await fill_once(here, window=0)
    clock.advance(50)
    lease = here.lease(margin=10)

    assert "own" == await lease.acquire(as_it_is)
    assert OldValue(b"soup", b"soup", 50, 10, 10) == lease.old


@pytest.mark.parametrize("wrong", ["tag", "undecodable", "broken"])
async def test_old_value_that_cannot_be_used(wrong: str, here: Process, server: Server, clock: ManualClock) -> None:
    """One with an old mark, or that cannot be decoded, is none."""
    await fill_once(here, "soups")
    if wrong == "tag":
        await here.invalidate_tag("soups")
    elif wrong == "broken":
        envelope, until = server.values[KEY]
        server.values[KEY] = envelope[:-1], until
    clock.advance(65)
    lease = here.lease("soups", window=30)

    assert "own" == await lease.acquire((lambda _: None) if wrong == "undecodable" else as_it_is)
    assert (None, wrong == "broken") == (lease.old, lease.was_undecodable)


@pytest.mark.parametrize("is_old", [False, True])
async def test_refresh_knows_what_it_is_to_replace(is_old: bool, here: Process, clock: ManualClock) -> None:
    """Asked with a decoder, it has the value, fresh or old."""
    await fill_once(here)
    clock.advance(65 if is_old else 50)
    with_decoder, without = here.lease(window=30), here.lease(window=30)
    await with_decoder.take_over(as_it_is)
    await without.take_over()

    assert (
        OldValue(b"soup", b"soup", 65, -5, 25) if is_old else OldValue(b"soup", b"soup", 50, 10, 40)
    ) == with_decoder.old
    assert (None, True) == (without.old, without.is_owned)


async def test_failed_load_leaves_a_marker(here: Process, there: Process, clock: ManualClock) -> None:
    """Flights that ask during its pause may not load; the next failure's pause is twice as long."""
    for pause in (10, 20):
        lease = await here.owned()
        lease.failure = LoadFailure(10, 30, "OSError")
        lease.release_soon()
        await eventually(lambda: not here.tier.leases._owed)
        later = there.lease()

        assert ("backoff", pause, "OSError") == (await later.acquire(as_it_is), later.left, later.paused_for)
        assert not later.is_owned
        clock.advance(pause)


async def test_soft_invalidation(here: Process, there: Process, server: Server, clock: ManualClock) -> None:
    """The value is old from then on, of the same age as before; a load that was under way is not stored."""
    await fill_once(here)
    clock.advance(20)
    early = there.lease(margin=60)
    assert "own" == await early.acquire(as_it_is)
    await here.invalidate(is_soft=True)
    lease = here.lease(window=30)

    assert not await fill(early, b"older")
    assert "own" == await lease.acquire(as_it_is)
    assert OldValue(b"soup", b"soup", 20, 0, 30) == lease.old
    assert [Message("s", HERE, OP).pack()] == server.published


# Replicas


@pytest.fixture
def beside(here: Process) -> Process:
    """Return a process whose store has a replica, with nothing in it."""
    here.store.has_replicas = True
    return here


async def test_replica_answers(beside: Process) -> None:
    """A good replica's value is the answer; the primary is not asked."""
    beside.store.replica = AcquireResult("hit", Stored(seal("menus:menu-7", b"soup", THERE), 50))

    assert Found(b"soup", b"soup", 50) == await beside.lease().acquire(as_it_is)
    assert ["read_replica"] == beside.store.asked


@pytest.mark.parametrize(
    "replica",
    [None, OSError("down"), AcquireResult("hit", Stored(b"garbage", 50))],
    ids=["no value", "broken", "garbage"],
)
async def test_replica_that_has_no_answer(replica: Any, beside: Process) -> None:
    """Whatever is wrong with a replica, the primary is asked; only a failure is an error."""
    beside.store.replica = replica

    assert "own" == await beside.lease().acquire(as_it_is)
    assert ["read_replica", "acquire"] == beside.store.asked
    assert int(isinstance(replica, OSError)) == beside.counters.l2_errors
    assert "closed" == beside.tier.access.breaker("Leasing").state


async def test_value_that_will_not_do_as_a_replica_has_it(beside: Process, server: Server) -> None:
    """What a replica has with old marks may be good as the primary has it."""
    await fill(await beside.owned("soups"))
    envelope, _ = server.values[KEY]
    beside.store.replica = AcquireResult("hit", Stored(envelope, 50), marks=(b"not yet new", b"not yet new"))

    assert Found(b"soup", b"soup", 60) == await beside.lease("soups").acquire(as_it_is)


async def test_dead_replicas_are_not_asked_again_and_again(beside: Process) -> None:
    """Replicas have a breaker of their own."""
    beside.store.replica = OSError("down")
    for _ in range(4):
        await beside.lease().acquire(as_it_is)

    assert (3, 4) == tuple(beside.store.asked.count(what) for what in ("read_replica", "acquire"))


@pytest.mark.parametrize("what", ["op", "tag", "everything"])
async def test_replica_is_not_asked_for_what_was_invalidated_lately(what: str, beside: Process, server: Server) -> None:
    """For some seconds a replica may not have heard of an invalidation."""
    await (beside.invalidate() if what == "op" else beside.invalidate_tag("soups" if what == "tag" else ""))
    beside.store.asked.clear()
    await beside.lease("soups").acquire(as_it_is)
    server.clock.advance(5)
    await beside.lease("soups").acquire(as_it_is)

    assert ["acquire", "read_replica", "acquire"] == beside.store.asked


async def test_replica_is_not_asked_for_what_was_confirmed_lately(beside: Process, server: Server) -> None:
    """The store confirms an invalidation long after the request: a replica may lag behind the confirmation."""
    beside.store.error = OSError("down")
    assert not await beside.invalidate()
    server.clock.advance(5)
    beside.store.error = None
    await beside.tier.repeat_invalidations()
    beside.store.asked.clear()
    await beside.lease().acquire(as_it_is)

    assert ["acquire"] == beside.store.asked


async def test_replica_is_not_asked_for_what_was_stored_lately(beside: Process, server: Server) -> None:
    """For some seconds a replica may have the value that a fill has replaced; another process's is as good as ever."""
    lease = beside.lease()
    await lease.take_over()
    await fill(lease, b"new")
    beside.store.replica = AcquireResult("hit", Stored(seal("menus:menu-7", b"old", THERE), 50))
    at_once = await beside.lease().acquire(as_it_is)
    server.clock.advance(5)

    assert (Found(b"new", b"new", 60), Found(b"old", b"old", 50)) == (at_once, await beside.lease().acquire(as_it_is))


async def test_without_replicas_fills_are_not_noted(here: Process) -> None:
    """Where there are no replicas, nothing is remembered of what was stored."""
    await fill(await here.owned())

    assert not here.tier.recent.has_any((KEY,))
