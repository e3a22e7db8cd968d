"""Loads that wait for slots: whose turn it is, and which are refused."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from stampede_guard import ConfigurationError, Guard, InvalidKey, Overloaded, coalesce, coalesce_many
from stampede_guard._flights.lines import Line
from stampede_guard.testing import Gate, ManualClock

Pause = Callable[[], Awaitable[None]]


class Kitchen:
    """Loads of a guard, each of which ends when it is told to; they are called after their operations: "menu 3"."""

    def __init__(self, **options: Any) -> None:
        self.guard = Guard(**options)
        self.began: list[str] = []  # loads, in the order in which they began
        self.calls: dict[str, asyncio.Task[str]] = {}
        self._gates: dict[str, Gate] = {}

    def ask(self, *ops: str, **options: Any) -> None:
        """Let a caller ask for each of *ops*."""
        for op in ops:
            name = op.partition(" ")[0]
            self._gates[op] = Gate()
            self.calls[op] = asyncio.create_task(self.guard.fetch(op, partial(self._load, op), name=name, **options))

    async def _load(self, op: str) -> str:
        self.began.append(op)
        await self._gates[op].passage()
        return op

    async def end(self, *ops: str) -> list[str]:
        """Let these loads end; return those that have begun since."""
        number = len(self.began)
        for op in ops:
            self._gates[op].open()
            await self.calls[op]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return self.began[number:]

    async def close(self) -> None:
        """Let all loads end."""
        for gate in self._gates.values():
            gate.open()
        await asyncio.gather(*self.calls.values(), return_exceptions=True)

    async def error_of(self, op: str) -> str:
        """Return the text of the refusal that the caller of *op* got."""
        with pytest.raises(Overloaded) as refused:
            await self.calls[op]
        return str(refused.value)


def of(name: str, number: int) -> list[str]:
    """Return so many ops of one operation."""
    return [f"{name} {each}" for each in range(number)]


@pytest.fixture
async def kitchens() -> AsyncIterator[Callable[..., Kitchen]]:
    """Return a function that makes a kitchen, in which all loads end with the test."""
    made: list[Kitchen] = []

    def make(**options: Any) -> Kitchen:
        made.append(Kitchen(**options))
        return made[-1]

    yield make
    for kitchen in made:
        await kitchen.close()


MakeKitchen = Callable[..., Kitchen]


# Turns


async def test_operations_take_turns(kitchens: MakeKitchen, pause: Pause) -> None:
    """A thousand queued loads of one operation delay the single load of another by no more than one of them."""
    kitchen = kitchens(max_loads=1)
    kitchen.ask(*of("crowd", 1_000))
    await pause()
    kitchen.ask("lone 0", *of("pair", 2))
    await pause()

    for _ in range(6):
        await kitchen.end(kitchen.began[-1])

    assert ["crowd 0", "lone 0", "pair 0", "crowd 1", "pair 1", "crowd 2", "crowd 3"] == kitchen.began


async def test_operation_with_the_fewest_slots_is_first(kitchens: MakeKitchen, pause: Pause) -> None:
    """Slots are shared evenly, also by loads that end in another order, and not only turns."""
    kitchen = kitchens(max_loads=4)
    kitchen.ask(*of("slow", 6))
    await pause()
    kitchen.ask(*of("quick", 6))
    await pause()

    began = [await kitchen.end(op) for op in ("slow 0", "slow 1")]
    kept = [await kitchen.end(op) for op in ("quick 0", "quick 1", "quick 2")]

    assert [["quick 0"], ["quick 1"]] == began  # two slots each
    assert [["quick 2"], ["quick 3"], ["quick 4"]] == kept


async def test_line_that_empties_and_fills_keeps_its_share(kitchens: MakeKitchen, pause: Pause) -> None:
    """A load that comes alone, again and again, waits for one other load each time."""
    kitchen = kitchens(max_loads=1)
    kitchen.ask(*of("crowd", 10))
    await pause()
    for each in range(3):
        kitchen.ask(f"lone {each}")
        await pause()
        await kitchen.end(kitchen.began[-1])
        await kitchen.end(kitchen.began[-1])

    assert ["crowd 0", "lone 0", "crowd 1", "lone 1", "crowd 2", "lone 2", "crowd 3"] == kitchen.began


# Bounds


async def test_full_queue_refuses(kitchens: MakeKitchen, pause: Pause) -> None:
    """Beyond `max_queued` loads are refused at once, and counted; a load that is over makes room."""
    kitchen = kitchens()
    kitchen.ask(*of("report", 4), max_loads=1, max_queued=2)
    await pause()
    error = await kitchen.error_of("report 3")
    await kitchen.end("report 0")
    kitchen.ask("report 4", max_loads=1, max_queued=2)
    await pause()
    await kitchen.end("report 1")
    await kitchen.end("report 2")

    assert error == (
        "report 3: 2 loads wait for the 1 slots of report, and max_queued=2 allows no more; "
        "try again later, or raise max_loads if its backend bears more"
    )
    assert "report 4" == kitchen.began[-1]
    stats = kitchen.guard.stats()
    assert (1, 1, 5, 5) == (stats.overloaded, stats.failures, stats.calls, stats.executions)
    assert "1 overloaded" in repr(stats)


async def test_no_queue(kitchens: MakeKitchen, pause: Pause) -> None:
    """With `max_queued=0` a load runs at once or not at all."""
    kitchen = kitchens(max_loads=2, max_queued=0)
    kitchen.ask(*of("report", 3))
    await pause()

    assert "the 2 slots of the guard" in await kitchen.error_of("report 2")
    assert not isinstance(kitchen.calls["report 2"].exception(), TimeoutError)


async def test_longest_line_gives_way(kitchens: MakeKitchen, pause: Pause) -> None:
    """A crowd that fills the queue loses its newest load to another operation, until both wait for as many."""
    kitchen = kitchens(max_loads=1, max_queued=4)
    kitchen.ask(*of("crowd", 5))
    await pause()
    kitchen.ask(*of("other", 3))
    await pause()
    refused = [op for op, call in kitchen.calls.items() if call.done()]

    assert ["crowd 3", "crowd 4", "other 2"] == refused
    for op in refused:
        assert "max_queued=4" in await kitchen.error_of(op)


@pytest.mark.parametrize("leaves_first", [True, False])
async def test_load_that_has_left_makes_room(leaves_first: bool, kitchens: MakeKitchen, pause: Pause) -> None:
    """A load that leaves the longest line in the tick in which another comes is all that the line loses."""
    kitchen = kitchens(max_loads=1, max_queued=2)
    kitchen.ask(*of("crowd", 3))
    await pause()
    leave = partial(kitchen.guard._states.running().board.flights["crowd 2"].abort, RuntimeError("it left"))

    async def ask() -> None:
        asyncio.get_running_loop().call_soon(leave) if not leaves_first else leave()
        kitchen.began.append(await kitchen.guard.fetch("other 0", lambda: asyncio.sleep(0, "other 0")))

    kitchen.calls["other 0"] = asyncio.create_task(ask())  # type: ignore[assignment]  # of a kitchen that is closed
    await pause()

    assert not kitchen.calls["crowd 1"].done()
    with pytest.raises(RuntimeError if kitchen.guard.stats().overloaded == 0 else Overloaded):
        await kitchen.calls["crowd 2"]
    await kitchen.end("crowd 0")
    await kitchen.calls["other 0"]


@pytest.mark.parametrize(
    ("guard", "operation"),
    [
        ({"max_loads": 1, "queue_timeout": 0.001}, {}),
        ({"max_loads": 1}, {"queue_timeout": 0.001}),
        ({"max_loads": 1, "queue_timeout": 60}, {"max_loads": 3, "queue_timeout": 0.001}),
        ({}, {"max_loads": 1, "queue_timeout": 0.001}),
    ],
)
async def test_load_that_waits_for_too_long_is_refused(
    guard: dict[str, Any], operation: dict[str, Any], kitchens: MakeKitchen, pause: Pause
) -> None:
    """After `queue_timeout` of the operation, or else of the guard, a load leaves its queue, and is refused."""
    kitchen = kitchens(**guard)
    kitchen.ask(*of("report", 2), **operation)
    error = await kitchen.error_of("report 1")
    await pause()

    assert error.startswith("report 1: its load got none of the 1 slots of ")
    assert "within queue_timeout=0.001 s; try again later" in error
    assert (["report 0"], []) == (kitchen.began, await kitchen.end("report 0"))
    assert (1, 1) == (kitchen.guard.stats().overloaded, kitchen.guard.stats().loads)


async def test_time_of_both_queues_is_one(kitchens: MakeKitchen, pause: Pause) -> None:
    """A load that has waited too long for its operation's slot does not begin to wait for the guard's."""
    kitchen, gate = kitchens(max_loads=1), Gate()

    async def load() -> str:
        await gate.passage()
        (request,) = board.budgets.of(asyncio.get_running_loop(), 60)._due
        asyncio.get_running_loop().call_soon(request.run_out, 60)  # after the slot has come, before it is taken
        return "soup"

    board = kitchen.guard._states.running().board
    first = asyncio.create_task(kitchen.guard.fetch("report 0", load, name="report", max_loads=1, queue_timeout=60))
    await gate.arrivals(1)
    kitchen.ask("report 1", max_loads=1, queue_timeout=60)
    kitchen.ask("other 0")
    await pause()
    gate.open()

    assert "soup" == await first
    assert "queue_timeout=60" in await kitchen.error_of("report 1")
    assert ["other 0"] == kitchen.began


def test_line_shows_its_state() -> None:
    """A line shows what it holds, and how many wait."""
    assert "<Line menus: 0 slots, 0 waiting>" == repr(Line("menus"))


async def test_refused_load_is_answered_with_an_old_value(clock: ManualClock, pause: Pause) -> None:
    """With `stale_if_error`, callers of a load that got no slot get the old value, and no pause begins."""
    guard, gate, shut = Guard(max_loads=1, max_queued=0, clock=clock), Gate(), {8}

    @coalesce("menu-{menu_id}", guard=guard, ttl=5, stale_if_error=60, jitter=0)
    async def menu(menu_id: int) -> int:
        if menu_id in shut:
            await gate.passage()
        return guard.stats().loads

    old = await menu(7)
    clock.advance(6)
    busy = asyncio.create_task(menu(8))
    await gate.arrivals(1)
    refused = await menu(7)
    gate.open()
    await busy
    new = await menu(7)

    assert (1, 1, 3) == (old, refused, new)
    assert (1, 1, 1) == (guard.stats().overloaded, guard.stats().stale, guard.stats().failures)


# Loads that loads wait for


@pytest.mark.parametrize("limits", [{"max_queued": 0}, {"queue_timeout": 0.001}, {"max_queued": 0, "queue_timeout": 1}])
async def test_load_within_a_load_is_not_refused(limits: dict[str, Any]) -> None:
    """What a load with a slot asks for needs no slot, and no place in the queue."""
    guard = Guard(max_loads=1, **limits)

    async def part() -> str:
        return "soup"

    assert "soup" == await guard.fetch("menu", lambda: guard.fetch("part", part))


@pytest.mark.parametrize("how", ["pushed out", "late"])
async def test_load_that_is_refused_and_waited_for_in_one_tick(how: str, kitchens: MakeKitchen, pause: Pause) -> None:
    """A load with a slot that joins a load in the tick of its refusal lets it run."""
    kitchen = kitchens(max_loads=1, max_queued=2, queue_timeout=60)
    gate = Gate()

    async def whole() -> str:
        await gate.passage()
        if how == "late":
            for request in tuple(board.budgets.of(asyncio.get_running_loop(), 60)._due):
                request.run_out(60)
        else:
            crowd = board.flights["part 1"].queue_slot
            assert crowd is not None
            crowd.set_result("refused")
        return await kitchen.guard.fetch("part 1", lambda: pytest.fail("it is up"))

    board = kitchen.guard._states.running().board
    menu = asyncio.create_task(kitchen.guard.fetch("menu", whole, name="menu"))
    await gate.arrivals(1)
    kitchen.ask("part 1")
    await pause()
    gate.open()
    await pause()

    assert ["part 1"] == kitchen.began
    await kitchen.close()
    assert "part 1" == await menu
    assert 0 == kitchen.guard.stats().overloaded


async def test_refused_batch_refuses_its_ids(pause: Pause) -> None:
    """Each id of a batch that got no slot ends in `Overloaded`; the batch is one refused load."""
    guard, gate = Guard(), Gate()

    @coalesce_many("dish-{ids}", guard=guard, max_loads=1, max_queued=0)
    async def dishes(ids: list[int]) -> dict[int, str]:
        await gate.passage()
        return dict.fromkeys(ids, "soup")

    first = asyncio.create_task(dishes([1, 2]))
    await gate.arrivals(1)
    with pytest.raises(Overloaded, match=r"max_queued=0 allows no more"):
        await dishes([3, 4])
    gate.open()
    await pause()

    assert {1: "soup", 2: "soup"} == await first
    assert (1, 2) == (guard.stats().overloaded, guard.stats().failures)


# Partitions

SHARED: dict[str, Any] = {"max_loads": 4}


async def ask_of(kitchen: Kitchen, pause: Pause, partition: str, number: int) -> list[str]:
    """Let callers ask for so many loads of one partition; return those that began."""
    before = len(kitchen.began)
    known = len(kitchen.calls)
    kitchen.ask(*(f"orders {each}" for each in range(known, known + number)), partition=partition, **SHARED)
    await pause()
    return kitchen.began[before:]


async def test_one_partition_leaves_slots_to_others(kitchens: MakeKitchen, pause: Pause) -> None:
    """A partition takes half of the slots at most, a second one a third of all, and a third finds one free."""
    kitchen = kitchens()
    began = [len(await ask_of(kitchen, pause, partition, 9)) for partition in ("slow", "slower", "quick")]

    assert [2, 1, 1] == began
    assert 4 == kitchen.guard.stats().loads


async def test_partition_with_the_fewest_slots_is_first(kitchens: MakeKitchen, pause: Pause) -> None:
    """A slot goes to the partition that has none, and not to the one that has waited for longest."""
    kitchen = kitchens()
    (first, _) = await ask_of(kitchen, pause, "slow", 9)
    (other,) = await ask_of(kitchen, pause, "slower", 1)
    (quick,) = await ask_of(kitchen, pause, "quick", 2)
    then = await kitchen.end(quick)
    at_last = await kitchen.end(first)

    assert ["orders 11"] == then
    assert [] == at_last  # one slot is free, and the slow partition has one
    assert ["orders 2"] == await kitchen.end(other)


async def test_loads_without_partition_have_their_own_slots(kitchens: MakeKitchen, pause: Pause) -> None:
    """Calls of `fetch` under one name, with partitions and without, limit each other in no way."""
    kitchen = kitchens()
    kitchen.ask(*of("orders", 9), **SHARED)
    await pause()
    kitchen.ask("orders 9", partition="quick", **SHARED)
    await pause()

    assert ["orders 0", "orders 1", "orders 2", "orders 3", "orders 9"] == kitchen.began


class Merchants:
    """A loader that is a method, whose loads end when they are told to."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.began: list[int] = []

    @coalesce("orders-{merchant.number}-{page}", guard=Guard(), partition="merchant:{merchant.number}", max_loads=2)
    async def orders(self, merchant: Any, page: int) -> int:
        self.began.append(merchant.number)
        await self.gate.passage()
        return page


