import asyncio
import gc
from weakref import ref

import pytest
from inside import untyped
from leasing import LeasingDouble, Server
from waiting import eventually

from stampede_guard._l2 import sender as sender_module
from stampede_guard._l2.sender import Confirmation
from stampede_guard._l2.tier import Tier
from stampede_guard.errors import invalidation_pending
from stampede_guard.stores import Refused, StoreOverloaded
from stampede_guard.testing import FaultStore, Gate, ManualClock


class Fleet:
    """A tier, and the store that it sends to."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = LeasingDouble(Server(self.clock))
        self.tier = Tier(self.store, "menus", 100, self.clock, "h" * 22)

    def send(self, *ops: str) -> list[Confirmation]:
        """Invalidate *ops*, all at once."""
        return [self.tier.send(self.tier.invalidation(op)) for op in ops]

    async def outcome(self, *ops: str) -> list[bool]:
        """Return which of *ops* were confirmed."""
        return [await confirmation.wait() for confirmation in self.send(*ops)]


@pytest.fixture
def fleet() -> Fleet:
    """Return a tier over a store with leases."""
    return Fleet()


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one invalidation be under way at a time."""
    monkeypatch.setattr(sender_module, "_MAX_WORKERS", 1)


@pytest.mark.usefixtures("narrow")
async def test_line_is_no_failure(fleet: Fleet) -> None:
    """However many wait, each is sent when it is its turn, and confirmed."""
    assert [True] * 50 == await fleet.outcome(*map(str, range(50)))
    assert fleet.tier.pending.is_empty
    assert ["invalidate"] * 50 == fleet.store.asked


@pytest.mark.usefixtures("narrow")
async def test_equal_ones_share_a_place(fleet: Fleet) -> None:
    """What is invalidated again while it waits in line is sent once; what is under way already is sent again."""
    gate = fleet.store.gate = Gate()
    sent = fleet.send("a")
    await gate.arrivals(1)
    sent += fleet.send("a", "b", "a", "b")
    gate.open()

    assert [True] * 5 == [await each.wait() for each in sent]
    assert ["invalidate"] * 3 == fleet.store.asked


@pytest.mark.usefixtures("narrow")
async def test_sent_when_the_last_worker_has_just_ended(fleet: Fleet) -> None:
    """What comes after a worker's last look at the line, and before it is gone, is sent all the same."""
    late: list[Confirmation] = []
    (first,) = fleet.send("a")
    first._outcome.add_done_callback(lambda _: late.extend(fleet.send("b")))

    assert await first.wait()
    await eventually(lambda: late)
    assert await late[0].wait()


async def test_one_tries_for_all_while_the_node_is_down(fleet: Fleet) -> None:
    """When a node does not answer, one invalidation tries it again, and the others share its outcome, good or bad."""
    fleet.store.error = OSError("down")
    await fleet.outcome(*"abc")  # the third failure opens the breaker
    fleet.store.asked.clear()

    down = await fleet.outcome(*"defgh")
    asked_while_down = [*fleet.store.asked]
    fleet.store.error = None
    back = await fleet.outcome(*"defgh")

    assert ([False] * 5, ["invalidate"]) == (down, asked_while_down)
    assert [True] * 5 == back


@pytest.mark.parametrize("is_back", [False, True])
async def test_those_who_wait_for_the_one_that_tries(fleet: Fleet, *, is_back: bool) -> None:
    """While one tries whether the node is back, the others wait; if it is, they are sent after that."""
    fleet.store.error = OSError("down")
    await fleet.outcome(*"abc")
    fleet.store.asked.clear()
    gate = fleet.store.gate = Gate()
    sent = fleet.send(*"defgh")
    await gate.arrivals(1)
    if is_back:
        fleet.store.error = None
    gate.open()

    assert [is_back] * 5 == [await each.wait() for each in sent]
    assert ["invalidate"] * (5 if is_back else 1) == fleet.store.asked


