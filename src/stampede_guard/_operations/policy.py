"""One operation's options, validated once, at decoration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError
from .options import OnAbandon, Options, choice, count, flag, fraction, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How one operation is cached, shared and bounded.

    Attributes:
        ttl: Seconds that a value is fresh in L1; `None` stores nothing in L1.
        l2_ttl: Seconds that a value is stored in L2; `None` stores nothing in L2.
        jitter: Fraction by which both are lengthened or shortened at random, so that entries that were filled together
            do not expire together.
        load_timeout: Seconds that one run of the loader may take; `None` sets no limit.
        wait_timeout: Seconds that one caller waits for a flight; `None` sets no limit.
        on_abandon: What a load does when all waiters have left: `"finish"` or `"cancel"`.
        isolate: Cache encoded bytes, and decode a copy for each caller.
        inherit_context: Run the loader in a copy of the launching caller's context.
        lease: Wait for another process's load, if the store has leases; otherwise load too.
        version: Takes a value, returns its version, a whole number that only rises; older values are not stored.
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
        """Check the options, and turn each `timedelta` into seconds."""
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
    def from_options(cls, options: Options) -> "Policy":
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
