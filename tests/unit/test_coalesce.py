import abc
import asyncio
import copy
import functools
import gc
import inspect
import pickle
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar, copy_context
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints
from weakref import ref

import httpx
import pytest
from fastapi import Depends, FastAPI
from inside import untyped
from pydantic import BaseModel, ConfigDict, PydanticUserError

from stampede_guard import (
    Coalesced,
    CoalescedManyMethod,
    ConfigurationError,
    Guard,
    GuardClosed,
    InvalidationPending,
    InvalidKey,
    LoadTimeout,
    NotCoalescable,
    WaitTimeout,
    coalesce,
    coalesce_many,
)
from stampede_guard.testing import FaultStore, Gate, ManualClock

if TYPE_CHECKING:
    from nowhere import Database  # pyright: ignore[reportMissingImports]  # as a module that only a checker has

of_class: Any = classmethod  # for what a type checker refuses

tenant: ContextVar[str] = ContextVar("tenant", default="nobody")
request_id: ContextVar[str] = ContextVar("request_id", default="none")

module_guard = Guard()


@coalesce("module-{item}-{times}-{extra}", guard=module_guard)
async def module_level(item: int, times: Annotated[int, "why"] = 2, *, extra: str = "") -> str:
    """Has a parameter of each kind, and a name that `pickle` finds."""
    return f"{item * times}{extra}"


@pytest.fixture
def guard(clock: ManualClock) -> Guard:
    """Return a guard of the test's own."""
    return Guard(clock=clock)


@pytest.fixture
def gate() -> Gate:
    """Return a gate, closed."""
    return Gate()


class Source:
    """What loaders in these tests read; counts."""

    def __init__(self) -> None:
        self.loads = 0

    async def read(self) -> int:
        self.loads += 1
        return self.loads


@pytest.fixture
def source() -> Source:
    """Return a source that nobody read yet."""
    return Source()


# ── Forms ────────────────────────────────────────────────────────────────────────────────────────


async def test_bare() -> None:
    """Bare, the decorator shares flights, remembers nothing, and derives the key."""
    gate = Gate()
    loads: list[str] = []

    @coalesce
    async def load(base: str, quote: str) -> str:
        loads.append(base)
        await gate.passage()
        return base + quote

    calls = [asyncio.create_task(load("EUR", quote)) for quote in ("USD", "USD", "CHF")]
    await gate.arrivals(2)
    gate.open()

    assert ["EURUSD", "EURUSD", "EURCHF"] == await asyncio.gather(*calls)
    assert 2 == len(loads)
    assert load.peek("EUR", "USD") is None


async def test_bare_functions_have_a_guard_in_common() -> None:
    """Without a guard, functions use one that needs no store and no entering."""

    @coalesce
    async def one() -> None: ...

    @coalesce()
    async def two() -> None: ...

    assert one.guard is two.guard
    assert not one.guard.has_store


@pytest.mark.parametrize(
    "decorate", [coalesce(ttl=5), coalesce(None, ttl=5), coalesce(guard=None, ttl=timedelta(seconds=5))]
)
async def test_options_without_a_template(decorate: Any, source: Source) -> None:
    """With options alone, the key is derived and the answer remembered."""

    @decorate
    async def load(item: int) -> int:
        return await source.read()

    assert (1, 1, 2) == (await load(1), await load(1), await load(2))


@pytest.mark.parametrize("form", ["positional", "keyword"])
async def test_template(form: str, guard: Guard, source: Source) -> None:
    """A template may be the first argument or `key=`."""
    decorate = (
        coalesce("item-{item}", guard=guard, ttl=5)
        if form == "positional"
        else coalesce(key="item-{item}", guard=guard, ttl=5)
    )

    @decorate
    async def load(item: int) -> int:
        return await source.read()

    assert (1, 1, 2) == (await load(1), await load(item=1), await load(2))
    assert "item-1" == load.key(1)


async def test_key_function(guard: Guard, source: Source) -> None:
    """A function of the same arguments may build the op."""

    @coalesce(key=lambda ids: f"many-{sorted(ids)}", guard=guard, ttl=5)
    async def load(ids: set[int]) -> int:
        return await source.read()

    assert (1, 1) == (await load({1, 2}), await load({2, 1}))
    assert "many-[1, 2]" == load.key({1, 2})


async def test_one_decorator_for_two_functions(guard: Guard) -> None:
    """What `coalesce(...)` returns may be used again; each function has a key and a life of its own."""
    remembered = coalesce(guard=guard, ttl=5)

    @remembered
    async def one() -> str:
        return "one"

    @remembered
    async def two() -> str:
        return "two"

    assert ("one", "two") == (await one(), await two())


async def test_none_is_a_value(guard: Guard, source: Source) -> None:
    """A loader that answers `None` has answered."""

    @coalesce(guard=guard, ttl=5)
    async def load() -> None:
        await source.read()

    assert (None, None) == (await load(), await load())
    assert 1 == source.loads


# ── Like the function it wraps ───────────────────────────────────────────────────────────────────


def test_signature() -> None:
    """The signature is the function's."""
    expected = "(item: int, times: Annotated[int, 'why'] = 2, *, extra: str = '') -> str"

    assert expected == str(inspect.signature(module_level)).replace("typing.", "")


@pytest.mark.parametrize("name", ["class", "_sg_lookup_or_launch", "_sg_answers", "a name", "\ufb01sh", "load"])
async def test_any_name(name: str, guard: Guard) -> None:
    """A function may have any name: a keyword, one that its stand-in uses, or one that is no name at all."""

    async def load(item: int) -> int:
        return item

    load.__name__ = load.__qualname__ = name
    coalesced = coalesce(ttl=5, guard=guard)(load)

    answers = [await coalesced(7) for _ in range(3)]
    coroutine = coalesced(7)
    names = (coroutine.__name__, coroutine.cr_code.co_name)  # a coroutine has one
    await coroutine

    assert [7, 7, 7] == answers
    assert (name, name) == names


