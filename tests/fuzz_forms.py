"""Does the same to both forms of `_speed.forms`, at random, and compares what comes of it.

`python tests/fuzz_forms.py --seconds 60` tells stories of one seed after the other. In each the same random steps are
taken with the classes of `pure.py` and with those of `_fast.c`: looks, notes, validities that begin and end, and
entries that expire and die, calls that bind and recurse. Clocks fail, destructors and clocks go on with a step of
their own, in the midst of another. After each step, what came back, what was raised and what can be seen has to be
the same.

With `--collect`, the compiled form alone takes its steps while the garbage collector runs at nearly each allocation:
nothing is compared then, since both forms allocate at other times, but for a sanitizer every step is a question.
"""

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from math import inf, nan
from random import Random
from types import ModuleType
from typing import Any
from weakref import ref

from rich.console import Console

from stampede_guard._speed import pure

say = partial(Console().print, markup=False, highlight=False, soft_wrap=True)

DEPTH = 3  # steps within steps
STEPS = 120  # of one story


class BrokenError(Exception):
    """What clocks and functions raise."""


class Odd(int):
    """An argument that may not be asked for its hash: no cache has any business with it."""

    def __hash__(self) -> int:
        raise BrokenError

    def __eq__(self, other: object) -> bool:
        raise BrokenError


class Thing:
    """A value, a receiver or a clock: its destructor is seen, and may go on with a step."""

    def __init__(self, story: "Story", kind: str) -> None:
        self.story = story
        self.name = f"{kind} {story.number()}"
        self.acts = story.random.random() < 0.3
        self.link: object = story.anything() if story.random.random() < 0.3 else None  # perhaps a cycle

    def __call__(self) -> Any:
        """Tell the time, as a clock."""
        return self.story.tell_time(self)

    def __del__(self) -> None:
        self.story.note("end of", self.name)
        if self.acts:
            self.story.step()


