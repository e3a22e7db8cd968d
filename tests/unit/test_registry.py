import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from stampede_guard import Coalesced, Guard, InvalidKey, coalesce
from stampede_guard._keys import compile_key
from stampede_guard._operation import Operation
from stampede_guard._policy import Policy
from stampede_guard._registry import Registry
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

    @coalesce(key=key, guard=guard, ttl=5)
    async def load(item: int) -> str:
        return answer

    return load


def plain(guard: Guard, key: str | None = "plain-{item}") -> Coalesced[[int], int]:
    """Return a coalesced function that depends on its arguments alone."""

    @coalesce(key=key, guard=guard, ttl=5)
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


def test_two_functions_with_one_template(guard: Guard) -> None:
    """A template that another function has is refused, with both names, since answers would get mixed up."""

    @coalesce("item-{item}", guard=guard)
    async def first(item: int) -> str: ...

    with pytest.raises(InvalidKey, match=r"\.second and .*\.first would share answers.*Change a template"):

        @coalesce("item-{item}", guard=guard)
        async def second(item: int) -> str: ...


def test_two_templates_with_an_op_in_common(guard: Guard) -> None:
    """Two templates need not be equal to collide."""

    @coalesce("item-{item}", guard=guard)
    async def first(item: str) -> str: ...

    with pytest.raises(InvalidKey, match="would share answers"):

        @coalesce("item-top", guard=guard)
        async def second() -> str: ...


def test_overriding_method_with_the_same_template(guard: Guard) -> None:
    """An overriding method and the overridden one are two functions, which one instance could call both."""

    class Base:
        @coalesce("item-{item}", guard=guard)
        async def load(self, item: int) -> str: ...

    with pytest.raises(InvalidKey, match=r"Sub\.load and .*Base\.load would share answers"):

        class Sub(Base):
            @coalesce("item-{item}", guard=guard)
            async def load(self, item: int) -> str: ...


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


def test_dead_function_frees_its_ops(guard: Guard) -> None:
    """A function that is gone claims nothing."""
    first = plain(guard, "item-{item}")
    del first
    gc.collect()

    @coalesce("item-{item}", guard=guard)
    async def second(item: int) -> str: ...

    assert [second._operation] == list(guard._registry.operations())


def test_function_in_a_dead_cycle_frees_its_ops(guard: Guard) -> None:
    """A function that is garbage, and only waits for its collection, claims nothing."""
    first: Any = plain(guard, "item-{item}")
    first.itself = first
    del first

    @coalesce("item-{item}", guard=guard)
    async def second(item: int) -> str: ...

    assert [second._operation] == list(guard._registry.operations())


async def test_function_defined_anew(guard: Guard) -> None:
    """A module that is reloaded may define its functions again, and what the old ones remembered is dropped."""
    first = plain(guard)
    await first(7)
    second = plain(guard)

    assert second.peek(7) is None
    assert [second._operation] == list(guard._registry.operations())


async def test_function_defined_anew_counts_on(guard: Guard) -> None:
    """Under one name everything is counted together."""
    await plain(guard)(7)
    await plain(guard)(7)

    assert 2 == guard.stats().operations["plain-{item}"].loads


async def test_load_of_a_function_defined_anew_is_not_stored(guard: Guard) -> None:
    """What an old function still loads answers its callers, and is not taken for the new one's."""
    gate = Gate()
    call = asyncio.create_task(held(guard)(7, gate))
    await gate.arrivals(1)
    again = held(guard)
    gate.open()

    assert 7 == await call
    assert again.peek(7, gate) is None


@pytest.mark.parametrize("key", [None, "closure-{item}"])
def test_two_living_closures(guard: Guard, key: str | None) -> None:
    """Two closures of one name may answer differently, so the second is refused while the first is in use."""
    first = closure(guard, "one", key)

    with pytest.raises(InvalidKey, match=r"closure\.<locals>\.load is decorated again.*a Guard of its own"):
        closure(guard, "two", key)
    assert first.guard is guard


async def test_closure_after_a_dead_one(guard: Guard) -> None:
    """A closure may follow one that is gone, and inherits none of its answers."""
    await closure(guard, "one")(7)
    gc.collect()

    assert "two" == await closure(guard, "two")(7)


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
        __wrapped__ = load

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