def test_parameter_that_its_stand_in_needs() -> None:
    """A parameter with a name that could be one of the stand-in's own is refused at once."""

    async def load(_sg_answers: int) -> int: ...

    with pytest.raises(NotCoalescable, match=r"call the parameter '_sg_answers' something that is not _sg_…"):
        coalesce(load)


def test_attributes() -> None:
    """Name, module, docstring and annotations are the function's, and it can be had."""

    async def load(item: int) -> str:
        """Load an item."""
        return str(item)

    untyped(load).tag = "kept"
    coalesced: Any = coalesce(load)

    assert (load.__name__, load.__qualname__, __name__) == (
        coalesced.__name__,
        coalesced.__qualname__,
        coalesced.__module__,
    )
    assert ("Load an item.", load.__annotations__, "kept") == (
        coalesced.__doc__,
        coalesced.__annotations__,
        coalesced.tag,
    )
    assert coalesced.__wrapped__ is load
    assert inspect.unwrap(coalesced) is load
    assert {"item": int, "return": str} == get_type_hints(coalesced)


class Plain:
    @coalesce("plain-{item}", guard=module_guard)
    async def load(self, item: int) -> int: ...

    @coalesce(guard=module_guard)
    @classmethod
    async def of_class(cls, item: int) -> int: ...

    @coalesce(guard=module_guard)
    @staticmethod
    async def alone(item: int) -> int: ...

    @staticmethod
    @coalesce(guard=module_guard)
    async def alone_inside(item: int) -> int: ...


plain = Plain()
bound = pytest.mark.parametrize(
    "function",
    [
        plain.load,
        Plain.of_class,
        plain.of_class,
        Plain.alone,
        plain.alone,
        Plain.alone_inside,
    ],
    ids=["method", "class", "class by instance", "static", "static by instance", "static inside"],
)


@bound
def test_signature_when_bound(function: Any) -> None:
    """What is bound has the signature of what is left."""
    assert "(item: int) -> int" == str(inspect.signature(function))


@bound
def test_bound_coroutine_function(function: Any) -> None:
    """What is bound is recognised as a coroutine function."""
    assert inspect.iscoroutinefunction(function)


@pytest.mark.parametrize("function", [module_level, Plain.load, functools.partial(module_level, 1)])
def test_coroutine_function(function: Any) -> None:
    """`inspect` takes a coalesced function for the coroutine function that it is."""
    assert inspect.iscoroutinefunction(function)
    assert not inspect.isgeneratorfunction(function)
    assert not inspect.isasyncgenfunction(function)


def test_signature_by_the_class() -> None:
    """Taken from the class, a method has its instance as first parameter, as every method does."""
    assert "(self, item: int) -> int" == str(inspect.signature(Plain.load))


async def test_call_is_a_coroutine() -> None:
    """A call may be made a task, as any coroutine."""

    @coalesce
    async def load(item: int) -> int:
        return item

    call = load(7)

    assert inspect.iscoroutine(call)
    assert 7 == await asyncio.create_task(call)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda load: pickle.loads(pickle.dumps(load))])  # noqa: S301  # our own
def test_copies(duplicate: Callable[[Any], Any]) -> None:
    """A copy is the function itself, and a pickle its name, as with every function."""
    assert duplicate(module_level) is module_level
    assert duplicate(Plain.load) is Plain.load


@pytest.mark.parametrize("name", ["key", "tags", "invalidate", "refresh", "peek", "bypass", "bound_to", "guard"])
async def test_function_with_an_attribute_of_such_a_name(name: str, guard: Guard) -> None:
    """An attribute of the function that is called like a method of the stand-in does not take its place."""

    async def load(menu_id: int) -> str:
        return f"menu {menu_id}"

    for each in (name, "answers", "loader", "_function", "_alone"):
        setattr(load, each, "the function's own")
    coalesced: Any = coalesce("menu-{menu_id}", guard=guard, ttl=5, tags=("menus",))(load)

    assert "menu 7" == await coalesced(7) == await coalesced.refresh(7) == await coalesced.bypass(7)
    assert ("menu-7", ("menus",), guard) == (coalesced.key(7), coalesced.tags(7), coalesced.guard)
    assert coalesced.peek(7).value == "menu 7"
    await coalesced.invalidate(7)
    assert coalesced.peek(7) is None
    assert "the function's own" == getattr(coalesced.__wrapped__, name)


class Shop:
    """Keeps a bound method among its attributes."""

    def __init__(self, city: str) -> None:
        self.city = city
        self.ask: Any = self.load

    @coalesce(ttl=5)
    async def load(self, menu_id: int) -> str:
        """Load a menu of this city."""
        return f"{self.city} {menu_id}"


async def test_deep_copy_of_a_bound_method() -> None:
    """A deep copy of an instance has the methods of that copy, as with every method."""
    shop = Shop("Rome")
    twin = copy.deepcopy(shop)
    twin.city = "Turin"

    assert twin.ask == twin.load
    assert ["Turin 7", "Rome 7"] == [await twin.ask(7), await shop.ask(7)]
    assert twin.ask.key(7) == twin.load.key(7) != shop.load.key(7)
    assert copy.copy(shop).ask == shop.load
    assert ["Turin 7"] * 2 == [await copy.deepcopy(twin.ask).bypass(7), (await twin.ask.refresh(7))]


def test_pickle_of_a_bound_method() -> None:
    """A bound method is not found by its name, so it is not pickled for something else."""
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(plain.load)


def test_bound_methods_are_equal() -> None:
    """Each access makes a new object, equal to the last, as with every method: so it can be found in a dict."""
    assert plain.load == plain.load
    assert hash(plain.load) == hash(plain.load)
    assert plain.load in {plain.load: 1}


def test_bound_methods_of_two_instances_differ() -> None:
    """Methods of two instances are two, whatever the instances are equal in."""
    assert plain.load != Plain().load
    assert plain.load != Plain.load
    assert plain.load != module_level
    assert plain.load != plain.load.__wrapped__


