"""The invariants of the design, each by its number."""

import ast
import asyncio
import gc
import itertools
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from examples import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from inside import timers_of
from leasing import LeasingDouble, Server
from loaders import returning
from waiting import ticks

import stampede_guard
from stampede_guard import Guard, InvalidationPending, LoadCancelled, Scoreboard, _path
from stampede_guard._operations.policy import Policy
from stampede_guard.stores import AcquireRequest, AcquireResult, Refused, Stored
from stampede_guard.stores._envelope import seal
from stampede_guard.testing import FaultStore, Gate, ManualClock

MakeLoop = Callable[[], asyncio.AbstractEventLoop]
Pause = Callable[[], Awaitable[None]]

OP = "menu-7"
BOTH: dict[str, Any] = {"ttl": 60, "l2_ttl": 60, "returns": str}

OFTEN = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


class SlowStore(FaultStore):
    """A store whose operations take so many ticks each, half of them before they take effect."""

    def __init__(self, clock: ManualClock, read: int, write: int, delete: int) -> None:
        super().__init__(clock)
        self._ticks = {"read": read, "write": write, "delete": delete}

    async def read(self, key: str) -> Stored | None:
        await ticks(self._ticks["read"])
        found = await super().read(key)
        await ticks(self._ticks["read"])
        return found

    async def write(self, key: str, envelope: bytes, ttl: float) -> None:
        await ticks(self._ticks["write"])
        await super().write(key, envelope, ttl)
        await ticks(self._ticks["write"])

    async def delete(self, key: str) -> None:
        await ticks(self._ticks["delete"])
        await super().delete(key)
        await ticks(self._ticks["delete"])


# I1


class Waves:
    """Calls, refreshes and invalidations of one op, and the loads that they launch."""

    def __init__(self) -> None:
        self.guard = Guard()
        self.most = 0  # loads that ran at once, forgotten ones aside
        self._operation = self.guard._add_operation("menus", Policy())
        self._gates: list[Gate] = []
        self._calls: list[asyncio.Task[str]] = []
        self._running: set[int] = set()
        self._loads = itertools.count()
        self._wave = 0

    async def _load(self, wave: int) -> str:
        number = next(self._loads)
        if wave == self._wave:  # else it was forgotten before it began
            self._running.add(number)
        self.most = max(self.most, len(self._running))
        self._gates.append(Gate())
        await self._gates[-1].passage()
        self._running.discard(number)
        return "soup"

    async def call(self) -> None:
        """Somebody calls."""
        self._calls.append(
            asyncio.create_task(self.guard._path.get(self._operation, OP, partial(self._load, self._wave)))
        )

    async def refresh(self) -> None:
        """Somebody refreshes; loads that are no refresh themselves are forgotten by that."""
        await ticks(3)  # those asked for before have begun
        flight = self.guard._states.running().board.current(OP)
        if flight is None or not flight.is_refresh:
            self._forget()
        self._calls.append(
            asyncio.create_task(self.guard._path.refresh(self._operation, OP, partial(self._load, self._wave)))
        )
        await ticks(1)

    async def invalidate(self) -> None:
        """Somebody invalidates; what is up is forgotten by that."""
        await ticks(3)
        self._forget()
        await self.guard.invalidate(OP)

    def _forget(self) -> None:
        self._running.clear()
        self._wave += 1

    async def land(self) -> None:
        """The latest load returns."""
        for gate in self._gates[-1:]:
            gate.open()

    async def finish(self) -> None:
        """All loads return."""
        await ticks(3)
        while not all(call.done() for call in self._calls):  # one load may begin when another is over
            for gate in self._gates:
                gate.open()
            await ticks(1)
        await asyncio.gather(*self._calls)


@OFTEN
@given(
    acts=st.lists(
        st.tuples(
            st.sampled_from([Waves.call, Waves.call, Waves.refresh, Waves.invalidate, Waves.land]), st.integers(0, 3)
        ),
        max_size=40,
    )
)
@example(acts=[(each, 0) for each in (Waves.refresh, Waves.invalidate, Waves.call, Waves.land, Waves.call)])
def test_i1_at_most_one_current_flight_per_op(acts: list[Any], make_loop: MakeLoop) -> None:
    """Whatever is asked in whatever order: a second load of an op runs only beside those that were forgotten."""

    async def act() -> int:
        waves = Waves()
        for what, pause in acts:
            await what(waves)
            await ticks(pause)
        await waves.finish()
        return waves.most

    assert make_loop().run_until_complete(act()) <= 1


