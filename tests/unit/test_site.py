import asyncio
import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest

from stampede_guard._memory import Memory
from stampede_guard._site import Site, Sites
from stampede_guard.stores._tier import Tier
from stampede_guard.testing import FaultStore, Gate, ManualClock

MakeLoop = Callable[[], asyncio.AbstractEventLoop]


def site_of(loop: asyncio.AbstractEventLoop, tier: Tier | None = None) -> Site:
    """Return a site for *loop*."""
    return Site(loop, Memory(10, ManualClock()), tier)


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
    one = len(site.memory), len(site.board._flights)
    site.forget_all()
    everything = len(site.memory), len(site.board._flights)
    gate.open()
    await asyncio.gather(*calls)

    assert ((2, 2), (0, 0)) == (one, everything)


async def test_delete_without_a_tier() -> None:
    """Where there is no store there is nothing to delete."""
    assert site_of(asyncio.get_running_loop()).delete("a") is None


async def test_delete_goes_on_in_a_flight_of_its_own() -> None:
    """The flight of a delete joins nobody's, and ends with the store's confirmation."""
    clock = ManualClock()
    store = FaultStore(clock)
    site = site_of(asyncio.get_running_loop(), Tier(store, "menus", 1_000, clock))

    flight = site.delete("a")

    assert flight is not None
    assert {} == site.board._flights
    assert await flight.wait()