def test_one_function_coalesced_twice(guard: Guard) -> None:
    """A function that was coalesced twice is two operations."""
    once, again = coalesce(guard=guard)(right), coalesce(guard=Guard())(right)

    assert once != again


def test_repr() -> None:
    """A repr tells which function it is."""
    assert f"<coalesced {__name__}.Plain.load>" == repr(plain.load)


@pytest.mark.parametrize(
    "decorate", [coalesce, lambda function: coalesce()(of_class(function))], ids=["method", "class"]
)
def test_abstract_methods_stay_abstract(decorate: Any) -> None:
    """A class with an abstract method cannot be instantiated, coalesced or not."""

    class Base(abc.ABC):
        @decorate
        @abc.abstractmethod
        async def load(self) -> int: ...

    with pytest.raises(TypeError, match="abstract"):
        untyped(Base)()


# ── Methods ──────────────────────────────────────────────────────────────────────────────────────


def make_menus(guard: Guard) -> type[Any]:  # noqa: C901  # one method of each kind
    """Return a class whose methods say whose they are."""

    class Menus:
        __slots__ = ("__weakref__", "loads", "region")

        def __init__(self, region: str = "north") -> None:
            self.region = region
            self.loads = 0

        def __eq__(self, other: object) -> bool:  # equal to all, and unhashable
            return True

        __hash__ = untyped(None)

        @coalesce("own-{item}", guard=guard, ttl=5)
        async def own(self, item: int) -> tuple[str, int]:
            self.loads += 1
            return self.region, item

        @coalesce("by-region-{self.region}-{item}", guard=guard, ttl=5)
        async def by_region(self, item: int) -> int:
            self.loads += 1
            return self.loads

        @coalesce(guard=guard, ttl=5, ignore=("self",))
        async def for_all(self, item: int) -> int:
            self.loads += 1
            return self.loads

        @coalesce("of-class-{item}", guard=guard, ttl=5)
        @classmethod
        async def of_class(cls, item: int) -> str:
            return cls.__name__

        @coalesce("static-{item}", guard=guard, ttl=5)
        @staticmethod
        async def alone(item: int) -> int:
            return item

        @staticmethod
        @coalesce("static-inside-{item}", guard=guard, ttl=5)
        async def alone_inside(item: int) -> int:
            return item

    return Menus


@pytest.fixture
def menus(guard: Guard) -> type[Any]:
    """Return a class whose methods say whose they are."""
    return make_menus(guard)


async def test_method_per_instance(menus: type[Any]) -> None:
    """Each instance has answers of its own, even where instances are equal."""
    north, south = menus("north"), menus("south")

    assert [("north", 7), ("south", 7), ("north", 7)] == [await north.own(7), await south.own(7), await north.own(7)]
    assert (1, 1) == (north.loads, south.loads)


async def test_concurrent_method_calls_share(guard: Guard, gate: Gate) -> None:
    """Concurrent calls on one instance are one load, and those on another are another."""

    class Menus:
        @coalesce(guard=guard)
        async def load(self, item: int) -> "Menus":
            await gate.passage()
            return self

    one, two = Menus(), Menus()
    calls = [asyncio.create_task(instance.load(7)) for instance in (one, two, one, two)]
    await gate.arrivals(2)
    gate.open()

    assert [one, two, one, two] == await asyncio.gather(*calls)
    assert 2 == gate.arrived


async def test_method_by_the_class(menus: type[Any]) -> None:
    """Called through the class, a method takes its instance as an argument, and has the same op."""
    menu = menus()

    assert await menu.own(7) == await menus.own(menu, 7)
    assert menu.own.key(7) == menus.own.key(menu, 7)
    assert 1 == menu.loads


async def test_instance_is_not_kept_alive(menus: type[Any]) -> None:
    """What is remembered of an instance's calls does not keep the instance."""
    menu = menus()
    await menu.own(7)
    await menu.own.refresh(7)
    gone = ref(menu)
    del menu
    gc.collect()

    assert gone() is None


async def test_new_instance_inherits_nothing(menus: type[Any]) -> None:
    """An instance at the address of a dead one asks for itself."""
    answers = []
    for number in range(20):
        menu = menus(str(number))
        answers.append((await menu.own(7))[0])
        del menu

    assert [str(number) for number in range(20)] == answers


async def test_instances_share_by_template(menus: type[Any]) -> None:
    """Instances that agree in what the template names share answers."""
    one, two, other = menus("north"), menus("north"), menus("south")

    assert (1, 1, 1) == (await one.by_region(7), await two.by_region(7), await other.by_region(7))
    assert (1, 0, 1) == (one.loads, two.loads, other.loads)


async def test_instances_share_when_ignored(menus: type[Any]) -> None:
    """Instances share answers when the instance is ignored."""
    one, two = menus("north"), menus("south")
    await one.for_all(7)
    await two.for_all(7)

    assert (1, 0) == (one.loads, two.loads)


async def test_inherited_method(menus: type[Any]) -> None:
    """An inherited method is the same operation, for each instance."""

    class More(menus):
        __slots__ = ()

        async def own_of_super(self, item: int) -> Any:
            return await super().own(item)

    more = More("east")

    assert ("east", 7) == await more.own(7)
    assert ("east", 7) == await more.own_of_super(7)
    assert 1 == more.loads


async def test_overriding_method_may_call_the_overridden(guard: Guard) -> None:
    """An override is an operation of its own, and may wait for what it overrides."""

    class Base:
        @coalesce(guard=guard)
        async def load(self, item: int) -> str:
            return f"base {item}"

    class Sub(Base):
        @coalesce(guard=guard)
        async def load(self, item: int) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # its `self` is a Sub
            return "sub of " + await super().load(item)

    assert "sub of base 7" == await Sub().load(7)


