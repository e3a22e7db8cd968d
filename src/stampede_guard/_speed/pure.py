"""The front of L1 in Python: the reference, which says what `_fast.c` has to do; see `front`."""

import asyncio
from collections.abc import Callable
from math import inf
from typing import Any, Self
from weakref import ref

__all__ = ("MISS", "ArgumentCache", "FunctionProxy", "HitCounter", "Slot", "Validity")

MISS: Any = object()

FORM = 5  # raised whenever what is here changes, here and in `_fast.c`: what was compiled before is of no use then

_PLAIN = frozenset({int, str, type(None)})  # equal ones of these classes are alike; 1, 1.0 and True are not


class HitCounter:
    """The counter that a front counts up; the base of an operation's counters."""

    __slots__ = ("l1_hits",)

    def __init__(self) -> None:
        self.l1_hits = 0


class Slot:
    """A value in memory.

    Args:
        value: Any.
        fresh_until: Instant of the memory's clock.
        generation: Whose value it is.

    Attributes:
        used: Whether it was an answer since an eviction last came by.
    """

    __slots__ = ("fresh_until", "generation", "used", "value")

    def __init__(self, value: Any, fresh_until: float, generation: Any = None, /) -> None:
        self.value = value
        self.generation = generation
        self.fresh_until = fresh_until
        self.used = False

    def kill(self) -> None:
        """Never be fresh again, and let go of the value: fronts may hold on to this for a while."""
        self.fresh_until = -inf  # first: the value's destructor may look here
        self.value = None


class Validity:
    """What all that one memory holds has in common.

    Args:
        clock: Monotonic seconds.
        loop: Weak reference to the event loop that the memory belongs to; without one, no front answers.

    Attributes:
        trusted_until: Instant from which on nothing may be answered before memory has looked at it.
    """

    __slots__ = ("clock", "loop", "trusted_until")

    def __init__(self, clock: Callable[[], float], loop: "ref[asyncio.AbstractEventLoop] | None", /) -> None:
        self.clock = clock
        self.loop = loop
        self.trusted_until = inf


class ArgumentCache:
    """The hits of one function, in one event loop at a time.

    Args:
        counter: Where hits are counted.
        room: How many calls are known at most; then all are forgotten, and learnt anew.
    """

    __slots__ = ("__weakref__", "_counter", "_room", "_serving")

    def __init__(self, counter: HitCounter, room: int, /) -> None:
        self._counter = counter
        self._room = room
        # One attribute for both: neither another thread nor a destructor finds the one with the other's successor.
        self._serving: tuple[Validity | None, dict[Any, Slot]] = (None, {})

    @property
    def validity(self) -> Validity | None:
        """What it answers from; `None` if from nowhere."""
        return self._serving[0]

    def __call__(self, *args: Any) -> Any:
        """Return the answer to a call with these arguments, or `MISS`; only in a coroutine, since it may go stale."""
        validity, table = self._serving
        key = args[0] if len(args) == 1 else args
        if validity is None or not (key.__class__ in _PLAIN or (key is args and _is_plain(args))):
            return MISS
        slot = table.get(key)
        # Before the clock is asked, which may run anything.
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
        """Answer calls with *args* with what is *slot*, if such calls can be told apart for sure.

        Unless *validity*, which it is from, is no longer the present one: the thread of another loop may be faster.
        """
        present, table = self._serving
        if present is validity and _is_plain(args):
            if len(table) >= self._room:
                table.clear()
            table[args[0] if len(args) == 1 else args] = slot

    def drop(self) -> None:
        """Know nothing, and answer from nowhere."""
        self._serving = None, {}

    def __len__(self) -> int:
        return len(self._serving[1])


class FunctionProxy:
    """An object that is called like the function it holds, and binds as functions do. Classes of it have a dict.

    A call of a bound method begins with a new object, so that has to be cheap: it shares the dict.
    """

    __slots__ = ("_call", "_receiver")

    _call: Callable[..., Any]
    _receiver: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: ARG004  # those of `__init__`
        """Make one that is bound to nothing."""
        made = object.__new__(cls)
        made._receiver = None
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, with what this is bound to in front."""
        if self._receiver is None:
            return self._call(*args, **kwargs)
        return self._call(self._receiver, *args, **kwargs)

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        """Bind to *instance*; what is bound stays so."""
        return self if instance is None or self._receiver is not None else self.bound_to(instance)

    def bound_to(self, receiver: object, /) -> Any:
        """Return the same with *receiver* as its first argument."""
        bound = object.__new__(type(self))
        bound.__dict__ = self.__dict__  # type: ignore[misc]  # its classes have one
        bound._call = self._call
        bound._receiver = receiver
        return bound


def _is_plain(args: tuple[Any, ...]) -> bool:
    for arg in args:  # noqa: SIM110  # a generator would cost more than all the rest
        if arg.__class__ not in _PLAIN:
            return False
    return True