# I2


@pytest.mark.parametrize("leavers", [set(who) for size in range(4) for who in itertools.combinations(range(4), size)])
@pytest.mark.parametrize("on_abandon", ["finish", "cancel"])
async def test_i2_a_cancelled_caller_changes_nobodys_outcome(leavers: set[int], on_abandon: Any) -> None:
    """Whoever of four leaves, and whenever, the others are answered by the one load."""
    for when in range(12):
        board = Scoreboard(on_abandon=on_abandon)
        loads: list[str] = []

        async def load(loads: list[str] = loads) -> str:
            loads.append("load")
            await ticks(4)
            return "soup"

        calls = [asyncio.create_task(board.debounce(OP, load)) for _ in range(4)]
        await ticks(when)
        for leaver in leavers:
            calls[leaver].cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)

        assert {"soup"} == {outcome for caller, outcome in enumerate(outcomes) if caller not in leavers}
        assert len(loads) == 1 or 0 in leavers


# I3


class Story:
    """A menu that changes once, while callers come in each tick."""

    def __init__(self, costs: tuple[int, ...], tiers: dict[str, Any], *, enabled: bool) -> None:
        *store_costs, self._cost = costs
        clock = ManualClock()
        self._guard = Guard(lambda: SlowStore(clock, *store_costs), clock=clock, enabled=enabled)
        self._tiers = tiers
        self._menu = "old"

    async def _load(self) -> str:
        menu = self._menu
        await ticks(self._cost)
        return menu

    async def _call(self) -> str:
        return await self._guard.fetch(OP, self._load, **self._tiers)

    async def tell(self, before: int, when: int) -> tuple[set[str], set[str]]:
        """Return what callers got who came before the change, and after it."""
        async with self._guard:
            for _ in range(before):  # so that there may be something on the way in the tiers
                await self._call()
                await self._guard.invalidate(OP)
            early = [await self._soon() for _ in range(when)]
            self._menu = "new"
            invalidation = asyncio.create_task(self._guard.invalidate(OP))
            await ticks(1)
            late = [await self._soon() for _ in range(60)]
            await invalidation
            answers = set(await asyncio.gather(*early)), set(await asyncio.gather(*late))
            self._guard._states.running().memory.clear()
            answers[1].add(await self._call())
        return answers

    async def _soon(self) -> asyncio.Task[str]:
        call = asyncio.create_task(self._call())
        await ticks(1)
        return call


@settings(OFTEN, max_examples=examples(100))
@given(
    before=st.integers(0, 4),
    when=st.integers(0, 40),
    costs=st.tuples(*[st.integers(0, 5)] * 4),
    tiers=st.sampled_from([{"ttl": 60}, {"l2_ttl": 60, "returns": str}, BOTH]),
    enabled=st.booleans(),
)
def test_i3_what_began_before_an_invalidation_is_never_stored(
    before: int, when: int, costs: tuple[int, ...], tiers: dict[str, Any], make_loop: MakeLoop, *, enabled: bool
) -> None:
    """Wherever calls are on their way through slow tiers when the menu changes: no later call gets the old one."""
    story = Story(costs, tiers, enabled=enabled)

    early, late = make_loop().run_until_complete(story.tell(before, when))

    assert early <= {"old", "new"}
    assert {"new"} == late


# Whether a store is asked before a flight has a task, and whether there is more to its answer then.
BEGINNINGS = {"in a task": (False, False), "at once": (True, False), "concluded": (True, True)}


class SlowLeasing(LeasingDouble):
    """A store with leases whose operations take so many ticks, half of them before they take effect."""

    def __init__(self, server: Server, costs: list[int]) -> None:
        super().__init__(server)
        self._costs = itertools.cycle(costs)
        self._ask_now = super()._ask

    async def _ask(self, what: str) -> None:
        await ticks(next(self._costs))
        await self._ask_now(what)

    async def _acquire(self, request: AcquireRequest) -> AcquireResult:
        verdict = await super()._acquire(request)
        await ticks(next(self._costs))
        return verdict

    async def fill(self, *args: Any, **options: Any) -> bool:
        is_stored = await super().fill(*args, **options)
        await ticks(next(self._costs))
        return is_stored


