"""The cache of L1 in both its forms: the reference in Python, and the compiled one where there is one."""

import asyncio
import gc
import inspect
import linecache
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any
from uuid import UUID
from weakref import ref

import fuzz_forms
import pytest
from arguments import Ending

from stampede_guard import Guard, GuardClosed, coalesce
from stampede_guard._memory.l1 import Memory
from stampede_guard._speed import forms as chosen
from stampede_guard._speed import pure
from stampede_guard.testing import Gate, ManualClock

FORMS = ("pure", "compiled")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> ModuleType:
    """Return the module of one form."""
    if request.param == "pure":
        return pure
    return pytest.importorskip("stampede_guard._speed._fast", reason="the compiled part was not built")


@pytest.fixture
async def validity(form: ModuleType, clock: ManualClock) -> Any:
    """Return the validity of a memory of the running loop."""
    return form.Validity(clock, ref(asyncio.get_running_loop()))


@pytest.fixture
def tally(form: ModuleType) -> Any:
    """Return where hits are counted."""
    return form.HitCounter()


@pytest.fixture
def cache(form: ModuleType, tally: Any, validity: Any) -> Any:
    """Return an argument cache with a capacity of three calls, which answers from the validity."""
    cache = form.ArgumentCache(tally, 3)
    cache.serve(validity)
    return cache


@pytest.fixture
def soup(form: ModuleType, clock: ManualClock) -> Any:
    """Return soup that is fresh for five seconds."""
    return form.Slot("soup", clock() + 5)


def test_both_forms_have_the_same_names() -> None:
    """What the reference offers is what the package uses, in one form or the other."""
    kinds = [name for name in pure.__all__ if name != "MISS"]

    assert kinds == [getattr(chosen, name).__name__ for name in kinds]
    assert chosen.is_compiled is (chosen.ArgumentCache is not pure.ArgumentCache)


@pytest.mark.parametrize("args", [(7,), ("en",), (None,), (), (7, "en"), (7, "en", None), (-(10**30),)])
async def test_answers_a_call_that_it_knows(form: ModuleType, cache: Any, tally: Any, soup: Any, args: Any) -> None:
    """Arguments of the plain kinds lead to what is held; it is counted, and marked as used."""
    before = (cache(*args), soup.used, tally.l1_hits)

    cache.note(args, soup, cache.validity)
    after = (cache(*args), cache(*args), soup.used, tally.l1_hits)

    assert (form.MISS, False, 0) == before
    assert ("soup", "soup", True, 2) == after


@pytest.mark.parametrize(
    "args", [(True,), (7.0,), (b"en",), ((7,),), (7, True), (object(),), (type("Id", (int,), {})(7),)]
)
async def test_other_arguments_are_not_its_business(form: ModuleType, cache: Any, soup: Any, args: Any) -> None:
    """What could be equal to something else, or change, is neither noted nor looked up."""
    cache.note((7,), soup, cache.validity)
    cache.note((7, 1), soup, cache.validity)
    cache.note(args, soup, cache.validity)

    assert form.MISS is cache(*args)
    assert 2 == len(cache)


async def test_one_and_true_are_two(form: ModuleType, cache: Any, soup: Any) -> None:
    """`1`, `1.0` and `True` are equal, and different arguments; so are one argument and a tuple of it."""
    cache.note((1,), soup, cache.validity)

    assert [form.MISS] * 4 == [cache(True), cache(1.0), cache("1"), cache(1, None)]  # noqa: FBT003  # that is the point


@pytest.mark.parametrize("value", [None, False, 0, "", ()])
async def test_any_value_is_an_answer(form: ModuleType, cache: Any, clock: ManualClock, value: object) -> None:
    """Nothing that a loader returns is taken for a miss."""
    cache.note((7,), form.Slot(value, clock() + 5), cache.validity)

    assert value == cache(7)


@pytest.mark.parametrize("bound", ["freshness", "trust"])
async def test_not_beyond_its_freshness(  # noqa: PLR0917  # fixtures
    bound: str, form: ModuleType, cache: Any, soup: Any, validity: Any, clock: ManualClock
) -> None:
    """From the instant at which an entry stops being fresh, or a message may have been missed, memory decides."""
    cache.note((7,), soup, cache.validity)
    if bound == "trust":
        validity.trusted_until = clock() + 1

    clock.advance(4.999 if bound == "freshness" else 0.999)
    before = cache(7)
    clock.advance(0.001)

    assert "soup" == before
    assert form.MISS is cache(7)


