from collections.abc import Callable

import pytest

from stampede_guard.stores._breaker import Breaker
from stampede_guard.testing import ManualClock

Logged = Callable[[], list[str]]

DEAD = "Redis does not answer (ConnectionError); going on without it, probing again and again"
ALIVE = "Redis answers again"


@pytest.fixture
def breaker(clock: ManualClock) -> Breaker:
    """Return a closed breaker."""
    return Breaker("Redis", clock)


def fail(breaker: Breaker, times: int = 3) -> None:
    """Let so many operations fail."""
    for _ in range(times):
        breaker.failed("ConnectionError")


def test_closed_breaker_lets_everybody_ask(breaker: Breaker, logged: Logged) -> None:
    """While the node answers, there is nothing to decide, nor to say."""
    for _ in range(5):
        assert breaker.allows()
        breaker.succeeded()

    assert ("closed", []) == (breaker.state, logged())


def test_three_failures_in_a_row_open_it(breaker: Breaker, logged: Logged) -> None:
    """The third failure in a row opens the breaker, and is the one that is logged."""
    fail(breaker, 2)
    early = breaker.state, logged()[:]
    fail(breaker, 1)

    assert ("closed", []) == early
    assert ("open", [DEAD]) == (breaker.state, logged())
    assert not breaker.allows()


def test_an_answer_in_between_starts_the_count_anew(breaker: Breaker) -> None:
    """Failures among answers do not add up."""
    for _ in range(5):
        fail(breaker, 2)
        breaker.succeeded()

    assert "closed" == breaker.state


def test_trip_opens_it_at_once(breaker: Breaker, logged: Logged) -> None:
    """A node that does not answer at the start is not asked three times."""
    breaker.trip("ConnectionError")

    assert ("open", [DEAD]) == (breaker.state, logged())


def test_one_probe_when_the_pause_is_over(breaker: Breaker, clock: ManualClock) -> None:
    """After the pause one caller may ask, and nobody else until it says how that went."""
    fail(breaker)
    clock.advance(0.2)

    assert [True, False, False] == [breaker.allows() for _ in range(3)]
    assert "half-open" == breaker.state


def test_no_probe_before_the_pause_is_over(breaker: Breaker, clock: ManualClock) -> None:
    """The pause is shortened by up to a quarter, never more."""
    fail(breaker)
    clock.advance(0.149)

    assert not breaker.allows()


def test_pauses_differ(clock: ManualClock) -> None:
    """The processes of a fleet do not probe together."""
    breakers = [Breaker("Redis", clock) for _ in range(100)]
    for breaker in breakers:
        fail(breaker)
    clock.advance(0.175)

    assert 20 < sum(breaker.allows() for breaker in breakers) < 80


def test_answered_probe_closes_it(breaker: Breaker, clock: ManualClock, logged: Logged) -> None:
    """When the probe is answered, everybody may ask again, and three failures are needed again."""
    fail(breaker)
    clock.advance(0.2)
    breaker.allows()
    breaker.succeeded()
    fail(breaker, 2)

    assert ("closed", [DEAD, ALIVE]) == (breaker.state, logged())


def test_failed_probe_doubles_the_pause(breaker: Breaker, clock: ManualClock, logged: Logged) -> None:
    """Pauses grow to two seconds and no further; nothing is logged, since nothing changed."""
    fail(breaker)
    for longest in (0.2, 0.4, 0.8, 1.6, 2.0, 2.0):
        clock.advance(0.74 * longest)
        assert not breaker.allows()
        clock.advance(0.27 * longest)
        assert breaker.allows()
        fail(breaker, 1)

    assert [DEAD] == logged()


def test_pause_is_short_again_after_an_answer(breaker: Breaker, clock: ManualClock) -> None:
    """A node that was dead for long and came back starts with the first pause the next time."""
    fail(breaker)
    for _ in range(4):
        clock.advance(2)
        breaker.allows()
        fail(breaker, 1)
    clock.advance(2)
    breaker.allows()
    breaker.succeeded()
    fail(breaker)
    clock.advance(0.2)

    assert breaker.allows()


def test_probe_without_a_verdict(breaker: Breaker, clock: ManualClock, logged: Logged) -> None:
    """A probe that was cancelled does not keep the breaker half-open for ever; another one follows after a pause."""
    fail(breaker)
    clock.advance(0.2)
    breaker.allows()
    breaker.gave_up()
    at_once = breaker.allows()
    clock.advance(0.2)

    assert [False, True] == [at_once, breaker.allows()]
    assert [DEAD] == logged()


def test_cancelled_operation_is_no_failure(breaker: Breaker) -> None:
    """On a closed breaker a caller that gave up says nothing about the node."""
    for _ in range(5):
        breaker.gave_up()

    assert "closed" == breaker.state


def test_late_failures_change_nothing(breaker: Breaker, clock: ManualClock, logged: Logged) -> None:
    """Operations that were under way when the breaker opened, and fail then, neither log nor lengthen the pause."""
    fail(breaker, 20)
    clock.advance(0.2)

    assert breaker.allows()
    assert [DEAD] == logged()


def test_repr_tells_the_state(breaker: Breaker) -> None:
    """A breaker says whose it is and how it stands."""
    fail(breaker)

    assert "<Breaker Redis open>" == repr(breaker)
