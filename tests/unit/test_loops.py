import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
from inside import untyped

from stampede_guard import Guard, coalesce
from stampede_guard import _loops as loops_module
from stampede_guard._flights.flight import Flight
from stampede_guard._flights.limiter import Limiters
from stampede_guard._flights.waiting import wait_one
from stampede_guard._l2.tier import Tier
from stampede_guard._loops import Change, LoopState, LoopStates
from stampede_guard._memory.epochs import Epochs
from stampede_guard._memory.l1 import Memory
from stampede_guard._stats import Counters
from stampede_guard.stores import KeysChanged
from stampede_guard.testing import FaultStore, Gate, ManualClock

MakeLoop = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture
def tier() -> Tier:
    """Return a tier over an empty store."""
    return Tier(FaultStore(clock := ManualClock()), "menus", 1_000, clock)


def state_of(loop: asyncio.AbstractEventLoop, tier: Tier | None = None) -> LoopState:
    """Return a state for *loop*."""
    return LoopState(loop, Memory(10, ManualClock()), tier, Epochs(), Limiters())


def new_states() -> LoopStates:
    """Return the states of a guard without a store."""
    return LoopStates(lambda: state_of(asyncio.get_running_loop()), needs_entering=False)


def opened(states: LoopStates, loop: asyncio.AbstractEventLoop) -> LoopState:
    """Return a state that *loop* has in *states*."""
    state = state_of(loop)
    run(loop, lambda: states.add(state))
    return state


