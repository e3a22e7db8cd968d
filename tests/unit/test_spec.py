import functools
from collections.abc import Callable
from contextvars import Context, ContextVar
from decimal import Decimal
from typing import Any

import pytest
from inside import untyped

from stampede_guard import InvalidKey
from stampede_guard._keys.names import qualified_name
from stampede_guard._keys.spec import MAX_OP_LENGTH, compile_key, parameters_of, receiver_of, shortened

HERE = __name__
tenant: ContextVar[Any] = ContextVar("tenant", default="acme")
locale: ContextVar[str] = ContextVar("locale", default="en")
unset: ContextVar[str] = ContextVar("unset")


class User:
    def __init__(self, number: int) -> None:
        self.number = number
        self.home = self


async def one(item: Any) -> None:
    """Take one argument."""


async def two(left: Any, right: Any = "right") -> None:
    """Take two, one by default."""


async def many(first: Any, /, second: Any = 2, *rest: Any, last: Any = None, **others: Any) -> None:
    """Take arguments of every kind."""


class Menus:
    region = "north"

    async def load(self, item: Any) -> None: ...

    async def of_class(cls, item: Any) -> None: ...  # noqa: N805  # pyright: ignore[reportSelfClsParameterName]  # undecorated, as the decorator sees it

    async def alone(self) -> None: ...


async def nothing() -> None:
    """Take none."""


# ── Templates ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("expected", "template"),
    [
        ("item-7", "item-{item}"),
        ("7", "{item}"),
        ("item:7:", "item:{item}:"),
        ("7-7", "{item}-{item}"),
        ("a~-7", "a~-{item}"),
        ("é-7", "é-{item}"),
        ('"it\'s"/7', '"it\'s"/{item}'),
        ("a\\7", "a\\{item}"),
        ("a\\N-7", "a\\N-{item}"),
        ("a\x007", "a\x00{item}"),
    ],
)
def test_template(expected: str, template: str) -> None:
    """A template's text stands as it is, whatever Python would make of it, and values stand in it."""
    assert expected == compile_key(one, template).build(7)


@pytest.mark.parametrize(
    ("expected", "value"),
    [("item-7", "7"), ("item-a%2Db", "a-b"), ("item-~None", None), ("item-~True", True), ("item-%2D7", -7)],
)
def test_template_escapes(expected: str, value: object) -> None:
    """A value never contains a separator, and never looks like another kind of value."""
    assert expected == compile_key(one, "item-{item}").build(value)


def test_template_reaches_into_an_argument() -> None:
    """An attribute of an argument can stand in a template, however deep."""
    assert "user-7-7" == compile_key(one, "user-{item.number}-{item.home.home.number}").build(User(7))


