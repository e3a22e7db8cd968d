"""Each waiter's own error: what is copied, what cannot be, and what is never shared."""

import asyncio
import errno
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from inside import untyped
from pydantic import AfterValidator, BaseModel, ValidationError, model_validator

from stampede_guard import Guard, LoadCancelled, LoadFailed, Scoreboard
from stampede_guard._flights.failure import Failure
from stampede_guard.testing import Gate

MakeLoop = Callable[[], asyncio.AbstractEventLoop]


class PlainError(Exception):
    """An error like most."""


class WordedError(Exception):
    """An error that makes its message itself."""

    def __init__(self, restaurant_id: int, *, reason: str) -> None:
        super().__init__(f"no menu for {restaurant_id}")
        self.restaurant_id = restaurant_id
        self.reason = reason


class DoublingError(Exception):
    """An error whose `__init__` takes its own message for something else."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}")


class EmptyError(Exception):
    """An error that is false."""

    def __len__(self) -> int:
        return 0


class SingleError(Exception):
    """An error that says it is its own copy."""

    def __copy__(self) -> "SingleError":
        return self


class StubbornError(Exception):
    """An error that cannot be made twice."""

    def __new__(cls, *args: object) -> "StubbornError":  # noqa: PYI034  # its own type, whoever asks
        if not args:
            raise RuntimeError("only one")
        return super().__new__(cls)

    def __init__(self, *args: object) -> None:
        super().__init__()


class OddNotesError(Exception):
    """An error whose notes are no list."""

    def __init__(self) -> None:
        super().__init__()
        untyped(self).__notes__ = 7


class SlottedError(Exception):
    """An error with attributes that are not in its dict."""

    __slots__ = ("__hidden", "code", "never_set")

    def __init__(self, code: int) -> None:
        super().__init__("no menu")
        self.code = code
        self.__hidden = code + 1

    @property
    def hidden(self) -> int:
        return self.__hidden


class FaithlessError(Exception):
    """An error whose `__reduce__` makes something else."""

    def __reduce__(self) -> Any:
        return FaithlessError, ("something else",)


class Batch(ExceptionGroup[Exception]):
    """A group with more to it."""


def raised(error: Exception) -> Exception:
    """Return *error* as a load leaves it."""
    try:
        raise error
    except type(error) as caught:
        return caught


def frames(error: BaseException) -> list[str]:
    """Return the functions in the traceback of *error*."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


ERRORS = [
    PlainError(),
    PlainError("no menu", 7),
    WordedError(7, reason="closed"),
    DoublingError("menu"),
    EmptyError("nothing"),
    SingleError("menu"),
    KeyError("menu"),
    OSError(errno.ENOENT, "no such file", "menu.json"),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ImportError("no module", name="menus", path="/menus"),
    TimeoutError(),
    ExceptionGroup("several", [PlainError("one"), ExceptionGroup("more", [KeyError("two")])]),
    Batch("several", [PlainError("one")]),
]


