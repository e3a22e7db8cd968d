"""Guards that share a store, as the processes of a service do: who loads, who waits, and what all of them forget."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from inside import backplane_of, is_expecting, tier_of
from loaders import Kitchen, refuse
from task_factories import in_force, pytest_generate_tests, task_factory
from waiting import until

from stampede_guard import Guard, LoadTimeout, _path, coalesce

__all__ = ("in_force", "pytest_generate_tests", "task_factory")

MakeGuard = Callable[..., Guard]
Pair = tuple[Guard, Guard]

OP = "menu-7"


def ask(guard: Guard, kitchen: Kitchen, op: str = OP, **options: Any) -> "asyncio.Task[str]":
    """Begin a call that both tiers remember."""
    options = {"ttl": 60, "l2_ttl": 60, "returns": str, **options}
    return asyncio.create_task(guard.fetch(op, kitchen.load, **options))


async def stored(make_guard: MakeGuard) -> str:
    """Return what a newcomer finds in the store."""
    async with make_guard() as newcomer:
        return await newcomer.fetch(OP, refuse, l2_ttl=60, returns=str)


def remembered(guard: Guard, op: str = OP) -> Any:
    """Return what *guard* remembers."""
    entry = guard.peek(op)
    return None if entry is None else entry.value


@pytest.mark.usefixtures("long_leases")
async def test_one_load_for_all(make_guard: MakeGuard) -> None:
    """Five guards with ten callers each load once; the end of the load wakes all, and leaves no lease."""
    kitchen = Kitchen(is_open=False)
    async with AsyncExitStack() as stack:
        guards = [await stack.enter_async_context(make_guard()) for _ in range(5)]
        calls = [ask(guards[0], kitchen)]
        await kitchen.gate.arrivals(1)
        calls += [ask(guard, kitchen) for guard in guards for _ in range(10)]
        await until(lambda: all(is_expecting(guard, OP) for guard in guards[1:]), "four to wait")
        kitchen.gate.open()
        answers = await asyncio.gather(*calls)

        assert [({}, True)] * 5 == [(backplane_of(each)._wake_ups, tier_of(each).leases.is_idle) for each in guards]
    stats = [guard.stats() for guard in guards]

    assert ({"soup 1"}, 1) == ({*answers}, kitchen.loads)
    assert [(1, 0, 0, 1)] + [(0, 1, 1, 0)] * 4 == [
        (each.loads, each.l2_waits, each.l2_hits, each.l2_misses) for each in stats
    ]


@pytest.mark.usefixtures("long_leases")
@pytest.mark.parametrize(
    ("options", "error"),
    [({}, ValueError), ({"load_timeout": 0.2}, LoadTimeout), ({"on_abandon": "cancel"}, asyncio.CancelledError)],
    ids=["failed", "too long", "cancelled"],
)
async def test_load_that_ends_without_a_value_hands_the_right_on(
    options: dict[str, Any], error: type[BaseException], pair: Pair
) -> None:
    """The leader's callers get its error; the process that waited loads at once."""
    first, second = pair
    failing, kitchen = Kitchen(is_open=False), Kitchen()
    failing.error = ValueError("out of soup")
    leader = ask(first, failing, **options)
    await failing.gate.arrivals(1)
    follower = ask(second, kitchen)
    if error is not LoadTimeout:
        await until(lambda: is_expecting(second, OP), "the other to wait")
        _ = leader.cancel() if options else failing.gate.open()

    with pytest.raises(error):
        await leader
    assert ("soup 1", 1) == (await follower, second.stats().l2_misses)


