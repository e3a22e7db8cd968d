"""`@coalesce`: the guard in front of one function."""

import inspect
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

from .._codecs.codec import Codec
from .._flights.flight import Flight
from .._flights.waiting import wait_one
from .._guard import Guard
from .._keys.names import qualified_name
from .._keys.partitions import BuildPartition, compile_partition
from .._keys.source import annotation_of, as_tuple_and_dict, compile_like, forwarding, imitate, parameters_of
from .._keys.spec import KeySpec, compile_key, receiver_of
from .._keys.tags import BuildTags, compile_tags
from .._memory.answer import Answer
from .._memory.entry import Entry
from .._operations.operation import NO_ANNOTATION, Operation, for_caller
from .._operations.options import Options, shown
from .._operations.policy import Policy
from .._speed.call import call_lines
from .._speed.forms import MISS, ArgumentCache, FunctionProxy, HitCounter
from ..errors import ConfigurationError, InvalidKey, NotCoalescable

P = ParamSpec("P")
Q = ParamSpec("Q")
S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_ROOM = 8192  # calls that a function's front knows: a front with all keys would double what an entry costs

_default_guard = Guard()


@dataclass(frozen=True, slots=True)
class OneOfMany:
    """What a function of one id, made for a loader of many, is besides a function.

    Attributes:
        loader: Of many.
        load_alone: Loads one id for one caller.
        answers: Returns the type of what is known of one id.
        checking: Takes what builds ops, and returns the same with a check of the id.
    """

    loader: Callable[..., Any]
    load_alone: Callable[..., Coroutine[Any, Any, Any]]
    answers: Callable[[], Any]
    checking: Callable[[Callable[..., str]], Callable[..., str]]