@pytest.mark.parametrize("how", ["call", "refresh", "fresh", "answer"])
async def test_partition_of_a_method(how: str, pause: Pause) -> None:
    """The template is filled with the arguments of each call, of a refresh too."""
    merchants = Merchants()
    slow, quick = SimpleNamespace(number=1), SimpleNamespace(number=2)
    ask: Any = merchants.orders if how == "call" else getattr(merchants.orders, how)
    calls = [asyncio.ensure_future(ask(merchant, page)) for merchant in (slow, quick) for page in range(2)]
    await pause()
    began = list(merchants.began)
    merchants.gate.open()

    assert [1, 2] == began
    assert [0, 1, 0, 1] == [getattr(each, "value", each) for each in await asyncio.gather(*calls)]


async def load(merchant_id: int) -> int:
    """Load an order."""
    return merchant_id


@pytest.mark.parametrize(
    ("partition", "options", "error", "message"),
    [
        ("merchant:{merchant_id}", {}, ConfigurationError, r"load: partition='.*' shares .* give max_loads= too$"),
        ("merchant:{id}", {"max_loads": 2}, InvalidKey, r"load: partition='.*' uses 'id', which is no parameter of it"),
        ("merchant", {"max_loads": 2}, ConfigurationError, r"load: partition='merchant' is the same for all calls: "),
        ("", {"max_loads": 2}, ConfigurationError, r"load: partition='': give a string that is not empty"),
        (7, {"max_loads": 2}, ConfigurationError, r"load: partition=7: give a string that is not empty"),
        ("{merchant_id", {"max_loads": 2}, InvalidKey, r"malformed"),
    ],
)
def test_partition_is_checked(partition: Any, options: Any, error: type[Exception], message: str) -> None:
    """At decoration: it needs slots to share, and a parameter that tells the calls apart."""
    with pytest.raises(error, match=message):
        coalesce("orders-{merchant_id}", partition=partition, **options)(load)