@pytest.mark.parametrize("load_timeout", [0.2, None])
async def test_load_elsewhere_is_waited_for_as_long_as_a_load_may_take(
    load_timeout: float | None, pair: Pair, make_guard: MakeGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then this process loads too, and does not store; where loads may take any time, the waiting has an end, too."""
    monkeypatch.setattr(_path, "_WAIT", 0.2)
    first, second = pair
    slow, kitchen = Kitchen(is_open=False), Kitchen(dish="salad")
    leader = ask(first, slow)
    await slow.gate.arrivals(1)

    assert "salad 1" == await ask(second, kitchen, load_timeout=load_timeout)
    assert ("salad 1", {}) == (remembered(second), backplane_of(second)._wake_ups)
    assert (1, 1) == (second.stats().l2_waits, second.stats().loads)
    slow.gate.open()
    assert ("soup 1", "soup 1") == (await leader, await stored(make_guard))


@pytest.mark.usefixtures("long_leases")
@pytest.mark.parametrize("how", ["lease=False", "disabled", "rollout=0"])
async def test_load_that_is_not_waited_for(how: str, pair: Pair, make_guard: MakeGuard) -> None:
    """A process that does not wait for another's load loads at once, without the right to store."""
    first, second = pair
    second.enabled = how != "disabled"
    second.rollout = 0.0 if how == "rollout=0" else 1.0
    kitchen = Kitchen(is_open=False)
    calls = [ask(first, kitchen)]
    await kitchen.gate.arrivals(1)
    calls.append(ask(second, kitchen, lease=how != "lease=False"))
    await kitchen.gate.arrivals(2)
    kitchen.gate.open()

    assert ["soup 1", "soup 2"] == await asyncio.gather(*calls)
    assert (0, "soup 1") == (second.stats().l2_waits, await stored(make_guard))
    if how == "lease=False":
        assert "soup 2" == remembered(second)


TAGS = {"a": ("soups", "hot"), "b": ("soups",), "c": ("hot",), "d": ()}


@pytest.mark.parametrize(
    ("invalidate", "left"),
    [
        (lambda guard: guard.invalidate("a"), "bcd"),
        (lambda guard: guard.invalidate_tag("soups"), "cd"),
        (lambda guard: guard.clear(), ""),
    ],
    ids=["op", "tag", "everything"],
)
async def test_invalidation_reaches_every_process(invalidate: Any, left: str, pair: Pair) -> None:
    """What one process invalidates all forget, in memory and in the store; nothing is loaded twice after that."""
    first, second = pair
    kitchen = Kitchen()
    for guard in pair:
        for op, tags in TAGS.items():
            await ask(guard, kitchen, op, tags=tags)
    before = [remembered(second, op) for op in TAGS]
    await invalidate(first)
    at_once = "".join(op for op in TAGS if remembered(first, op))
    await until(lambda: remembered(second, "a") is None, "the word to arrive")
    late = "".join(op for op in TAGS if remembered(second, op))
    answers = [[await ask(guard, kitchen, op, tags=tags) for op, tags in TAGS.items()] for guard in pair]

    assert (["soup 1", "soup 2", "soup 3", "soup 4"], left, left) == (before, at_once, late)
    assert answers[0] == answers[1]
    assert left == "".join(op for op, old, new in zip(TAGS, before, answers[0], strict=True) if old == new)
    assert 8 - len(left) == kitchen.loads


async def test_refresh_reaches_every_process(pair: Pair) -> None:
    """What a refresh stored is what the others give out next; they are told, though none waits. It has its tags."""
    first, second = pair
    kitchen = Kitchen()

    @coalesce(OP, guard=first, ttl=60, l2_ttl=60, tags=("menus",))
    async def load() -> str:
        return await kitchen.load()

    for guard in pair:
        await ask(guard, kitchen, tags=("menus",))
    refreshed = await load.refresh()
    await until(lambda: remembered(second) is None, "the other to be told")

    assert ["soup 2"] * 4 == [refreshed, await load(), remembered(first), await ask(second, kitchen, tags=("menus",))]
    assert tier_of(first).leases.is_idle
    await second.invalidate_tag("menus")
    await until(lambda: load.peek() is None, "the first to be told")
    assert "soup 3" == await load()


async def test_capabilities(pair: Pair) -> None:
    """Guards can do what their store can."""
    assert all(guard.capabilities >= {"leases", "backplane", "tags", "versions"} for guard in pair)
