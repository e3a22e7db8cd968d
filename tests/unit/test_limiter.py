import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from functools import partial
from typing import Any

import pytest

from stampede_guard import LoadTimeout, Scoreboard
from stampede_guard._flights.flight import Flight
from stampede_guard._flights.limiter import Limiter, Limiters
from stampede_guard._flights.waiting import skip_queue, wait_one
from stampede_guard._operations.options import OnAbandon
from stampede_guard._stats import Counters
from stampede_guard.testing import Gate

Pause = Callable[[], Awaitable[None]]
MakeLoop = Callable[[], asyncio.AbstractEventLoop]
Load = Callable[[], Awaitable[Any]]


class Kitchen:
    """A scoreboard whose loads need slots, as a guard's do."""

    def __init__(self, max_loads: int | None = 1) -> None:
        self.limits = Limiters(max_loads)
        self.board = Scoreboard()
        self.began: list[str] = []  # loads, in the order in which they began

    async def ask(
        self,
        op: str,
        load: Load,
        *,
        limiter: Limiter | None = None,
        on_abandon: OnAbandon = "finish",
        load_timeout: float | None = None,
    ) -> Any:
        """Return what *load* returns; limited by *limiter*, or else by the kitchen's own."""
        flight = self.board.current(op)
        if flight is None:
            run = partial(self._run, limiter or self.limits.of("", None), load, load_timeout)
            flight = self.board.launch(op, run, Counters(), on_abandon)
        return await wait_one(flight)

    async def _run(self, limiter: Limiter | None, load: Load, load_timeout: float | None, flight: Flight[Any]) -> Any:
        flight.start_clock(load_timeout)
        if limiter is None:
            self.began.append(flight.op)
            return await load()
        async with limiter.slot(flight):
            self.began.append(flight.op)
            return await load()

    def start(self, op: str, load: Load, **options: Any) -> asyncio.Task[Any]:
        """Ask in a task of its own."""
        return asyncio.create_task(self.ask(op, load, **options))

    def is_idle(self) -> bool:
        """Whether all slots are free, nobody queues, and nothing is up."""
        return f"{self.limits.of('', None)!r} {self.board!r}".startswith("<Limiter 0 of ") and not self.board.up


async def soup() -> str:
    """Load at once."""
    return "soup"


def gated(gate: Gate) -> Load:
    """Return a load that ends when *gate* is opened."""

    async def load() -> str:
        await gate.passage()
        return "soup"

    return load


async def test_no_more_loads_than_slots_run_at_once(pause: Pause) -> None:
    """The third load of two slots begins when one of the first has ended."""
    kitchen, gates = Kitchen(2), [Gate() for _ in range(3)]

    calls = [kitchen.start(op, gated(gate)) for op, gate in zip("abc", gates, strict=True)]
    await pause()
    before = list(kitchen.began)
    gates[1].open()
    await gates[2].arrivals(1)
    after = list(kitchen.began)
    for gate in gates:
        gate.open()

    assert ["soup"] * 3 == await asyncio.gather(*calls)
    assert (["a", "b"], ["a", "b", "c"]) == (before, after)
    assert kitchen.is_idle()


async def test_first_come_first_served(pause: Pause) -> None:
    """Loads get their slots in the order in which they queued, newcomers behind them."""
    kitchen, gate = Kitchen(1), Gate()

    calls = [kitchen.start(op, gated(gate)) for op in "abcd"]
    await pause()
    gate.open()
    calls += [kitchen.start(op, soup) for op in "ef"]
    await asyncio.gather(*calls)

    assert list("abcdef") == kitchen.began


async def test_newcomer_does_not_overtake_the_one_who_was_handed_the_slot() -> None:
    """A slot that is handed over in this tick is not free for whoever asks in the same tick."""
    kitchen, gate = Kitchen(1), Gate()

    async def load() -> str:
        await gate.passage()
        calls.append(Context().run(kitchen.start, "newcomer", soup))  # from nobody's load
        return "soup"

    calls = [kitchen.start("a", load), kitchen.start("b", soup)]
    await gate.arrivals(1)
    gate.open()
    await calls[0]
    await asyncio.gather(*calls)

    assert ["a", "b", "newcomer"] == kitchen.began