@pytest.mark.parametrize("partition", ["", 7, "merchant:7"])
async def test_partition_of_fetch_is_checked(partition: Any) -> None:
    """There it is the text itself."""
    with pytest.raises(ConfigurationError, match=r"^orders: partition=.*: give (a string|max_loads= too)"):
        await Guard().fetch("orders", partial(load, 7), partition=partition)


def test_batches_have_no_partition() -> None:
    """A batch may have ids of several."""
    options: Any = {"partition": "merchant:{ids}", "max_loads": 2}
    with pytest.raises(ConfigurationError, match=r"^there is no option 'partition': .*max_loads="):
        coalesce_many("orders-{ids}", **options)


# Waiters


@pytest.mark.parametrize("how", ["call", "fetch", "refresh", "many"])
async def test_flight_has_room_for_so_many(how: str, pause: Pause) -> None:
    """Beyond `max_waiters`, the launching caller included, callers are refused; they count as calls."""
    guard, gate = Guard(), Gate()

    async def load_all(ids: list[int]) -> dict[int, int]:
        await gate.passage()
        return dict.fromkeys(ids, 7)

    @coalesce("dish-{dish_id}", guard=guard, max_waiters=2)
    async def dish(dish_id: int) -> int:
        return (await load_all([dish_id]))[dish_id]

    many: Any = coalesce_many("dishes-{ids}", guard=guard, max_waiters=2)(load_all)
    ask: Any = {
        "call": lambda: dish(7),
        "fetch": lambda: guard.fetch("op", partial(dish.bypass, 7), max_waiters=2),
        "refresh": lambda: dish.refresh(7),
        "many": lambda: many([7]),
    }
    calls = [asyncio.ensure_future(ask[how]()) for _ in range(4)]
    await pause()
    calls[1].cancel()
    await pause()
    calls.append(asyncio.ensure_future(ask[how]()))
    await pause()
    if how == "refresh":  # a load that has begun is not shared: the others wait for the next
        calls.append(asyncio.ensure_future(ask[how]()))
        await pause()
    gate.open()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    refused = [str(each) for each in outcomes if isinstance(each, Overloaded)]

    assert 2 == len(refused) == guard.stats().overloaded
    assert refused[0].endswith(": 2 callers wait for its load, and max_waiters=2 allows no more; try again later")
    assert len(calls) == guard.stats().calls
    assert 0 == guard.stats().failures


