"""A limit that follows what a backend can bear."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stampede_guard import AdaptiveLimit, ConfigurationError, Guard
from stampede_guard._flights.learnt import LearntLimit
from stampede_guard._flights.limiter import _MOST_ADAPTIVE, Limiters
from stampede_guard.testing import Gate

Pause = Callable[[], Awaitable[None]]


class Backend:
    """A backend that runs so many loads at a time, and is asked for as many as the limit allows."""

    def __init__(self, limit: LearntLimit, capacity: int) -> None:
        self.limit = limit
        self.capacity = capacity
        self.load_time = 0.01

    def run(self, loads: int, running: int | None = None) -> int:
        """Run so many loads, *running* of them at a time; return the limit after that."""
        for _ in range(loads):
            together = self.limit.slots if running is None else running
            self.limit.note(self.load_time * max(1, together / self.capacity), together, has_failed=False)
        return self.limit.slots


def test_begins_at_its_lower_end_and_doubles() -> None:
    """Until loads take longer, the limit doubles with each window of loads."""
    backend = Backend(LearntLimit(AdaptiveLimit(64, min=2)), capacity=1_000)

    assert [2, 4, 8, 16, 32, 64, 64] == [
        backend.limit.slots,
        *(backend.run(max(10, backend.limit.slots)) for _ in range(6)),
    ]


def test_settles_near_the_capacity() -> None:
    """Loads may take twice as long as alone, and no longer: about twice the capacity is in the backend."""
    backend = Backend(LearntLimit(AdaptiveLimit(64)), capacity=8)
    settled = backend.run(3_000)

    assert 8 <= settled <= 18
    assert {*range(8, 19)} >= {backend.run(10) for _ in range(50)}


def test_follows_the_capacity_down_and_up() -> None:
    """When the backend bears a quarter, so does the limit, and it comes back."""
    backend = Backend(LearntLimit(AdaptiveLimit(64)), capacity=16)
    before = backend.run(3_000)
    backend.capacity = 4
    fallen = backend.run(200)
    backend.capacity = 16
    after = backend.run(1_000)

    assert 16 <= before <= 34
    assert 4 <= fallen <= 10
    assert 16 <= after <= 34


def test_falls_by_half_at_most_and_stays_within_its_bounds() -> None:
    """A window in which loads hang takes half of the limit; the lower end is kept."""
    limit = LearntLimit(AdaptiveLimit(64, min=3))
    Backend(limit, capacity=1_000).run(500)
    seen = []
    for _ in range(200):
        limit.note(30.0, limit.slots, has_failed=False)
        seen.append(limit.slots)

    assert [64, 32, 16, 8, 4, 3] == list(dict.fromkeys(seen))[:6]


def test_idle_limit_does_not_rise() -> None:
    """Where fewer loads run than may, their times say nothing of more."""
    backend = Backend(LearntLimit(AdaptiveLimit(64, min=4)), capacity=1_000)

    assert 4 == backend.run(100, running=3)


def test_slower_backend_becomes_usual_at_last() -> None:
    """Where each load has become slower for good, the limit rises again, once few have shown it."""
    backend = Backend(LearntLimit(AdaptiveLimit(16)), capacity=1_000)
    backend.run(1_000)
    backend.load_time *= 3
    fallen, risen = min(backend.run(1) for _ in range(100)), backend.run(500)

    assert (1, 16) == (fallen, risen)


def test_quick_failures_tell_nothing() -> None:
    """A quick error is no sign of a quick backend, before the usual time is known nor after."""
    limit = LearntLimit(AdaptiveLimit(64, min=4))
    for _ in range(100):
        limit.note(0.0001, 4, has_failed=True)
    unknown = repr(limit)
    Backend(limit, capacity=1_000).run(15)
    for _ in range(100):
        limit.note(0.0001, 8, has_failed=True)

    assert ("<LearntLimit 4>", "<LearntLimit 8, usually 0.01 s a load>") == (unknown, repr(limit))


def test_long_failures_count() -> None:
    """A load that was cut off is a sign of a slow backend."""
    limit = LearntLimit(AdaptiveLimit(64))
    Backend(limit, capacity=1_000).run(500)
    for _ in range(64):
        limit.note(30.0, 64, has_failed=True)

    assert 32 == limit.slots


# In a guard


@pytest.mark.parametrize("of_guard", [True, False])
async def test_number_of_slots_is_learnt(of_guard: bool, pause: Pause) -> None:
    """Slots grow with loads that land, and loads that wait get them at once."""
    limit = AdaptiveLimit(4)
    guard = Guard(max_loads=limit if of_guard else None)
    running, most, gate = 0, 0, Gate()

    async def load() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.passage()
        running -= 1
        return "soup"

    calls = [
        asyncio.create_task(guard.fetch(f"menu {each}", load, max_loads=None if of_guard else limit))
        for each in range(100)
    ]
    await pause()
    at_first = running
    gate.open()
    await asyncio.gather(*calls)

    assert 1 == at_first
    assert 1 <= most <= 4
    assert 100 == guard.stats().loads


async def test_what_was_learnt_is_kept() -> None:
    """A limiter that learns outlives its loads; very many are forgotten together: names may be made of values."""
    limits, limit = Limiters(), AdaptiveLimit(4)
    first = limits.of("menus", limit)
    number = id(first)
    del first
    again = id(limits.of("menus", limit))
    for each in range(2 * _MOST_ADAPTIVE):
        limits.of(f"menus {each}", limit)

    assert number == again
    assert len(limits._named) <= _MOST_ADAPTIVE


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max": 0}, r"^max=0: give a whole number above zero$"),
        ({"max": 4, "min": 0}, r"^min=0: give a whole number above zero$"),
        ({"max": 4, "min": 5}, r"^min=5 is larger than max=4: give AdaptiveLimit its ends in order$"),
    ],
)
def test_bounds_are_checked(limits: dict[str, int], message: str) -> None:
    """Both are whole numbers above zero, in order."""
    with pytest.raises(ConfigurationError, match=message):
        AdaptiveLimit(**limits)