class Story:
    """The steps of one seed in one form, and what came of them.

    Args:
        form: The module of the form.
        seed: Of all that is decided at random.
    """

    def __init__(self, form: ModuleType, seed: int) -> None:
        self.form = form
        self.random = Random(seed)
        self.trace: list[Any] = []
        self._depth = 0
        self._things = 0
        self._is_over = False
        self.now = 1_000.0
        self.elsewhere = asyncio.new_event_loop()
        self.here = asyncio.get_running_loop()

        class Named(form.FunctionProxy):
            """A callee with a dict, as the package has them."""

        class Counted(form.HitCounter):
            """A tally with a dict."""

        self.callee_class = Named
        self.caches: list[Any] = []
        self.validities: list[Any] = []
        self.held: list[Any] = []
        self.callees: list[Any] = []
        self.tallies = [form.HitCounter(), Counted()]
        self.caches = [form.ArgumentCache(self.random.choice(self.tallies), capacity) for capacity in (0, 2, 3, 8)]
        self.validities = [self._new_era() for _ in range(3)]
        self.held = [self._new_held() for _ in range(4)]
        self.callees = [Named() for _ in range(3)]
        self._verbs: list[Callable[[], Any]] = [
            *[self._look] * 6,
            *[self._show] * 6,
            *[self._serve] * 2,
            *[self._hold] * 2,
            self._drop,
            self._begin_era,
            self._trust,
            self._clear,
            self._pass_time,
            self._misuse,
            *[self._set_call] * 2,
            self._forget_call,
            *[self._call] * 3,
            *[self._bind] * 2,
            self._collect,
        ]

    def tell(self, steps: int) -> list[Any]:
        """Take the steps; return what came of them."""
        for _ in range(steps):
            self.step()
            self.trace.append(self._seen())
        self._is_over = True
        self.elsewhere.close()
        return self.trace

    def number(self) -> int:
        """Return another number each time."""
        self._things += 1
        return self._things

    def note(self, *words: object) -> None:
        """Remember what happened."""
        if not self._is_over:
            self.trace.append(words)

    def anything(self) -> object:
        """Return something that is there."""
        there = [*self.caches, *self.validities, *self.held, *self.callees]
        return self.random.choice(there) if there else None

    def step(self) -> None:
        """Take a step, unless it is one too many within others."""
        if self._is_over or self._depth >= DEPTH:
            return
        self._depth += 1
        verb = self.random.choice(self._verbs)
        try:
            came = self._named(verb())
        except Exception as error:
            came = type(error).__name__
        finally:
            self._depth -= 1
        self.note(self._depth, verb.__name__, came)

    def tell_time(self, clock: Thing) -> Any:
        """Be the clock of an validity: one that is right, of another type, broken, or busy."""
        self.note("asked", clock.name)
        mood = self.random.random()
        if mood < 0.05:
            raise BrokenError
        if mood < 0.1:
            return "late"
        if mood < 0.15:
            return nan
        if mood < 0.35:
            self.step()
        return int(self.now) if mood > 0.8 else self.now

    def _named(self, came: Any) -> Any:
        """Return what can be compared for what came back."""
        if came is self.form.MISS:
            return "MISS"
        if isinstance(came, tuple | list):
            return [self._named(each) for each in came]
        if isinstance(came, Thing):
            return came.name
        if isinstance(came, self.form.FunctionProxy):
            return "callee"
        return repr(came) if isinstance(came, str | int | float | None) else type(came).__name__

    def _seen(self) -> list[Any]:
        """Return what can be seen from outside."""
        validities = [*self.validities, None]
        caches = [
            (len(cache), next((at for at, validity in enumerate(validities) if validity is cache.validity), "gone"))
            for cache in self.caches
        ]
        held = [
            (
                self._named(each.value),
                *(repr(instant) for instant in (each.fresh_until, each.stale_until, each.born_at)),
                each.used,
                each.generation,
            )
            for each in self.held
        ]
        callees = [self._named(each._receiver) for each in self.callees]
        trust, hits = (
            [repr(validity.trusted_until) for validity in self.validities],
            [tally.l1_hits for tally in self.tallies],
        )
        return [caches, held, trust, hits, callees]

    # Steps

    def _arguments(self) -> tuple[Any, ...]:
        pool = [1, 2, "a", None] * 5 + [10**30, True, 1.0, (1,), Odd(1), b"a"]
        return tuple(self.random.choices(pool, k=self.random.choice((0, 1, 1, 1, 2, 3))))

    def _look(self) -> Any:
        return self.random.choice(self.caches)(*self._arguments())

    def _show(self) -> Any:
        """Note an answer, mostly for the validity that is served."""
        cache = self.random.choice(self.caches)
        validity = (
            cache.validity
            if cache.validity is not None and self.random.random() < 0.8
            else self.random.choice(self.validities)
        )
        return cache.note(self._arguments(), self.random.choice(self.held), validity)

    def _serve(self) -> Any:
        return self.random.choice(self.caches).serve(self.random.choice(self.validities))

    def _drop(self) -> Any:
        return self.random.choice(self.caches).drop()

    def _instant(self) -> float:
        return self.random.choice((inf, inf, self.now + 5, self.now + 1, self.now, -inf, nan))

    def _new_held(self) -> Any:
        value = Thing(self, "value") if self.random.random() < 0.7 else self.random.choice((None, 0, "soup"))
        rest = ("of late", self.random.choice((None, self._instant())), self._instant())
        return self.form.Slot(value, self._instant(), *rest[: self.random.randrange(4)])

    def _hold(self) -> None:
        """Hold another value in the place of one, which nothing else may keep."""
        held = self._new_held()
        self.held[self.random.randrange(len(self.held))] = held

    def _new_era(self) -> Any:
        loop = self.random.choice((self.here, self.here, self.here, self.elsewhere, None))
        return self.form.Validity(Thing(self, "clock"), None if loop is None else ref(loop))

    def _begin_era(self) -> None:
        validity = self._new_era()
        self.validities[self.random.randrange(len(self.validities))] = validity

    def _trust(self) -> None:
        self.random.choice(self.validities).trusted_until = self._instant()

    def _clear(self) -> None:
        self.random.choice(self.held).clear()

    def _soften(self) -> None:
        held = self.random.choice(self.held)
        held.fresh_until, held.stale_until = self._instant(), self._instant()

    def _pass_time(self) -> None:
        self.now += self.random.choice((0.5, 1.0, 4.0))

    def _collect(self) -> None:
        gc.collect()

    def _misuse(self) -> Any:
        """Call something as it may not be called."""
        form, cache = self.form, self.random.choice(self.caches)
        wrong: list[Callable[[], object]] = [
            lambda: cache(1, menu_id=1),
            lambda: form.Slot(value=1, fresh_until=1.0),
            lambda: form.Slot(1),
            lambda: form.Validity(time.monotonic),
            lambda: form.Validity(time.monotonic, loop=None),
            lambda: form.ArgumentCache(self.tallies[0], capacity=3),
            lambda: form.ArgumentCache(self.tallies[0]),
            lambda: cache.note((1,), self.held[0]),
        ]
        return self.random.choice(wrong)()

    def _set_call(self) -> None:
        """Have a callee call a function, another callee, itself, or something built in."""
        number, acts, fails = self.number(), self.random.random() < 0.4, self.random.random() < 0.2

        def function(*args: Any, **kwargs: Any) -> Any:
            self.note("called", number)
            if acts:
                self.step()
            if fails:
                raise BrokenError
            return number, args, sorted(kwargs)

        others = (function, function, function, self.random.choice(self.callees), Bound(function))
        self.random.choice(self.callees)._call = self.random.choice(others)

    def _forget_call(self) -> None:
        del self.random.choice(self.callees)._call

    def _call(self) -> Any:
        callee = self.random.choice(self.callees)
        if self._depth > 1 and self._leads_back(callee):
            return None  # in a destructor the interpreter would keep the frames of so deep a recursion for a while
        return callee(1, lang="en") if self.random.random() < 0.5 else callee()

    def _leads_back(self, callee: Any) -> bool:
        """Whether a call of *callee* goes round in a circle."""
        seen: list[Any] = []
        while isinstance(callee, self.form.FunctionProxy) and not any(callee is each for each in seen):
            seen.append(callee)
            callee = getattr(callee, "_call", None)
        return isinstance(callee, self.form.FunctionProxy)

    def _bind(self) -> Any:
        """Put a bound one, or a new one, in the place of a callee."""
        callee = self.random.choice(self.callees)
        receiver = Thing(self, "receiver") if self.random.random() < 0.8 else None
        way = self.random.random()
        if way < 0.4:
            bound = callee.__get__(receiver, Thing)
        elif way < 0.7:
            bound = callee.bound_to(receiver)
        else:
            bound = self.callee_class()
        self.callees[self.random.randrange(len(self.callees))] = bound
        return bound