class Coalesced(FunctionProxy, Generic[P, T]):
    """A coroutine function whose concurrent identical calls cost one call.

    Behaves like the function it wraps: same signature, and `inspect.iscoroutinefunction` says yes. As a class
    attribute it binds like a method; an instance's calls are coalesced with each other only, unless the key says
    otherwise, and the instance is not kept alive.
    """

    __qualname__: str
    _function: Callable[P, Coroutine[Any, Any, T]]

    def __init__(  # noqa: PLR0913  # what the decorator was given
        self,
        function: Callable[P, Coroutine[Any, Any, T]],
        guard: Guard,
        key: str | Callable[..., str] | None,
        policy: Policy,
        *,
        ignore: Sequence[str] = (),
        vary: Sequence[ContextVar[Any]] = (),
        codec: Codec | None = None,
        tags: Sequence[str] = (),
        partition: str | None = None,
    ) -> None:
        imitate(self, function)
        # `inspect` recognises what quacks like a function by these three and the name.
        self.__code__ = function.__code__
        self.__defaults__ = function.__defaults__
        self.__kwdefaults__ = function.__kwdefaults__
        self.guard = guard
        is_shared = policy.l2_ttl is not None
        spec = compile_key(function, key, ignore=ignore, vary=vary, is_shared=is_shared)
        name = spec.template.text if spec.template is not None else qualified_name(function)
        many: OneOfMany | None = getattr(function, "stampede_guard_one_of_many", None)
        if spec.is_local and is_shared:
            otherwise = "ignore=('self',)" if many is None else "as key= a function of the instance and of one id"
            message = (
                f"{qualified_name(function)}: l2_ttl= shares answers between processes, which know nothing of "
                f"this process's instances. Put {{self.attribute}} into the key template, or pass {otherwise}"
            )
            raise InvalidKey(message)
        if many is not None:
            spec = replace(spec, build=many.checking(spec.build))
        self._build_key = spec.build
        self._alone = function if many is None else many.load_alone
        self._build_tags = compile_tags(function, tags)
        self._build_partition = compile_partition(function, partition, policy.max_loads)
        self._operation = guard._add_operation(
            name,
            policy,
            codec=codec,
            annotation=partial(return_annotation, function) if many is None else many.answers,
            vary=vary,
            tags=tags,
        )
        self._call = _compile_call(function, spec, guard, self._operation, self._build_tags, self._build_partition)
        self._operation.is_local = spec.is_local
        guard._register(self, spec, self._operation)

    if TYPE_CHECKING:
        # It is a `FunctionProxy` of a function that is made for it: see `_compile_call`.

        async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
            """Return the answer: from memory, from a flight that is up, or from a new one.

            Cancelling this call disturbs no other caller.

            Raises:
                LoadTimeout: the loader exceeded `load_timeout`.
                Overloaded: too many loads wait for a slot, or too many callers for this load.
                WaitTimeout: this call exceeded `wait_timeout`.
                LoadCancelled: the loader was cancelled.
                RecursiveLoad: the loader waits for itself.
                GuardClosed: the guard has a store and is not open.
                InvalidKey: an argument has no place in a key.
                Exception: the loader's own error.
            """
            ...

    @property
    def __wrapped__(self) -> Callable[P, Coroutine[Any, Any, T]]:
        """The function, bound to what this is bound to."""
        return self._mine(self._function)

    @__wrapped__.setter
    def __wrapped__(self, function: Callable[P, Coroutine[Any, Any, T]]) -> None:
        self._function = function

    def _parts(self) -> tuple[Operation, Callable[..., str]]:
        """Return the operation, and what builds its ops, for what is built on this."""
        return self._operation, self._mine(getattr(self._build_key, "unchecked", self._build_key))

    def _mine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return *function* bound to what this is bound to."""
        return function if self._receiver is None else MethodType(function, self._receiver)

    def key(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Return the op id of such a call."""
        op: str = self._mine(self._build_key)(*args, **kwargs)
        return op

    def tags(self, *args: P.args, **kwargs: P.kwargs) -> tuple[str, ...]:
        """Return the tags of such a call, for `Guard.invalidate_tag`."""
        return () if self._build_tags is None else self._mine(self._build_tags)(*args, **kwargs)

    def _place(self, *args: Any, **kwargs: Any) -> Callable[[], str] | None:
        """Return what returns the partition of such a call, if it has one."""
        build = self._build_partition
        return None if build is None else partial(self._mine(build), *args, **kwargs)

    async def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Forget the answer to such a call: in this process at once, then in the store and in every process.

        A load that began before answers its waiters, and is never stored. With a version, or
        without waiting, it is `guard.invalidate(function.key(…), version=…, wait=False)`.

        Raises:
            InvalidationPending: the store has not confirmed (see `Guard.invalidate`).
        """
        await self.guard._invalidator.invalidate_of(self._operation, [self.key(*args, **kwargs)])

    async def expire(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Let the answer to such a call be stale from now on: what `invalidate` does, but old values stay.

        Callers get the old value within `stale`, while one flight replaces it, and within `stale_if_error` if that
        fails. Without these options there is no old value, and this is `invalidate`.

        Raises:
            InvalidationPending: the store has not confirmed (see `Guard.invalidate`).
        """
        await self.guard._invalidator.invalidate_of(self._operation, [self.key(*args, **kwargs)], is_soft=True)

    async def refresh(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Load now, replace what is cached, and return it; when the load fails, what was cached stays.

        A load that has begun before this call is not shared.

        Raises:
            InvalidationPending: the value could not be stored, and the store has not confirmed that the older one is
                gone (see `Guard.invalidate`); the error has the new `value`.
            Exception: as for a call.
        """
        op, tags = self.key(*args, **kwargs), self.tags(*args, **kwargs)
        load = partial(self.__wrapped__, *args, **kwargs)
        place = self._place(*args, **kwargs)
        return await self.guard._path.refresh(self._operation, op, load, lambda: tags, build_partition=place)

    async def fresh(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a load reads that begins after this call: it sees all that was written before.

        Any such load is shared, and stored like the load of a call. Unlike `refresh` it tells other processes nothing,
        and raises nothing when its value cannot be stored.

        Raises:
            Exception: as for a call.
        """
        op, tags = self.key(*args, **kwargs), self.tags(*args, **kwargs)
        load = partial(self.__wrapped__, *args, **kwargs)
        how: Any = {"replaces": False, "build_partition": self._place(*args, **kwargs)}
        fresh: T = await self.guard._path.refresh(self._operation, op, load, lambda: tags, **how)
        return fresh

    async def answer(self, *args: P.args, **kwargs: P.kwargs) -> Answer[T]:
        """Return the answer to such a call with its age, source and freshness, for HTTP headers say.

        Raises:
            Exception: as for a call.
        """
        op, tags = self.key(*args, **kwargs), self.tags(*args, **kwargs)
        load = partial(self.__wrapped__, *args, **kwargs)
        place = self._place(*args, **kwargs)
        return await self.guard._path.answer(self._operation, op, load, lambda: tags, place)

    def peek(self, *args: P.args, **kwargs: P.kwargs) -> Entry[T] | None:
        """Return this process's fresh entry, or `None`; loads nothing and waits for nothing."""
        return self.guard._path.peek(self.key(*args, **kwargs), self._operation)

    _together = 1  # calls that are best begun at once, for `Guard.warm`

    def _begin(self, calls: Sequence[Any]) -> list[Flight[T] | Exception | None]:
        """Return the flight of each call, or its error, or `None` if L1 has its answer.

        A call is a tuple of its arguments, or the only one.
        """
        given = [call if isinstance(call, tuple) else (call,) for call in calls]
        key, tags, function = self._mine(self._build_key), self._build_tags, self.__wrapped__
        build_tags = None if tags is None else self._mine(tags)
        return self.guard._path.begin(
            self._operation,
            [key(*args) for args in given],
            lambda position: partial(function, *given[position]),
            _nothing,
            lambda position: () if build_tags is None else build_tags(*given[position]),
        )

    async def bypass(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function for this caller alone: nothing is read, shared or stored."""
        answer: T = await self._mine(self._alone)(*args, **kwargs)
        return answer

    if TYPE_CHECKING:

        @overload
        def __get__(self, instance: None, owner: type) -> "Coalesced[P, T]": ...
        @overload
        def __get__(
            self: "Coalesced[Concatenate[S, Q], T]", instance: S, owner: type | None = None
        ) -> "Coalesced[Q, T]": ...
        @overload
        def __get__(self, instance: object, owner: type | None = None) -> "Coalesced[P, T]": ...  # a static method
        def __get__(self, instance: object | None, owner: type | None = None) -> "Coalesced[Any, T]":
            """Bind to *instance*, as a function does."""
            ...

        def bound_to(self, receiver: object, /) -> "Coalesced[Any, T]":
            """Return the same with *receiver*, an instance or a class, as the first argument."""
            ...

    def __eq__(self, other: object) -> bool:
        """Tell bound ones apart as methods are: `menus.load` is a new object each time, and equal to the last."""
        if not isinstance(other, Coalesced):
            return NotImplemented
        return self._operation is other._operation and self.__wrapped__ == other.__wrapped__

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __reduce__(self) -> str:
        """Pickle by name, as functions are; a copy is the thing itself."""
        return self.__qualname__

    def __deepcopy__(self, memo: dict[int, Any]) -> "Coalesced[P, T]":
        """Return what is bound to a copy of the instance, if that is copied too; a function is the thing itself."""
        if self._receiver is None:
            return self
        unbound = type(self).__new__(type(self))
        unbound.__dict__ = self.__dict__
        unbound._call = getattr(self._call, "__func__", self._call)
        return unbound.bound_to(deepcopy(self._receiver, memo))

    def __repr__(self) -> str:
        return f"<coalesced {self.__module__}.{self.__qualname__}>"


def _nothing(*_: object) -> None:
    """Do nothing with a load and its flight."""


def _compile_call(  # noqa: PLR0917  # what a call needs
    function: Callable[..., Coroutine[Any, Any, Any]],
    spec: KeySpec,
    guard: Guard,
    operation: Operation,
    build_tags: BuildTags | None,
    build_partition: BuildPartition | None,
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return the coroutine function that stands in for *function*; `_speed/call.py` shows what it reads."""
    policy = operation.policy
    answers = flights = None
    if spec.arguments is not None:
        if policy.ttl is not None and not policy.isolate:
            answers = ArgumentCache(operation.counters, _ROOM)
        flights = ArgumentCache(HitCounter(), _ROOM)
    parameters = parameters_of(function)
    lines = call_lines(
        forwarding(parameters),
        *as_tuple_and_dict(parameters),
        spec.arguments,
        has_answers=answers is not None,
    )
    names = {
        "_sg_answers": answers,
        "_sg_build": spec.build,
        "_sg_flight": Flight,
        "_sg_flights": flights,
        "_sg_for_caller": operation.for_caller if policy.isolate else for_caller,
        "_sg_lookup_or_launch": guard._path.make_lookup(
            operation, function, build_tags, answers, flights, build_partition=build_partition
        ),
        "_sg_miss": MISS,
        "_sg_rejoin": guard._path.make_rejoin(operation),
        "_sg_timeout": policy.wait_timeout,
        "_sg_wait": wait_one,
    }
    made: Callable[..., Coroutine[Any, Any, Any]] = compile_like(function, lines, names, is_async=True)
    return made


class ClassLevel(Coalesced[Concatenate[type[S], Q], T], Generic[S, Q, T]):
    """A coalesced class method: `@coalesce` above `@classmethod`.

    Type checkers look through `@classmethod`, and know it by its first parameter: see `OfClass`.
    """

    # A method taken from its class is left unbound; a class method is not, and that is all the difference.
    def __get__(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self, instance: object | None, owner: type | None = None
    ) -> Coalesced[Q, T]:
        """Bind to the class; what is bound stays so."""
        if self._receiver is not None:
            return self  # type: ignore[return-value]  # no longer what its type says
        return self.bound_to(type(instance) if owner is None else owner)


class OfClass(Protocol[S_contra, Q, T_co]):
    """A function whose first parameter is called `cls`: what type checkers see of a class method.

    The name has to tell, as it does at run time: by its type alone, `object`, `Any`, `Callable`, `Hashable` or a
    `type[X]` could all be a class. What is called so is also a function like others, which pyright objects to.
    """

    def __call__(self, cls: type[S_contra], *args: Q.args, **kwargs: Q.kwargs) -> Coroutine[Any, Any, T_co]:
        """Run it."""
        ...


class Decorator:
    """What `@coalesce(...)` with options returns."""

    def __init__(self, make: Callable[[Any, type[Coalesced[Any, Any]]], Coalesced[Any, Any]]) -> None:
        self._make = make

    @overload
    def __call__(  # pyright: ignore[reportOverlappingOverload]  # see `OfClass`
        self, function: OfClass[S, Q, T], /
    ) -> ClassLevel[S, Q, T]: ...
    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, T]], /) -> Coalesced[P, T]: ...
    def __call__(self, function: Any, /) -> Any:
        """Decorate *function*; what stands below as a class or static method stays one."""
        if isinstance(function, classmethod):
            return self._make(checked(function.__func__), ClassLevel)
        is_static = isinstance(function, staticmethod)
        inner = checked(function.__func__ if is_static else function)
        check_receiver(inner, "@coalesce", "put @coalesce above @classmethod")
        made = self._make(inner, Coalesced)
        return staticmethod(made) if is_static else made