async def test_waiters_take_no_slots() -> None:
    """A hundred callers of one op need one slot: the second op's load runs beside it."""
    kitchen, gate = Kitchen(2), Gate()

    calls = [kitchen.start("a", gated(gate)) for _ in range(100)]
    calls.append(kitchen.start("b", gated(gate)))
    await gate.arrivals(2)
    gate.open()
    await asyncio.gather(*calls)

    assert ["a", "b"] == kitchen.began


async def test_failed_load_gives_its_slot_back() -> None:
    """An error of the loader frees the slot like an answer."""
    kitchen = Kitchen(1)

    async def load() -> None:
        raise ConnectionError

    for op in "ab":
        with pytest.raises(ConnectionError):
            await kitchen.ask(op, load)

    assert "soup" == await kitchen.ask("c", soup)
    assert kitchen.is_idle()


async def test_cancelled_load_gives_its_slot_back(pause: Pause) -> None:
    """So does the cancellation of a load that runs: the next in the queue begins."""
    kitchen, gate = Kitchen(1), Gate()

    first = kitchen.start("a", gated(gate), on_abandon="cancel")
    second = kitchen.start("b", soup)
    await gate.arrivals(1)
    first.cancel()

    assert "soup" == await second
    await pause()
    assert kitchen.is_idle()


async def test_cancelled_in_the_queue(pause: Pause) -> None:
    """A flight that is cancelled while it queues leaves the queue at once, and never loads."""
    kitchen, gate = Kitchen(1), Gate()

    calls = [kitchen.start("a", gated(gate))]
    calls += [kitchen.start(op, soup, on_abandon="cancel") for op in "bcd"]
    await pause()
    calls[2].cancel()
    await pause()
    queued = repr(kitchen.limits.of("", None))
    gate.open()
    answers = await asyncio.gather(*calls, return_exceptions=True)

    assert "<Limiter 1 of 1 taken, 2 queued>" == queued
    assert ["soup", "soup", "CancelledError", "soup"] == [
        answer if isinstance(answer, str) else type(answer).__name__ for answer in answers
    ]
    assert ["a", "b", "d"] == kitchen.began
    assert kitchen.is_idle()


@pytest.mark.parametrize("cancels_first", [True, False])
async def test_cancelled_in_the_tick_in_which_the_slot_comes(cancels_first: bool, pause: Pause) -> None:
    """Whichever comes first, the slot goes on to the next in the queue."""
    kitchen, gate = Kitchen(1), Gate()
    queued: list[Flight[Any]] = []

    def abort() -> None:
        queued[0].abort(RuntimeError("nobody wants it"))

    async def load() -> str:
        await gate.passage()
        if cancels_first:
            abort()
        else:  # after this task's end, before what that wakes
            asyncio.get_running_loop().call_soon(abort)
        return "soup"

    calls = [kitchen.start("a", load), kitchen.start("b", soup), kitchen.start("c", soup)]
    await pause()
    flight = kitchen.board.current("b")
    assert flight is not None
    queued.append(flight)
    gate.open()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    await pause()

    assert ["soup", "RuntimeError", "soup"] == [
        answer if isinstance(answer, str) else type(answer).__name__ for answer in answers
    ]
    assert ["a", "c"] == kitchen.began
    assert kitchen.is_idle()


async def test_time_in_the_queue_counts(pause: Pause) -> None:
    """`load_timeout` ends a flight that still queues, and that takes no slot with it."""
    kitchen, gate = Kitchen(1), Gate()

    first = kitchen.start("a", gated(gate))
    await gate.arrivals(1)
    with pytest.raises(LoadTimeout):
        await kitchen.ask("b", soup, load_timeout=0.001)
    gate.open()

    assert ("soup", ["a"]) == (await first, kitchen.began)
    await pause()
    assert kitchen.is_idle()


