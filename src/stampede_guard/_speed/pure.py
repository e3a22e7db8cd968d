"""The argument cache in Python, the reference for `_fast.c`; see `forms`."""

import asyncio
from collections.abc import Callable
from math import inf
from typing import Any, Self
from weakref import ref

__all__ = ("MISS", "ArgumentCache", "FunctionProxy", "HitCounter", "Slot", "Validity")

MISS: Any = object()

FORM = 8  # raised here and in `_fast.c` when what they offer changes: an older compiled form is not used then

_PLAIN = frozenset({int, str, type(None)})  # equal ones of these classes are alike; 1, 1.0 and True are not


class HitCounter:
    """The counter of an argument cache's hits; the base of an operation's counters."""

    __slots__ = ("l1_hits",)

    def __init__(self) -> None:
        self.l1_hits = 0


class Slot:
    """A value in memory.

    Args:
        value: Any object.
        fresh_until: Instant of the memory's clock.
        generation: That of the function that loaded the value.
        stale_until: Instant up to which the value may be used as an old one; `None` for *fresh_until*.
        born_at: Instant at which the value came from its load; -inf where that is not known.

    Attributes:
        place: Where its op stands in the memory's list of all ops.
        used: Whether it was an answer since an eviction last passed it.
    """

    __slots__ = ("born_at", "fresh_until", "generation", "place", "stale_until", "used", "value")

    def __init__(
        self,
        value: Any,
        fresh_until: float,
        generation: Any = None,
        stale_until: float | None = None,
        born_at: float = -inf,
        /,
    ) -> None:
        self.value = value
        self.generation = generation
        self.fresh_until = fresh_until
        self.stale_until = fresh_until if stale_until is None else stale_until
        self.born_at = born_at
        self.place = 0
        self.used = False

    def clear(self) -> None:
        """Expire, and release the value: argument caches may keep the slot for a while."""
        self.fresh_until = self.stale_until = self.born_at = -inf  # first: the value's destructor may read the slot
        self.value = None


class Validity:
    """State shared by all entries of one L1: clock, event loop, and until when they may be served.

    Args:
        clock: Monotonic seconds.
        loop: Weak reference to the event loop that the memory belongs to; without one, no argument cache answers.

    Attributes:
        trusted_until: Instant from which on L1 has to be asked.
    """

    __slots__ = ("clock", "loop", "trusted_until")

    def __init__(self, clock: Callable[[], float], loop: "ref[asyncio.AbstractEventLoop] | None", /) -> None:
        self.clock = clock
        self.loop = loop
        self.trusted_until = inf


class ArgumentCache:
    """The hits of one function, in one event loop at a time.

    Args:
        counter: Counts the hits.
        capacity: How many calls it keeps at most; when it is full, it is emptied.
    """

    __slots__ = ("__weakref__", "_capacity", "_counter", "_serving")

    def __init__(self, counter: HitCounter, capacity: int, /) -> None:
        self._counter = counter
        self._capacity = capacity
        # One attribute for both, so that no other thread and no destructor finds the one with the other's successor.
        self._serving: tuple[Validity | None, dict[Any, Slot]] = (None, {})

    @property
    def validity(self) -> Validity | None:
        """The validity of the memory that it answers from; `None` without one."""
        return self._serving[0]

    def __call__(self, *args: Any) -> Any:
        """Return the answer to a call with these arguments, or `MISS`; call it when the coroutine is awaited."""
        validity, table = self._serving
        key = args[0] if len(args) == 1 else args
        if validity is None or not (key.__class__ in _PLAIN or (key is args and _is_plain(args))):
            return MISS
        slot = table.get(key)
        # Before the clock is read, which may run any code.
        if slot is None or validity.loop is None or validity.loop() is not asyncio._get_running_loop():  # noqa: SLF001  # the documented one raises
            return MISS
        now = validity.clock()
        if not now < slot.fresh_until or not now < validity.trusted_until:
            return MISS
        slot.used = True
        self._counter.l1_hits += 1
        return slot.value

    def serve(self, validity: Validity, /) -> None:
        """Answer from *validity* from now on."""
        self._serving = validity, {}

    def note(self, args: tuple[Any, ...], slot: Slot, validity: Validity, /) -> None:
        """Answer calls with *args* from *slot*, if all of them are plain.

        Unless *validity*, which the slot belongs to, has been replaced: the thread of another loop may be faster.
        """
        present, table = self._serving
        if present is validity and _is_plain(args):
            if len(table) >= self._capacity:
                table.clear()
            table[args[0] if len(args) == 1 else args] = slot

    def drop(self) -> None:
        """Forget all calls and the validity."""
        self._serving = None, {}

    def __len__(self) -> int:
        return len(self._serving[1])


class FunctionProxy:
    """An object that is called like the function it holds, and binds as functions do. Classes of it have a dict.

    Each call of a bound method makes a new object, which has to be cheap, so it shares the dict.
    """

    __slots__ = ("_call", "_receiver")

    _call: Callable[..., Any]
    _receiver: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: ARG004  # those of `__init__`
        """Make an unbound proxy."""
        made = object.__new__(cls)
        made._receiver = None
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, with the receiver as its first argument if there is one."""
        if self._receiver is None:
            return self._call(*args, **kwargs)
        return self._call(self._receiver, *args, **kwargs)

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        """Bind to *instance*; a bound proxy stays as it is."""
        return self if instance is None or self._receiver is not None else self.bound_to(instance)

    def bound_to(self, receiver: object, /) -> Any:
        """Return the same with *receiver* as its first argument."""
        bound = object.__new__(type(self))
        bound.__dict__ = self.__dict__  # type: ignore[misc]  # its classes have one
        bound._call = self._call
        bound._receiver = receiver
        return bound


def _is_plain(args: tuple[Any, ...]) -> bool:
    for arg in args:  # noqa: SIM110  # a generator would cost more than the rest of the call
        if arg.__class__ not in _PLAIN:
            return False
    return True