@overload
def coalesce(  # pyright: ignore[reportOverlappingOverload]  # see `OfClass`
    function: OfClass[S, Q, T], /
) -> ClassLevel[S, Q, T]: ...
@overload
def coalesce(function: Callable[P, Coroutine[Any, Any, T]], /) -> Coalesced[P, T]: ...
@overload
def coalesce(
    template: str | None = None,
    /,
    *,
    key: str | Callable[..., str] | None = None,
    guard: Guard | None = None,
    ignore: Sequence[str] = (),
    vary: Sequence[ContextVar[Any]] = (),
    codec: Codec | None = None,
    tags: Sequence[str] = (),
    partition: str | None = None,
    **options: Unpack[Options],
) -> Decorator: ...
def coalesce(  # options, each with a default that fits
    function: Any = None,
    /,
    *,
    key: str | Callable[..., str] | None = None,
    guard: Guard | None = None,
    ignore: Sequence[str] = (),
    vary: Sequence[ContextVar[Any]] = (),
    codec: Codec | None = None,
    tags: Sequence[str] = (),
    partition: str | None = None,
    **options: Unpack[Options],
) -> Any:
    """Make concurrent identical calls of an `async def` share one execution, and remember its answer.

    Bare, or with options, of which the first may be the key template: `@coalesce("hours-{restaurant_id}", ttl=30)`.

    Args:
        function: The function, or the key template.
        key: A template over the function's parameters (`"menu-{menu_id}-{user.locale}"`), or a function of the same
            arguments that returns the op id. By default module, qualified name and all arguments.
        guard: Whose memory and store are used; by default a guard without a store.
        ignore: Names of parameters that do not change the answer and stay out of the key.
        vary: Context variables that are part of the key, and the only ones that the loader sees.
        codec: Instead of the one that the return annotation asks for.
        tags: Templates like the key's; `Guard.invalidate_tag` forgets all answers that have a tag.
        partition: A template like those, such as `"merchant:{merchant_id}"`: the slots of `max_loads` are shared evenly
            between partitions, and no partition gets all of them.
        **options: What the operation does:

            - `ttl`: Life in this process's memory, in seconds; by default nothing is remembered.
            - `l2_ttl`: Life in the guard's store, in seconds; by default nothing is stored.
            - `jitter`: Share by which lives vary at random: 0.1 is ±10 %.
            - `stale`, `stale_wait`, `stale_if_error`, `stale_on`: When an old value is the answer.
            - `early`: How early a value is refreshed before its life is over, in load times.
            - `error_backoff`: Longest pause between loads that fail, in seconds.
            - `load_timeout`: Budget of one flight, in seconds; `None` sets no limit.
            - `handover_after`: Seconds after which a second run of the loader begins beside the first.
            - `wait_timeout`: How long one caller waits, in seconds; the load goes on without them.
            - `on_abandon`: When all waiters have left, `"finish"` the load and store it, or `"cancel"` it.
            - `isolate`: Give every caller a copy of their own, decoded from bytes.
            - `inherit_context`: Let the loader see all of the launching caller's context instead.
            - `lease`: Wait while another process loads the same op; without it, load too.
            - `version`: Takes a value, returns its version; a value older than what is known is not stored.
            - `max_loads`: How many loads may run at once, per event loop; the others queue.
            - `max_queued`: How many loads may wait for one of these slots; others raise `Overloaded`.
            - `queue_timeout`: Seconds that a load waits for its slots before it raises `Overloaded`.
            - `max_waiters`: How many callers may wait for one load; others raise `Overloaded`.
            - `max_share`: Fraction of this process's memory that the operation's entries may take.

    Raises:
        NotCoalescable: the decorated thing is not an `async def` function.
        InvalidKey: a name in the key is unknown, a parameter is left out, or another function's calls may have
            the same op.
        ConfigurationError: an option breaks its rule.
    """
    if isinstance(function, str):
        if key is not None:
            message = f"two keys: the template {function!r} and key={key!r}; give one"
            raise ConfigurationError(message)
        key, function = function, None
    guard = _default_guard if guard is None else guard
    if not isinstance(guard, Guard):
        message = f"guard={shown(guard)}: give a Guard"
        raise ConfigurationError(message)
    for name, names, kind in (("ignore", ignore, str), ("vary", vary, ContextVar)):
        if not isinstance(names, list | tuple) or not all(isinstance(one, kind) for one in names):
            message = f"{name}={names!r}: give a tuple of {'names' if kind is str else 'context variables'}"
            raise ConfigurationError(message)
    policy = Policy.from_options(options, guard._defaults)

    def make(function: Callable[..., Coroutine[Any, Any, Any]], kind: type[Coalesced[Any, Any]]) -> Coalesced[Any, Any]:
        return kind(function, guard, key, policy, ignore=ignore, vary=vary, codec=codec, tags=tags, partition=partition)

    decorate: Callable[..., Any] = Decorator(make)
    return decorate if function is None else decorate(function)