def test_instance_without_weak_references(guard: Guard) -> None:
    """An instance that cannot be told apart for good is refused, with the ways out."""

    class Slotted:
        __slots__ = ()

        @coalesce(guard=guard)
        async def load(self) -> int: ...

    slotted = Slotted()

    with pytest.raises(InvalidKey, match="allows no weak reference"):
        slotted.load.key()


async def test_class_method(menus: type[Any]) -> None:
    """A class method gets its class, and each class its own answers."""

    class More(menus):
        __slots__ = ()

    answers = [await receiver.of_class(7) for receiver in (menus, More, menus(), More())]

    assert ["Menus", "More", "Menus", "More"] == answers


@pytest.mark.parametrize("form", [coalesce, coalesce(ttl=5, ignore=("cls",))], ids=["bare", "options"])
def test_class_method_from_above(form: Any) -> None:
    """`@classmethod` above the decorator is refused: on Python 3.13 `.invalidate` would not get the class."""

    async def of_class(cls: type, item: int = 1) -> int: ...

    with pytest.raises(NotCoalescable, match=r"of_class takes cls, so .*: put @coalesce above @classmethod; if it is"):
        form(of_class)
    assert form(classmethod(of_class)).__wrapped__ is of_class


def test_partial_method() -> None:
    """What a partial method makes has no `.invalidate`, rather than one of another op."""

    class Menus:
        @coalesce("partial-{self.region}-{item}", guard=module_guard)
        async def load(self, item: int, /) -> int: ...

        special = functools.partialmethod(load, 7)

    assert not hasattr(Menus().special, "invalidate")


async def test_class_method_under_another_name(menus: type[Any], guard: Guard) -> None:
    """What another class borrows stays bound to the class that it was taken from, as class methods do."""

    class Borrower:
        load = menus.of_class

    assert ["Menus", "Menus"] == [await Borrower.load(7), await Borrower().load(7)]


async def test_class_method_invalidates(menus: type[Any], guard: Guard) -> None:
    """A coalesced class method has what every coalesced function has."""
    await menus.of_class(7)
    before = menus.of_class.peek(7)
    await menus.of_class.invalidate(7)

    assert before is not None
    assert "Menus" == before.value
    assert menus.of_class.peek(7) is None


@pytest.mark.parametrize("name", ["alone", "alone_inside"])
async def test_static_method(name: str, menus: type[Any], guard: Guard) -> None:
    """A static method gets no instance, in both orders of decorators, and all share its answers."""
    one, two = menus(), menus()
    answers = [await getattr(receiver, name)(7) for receiver in (menus, one, two)]

    assert [7, 7, 7] == answers
    assert 1 == guard.stats().loads
    assert 7 == getattr(one, name).peek(7).value


async def test_methods_in_the_store_need_a_shared_name() -> None:
    """An answer that other processes will read cannot hang on an instance of this one."""
    guard = Guard(lambda: FaultStore(ManualClock()))

    with pytest.raises(InvalidKey, match=r"Menus\.load: l2_ttl= shares answers between processes.*\{self\.attribute\}"):

        class Menus:  # pyright: ignore[reportUnusedClass]  # defining it is the test
            @coalesce("item-{item}", guard=guard, l2_ttl=5)
            async def load(self, item: int) -> int: ...


class Stored:
    """Has a name that every process knows."""

    clock = ManualClock()
    store = FaultStore(clock)
    guard = Guard(lambda: Stored.store, clock=clock)

    @coalesce("stored-{item}", guard=guard, l2_ttl=5)
    @classmethod
    async def of_class(cls, item: int) -> str:
        return cls.__name__


class StoredMore(Stored):
    pass


async def test_class_methods_in_the_store() -> None:
    """In the store, a class goes by its name."""
    async with Stored.guard:
        answers = await Stored.of_class(7), await StoredMore.of_class(7)

    assert ("Stored", "StoredMore") == answers
    assert [f"stored-7#{__name__}.Stored", f"stored-7#{__name__}.StoredMore"] == [
        Stored.of_class.key(7),
        StoredMore.of_class.key(7),
    ]


# ── Wrong decorations ────────────────────────────────────────────────────────────────────────────


def sync() -> int:
    """Return at once."""
    return 1


def generator() -> Iterator[int]:
    """Yield."""
    yield 1


async def async_generator() -> AsyncIterator[int]:
    """Yield, after a while."""
    yield 1


async def right(item: int) -> int:
    """Return, after a while."""
    return item


class CallableInstance:
    """Has instances that can be called."""

    async def __call__(self) -> int: ...


