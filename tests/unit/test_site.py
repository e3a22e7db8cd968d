import asyncio
import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest

from stampede_guard._epochs import Epochs
from stampede_guard._limiter import Limits
from stampede_guard._memory import Memory
from stampede_guard._scoreboard import Flight
from stampede_guard._site import Site, Sites
from stampede_guard._stats import Counters
from stampede_guard.stores import Touched
from stampede_guard.stores._tier import Tier
from stampede_guard.testing import FaultStore, Gate, ManualClock

MakeLoop = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture
def tier() -> Tier:
    """Return a tier over an empty store."""
    return Tier(FaultStore(clock := ManualClock()), "menus", 1_000, clock)


def site_of(loop: asyncio.AbstractEventLoop, tier: Tier | None = None) -> Site:
    """Return a site for *loop*."""
    return Site(loop, Memory(10, ManualClock()), tier, Epochs(), Limits())


def opened(sites: Sites, loop: asyncio.AbstractEventLoop) -> Site:
    """Return a site that *loop* has in *sites*."""
    site = site_of(loop)
    run(loop, lambda: sites.add(site))
    return site


def run(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> Any:
    """Return what *function* returns inside *loop*."""

    async def call() -> Any:
        return function()

    return loop.run_until_complete(call())


def test_each_loop_finds_its_own_site(make_loop: MakeLoop) -> None:
    """A loop finds what was added in it, however often loops take turns."""
    sites, loops = Sites(), [make_loop() for _ in range(3)]
    own = [opened(sites, loop) for loop in loops[:2]]

    found = [run(loop, sites.here) for loop in loops * 2]

    assert [*own, None] * 2 == found


def test_outside_of_a_loop() -> None:
    """Without a running loop there is no site to ask for."""
    with pytest.raises(RuntimeError, match="no running event loop"):
        Sites().here()


def test_removed_site_is_not_found(make_loop: MakeLoop) -> None:
    """A site that was removed is gone; a second time there is nothing to remove."""
    sites, loop = Sites(), make_loop()
    site = opened(sites, loop)

    removed = [run(loop, lambda: sites.remove(site)) for _ in range(2)]

    assert [True, False] == removed
    assert run(loop, sites.here) is None


def test_newer_site_is_not_removed(make_loop: MakeLoop) -> None:
    """Who closes an old site late does not take the new one away."""
    sites, loop = Sites(), make_loop()
    old, new = opened(sites, loop), opened(sites, loop)

    assert not run(loop, lambda: sites.remove(old))
    assert new is run(loop, sites.here)


def test_changes_reach_every_loop(make_loop: MakeLoop) -> None:
    """A change is made here at once, and elsewhere in the other loop's next iteration."""
    sites, here, there = Sites(), make_loop(), make_loop()
    ours, theirs = opened(sites, here), opened(sites, there)
    changed: list[Site] = []

    def tell() -> list[Site]:
        sites.tell(changed.append)
        return [*changed]

    at_once = run(here, tell)
    run(there, lambda: None)

    assert ([ours], [ours, theirs]) == (at_once, changed)


def test_changes_from_outside_of_a_loop(make_loop: MakeLoop) -> None:
    """Where no loop is running every site is elsewhere."""
    sites, loop = Sites(), make_loop()
    changed: list[Site] = []
    site = opened(sites, loop)

    sites.tell(changed.append)
    at_once = [*changed]
    run(loop, lambda: None)

    assert ([], [site]) == (at_once, changed)


def test_closed_loops_are_passed_over(make_loop: MakeLoop) -> None:
    """A loop that was closed is told nothing."""
    sites, loop = Sites(), make_loop()
    changed: list[Site] = []
    opened(sites, loop)
    loop.close()

    sites.tell(changed.append)

    assert [] == changed


def test_loop_that_closes_just_then(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is closed between the look and the word, by its own thread, is passed over too."""
    sites, loop = Sites(), make_loop()
    changed: list[Site] = []
    opened(sites, loop)
    loop.close()
    monkeypatch.setattr(loop, "is_closed", lambda: False)
    sites.tell(changed.append)
    monkeypatch.undo()

    assert [] == changed


def test_site_that_was_removed_meanwhile_is_not_changed(make_loop: MakeLoop) -> None:
    """A change that arrives when its site is gone is dropped, and not made to the site that came after."""
    sites, loop = Sites(), make_loop()
    changed: list[Site] = []
    site = opened(sites, loop)
    loop.call_soon(sites.remove, site)
    sites.tell(changed.append)

    run(loop, lambda: None)

    assert [] == changed


def test_site_does_not_keep_its_loop(make_loop: MakeLoop) -> None:
    """When a loop is forgotten, sites do not hold it."""
    sites, loop = Sites(), asyncio.new_event_loop()
    opened(sites, loop)
    loop.close()
    forgotten = ref(loop)
    del loop
    gc.collect()

    assert forgotten() is None
    assert [] == list(sites._sites)


async def test_forget() -> None:
    """`forget` drops one op from memory and board, `forget_all` everything."""
    site, gate = site_of(asyncio.get_running_loop()), Gate()
    for op in "abc":
        site.memory.put(op, "soup", 60)
    calls = [asyncio.create_task(site.board.debounce(op, gate.passage)) for op in "abc"]
    await gate.arrivals(3)

    site.forget("a")
    one = len(site.memory), len(site.board.flights)
    site.forget_all()
    everything = len(site.memory), len(site.board.flights)
    gate.open()
    await asyncio.gather(*calls)

    assert ((2, 2), (0, 0)) == (one, everything)


async def test_invalidation_without_a_tier(tier: Tier) -> None:
    """Where there is no store there is nobody to tell."""
    assert site_of(asyncio.get_running_loop()).send(tier.invalidation("a")) is None


async def test_invalidation_goes_on_in_a_flight_of_its_own(tier: Tier) -> None:
    """The flight of an invalidation joins nobody's, and ends with the store's confirmation."""
    site = site_of(asyncio.get_running_loop(), tier)
    announced = tier.invalidation("a")
    tier.announce(announced)

    flight = site.send(announced)

    assert flight is not None
    assert {} == site.board.flights
    assert await flight.wait()


# What is heard of other processes


class Menu:
    """A site with two ops in memory and on their way, of which the first has a tag."""

    def __init__(self) -> None:
        self.epochs = Epochs()
        self.memory = Memory(10, clock := ManualClock())
        self.clock = clock
        self.site = Site(asyncio.get_running_loop(), self.memory, None, self.epochs, Limits())
        self.gate = Gate()
        self.flights = [self._launch("a", ("soups",)), self._launch("b", ())]
        self.before = self.taken()

    def _launch(self, op: str, tags: tuple[str, ...]) -> Flight[None]:
        self.memory.put(op, "soup", 60, tags)
        return self.site.board.launch(op, lambda _: self.gate.passage(), Counters(), "finish", tags=tags)

    def taken(self) -> list[tuple[int, ...]]:
        """Return the epochs as their flights take them."""
        return [self.epochs.of("a", ("soups",)), self.epochs.of("b")]

    async def left(self) -> tuple[str, str, list[bool]]:
        """Return which ops are remembered, which have a flight to join, and which of the flights may store."""
        may_store = [now == before for now, before in zip(self.taken(), self.before, strict=True)]
        remembered = "".join(op for op in "ab" if self.memory.get(op) is not None)
        joinable = "".join(self.site.board.flights)
        self.gate.open()
        for flight in self.flights:
            await flight.wait()
        return remembered, joinable, may_store


async def test_forget_tagged() -> None:
    """`forget_tagged` drops what has the tag from memory and board."""
    menu = Menu()

    menu.site.forget_tagged("soups")

    assert ("b", "b", [True, True]) == await menu.left()


@pytest.mark.parametrize(
    ("hear", "left"),
    [
        (lambda site: site.hear_invalidated("b"), ("a", "a", [True, False])),
        (lambda site: site.hear_invalidated("c"), ("ab", "ab", [True, True])),
        (lambda site: site.hear_tag_invalidated("soups"), ("b", "b", [False, True])),
        (lambda site: site.hear_tag_invalidated("salads"), ("ab", "ab", [True, True])),
        (lambda site: site.hear_cleared(), ("", "", [False, False])),
        (lambda site: site.hear_sound(1_003.0), ("ab", "ab", [True, True])),
        (lambda site: site.hear_nothing(), ("", "", [False, False])),
    ],
    ids=["op", "unknown op", "tag", "unknown tag", "everything", "a sound", "nothing"],
)
async def test_what_is_heard(hear: Callable[[Site], None], left: tuple[str, str, list[bool]]) -> None:
    """What was invalidated elsewhere is dropped here, joined no more, and what loads it may not be remembered."""
    menu = Menu()

    hear(menu.site)

    assert left == await menu.left()


async def test_what_the_server_saw_is_nothing_without_tracking() -> None:
    """A site that tracks nothing does not mind which keys changed."""
    menu = Menu()

    menu.site.hear_touched(Touched(None))

    assert ("ab", "ab", [True, True]) == await menu.left()


async def test_silence_that_nobody_noticed() -> None:
    """When memory finds that the bus was silent for too long, loads under way may be neither remembered nor joined."""
    menu = Menu()
    menu.site.hear_sound(1_003.0)

    menu.clock.advance(3)
    menu.memory.get("a")

    assert ("", "", [False, False]) == await menu.left()


async def test_silence_that_a_join_notices() -> None:
    """A caller who would join a load finds out that the trust is over, though memory was not asked for anything."""
    menu = Menu()
    menu.memory.clear()
    menu.site.hear_sound(1_003.0)
    before = menu.site.joinable("a") is menu.flights[0]

    menu.clock.advance(3)
    after = menu.site.joinable("a")

    assert (True, None) == (before, after)
    assert ("", "", [False, False]) == await menu.left()


async def test_load_without_trust_is_joined_for_a_while() -> None:
    """A load whose overtaking no message would tell of is joined for as long as its value would be kept."""
    menu = Menu()
    menu.flights[0].joinable_until = menu.clock() + 1

    menu.clock.advance(0.999)
    before = menu.site.joinable("a") is menu.flights[0]
    menu.clock.advance(0.001)
    after = menu.site.joinable("a")

    assert (True, None) == (before, after)
    assert ("ab", "b", [True, True]) == await menu.left()
