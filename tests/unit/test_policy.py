from dataclasses import FrozenInstanceError, replace
from datetime import timedelta
from decimal import Decimal
from math import inf, nan
from typing import Any

import pytest
from inside import untyped

from stampede_guard import ConfigurationError
from stampede_guard._operations.options import Options, choice, count, flag, fraction, seconds, version_number
from stampede_guard._operations.policy import Policy


@pytest.mark.parametrize(("expected", "value"), [(5.0, 5), (0.5, 0.5), (90.0, timedelta(minutes=1.5))])
def test_seconds(expected: float, value: object) -> None:
    """Numbers are seconds, and a timedelta becomes them."""
    assert expected == seconds("ttl", value)


def test_zero_seconds() -> None:
    """Zero is a duration only where it means something."""
    assert 0.0 == seconds("drain_timeout", 0, zero=True)

    with pytest.raises(ConfigurationError, match=r"^ttl=0: a duration is more than zero, and finite$"):
        seconds("ttl", 0)


@pytest.mark.parametrize("value", [-1, -0.5, timedelta(seconds=-1), inf, -inf, nan])
@pytest.mark.parametrize(("zero", "rule"), [(False, "more than zero"), (True, "zero or more")])
def test_impossible_durations(value: object, zero: bool, rule: str) -> None:
    """A negative or endless duration is refused, with the rule."""
    with pytest.raises(ConfigurationError, match=rf"^ttl=.*: a duration is {rule}, and finite$"):
        seconds("ttl", value, zero=zero)


@pytest.mark.parametrize("value", [True, "5", Decimal(5), None, [5]])
def test_durations_of_a_wrong_type(value: object) -> None:
    """What is neither a number nor a timedelta is refused, a bool too."""
    with pytest.raises(ConfigurationError, match=r"a duration is a number of seconds or a timedelta$"):
        seconds("ttl", value)


@pytest.mark.parametrize("value", [0, 0.25, 1])
def test_fraction(value: float) -> None:
    """A fraction lies in 0…1."""
    assert float(value) == fraction("rollout", value)


@pytest.mark.parametrize("value", [-0.1, 1.1, nan, inf, True, "0.5", None])
def test_wrong_fractions(value: object) -> None:
    """What lies elsewhere, or is no number, is refused."""
    with pytest.raises(ConfigurationError, match=r"^rollout=.*: give a fraction from 0 to 1$"):
        fraction("rollout", value)


def test_fraction_below_a_limit() -> None:
    """A limit is excluded, and named in the rule."""
    with pytest.raises(ConfigurationError, match=r"^jitter=1: give a fraction from 0 to below 1$"):
        fraction("jitter", 1, below=1)


def test_count() -> None:
    """A count is a whole number above zero."""
    assert 1 == count("maxsize", 1)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_wrong_counts(value: object) -> None:
    """Anything else is refused."""
    with pytest.raises(ConfigurationError, match=r"^maxsize=.*: give a whole number above zero$"):
        count("maxsize", value)


def test_wrong_choice() -> None:
    """A choice that is none names those that are."""
    with pytest.raises(ConfigurationError, match=r"^on_abandon='stop': give one of 'finish', 'cancel'$"):
        choice("on_abandon", "stop", ("finish", "cancel"))


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_wrong_flags(value: object) -> None:
    """A flag is a bool, so that `isolate="no"` is no yes."""
    with pytest.raises(ConfigurationError, match=r"^isolate=.*: give True or False$"):
        flag("isolate", value)


def test_defaults() -> None:
    """By default nothing is remembered, lives vary by a tenth, and a load may take half a minute."""
    policy = Policy()

    assert (None, None, 0.1, 30.0, None) == (
        policy.ttl,
        policy.l2_ttl,
        policy.jitter,
        policy.load_timeout,
        policy.wait_timeout,
    )
    assert ("finish", False, False) == (policy.on_abandon, policy.isolate, policy.inherit_context)


@pytest.mark.parametrize(("duration", "seconds"), [(timedelta(minutes=1.5), 90.0), (None, None)])
@pytest.mark.parametrize("name", ["ttl", "l2_ttl", "load_timeout", "wait_timeout"])
def test_durations_become_seconds(name: str, duration: Any, seconds: float | None) -> None:
    """Every duration may be given as a timedelta; `None` switches off what it bounds."""
    given: dict[str, Any] = {name: duration}

    assert seconds == getattr(Policy(**given), name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttl": 0}, "ttl=0"),
        ({"l2_ttl": -1}, "l2_ttl=-1"),
        ({"load_timeout": "1"}, "load_timeout='1'"),
        ({"wait_timeout": inf}, "wait_timeout=inf"),
        ({"jitter": 1}, "jitter=1"),
        ({"on_abandon": None}, "on_abandon=None"),
        ({"isolate": "no"}, "isolate='no'"),
        ({"inherit_context": 1}, "inherit_context=1"),
        ({"lease": 0}, "lease=0"),
        ({"version": 7}, "version=7"),
        ({"max_loads": 0}, "max_loads=0"),
        ({"max_loads": 1, "max_queued": -1}, "max_queued=-1"),
        ({"max_loads": 1, "queue_timeout": 0}, "queue_timeout=0"),
        ({"max_waiters": 0}, "max_waiters=0"),
        ({"max_share": 0}, "max_share=0"),
        ({"max_share": 1.5}, "max_share=1.5"),
    ],
)
def test_options_are_validated(options: dict[str, Any], message: str) -> None:
    """Every option is checked where it is given, and the error shows its value."""
    with pytest.raises(ConfigurationError, match=f"^{message}: "):
        Policy(**options)


def test_policy_of_options() -> None:
    """What is not given keeps its default."""
    assert Policy(ttl=5.0, jitter=0) == Policy.from_options({"ttl": 5, "jitter": 0})


def test_unknown_option() -> None:
    """A misspelt option is named, with those that there are."""
    options: Any = {"tll": 5}

    with pytest.raises(ConfigurationError, match=r"^there is no option 'tll'; there are ttl, l2_ttl, jitter, "):
        Policy.from_options(options)


def test_options_and_policy_agree() -> None:
    """Each option is a field, and each field an option."""
    assert list(Options.__annotations__) == list(Policy.__dataclass_fields__)


def test_policy_is_frozen() -> None:
    """A policy is validated once, so it cannot change; a copy with a change is validated again."""
    policy = Policy(ttl=5)

    with pytest.raises(FrozenInstanceError):
        untyped(policy).ttl = 0
    with pytest.raises(ConfigurationError, match="ttl=0"):
        replace(policy, ttl=0)


def test_defaults_of_what_processes_share() -> None:
    """By default another process's load is waited for, values have no versions, and loads no limit."""
    policy = Policy()

    assert (True, None, None) == (policy.lease, policy.version, policy.max_loads)


@pytest.mark.parametrize("version", [0, 1, 2**53 - 1])
def test_version_number(version: int) -> None:
    """A version is a whole number that a script can compare without loss."""
    assert version == version_number(version)


@pytest.mark.parametrize("version", [-1, 2**53, 1.0, True, "1", None])
def test_wrong_versions(version: object) -> None:
    """Anything else is refused, with the rule."""
    with pytest.raises(ConfigurationError, match=r"^version=.*: give a whole number from 0 to 2\*\*53 - 1$"):
        version_number(version)
