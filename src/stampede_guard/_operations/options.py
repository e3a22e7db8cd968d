"""Options as users give them, and their checks."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import inf, isfinite
from typing import Any, Literal, TypeAlias, TypedDict, cast

from ..errors import ConfigurationError

Duration: TypeAlias = float | timedelta
Life: TypeAlias = Duration | Callable[[Any], Duration | None]
LONGEST_LIFE = 30 * 86_400.0  # seconds that a life which is a function of the value may be
_MAX_VERSION = (1 << 53) - 1  # the largest number that a script can compare exactly

OnAbandon: TypeAlias = Literal["finish", "cancel"]


def shown(value: object) -> str:
    """Return how an error shows *value*: a URL, which may hold a password, only up to its scheme."""
    return re.sub(r"://.*", "://…", repr(value), flags=re.DOTALL)


def seconds(name: str, value: object, *, zero: bool = False) -> float:
    """Return *value* as seconds.

    Raises:
        ConfigurationError: not a number or `timedelta`, not finite, or not positive.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        message = f"{name}={shown(value)}: a duration is a number of seconds or a timedelta"
        raise ConfigurationError(message)
    if not isfinite(value) or value < 0 or (value == 0 and not zero):
        message = f"{name}={shown(value)}: a duration is {'zero or more' if zero else 'more than zero'}, and finite"
        raise ConfigurationError(message)
    return float(value)


def life(name: str, value: Any) -> float | Callable[[Any], Duration | None]:
    """Return *value* as seconds, or as it is if it is a function of the value that is kept.

    Raises:
        ConfigurationError: it is neither.
    """
    if callable(value):
        return cast("Callable[[Any], Duration | None]", value)
    if not isinstance(value, int | float | timedelta) or isinstance(value, bool):
        message = f"{name}={shown(value)}: a life is a number of seconds, a timedelta, or a function of the value"
        raise ConfigurationError(message)
    return seconds(name, value)


def error_types(name: str, value: Any) -> tuple[type[Exception], ...]:
    """Return *value* if it is a tuple of exception classes, or one of them, as a tuple.

    Raises:
        ConfigurationError: it is neither.
    """
    types: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    if not types or not all(isinstance(each, type) and issubclass(each, Exception) for each in types):
        message = f"{name}={shown(value)}: give a tuple of exception classes, such as (OSError, TimeoutError)"
        raise ConfigurationError(message)
    return types


def fraction(name: str, value: object, *, below: float = inf) -> float:
    """Return *value* if it is from 0 to 1, and less than *below*.

    Raises:
        ConfigurationError: it does not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1 or value >= below:
        rule = f"from 0 to below {below:g}" if below <= 1 else "from 0 to 1"
        message = f"{name}={shown(value)}: give a fraction {rule}"
        raise ConfigurationError(message)
    return float(value)


def factor(name: str, value: object) -> float:
    """Return *value* if it is a finite number above zero.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        message = f"{name}={shown(value)}: give a finite number above zero"
        raise ConfigurationError(message)
    return float(value)


def count(name: str, value: object, *, zero: bool = False) -> int:
    """Return *value* if it is a whole number above zero, or, if *zero* may be, from zero on.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 - zero:
        message = f"{name}={shown(value)}: give a whole number {'from zero on' if zero else 'above zero'}"
        raise ConfigurationError(message)
    return value


def size(name: str, value: object) -> int:
    """Return *value*, a number of bytes or a text such as "256MB", as bytes.

    Raises:
        ConfigurationError: it is neither, or zero.
    """
    number = value
    if isinstance(value, str):
        written = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b", value.strip(), re.IGNORECASE)
        if written is not None:
            digits, prefix, binary = written.groups()
            number = int(float(digits) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        message = f"{name}={shown(value)}: give bytes above zero, as a whole number or with a unit: '256MB', '1GiB'"
        raise ConfigurationError(message)
    return number


def version_number(version: object) -> int:
    """Return *version* if it is a whole number from 0 to 2⁵³ - 1.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= _MAX_VERSION:
        message = f"version={version!r}: give a whole number from 0 to 2**53 - 1"
        raise ConfigurationError(message)
    return version


def choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Check that *value* is one of *choices*.

    Raises:
        ConfigurationError: it is not.
    """
    if value not in choices:
        message = f"{name}={shown(value)}: give one of {', '.join(map(repr, choices))}"
        raise ConfigurationError(message)


def namespace_name(namespace: str) -> str:
    """Return *namespace* if it can stand in keys and in names of channels.

    Raises:
        ConfigurationError: it cannot.
    """
    if not isinstance(namespace, str) or not re.fullmatch(r"[!-9;-z|~]{1,100}", namespace):
        message = f"namespace={shown(namespace)}: give 1 to 100 printable characters without spaces, colons and braces"
        raise ConfigurationError(message)
    return namespace


def flag(name: str, value: object) -> None:
    """Check that *value* is `True` or `False`.

    Raises:
        ConfigurationError: it is neither.
    """
    if not isinstance(value, bool):
        message = f"{name}={shown(value)}: give True or False"
        raise ConfigurationError(message)


@dataclass(frozen=True, slots=True)
class AdaptiveLimit:
    """A number of loads at once that follows what their backend can bear, as `max_loads`.

    It begins at *min*. It grows while loads take as long as they did, and shrinks when they take longer: a backend
    that is given more than it can bear answers all of it later, and no more of it.

    Attributes:
        max: The largest number.
        min: The smallest number.

    Raises:
        ConfigurationError: one is no whole number above zero, or *min* is larger than *max*.
    """

    max: int
    min: int = 1

    def __post_init__(self) -> None:
        """Check both."""
        count("max", self.max)
        count("min", self.min)
        if self.min > self.max:
            message = f"min={self.min} is larger than max={self.max}: give AdaptiveLimit its ends in order"
            raise ConfigurationError(message)


MaxLoads: TypeAlias = int | AdaptiveLimit


class Options(TypedDict, total=False):
    """The options as users give them; `Policy` documents them."""

    ttl: Life | None
    l2_ttl: Life | None
    jitter: float
    stale: Duration | None
    stale_wait: Duration
    stale_if_error: Duration | None
    stale_on: type[Exception] | tuple[type[Exception], ...]
    early: float | None
    error_backoff: Duration | None
    load_timeout: Duration | None
    handover_after: Duration | None
    wait_timeout: Duration | None
    on_abandon: OnAbandon
    isolate: bool
    inherit_context: bool
    lease: bool
    version: Callable[[Any], int] | None
    max_loads: MaxLoads | None
    max_queued: int | None
    queue_timeout: Duration | None
    max_waiters: int | None
    max_share: float | None