async def test_not_what_is_dead(form: ModuleType, cache: Any, soup: Any) -> None:
    """An entry that memory let go of is no answer, and keeps nothing alive."""
    cache.note((7,), soup, cache.validity)

    soup.clear()

    assert form.MISS is cache(7)
    assert (None, float("-inf")) == (soup.value, soup.fresh_until)


async def test_dropped(form: ModuleType, cache: Any, soup: Any, validity: Any) -> None:
    """An argument cache that was dropped knows nothing, until it serves again."""
    cache.note((7,), soup, cache.validity)

    cache.drop()
    dropped = (cache.validity, len(cache), cache(7))
    cache.serve(validity)
    cache.note((7,), soup, cache.validity)

    assert (None, 0, form.MISS) == dropped
    assert "soup" == cache(7)


async def test_never_more_than_there_is_room_for(form: ModuleType, cache: Any, soup: Any) -> None:
    """A full cache is emptied."""
    for number in range(3):
        cache.note((number,), soup, cache.validity)
    full = [cache(number) for number in range(3)]

    cache.note((3,), soup, cache.validity)

    assert ["soup"] * 3 == full
    assert [form.MISS] * 3 + ["soup"] == [cache(number) for number in range(4)]


def test_held_knows_its_window_and_its_birth(form: ModuleType) -> None:
    """What is held has no window and no known birth unless they are given, and neither when it is dead."""
    plain, whole = form.Slot("soup", 5.0), form.Slot("soup", 5.0, None, 9, 1.5)

    seen = [(held.stale_until, held.born_at) for held in (plain, whole)]
    whole.clear()

    assert [(5.0, float("-inf")), (9.0, 1.5)] == seen
    assert [float("-inf")] * 3 == [whole.fresh_until, whole.stale_until, whole.born_at]


async def test_old_is_no_answer(form: ModuleType, cache: Any, clock: ManualClock) -> None:
    """What is past its freshness is a miss, although its window is open; and so is what is made old."""
    cache.note((7,), form.Slot("soup", clock(), None, clock() + 5), cache.validity)
    softened = form.Slot("salad", clock() + 5, None, clock() + 9)
    cache.note((8,), softened, cache.validity)
    before = cache(8)
    softened.fresh_until = clock()

    assert (form.MISS, "salad", form.MISS) == (cache(7), before, cache(8))


def test_held_knows_its_generation(form: ModuleType) -> None:
    """What is held tells whose it is, also when it is dead."""
    generation = object()
    held = form.Slot("soup", 5.0, generation)
    held.clear()

    assert generation is held.generation
    assert form.Slot("soup", 5.0).generation is None


def test_silent_in_another_loop(form: ModuleType, tally: Any, clock: ManualClock) -> None:
    """It answers in the loop of its validity, not in another, and not outside of any."""
    held = form.Slot("soup", clock() + 5)
    cache = form.ArgumentCache(tally, 3)

    async def look() -> Any:
        return cache(7)

    with asyncio.Runner() as mine, asyncio.Runner() as other:
        cache.serve(form.Validity(clock, ref(mine.get_loop())))
        cache.note((7,), held, cache.validity)
        answers = [mine.run(look()), other.run(look()), cache(7), mine.run(look())]
        cache.serve(form.Validity(clock, None))
        cache.note((7,), held, cache.validity)
        answers.append(mine.run(look()))

    assert ["soup", form.MISS, form.MISS, "soup", form.MISS] == answers


async def test_real_time(form: ModuleType, cache: Any) -> None:
    """By the real clock, what is fresh for long is answered, and what is not fresh any more is not."""
    cache.serve(form.Validity(time.monotonic, ref(asyncio.get_running_loop())))
    cache.note((1,), form.Slot("soup", time.monotonic() + 60), cache.validity)
    cache.note((2,), form.Slot("salad", time.monotonic()), cache.validity)

    assert ("soup", form.MISS) == (cache(1), cache(2))