def test_template_without_parameters() -> None:
    """A function without parameters has one op, its template."""
    assert "all-menus" == compile_key(nothing, "all-menus").build()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {}),
        ((1, "right"), {}),
        ((), {"left": 1}),
        ((1,), {"right": "right"}),
        ((), {"right": "right", "left": 1}),
    ],
)
def test_forms_of_one_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Defaults, positional and keyword forms of one call have one op."""
    assert "1-right" == compile_key(two, "{left}-{right}").build(*args, **kwargs)


def test_every_kind_of_parameter() -> None:
    """Positional-only, variadic and keyword-only parameters stand in a template too."""
    build = compile_key(many, "{first}:{second}:{rest}:{last}:{others}").build

    assert "1:2:~%28%29:~None:~%7B%7D" == build(1)
    assert build(1, 2, 3, last=4, a=5, b=6) == build(1, 2, 3, b=6, a=5, last=4)
    assert build(1, 2, 3) != build(1, 2, 4)
    assert build(1, a=5) != build(1, b=5)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("item-{item", "malformed"),
        ("item-}", "malformed"),
        ("item-{}", "give a parameter"),
        ("item-{0}", "give a parameter"),
        ("item-{item[0]}", "give a parameter"),
        ("item-{item.}", "give a parameter"),
        ("item-{item.class}", "give a parameter"),
        ("item-{item+1}", "give a parameter"),
        ("item-{item:>5}", "written one way only"),
        ("item-{item!r}", "written one way only"),
        ("", "is empty"),
        (" ", "is empty"),
        ("an item-{item}", "has a space"),
        ("item\n-{item}", "has a space"),
        ("{{item}}-{item}", "a brace"),
        ("100%-{item}", "a %"),
        ("item{item}", "needs a separator"),
        ("item-{item}s", "needs a separator"),
        ("{item}{item}", "needs a separator"),
        ("{item}s-{item}", "needs a separator"),
        ("{item}-s{item}", "needs a separator"),
        ("~{item}", "needs a separator"),
        ("{item}.{item}", "needs a separator"),
    ],
)
def test_wrong_templates(template: str, message: str) -> None:
    """A template that is malformed or could be read in two ways is refused with the rule that it breaks."""
    with pytest.raises(InvalidKey, match=message):
        compile_key(one, template)


def test_unknown_name_in_a_template() -> None:
    """A placeholder that is no parameter is named, with the function."""
    with pytest.raises(InvalidKey, match=rf"{HERE}\.one: .* uses 'itme', which is no parameter"):
        compile_key(one, "item-{itme}")


def test_parameter_left_out() -> None:
    """A parameter that the template forgets is named, with the two ways out."""
    with pytest.raises(InvalidKey, match=r"leaves out the parameter 'right'.*\{right\}.*ignore=\('right',\)"):
        compile_key(two, "{left}")


@pytest.mark.parametrize("name", ["rest", "others"])
def test_variadic_parameter_left_out(name: str) -> None:
    """What a function takes by `*` or `**` counts as a parameter."""
    template = "-".join(f"{{{one}}}" for one in ("first", "second", "rest", "last", "others") if one != name)

    with pytest.raises(InvalidKey, match=f"leaves out the parameter '{name}'"):
        compile_key(many, template)


def test_ignored_parameter() -> None:
    """A parameter that does not change the answer stays out when it is named."""
    build = compile_key(two, "{left}", ignore=("right",)).build

    assert build(1, object()) == build(1, right=object())


@pytest.mark.parametrize("key", [None, "{left}-{right}", lambda left, right: "key"])
def test_unknown_ignored_name(key: Any) -> None:
    """A name to ignore that is no parameter is a typing error, which would have left the real one in."""
    with pytest.raises(InvalidKey, match="ignore= names 'rihgt', which is no parameter"):
        compile_key(two, key, ignore=("rihgt",))


def test_wrong_call() -> None:
    """A call that does not fit is reported under the function's own name, as by Python."""
    with pytest.raises(TypeError, match=r"^one\(\) missing 1 required positional argument: 'item'$"):
        compile_key(one, "item-{item}").build()


# ── Derived keys ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("expected", "value"), [("1", 1), ("1.0", 1.0), ("True", True), ("'1'", "1"), ("[1,None]", [1, None])]
)
def test_derived_key(expected: str, value: object) -> None:
    """Without a template the op is the function's name and its arguments, typed."""
    assert f"{HERE}.one({expected})" == compile_key(one, None).build(value)


@pytest.mark.parametrize("key", [None, "item-{item}", "item-{item.real}"])
def test_whole_number_that_python_does_not_write_in_decimal(key: str | None) -> None:
    """An `int` of more digits than `str` writes has an op of its own, as other values have."""
    build = compile_key(one, key).build
    huge = 10**5_000

    assert build(huge) == build(huge)
    assert 4 == len({build(huge), build(huge + 1), build(-huge), build(Decimal(huge))})


def test_derived_key_of_every_parameter() -> None:
    """Every argument is part of a derived key, defaults too."""
    assert f"{HERE}.many(1,2,(3),4,{{'a':5}})" == compile_key(many, None).build(1, 2, 3, last=4, a=5)


def test_derived_key_leaves_out_ignored_parameters() -> None:
    """What is ignored is left out of a derived key."""
    assert f"{HERE}.two(1)" == compile_key(two, None, ignore=("right",)).build(1, object())


def test_derived_key_of_an_object() -> None:
    """An argument that nothing can be derived from is an error of the call."""
    build = compile_key(one, None).build

    with pytest.raises(InvalidKey, match="pass a key template"):
        build(User(7))