def test_loop_closed_with_invalidations_under_way() -> None:
    """An event loop that is closed while it sends leaves nothing behind that complains."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)

    async def begin() -> None:
        fleet = Fleet()
        gate = fleet.store.gate = Gate()
        waiting = asyncio.create_task(fleet.send("a", "b")[0].wait())
        await gate.arrivals(2)
        assert not waiting.done()

    loop.run_until_complete(begin())
    loop.close()
    forgotten = ref(loop)
    del loop
    gc.collect()

    assert forgotten() is None


@pytest.mark.usefixtures("narrow")
async def test_line_leaves_when_the_node_is_down(fleet: Fleet) -> None:
    """Once a node is known to be down, the line for it is left to be repeated at once; another node's is not."""
    nodes = {fleet.tier.key(op): op in "xy" and "healthy" for op in "abcdefghxy"}
    untyped(fleet.store).node_of = lambda key: nodes.get(key) or "dead"
    invalidate = fleet.store.invalidate

    async def answer(key: str, version: int | None, message: bytes, *, is_soft: bool = False) -> None:
        fleet.store.error = None if nodes[key] else OSError("down")
        await invalidate(key, version, message)

    fleet.store.invalidate = answer

    assert [False] * 8 + [True] * 2 == await fleet.outcome(*"abcdefghxy")
    assert ["invalidate"] * (3 + 1 + 2) == fleet.store.asked


async def test_refusal_concerns_itself_alone(fleet: Fleet) -> None:
    """A node that says no to one may say yes to the next: nothing in the line is given up for that."""
    fleet.store.error = OSError("down")
    await fleet.outcome(*"abc")
    fleet.store.error = Refused("MISCONF")
    refused = await fleet.outcome("d")
    fleet.store.error = None

    assert [False] == refused
    assert [True] == await fleet.outcome("d")


@pytest.mark.parametrize("is_down", [False, True])
async def test_crowd_is_waited_out(fleet: Fleet, *, is_down: bool) -> None:
    """One that found no room for too long waits again, unless the node is found to be down meanwhile."""
    invalidate = fleet.store.invalidate
    times = 0

    async def crowded(key: str, version: int | None, message: bytes, *, is_soft: bool = False) -> None:
        nonlocal times
        times += 1
        if is_down:
            fleet.tier.access.breaker(fleet.store.node_of(key)).trip("TimeoutError")
        if times < 3:
            raise StoreOverloaded
        await invalidate(key, version, message)

    fleet.store.invalidate = crowded

    assert [not is_down] == await fleet.outcome("a")
    assert (1 if is_down else 3) == times


async def test_cancelled_worker_leaves_its_line(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of an event loop nothing waits for what will not be sent; as long as a worker is left, it is."""
    monkeypatch.setattr(sender_module, "_MAX_WORKERS", 2)
    gate = fleet.store.gate = Gate()
    sent = fleet.send(*"abcd")
    await gate.arrivals(2)
    first, second = sorted(fleet.tier.upkeep, key=id)

    first.cancel()
    await asyncio.wait([first])
    left = [each._outcome.done() for each in sent]
    second.cancel()

    assert 1 == sum(left)
    assert [False] * 4 == [await each.wait() for each in sent]
    assert 4 == len(fleet.tier.pending.all())


async def test_closing_waits_for_what_is_under_way(fleet: Fleet) -> None:
    """A tier that is closed sends what waits in line first."""
    sent = fleet.send(*"abc")

    await fleet.tier.aclose()

    assert [True] * 3 == [each._outcome.result() for each in sent]


async def test_everything_of_a_plain_store() -> None:
    """A store that cannot forget everything is not read as long as it may hold something old."""
    tier = Tier(FaultStore(clock := ManualClock()), "menus", 100, clock)

    assert await tier.send(tier.tag_invalidation("")).wait()
    assert clock() == tier.pending.lost_at


@pytest.mark.parametrize(
    ("pending", "total", "begins"),
    [
        (["a"], 1, "a: not confirmed by the store"),
        (["a", "b"], 5, "2 of 5 invalidations, a, b: not confirmed"),
        (
            [f"menu-{number}" for number in range(8_224)],
            20_000,
            "8,224 of 20,000 invalidations, among them menu-0, menu",
        ),
        (["x" * 1_000], 1, "x" * 200 + "…: not confirmed"),
    ],
)
def test_what_the_error_says(pending: list[str], total: int, begins: str) -> None:
    """The message names a few of many, and their number; all of them are an attribute."""
    error = invalidation_pending(pending, total)

    assert str(error).startswith(begins)
    assert len(str(error)) < 1_000
    assert tuple(pending) == error.pending
