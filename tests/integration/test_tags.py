"""Invalidation by tag: one operation of the store, however many entries there are."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from loaders import refuse, returning
from observing import commands_run, load_scripts
from redis.asyncio import Redis
from waiting import until

from stampede_guard import Guard, InvalidKey, coalesce
from stampede_guard._l2.tier import key_of

MakeGuard = Callable[..., Guard]
Pair = tuple[Guard, Guard]

DAY = 86_400


async def ask(guard: Guard, answer: str, op: str = "menu-7", *tags: str, **options: Any) -> str:
    """Call for what is in the store, or else loaded as *answer*; not remembered in memory."""
    options = {"l2_ttl": 60, "returns": str, **options}
    return await guard.fetch(op, returning(answer), tags=tags, **options)


async def ask_all(guard: Guard, answer: str, number: int) -> list[str]:
    """Call for *number* ops of one tag, a few at a time."""
    answers: list[str] = []
    for first in range(0, number, 50):
        some = range(first, min(first + 50, number))
        answers += await asyncio.gather(*(ask(guard, answer, f"menu-{each}", "menus") for each in some))
    return answers


@pytest.mark.usefixtures("no_echoes")
@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize("number", [1, 1000])
async def test_invalidation_costs_the_same_for_any_number(number: int, pair: Pair, admin: Redis) -> None:
    """Behind a tag there may be one entry or a thousand: the server runs one script."""
    first, second = pair
    await ask_all(first, "old", number)
    await load_scripts(admin)
    before = await commands_run(admin)

    await second.invalidate_tag("menus")

    ran = await commands_run(admin) - before
    del ran["info"]
    assert {"evalsha": 1, "time": 1, "pexpire": 1, "set": 1, "publish": 1} == ran
    assert ["new"] * number == await ask_all(first, "new", number)
    assert await ask(second, "newer", "menu-0", "menus") == "new"


async def test_any_tag_will_do(pair: Pair) -> None:
    """An entry with several tags is forgotten with each of them, and one without them stays."""
    first, second = pair
    for tag in ("menus", "restaurant:3"):
        await ask(first, "old", "menu-7", "menus", "restaurant:3")
        await ask(first, "old", "menu-8", "desserts")
        await ask(first, "old", "menu-9")

        await second.invalidate_tag(tag)

        assert await ask(first, "new", "menu-7", "menus", "restaurant:3") == "new"
        assert await ask(first, "new", "menu-8", "desserts") == "old"
        assert await ask(first, "new", "menu-9") == "old"
        await second.invalidate("menu-7")


async def test_tags_from_templates(pair: Pair) -> None:
    """A decorated function's tags are built from its arguments, and told by `tags`."""

    def decorated(guard: Guard) -> Any:
        answers = iter(["old", "new"])

        @coalesce("menu-{menu_id}", guard=guard, l2_ttl=60, tags=("restaurant:{restaurant.name}", "menus"))
        async def load(menu_id: int, restaurant: Any) -> str:
            return next(answers)

        return load

    class Mario:
        name = "Mario's {own}"

    with pytest.raises(InvalidKey, match="leaves out"):
        decorated(pair[0])

    @coalesce("menu-{menu_id}-{name}", guard=pair[0], l2_ttl=60, tags=("restaurant:{name}", "menus"))
    async def load(menu_id: int, name: str) -> str:
        return next(answers)

    answers = iter(["old", "new"])
    assert await load(7, Mario.name) == "old"
    tag, _ = load.tags(7, Mario.name)
    await pair[1].invalidate_tag("restaurant:Luigi")
    assert await load(7, Mario.name) == "old"
    await pair[1].invalidate_tag(tag)
    assert await load(7, Mario.name) == "new"


@pytest.mark.parametrize("tag", ["menü { x}", "t" * 5000, "with space", "menu-7", "\ud800", ":", "{", "~"])
async def test_any_text_is_a_tag(tag: str, pair: Pair) -> None:
    """Whatever characters a tag has, and however many, it is itself; an op of the same name is something else."""
    first, second = pair
    await ask(first, "old", "menu-7", tag)
    await ask(first, "old", "menu-8", f"{tag}.")

    await second.invalidate_tag(f"{tag}!")
    assert await ask(first, "new", "menu-7", tag) == "old"
    await second.invalidate_tag(tag)

    assert await ask(first, "new", "menu-7", tag) == "new"
    assert await ask(first, "new", "menu-8", f"{tag}.") == "old"


@pytest.mark.parametrize("tag", ["menus", ""], ids=["a tag", "the namespace"])
async def test_lost_mark_makes_its_entries_invalid_for_ever(tag: str, pair: Pair, admin: Redis, namespace: str) -> None:
    """When a mark is evicted, what was stored under it is not believed any more, nor with the mark that comes next."""
    first, second = pair
    await ask(first, "old", "menu-7", "menus")
    await ask(first, "old", "menu-8", "menus")
    value = f"{key_of(namespace, 'menu-7')}:v"
    old = await admin.get(value)

    await admin.delete(f"{key_of(namespace, tag)}:t")

    assert await ask(second, "new", "menu-8", "menus") == "new"  # this makes a mark
    assert await admin.exists(f"{key_of(namespace, tag)}:t")
    assert await ask(second, "new", "menu-7", "menus") == "new"
    assert old is not None
    await admin.set(value, old, px=60_000)
    assert await ask(second, "newer", "menu-7", "menus") == "newer"


