import asyncio
import functools
import gc
import importlib
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import pytest

from stampede_guard import Coalesced, Guard, InvalidKey, coalesce
from stampede_guard._keys.spec import compile_key
from stampede_guard._operations import registry
from stampede_guard._operations.operation import Operation
from stampede_guard._operations.policy import Policy
from stampede_guard._operations.registry import Registry
from stampede_guard._stats import Counters
from stampede_guard.testing import Gate


@pytest.fixture
def guard() -> Guard:
    """Return a guard of the test's own."""
    return Guard()


def closure(
    guard: Guard, answer: str, key: str | Callable[..., str] | None = "closure-{item}"
) -> Coalesced[[int], str]:
    """Return a coalesced function that takes its answer from around it."""

    @coalesce(key=key, guard=guard, ttl=600)
    async def load(item: int) -> str:
        return answer

    return load


def plain(guard: Guard, key: str | None = "plain-{item}") -> Coalesced[[int], int]:
    """Return a coalesced function that depends on its arguments alone."""

    @coalesce(key=key, guard=guard, ttl=600)
    async def load(item: int) -> int:
        return item

    return load


def held(guard: Guard) -> Coalesced[[int, Gate], int]:
    """Return a coalesced function that waits at a gate."""

    @coalesce("held-{item}", guard=guard, ttl=5, ignore=("gate",))
    async def load(item: int, gate: Gate) -> int:
        await gate.passage()
        return item

    return load


@pytest.mark.parametrize(("template", "ignore"), [("item-{item}", ()), ("item-top", ("item",))], ids=["equal", "alike"])
def test_two_functions_with_one_template(template: str, ignore: tuple[str, ...], guard: Guard) -> None:
    """A template that has an op in common with another function's is refused, with both names."""

    @coalesce("item-{item}", guard=guard)
    async def first(item: str) -> str: ...

    with pytest.raises(InvalidKey, match=r"\.second and .*\.first would share answers.*Change a template"):

        @coalesce(template, guard=guard, ignore=ignore)
        async def second(item: str) -> str: ...


def test_overriding_method_with_the_same_template(guard: Guard) -> None:
    """An overriding method and the overridden one are two functions, which one instance could call both."""

    class Base:
        @coalesce("item-{item}", guard=guard)
        async def load(self, item: int) -> str: ...

    with pytest.raises(InvalidKey, match=r"Sub\.load and .*Base\.load would share answers"):

        class Sub(Base):  # pyright: ignore[reportUnusedClass]  # defining it is the test
            @coalesce("item-{item}", guard=guard)
            async def load(self, item: int) -> str: ...  # pyright: ignore[reportIncompatibleVariableOverride]  # its `self` is a Sub


def test_refused_function_leaves_no_claim(guard: Guard) -> None:
    """What was refused stands in nobody's way, and the function that was there stays."""
    first = plain(guard, "item-{item}")
    for _ in range(2):
        with pytest.raises(InvalidKey, match=r"second and .*load would share answers"):

            @coalesce("item-{item}", guard=guard)
            async def second(item: int) -> str: ...

    assert [first._operation] == list(guard._registry.operations())


def test_guards_do_not_share(guard: Guard) -> None:
    """Functions of two guards may have one template, for nothing is shared between guards."""
    other = Guard()
    plain(guard)

    assert plain(other).guard is other


@pytest.mark.parametrize("is_cycle", [False, True], ids=["gone", "garbage"])
def test_dead_function_frees_its_ops(is_cycle: bool, guard: Guard) -> None:
    """A function that is gone claims nothing, nor does one that is garbage, and only waits for its collection."""
    first: Any = plain(guard, "item-{item}")
    if is_cycle:
        first.itself = first
    del first
    if not is_cycle:
        gc.collect()

    @coalesce("item-{item}", guard=guard)
    async def second(item: int) -> str: ...

    assert [second._operation] == list(guard._registry.operations())