class FleetStory:
    """A menu that changes once, while callers come to two processes in each tick; one of the two is told."""

    def __init__(self, costs: list[list[int]], load_cost: int, how: str, begin: str, **options: Any) -> None:
        clock = ManualClock()
        server = Server(clock)
        stores = [SlowLeasing(server, each) for each in costs]
        for store in stores:
            store.begins, store.has_more = BEGINNINGS[begin]
        self.guards = [Guard(lambda store=store: store, clock=clock) for store in stores]
        self._load_cost = load_cost
        self._how = how
        self._options: dict[str, Any] = BOTH | {"tags": ("menus",)} | options
        self._menu = "old"

    async def _load(self) -> str:
        menu = self._menu
        await ticks(self._load_cost)
        return menu

    def _call(self, guard: Guard) -> asyncio.Task[str]:
        return asyncio.create_task(guard.fetch(OP, self._load, **self._options))

    async def _invalidate(self, guard: Guard) -> None:
        await {
            "op": partial(guard.invalidate, OP),
            "tag": partial(guard.invalidate_tag, "menus"),
            "everything": guard.clear,
        }[self._how]()

    async def tell(self, when: int, gap: int) -> tuple[set[str], set[str]]:
        """Return what callers got who came before anything was confirmed, and after that."""
        here, there = self.guards
        async with here, there:
            early = []
            for _ in range(when):
                early += [self._call(here), self._call(there)]
                await ticks(gap)
            self._menu = "new"
            invalidation = asyncio.create_task(self._invalidate(here))
            await ticks(1)
            late = [self._call(here)]  # where it was asked for, it holds at once
            while not invalidation.done():
                early.append(self._call(there))
                await ticks(1)
            await invalidation
            await ticks(2)  # there the word has been heard
            for _ in range(20):
                late += [self._call(here), self._call(there)]
                await ticks(gap)
            answers = set(await asyncio.gather(*early)), set(await asyncio.gather(*late))
            for guard in self.guards:
                guard._states.running().memory.clear()
                answers[1].add(await self._call(guard))
        return answers


@settings(OFTEN, max_examples=examples(80))
@given(
    pace=st.tuples(st.integers(0, 12), st.integers(0, 3)),
    costs=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=2, max_size=2),
    load_cost=st.integers(0, 12),
    how=st.sampled_from(["op", "tag", "everything"]),
    begin=st.sampled_from([*BEGINNINGS]),
    lease=st.booleans(),
)
def test_i3_holds_between_processes(  # noqa: PLR0917
    pace: tuple[int, int],
    costs: list[list[int]],
    load_cost: int,
    how: str,
    begin: str,
    make_loop: MakeLoop,
    *,
    lease: bool,
) -> None:
    """In whichever process a load began before an invalidation was confirmed: nobody who comes later gets its value."""
    story = FleetStory(costs, load_cost, how, begin, lease=lease)

    early, late = make_loop().run_until_complete(story.tell(*pace))

    assert early <= {"old", "new"}
    assert {"new"} == late


@pytest.mark.parametrize("begin", [*BEGINNINGS])
@pytest.mark.parametrize("is_there", [True, False])
async def test_i3_no_right_to_load_outlives_its_flight(begin: str, is_there: bool) -> None:
    """Whenever everybody leaves, and wherever their flight is by then: no right is left behind, nor anything else."""
    clock = ManualClock()
    server = Server(clock)
    store = SlowLeasing(server, [3])
    store.begins, store.has_more = BEGINNINGS[begin]

    async def load() -> str:
        await ticks(3)
        return "soup"

    async with Guard(lambda: store, clock=clock) as guard:
        site = guard._states.running()
        assert site.tier is not None
        for when in range(30):
            if is_there:
                await guard.fetch(OP, load, **BOTH)
                site.memory.clear()
            call = asyncio.create_task(guard.fetch(OP, load, on_abandon="cancel", **BOTH))
            await ticks(when)
            call.cancel()
            await asyncio.wait([call])
            while site.board.up or site.tier.upkeep:
                await ticks(1)

            assert ({}, 0, 0) == (server.leases, site.tier.access._in_use, guard.stats().in_flight), when
            await guard.invalidate(OP)


# I4

ENDINGS: dict[str, Any] = {
    "returns": lambda: None,
    "raises": ValueError,
    "raises CancelledError": asyncio.CancelledError,
    "raises GeneratorExit": GeneratorExit,
    "raises StopIteration": StopIteration,
    "raises what cannot be copied": lambda: type("Odd", (Exception,), {"__reduce__": None, "__new__": _once})(7),
}


def _once(kind: type[Exception], *args: object) -> Exception:
    if not args:
        raise RuntimeError
    return Exception.__new__(kind)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("through", ["a scoreboard", "a guard", "a disabled guard"])
