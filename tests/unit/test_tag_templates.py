"""Tags as a decorated function builds them, and as callers spell them out."""

import datetime as dt
import enum
import logging
from collections.abc import Callable
from contextvars import ContextVar
from decimal import Decimal
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from stampede_guard import Guard, InvalidKey, coalesce
from stampede_guard._keys.tags import compile_tags, resolve_tag
from stampede_guard._keys.template import matches, resembles

HERE = __name__

tenant: ContextVar[str] = ContextVar("tenant", default="acme")


async def one(item: Any) -> None:
    """Take anything."""


async def two(left: int = 1, right: str = "r") -> None:
    """Have defaults."""


class Status(enum.Enum):
    OPEN = "open"


class Word(str, enum.Enum):  # noqa: UP042  # as code of before 3.11 has them
    OPEN = "open"


class Level(enum.IntEnum):
    HIGH = 3


class Loud(str):
    """A string that shows something else than it holds."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.upper()


def tags_of(function: Callable[..., Any], tags: Any) -> Callable[..., tuple[str, ...]]:
    """Return what builds the tags of calls of *function*."""
    build = compile_tags(function, tags)
    assert build is not None
    return build


# ── A template and the text that it makes ────────────────────────────────────────────────────────


@pytest.mark.parametrize("tags", [("restaurant:{item.number}", "menus"), ["restaurant:{item.number}", "menus"]])
def test_tags(tags: Any) -> None:
    """Tags are built each from its template, in order, and values stand in them as they are."""
    item = SimpleNamespace(number="1:2 ")

    assert ("restaurant:1:2 ", "menus") == tags_of(one, tags)(item)


@pytest.mark.parametrize(
    "value",
    [
        7,
        -7,
        True,
        None,
        1.5,
        float("-inf"),
        'it\'s {a} "b" \\ %41\n',
        "ada@example.com",
        "2026-01-31",
        "\ud800",
        UUID("6f9619ff-8b86-d011-b42d-00cf4fc964ff"),
        Decimal("-1.50"),
        dt.date(2026, 1, 31),
        dt.datetime(2026, 1, 31, 8, tzinfo=dt.UTC),
        Status.OPEN,
        Word.OPEN,
        Level.HIGH,
        Loud("menu"),
        PurePosixPath("/srv/menus"),
        (1, "a"),
        {"a": 1},
    ],
    ids=repr,
)
def test_what_an_f_string_makes(value: Any) -> None:
    """For each kind of value, the decorator, an f-string and a template with its values make the same tag."""
    spelt = f"restaurant:{value}:menus"

    assert (spelt,) == tags_of(one, ("restaurant:{item}:menus",))(value)
    assert spelt == resolve_tag("restaurant:{item}:menus", {"item": value})
    assert spelt == resolve_tag("restaurant:{item.value}:menus", {"item": SimpleNamespace(value=value)})


@pytest.mark.parametrize("value", [object(), one, SimpleNamespace().__init__, [object()]], ids=list("abcd"))
def test_address_is_no_tag(value: Any) -> None:
    """An object that shows nothing but its address is refused: nothing else could ever spell that tag."""
    with pytest.raises(InvalidKey, match="has no text but its address, so no tag can name it: use an attribute"):
        tags_of(one, ("menu:{item}",))(value)


def test_whole_number_that_python_does_not_write_in_decimal() -> None:
    """An `int` of more digits than an f-string writes is refused: no invalidation could spell that tag."""
    with pytest.raises(InvalidKey, match=r"^an argument of type builtins.int has no text .*limit.*: use an attribute"):
        tags_of(one, ("menu:{item}",))(10**5_000)


@pytest.mark.parametrize(("expected", "tag"), [("menu7s", "menu{item}s"), ("{7} 100 %'", "{{{item}}} 100 %'")])
def test_text_around_placeholders(expected: str, tag: str) -> None:
    """In a tag any text may stand around a placeholder."""
    assert (expected,) == tags_of(one, (tag,))(7)
    assert expected == resolve_tag(tag, {"item": 7})


def test_empty_tag_is_left_out() -> None:
    """A tag that comes out empty is none: no invalidation could name it, and the store's empty tag is `clear`."""
    assert ("menus",) == tags_of(one, ("{item}", "menus"))("")


def test_one_tag_is_a_tuple_too() -> None:
    """A single tag is not mistaken for its characters."""
    assert ("menus",) == tags_of(one, ("menus",))(7)


def test_tags_of_a_call_with_defaults_and_keywords() -> None:
    """However a call is written, it has the same tags."""
    build = tags_of(two, ("left:{left}", "right:{right}"))

    assert {("left:7", "right:r")} == {build(7), build(7, "r"), build(right="r", left=7)}


@pytest.mark.parametrize("tags", [(), []])
def test_no_tags(tags: Any) -> None:
    """Without tags there is nothing to build."""
    assert compile_tags(one, tags) is None