async def test_clock_that_fails(form: ModuleType, tally: Any, soup: Any) -> None:
    """An error of the clock is an error."""

    def broken() -> float:
        raise OSError

    cache = form.ArgumentCache(tally, 3)
    cache.serve(form.Validity(broken, ref(asyncio.get_running_loop())))
    cache.note((7,), soup, cache.validity)

    with pytest.raises(OSError):  # noqa: PT011  # it has no text
        cache(7)


async def test_no_cycle_is_left(form: ModuleType, tally: Any, validity: Any, clock: ManualClock) -> None:
    """Values that lead back to their cache are found by the garbage collector."""

    class Menu:
        cache: Any = None

    menu = Menu()
    cache = form.ArgumentCache(tally, 3)
    cache.serve(validity)
    cache.note((7,), form.Slot(menu, clock() + 5), cache.validity)
    menu.cache = cache
    gone = ref(menu)

    del menu, cache
    gc.collect()

    assert gone() is None


async def test_not_what_another_era_holds(form: ModuleType, cache: Any, soup: Any, clock: ManualClock) -> None:
    """What is held by the memory of another loop, whose thread lost the race for the cache, is not noted."""
    other = form.Validity(clock, ref(asyncio.get_running_loop()))

    cache.note((7,), soup, other)
    noted = len(cache)
    cache.drop()
    cache.note((7,), soup, other)

    assert (0, 0) == (noted, len(cache))


async def test_no_answer_of_the_era_before(form: ModuleType, cache: Any, clock: ManualClock) -> None:
    """What is noted while the values of an validity that is over are let go of does not survive it."""
    soup, before = form.Slot("soup", clock() + 5), cache.validity

    class Menu:
        def __del__(self) -> None:
            cache.note((9,), soup, before)

    cache.note((7,), form.Slot(Menu(), clock() + 5), before)
    cache.serve(form.Validity(clock, ref(asyncio.get_running_loop())))

    assert form.MISS is cache(9)


async def test_clock_that_ends_the_era(form: ModuleType, tally: Any) -> None:
    """A look whose clock has the cache forget its validity, which nothing else keeps alive, ends well."""
    cache = form.ArgumentCache(tally, 3)

    class Clock:
        def __call__(self) -> float:
            cache.drop()
            gc.collect()
            return 1.0

    cache.serve(form.Validity(Clock(), ref(asyncio.get_running_loop())))
    cache.note((7,), form.Slot("soup", 5.0), cache.validity)

    assert "soup" == cache(7)
    assert form.MISS is cache(7)