# Loads within loads


async def test_load_within_a_load_needs_no_slot() -> None:
    """One slot is enough for a tree of loads of any depth."""
    kitchen = Kitchen(1)

    async def branch(depth: int, name: str) -> int:
        if not depth:
            return 1
        parts = (kitchen.ask(name + side, partial(branch, depth - 1, name + side)) for side in ("l", "r"))
        return sum(await asyncio.gather(*parts))

    assert 16 == await kitchen.ask("tree", partial(branch, 4, ""))
    assert kitchen.is_idle()


async def test_load_within_a_load_needs_no_slot_of_another_limiter() -> None:
    """Two operations whose loads launch each other's cannot wait for each other's slots."""
    kitchen, gate = Kitchen(None), Gate()
    menus, dishes = kitchen.limits.of("menus", 1), kitchen.limits.of("dishes", 1)

    async def load(part: str, limiter: Limiter | None) -> Any:
        await gate.passage()
        return await kitchen.ask(part, soup, limiter=limiter)

    calls = [
        kitchen.start("menu", partial(load, "dish of menu", dishes), limiter=menus),
        kitchen.start("dish", partial(load, "menu of dish", menus), limiter=dishes),
    ]
    await gate.arrivals(2)
    gate.open()

    assert ["soup", "soup"] == await asyncio.gather(*calls)


async def test_launched_within_a_load_and_not_waited_for() -> None:
    """Nor does it need one when the load learns of its end otherwise than by waiting for the flight."""
    kitchen, ended = Kitchen(1), asyncio.Event()

    async def part() -> None:
        ended.set()

    async def load() -> str:
        run = partial(kitchen._run, kitchen.limits.of("", None), part, None)
        kitchen.board.launch("part", run, Counters(), "finish")
        await ended.wait()
        return "soup"

    assert "soup" == await kitchen.ask("whole", load, load_timeout=20)


async def test_joined_flight_leaves_the_queue() -> None:
    """A load that holds the only slot may join a flight that queues for it."""
    kitchen, gate = Kitchen(1), Gate()

    async def load() -> Any:
        await gate.passage()
        return await kitchen.ask("part", soup)

    calls = [kitchen.start("whole", load), kitchen.start("before", soup), kitchen.start("part", soup)]
    await gate.arrivals(1)
    gate.open()

    assert ["soup"] * 3 == await asyncio.gather(*calls)
    assert ["whole", "part", "before"] == kitchen.began
    assert kitchen.is_idle()


async def test_joined_flight_that_has_not_come_to_the_queue_never_queues(pause: Pause) -> None:
    """A flight that was joined while it still asked the store runs without a slot."""
    kitchen, gate, store = Kitchen(1), Gate(), Gate()

    async def read_first(flight: Flight[Any]) -> Any:
        await store.passage()
        return await kitchen._run(kitchen.limits.of("", None), soup, None, flight)

    async def load() -> Any:
        await gate.passage()
        return await kitchen.ask("part", soup)

    part = kitchen.board.launch("part", read_first, Counters(), "finish")
    whole = kitchen.start("whole", load)
    await gate.arrivals(1)
    gate.open()
    await pause()
    store.open()

    assert ["soup", "soup"] == [await wait_one(part), await whole]
    assert kitchen.is_idle()


async def test_chain_to_the_queue(pause: Pause) -> None:
    """A load with a slot joins one without that already waits for one in the queue: that one is let out."""
    kitchen, whole, middle = Kitchen(1), Gate(), Gate()
    unlimited = Kitchen(None)

    async def load_whole() -> Any:
        await whole.passage()
        return await unlimited.ask("middle", soup)

    async def load_middle() -> Any:
        await middle.passage()
        return await kitchen.ask("part", soup)

    calls = [kitchen.start("whole", load_whole), unlimited.start("middle", load_middle), kitchen.start("part", soup)]
    await whole.arrivals(1)
    middle.open()
    await pause()  # now the middle waits for the part, which queues
    still_queued = list(kitchen.began)
    whole.open()

    assert ["soup"] * 3 == await asyncio.gather(*calls)
    assert (["whole"], ["whole", "part"]) == (still_queued, kitchen.began)