@pytest.mark.parametrize("tags", ["menus", {"menus"}, None, (7,), ("menus", ""), (b"menus",)], ids=repr)
def test_tags_of_a_wrong_type(tags: Any) -> None:
    """Tags are a tuple or a list of strings with something in them; a string alone would be one tag per letter."""
    with pytest.raises(InvalidKey, match=rf"^{HERE}\.one: tags=.*; give a tuple of strings, none of them empty$"):
        compile_tags(one, tags)


def test_too_many_tags() -> None:
    """There are at most sixteen: each costs room and a look at each read."""
    assert 16 == len(tags_of(one, [f"tag-{number}" for number in range(16)])(7))

    with pytest.raises(InvalidKey, match=rf"^{HERE}\.one: 17 tags; give at most 16$"):
        compile_tags(one, [f"tag-{number}" for number in range(17)])


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("menu:{menu}", rf"^{HERE}\.one: the tag 'menu:{{menu}}' uses 'menu', which is no parameter"),
        ("menu:{item", "the tag 'menu:{item' is malformed"),
        ("menu:{item!r}", "the tag 'menu:{item!r}' formats {item}"),
        ("menu:{item[0]}", r"the tag 'menu:{item\[0\]}' has {item\[0\]}; give a parameter"),
    ],
)
def test_wrong_template(tag: str, message: str) -> None:
    """A tag that is no template over the parameters is refused when the function is decorated."""
    with pytest.raises(InvalidKey, match=message):
        compile_tags(one, (tag,))


# ── Spelt out ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tag", ["menus", "restaurant:7", "{", "{}", "{x}", '{"a": 1}', "{ x }", "{0}", "100 %"])
def test_literal_means_itself(tag: str) -> None:
    """A tag without values is that tag, with any characters."""
    assert tag == resolve_tag(tag, {})


@pytest.mark.parametrize("values", [{"other": 7}, {"restaurant_id": 7, "wiat": False}])
def test_wrong_values(values: dict[str, Any]) -> None:
    """Values are those of the placeholders, none missing and none too many."""
    with pytest.raises(InvalidKey, match="give the values of its placeholders, and no others"):
        resolve_tag("restaurant:{restaurant_id}", values)


# ── Through a guard ──────────────────────────────────────────────────────────────────────────────


class Source:
    """Answers with a number that rises."""

    def __init__(self) -> None:
        self.loads = 0

    async def load(self) -> int:
        self.loads += 1
        return self.loads


@pytest.fixture
def guard() -> Guard:
    """Return a guard in memory."""
    return Guard()


@pytest.mark.parametrize("value", [UUID("6f9619ff-8b86-d011-b42d-00cf4fc964ff"), "n" * 5_000], ids=["UUID", "long"])
async def test_all_spellings_of_a_tag_meet(value: Any, guard: Guard) -> None:
    """A tag goes by an f-string, by the template with the value, and by what `tags` tells: of a long one, a digest."""
    source = Source()

    @coalesce("menu-{owner}", guard=guard, ttl=60, tags=("of:{owner}",))
    async def load(owner: UUID | str) -> int:
        return await source.load()

    assert 1 == await load(value)
    await guard.invalidate_tag(f"of:{value}")
    assert 2 == await load(value)
    await guard.invalidate_tag("of:{owner}", owner=value)
    assert 3 == await load(value)
    await guard.invalidate_tag(*load.tags(value))
    assert 4 == await load(value)
    for spelling, values in (("of:{self}", {"self": value}), (f"of:{value}", {})):
        await guard.fetch("other", source.load, ttl=60, tags=(f"of:{value}",))
        await guard.invalidate_tag(spelling, **values)
        assert guard.peek("other") is None
    assert [min(200, len(f"of:{value}"))] == [len(tag) for tag in load.tags(value)]


async def test_all_spellings_of_an_op_meet(guard: Guard) -> None:
    """An e-mail address in an op is invalidated and peeked at by the template with the value, as by the function."""
    source = Source()

    @coalesce("user-{email}", guard=guard, ttl=60)
    async def load(email: str) -> int:
        return await source.load()

    await load("ada@example.com")
    assert guard.peek("user-{email}", email="ada@example.com") is not None
    assert guard.peek(load.key("ada@example.com")) is not None
    await guard.invalidate("user-{email}", email="ada@example.com")
    assert load.peek("ada@example.com") is None


async def test_op_that_is_a_template(guard: Guard) -> None:
    """A template of a registered function without values is refused, and one of nothing registered is an op."""

    @coalesce("user-{email}", guard=guard, ttl=60)
    async def load(email: str) -> int:
        return 1

    with pytest.raises(InvalidKey, match=r"^op='user-{email}' is a template: pass the values .*, email=…\)$"):
        await guard.invalidate("user-{email}")
    with pytest.raises(InvalidKey, match=r"'user-{email}' has no {version_}: give the values of its placeholders"):
        await guard.invalidate("user-{email}", email="ada", version_=7)
    with pytest.raises(InvalidKey, match=r"'hours-{day}' lacks the value of {day}"):
        await guard.invalidate("hours-{day}", night=7)
    await guard.fetch("hours-{day}", Source().load, ttl=60)
    await guard.invalidate("hours-{day}")
    assert guard.peek("hours-{day}") is None
    assert load.key("ada") == "user-ada"