def checked(function: Any, by: str = "@coalesce") -> Any:
    """Return *function* if it can be coalesced.

    Raises:
        NotCoalescable: it cannot; the message says what to do.
    """
    name = getattr(function, "__qualname__", repr(function))
    if isinstance(function, Coalesced):
        advice = "is coalesced already"
    elif inspect.isasyncgenfunction(function):
        advice = "is an async generator; return a list, or coalesce what it reads from"
    elif inspect.isgeneratorfunction(function):
        advice = "is a generator; only an `async def` that returns a value can be shared"
    elif inspect.isclass(function):
        advice = "is a class; decorate its `async def` methods"
    elif not inspect.isfunction(function):
        advice = f"is a {type(function).__qualname__}; wrap it in an `async def`"
    elif not inspect.iscoroutinefunction(function):
        advice = "is not async; declare it with `async def`"
    else:
        return function
    message = f"{by}: {name} {advice}"
    raise NotCoalescable(message)


def check_receiver(function: Callable[..., Any], by: str, advice: str) -> None:
    """Check that *function* is not one to be made a class method of by what stands above.

    From Python 3.13 on, `@classmethod` binds only calls: `.key`, `.invalidate` and the others would not get the class,
    and take their first argument for it.

    Raises:
        NotCoalescable: its first parameter is called `cls`.
    """
    if receiver_of(function) == "cls":
        message = (
            f"{by}: {function.__qualname__} takes cls, so it is a class method: {advice}; "
            "if it is none, call its first parameter something else"
        )
        raise NotCoalescable(message)


def return_annotation(function: Callable[..., Any]) -> Any:
    """Return the return annotation, or that there is none."""
    if "return" not in function.__annotations__:
        return NO_ANNOTATION
    return annotation_of(function, "return")
