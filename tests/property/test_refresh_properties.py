"""I13: what a refresh leaves behind."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from leasing import LeasingDouble, Server
from waiting import ticks

from stampede_guard import Guard, InvalidationPending, _path
from stampede_guard._bus import backplane as backplane_module
from stampede_guard._operations.policy import Policy
from stampede_guard.stores import Refused
from stampede_guard.testing import Gate, ManualClock

MakeLoop = Callable[[], asyncio.AbstractEventLoop]

OP = "menu-7"
TROUBLES = (None, TimeoutError(), ConnectionError("gone"), Refused("OOM"))


def no_pauses() -> Iterator[float]:
    """Yield how long to wait between looks for another's load: hardly."""
    while True:
        yield 0.001


def _giving(store: LeasingDouble) -> Callable[[], LeasingDouble]:
    return lambda: store


class Shop:
    """A row that is written again and again, and two processes that refresh and read it; values are row numbers.

    Attributes:
        floors: For each process, the latest row that a refresh has told of: nothing older may be read there.
        wrong: What was read or refreshed all the same.
    """

    def __init__(self, max_bytes: int, options: dict[str, Any]) -> None:
        clock = ManualClock()
        chosen: Any = {"load_timeout": None, **options}
        self.clock = clock
        self.server = Server(clock)
        self.stores = [LeasingDouble(self.server) for _ in range(2)]
        self.guards = [Guard(_giving(store), clock=clock, max_bytes=max_bytes) for store in self.stores]
        self._operations = [
            guard._add_operation("menus", Policy.from_options(chosen), annotation=lambda: int) for guard in self.guards
        ]
        self._gates: list[Gate] = []
        self._calls: list[asyncio.Task[None]] = []
        self._row = 1_000
        self._fails = False
        self.floors = [0, 0]
        self.wrong: list[str] = []

    async def _load(self) -> int:
        row, fails, self._fails = self._row, self._fails, False
        gate = Gate()
        self._gates.append(gate)
        await gate.passage()
        if fails:
            raise LookupError(row)
        return row

    async def write_and_refresh(self, at: int) -> None:
        """Commit, and refresh."""
        self._row += 1
        self._calls.append(asyncio.create_task(self._refresh(at, self._row)))

    async def _refresh(self, at: int, row: int) -> None:
        is_confirmed = True
        try:
            value = await self.guards[at]._path.refresh(self._operations[at], OP, self._load)
        except LookupError:
            return
        except InvalidationPending as pending:
            value, is_confirmed = pending.value, False
        if value < row:
            self.wrong.append(f"refreshed {value} after {row} was written")
        self.floors[at] = max(self.floors[at], value)
        if is_confirmed:
            await ticks(5)  # the word is heard
            self.floors = [max(floor, value) for floor in self.floors]

    async def write_and_ask(self, at: int) -> None:
        """Commit, and ask for what a load reads that begins after that."""
        self._row += 1
        self._calls.append(asyncio.create_task(self._ask(at, self._row)))

    async def _ask(self, at: int, row: int) -> None:
        try:
            value = await self.guards[at]._path.refresh(self._operations[at], OP, self._load, replaces=False)
        except LookupError:
            return
        if value < row:
            self.wrong.append(f"{value} was fresh after {row} was written")

    async def read(self, at: int) -> None:
        """Call."""
        self._calls.append(asyncio.create_task(self._read(at)))

    async def _read(self, at: int) -> None:
        floor = self.floors[at]
        try:
            value = await self.guards[at]._path.get(self._operations[at], OP, self._load)
        except LookupError:
            return
        if value < floor:
            self.wrong.append(f"read {value} after {floor} was refreshed")

    async def land(self, at: int) -> None:
        """Let the first or the last load go on."""
        for gate in self._gates[:1] if at else self._gates[-1:]:
            gate.open()
            self._gates.remove(gate)

    async def fail(self, _: int) -> None:
        """Let the next load fail."""
        self._fails = True

    async def lose(self, _: int) -> None:
        """Let the server lose the lease, as when it expires or is evicted."""
        self.server.leases.clear()

    async def invalidate(self, at: int) -> None:
        """Invalidate without waiting."""
        await self.guards[at].invalidate(OP, wait=False)

    async def trouble(self, at: int) -> None:
        """Let the store fail in another way, or no more."""
        store = self.stores[at]
        store.error = TROUBLES[(TROUBLES.index(store.error) + 1) % len(TROUBLES)]

    async def finish(self) -> None:
        """Let everything land."""
        while not all(call.done() for call in self._calls):
            while self._gates:
                await self.land(1)
            self.clock.advance(1)  # leases that were not given back expire
            await asyncio.sleep(0.0005)
        for call in self._calls:
            call.result()


ACTS = [
    *[Shop.write_and_refresh] * 3,
    *[Shop.write_and_ask] * 2,
    *[Shop.read] * 3,
    *[Shop.land] * 4,
    Shop.fail,
    Shop.lose,
    Shop.invalidate,
    Shop.trouble,
]


@settings(
    deadline=None,
    max_examples=examples(75),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 1), st.integers(0, 8)), min_size=5, max_size=40),
    options=st.sampled_from(
        [{"ttl": 60, "l2_ttl": 60}, {"l2_ttl": 60}, {"ttl": 60}, {"ttl": 60, "l2_ttl": 60, "version": int}]
    ),
    max_bytes=st.sampled_from([99, 1]),
)
def test_i13_a_refresh_leaves_nothing_older(
    acts: list[Any], options: dict[str, Any], max_bytes: int, make_loop: MakeLoop
) -> None:
    """A refresh after a write returns it, and a read after a refresh returns nothing older, under any fault."""

    async def act() -> list[str]:
        shop = Shop(max_bytes, options)
        async with shop.guards[0], shop.guards[1]:
            for what, at, pause in acts:
                await what(shop, at)
                await ticks(pause)
            await shop.finish()
            for at in (0, 1):
                await shop.read(at)
                await shop.finish()
        return shop.wrong

    patches = patch.object(backplane_module, "_ECHO_PERIOD", 3_600.0), patch.object(_path, "_polls", no_pauses)
    with patches[0], patches[1]:
        assert [] == make_loop().run_until_complete(act())