async def test_flight_let_out_of_the_queue_launches_and_joins(pause: Pause) -> None:
    """What was let out queues for nothing, nor does what it launches or joins."""
    kitchen, gate = Kitchen(1), Gate()

    async def load_whole() -> Any:
        await gate.passage()
        return await kitchen.ask("part", soup)

    async def load_part() -> Any:
        return [await kitchen.ask("launched", soup), await kitchen.ask("joined", soup)]

    calls = [kitchen.start("whole", load_whole), kitchen.start("part", load_part), kitchen.start("joined", soup)]
    await gate.arrivals(1)
    await pause()
    gate.open()

    assert [["soup", "soup"], ["soup", "soup"], "soup"] == await asyncio.gather(*calls)
    assert ["whole", "part", "launched", "joined"] == kitchen.began
    assert kitchen.is_idle()


async def test_joined_in_the_tick_in_which_the_slot_comes(pause: Pause) -> None:
    """A flight that was handed a slot already keeps it, and gives it back."""
    kitchen, gate = Kitchen(1), Gate()

    async def load() -> str:
        await gate.passage()
        part = kitchen.board.current("part")
        assert part is not None
        asyncio.get_running_loop().call_soon(skip_queue, part)  # after this task's end, before what that wakes
        return "soup"

    calls = [kitchen.start("whole", load), kitchen.start("part", soup)]
    await gate.arrivals(1)
    await pause()
    gate.open()

    assert ["soup", "soup"] == await asyncio.gather(*calls)
    assert kitchen.is_idle()


async def test_let_out_and_cancelled_in_one_tick(pause: Pause) -> None:
    """A flight that was let out had no slot to give back when it is cancelled before it runs."""
    kitchen, gate = Kitchen(1), Gate()

    async def load() -> Any:
        await gate.passage()
        part = kitchen.board.current("part")
        assert part is not None
        skip_queue(part)
        part.abort(RuntimeError("nobody wants it"))
        return "soup"

    calls = [kitchen.start("whole", load), kitchen.start("part", soup)]
    await gate.arrivals(1)
    await pause()
    gate.open()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    await pause()

    assert ["soup", "RuntimeError"] == [
        answer if isinstance(answer, str) else type(answer).__name__ for answer in answers
    ]
    assert "<Limiter 0 of 1 taken, 0 queued>" == repr(kitchen.limits.of("", None))


async def test_aborted_load_may_load_while_it_cleans_up(pause: Pause) -> None:
    """A load that was ended holds its slot until its clean-up is over; what that launches or joins needs none."""
    kitchen, gate = Kitchen(1), Gate()
    cleaned: list[Any] = []

    async def load() -> None:
        try:
            await gate.passage()
        finally:
            cleaned.append([await kitchen.ask("launched", soup), await kitchen.ask("joined", soup)])

    calls = [kitchen.start("a", load, on_abandon="cancel"), kitchen.start("joined", soup)]
    await gate.arrivals(1)
    await pause()
    calls[0].cancel()

    assert "soup" == await calls[1]
    await pause()
    assert [["soup", "soup"]] == cleaned
    assert kitchen.is_idle()


async def test_what_a_load_left_behind_queues(pause: Pause) -> None:
    """A task that outlives the load that started it has no part in its slot."""
    kitchen, later, gate = Kitchen(1), Gate(), Gate()
    started: list[asyncio.Task[Any]] = []

    async def load_later() -> Any:
        await later.passage()
        return await kitchen.ask("later", soup)

    async def load() -> str:
        started.append(asyncio.create_task(load_later()))
        return "soup"

    await kitchen.ask("a", load)
    busy = kitchen.start("b", gated(gate))
    await gate.arrivals(1)
    later.open()
    await pause()
    before = list(kitchen.began)
    gate.open()
    await asyncio.gather(busy, *started)

    assert (["a", "b"], ["a", "b", "later"]) == (before, kitchen.began)


