"""One operation's options, validated once, at decoration."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from ..errors import ConfigurationError
from .limits import LoadLimits
from .options import (
    Duration,
    MaxLoads,
    OnAbandon,
    Options,
    choice,
    count,
    error_types,
    factor,
    flag,
    fraction,
    life,
    seconds,
    shown,
)

_UNAVAILABLE: tuple[type[Exception], ...] = (OSError, TimeoutError)
_LONGEST_PAUSE = 30.0  # seconds between loads that fail, for operations that may answer with old values


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How one operation is cached, shared and bounded.

    Attributes:
        ttl: Seconds that a value is fresh in L1, or a function of the value that returns them, or `None` to store
            nothing; `None` stores nothing in L1.
        l2_ttl: The same for L2.
        jitter: Fraction by which both are lengthened or shortened at random, so that entries that were filled together
            do not expire together.
        stale: Seconds after its life in which an old value is the answer, while one flight per cluster refreshes it.
        stale_wait: Seconds that callers wait for that flight before they take the old value.
        stale_if_error: Seconds after its life in which an old value is the answer if the load fails.
        stale_on: The errors that count as unavailability of what the loader reads.
        early: How early, in load times, a value is refreshed before its life is over: β of XFetch.
        error_backoff: Longest pause, in seconds, between loads of one op that fail because of unavailability.
        load_timeout: Seconds that a flight may wait for another process's load and load itself; `None` sets no limit.
        handover_after: Seconds after which a second run of the loader begins beside the first.
        wait_timeout: Seconds that one caller waits for a flight; `None` sets no limit.
        on_abandon: What a load does when all waiters have left: `"finish"` or `"cancel"`.
        isolate: Cache encoded bytes, and decode a copy for each caller.
        inherit_context: Run the loader in a copy of the launching caller's context.
        lease: Wait for another process's load, if the store has leases; otherwise load too.
        version: Takes a value, returns its version, a whole number that only rises; older values are not stored.
        max_loads: How many loads of the operation may run at once in one event loop; `None` sets no limit.
        max_queued: How many may wait for one of these slots; `None` sets no limit.
        queue_timeout: Seconds that a load waits for its slots; `None` leaves that to the guard.
        max_waiters: How many callers may wait for one flight; `None` sets no limit.
        max_share: Fraction of L1 that its entries may take, above zero; `None` sets no limit.
    """

    ttl: float | Callable[[Any], Duration | None] | None = None
    l2_ttl: float | Callable[[Any], Duration | None] | None = None
    jitter: float = 0.1
    stale: float | None = None
    stale_wait: float = 0.0
    stale_if_error: float | None = None
    stale_on: tuple[type[Exception], ...] = _UNAVAILABLE
    early: float | None = None
    error_backoff: float | None = None
    load_timeout: float | None = 30.0
    handover_after: float | None = None
    wait_timeout: float | None = None
    on_abandon: OnAbandon = "finish"
    isolate: bool = False
    inherit_context: bool = False
    lease: bool = True
    version: Callable[[Any], int] | None = None
    max_loads: MaxLoads | None = None
    max_queued: int | None = None
    queue_timeout: float | None = None
    max_waiters: int | None = None
    max_share: float | None = None

    def __post_init__(self) -> None:
        """Check the options, and turn each `timedelta` into seconds."""
        for name in ("ttl", "l2_ttl"):
            self._set(name, life)
        for name in ("stale", "stale_if_error", "error_backoff", "load_timeout", "handover_after", "wait_timeout"):
            self._set(name, seconds)
        self._set("early", factor)
        object.__setattr__(self, "stale_wait", seconds("stale_wait", self.stale_wait, zero=True))
        object.__setattr__(self, "stale_on", error_types("stale_on", self.stale_on))
        fraction("jitter", self.jitter, below=1)
        choice("on_abandon", self.on_abandon, ("finish", "cancel"))
        flag("isolate", self.isolate)
        flag("inherit_context", self.inherit_context)
        flag("lease", self.lease)
        object.__setattr__(self, "queue_timeout", self.limits.queue_timeout)
        self._set("max_waiters", count)
        if self.max_share is not None and not fraction("max_share", self.max_share):
            message = "max_share=0: give a fraction above zero; to keep nothing in memory, leave ttl out"
            raise ConfigurationError(message)
        if self.version is not None and not callable(self.version):
            message = f"version={self.version!r}: give a function that takes a value and returns its version"
            raise ConfigurationError(message)

    def _set(self, name: str, check: Callable[[str, Any], object]) -> None:
        value = getattr(self, name)
        if value is not None:
            object.__setattr__(self, name, check(name, value))

    @property
    def window(self) -> float:
        """Seconds after its life for which an old value is kept."""
        return max(self.stale or 0.0, self.stale_if_error or 0.0)

    @property
    def longest_pause(self) -> float | None:
        """Seconds of the longest pause between loads that fail; `None` without pauses."""
        return _LONGEST_PAUSE if self.error_backoff is None and self.window else self.error_backoff

    @property
    def may_answer_old(self) -> bool:
        """Whether a call may end without a fresh value and without an error of its own load."""
        return bool(self.window) or self.early is not None or self.error_backoff is not None

    def check_together(self) -> None:
        """Check that no option contradicts another.

        Raises:
            ConfigurationError: two do; the message names both.
        """
        for name in ("stale", "stale_if_error", "early"):
            if getattr(self, name) is not None and self.ttl is None and self.l2_ttl is None:
                message = f"{name}={getattr(self, name):g}: without ttl= or l2_ttl= no value is kept that could be old"
                raise ConfigurationError(message)
        if self.early is not None and self.stale is not None:
            message = f"early={self.early:g} refreshes before a life is over, stale={self.stale:g} after it: give one"
            raise ConfigurationError(message)
        if self.stale_wait and self.stale is None:
            message = f"stale_wait={self.stale_wait:g} is a wait for what follows a stale value: it needs stale="
            raise ConfigurationError(message)
        if self.wait_timeout is not None and self.stale_wait >= self.wait_timeout:
            message = (
                f"stale_wait={self.stale_wait:g} is no less than wait_timeout={self.wait_timeout:g}: "
                "callers would give up before they take the old value"
            )
            raise ConfigurationError(message)
        if self.handover_after is not None and self.handover_after >= (self.load_timeout or inf):
            message = (
                f"handover_after={self.handover_after:g} is no less than load_timeout={self.load_timeout:g}: "
                "the load would be over before a second one begins"
            )
            raise ConfigurationError(message)
        if self.stale_on != _UNAVAILABLE and self.longest_pause is None:
            message = f"stale_on={shown(self.stale_on)} needs stale_if_error=, stale= or error_backoff="
            raise ConfigurationError(message)
        self.limits.check_together()

    @property
    def limits(self) -> LoadLimits:
        """The limits on its loads."""
        return LoadLimits(self.max_loads, self.max_queued, self.queue_timeout)

    @classmethod
    def from_options(cls, options: Options, defaults: Options | None = None) -> "Policy":
        """Return the policy that *options* ask for, with *defaults* where they say nothing.

        Raises:
            ConfigurationError: one breaks its rule, there is no such option, or two contradict each other.
        """
        policy = cls._unchecked({**(defaults or {}), **options})
        policy.check_together()
        return policy

    @classmethod
    def checked_defaults(cls, defaults: Options) -> Options:
        """Return *defaults*, each of which is checked; with what they go together is known at each decoration.

        Raises:
            ConfigurationError: one breaks its rule, or there is no such option.
        """
        cls._unchecked(defaults)
        return defaults.copy()

    @classmethod
    def _unchecked(cls, options: Options) -> "Policy":
        known = Options.__annotations__
        for name in options:
            if name not in known:
                message = f"there is no option {name!r}; there are {', '.join(known)}"
                raise ConfigurationError(message)
        given: dict[str, Any] = {**options}
        return cls(**given)