def test_default_that_has_no_canonical_form() -> None:
    """A default is looked at when it is used, not before."""

    async def load(item: int, user: User = User(7)) -> None: ...  # noqa: B008

    assert "1-7" == compile_key(load, "{item}-{user.number}").build(1)


@pytest.mark.parametrize(("left", "written"), [("1", "'1'"), (1, "1"), ("x','y", "\"x','y\"")])
def test_parameter_called_int_lets_nothing_in_unquoted(left: object, written: str) -> None:
    """An argument that is a class, under the name of one, does not change how the others are written."""

    async def load(left: Any, int: type) -> None: ...  # noqa: A002  # that is the point

    op = compile_key(load, None).build(left, type(left))

    assert op.endswith(f"({written},builtins.{type(left).__name__})")


def test_parameter_names_shadow_nothing() -> None:
    """Parameters may be called as the builtins are, or as the compiled function's own names."""

    async def load(str: Any, int: Any, type: Any, build: Any) -> None: ...  # noqa: A002

    assert compile_key(load, None).build("a", 1, None, 2.0).endswith("load('a',1,None,2.0)")


# ── Key functions ────────────────────────────────────────────────────────────────────────────────


def test_key_function() -> None:
    """A key function gets the call's arguments, and returns the whole op."""

    def key(first: Any, second: Any = 2, *rest: Any, last: Any = None, **others: Any) -> str:
        return f"{first}|{second}|{rest}|{last}|{others}"

    assert "1|2|(3,)|4|{'a': 5}" == compile_key(many, key).build(1, 2, 3, last=4, a=5)


def test_key_function_sees_defaults() -> None:
    """A key function gets the function's defaults, not its own."""
    assert "1right" == compile_key(two, lambda left, right="wrong": f"{left}{right}").build(1)


def test_key_function_of_a_method() -> None:
    """A method's key function gets the instance too, and the op is what it returns."""
    assert "north-7" == compile_key(Menus.load, lambda self, item: f"{self.region}-{item}").build(Menus(), 7)


@pytest.mark.parametrize("answer", [None, 7, b"key", ""])
def test_key_function_that_returns_no_op(answer: Any) -> None:
    """An op is a string, and not empty."""
    build = compile_key(one, lambda item: answer).build

    with pytest.raises(InvalidKey, match=r"its key function returned .*; an op id is a string, and not empty"):
        build(1)


@pytest.mark.parametrize("key", [lambda: "", lambda left: "", lambda left, right, more: "", lambda *, left, right: ""])
def test_key_function_with_other_parameters(key: Any) -> None:
    """A key function that cannot take the same arguments is refused at decoration."""
    with pytest.raises(InvalidKey, match="its key function cannot take the same arguments"):
        compile_key(two, key)


def test_key_function_that_is_async() -> None:
    """A key is built without waiting."""

    async def key(item: Any) -> str:
        return str(item)

    with pytest.raises(InvalidKey, match="its key function is async"):
        compile_key(one, untyped(key))


@pytest.mark.parametrize("key", [7, b"item", ["item"]])
def test_key_of_a_wrong_type(key: Any) -> None:
    """A key is a template or a function."""
    with pytest.raises(InvalidKey, match=r"one: key=.*; give a template or a function"):
        compile_key(one, key)


def test_key_function_that_fails() -> None:
    """A key function's own error is the caller's."""
    build = compile_key(one, lambda item: item["id"]).build

    with pytest.raises(KeyError, match="id"):
        build({})


# ── Methods ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", [None, "item-{item}"])
def test_instances_have_ops_of_their_own(key: str | None) -> None:
    """A method's op contains its instance unless the key says otherwise."""
    spec = compile_key(Menus.load, key)
    one, two = Menus(), Menus()

    assert spec.is_local
    assert spec.build(one, 7) == spec.build(one, 7)
    assert spec.build(one, 7) != spec.build(two, 7)


def test_method_without_parameters() -> None:
    """A method's template may consist of text alone."""
    spec = compile_key(Menus.alone, "everything")
    one, two = Menus(), Menus()

    assert spec.build(one) != spec.build(two)