@pytest.mark.parametrize("op", ["", 7, None])
async def test_what_is_no_op(op: Any, guard: Guard) -> None:
    """An op is a text, and not empty."""
    with pytest.raises(InvalidKey, match="an op id is a string, and not empty"):
        await guard.invalidate(op)


async def test_values_that_do_not_make_the_op(guard: Guard) -> None:
    """The ops of a function with `vary=` tell more than the template does: its `key` has to be asked."""

    @coalesce("settings-{name}", guard=guard, ttl=60, vary=(tenant,))
    async def load(name: str) -> int:
        return 1

    with pytest.raises(InvalidKey, match=r"also tell a context variable or the instance; take the op from its .key"):
        await guard.invalidate("settings-{name}", name="theme")
    assert load.key("theme") == "settings-theme@acme"


async def test_misspelt_op_is_logged_once(guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    """An f-string with an unescaped value names no op of the template: the log says so once, and names no value."""
    caplog.set_level(logging.WARNING)

    @coalesce("user-{email}", guard=guard, ttl=60)
    async def load(email: str) -> int:
        return 1

    @coalesce(guard=guard, ttl=60)
    async def derived(name: str) -> int:
        return 1

    for op in (load.key("a@b"), derived.key("user-a@b"), "user-7", "user", "order-a@b"):
        await guard.invalidate(op)
    assert [] == caplog.messages

    for _ in range(2):
        await guard.invalidate("user-ada@example.com")
    (message,) = caplog.messages
    assert "resembles the template 'user-{email}'" in message
    assert "('user-{email}', email=…)" in message
    assert "ada" not in message


async def test_key_function_may_make_any_op(guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    """With a key function of the user's about, no op is taken for misspelt."""

    @coalesce("user-{email}", guard=guard, ttl=60)
    async def load(email: str) -> int:
        return 1

    @coalesce(key=lambda name: f"user-{name}", guard=guard, ttl=60)
    async def by_function(name: str) -> int:
        return 1

    await guard.invalidate("user-ada@example.com")
    del load
    assert by_function.key("a@b") == "user-a@b"
    assert [] == caplog.messages


async def test_template_of_a_tag_without_values(guard: Guard) -> None:
    """The template of a registered function's tag is refused without values, with what to write."""

    @coalesce("menu-{restaurant_id}", guard=guard, ttl=60, tags=("restaurant:{restaurant_id}",))
    async def load(restaurant_id: int) -> int:
        return 1

    refused = r"^tag='restaurant:{restaurant_id}' is a template: pass the values .* restaurant_id=…\), or put an f in"
    with pytest.raises(InvalidKey, match=refused):
        await guard.invalidate_tag("restaurant:{restaurant_id}")
    with pytest.raises(InvalidKey, match=refused):
        await guard.fetch("other", Source().load, tags=("restaurant:{restaurant_id}",))
    assert load.tags(7) == ("restaurant:7",)


async def test_value_with_a_placeholder_in_its_text(guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    """Text in braces may come from a value: such a tag means itself however it is spelt, and is logged once."""
    caplog.set_level(logging.WARNING)
    source = Source()

    @coalesce("menus-{query}", guard=guard, ttl=60, tags=("query:{query}",))
    async def load(query: str) -> int:
        return await source.load()

    query = "{name}"
    await load(query)
    await guard.invalidate_tag("query:{query}", query=query)
    assert 2 == await load(query)
    assert [] == caplog.messages
    await guard.invalidate_tag(*load.tags(query))
    await guard.fetch("other", source.load, ttl=60, tags=(f"query:{query}",))
    await guard.invalidate_tag(f"query:{query}")
    assert guard.peek("other") is None
    (message,) = caplog.messages
    assert "means itself" in message
    assert "name" not in message.replace("by its name", "")


# ── Shapes ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("is_one", "is_like_one", "text"),
    [
        (True, True, "menu-7-en"),
        (False, True, "menu-a@b-en"),
        (False, True, "menu--en"),
        (False, False, "menu-7"),
        (False, False, "xmenu-7-en"),
        (False, False, "menu-7-de"),
    ],
)
def test_shapes(text: str, *, is_one: bool, is_like_one: bool) -> None:
    """A text is of a shape, or only like it, or neither."""
    shape = ("menu", "-", None, "-", "en")

    assert is_one == matches(shape, text)
    assert is_like_one == resembles(shape, text)


def test_shape_that_begins_with_a_value() -> None:
    """Any text could begin with a value, so none is like such a shape."""
    assert not resembles((None, "-", "menu"), "a@b-menu")