async def test_hits_are_no_waiters() -> None:
    """Callers that memory answers are never too many."""
    guard = Guard()

    @coalesce("dish-{dish_id}", guard=guard, ttl=60, max_waiters=1)
    async def dish(dish_id: int) -> int:
        return dish_id

    answers = [await dish(7) for _ in range(3)]

    assert ([7, 7, 7], 2, 0) == (answers, guard.stats().l1_hits, guard.stats().overloaded)


async def test_load_with_a_slot_always_may_wait(pause: Pause) -> None:
    """A load that holds a slot is not refused, however many callers wait for what it needs."""
    guard, gate = Guard(), Gate()

    async def part() -> str:
        await gate.passage()
        return "soup"

    async def ask() -> str:
        return await guard.fetch("part", part, max_waiters=1)

    first = asyncio.create_task(ask())
    await gate.arrivals(1)
    within = [asyncio.create_task(guard.fetch(f"menu {limit}", ask, max_loads=limit)) for limit in (None, 1)]
    await pause()
    gate.open()
    outcomes = await asyncio.gather(first, *within, return_exceptions=True)

    assert ["soup", "Overloaded", "soup"] == [
        each if isinstance(each, str) else type(each).__name__ for each in outcomes
    ]


# Options


@pytest.mark.parametrize(
    "options",
    [{"max_queued": 5}, {"queue_timeout": 2}, {"max_loads": 1, "max_queued": -1}, {"max_loads": 1, "queue_timeout": 0}],
)
def test_guard_checks_its_limits(options: dict[str, Any]) -> None:
    """Without `max_loads` no load waits, so nothing can limit the waiting."""
    name, value = list(options.items())[-1]
    with pytest.raises(ConfigurationError, match=rf"^{name}={value}(:| needs max_loads=: without it, no load waits)"):
        Guard(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_queued": 5}, r"^max_queued=5 needs max_loads=: "),
        (
            {"queue_timeout": 2},
            r"^menus: queue_timeout=2 needs max_loads=: without it, no load waits for a slot; of the guard is enough$",
        ),
    ],
)
async def test_operation_whose_loads_never_wait_has_no_such_limit(options: dict[str, Any], message: str) -> None:
    """`max_queued` is of the operation's own slots; `queue_timeout` is of any that its loads wait for."""

    async def load() -> str:
        return "soup"

    with pytest.raises(ConfigurationError, match=message):
        await Guard().fetch("menu", load, name="menus", **options)
    if "queue_timeout" in options:
        assert "soup" == await Guard(max_loads=1).fetch("menu", load, name="menus", **options)