# Two limits


async def test_operation_and_guard_both_limit(pause: Pause) -> None:
    """A load needs a slot of its operation and of the guard; those who queue for the one take none of the other."""
    kitchen, gate = Kitchen(2), Gate()
    menus = kitchen.limits.of("menus", 1)

    calls = [kitchen.start(op, gated(gate), limiter=menus) for op in ("menu 1", "menu 2")]
    calls += [kitchen.start(op, gated(gate)) for op in ("dish 1", "dish 2")]
    await pause()
    before = list(kitchen.began)
    gate.open()
    await asyncio.gather(*calls)

    assert ["menu 1", "dish 1"] == before
    assert {"menu 2", "dish 2"} == set(kitchen.began[2:])
    assert kitchen.is_idle()
    assert "<Limiter 0 of 1 taken, 0 queued>" == repr(menus)


async def test_cancelled_between_the_two(pause: Pause) -> None:
    """Cancelled while it queues for the guard's slot, a flight gives back its operation's."""
    kitchen, gate = Kitchen(1), Gate()
    menus = kitchen.limits.of("menus", 1)

    first = kitchen.start("dish", gated(gate))
    await gate.arrivals(1)
    second = kitchen.start("menu", soup, limiter=menus, on_abandon="cancel")
    await pause()
    held = repr(menus)
    second.cancel()
    await pause()
    gate.open()
    await first

    assert ("<Limiter 1 of 1 taken, 0 queued>", "<Limiter 0 of 1 taken, 0 queued>") == (held, repr(menus))


async def test_let_out_of_the_second_queue_gives_back_the_first(pause: Pause) -> None:
    """A flight that got its operation's slot, and is let out of the guard's queue, gives the one back."""
    kitchen, gate = Kitchen(1), Gate()
    menus = kitchen.limits.of("menus", 1)

    async def load() -> Any:
        await gate.passage()
        return await kitchen.ask("menu", soup)

    calls = [kitchen.start("whole", load), kitchen.start("menu", soup, limiter=menus)]
    await gate.arrivals(1)
    await pause()
    gate.open()

    assert ["soup", "soup"] == await asyncio.gather(*calls)
    assert "<Limiter 0 of 1 taken, 0 queued>" == repr(menus)
    assert kitchen.is_idle()


async def test_no_limit_is_no_limiter() -> None:
    """Where nothing limits a load there is nothing to enter; the limiter of a name and number is the same one."""
    limits, limited = Limiters(), Limiters(3)
    in_use = limits.of("menus", 2)

    assert limits.of("menus", None) is None
    assert limited.of("menus", None) is limited.of("hours", None)
    assert limits.of("menus", 2) is in_use
    assert limits.of("menus", 3) is not in_use
    assert limits.of("hours", 2) is not in_use


async def test_idle_limiter_takes_no_room() -> None:
    """A limiter that no load has a slot of, or queues for, is not kept: names may be made of values."""
    limits = Limiters(3)
    for number in range(100):
        limits.of(f"menus-{number}", 2)

    assert not limits._named


async def test_many_who_leave_the_queue_cost_little(pause: Pause) -> None:
    """Thousands of cancelled flights leave nothing in the queue, and take the loop no time worth telling."""
    kitchen, gate = Kitchen(1), Gate()
    number = 5_000

    first = kitchen.start("first", gated(gate))
    await gate.arrivals(1)
    calls = [kitchen.start(f"op {each}", soup, on_abandon="cancel") for each in range(number)]
    await pause()
    before = repr(kitchen.limits.of("", None))
    for call in calls:
        call.cancel()
    await pause()
    after = repr(kitchen.limits.of("", None))
    gate.open()
    await first

    assert (f"<Limiter 1 of 1 taken, {number} queued>", "<Limiter 1 of 1 taken, 0 queued>") == (before, after)