def missing(what: str) -> Exception:
    """Return the error of an attribute, a name or a module that is not there."""
    menu: Any = SimpleNamespace(day="monday")
    try:
        if what == "attribute":
            menu.price  # noqa: B018
        elif what == "name":
            undefined_menu  # noqa: B018  # pyright: ignore[reportUndefinedVariable, reportUnusedExpression]  # raises
        else:
            import_module("stampede_guard.no_such_menu")
    except (AttributeError, NameError, ImportError) as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("names", "original"),
    [
        (("name", "obj"), missing("attribute")),
        (("name",), missing("name")),
        (("name", "path", "msg"), missing("module")),
        (("name", "path"), ImportError("no module", name="menus", path="/menus")),
        (("errno", "strerror", "filename", "filename2"), OSError(errno.ENOENT, "no", "a", None, "b")),
        (("errno", "characters_written"), BlockingIOError(errno.EAGAIN, "later", 7)),
        (("value",), StopIteration(7)),
        (("encoding", "object", "start", "end", "reason"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")),
        (("msg", "filename", "lineno", "offset", "text"), SyntaxError("bad", ("menu.py", 1, 2, "text"))),
        (("code", "hidden"), SlottedError(7)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_copies_have_every_attribute(names: tuple[str, ...], original: Exception) -> None:
    """Attributes that Python keeps in C, or in slots, are those of the original."""
    copied = Failure(original).for_waiter(is_last=False)

    assert copied is not original
    assert type(original) is type(copied)
    assert [getattr(original, name) for name in names] == [getattr(copied, name) for name in names]


def test_copies_of_a_validation_error() -> None:
    """A `ValidationError` of Pydantic's reaches every waiter as what it is, the errors of validators included."""

    class Menu(BaseModel):
        price: int
        name: Annotated[str, AfterValidator(str.strip)] = "menu"

        @model_validator(mode="after")
        def check(self) -> "Menu":
            raise ValueError("no such menu")

    for price in ("x", 7):
        with pytest.raises(ValidationError) as caught:
            Menu.model_validate({"price": price})
        failure = Failure(caught.value)
        copies = [failure.for_waiter(is_last=is_last) for is_last in (False, False, True)]

        assert 3 == len({id(each) for each in copies})
        assert {ValidationError} == {type(each) for each in copies}
        assert {str(caught.value)} == {str(each) for each in copies}
        assert all(each.args == caught.value.args for each in copies)


def test_error_that_copies_itself_as_another() -> None:
    """A `__reduce__` that makes something else is not relied on."""
    copied = Failure(FaithlessError("menu")).for_waiter(is_last=False)

    assert ("menu",) == copied.args


@pytest.mark.parametrize("original", ERRORS, ids=lambda error: type(error).__name__)
def test_copies_are_faithful(original: Exception) -> None:
    """A copy has the type, the text, the arguments and the attributes of the load's error."""
    original = raised(original)

    copy = Failure(original).for_waiter(is_last=False)

    assert copy is not original
    assert type(original) is type(copy)
    assert (str(original), repr(original), original.__dict__) == (str(copy), repr(copy), copy.__dict__)


@pytest.mark.parametrize("original", ERRORS, ids=lambda error: type(error).__name__)
def test_copies_begin_where_the_load_failed(original: Exception) -> None:
    """A copy carries the frames of the load."""
    original = raised(original)

    copy = Failure(original).for_waiter(is_last=False)

    assert frames(original) == frames(copy)
    assert "raised" in frames(copy)


def test_arguments_that_are_attributes() -> None:
    """What an error keeps outside its arguments is copied where its type provides for it."""
    failure = Failure(OSError(errno.ENOENT, "no such file", "menu.json"))

    copy = failure.for_waiter(is_last=False)

    assert isinstance(copy, OSError)
    assert ("menu.json", errno.ENOENT) == (copy.filename, copy.errno)


def test_the_last_waiter_gets_the_original() -> None:
    """What nobody else needs any more is not copied."""
    original = raised(PlainError())
    failure = Failure(original)

    errors = [failure.for_waiter(is_last=False), failure.for_waiter(is_last=True)]

    assert [False, True] == [error is original for error in errors]


def test_notes_are_not_shared() -> None:
    """The load's notes come along; what a waiter adds is its own."""
    original = raised(PlainError())
    original.add_note("from the load")
    failure = Failure(original)

    first, second = failure.for_waiter(is_last=False), failure.for_waiter(is_last=False)
    first.add_note("mine")

    assert ["from the load", "mine"] == first.__notes__
    assert ["from the load"] == second.__notes__ == original.__notes__


def test_chained_errors_are_not_shared() -> None:
    """A waiter that unwraps and raises a cause writes its frames into a copy."""

    def load() -> None:
        try:
            raise KeyError("row")
        except KeyError as error:
            raise PlainError("no menu") from error

    with pytest.raises(PlainError) as raised:
        load()
    failure = Failure(raised.value)

    first, second = failure.for_waiter(is_last=False), failure.for_waiter(is_last=False)
    with pytest.raises(KeyError, match="row"):
        raise untyped(first).__cause__

    assert isinstance(second.__cause__, KeyError)
    assert ["load"] == frames(second.__cause__)
    assert first.__cause__ is first.__context__
    assert (True, True) == (first.__suppress_context__, second.__suppress_context__)


def test_members_of_a_group_are_not_shared() -> None:
    """A waiter that takes a group apart and raises a part writes its frames into a copy."""
    failure = Failure(raised(ExceptionGroup("several", [raised(PlainError("one"))])))

    first, second = failure.for_waiter(is_last=False), failure.for_waiter(is_last=False)
    with pytest.raises(PlainError):
        raise untyped(first).exceptions[0]

    assert ["raised"] == frames(untyped(second).exceptions[0])


def test_circular_chain() -> None:
    """An error that leads back to itself is copied with its circle."""
    one, other = PlainError("one"), PlainError("other")
    one.__cause__, other.__context__ = other, one

    copy = Failure(one).for_waiter(is_last=False)

    assert copy.__cause__ is not other
    assert untyped(copy.__cause__).__context__ is copy


def test_very_long_chain() -> None:
    """A chain too long to be copied is cut, with a word on what came there."""
    errors = [PlainError(str(number)) for number in range(2_000)]
    for error, earlier in pairwise(errors):
        error.__context__ = earlier

    link: BaseException | None = Failure(errors[0]).for_waiter(is_last=False)
    links = []
    while link is not None:
        links.append(type(link))
        link = link.__context__

    assert {PlainError} == set(links[:-1])
    assert (LoadFailed, True) == (links[-1], 20 < len(links) < 2_000)


@pytest.mark.parametrize("original", [StubbornError(1), OddNotesError()], ids=lambda error: type(error).__name__)
def test_uncopyable_error_goes_to_whoever_comes_first(original: Exception) -> None:
    """An error that refuses to be copied is one waiter's; the others are told its type, with the load's frames."""
    failure = Failure(raised(original))

    errors = [failure.for_waiter(is_last=is_last) for is_last in (False, False, True)]

    assert errors[0] is original
    assert [LoadFailed, LoadFailed] == [type(error) for error in errors[1:]]
    assert errors[1] is not errors[2]
    name = type(original).__qualname__
    assert f"the load failed with {__name__}.{name}, which cannot be copied" == str(errors[2])
    assert ["raised"] == frames(errors[2])


def test_uncopyable_cause() -> None:
    """A cause that refuses to be copied is replaced by its type's name, and shared by nobody."""
    original = PlainError("no menu")
    original.__cause__ = raised(StubbornError(1))

    copy = Failure(original).for_waiter(is_last=False)

    assert isinstance(copy, PlainError)
    assert copy.__cause__ is not None
    assert f"the load failed with {__name__}.StubbornError, which cannot be copied" == str(copy.__cause__)
    assert ["raised"] == frames(copy.__cause__)


# Through a scoreboard


async def fan_out(error: BaseException, number: int = 3) -> list[Any]:
    """Return what so many waiters get of a load that raises *error*."""
    board, gate = Scoreboard(), Gate()

    async def fail() -> None:
        await gate.passage()
        raise error

    async def wait(name: str) -> None:
        secret = f"secret of {name}"
        try:
            await board.debounce("menu-7", fail)
        except Exception as mine:
            mine.add_note(secret)
            raise

    calls = [asyncio.create_task(wait(str(caller))) for caller in range(number)]
    await gate.arrivals(1)
    gate.open()
    return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize(
    "make",
    [
        partial(PlainError, "no menu"),
        partial(WordedError, 7, reason="closed"),
        partial(OSError, 2, "gone"),
        SingleError,
        StubbornError,
    ],
)
async def test_waiters_share_neither_frames_nor_notes(make: Callable[..., Exception]) -> None:
    """In no waiter's report is a line, a local variable or a note of another waiter."""
    outcomes = await fan_out(make(1) if make is StubbornError else make())
    described = [traceback.TracebackException.from_exception(outcome, capture_locals=True) for outcome in outcomes]
    reports = ["".join(one.format()) for one in described]

    assert len(outcomes) == len({id(outcome) for outcome in outcomes})
    for caller, report in enumerate(reports):
        assert [caller] == [number for number in range(3) if f"secret of {number}" in report]
        assert "in fail" in report


async def test_launching_caller_gets_the_load_error_itself() -> None:
    """A caller who waits alone gets the original, nothing wrapped around it."""
    error = PlainError("no menu")

    with pytest.raises(PlainError) as caught:
        await Scoreboard().debounce("menu-7", _raising(error))

    assert error is caught.value


def test_task_factory_that_stops_the_loop(make_loop: MakeLoop) -> None:
    """What stops the loop while the load's task is made is the loop's as well, and its caller gets `LoadCancelled`."""
    loop, board = make_loop(), Scoreboard()

    def refuse(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    async def ask() -> None:
        factory = loop.get_task_factory()
        loop.set_task_factory(refuse)
        try:
            await board.debounce("menu-7", _raising(ValueError()))
        finally:
            loop.set_task_factory(factory)

    call = loop.create_task(ask())
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    with pytest.raises(LoadCancelled, match="ended by KeyboardInterrupt"):
        loop.run_until_complete(call)


async def test_failures_are_not_remembered() -> None:
    """A load that failed is loaded again by the next call, though answers would be remembered."""
    guard = Guard()
    outcomes: Iterator[Any] = iter([PlainError(), "soup"])

    async def load() -> Any:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.raises(PlainError):
        await guard.fetch("menu-7", load, ttl=60)

    assert "soup" == await guard.fetch("menu-7", load, ttl=60)


def _raising(error: BaseException) -> Callable[[], Any]:
    async def load() -> None:
        raise error

    return load


async def test_load_that_raises_no_exception() -> None:
    """What is not meant for `except Exception` reaches nobody as what it is: the waiters get `LoadCancelled`."""
    outcomes = await fan_out(GeneratorExit()) + await fan_out(BaseExceptionGroup("both", [GeneratorExit()]))

    assert [LoadCancelled] * 6 == [type(outcome) for outcome in outcomes]
    assert [
        "menu-7: the load was ended by GeneratorExit",
        "menu-7: the load was ended by BaseExceptionGroup",
    ] == [str(outcome) for outcome in outcomes[::3]]


async def test_load_that_raises_cancelled_error() -> None:
    """A load that raises `CancelledError` cancels none of its waiters."""
    outcomes = await fan_out(asyncio.CancelledError())

    assert ["menu-7: the load was cancelled"] * 3 == [str(outcome) for outcome in outcomes]
    assert {LoadCancelled} == {type(outcome) for outcome in outcomes}


async def test_load_that_raises_stop_iteration() -> None:
    """`StopIteration` comes out of a load as it comes out of any coroutine."""
    outcomes = await fan_out(StopIteration(7))

    assert ["coroutine raised StopIteration"] * 3 == [str(outcome) for outcome in outcomes]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_load_that_stops_the_loop(stop: type[BaseException], make_loop: MakeLoop) -> None:
    """`KeyboardInterrupt` and `SystemExit` stop the loop as ever; if it runs on, the waiters get `LoadCancelled`."""
    loop, board, gate = make_loop(), Scoreboard(), Gate()

    async def interrupted() -> None:
        await gate.passage()
        raise stop

    calls = [loop.create_task(board.debounce("menu-7", interrupted)) for _ in range(2)]
    loop.run_until_complete(gate.arrivals(1))
    loop.call_soon(gate.open)
    with pytest.raises(stop):
        loop.run_forever()
    outcomes = loop.run_until_complete(asyncio.gather(*calls, return_exceptions=True))

    assert [f"menu-7: the load was ended by {stop.__name__}"] * 2 == [str(outcome) for outcome in outcomes]
    assert (set(), {}) == (board.up, board.flights)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_load_that_stops_the_loop_before_it_ever_waits(stop: type[BaseException], make_loop: MakeLoop) -> None:
    """The same when the load is over before its task is created, as with eager tasks: its caller is not stopped."""
    loop, board = make_loop(), Scoreboard()
    loop.set_exception_handler(lambda *_: None)  # of the load's own, lost task

    calls = [loop.create_task(board.debounce("menu-7", _raising(stop()))) for _ in range(2)]
    with pytest.raises(stop):
        loop.run_forever()
    with suppress(stop):  # with eager tasks the second call has a load of its own, and each stops the loop
        loop.run_until_complete(asyncio.wait(calls))
    outcomes = loop.run_until_complete(asyncio.gather(*calls, return_exceptions=True))

    assert (set(), {}, 0) == (board.up, board.flights, board.stats().in_flight)
    assert [f"menu-7: the load was ended by {stop.__name__}"] * 2 == [str(outcome) for outcome in outcomes]