async def test_i4_every_waiter_settles_once(ending: str, through: str, *, at_once: bool) -> None:
    """However a load ends, and however soon, everybody who waits gets a result or an `Exception`."""
    guard = Guard(enabled=through != "a disabled guard")

    async def load() -> str:
        await ticks(0 if at_once else 5)
        error = ENDINGS[ending]()
        if error is not None:
            raise error
        return "soup"

    ask = Scoreboard().debounce if through == "a scoreboard" else guard.fetch
    outcomes = await asyncio.gather(*(ask(OP, load) for _ in range(5)), return_exceptions=True)

    assert all(isinstance(outcome, str | Exception) for outcome in outcomes)
    assert (ending == "returns") == (outcomes == ["soup"] * 5)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_i4_every_waiter_settles_when_the_loop_is_stopped(stop: type[BaseException], make_loop: MakeLoop) -> None:
    """Also when the load ends in what stops the loop: the waiters settle as soon as it runs again."""
    loop, board = make_loop(), Scoreboard()

    async def load() -> None:
        await ticks(3)
        raise stop

    calls = [loop.create_task(board.debounce(OP, load)) for _ in range(5)]
    with pytest.raises(stop):
        loop.run_forever()
    outcomes = loop.run_until_complete(asyncio.gather(*calls, return_exceptions=True))

    assert {LoadCancelled} == {type(outcome) for outcome in outcomes}


# I5


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (None, None),
        (False, bool),
        (0, int),
        (0.0, float),
        ("", str),
        (b"", bytes),
        ([], list[int]),
        ({}, dict[str, int]),
    ],
)
async def test_i5_falsy_answers_are_answers(answer: Any, kind: Any) -> None:
    """What is falsy is joined, remembered and stored like anything else."""
    clock, loads = ManualClock(), []
    store = FaultStore(clock)

    async def load() -> Any:
        loads.append("load")
        await ticks(1)
        return answer

    options: dict[str, Any] = {"l2_ttl": 60, "returns": kind}
    async with Guard(lambda: store, clock=clock) as guard:
        joined = await asyncio.gather(*(guard.fetch(OP, load, ttl=5, **options) for _ in range(3)))
        remembered = await guard.fetch(OP, load, ttl=5, **options)
        clock.advance(6)
        stored = await guard.fetch(OP, load, ttl=5, **options)

    assert [answer] * 5 == [*joined, remembered, stored]
    assert ["load"] == loads


async def test_i5_errors_are_never_cached() -> None:
    """A failed load leaves nothing in either tier."""
    clock = ManualClock()
    store = FaultStore(clock)

    async def fail() -> str:
        raise ValueError

    async with Guard(lambda: store, clock=clock) as guard:
        for _ in range(3):
            with pytest.raises(ValueError, match=r"^$"):
                await guard.fetch(OP, fail, **BOTH)

        assert (3, {}, 0) == (guard.stats().loads, store.contents, len(guard._states.running().memory))


# I6


class Deadlined(FaultStore):
    """A store that hangs when told to, and keeps its deadline, as stores do."""

    hangs = False

    async def _pass(self) -> None:
        if self.hangs:
            async with asyncio.timeout(0.000_001):
                await asyncio.get_running_loop().create_future()
        await super()._pass()

    def lie(self, lie: bytes) -> None:
        """Give everything another value."""
        self.contents = {key: (lie, until) for key, (_, until) in self.contents.items()}


class DeadlinedLeasing(LeasingDouble):
    """The same with leases; while somebody waits for one, time passes."""

    hangs = False

    def __init__(self, clock: ManualClock, begin: str) -> None:
        super().__init__(Server(clock))
        self.begins, self.has_more = BEGINNINGS[begin]

    async def _ask(self, what: str) -> None:
        if self.hangs:
            async with asyncio.timeout(0.000_001):
                await asyncio.get_running_loop().create_future()
        await super()._ask(what)

    async def _acquire(self, request: AcquireRequest) -> AcquireResult:
        verdict = await super()._acquire(request)
        self.server.clock.advance(verdict.kind == "wait")
        return verdict

    def lie(self, lie: bytes) -> None:
        """Give everything another value."""
        self.server.values = {key: (lie, until) for key, (_, until) in self.server.values.items()}


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whoever waits for another's load look again at once."""
    monkeypatch.setattr(_path, "_POLLS", (0.0, 0.0))


async def _refreshed(refresh: Awaitable[Any]) -> Any:
    try:
        return await refresh
    except InvalidationPending as pending:
        return pending.value