def run(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> Any:
    """Return what *function* returns inside *loop*."""

    async def call() -> Any:
        return function()

    return loop.run_until_complete(call())


def test_each_loop_finds_its_own_state(make_loop: MakeLoop) -> None:
    """A loop finds what was added in it, however often loops take turns."""
    states, loops = new_states(), [make_loop() for _ in range(3)]
    own = [opened(states, loop) for loop in loops[:2]]

    found = [run(loop, states.here) for loop in loops * 2]

    assert [*own, None] * 2 == found


def test_outside_of_a_loop() -> None:
    """Without a running loop there is no state to ask for."""
    with pytest.raises(RuntimeError, match="no running event loop"):
        new_states().here()


def test_removed_state_is_not_found(make_loop: MakeLoop) -> None:
    """A state that was removed is gone; a second time there is nothing to remove."""
    states, loop = new_states(), make_loop()
    state = opened(states, loop)

    removed = [run(loop, lambda: states.remove(state)) for _ in range(2)]

    assert [True, False] == removed
    assert run(loop, states.here) is None


def test_newer_state_is_not_removed(make_loop: MakeLoop) -> None:
    """Who closes an old state late does not take the new one away."""
    states, loop = new_states(), make_loop()
    old, new = opened(states, loop), opened(states, loop)

    assert not run(loop, lambda: states.remove(old))
    assert new is run(loop, states.here)


def remembering(states: LoopStates, *loops: asyncio.AbstractEventLoop) -> list[LoopState]:
    """Return states for *loops* that remember the op `a`."""
    made = [opened(states, loop) for loop in loops]
    for state in made:
        state.memory.put("a", "soup", 60)
    return made


def left(states: list[LoopState]) -> list[bool]:
    """Return which of *states* still remember it."""
    return ["a" in state.memory for state in states]


FORGET = Change("op", "a")


def test_changes_reach_every_loop(make_loop: MakeLoop) -> None:
    """A change is made here at once, and elsewhere in the other loop's next iteration."""
    states, here, there = new_states(), make_loop(), make_loop()
    both = remembering(states, here, there)

    run(here, lambda: states.tell(FORGET))
    at_once = left(both)
    run(there, lambda: None)

    assert ([False, True], [False, False]) == (at_once, left(both))


def test_changes_from_outside_of_a_loop(make_loop: MakeLoop) -> None:
    """Where no loop is running every state is elsewhere."""
    states, loop = new_states(), make_loop()
    own = remembering(states, loop)

    states.tell(FORGET)
    at_once = left(own)
    run(loop, lambda: None)

    assert ([True], [False]) == (at_once, left(own))


def test_changes_from_a_loop_without_a_state(make_loop: MakeLoop) -> None:
    """A loop that does not use the guard can tell those that do."""
    states, here, there = new_states(), make_loop(), make_loop()
    own = remembering(states, there)

    assert run(here, lambda: states.tell(FORGET)) is None
    run(there, lambda: None)

    assert [False] == left(own)


@pytest.mark.parametrize("is_gone", [False, True], ids=["closed", "gone"])
def test_closed_loops_are_passed_over(is_gone: bool) -> None:
    """A loop that was closed is told nothing, nor is a state that something keeps longer than its loop."""
    states, loop = new_states(), asyncio.new_event_loop()
    own = remembering(states, loop)
    loop.close()
    if is_gone:
        del loop
        gc.collect()

    states.tell(FORGET)

    assert ([True], {}) == (left(own), own[0].news)


def test_loop_that_closes_just_then(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is closed between the look and the word, by its own thread, is passed over too."""
    states, loop = new_states(), make_loop()
    own = remembering(states, loop)
    loop.close()
    monkeypatch.setattr(loop, "is_closed", lambda: False)
    states.tell(FORGET)
    monkeypatch.undo()

    assert [True] == left(own)


def test_state_that_was_removed_meanwhile_is_not_changed(make_loop: MakeLoop) -> None:
    """A change that arrives when its state is gone is dropped, and not made to the state that came after."""
    states, loop = new_states(), make_loop()
    own = remembering(states, loop)
    loop.call_soon(states.remove, own[0])
    states.tell(FORGET)

    run(loop, lambda: None)

    assert ([True], {}) == (left(own), own[0].news)


def test_loop_that_rarely_runs_keeps_one_note(make_loop: MakeLoop) -> None:
    """However much is invalidated elsewhere, a loop that does not run has one handle for it, and equal changes once."""
    states, loop = new_states(), make_loop()
    loop.set_debug(True)
    (state,) = remembering(states, loop)
    before = len(untyped(loop)._ready)

    for _ in range(3):
        for op in ("a", "b", "c"):
            states.tell(Change("op", op))
    after = len(untyped(loop)._ready) - before, len(state.news)
    run(loop, lambda: None)
    states.tell(FORGET)
    run(loop, lambda: None)

    assert (1, 3) == after
    assert ([False], {}) == (left([state]), state.news)


@pytest.mark.parametrize("is_stored", [False, True])
def test_loop_with_too_many_changes_forgets_everything(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, *, is_stored: bool
) -> None:
    """What a loop has not heard of is bounded; beyond that it forgets all, in its store too if that was to be told."""
    monkeypatch.setattr(loops_module, "_NEWS", 3)
    states, loop = new_states(), make_loop()
    (state,) = remembering(states, loop)
    changes = [Change("op", f"menu-{number}", is_stored=is_stored and number == 1) for number in range(5)]

    for change in changes:
        states.tell(change)
    noted = {*state.news}
    run(loop, lambda: None)

    assert {Change("all", is_stored=is_stored), changes[-1]} == noted
    assert [False] == left([state])


def test_word_that_a_signal_handler_cuts_off(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change whose word to the loop was cut off by an exception is made with the next one."""
    states, loop = new_states(), make_loop()
    own = remembering(states, loop)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        states.tell(FORGET)
    monkeypatch.undo()
    states.tell(Change("op", "b"))
    run(loop, lambda: None)

    assert [False] == left(own)


def test_state_does_not_keep_its_loop(make_loop: MakeLoop) -> None:
    """When a loop is forgotten, states do not hold it."""
    states, loop = new_states(), asyncio.new_event_loop()
    opened(states, loop)
    loop.close()
    forgotten = ref(loop)
    del loop
    gc.collect()

    assert forgotten() is None
    assert {} == states._open


def test_states_of_a_guard_that_is_gone(make_loop: MakeLoop) -> None:
    """A loop keeps nothing of a guard that is gone."""
    states, loop = new_states(), make_loop()
    forgotten = ref(opened(states, loop))

    del states
    gc.collect()

    assert forgotten() is None


@pytest.mark.parametrize("is_joined", [False, True])
def test_loop_closed_with_a_load_up_is_let_go(*, is_joined: bool) -> None:
    """A loop that was closed over a load is garbage, however long the guard and the function live."""
    guard = Guard()

    @coalesce("menu-{menu_id}", guard=guard, ttl=60)
    async def load(menu_id: int) -> str:
        await asyncio.Event().wait()
        return "menu"

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # that tasks are left pending is what this is about

    async def leave_up() -> None:
        callers = [asyncio.create_task(load(7)) for _ in range(2 + is_joined)]
        for _ in range(3):
            await asyncio.sleep(0)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)

    loop.run_until_complete(leave_up())
    loop.close()
    forgotten = ref(loop)
    del loop
    gc.collect()

    assert forgotten() is None
    assert load.key(7) == "menu-7"  # it is still there, and so is the guard
    assert guard.enabled


def test_child_of_a_fork_leaves_the_parents_loops(make_loop: MakeLoop) -> None:
    """Where this process was forked, states of before are told nothing, and release their argument caches."""
    states, loop = new_states(), make_loop()
    own = remembering(states, loop)

    loops_module._disown_all()
    states.tell(FORGET)

    assert ([True], {}, {}) == (left(own), own[0].news, states._open)


CRITICAL = """
import asyncio, os, signal, sys, threading
from stampede_guard import Guard, _loops, coalesce

guard = Guard()

@coalesce("menu-{menu_id}", guard=guard, ttl=60)
async def load(menu_id):
    return menu_id

def lines_of_states(at_line):
    def trace(frame, event, _):
        if frame.f_code.co_filename != _loops.__file__:
            return None
        if event == "line":
            at_line()
        return trace
    return trace

async def use():
    await load(7)
    await load.invalidate(7)
    guard.enabled = True

other = asyncio.new_event_loop()
other.run_until_complete(load(8))
"""

SIGNAL = """
seen = []
def handler(*_):
    seen.append(None)
    guard.enabled = True
    guard.rollout = 1.0
signal.signal(signal.SIGUSR1, handler)
def interrupt():
    sys.settrace(None)
    signal.raise_signal(signal.SIGUSR1)
    sys.settrace(trace)
trace = lines_of_states(interrupt)
sys.settrace(trace)
asyncio.run(use())
sys.settrace(None)
print(len(seen) > 20)
"""

FORK = """
steps, resume = [], threading.Semaphore(0)
arrived = threading.Semaphore(0)
def stop():
    steps.append(None)
    arrived.release()
    resume.acquire()
def run():
    sys.settrace(lines_of_states(stop))
    asyncio.run(use())
    sys.settrace(None)
    done.append(None)
    arrived.release()
done = []
thread = threading.Thread(target=run)
thread.start()
failed = 0
while True:
    arrived.acquire()
    if done:
        break
    child = os.fork()
    if not child:
        signal.alarm(10)
        asyncio.run(use())
        os._exit(0)
    failed += os.waitpid(child, 0)[1] != 0
    resume.release()
thread.join()
print(failed == 0 and len(steps) > 20)
"""


@pytest.mark.parametrize("story", [SIGNAL, FORK], ids=["signal", "fork"])
def test_no_step_holds_what_others_need(story: str) -> None:
    """A signal handler that comes between any two lines, and a child forked there, can use the guard."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}  # Python's own about forks with threads
    command = [sys.executable, "-c", CRITICAL + story]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=40, env=environment, check=False)

    assert ("True", 0) == (ended.stdout.strip(), ended.returncode), ended.stderr


async def test_forget() -> None:
    """`forget` drops one op from memory and board, `forget_all` everything."""
    state, gate = state_of(asyncio.get_running_loop()), Gate()
    for op in "abc":
        state.memory.put(op, "soup", 60)
    calls = [asyncio.create_task(state.board.debounce(op, gate.passage)) for op in "abc"]
    await gate.arrivals(3)

    state.forget("a")
    one = len(state.memory), len(state.board.flights)
    state.forget_all()
    everything = len(state.memory), len(state.board.flights)
    gate.open()
    await asyncio.gather(*calls)

    assert ((2, 2), (0, 0)) == (one, everything)


async def test_invalidation_without_a_tier() -> None:
    """Where there is no store there is nothing to be confirmed."""
    assert state_of(asyncio.get_running_loop()).make(Change("op", "a", is_stored=True)) is None


async def test_invalidation_that_concerns_this_loop_alone(tier: Tier) -> None:
    """A change that the store need not know of is not sent."""
    state = state_of(asyncio.get_running_loop(), tier)

    assert [None] * 3 == [state.make(change) for change in (Change("op", "a"), Change("all"), Change("replaced"))]
    assert tier.pending.is_empty


@pytest.mark.parametrize("change", [Change("op", "a", is_stored=True), Change("all", is_stored=True)])
async def test_invalidation_is_announced_at_once(change: Change, tier: Tier) -> None:
    """What is invalidated is in quarantine before anything is awaited; the store's confirmation ends that."""
    state = state_of(asyncio.get_running_loop(), tier)

    confirmation = state.make(change)
    announced = tier.pending.is_empty

    assert confirmation is not None
    assert await confirmation.wait()
    assert not announced


# What is heard of other processes


class Menu:
    """A state with two ops in memory and on their way, of which the first has a tag."""

    def __init__(self) -> None:
        self.epochs = Epochs()
        self.memory = Memory(10, clock := ManualClock())
        self.clock = clock
        self.state = LoopState(asyncio.get_running_loop(), self.memory, None, self.epochs, Limiters())
        self.gate = Gate()
        self.flights = [self._launch("a", ("soups",)), self._launch("b", ())]
        self.before = self.taken()

    def _launch(self, op: str, tags: tuple[str, ...]) -> Flight[None]:
        self.memory.put(op, "soup", 60, tags)
        return self.state.board.launch(op, lambda _: self.gate.passage(), Counters(), "finish", tags=tags)

    def taken(self) -> list[tuple[int, ...]]:
        """Return the epochs as their flights take them."""
        return [self.epochs.current("a", ("soups",)), self.epochs.current("b")]

    async def left(self) -> tuple[str, str, list[bool]]:
        """Return which ops are remembered, which have a flight to join, and which of the flights may store."""
        may_store = [now == before for now, before in zip(self.taken(), self.before, strict=True)]
        remembered = "".join(op for op in "ab" if self.memory.get(op) is not None)
        joinable = "".join(self.state.board.flights)
        self.gate.open()
        for flight in self.flights:
            await wait_one(flight)
        return remembered, joinable, may_store


async def test_forget_tagged() -> None:
    """`forget_tagged` drops what has the tag from memory and board."""
    menu = Menu()

    menu.state.forget_tagged("soups")

    assert ("b", "b", [True, True]) == await menu.left()


@pytest.mark.parametrize(
    ("hear", "left"),
    [
        (lambda state: state.on_invalidated("b"), ("a", "a", [True, False])),
        (lambda state: state.on_invalidated("c"), ("ab", "ab", [True, True])),
        (lambda state: state.on_tag_invalidated("soups"), ("b", "b", [False, True])),
        (lambda state: state.on_tag_invalidated("salads"), ("ab", "ab", [True, True])),
        (lambda state: state.on_cleared(), ("", "", [False, False])),
        (lambda state: state.on_alive(1_003.0), ("ab", "ab", [True, True])),
        (lambda state: state.on_lost(), ("", "", [False, False])),
    ],
    ids=["op", "unknown op", "tag", "unknown tag", "everything", "a sound", "nothing"],
)
async def test_what_is_heard(hear: Callable[[LoopState], None], left: tuple[str, str, list[bool]]) -> None:
    """What was invalidated elsewhere is dropped here, joined no more, and what loads it may not be remembered."""
    menu = Menu()

    hear(menu.state)

    assert left == await menu.left()


async def test_what_the_server_saw_is_nothing_without_tracking() -> None:
    """A state that tracks nothing does not mind which keys changed."""
    menu = Menu()

    menu.state.on_keys_changed(KeysChanged(None))

    assert ("ab", "ab", [True, True]) == await menu.left()


async def test_silence_that_nobody_noticed() -> None:
    """When memory finds that the bus was silent for too long, loads under way may be neither remembered nor joined."""
    menu = Menu()
    menu.state.on_alive(1_003.0)

    menu.clock.advance(3)
    menu.memory.get("a")

    assert ("", "", [False, False]) == await menu.left()


async def test_silence_that_a_join_notices() -> None:
    """A caller who would join a load finds out that the trust is over, though memory was not asked for anything."""
    menu = Menu()
    menu.memory.clear()
    menu.state.on_alive(1_003.0)
    before = menu.state.joinable("a") is menu.flights[0]

    menu.clock.advance(3)
    after = menu.state.joinable("a")

    assert (True, None) == (before, after)
    assert ("", "", [False, False]) == await menu.left()


async def test_load_without_trust_is_joined_for_a_while() -> None:
    """A load whose overtaking no message would tell of is joined for as long as its value would be kept."""
    menu = Menu()
    menu.flights[0].joinable_until = menu.clock() + 1

    menu.clock.advance(0.999)
    before = menu.state.joinable("a") is menu.flights[0]
    menu.clock.advance(0.001)
    after = menu.state.joinable("a")

    assert (True, None) == (before, after)
    assert ("ab", "b", [True, True]) == await menu.left()