@pytest.mark.parametrize("form", [coalesce, coalesce(ttl=5)], ids=["bare", "options"])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (sync, r"^@coalesce: sync is not async; declare it with `async def`$"),
        (generator, r"^@coalesce: generator is a generator; only an `async def` that returns a value can be shared$"),
        (async_generator, r"^@coalesce: async_generator is an async generator; return a list, or"),
        (CallableInstance, r"^@coalesce: CallableInstance is a class; decorate its `async def` methods$"),
        (module_level, r"^@coalesce: module_level is coalesced already$"),
        (plain.load, r"^@coalesce: Plain\.load is coalesced already$"),
        (functools.partial(right, 1), r"is a partial; wrap it in an `async def`$"),
        (CallableInstance(), r"is a CallableInstance; wrap it in an `async def`$"),
        (CallableInstance().__call__, r"is a method; wrap it in an `async def`$"),
        (of_class(sync), r"^@coalesce: sync is not async"),
        (staticmethod(sync), r"^@coalesce: sync is not async"),
        (of_class(module_level), r"coalesced already"),
        (property(lambda self: self), r"is a property; wrap it in an `async def`$"),
        (7, r"^@coalesce: 7 is a int; wrap it in an `async def`$"),
    ],
)
def test_wrong_decorations(form: Any, function: Any, message: str) -> None:
    """What cannot be shared is refused where it is decorated, with what to do instead."""
    with pytest.raises(NotCoalescable, match=message):
        form(function)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttl": 0}, "ttl=0: a duration is more than zero"),
        ({"l2_ttl": "5"}, "l2_ttl='5': a life is a number"),
        ({"l2_ttl": 5}, r"right: l2_ttl= needs a guard with a store, as in Guard\('redis://"),
        ({"jitter": 1}, "jitter=1: give a fraction"),
        ({"load_timeout": -1}, "load_timeout=-1"),
        ({"wait_timeout": 0}, "wait_timeout=0"),
        ({"on_abandon": "stop"}, "on_abandon='stop': give one of 'finish', 'cancel'"),
        ({"isolate": "no"}, "isolate='no': give True or False"),
        ({"inherit_context": 0}, "inherit_context=0: give True or False"),
        ({"ignore": "item"}, "ignore='item': give a tuple of names"),
        ({"ignore": 7}, "ignore=7: give a tuple of names"),
        ({"ignore": (7,)}, r"ignore=\(7,\): give a tuple of names"),
        ({"ignore": iter(["item"])}, "ignore=.*: give a tuple of names"),
        ({"vary": tenant}, "vary=.*: give a tuple of context variables"),
        ({"vary": ("tenant",)}, r"vary=\('tenant',\): give a tuple of context variables"),
        ({"vary": iter([tenant])}, "vary=.*: give a tuple of context variables"),
        ({"guard": "redis://localhost"}, "guard='redis://…: give a Guard"),
        ({"codec": object()}, "codec=.*; give an object with encode"),
        ({"tll": 5}, "there is no option 'tll'; there are ttl, l2_ttl"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    """An option that breaks its rule is refused where it is given, with its value and the rule."""
    with pytest.raises(ConfigurationError, match=message):
        coalesce(**options)(right)


@pytest.mark.parametrize("key", ["item-{item}", lambda item: "key"])
def test_two_keys(key: Any) -> None:
    """A template and `key=` are two keys."""
    with pytest.raises(ConfigurationError, match=r"^two keys: the template '\{item\}' and key=.*; give one$"):
        coalesce("{item}", key=key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "item-{itme}"}, "'itme', which is no parameter"),
        ({"key": "item"}, "leaves out the parameter 'item'"),
        ({"key": "item{item}"}, "needs a separator"),
        ({"key": 7}, "key=7; give a template or a function"),
        ({"key": lambda: "item"}, "cannot take the same arguments"),
        ({"ignore": ("itme",)}, "'itme', which is no parameter"),
    ],
)
def test_wrong_keys(options: dict[str, Any], message: str, guard: Guard) -> None:
    """A key that is wrong is refused at decoration, not at the first call."""
    with pytest.raises(InvalidKey, match=message):
        coalesce(guard=guard, **options)(right)


def test_store_needs_an_annotation() -> None:
    """What is stored is described by the return annotation, and its lack shows at decoration."""
    guard = Guard(lambda: FaultStore(ManualClock()))

    with pytest.raises(ConfigurationError, match="annotate the return type, or pass codec="):

        @coalesce(guard=guard, l2_ttl=5)
        async def load():  # noqa: ANN202
            ...


def test_unclear_annotation(guard: Guard) -> None:
    """An annotation that does not say what to decode to is refused at decoration."""
    with pytest.raises(ConfigurationError, match=r"load: its return annotation .*object.* cannot be stored"):

        @coalesce(guard=guard, isolate=True)
        async def load() -> object: ...


async def test_annotation_defined_later(guard: Guard) -> None:
    """A return annotation may name what is defined after the function."""

    @coalesce(guard=guard, isolate=True)
    async def load() -> "DefinedBelow":
        return 7

    assert 7 == await load()


async def test_annotation_that_is_never_defined() -> None:
    """A return annotation whose name never comes to exist is found when the guard is entered."""
    guard = Guard(lambda: FaultStore(ManualClock()))

    @coalesce("item", guard=guard, l2_ttl=5)
    async def load() -> "Nowhere":  # noqa: F821  # pyright: ignore[reportUndefinedVariable, reportUnknownParameterType]
        ...

    with pytest.raises(ConfigurationError, match=r"^item: its return annotation is not defined \(name 'Nowhere'"):
        async with guard:
            pass


async def test_annotation_of_a_parameter_does_not_matter(guard: Guard) -> None:
    """A parameter may be annotated with what only type checkers import: it is the answer that is stored."""

    @coalesce("item-{item}", guard=guard, isolate=True, ignore=("db",))
    async def load(item: int, db: "Database | None" = None) -> list[int]:  # pyright: ignore[reportUnknownParameterType]
        return [item]

    assert [7] == await load(7)


async def test_annotation_of_a_wrapped_function(guard: Guard) -> None:
    """A wrapper made with `functools.wraps` answers with what it wraps, and names are looked up there."""
    namespace: dict[str, Any] = {"__name__": "elsewhere"}
    exec("Answer = list[int]\nasync def inner(item: int) -> 'Answer': return [item]", namespace)  # noqa: S102

    @coalesce(guard=guard, isolate=True)
    @functools.wraps(namespace["inner"])
    async def load(*args: Any) -> Any:
        return await namespace["inner"](*args)

    assert [7] == await load(7)


DefinedBelow = int


# ── key, peek, bypass, refresh, invalidate ───────────────────────────────────────────────────────


async def test_key_is_the_op_in_the_store(clock: ManualClock) -> None:
    """`key` tells under which op an answer is stored."""
    store = FaultStore(clock)
    guard = Guard(lambda: store, namespace="menus", clock=clock)

    @coalesce("item-{item}", guard=guard, l2_ttl=5)
    async def load(item: int) -> int:
        return item

    async with guard:
        await load(7)

    assert [f"sg1:{{menus:{load.key(7)}}}:v"] == [*store.contents]


async def test_wrong_arguments(guard: Guard) -> None:
    """A call that does not fit raises what the function would have raised."""

    @coalesce("item-{item}", guard=guard)
    async def load(item: int) -> int: ...

    with pytest.raises(TypeError, match=r"load\(\) missing 1 required positional argument: 'item'"):
        await untyped(load)()