@pytest.mark.parametrize(
    ("expected", "key", "ignore"),
    [
        ("item-north-7", "item-{self.region}-{item}", ()),
        (f"{HERE}.Menus.load(7)", None, ("self",)),
        ("item-7", "item-{item}", ("self",)),
    ],
)
def test_instances_that_agree_share(expected: str, key: str | None, ignore: tuple[str, ...]) -> None:
    """Instances share answers when the template names what they have to agree in, or when they are ignored."""
    spec = compile_key(Menus.load, key, ignore=ignore)

    assert not spec.is_local
    assert expected == spec.build(Menus(), 7)


def test_classes_have_ops_of_their_own() -> None:
    """A class method's op contains its class, by identity within one process."""
    spec = compile_key(Menus.of_class, "item-{item}")

    assert spec.is_local
    assert spec.build(Menus, 7) != spec.build(User, 7)


def test_classes_go_by_name_between_processes() -> None:
    """Where other processes see the op, a class goes by its name."""
    spec = compile_key(Menus.of_class, "item-{item}", is_shared=True)

    assert not spec.is_local
    assert f"item-7#{HERE}.Menus" == spec.build(Menus, 7)


# ── Context variables ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("expected", "key"), [(f"{HERE}.one(7)", None), ("item-7", "item-{item}"), ("k", lambda item: "k")]
)
def test_context_variables_in_the_key(expected: str, key: Any) -> None:
    """Context variables follow whatever kind of key there is, escaped."""
    build = compile_key(one, key, vary=(tenant, locale)).build

    assert f"{expected}@acme@en" == Context().run(build, 7)


def test_context_variable_that_was_set() -> None:
    """The caller's value of the variable counts."""
    build = compile_key(one, "item-{item}", vary=(tenant,)).build
    context = Context()
    context.run(tenant.set, "a@b")

    assert "item-7@a%40b" == context.run(build, 7)


def test_context_variable_without_a_value() -> None:
    """A variable that has no value is an error of the call, which names it."""
    build = compile_key(one, "item-{item}", vary=(unset,)).build

    with pytest.raises(InvalidKey, match="the context variable 'unset', which has no value here"):
        Context().run(build, 7)


# ── Collisions ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mine", "theirs", "collides"),
    [
        ("item-{item}", "item-{item}", True),
        ("item-{item}", "{item}-item", True),
        ("item-{item}", "item-top", True),
        ("item-{item}", "item-~empty", True),
        ("{item}", "item", True),
        ("{item}--x", "a--{item}", True),
        ("item-{item}", "menu-{item}", False),
        ("item-{item}", "item:{item}", False),
        ("item-{item}", "item-{item}-x", False),
        ("item-{item}", "item--{item}", False),
        ("{item}-a", "{item}-b", False),
        ("{item}", "item-", False),
    ],
)
def test_templates_that_may_meet(mine: str, theirs: str, collides: bool) -> None:
    """Two templates collide when some text fits both, and not if they differ in a word or a separator."""
    mine_spec, theirs_spec = (
        compile_key(one, text, ignore=() if "{" in text else ("item",)) for text in (mine, theirs)
    )

    assert [collides] * 2 == [mine_spec.collides_with(theirs_spec), theirs_spec.collides_with(mine_spec)]


@pytest.mark.parametrize(
    ("template", "rival"),
    [("{item}", "{left}@{right}"), ("{item}-", "{left}-@{right}"), ("{item}@", "{left}@@{right}")],
)
def test_context_variables_count_in_collisions(template: str, rival: str) -> None:
    """What `vary` appends is seen when templates are compared, also where two separators become one."""
    mine, theirs = compile_key(one, template, vary=(tenant,)), compile_key(two, rival)

    assert Context().run(mine.build, 7) == theirs.build(7, "acme")
    assert mine.collides_with(theirs)


def test_instances_count_in_collisions() -> None:
    """What a method's instance appends is seen when templates are compared."""
    mine, theirs = compile_key(Menus.load, "{item}-"), compile_key(Menus.load, "{item}-")

    assert ("-#", None) == mine.shape[1:]
    assert mine.collides_with(theirs)


