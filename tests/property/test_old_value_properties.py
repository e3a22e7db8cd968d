"""Old values and pauses, beside a small model of what may be an answer."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from waiting import eventually

from stampede_guard import Guard, RecentFailure, coalesce
from stampede_guard.testing import ManualClock

LIFE = 10.0
REMEMBERED = 60.0  # seconds after a pause within which another failure counts as the next
# Numbers are seconds that pass; words come as often as they matter.
STEPS = st.sampled_from(
    ["call"] * 6 + ["fail"] * 2 + ["recover", "invalidate", "expire", "refresh", 1.2, 1.2, 3.0, 11.0, 35.0]
)
OPTIONS = st.sampled_from([{"stale": 30}, {"stale_if_error": 60}, {"stale": 20, "stale_if_error": 60}])


class Model:
    """One key: what was loaded, when, and what has failed since.

    Attributes:
        window: Seconds after its life for which a value is kept.
        kept: The instant at which the value that is kept was loaded; `None` without one.
        kept_until: Instant up to which it may be an answer.
        failures: Instants of the loads that failed, one after the other.
    """

    def __init__(self, window: float, clock: ManualClock) -> None:
        self.window = window
        self.kept: float | None = None
        self.kept_until = 0.0
        self.failures: list[float] = []
        self.is_down = False
        self._clock = clock

    @property
    def has_answer(self) -> bool:
        """Whether there is a value, fresh or old, that can be the answer now."""
        return self.kept is not None and self._clock() < self.kept_until

    async def load(self) -> float:
        """Load: the value is the instant of its load."""
        await asyncio.sleep(0)
        now = self._clock()
        if self.is_down:
            if self.failures:
                pause = min(2.0 ** (len(self.failures) - 1), 30.0)
                assert now >= self.failures[-1] + pause, "a load began during the pause"
                if now > self.failures[-1] + pause + REMEMBERED:
                    self.failures = []
            self.failures.append(now)
            raise ConnectionRefusedError
        self.kept, self.kept_until, self.failures = now, now + LIFE + self.window, []
        return now


@given(steps=st.lists(STEPS, min_size=15, max_size=60), options=OPTIONS)
def test_i14_old_values_are_answers_within_their_windows(steps: list[Any], options: Any) -> None:
    """A value is an answer until its window ends or it is invalidated; no error is one while there is a value."""
    asyncio.run(story(steps, options))


async def story(steps: list[Any], options: Any) -> None:
    """Do *steps*, and compare each answer with the model."""
    clock = ManualClock()
    model = Model(max(options.values()), clock)

    @coalesce("row", guard=Guard(clock=clock), ttl=LIFE, jitter=0, **options)
    async def load() -> float:
        return await model.load()

    for step in steps:
        await (call(load, model, clock) if step == "call" else change(step, load, model, clock))
        await eventually(lambda: not load.guard.stats().in_flight)


async def change(step: Any, load: Any, model: Model, clock: ManualClock) -> None:
    """Do what is no call."""
    if isinstance(step, float):
        clock.advance(step)
    elif step in ("fail", "recover"):
        model.is_down = step == "fail"
    elif step == "invalidate":
        model.kept, model.failures = None, []
        await load.invalidate()
    elif step == "expire":
        model.failures, model.kept_until = [], min(model.kept_until, clock() + model.window)
        await load.expire()
    elif not model.is_down:
        assert clock() == await load.refresh()


async def call(load: Any, model: Model, clock: ManualClock) -> None:
    """Call, and compare."""
    had_answer, kept = model.has_answer, model.kept
    try:
        value = await load()
    except (ConnectionRefusedError, RecentFailure):
        assert not had_answer
        assert model.failures
    else:
        assert value in (kept, model.kept)
        assert value is not None
        assert clock() - value <= LIFE + model.window