async def test_peek(guard: Guard, clock: ManualClock) -> None:
    """`peek` shows what is fresh in memory, and neither loads nor counts."""

    @coalesce("item-{item}", guard=guard, ttl=5, jitter=0)
    async def load(item: int) -> int | None:
        return None

    before = load.peek(7)
    await load(7)
    calls = guard.stats().calls
    entry = load.peek(7)
    clock.advance(5)

    assert before is None
    assert entry is not None
    assert (None, 1_005.0) == (entry.value, entry.fresh_until)
    assert load.peek(7) is None
    assert calls == guard.stats().calls


@pytest.mark.parametrize(("way", "kept", "loads"), [("bypass", 1, 1), ("refresh", 2, 2)])
async def test_load_in_spite_of_a_fresh_answer(way: str, kept: int, loads: int, guard: Guard, source: Source) -> None:
    """`bypass` loads for its caller alone: nothing is read, shared or counted; `refresh` replaces the answer."""

    @coalesce("item-{item}", guard=guard, ttl=5)
    async def load(item: int) -> int:
        return await source.read()

    await load(7)

    assert 2 == await getattr(load, way)(7)
    assert kept == await load(7)
    assert loads == guard.stats().loads


async def test_bypass_of_a_method(menus: type[Any]) -> None:
    """`bypass` of a bound method gets its instance."""
    assert ("south", 7) == await menus("south").own.bypass(7)


async def test_bypass_runs_in_the_callers_context(guard: Guard) -> None:
    """What runs for one caller alone sees that caller's context."""

    @coalesce(guard=guard)
    async def load() -> str:
        return request_id.get()

    request_id.set("r1")

    assert "r1" == await load.bypass()


async def test_refresh_that_fails(guard: Guard) -> None:
    """When a refresh fails, what was remembered stays."""
    answers: list[int | Exception] = [1, RuntimeError("down")]

    @coalesce(guard=guard, ttl=5)
    async def load() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    await load()

    with pytest.raises(RuntimeError, match="down"):
        await load.refresh()
    assert 1 == await load()


async def test_concurrent_refreshes_share(guard: Guard, gate: Gate) -> None:
    """Callers that refresh while a refresh loads share the next load."""

    @coalesce(guard=guard, ttl=5)
    async def load() -> int:
        await gate.passage()
        return gate.arrived

    refreshes = [asyncio.create_task(load.refresh())]
    await gate.arrivals(1)
    refreshes += [asyncio.create_task(load.refresh()) for _ in range(2)]
    await asyncio.sleep(0)
    gate.open()

    assert [1, 2, 2] == await asyncio.gather(*refreshes)


async def test_refresh_does_not_join_an_older_flight(guard: Guard, gate: Gate) -> None:
    """A refresh asks anew although a flight is up, whose answer is not stored."""
    second = Gate()
    gates = [gate, second]

    @coalesce(guard=guard, ttl=5)
    async def load() -> str:
        mine = gates.pop(0)
        await mine.passage()
        return "old" if mine is gate else "new"

    old = asyncio.create_task(load())
    await gate.arrivals(1)
    new = asyncio.create_task(load.refresh())
    await second.arrivals(1)
    second.open()
    refreshed = await new
    gate.open()

    assert ("old", "new") == (await old, refreshed)
    assert "new" == await load()


async def test_invalidate(guard: Guard, source: Source) -> None:
    """`invalidate` forgets the answer to such a call, and to no other."""

    @coalesce("item-{item}", guard=guard, ttl=5)
    async def load(item: int) -> int:
        return await source.read()

    await load(7)
    await load(8)

    await load.invalidate(7)

    assert (3, 2) == (await load(7), await load(8))


async def test_invalidate_during_a_load(guard: Guard, gate: Gate) -> None:
    """A load that began before an invalidation answers who waited, and is not stored."""

    @coalesce(guard=guard, ttl=5)
    async def load() -> int:
        await gate.passage()
        return gate.arrived

    before = asyncio.create_task(load())
    await gate.arrivals(1)
    await load.invalidate()
    gate.open()
    await before

    assert load.peek() is None
    assert 2 == await load()


async def test_invalidate_in_the_store(clock: ManualClock) -> None:
    """`invalidate` drops the answer from the store too, when it is kept there."""
    store = FaultStore(clock)
    guard = Guard(lambda: store, clock=clock)

    @coalesce(guard=guard, l2_ttl=5)
    async def load() -> int:
        return 7

    async with guard:
        await load()
        was_stored = len(store.contents)
        await load.invalidate()

    assert 1 == was_stored
    assert {} == store.contents


async def test_invalidate_that_the_store_does_not_confirm(clock: ManualClock) -> None:
    """`invalidate` tells when the store could not be told, and forgets here all the same."""
    store = FaultStore(clock)
    guard = Guard(lambda: store, clock=clock)

    @coalesce(guard=guard, ttl=5, l2_ttl=5)
    async def load() -> int:
        return 7

    async with guard:
        await load()
        store.error = ConnectionError("down")

        with pytest.raises(InvalidationPending):
            await load.invalidate()
        assert load.peek() is None


async def test_invalidate_of_what_is_not_stored(clock: ManualClock) -> None:
    """A store that tells nobody is not asked to forget what it never had."""
    store = FaultStore(clock)
    store.error = ConnectionError("down")
    guard = Guard(lambda: store, clock=clock)

    @coalesce(guard=guard, ttl=5)
    async def load() -> int:
        return 7

    async with guard:
        await load()

        await load.invalidate()
        assert load.peek() is None


async def test_closed_guard() -> None:
    """A function whose guard has a store says how to open it."""
    guard = Guard(lambda: FaultStore(ManualClock()))

    @coalesce(guard=guard, ttl=5)
    async def load() -> int: ...

    with pytest.raises(GuardClosed, match="async with guard:"):
        await load()


# ── Options ──────────────────────────────────────────────────────────────────────────────────────


