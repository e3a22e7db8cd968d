"""`@coalesce_many`: the guard in front of a loader of many ids.

Made of `coalesce` for one id: `one` is an ordinary coalesced function, whose loads share batches (`batching.py`). So
each id has its own op, with all that is known of ops, and calls for one and for many share them.
"""

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, Generic, Optional, TypeVar, Unpack, cast, get_args, get_origin, overload

from .._codecs.codec import Codec
from .._codecs.fingerprint import describe_codec
from .._flights.flight import Flight
from .._guard import Guard
from .._keys.names import qualified_name
from .._keys.source import compile_like, imitate, parameters_of
from .._keys.spec import receiver_of
from .._keys.template import Template
from .._memory.entry import Entry
from .._operations.options import Duration, Options, count, seconds
from ..errors import ConfigurationError, InvalidKey, NotCoalescable
from .batching import BatchedLoad, BatchLoader, Loader
from .coalesce import Coalesced, OneOfMany, check_receiver, checked, coalesce, return_annotation

_NOT_OF_A_CLASS = "let it be a function, or an instance's method"
_CLASS_METHOD = f"is a class method: {_NOT_OF_A_CLASS}"
_STATIC_METHOD = "is a static method: put @staticmethod above @coalesce_many"

K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S")


class CoalescedMany(Generic[K, V]):
    """A loader of many ids, each of which is cached, coalesced and invalidated for itself.

    Attributes:
        one: The same for one id: `await load_menus.one(7)` returns its value, or `None` if there is none. A
            `Coalesced`, with all that it can do. Calls of one tick are loaded together.
    """

    __wrapped__: Callable[..., Coroutine[Any, Any, Mapping[K, V]]]
    __qualname__: str

    def __init__(
        self, function: Loader, one: Coalesced[[K], V | None], batches: BatchLoader, args: tuple[Any, ...]
    ) -> None:
        imitate(self, function)
        self.one = one
        self.guard = one.guard
        self._batches = batches
        self._args = args  # the instance, if it is a method's
        self._operation, self._build_key = one._parts()

    async def __call__(self, ids: Iterable[K]) -> dict[K, V]:
        """Return the values of those *ids* that have one, in the order asked.

        What memory, the store and flights that are up do not have is loaded together. Cancelling this call disturbs
        no other caller.

        Raises:
            Exception: the error of the first id that failed, in the order asked: what `Coalesced.__call__` raises.
            WrongAnswer: the loader returned something else than a mapping of the ids that it was asked for.
        """
        return await self._get(ids)

    async def refresh(self, ids: Iterable[K]) -> dict[K, V]:
        """Load *ids* now, replace what is cached, and return their values; if that fails, what was cached stays.

        Raises:
            InvalidationPending: as for `Coalesced.refresh`; the error's `value` is a dict.
            Exception: as for a call.
        """
        return await self._get(ids, is_refresh=True, replaces=True)

    async def fresh(self, ids: Iterable[K]) -> dict[K, V]:
        """Return what loads read that begin after this call; see `Coalesced.fresh`.

        Raises:
            Exception: as for a call.
        """
        return await self._get(ids, is_refresh=True)

    async def _get(self, ids: Iterable[K], *, is_refresh: bool = False, replaces: bool = False) -> dict[K, V]:
        asked = self._checked(ids)

        def found(answers: list[Any]) -> dict[K, V]:
            return {one_id: value for one_id, value in zip(asked, answers, strict=True) if value is not None}

        return await self.guard._path.get_many(
            self._operation,
            list(map(self._build_key, asked)),
            lambda position: BatchedLoad(self._batches, (*self._args, asked[position])),
            BatchedLoad.watch,
            lambda position: self.one.tags(asked[position]),
            found,
            is_refresh=is_refresh,
            replaces=replaces,
        )

    @property
    def _together(self) -> int:
        """How many ids are best begun at once, for `Guard.warm`."""
        return self._batches.max_batch

    def _begin(self, calls: Sequence[Any]) -> list[Flight[Any] | Exception | None]:
        """Return the flight of each id, or its error, or `None` if L1 has its value; none is begun twice."""
        asked = self._checked(calls)
        return self.guard._path.begin(
            self._operation,
            list(map(self._build_key, asked)),
            lambda position: BatchedLoad(self._batches, (*self._args, asked[position])),
            BatchedLoad.watch,
            lambda position: self.one.tags(asked[position]),
        )

    async def bypass(self, ids: Iterable[K]) -> dict[K, V]:
        """Run the loader for this caller alone: nothing is read, shared or stored.

        It is called with at most `max_batch` ids at once, and then again for the others.

        Raises:
            WrongAnswer: the loader returned something else than a mapping of the ids that it was asked for.
        """
        asked = self._checked(ids)
        values = await self._batches.load_aside(self._args, asked)
        return {one_id: values[one_id] for one_id in asked if values.get(one_id) is not None}

    async def invalidate(self, *ids: K) -> None:
        """Forget what is known of *ids*, that they have no value included; for the rest, see `Coalesced.invalidate`.

        Raises:
            InvalidationPending: the store has not confirmed (see `Guard.invalidate`).
        """
        await self.guard._invalidator.invalidate_of(self._operation, self._ops(ids))

    async def expire(self, *ids: K) -> None:
        """Let what is known of *ids* be stale from now on; for the rest, see `Coalesced.expire`.

        Raises:
            InvalidationPending: the store has not confirmed (see `Guard.invalidate`).
        """
        await self.guard._invalidator.invalidate_of(self._operation, self._ops(ids), is_soft=True)

    def _ops(self, ids: Iterable[K]) -> list[str]:
        self._checked(ids)
        return list(dict.fromkeys(map(self._build_key, ids)))  # not of equal ids: 1 and 1.0 may be two ops

    def key(self, one_id: K, /) -> str:
        """Return the op id of an id."""
        return self.one.key(one_id)

    def tags(self, one_id: K, /) -> tuple[str, ...]:
        """Return the tags of an id, for `Guard.invalidate_tag`."""
        return self.one.tags(one_id)

    def peek(self, one_id: K, /) -> Entry[V | None] | None:
        """Return this process's fresh entry of an id, whose value is `None` if it has none; or `None`."""
        return self.one.peek(one_id)

    def _checked(self, ids: Iterable[K]) -> list[K]:
        """Return *ids* without repetitions.

        Raises:
            InvalidKey: they are no ids.
        """
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
            message = f"{self.__qualname__}: give several ids, such as a list, not {ids!r}; for one there is .one"
            raise InvalidKey(message)
        asked = list(ids)
        try:
            return list(dict.fromkeys(asked))
        except TypeError:
            wrong = next(one_id for one_id in asked if not _is_hashable(one_id))
            message = f"{self.__qualname__}: {wrong!r} is no id: it cannot be a key of a dict"
            raise InvalidKey(message) from None

    def __reduce__(self) -> str:
        """Pickle by name, as functions are; a copy is the thing itself."""
        return self.__qualname__

    def __deepcopy__(self, memo: dict[int, Any]) -> "CoalescedMany[K, V]":
        """Return what is bound to a copy of the instance, if that is copied too; a function is the thing itself."""
        if not self._args:
            return self
        bound, one, args = deepcopy((self.__wrapped__, self.one, self._args), memo)
        return CoalescedMany(bound, one, self._batches, args)

    def __repr__(self) -> str:
        return f"<coalesced {self.__module__}.{self.__qualname__}>"