@pytest.mark.parametrize("mark", [b"", b"x", b"x" * 11, b"x" * 12])
async def test_garbage_for_a_mark_makes_nothing_valid(mark: bytes, pair: Pair, admin: Redis, namespace: str) -> None:
    """A mark that somebody else wrote, of whatever length, is no entry's; after an invalidation all is well."""
    first, second = pair
    await ask(first, "old", "menu-7", "menus")

    await admin.set(f"{key_of(namespace, 'menus')}:t", mark)

    assert await ask(second, "new", "menu-7", "menus") == "new"
    await first.invalidate_tag("menus")
    assert await ask(second, "newer", "menu-7", "menus") == "newer"
    assert await ask(first, "newest", "menu-7", "menus") == "newer"


@pytest.mark.parametrize(("l2_ttl", "shortest"), [(60, DAY - 60), (3 * DAY, 6 * DAY - 60)])
async def test_marks_outlive_their_entries(
    l2_ttl: int, shortest: int, make_guard: MakeGuard, admin: Redis, namespace: str
) -> None:
    """A mark lives for a day, or for twice as long as what is stored under it."""
    async with make_guard() as guard:
        await ask(guard, "soup", "menu-7", "menus", l2_ttl=l2_ttl)

    for tag in ("menus", ""):
        assert shortest < await admin.ttl(f"{key_of(namespace, tag)}:t") <= 7 * DAY


async def test_clear_forgets_the_namespace_and_no_other(
    pair: Pair, make_guard: MakeGuard, admin: Redis, namespace: str
) -> None:
    """Everything of one namespace is forgotten, tagged or not; the same ops of another one stay."""
    first, second = pair
    async with make_guard(namespace=f"{namespace}-2") as other:
        for guard in (first, other):
            await ask(guard, "old", "menu-7", "menus")
            await ask(guard, "old", "menu-8")

        await second.clear()

        assert ["new", "new"] == [await ask(first, "new", "menu-7", "menus"), await ask(first, "new", "menu-8")]
        assert ["old", "old"] == [await ask(other, "new", "menu-7", "menus"), await ask(other, "new", "menu-8")]


async def test_tags_without_a_store() -> None:
    """In memory alone, tags and `clear` work the same, and nothing has to be entered."""
    guard = Guard()

    async def remember() -> None:
        for op, tags in (("menu-7", ("menus", "restaurant:3")), ("menu-8", ("menus",)), ("hours", ())):
            await ask(guard, "soup", op, *tags, ttl=60, l2_ttl=None)

    def remembered() -> list[str]:
        return [op for op in ("menu-7", "menu-8", "hours") if guard.peek(op) is not None]

    await remember()
    await guard.invalidate_tag("restaurant:3")
    assert ["menu-8", "hours"] == remembered()
    await guard.invalidate_tag("menus", wait=False)
    assert ["hours"] == remembered()
    await guard.invalidate_tag("nobody's")
    assert ["hours"] == remembered()
    await remember()
    await guard.clear()
    assert remembered() == []
    assert guard.capabilities == frozenset()


async def test_tags_in_memory_over_a_redis_store(pair: Pair) -> None:
    """What is kept in memory alone is invalidated by tag in every guard."""
    for guard in pair:
        await ask(guard, "soup", "menu-7", "menus", ttl=60, l2_ttl=None)

    await pair[0].invalidate_tag("menus")

    await until(lambda: pair[1].peek("menu-7") is None, "the other to be told")
    assert pair[0].peek("menu-7") is None


@pytest.mark.parametrize("tag", ["", 7, None, ("menus",)])
async def test_what_is_no_tag_cannot_be_invalidated(tag: Any) -> None:
    """A tag is a text, and not empty."""
    with pytest.raises(InvalidKey, match="a tag is a string, and not empty"):
        await Guard().invalidate_tag(tag)


@pytest.mark.parametrize("tags", ["menus", ("",), (7,), [["menus"]], {"menus"}, ("tag",) * 17])
async def test_bad_tags_of_a_fetch(tags: Any) -> None:
    """`fetch` refuses what a decorated function's tags could not be, too many among them, before it loads."""
    with pytest.raises(InvalidKey, match="tags"):
        await Guard().fetch("menu-7", refuse, tags=tags)


@pytest.mark.parametrize("tags", ["menus", ("",), (7,), ("tag",) * 17, ("menu-{menu_id}",)])
def test_bad_tags_of_a_function(tags: Any) -> None:
    """A decorated function's tags are checked when it is decorated."""
    with pytest.raises(InvalidKey, match="tag"):
        coalesce("menu", tags=tags)(refuse)


async def test_sixteen_tags_are_kept(pair: Pair) -> None:
    """As many as are allowed all work, beside a value of the greatest length."""
    first, second = pair
    tags = [f"tag-{number}" for number in range(16)]
    await ask(first, "s" * (1 << 20), "menu-7", *tags)
    assert len(await ask(second, "new", "menu-7", *tags)) == 1 << 20

    await second.invalidate_tag("tag-15")

    assert await ask(first, "new", "menu-7", *tags) == "new"