async def test_not_isolated(guard: Guard) -> None:
    """Without `isolate`, callers share the object itself."""

    @coalesce(guard=guard, ttl=5)
    async def load() -> list[int]:
        return [7]

    assert await load() is await load()


async def test_isolate(guard: Guard, gate: Gate) -> None:
    """With `isolate`, every caller has a copy: who launched, who joined, who came later, and who peeks."""

    @coalesce(guard=guard, ttl=5, isolate=True)
    async def load() -> list[int]:
        await gate.passage()
        return [7]

    calls = [asyncio.create_task(load()) for _ in range(2)]
    await gate.arrivals(1)
    gate.open()
    copies = [*await asyncio.gather(*calls), await load(), await load.refresh()]
    for copied in copies:
        copied.append(8)
    entry = load.peek()

    assert [[7, 8]] * 4 == copies
    assert entry is not None
    assert [7] == entry.value


async def test_isolate_without_memory(guard: Guard) -> None:
    """With `isolate`, callers of one flight have copies, although nothing is remembered."""

    @coalesce(guard=guard, isolate=True)
    async def load() -> list[int]:
        return [7]

    one, two = await asyncio.gather(load(), load())

    assert one == two
    assert one is not two


async def test_isolated_answer_of_a_wrong_type(guard: Guard) -> None:
    """A later answer that its annotation does not describe is handed out as it is, in copies."""
    answers: list[Any] = [[7], ["seven"]]

    @coalesce("isolated", guard=guard, isolate=True)
    async def load() -> list[int]:
        return answers.pop(0)

    await load()

    assert ["seven"] == await load()


async def test_vary(guard: Guard, source: Source) -> None:
    """Callers that differ in a context variable named by `vary` share nothing; the loader sees it."""

    @coalesce("item-{item}", guard=guard, ttl=5, vary=(tenant,))
    async def load(item: int) -> str:
        return f"{tenant.get()} {await source.read()}"

    answers = []
    for name in ("acme", "umbrella", "acme"):
        tenant.set(name)
        answers.append(await load(7))

    assert ["acme 1", "umbrella 2", "acme 1"] == answers


async def test_context_is_clean(guard: Guard) -> None:
    """A shared load sees nothing of the caller that happened to launch it."""

    @coalesce(guard=guard, vary=[tenant])
    async def load() -> tuple[str, str]:
        return tenant.get(), request_id.get()

    tenant.set("acme")
    request_id.set("r1")

    assert ("acme", "none") == await load()


async def test_context_is_inherited(guard: Guard) -> None:
    """With `inherit_context` the loader sees everything, and changes nothing of its caller's."""

    @coalesce(guard=guard, inherit_context=True)
    async def load() -> str:
        seen = request_id.get()
        request_id.set("changed")
        return seen

    request_id.set("r1")

    assert "r1" == await load()
    assert "r1" == copy_context()[request_id]


async def test_ignore(guard: Guard, source: Source) -> None:
    """Callers that differ in an ignored parameter share answers, and the loader gets the launching caller's."""

    @coalesce("item-{item}", guard=guard, ttl=5, ignore=("db",))
    async def load(item: int, db: Source) -> int:
        return await db.read()

    assert (1, 1) == (await load(7, source), await load(7, db=Source()))


async def test_wait_timeout(guard: Guard, gate: Gate) -> None:
    """`wait_timeout` lets its caller go, and the load goes on."""

    @coalesce(guard=guard, ttl=5, wait_timeout=0.001)
    async def load() -> int:
        await gate.passage()
        return 7

    with pytest.raises(WaitTimeout):
        await load()
    gate.open()
    assert 7 == await load()
    assert 1 == gate.arrived


async def test_load_timeout(guard: Guard, gate: Gate) -> None:
    """`load_timeout` ends the load for everybody."""

    @coalesce(guard=guard, load_timeout=0.001)
    async def load() -> int:
        await gate.passage()
        return 7

    outcomes = await asyncio.gather(load(), load(), return_exceptions=True)

    assert [LoadTimeout, LoadTimeout] == [type(outcome) for outcome in outcomes]


# ── Switches ─────────────────────────────────────────────────────────────────────────────────────


async def test_disabled(guard: Guard, gate: Gate) -> None:
    """A guard that is switched off remembers answers, and shares no flights."""
    guard.enabled = False

    @coalesce(guard=guard, ttl=5)
    async def load() -> int:
        await gate.passage()
        return 7

    calls = [asyncio.create_task(load()) for _ in range(3)]
    await gate.arrivals(3)
    gate.open()

    assert [7, 7, 7] == await asyncio.gather(*calls)
    assert 7 == await load()
    assert (3, 0, 1) == (guard.stats().loads, guard.stats().joins, guard.stats().l1_hits)


async def test_enabled_again(guard: Guard, gate: Gate) -> None:
    """A guard may be switched while flights are up; who comes after shares."""
    guard.enabled = False

    @coalesce(guard=guard)
    async def load() -> int:
        await gate.passage()
        return 7

    calls = [asyncio.create_task(load()) for _ in range(2)]
    await gate.arrivals(2)
    guard.enabled = True
    calls += [asyncio.create_task(load()) for _ in range(2)]
    await gate.arrivals(3)
    gate.open()

    assert [7] * 4 == await asyncio.gather(*calls)
    assert 3 == gate.arrived


async def shared_ops(rollout: float, number: int) -> set[int]:
    """Return which of *number* ops share flights in a new guard with *rollout*."""
    loads: Counter[int] = Counter()
    gate = Gate()

    @coalesce("rollout-{item}", guard=Guard(rollout=rollout))
    async def load(item: int) -> None:
        loads[item] += 1
        await gate.passage()

    calls = [asyncio.create_task(load(item)) for item in range(number) for _ in range(2)]
    await asyncio.sleep(0)  # all have called
    gate.open()
    await asyncio.gather(*calls)
    return {item for item in range(number) if loads[item] == 1}