TROUBLES = [OSError("reset"), Refused("OOM"), TimeoutError(), AttributeError("a bug"), "hangs", "lies", None, None]


@pytest.mark.usefixtures("_hasty")
@settings(OFTEN, max_examples=examples(75))
@given(
    story=st.lists(
        st.tuples(
            st.sampled_from(["call", "call", "invalidate", "refresh"]),
            st.sampled_from(["a", "b"]),
            st.sampled_from(TROUBLES),
            st.binary(max_size=60),
            st.sampled_from([0, 0.3, 7]),
        ),
        max_size=25,
    ),
    begin=st.sampled_from([*BEGINNINGS, None]),
)
def test_i6_a_store_in_trouble_changes_no_outcome(
    story: list[tuple[str, str, Any, bytes, float]],
    begin: str | None,
    make_loop: MakeLoop,
) -> None:
    """A store that fails, hangs or lies in each operation: every call gets the present answer, and no error.

    A refresh gets it too, if need be in an `InvalidationPending`.
    """
    clock = ManualClock()
    store = Deadlined(clock) if begin is None else DeadlinedLeasing(clock, begin)
    menu = {"a": 0, "b": 0}
    guard = Guard(lambda: store, clock=clock)

    async def act() -> None:
        operation = guard._add_operation("menus", Policy(ttl=5, l2_ttl=60), annotation=lambda: tuple[str, int])
        async with guard:
            for what, op, trouble, lie, seconds in story:
                clock.advance(seconds)
                store.error = trouble if isinstance(trouble, Exception) else None
                store.hangs = trouble == "hangs"
                if trouble == "lies":
                    store.lie(lie)
                menu[op] += what != "call"
                if what == "invalidate":
                    with suppress(InvalidationPending):
                        await guard.invalidate(op)
                    continue

                async def load(op: str = op) -> tuple[str, int]:
                    return op, menu[op]

                if what == "call":
                    assert (op, menu[op]) == await guard._path.get(operation, op, load)
                    continue
                assert (op, menu[op]) == await _refreshed(guard._path.refresh(operation, op, load))

    make_loop().run_until_complete(act())

    assert 0 == guard.stats().failures


# I7


@OFTEN
@given(data=st.data())
def test_i7_every_answer_was_stored_for_its_op(data: st.DataObject, make_loop: MakeLoop) -> None:
    """A store that mixes up its keys in whatever way makes more loads, and no wrong answers."""
    names = st.text("ab:{}~ ü", min_size=1, max_size=4)
    ops = data.draw(st.lists(names, min_size=2, max_size=6, unique=True))
    shuffled = data.draw(st.permutations(ops))
    clock = ManualClock()
    store = FaultStore(clock)

    async def ask(namespace: str) -> list[str]:
        async with Guard(lambda: store, namespace=namespace, clock=clock) as guard:
            return [await guard.fetch(op, partial(load, namespace, op), l2_ttl=60, returns=str) for op in ops]

    async def load(namespace: str, op: str) -> str:
        return f"{op} of {namespace}"

    async def act() -> None:
        for namespace in ("lunch", "dinner"):
            await ask(namespace)
        envelopes = [envelope for envelope, _ in store.contents.values()]
        moved = [envelopes[ops.index(op)] for op in shuffled] + envelopes[len(ops) :][::-1]
        rotated = moved[len(ops) :] + moved[: len(ops)] if data.draw(st.booleans()) else moved
        store.contents = {key: (envelope, clock() + 60) for key, envelope in zip(store.contents, rotated, strict=True)}
        for namespace in ("lunch", "dinner"):
            assert [f"{op} of {namespace}" for op in ops] == await ask(namespace)

    make_loop().run_until_complete(act())


@pytest.mark.parametrize(("theirs", "ours"), [(("a", "b:c"), ("a:b", "c")), (("a", "b c"), ("a", "b_c"))])
async def test_i7_namespaces_and_ops_do_not_run_together(theirs: tuple[str, str], ours: tuple[str, str]) -> None:
    """No two pairs of a namespace and an op mean the same entry: a namespace with a colon is refused."""
    clock = ManualClock()
    store = FaultStore(clock)

    async def ask(namespace: str, op: str) -> str:

        try:
            async with Guard(lambda: store, namespace=namespace, clock=clock) as guard:
                return await guard.fetch(op, returning(f"{op} of {namespace}"), l2_ttl=60, returns=str)
        except stampede_guard.ConfigurationError:
            return f"{op} of {namespace}"

    await ask(*theirs)

    assert f"{ours[1]} of {ours[0]}" == await ask(*ours)


