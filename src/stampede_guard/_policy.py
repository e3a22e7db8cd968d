"""One operation's options, validated once, at decoration."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import inf, isfinite
from typing import Any, Literal, TypeAlias, TypedDict

from .errors import ConfigurationError

Duration: TypeAlias = float | timedelta
_VERSIONS = 1 << 53

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


def fraction(name: str, value: object, *, below: float = inf) -> float:
    """Return *value* if it lies in 0…1, and under *below*.

    Raises:
        ConfigurationError: it does not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1 or value >= below:
        rule = f"from 0 to below {below:g}" if below <= 1 else "from 0 to 1"
        message = f"{name}={shown(value)}: give a fraction {rule}"
        raise ConfigurationError(message)
    return float(value)


def count(name: str, value: object) -> int:
    """Return *value* if it is a whole number above zero.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        message = f"{name}={shown(value)}: give a whole number above zero"
        raise ConfigurationError(message)
    return value


def version_number(version: object) -> int:
    """Return *version* if it is one: a whole number from 0 to 2⁵³ - 1, which is what a script can compare.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < _VERSIONS:
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


def flag(name: str, value: object) -> None:
    """Check that *value* is `True` or `False`.

    Raises:
        ConfigurationError: it is neither.
    """
    if not isinstance(value, bool):
        message = f"{name}={shown(value)}: give True or False"
        raise ConfigurationError(message)


class Options(TypedDict, total=False):
    """The options as users give them; `Policy` says what they mean."""

    ttl: Duration | None
    l2_ttl: Duration | None
    jitter: float
    load_timeout: Duration | None
    wait_timeout: Duration | None
    on_abandon: OnAbandon
    isolate: bool
    inherit_context: bool
    lease: bool
    version: Callable[[Any], int] | None
    max_loads: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How one operation is cached, shared and bounded.

    Attributes:
        ttl: Life in L1, in seconds; `None` keeps nothing in L1.
        l2_ttl: Life in L2, in seconds; `None` keeps the operation out of L2.
        jitter: Share by which a life is lengthened or shortened at random, so that
            entries filled together do not expire together.
        load_timeout: Budget of one run of the loader, in seconds; `None` sets none.
        wait_timeout: How long one caller waits for a flight, in seconds; `None` sets no limit.
        on_abandon: What a load does when everybody who waited has left.
        isolate: Keep encoded bytes, and decode a copy of its own for every caller.
        inherit_context: Run the loader in a copy of the launching caller's context.
        lease: Wait for another process's load, where the store can tell of it; without it, load too.
        version: Takes a value, returns its version, a whole number that only rises; older ones are not stored.
        max_loads: How many loads of the operation may run at once in one event loop; `None` sets no limit.
    """

    ttl: float | None = None
    l2_ttl: float | None = None
    jitter: float = 0.1
    load_timeout: float | None = 30.0
    wait_timeout: float | None = None
    on_abandon: OnAbandon = "finish"
    isolate: bool = False
    inherit_context: bool = False
    lease: bool = True
    version: Callable[[Any], int] | None = None
    max_loads: int | None = None

    def __post_init__(self) -> None:
        """Validate; a `timedelta` becomes seconds."""
        for name in ("ttl", "l2_ttl", "load_timeout", "wait_timeout"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, seconds(name, value))
        fraction("jitter", self.jitter, below=1)
        choice("on_abandon", self.on_abandon, ("finish", "cancel"))
        flag("isolate", self.isolate)
        flag("inherit_context", self.inherit_context)
        flag("lease", self.lease)
        if self.max_loads is not None:
            count("max_loads", self.max_loads)
        if self.version is not None and not callable(self.version):
            message = f"version={self.version!r}: give a function that takes a value and returns its version"
            raise ConfigurationError(message)

    @classmethod
    def of(cls, options: Options) -> "Policy":
        """Return the policy that *options* ask for.

        Raises:
            ConfigurationError: one breaks its rule, or there is no such option.
        """
        known = Options.__annotations__
        for name in options:
            if name not in known:
                message = f"there is no option {name!r}; there are {', '.join(known)}"
                raise ConfigurationError(message)
        given: dict[str, Any] = {**options}
        return cls(**given)