async def test_rollout_is_stable() -> None:
    """A roll-out covers its share of the ops, the same ones each time, and more of them when it grows."""
    quarter, again, half = [await shared_ops(share, 400) for share in (0.25, 0.25, 0.5)]

    assert quarter == again
    assert quarter < half
    assert (100, 200) == (pytest.approx(len(quarter), abs=30), pytest.approx(len(half), abs=40))


@pytest.mark.parametrize(("expected", "rollout"), [(0, 0.0), (20, 1.0)])
async def test_rollout_of_nothing_and_all(expected: int, rollout: float) -> None:
    """A roll-out of nothing shares no flight, and one of everything shares all."""
    assert expected == len(await shared_ops(rollout, 20))


# ── FastAPI ──────────────────────────────────────────────────────────────────────────────────────


async def get(app: FastAPI, path: str) -> Any:
    """Return the JSON that *app* answers to a GET of *path*."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return (await client.get(path)).json()


async def test_fastapi_route(guard: Guard, source: Source) -> None:
    """A coalesced function is a route, its parameters parsed by its annotations."""
    app = FastAPI()

    @app.get("/items/{item}")
    @coalesce("item-{item}-{page}", guard=guard, ttl=5)
    async def load(item: int, page: int = 1) -> list[int]:
        return [item, page, await source.read()]

    answers = [await get(app, path) for path in ("/items/7?page=2", "/items/7?page=2", "/items/7")]

    assert [[7, 2, 1], [7, 2, 1], [7, 1, 2]] == answers


@pytest.mark.parametrize("is_overridden", [False, True])
async def test_fastapi_dependency(is_overridden: bool, menus: type[Any]) -> None:
    """A coalesced method is a dependency, its parameters parsed by its annotations; named again, it is overridden."""
    app = FastAPI()
    menu = menus("south")

    @app.get("/menus/{item}")  # noqa: FAST003  # the dependency takes it
    async def read(found: Annotated[Any, Depends(menu.own)]) -> Any:
        return found

    if is_overridden:
        app.dependency_overrides[menu.own] = lambda: "instead"

    assert ("instead" if is_overridden else ["south", 7]) == await get(app, "/menus/7")


async def test_fastapi_with_postponed_annotations(guard: Guard) -> None:
    """A route in a module with postponed annotations has its names looked up in that module."""
    source = (
        "from __future__ import annotations\n"
        "from uuid import UUID as Identifier\n"
        "async def load(item: Identifier) -> str:\n"
        "    return type(item).__name__\n"
    )
    namespace: dict[str, Any] = {"__name__": "elsewhere"}
    exec(compile(source, "elsewhere", "exec", dont_inherit=True), namespace)  # noqa: S102
    app = FastAPI()
    app.get("/items/{item}")(coalesce("item-{item}", guard=guard)(namespace["load"]))

    assert "UUID" == await get(app, "/items/00000000-0000-0000-0000-000000000007")


def test_type_of_a_coalesced_function() -> None:
    """What the decorator returns can be recognised."""
    assert isinstance(module_level, Coalesced)


# ── Pydantic ─────────────────────────────────────────────────────────────────────────────────────


class Customer(BaseModel):
    """An argument of Pydantic's."""

    number: int


async def test_methods_of_a_model(guard: Guard) -> None:
    """A model has coalesced methods if it is told that they are no fields, in either of Pydantic's ways."""

    class Telling(BaseModel):
        model_config = ConfigDict(ignored_types=(Coalesced, CoalescedManyMethod))
        city: str

        @coalesce("told-{self.city}-{menu_id}", guard=guard, ttl=5)
        async def load(self, menu_id: int) -> str:
            return f"{self.city} {menu_id}"

        @coalesce(guard=guard, ttl=5)
        async def own(self, menu_id: int) -> str:
            return f"own {self.city} {menu_id}"

        @coalesce_many(guard=guard, ttl=5)
        async def many(self, menu_ids: list[int]) -> dict[int, str]:
            return dict.fromkeys(menu_ids, self.city)

    class Annotated(BaseModel):
        city: str

        async def _load(self, menu_id: int) -> str:
            return f"{self.city} {menu_id}"

        load: ClassVar = coalesce("annotated-{self.city}-{menu_id}", guard=guard, ttl=5)(_load)

    rome = Telling(city="Rome")
    assert ["Rome 7", "own Rome 7", {7: "Rome"}] == [await rome.load(7), await rome.own(7), await rome.many([7])]
    assert "Rome 7" == await Annotated(city="Rome").load(7)
    assert {"city"} == set(Telling.model_fields) == set(Annotated.model_fields)
    assert {"city": "Rome"} == rome.model_dump()


def test_methods_of_a_model_that_is_not_told() -> None:
    """Without that, Pydantic's own error names the method and what to write."""
    with pytest.raises(PydanticUserError, match=r"<coalesced .*load>.*(?s:.*)ClassVar.*ignored_types"):

        class Untold(BaseModel):  # pyright: ignore[reportUnusedClass]  # defining it is the test
            @coalesce
            async def load(self, menu_id: int) -> str:
                return ""


@pytest.mark.parametrize("template", [None, "order-{customer}"])
@pytest.mark.parametrize("annotation", [Customer, "Customer", Customer | None, list[Customer], Annotated[Customer, 7]])
def test_model_that_is_part_of_a_key(annotation: Any, template: Any, guard: Guard) -> None:
    """An argument that its annotation says has no place in a key is refused when the function is decorated."""

    async def load(customer: Any) -> str:
        return ""

    load.__annotations__["customer"] = annotation
    with pytest.raises(InvalidKey, match=r"load: the parameter 'customer' is a .*\.Customer, .* '…-{customer\.id}'"):
        coalesce(template, guard=guard)(load)
    assert "order-7" == coalesce("order-{customer.number}", guard=guard)(load).key(Customer(number=7))
    assert coalesce(ignore=("customer",), guard=guard)(load)
    assert coalesce(key=lambda customer: f"by-{customer.number}", guard=guard)(load)