class CoalescedManyMethod(Generic[S, K, V]):
    """A method that is such a loader; an instance's calls are coalesced with each other only, as with `Coalesced`."""

    __wrapped__: Loader

    def __init__(self, function: Loader, one: Coalesced[Any, Any], batches: BatchLoader) -> None:
        imitate(self, function)
        self._one = one
        self._batches = batches

    @overload
    def __get__(self, instance: None, owner: type) -> "CoalescedManyMethod[S, K, V]": ...
    @overload
    def __get__(self, instance: S, owner: type | None = None) -> CoalescedMany[K, V]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to *instance*, as a function does."""
        if instance is None:
            return self
        bound: Any = MethodType(self.__wrapped__, instance)
        return CoalescedMany(bound, self._one.bound_to(instance), self._batches, (instance,))


class _OrNone:
    """A user's codec of values, for values or none."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.fingerprint = f"or none {describe_codec(codec, lambda: None)}"

    def encode(self, value: Any) -> bytes:
        return b"" if value is None else b"=" + self._codec.encode(value)

    def decode(self, payload: bytes) -> Any:
        return self._codec.decode(payload[1:]) if payload else None


class ManyDecorator:
    """What `@coalesce_many(...)` with options returns."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    @overload
    def __call__(self, function: Callable[[list[K]], Coroutine[Any, Any, Mapping[K, V]]], /) -> CoalescedMany[K, V]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[K]], Coroutine[Any, Any, Mapping[K, V]]], /
    ) -> CoalescedManyMethod[S, K, V]: ...
    def __call__(self, function: Any, /) -> Any:
        """Decorate *function*."""
        if isinstance(function, classmethod | staticmethod):
            name = getattr(function, "__qualname__", repr(function))
            message = f"@coalesce_many: {name} {_CLASS_METHOD if isinstance(function, classmethod) else _STATIC_METHOD}"
            raise NotCoalescable(message)
        loader = checked(function, by="@coalesce_many")
        check_receiver(loader, "@coalesce_many", _NOT_OF_A_CLASS)
        return self._make(loader)


@overload
def coalesce_many(function: Callable[[list[K]], Coroutine[Any, Any, Mapping[K, V]]], /) -> CoalescedMany[K, V]: ...
@overload
def coalesce_many(
    function: Callable[[S, list[K]], Coroutine[Any, Any, Mapping[K, V]]], /
) -> CoalescedManyMethod[S, K, V]: ...
@overload
def coalesce_many(
    template: str | None = None,
    /,
    *,
    key: str | Callable[..., str] | None = None,
    guard: Guard | None = None,
    vary: Sequence[ContextVar[Any]] = (),
    codec: Codec | None = None,
    tags: Sequence[str] = (),
    max_batch: int = 100,
    max_wait: Duration = 0,
    **options: Unpack[Options],
) -> ManyDecorator: ...
def coalesce_many(  # options, each with a default that fits
    function: Any = None,
    /,
    *,
    key: str | Callable[..., str] | None = None,
    guard: Guard | None = None,
    vary: Sequence[ContextVar[Any]] = (),
    codec: Codec | None = None,
    tags: Sequence[str] = (),
    max_batch: int = 100,
    max_wait: Duration = 0,
    **options: Unpack[Options],
) -> Any:
    """Do for a loader of many ids what `coalesce` does for a loader of one; load together what has to be loaded.

    The loader takes a list of ids, none of them twice, and returns a mapping of those that have a value to their
    values. That an id has none (it is missing, or its value is `None`) is remembered like a value.

    Args:
        function: The loader, or the key template, which names one id: `"menu-{menu_id}"`.
        key: A template, or a function of one id (of a method: after the instance) that returns the op id. By default
            module, qualified name and the id.
        guard: As for `coalesce`.
        vary: As for `coalesce`; calls that differ in these are not loaded together.
        codec: Of one value, instead of the one that the return annotation asks for.
        tags: Templates like the key's, for each id.
        max_batch: How many ids the loader is called with at most; for more it is called several times, side by side.
        max_wait: Seconds that the first id to be loaded waits for others. Zero: until the end of the tick, the loop's
            iteration.
        **options: As for `coalesce`, but for `inherit_context`. Lives, versions and time-outs are those of each id;
            `max_loads` counts calls of the loader.

    Raises:
        NotCoalescable: the decorated thing is not an `async def` function of one list of ids.
        InvalidKey: the template does not name one id, or another function's calls may have the same op.
        ConfigurationError: an option breaks its rule.
    """
    if isinstance(function, str):
        if key is not None:
            message = f"two keys: the template {function!r} and key={key!r}; give one"
            raise ConfigurationError(message)
        key, function = function, None
    if isinstance(guard, Guard):
        options = {**guard._defaults, **options}
    _check(options)
    count("max_batch", max_batch)
    max_wait = seconds("max_wait", max_wait, zero=True)
    if callable(version := options.get("version")):
        options["version"] = partial(_version_of, version)
    if isinstance(codec, Codec) and not isinstance(codec, type):
        codec = _OrNone(codec)
    decorate_one = coalesce(key=key, guard=guard, vary=vary, codec=codec, tags=tags, **options)

    decorate = ManyDecorator(partial(_decorated, key, decorate_one, max_batch, max_wait))
    return decorate if function is None else decorate(function)


def _decorated(
    key: object, decorate_one: Callable[[Any], Coalesced[Any, Any]], max_batch: int, max_wait: float, function: Loader
) -> Any:
    batches = BatchLoader(function, max_batch, max_wait)
    one = decorate_one(_one_of(function, key, batches))
    operation, build_key = one._parts()
    batches.serve(one.guard, operation, build_key)
    if receiver_of(function) is None:
        return CoalescedMany(function, one, batches, ())
    return CoalescedManyMethod(function, one, batches)


def _check(options: Options) -> None:
    if "ignore" in options:  # which `coalesce` has
        message = "there is no option 'ignore': the id is all that there is in a key"
        raise ConfigurationError(message)
    if "partition" in options:  # which `coalesce` has
        message = "there is no option 'partition': the ids of a batch may be of several; max_loads= limits the batches"
        raise ConfigurationError(message)
    if options.get("handover_after") is not None:
        message = "handover_after=: ids are loaded in batches, which have several callers; leave it out"
        raise ConfigurationError(message)
    if options.get("inherit_context"):
        message = "inherit_context=True: a batch has several callers, so it has none's context; name variables in vary="
        raise ConfigurationError(message)


def _version_of(version: Callable[[Any], int], value: Any) -> int:
    """Return the version of *value*; an id that has none has a lower one than all that have."""
    return 0 if value is None else version(value)


def _one_of(function: Loader, key: object, batches: BatchLoader) -> Any:
    """Return the function of one id that stands for the loader *function*: it loads by *batches*."""
    own = [
        each.name for each in parameters_of(function) if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    receiver = receiver_of(function)
    if len(own) != 1 + (receiver is not None) or len(own) != len(parameters_of(function)):
        message = (
            f"@coalesce_many: {qualified_name(function)}{inspect.signature(function)} has to take one list of ids, "
            "and nothing else"
        )
        raise NotCoalescable(message)
    names = [_id_in(key, receiver, qualified_name(function)) if isinstance(key, str) else own[-1]]
    if receiver is not None:
        names.insert(0, receiver)
    return _of_one_id(function, names, batches)


def _of_one_id(function: Loader, names: Sequence[str], batches: BatchLoader) -> Any:
    """Return that function, whose parameters have these *names*, with what goes with it."""

    def like_this() -> None: ...

    update_wrapper(like_this, function, updated=())
    like_this.__qualname__ += ".one"
    like_this.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    arguments = ", ".join(names)

    def check_id(one_id: object) -> None:
        if not _is_hashable(one_id):
            message = f"{one.__qualname__}: {one_id!r} is no id: it cannot be a key of a dict"
            raise InvalidKey(message)

    def made(line: str, *, is_async: bool = False, **used: Callable[..., Any]) -> Any:
        lines = f"_sg_check({names[-1]})", line.format(arguments)
        return compile_like(like_this, lines, {"_sg_check": check_id, **used}, is_async=is_async)

    def checking(build: Callable[..., str]) -> Callable[..., str]:
        build_checked: Any = made("return _sg_build({})", _sg_build=build)
        build_checked.unchecked = build
        return cast("Callable[..., str]", build_checked)

    one = made("return await _sg_load({})", is_async=True, _sg_load=batches.load)
    alone = made("return await _sg_load({})", is_async=True, _sg_load=batches.load_alone)
    one.__doc__ = function.__doc__
    one.stampede_guard_one_of_many = OneOfMany(function, alone, partial(_answers_of, function), checking)
    return one


def _id_in(template: str, receiver: str | None, owner: str) -> str:
    names = Template.parse(template).names - {receiver}
    if len(names) != 1:
        message = f"{owner}: the key template {template!r} has to name one id, as in 'menu-{{menu_id}}'"
        raise InvalidKey(message)
    return names.pop()


def _answers_of(function: Loader) -> Any:
    """Return the type of what is known of one id: a value, or that there is none.

    Raises:
        NameError: a name in the return annotation is not defined yet.
        ConfigurationError: there is no telling the type.
    """
    annotation = return_annotation(function)
    kind: Any = get_origin(annotation)
    if not (isinstance(kind, type) and issubclass(kind, Mapping) and len(get_args(annotation)) == 2):  # noqa: PLR2004
        message = (
            f"{qualified_name(function)}: its values are stored as bytes; annotate what it returns as a mapping of "
            "ids to values, such as dict[int, Menu], or pass codec="
        )
        raise ConfigurationError(message)
    return Optional[get_args(annotation)[1]]  # noqa: UP045  # it may be the name of a type: a text


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