def test_young_garbage_takes_no_full_collection(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that a request defines, and leaves, is found at the next by a look at the youngest objects alone."""
    collected: list[int] = []
    collect = gc.collect

    def note(generation: int) -> int:
        collected.append(generation)
        return collect(generation)

    def request(answer: str) -> None:
        class Menus:  # pyright: ignore[reportUnusedClass]  # defining it is the test
            @coalesce("menu-{item}", guard=guard, ignore=("self",))
            async def load(self, item: int) -> str:
                return answer

    monkeypatch.setattr(gc, "collect", note)
    gc.disable()  # else what is left may grow older between the two
    try:
        request("soup")
        request("salad")
    finally:
        gc.enable()

    assert [0] == collected


class Module:
    """A module whose source is run, once or more often.

    Args:
        guard: What its functions are decorated with, beside the decorator `route`, which keeps what it gets.
        name: Its name.
    """

    def __init__(self, guard: Guard, name: str = "menus") -> None:
        self.routes: list[Any] = []
        self.loads = 0
        self.names: dict[str, Any] = {
            "__name__": name,
            "cached": functools.partial(coalesce, guard=guard, ttl=600),
            "route": self.routes.append,
            "module": self,
            "timed": timed,
        }

    def run(self, source: str, file: str = "/srv/menus.py") -> Any:
        """Run *source*, which is compiled anew, and return what it calls `load`."""
        exec(compile(source, file, "exec"), self.names)  # noqa: S102  # a module's source is run
        return self.names.get("load")


def timed(function: Any) -> Any:
    """Wrap *function*, as other people's decorators do."""

    @functools.wraps(function)
    async def wrapper(*args: Any) -> Any:
        return await function(*args)

    return wrapper


LOAD = """
@cached()
async def load(item):
    module.loads += 1
    return module.loads
"""
TWO = """
@route
@cached()
async def _(item):
    return "a menu"

@route
@cached()
async def _(item):
    return "its hours"
"""


async def test_definition_that_is_run_again(guard: Guard) -> None:
    """A function inside a function is one definition, however often it is run: its answers stay, and count together."""
    first = plain(guard)
    await first(7)
    second = plain(guard)
    entry = second.peek(7)
    await second(7)

    assert entry is not None
    assert [second._operation] == list(guard._registry.operations())
    assert (1, 1) == (
        guard.stats().operations["plain-{item}"].loads,
        guard.stats().operations["plain-{item}"].l1_hits,
    )


async def test_definition_that_is_run_again_joins(guard: Guard) -> None:
    """What a definition has under way is joined by those who run it again."""
    gate = Gate()
    call = asyncio.create_task(held(guard)(7, gate))
    await gate.arrivals(1)
    again = held(guard)
    other = asyncio.create_task(again(7, gate))
    await asyncio.sleep(0)
    gate.open()

    assert (7, 7) == (await call, await other)
    assert again.peek(7, gate) is not None


@pytest.mark.parametrize(
    "anew", [LOAD, "# edited\n" + LOAD, LOAD.replace("@cached()", "@cached()\n@timed")], ids=["same", "edited", "timed"]
)
async def test_reloaded_module(anew: str, guard: Guard) -> None:
    """A module that is loaded again defines its functions anew, while the old ones are in use: nothing is shared."""
    other = plain(guard)
    await other(7)
    module = Module(guard)
    first = module.run(LOAD)
    await first(7)
    second = module.run(anew)
    before = second.peek(7)

    assert before is None
    assert 2 == await second(7)
    assert 2 == await first(7) == await second(7)  # from now on they share: both are in use
    assert other.peek(7) is not None
    assert 2 == module.loads == guard.stats().operations["menus.load"].loads


async def test_both_definitions_are_forgotten_with_the_third(guard: Guard) -> None:
    """An old function that is still in use caches on, and what it stored is as old as what its successor did."""
    module = Module(guard)
    first = module.run(LOAD)
    second = module.run(LOAD)
    await first(7)
    await second(8)
    third = module.run(LOAD)

    assert (None, None) == (third.peek(7), third.peek(8))


async def test_load_of_a_reloaded_module_is_not_stored(guard: Guard) -> None:
    """What an old function still loads answers its callers; the new one's callers do not join it."""
    gates = Gate(), Gate()
    module = Module(guard)
    module.names["gates"] = iter(gates)
    source = LOAD.replace("return", "await next(gates).passage()\n    return").replace("module.loads +=", "loads =")
    source = source.replace("module.loads", "module")
    call = asyncio.create_task(module.run(source)(7))
    await gates[0].arrivals(1)
    anew = module.run(source)
    other = asyncio.create_task(anew(7))
    await gates[1].arrivals(1)
    gates[0].open()
    await call

    assert anew.peek(7) is None
    gates[1].open()
    await other
    assert anew.peek(7) is not None


@pytest.mark.parametrize("edit", ["", "# edited\n"])
async def test_importlib_reload(edit: str, guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that `importlib.reload` executes again works, edited or not, with closures that were bound in it."""
    source = """
from stampede_guard import coalesce
from tests_of_the_registry import guard

def made(answer):
    @coalesce("bound-{item}", guard=guard, ttl=600)
    async def load(item):
        return answer
    return load

load = made("{}")
"""
    monkeypatch.setitem(sys.modules, "tests_of_the_registry", SimpleNamespace(guard=guard))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "reloaded_menus.py"
    file.write_text(source.replace("{}", "old"))
    module: Any = importlib.import_module("reloaded_menus")
    monkeypatch.delitem(sys.modules, "reloaded_menus")
    monkeypatch.setitem(sys.modules, "reloaded_menus", module)
    old = module.load
    await old(7)
    file.write_text(edit + source.replace("{}", "new"))
    importlib.invalidate_caches()
    importlib.reload(module)

    assert "new" == await module.load(7)
    assert old is not module.load


@pytest.mark.parametrize(
    ("source", "count"),
    [
        (TWO, 1),
        (TWO.replace("@cached()", "@cached('x-{item}')"), 1),
        (TWO.replace("@cached()", "@cached()\n@timed"), 1),
        (TWO.replace("@cached()", "@cached('one-{item}')", 1), 2),
        (TWO.replace("@cached()", "@cached(key=lambda item: f'one-{item}')"), 2),
        ("if True:\n" + TWO.replace("\n", "\n    "), 1),
        ("class Menus:\n" + TWO.replace("item", "self").replace("\n", "\n    "), 1),
        ("def define():\n" + TWO.replace("\n", "\n    ") + "\ndefine()", 1),
    ],
    ids=["derived", "template", "wrapped", "templates", "key functions", "block", "class", "function"],
)
def test_two_functions_of_one_name(source: str, count: int, guard: Guard) -> None:
    """Two living functions that one run of a module calls the same are refused, unless their keys tell them apart."""
    module = Module(guard)
    if count == 2:
        module.run(source)
    else:
        with pytest.raises(InvalidKey, match=r"menus\..*_ is defined.*while an earlier.*Rename one, or give them key"):
            module.run(source)

    assert count == len(module.routes)


def test_reloaded_module_in_another_loop(guard: Guard) -> None:
    """A definition is over in all event loops at once."""
    module = Module(guard)
    with asyncio.Runner() as one, asyncio.Runner() as other:
        load = module.run(LOAD)
        one.run(load(7))
        other.run(load(7))
        anew = module.run(LOAD)

        assert (3, 4) == (one.run(anew(7)), other.run(anew(7)))


def test_two_functions_of_one_name_in_a_cell(guard: Guard) -> None:
    """A notebook's cell may be run again, edited, with a decorator from another cell; but no cell twice the same."""
    module = Module(guard, "__main__")
    module.run("shared = lambda function: route(cached()(function))", "<cell 1>")
    cell = "@shared\nasync def _(item): ...\n"
    for number in (2, 3):
        module.run(cell, f"<cell {number}>")
    with pytest.raises(InvalidKey, match="_ is defined"):
        module.run(cell + cell, "<cell 4>")

    assert 3 == len(module.routes)


def test_two_modules_of_one_name(guard: Guard) -> None:
    """Two files that are loaded under one name are two modules."""
    first = Module(guard).run(LOAD, "/srv/one/plugin.py")
    with pytest.raises(InvalidKey, match=r"menus\.load is defined"):
        Module(guard).run(LOAD, "/srv/two/plugin.py")
    with pytest.raises(InvalidKey, match=r"menus\.load is defined"):
        Module(guard).run(LOAD, "<string>")

    assert first.guard is guard


def test_one_file_under_two_names(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is imported by its own name, too, is one module: `__main__` and the module do not collide."""
    main = ModuleType("__main__")
    main.__file__ = "/srv/menus.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    first = Module(guard, "__main__").run(LOAD)
    second = Module(guard, "menus").run(LOAD)

    assert "menus.load(7)" == first.key(7) == second.key(7)


def test_function_of_another_module_decorated_again(guard: Guard) -> None:
    """What is decorated elsewhere than where it is defined may be reloaded too."""
    module = Module(guard)
    source = LOAD.replace("@cached()", "")
    first, second = [coalesce(guard=guard)(module.run(source)) for _ in range(2)]

    assert first.key(7) == second.key(7)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"key": "x-{a}", "ignore": ("b",)}, {"key": "x-{b}", "ignore": ("a",)}),
        ({"vary": (ContextVar("tenant"),)}, {"vary": (ContextVar("locale"),)}),
    ],
    ids=["ignore", "vary"],
)
def test_one_function_with_two_keys(one: Any, two: Any, guard: Guard) -> None:
    """One function, decorated twice, shares its answers only if the same arguments make the op."""

    async def load(a: int, b: int) -> int: ...

    first = coalesce(guard=guard, **one)(load)
    with pytest.raises(InvalidKey, match="load is defined, or decorated with other key options"):
        coalesce(guard=guard, **two)(load)

    assert first._operation is coalesce(guard=guard, **one)(load)._operation or first.guard is guard


async def test_definitions_forget_their_own_alone(guard: Guard) -> None:
    """Functions and classes that are defined at each request leave all others' answers, and inherit no closure's."""
    other = plain(guard)

    def define(number: int) -> Any:
        class Menus:
            @coalesce("own-{item}", guard=guard, ttl=600)
            async def load(self, item: int) -> int:
                return number

        return Menus()

    for number in range(5):
        await other(7)
        menus = define(number)
        answers = await closure(guard, str(number))(7), await menus.load(7), await plain(guard, "p-{item}")(7)
        gc.collect()

        assert (str(number), number, 7) == answers
    assert (1, 1) == (guard.stats().operations["plain-{item}"].loads, guard.stats().operations["p-{item}"].loads)


@pytest.mark.parametrize("has_others", [False, True])
async def test_closure_after_a_dead_one(has_others: bool, guard: Guard) -> None:
    """A closure may follow one that is gone, also after other decorations, and inherits none of its answers."""
    await closure(guard, "one")(7)
    gc.collect()
    if has_others:
        await plain(guard)(7)

    assert "two" == await closure(guard, "two")(7)


async def test_dead_functions_are_remembered_up_to_a_limit(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of very many functions that are gone, those that went first are forgotten, with their answers."""
    monkeypatch.setattr(registry, "_MAX_DEAD", 1)
    for name in ("a", "b", "c"):
        await plain(guard, name + "-{item}")(7)
        gc.collect()

    assert [False, True, True] == [guard.peek(f"{name}-7") is not None for name in ("a", "b", "c")]
    assert 2 == len(guard._registry._claims)


async def test_dead_function_keeps_nothing(guard: Guard) -> None:
    """What is known of a dead function does not keep what it held."""

    class Session:
        pass

    session: Any = Session()
    gone = ref(session)

    def define(session: Any) -> Any:
        @coalesce("kept-{item}", guard=guard, ignore=("session",))
        async def load(item: int, session: Any = session) -> int:
            return item

        return load

    await define(session)(7)
    del session
    gc.collect()

    assert gone() is None


@pytest.mark.parametrize("key", [None, "closure-{item}"])
def test_two_living_closures(guard: Guard, key: str | None) -> None:
    """Two closures of one name may answer differently, so the second is refused while the first is in use."""
    first = closure(guard, "one", key)

    with pytest.raises(InvalidKey, match=r"closure\.<locals>\.load is decorated again.*a Guard of its own"):
        closure(guard, "two", key)
    assert first.guard is guard


async def test_living_closures_with_key_functions(guard: Guard) -> None:
    """Whoever builds the ops answers for them."""
    one = closure(guard, "one", lambda item: f"one-{item}")
    two = closure(guard, "two", lambda item: f"two-{item}")

    assert ("one", "two") == (await one(7), await two(7))


async def test_living_methods_of_one_name(guard: Guard) -> None:
    """Classes that one function makes may live together, since their instances have ops of their own."""

    def make(answer: str) -> Any:
        class Menus:
            @coalesce("own-{item}", guard=guard)
            async def load(self, item: int) -> str:
                return answer

        return Menus()

    one, two = make("one"), make("two")

    assert ("one", "two") == (await one.load(7), await two.load(7))


async def test_stats_outlive_functions(guard: Guard) -> None:
    """What was counted stays counted when its function is gone."""
    await plain(guard)(7)
    gc.collect()

    assert 1 == guard.stats().operations["plain-{item}"].loads


def test_operations_are_those_of_the_living() -> None:
    """A registry names the operations of functions that are alive."""

    async def load(item: int) -> int: ...

    class Owner:
        __wrapped__ = staticmethod(load)

    registry = Registry()
    operation = Operation("load", Policy(), Counters())
    owner = Owner()

    assert not registry.add(owner, compile_key(load, None), operation)
    assert [operation] == list(registry.operations())
    del owner
    gc.collect()
    assert [] == list(registry.operations())


def test_counters_of_a_name() -> None:
    """A name's counters are made once."""
    registry = Registry()

    assert registry.counters_of("menu") is registry.counters_of("menu")
    assert registry.counters_of("menu") is not registry.counters_of("hours")