@pytest.fixture
def bursting() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Return what makes garbage that does something when it is collected, which the next allocation sets off."""
    was, thresholds = gc.isenabled(), gc.get_threshold()

    def burst(do: Callable[[], object]) -> None:
        gc.disable()
        gc.set_threshold(1)
        garbage: list[object] = [Ending(do)]
        garbage.append(garbage)
        spare = [[] for _ in range(100)]  # more than the threshold
        del garbage, spare
        gc.enable()

    yield burst
    gc.set_threshold(*thresholds)
    if not was:
        gc.disable()


async def test_entry_is_dead_before_its_value_is(form: ModuleType, cache: Any, clock: ManualClock) -> None:
    """A destructor that looks at the entry it was held by, through the cache or not, finds it dead."""
    seen: list[Any] = []
    held: list[Any] = []
    held.append(form.Slot(Ending(lambda: seen.append((held[0].fresh_until, held[0].value, cache(7)))), clock() + 5))
    cache.note((7,), held[0], cache.validity)

    held[0].clear()

    assert [(float("-inf"), None, form.MISS)] == [(until, value, answer) for until, value, answer in seen]


async def test_look_whose_key_sets_off_a_collection(
    form: ModuleType, cache: Any, clock: ManualClock, bursting: Callable[[Callable[[], object]], None]
) -> None:
    """A destructor that runs while a key is made may replace the validity, and the cache answers from the new one."""
    args, loop = tuple(range(30)), ref(asyncio.get_running_loop())  # a tuple so long is always allocated anew
    salad = form.Slot("salad", clock() + 5)
    cache.serve(form.Validity(clock, loop))
    cache.note(args, form.Slot("soup", clock() + 5), cache.validity)

    def change() -> None:
        cache.serve(form.Validity(clock, loop))
        cache.note(args, salad, cache.validity)

    bursting(change)
    answer = cache(*args)

    assert answer in {"soup", "salad"}
    gc.collect()
    assert "salad" == cache(*args)


async def test_note_whose_room_is_made_by_a_destructor(form: ModuleType, cache: Any, clock: ManualClock) -> None:
    """An answer is not noted if forgetting the old ones has brought another validity, which it is not from."""
    soup, validity = form.Slot("soup", clock() + 5), cache.validity
    other = form.Validity(clock, ref(asyncio.get_running_loop()))
    for number in range(3):
        cache.note((number,), form.Slot(Ending(lambda: cache.serve(other)), clock() + 5), validity)

    cache.note((7,), soup, validity)

    assert other is cache.validity
    assert (form.MISS, 0) == (cache(7), len(cache))


async def test_drop_whose_values_have_it_serve_again(form: ModuleType, cache: Any, clock: ManualClock) -> None:
    """What a destructor notes while the cache is dropped belongs to the validity that it has the cache serve."""
    soup = form.Slot("soup", clock() + 5)
    other = form.Validity(clock, ref(asyncio.get_running_loop()))

    def serve_again() -> None:
        cache.serve(other)
        cache.note((9,), soup, other)

    cache.note((7,), form.Slot(Ending(serve_again), clock() + 5), cache.validity)
    cache.drop()

    assert (other, "soup", form.MISS) == (cache.validity, cache(9), cache(7))


async def test_clock_of_a_loop_that_does_not_run_is_not_asked(form: ModuleType, tally: Any, soup: Any) -> None:
    """Outside of its loop an argument cache asks no clock, and so cannot fail by it."""
    asked: list[None] = []

    class Clock:
        def __call__(self) -> float:
            asked.append(None)
            raise OSError

    cache = form.ArgumentCache(tally, 3)
    cache.serve(form.Validity(Clock(), None))
    cache.note((7,), soup, cache.validity)

    assert form.MISS is cache(7)
    assert [] == asked


async def test_keywords_are_refused(form: ModuleType, cache: Any, tally: Any) -> None:
    """The compiled form takes what the reference takes, by position alone."""
    calls = (
        lambda: cache(7, menu_id=7),
        lambda: form.Slot(value=7, fresh_until=1.0),
        lambda: form.Validity(time.monotonic, loop=None),
        lambda: form.ArgumentCache(tally, capacity=3),
        lambda: form.Validity(time.monotonic),
        lambda: form.ArgumentCache(tally),
        lambda: form.Slot("soup"),
        lambda: form.Slot("soup", 1.0, None, None, -1.0, 7),
    )

    for call in calls:
        with pytest.raises(TypeError):
            call()


def test_values_within_values_are_let_go(form: ModuleType) -> None:
    """A chain of entries, or of callees, is let go of however long it is."""
    held, callee = form.Slot(None, 0.0), form.FunctionProxy()
    outer = callee
    for _ in range(50_000):
        held = form.Slot(held, 0.0)
        outer = form.FunctionProxy()
        outer._call = callee
        callee = outer
    gone = ref(Ending(bool))

    del held, callee, outer
    gc.collect()

    assert gone() is None


def test_callee_that_calls_itself(form: ModuleType) -> None:
    """A circle of callees is a `RecursionError`, as any other."""
    callee = form.FunctionProxy()
    callee._call = callee

    with pytest.raises(RecursionError):
        callee()
    del callee._call  # or it holds itself


def test_callee_whose_function_is_replaced_while_it_runs(form: ModuleType) -> None:
    """What is being called stays, although another takes its place meanwhile."""
    callee = form.FunctionProxy()

    class Replacing:
        def __init__(self) -> None:
            self.name = "first"

        def __call__(self) -> str:
            callee._call = lambda: "second"
            gc.collect()
            return self.name

    callee._call = Replacing()

    assert ("first", "second") == (callee(), callee())


def test_bound_anew(form: ModuleType) -> None:
    """A bound one that is bound again has the new receiver in place of the old; bound to `None` it is free."""

    class Named(form.FunctionProxy):
        pass

    named = Named()
    with pytest.raises(AttributeError):
        named.bound_to(1)
    named._call = lambda *args: args
    bound = named.bound_to(1)

    assert ((1, 7), (2, 7), (7,)) == (bound(7), bound.bound_to(2)(7), bound.bound_to(None)(7))


async def test_both_forms_agree_in_all_that_can_be_seen() -> None:
    """Random steps of any kind, with destructors and clocks that take steps of their own, end alike in both forms."""
    fast = pytest.importorskip("stampede_guard._speed._fast", reason="the compiled part was not built")

    assert [] == [parted for seed in range(40) if (parted := fuzz_forms.difference(fast, seed)) is not None]


async def test_compiled_form_under_constant_collection() -> None:
    """The compiled form survives a garbage collection at nearly each of its allocations."""
    fast = pytest.importorskip("stampede_guard._speed._fast", reason="the compiled part was not built")

    for seed in range(20):
        fuzz_forms.collecting(fast, seed)


def test_callee_whose_class_says_how_it_is_called(form: ModuleType) -> None:
    """A class that is derived from it and has a call of its own is called that way."""

    class Shouting(form.FunctionProxy):
        def __call__(self, text: str) -> str:
            return text.upper()

    callee = Shouting()
    callee._call = str

    assert "SOUP" == callee("soup")


def test_callee_is_called_like_its_function(form: ModuleType) -> None:
    """Arguments and errors pass, in a class that is derived from it too; what holds no function says so."""

    class Named(form.FunctionProxy):
        pass

    def function(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    callee = Named()
    with pytest.raises((TypeError, AttributeError)):
        callee()
    callee._call = function

    assert ((1, 2), {"c": 3}) == callee(1, 2, c=3)
    assert ((), {}) == callee()


def test_callee_binds_like_its_function(form: ModuleType) -> None:
    """Taken from an instance it has that as its first argument, shares its attributes, and stays bound."""

    class Named(form.FunctionProxy):
        pass

    def function(*args: Any) -> Any:
        return args

    class Menus:
        load = Named()
        bound: Any = None

    Menus.load._call = function
    Menus.load.note = "soup"
    menus, other = Menus(), Menus()
    Menus.bound = menus.load

    assert Menus.load is Menus.__dict__["load"]
    assert (menus, 7) == menus.load(7)
    assert ("soup", menus, None) == (menus.load.note, menus.load._receiver, Menus.load._receiver)
    assert (menus, 7) == other.bound(7)


@pytest.mark.parametrize(
    ("asked", "form_there", "is_compiled"), [("", 0, True), ("1", 0, False), ("", 1, False), ("", None, False)]
)
def test_which_form_is_used(
    asked: str, form_there: int | None, monkeypatch: pytest.MonkeyPatch, *, is_compiled: bool
) -> None:
    """The compiled one, unless it was refused, is another release's, or there is none."""
    compiled = None
    if form_there is not None:
        compiled = ModuleType("_fast")
        compiled.__dict__.update({name: object() for name in pure.__all__}, FORM=pure.FORM + form_there)
    monkeypatch.setitem(sys.modules, "stampede_guard._speed._fast", compiled)
    monkeypatch.setenv("STAMPEDE_GUARD_PURE", asked)
    spec = find_spec("stampede_guard._speed.forms")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)

    assert is_compiled is module.is_compiled
    assert is_compiled is not any(getattr(module, name) is getattr(pure, name) for name in pure.__all__)