@pytest.mark.parametrize("key", [None, lambda item: "key"])
def test_keys_without_a_template_collide_by_name(key: Any) -> None:
    """Derived keys and key functions collide with those of a function of the same name, and no others."""

    async def other(item: Any) -> None: ...

    assert compile_key(one, key).collides_with(compile_key(one, key))
    assert not compile_key(one, key).collides_with(compile_key(other, key))
    assert not compile_key(one, key).collides_with(compile_key(one, "item-{item}"))
    assert not compile_key(one, "item-{item}").collides_with(compile_key(one, key))


# ── Names ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (f"{__name__}.load({{menu_id}},{{lang}})", True),
        (f"{__name__}.load(-{{menu_id}}-{{lang}}", True),
        ("{menu_id}({lang})", True),
        (f"{__name__}.load-({{menu_id}},{{lang}})", False),
        (f"{__name__}.loads({{menu_id}},{{lang}})", False),
        ("{menu_id}-{lang}", False),
        (f"{__name__}.load:{{menu_id}}:{{lang}}", False),
        ("load({menu_id},{lang})", False),
    ],
)
def test_template_that_spells_a_derived_key(template: str, expected: bool) -> None:
    """A template may not write what another function's derived key is."""

    async def load(menu_id: int, lang: str) -> None: ...

    load.__qualname__ = "load"
    spelt, derived = compile_key(load, template), compile_key(load, None)
    explicit = compile_key(load, lambda menu_id, lang: "x")

    assert (expected, expected) == (spelt.collides_with(derived), derived.collides_with(spelt))
    assert not spelt.collides_with(explicit)


def test_template_of_a_single_word_spells_no_derived_key() -> None:
    """A template may end before a derived key has said whose it is."""

    async def load() -> None: ...

    assert not compile_key(load, __name__).collides_with(compile_key(load, None))


# ── Long ones ────────────────────────────────────────────────────────────────────────────────────


async def search(query: str) -> str:
    """Take any text."""
    return query


@pytest.mark.parametrize(
    "key", [None, "search-{query}", lambda query: f"search-{query}"], ids=["derived", "text", "own"]
)
def test_long_op_is_digested(key: Any) -> None:
    """A long op is short, differs where its text does, and shows how it began."""
    build = compile_key(search, key).build
    ops = {build("a" * length + end) for length in (150, 200, 50_000) for end in ("", "b", "c")}

    assert 9 == len(ops)
    assert {200} == {len(op) for op in ops if op[0] == "~"}
    assert all("search" in op for op in ops)
    assert 6 == sum(op[0] == "~" for op in ops)


@pytest.mark.parametrize("length", [1, 199, 200, 201, 5_000])
def test_short_of_a_short_one_is_itself(length: int) -> None:
    """What stands for an op is not digested again, so a key may be passed on as it is; only what is long is."""
    op = "x" * length

    assert (op == shortened(op)) == (length < MAX_OP_LENGTH)
    assert shortened(op) == shortened(shortened(op))
    assert shortened("x" * (MAX_OP_LENGTH - 1) + "\ud800") != shortened("x" * (MAX_OP_LENGTH - 1) + "\ud801")


@pytest.mark.parametrize("key", [None, "search-{query}"], ids=["derived", "text"])
def test_no_argument_forges_a_digest(key: Any) -> None:
    """What stands for one call's op is an argument like others of another call."""
    build = compile_key(search, key).build
    op = build("a" * 500)

    assert len({op, build(op), build(op[len("search-") :]), build(op[66:])}) == 4
    assert shortened(f"search-{op}"[:MAX_OP_LENGTH]) != op


def test_name_of() -> None:
    """A function is called by its module and qualified name."""
    assert f"{HERE}.Menus.load" == qualified_name(Menus.load)


@pytest.mark.parametrize(
    ("expected", "function"), [("self", Menus.load), ("cls", Menus.of_class), (None, one), (None, nothing)]
)
def test_receiver_of(expected: str | None, function: Callable[..., Any]) -> None:
    """A method is recognised by its first parameter."""
    assert expected == receiver_of(function)


def test_parameters_of_a_wrapper() -> None:
    """A wrapper made with `functools.wraps` has the parameters of what it wraps."""

    @functools.wraps(two)
    async def wrapper(*args: Any, **kwargs: Any) -> None: ...

    assert ["left", "right"] == [parameter.name for parameter in parameters_of(wrapper)]