class Bound:
    """A callable that is no function, and counts no depth by itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)


@contextmanager
def new_garbage() -> Generator[None]:
    """Let no collection look at what was there before; what is frozen already stays so."""
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def difference(fast: ModuleType, seed: int, steps: int = STEPS) -> str | None:
    """Return where the two forms part in the story of *seed*; `None` if they do not. Only within a loop."""
    was_enabled = gc.isenabled()
    gc.disable()  # only when a step says so: both forms allocate at other times
    try:
        with new_garbage():
            ours, theirs = [Story(form, seed).tell(steps) for form in (pure, fast)]
    finally:
        if was_enabled:
            gc.enable()
    for at, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return f"seed {seed}, entry {at}\n  pure:     {mine}\n  compiled: {other}"
    return None if len(ours) == len(theirs) else f"seed {seed}: one has {len(ours)} entries, the other {len(theirs)}"


def collecting(fast: ModuleType, seed: int, steps: int = STEPS) -> None:
    """Tell the story of *seed* in the compiled form while garbage is collected at nearly each allocation."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with new_garbage():
            Story(fast, seed).tell(steps)
    finally:
        gc.set_threshold(*thresholds)


async def fuzz(fast: ModuleType, args: argparse.Namespace) -> int:
    """Tell stories until the time or the number is used up; return the exit code."""
    until = time.monotonic() + args.seconds
    seed = args.seed
    while seed < args.seed + args.count and time.monotonic() < until:
        if args.collect:
            collecting(fast, seed, args.steps)
        elif (parted := difference(fast, seed, args.steps)) is not None:
            say(f"The forms differ: {parted}\nAgain: python tests/fuzz_forms.py --seed {seed} --count 1")
            return 1
        seed += 1
    outcome = "no crash" if args.collect else "no difference"
    say(f"{seed - args.seed:,} stories of {args.steps} steps, seeds {args.seed} to {seed - 1}: {outcome}")
    return 0


def main() -> int:
    """Fuzz as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000_000, help="of the first story")
    parser.add_argument("--count", type=int, default=1_000_000, help="of stories, at most")
    parser.add_argument("--seconds", type=float, default=60, help="in all, at most")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each story")
    parser.add_argument("--collect", action="store_true", help="the compiled form alone, under garbage collection")
    args = parser.parse_args()
    try:
        fast = import_module("stampede_guard._speed._fast")
    except ImportError:
        say("The compiled form is not there: install a C compiler, and then the package again")
        return 2
    say(f"seed {args.seed}")
    return asyncio.run(fuzz(fast, args))


if __name__ == "__main__":
    sys.exit(main())