# In the guard


@pytest.fixture
async def guard(clock: ManualClock) -> AsyncIterator[Guard]:
    """Return a guard with room for three entries."""
    async with Guard(maxsize=3, clock=clock) as guard:
        yield guard


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the caches of functions that are decorated from now on."""
    made: list[Any] = []
    module = import_module("stampede_guard._decorators.coalesce")

    def make(*args: Any) -> Any:
        made.append(chosen.ArgumentCache(*args))
        return made[-1]

    monkeypatch.setattr(module, "ArgumentCache", make)
    return made


async def test_third_call_never_reaches_memory(guard: Guard, caches: list[Any]) -> None:
    """The first call loads, the second is answered by memory, the third by the cache; all are counted."""

    @coalesce("menu-{menu_id}-{lang}", ttl=60, guard=guard)
    async def load(menu_id: int, lang: str = "en") -> str:
        return f"{menu_id} in {lang}"

    answers = [await load(7), await load(7)]
    known = len(caches[0])
    answers += [await load(7), await load(menu_id=7), await load(7, lang="en"), await load(7, "fr")]

    assert ["7 in en"] * 5 + ["7 in fr"] == answers
    assert 1 == known
    assert (2, 4, 6) == (guard.stats().loads, guard.stats().l1_hits, guard.stats().calls)


@pytest.mark.parametrize(("menu_id", "known"), [(7, 1), ("7" * 300, 0), (7.5, 0), (UUID(int=7), 0)])
@pytest.mark.parametrize(
    "options", [{}, {"ttl": 60, "isolate": True}, {"ttl": 60, "stale": 60}], ids=["alone", "isolated", "stale"]
)
async def test_flight_that_is_found_by_arguments(
    options: dict[str, Any], menu_id: object, known: int, guard: Guard, caches: list[Any]
) -> None:
    """Callers of a flight are led to it by their arguments from the third on, if these are plain and short."""
    gate = Gate()

    @coalesce("menu-{menu_id}", guard=guard, **options)
    async def load(menu_id: object) -> str:
        await gate.passage()
        return f"soup {menu_id}"

    lengths = []
    tasks = []
    for _ in range(4):
        tasks.append(asyncio.create_task(load(menu_id)))
        await asyncio.sleep(0)
        lengths.append(len(caches[-1]))
    gate.open()

    assert [f"soup {menu_id}"] * 4 == [await task for task in tasks]
    assert [0, known, known, known] == lengths
    assert (1, 3, 0) == (guard.stats().executions, guard.stats().joins, guard.stats().l1_hits)


async def test_evicted_late_if_only_the_front_used_it(guard: Guard) -> None:
    """Hits in the cache count as use: what is hit there outlives what is not, although memory did not see it."""
    loads: list[int] = []

    @coalesce("menu-{menu_id}", ttl=60, guard=guard)
    async def load(menu_id: int) -> int:
        loads.append(menu_id)
        return menu_id

    await load(1)
    await load(1)
    for other in range(2, 9):
        await load(1)  # by the cache alone
        await load(other)

    assert [1, *range(2, 9)] == loads


async def test_all_used_and_yet_one_has_to_go(clock: ManualClock) -> None:
    """When an argument cache has used more than an eviction looks at, one of them goes all the same."""
    memory = Memory(40, clock, asyncio.get_running_loop())
    for number in range(40):
        memory.put(f"menu-{number}", number, 60)
        held = memory.get(f"menu-{number}")
        assert held is not None
        held.used = True

    memory.put("menu-40", 40, 60)

    assert 40 == len(memory)
    assert "menu-40" in memory


@pytest.mark.parametrize("way", ["invalidate", "clear", "expiry", "eviction"])
async def test_front_keeps_nothing_that_memory_let_go(guard: Guard, clock: ManualClock, way: str) -> None:
    """A value that was invalidated, cleared, evicted, or found too old is garbage, though the cache knew it."""

    class Menu:
        pass

    @coalesce("menu-{menu_id}", ttl=60, guard=guard)
    async def load(menu_id: int) -> Menu:  # each another
        return Menu()

    gone = ref(await load(1))
    await load(1)
    await load(1)
    if way == "invalidate":
        await load.invalidate(1)
    elif way == "clear":
        await guard.clear()
    elif way == "expiry":
        clock.advance(70)
        load.peek(1)
    else:
        for other in (2, 2, 3, 3, 4, 4, 5, 5):
            await load(other)
    await asyncio.sleep(0)  # the flight's task lets go of it in the next iteration
    gc.collect()

    assert gone() is None


def test_front_keeps_nothing_of_a_loop_that_is_gone() -> None:
    """When its event loop is gone, so are the values; the next loop has a memory of its own."""

    class Menu:
        pass

    @coalesce(ttl=60, guard=Guard())
    async def load(menu_id: int) -> Menu:  # each another
        return Menu()

    async def thrice() -> "ref[Menu]":
        await load(7)
        await load(7)
        return ref(await load(7))

    first = asyncio.run(thrice())
    second = asyncio.run(thrice())
    gc.collect()

    assert (None, None) == (first(), second())
    assert (2, 4) == (load.guard.stats().loads, load.guard.stats().l1_hits)


def test_two_loops_by_turns() -> None:
    """While one loop has the cache, another does without, and each remembers what it loaded itself."""

    @coalesce(ttl=60, guard=Guard())
    async def load(menu_id: int) -> object:  # each another
        return object()

    async def call() -> object:
        return await load(7)

    with asyncio.Runner() as one, asyncio.Runner() as other:
        answers = [runner.run(call()) for _ in range(4) for runner in (one, other)]

    assert 2 == len(set(answers))
    assert [answers[0], answers[1]] * 4 == answers


async def test_closed_guard_is_closed_for_the_front_too() -> None:
    """After the block, a call says that the guard is not open, as if it had never been answered before."""
    from stampede_guard.testing import FaultStore  # noqa: PLC0415  # needed here alone

    clock = ManualClock()
    guard = Guard(lambda: FaultStore(clock), clock=clock)

    @coalesce("menu-{menu_id}", ttl=60, guard=guard)
    async def load(menu_id: int) -> int:
        return menu_id

    async with guard:
        answers = [await load(7) for _ in range(3)]

    assert [7, 7, 7] == answers
    with pytest.raises(GuardClosed):
        await load(7)


@pytest.mark.parametrize("is_reopened", [False, True])
async def test_closed_guard_is_closed_whoever_holds_on_to_it(is_reopened: bool) -> None:
    """An argument cache is emptied with the block, even if a load that was left behind keeps the memory alive."""
    from stampede_guard.testing import FaultStore  # noqa: PLC0415  # needed here alone

    clock = ManualClock()
    guard = Guard(lambda: FaultStore(clock), clock=clock)
    menus = {7: "soup"}

    @coalesce("menu-{menu_id}", ttl=60, guard=guard)
    async def load(menu_id: int) -> str:
        return menus[menu_id]

    async with guard:
        left_behind = guard._states.here()
        answers = [await load(7) for _ in range(3)]

    menus[7] = "salad"
    if is_reopened:
        async with guard:
            answers += [await load(7) for _ in range(3)]
    with pytest.raises(GuardClosed):
        await load(7)

    assert left_behind is not None
    assert ["soup"] * 3 + ["salad"] * 3 * is_reopened == answers


async def test_isolated_answers_are_copies_each_time(guard: Guard) -> None:
    """What is kept for another operation as bytes is never handed out by an argument cache as it is."""

    @coalesce("menu-{menu_id}", ttl=60, guard=guard)
    async def load(menu_id: int) -> list[int]:
        return [menu_id]

    await guard.fetch("menu-7", lambda: load.bypass(7), ttl=60, isolate=True, returns=list[int])
    answers = [await load(7) for _ in range(3)]

    assert [[7]] * 3 == answers
    assert 3 == len({id(answer) for answer in answers})


async def test_still_a_function_to_whoever_looks(guard: Guard) -> None:
    """A call makes a coroutine with the function's name; a wrong call fails at once; a traceback shows its source."""

    @coalesce("menu-{menu_id}-{lang}", ttl=60, guard=guard)
    async def load(menu_id: int, *, lang: str = "en") -> str:
        message = f"no menu {menu_id} in {lang}"
        raise LookupError(message)

    coroutine = load(7)

    assert inspect.iscoroutine(coroutine)
    assert "load" == coroutine.__name__
    assert load.__qualname__ == coroutine.__qualname__
    with pytest.raises(LookupError) as caught:
        await coroutine
    assert "await _sg_wait(_sg_answer, _sg_timeout)" in "".join(traceback.format_exception(caught.value))
    call: Any = load
    with pytest.raises(TypeError, match=r"load\(\) missing 1 required positional argument: 'menu_id'"):
        call()


def test_source_is_forgotten_with_its_function() -> None:
    """A function that is decorated again and again leaves nothing behind."""
    gc.collect()
    before = sum(name.startswith("<stampede_guard ") for name in linecache.cache)

    for _ in range(5):

        @coalesce("menu-{menu_id}", ttl=60, guard=Guard())
        async def load(menu_id: int) -> int:
            return menu_id

        del load
        gc.collect()

    assert before == sum(name.startswith("<stampede_guard ") for name in linecache.cache)