def test_i7_an_envelope_opens_for_its_own_key_alone() -> None:
    """The envelope of one key is not that of another, though the payload is the same."""
    assert seal("menus:a", b"soup", "f" * 22) != seal("menus:b", b"soup", "f" * 22)


# I9

WALL_CLOCKS = {f"time.{name}" for name in ("time", "time_ns", "localtime", "gmtime", "ctime", "strftime")}


def test_i9_no_module_reads_the_wall_clock() -> None:
    """No module of the package asks what time it is; a machine whose clock jumps behaves like any other."""
    found = [
        f"{module.name}:{node.lineno}"
        for module in Path(stampede_guard.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text()))
        if (
            isinstance(node, ast.Attribute)
            and (ast.unparse(node) in WALL_CLOCKS or node.attr in ("now", "utcnow", "today"))
        )
        or (isinstance(node, ast.ImportFrom) and node.module == "time")
    ]

    assert [] == found


async def test_i9_a_jump_of_the_wall_clock_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the wall clock ten years ahead, or gone, entries are as fresh as before."""
    guard, loads = Guard(), []

    async def load() -> str:
        loads.append("load")
        return "soup"

    await guard.fetch(OP, load, ttl=60)
    ahead = time.time() + 10 * 365 * 86_400
    for wall_clock in (lambda: ahead, lambda: 0.0):
        monkeypatch.setattr(time, "time", wall_clock)
        await guard.fetch(OP, load, ttl=60)

    assert ["load"] == loads


# I10


class Evening:
    """Everything that can become of a call, at once, on one guard."""

    def __init__(self) -> None:
        clock = ManualClock()
        self.guard = Guard(lambda: FaultStore(clock), clock=clock, drain_timeout=0)

    async def _soup(self) -> str:
        await ticks(3)
        return "soup"

    async def _fail(self) -> str:
        await ticks(1)
        raise ValueError

    async def _never(self) -> str:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def _itself(self) -> Any:
        return await self.guard.fetch("itself", self._itself)

    async def pass_by(self) -> list[Any]:
        """Return what became of the calls."""
        ask = self.guard.fetch
        async with self.guard:
            leavers = [
                asyncio.create_task(ask("left", self._fail, **BOTH)),
                asyncio.create_task(ask("cancelled", self._never, on_abandon="cancel")),
            ]
            calls = [
                *(ask("landed", self._soup, wait_timeout=60, **BOTH) for _ in range(3)),
                *(ask("failed", self._fail, **BOTH) for _ in range(3)),
                ask("hung", self._never, load_timeout=0.001),
                ask("slow", self._never, wait_timeout=0.001),
                self._itself(),
            ]
            overtaken = asyncio.create_task(ask("overtaken", self._soup, **BOTH))
            await ticks(1)
            for leaver in leavers:
                leaver.cancel()
            await self.guard.invalidate("overtaken")
            outcomes = await asyncio.gather(*calls, overtaken, *leavers, return_exceptions=True)
            self.site = self.guard._states.running()
        return outcomes


def test_i10_idle_means_idle(make_loop: MakeLoop) -> None:
    """After loads that landed, failed, hung, were left, overtaken, refused and drained, nothing is left."""
    loop, evening = make_loop(), Evening()

    outcomes = loop.run_until_complete(evening.pass_by())
    board, tier = evening.site.board, evening.site.tier

    assert tier is not None
    assert (set(), []) == (asyncio.all_tasks(loop), timers_of(loop))
    assert [0, 0, 0] == [len(state) for state in (board.up, board.flights, tier._writes)]
    assert 0 == evening.guard.stats().in_flight
    assert ["soup"] * 3 + ["ValueError"] * 3 + ["LoadTimeout", "WaitTimeout", "RecursiveLoad"] + ["soup"] + [
        "CancelledError"
    ] * 2 == [outcome if isinstance(outcome, str) else type(outcome).__name__ for outcome in outcomes]


def test_i10_nothing_outlives_its_loop() -> None:
    """A loop that was closed is forgotten, its flights, memory and connections with it."""
    guard, loop = Guard(), asyncio.new_event_loop()

    async def soup() -> str:
        await ticks(1)
        return "soup"

    loop.run_until_complete(guard.fetch(OP, soup, ttl=60))
    loop.close()
    forgotten = ref(loop)
    del loop
    gc.collect()

    assert forgotten() is None
