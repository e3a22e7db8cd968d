"""The exception tree.

```
StampedeGuardError
├── ConfigurationError (also a ValueError)   an option is wrong; raised where it is given
├── NotCoalescable (also a TypeError)        the decorated thing is not an `async def`
├── InvalidKey (also a TypeError)            a key that is wrong, ambiguous or cannot be built
├── CannotEncode (also a TypeError)          a value that is to be isolated, and cannot be copied
├── GuardClosed                              a guard with a store, used outside `async with`
├── WrongLoop                                something bound to one event loop, used from another
├── InvalidationPending                      the store has not confirmed an invalidation; it is repeated until it does
├── WaitTimeout (also a TimeoutError)        this waiter gave up; the load goes on
└── LoadError                                the flight ended without an answer
    ├── LoadTimeout (also a TimeoutError)    the loader took longer than `load_timeout`
    ├── LoadCancelled                        the loader was cancelled, by itself or at shut-down
    ├── RecentFailure                        a load failed a moment ago, and the next is not due yet
    ├── LoadFailed                           the loader's own error could not be copied for this waiter
    ├── Overloaded                           too many loads wait for a slot, or too many callers for one load
    ├── RecursiveLoad                        the loader waits for itself
    └── WrongAnswer (also a TypeError)       a loader of many ids returned something else than values for these ids
```

A loader's own error is none of these: it reaches every waiter with its own type.
A failing, slow or absent Redis raises no exception, except `InvalidationPending`.
"""

from collections.abc import Sequence
from typing import Any

_MAX_NAMES = 3  # of many pending invalidations, in a message
_MAX_NAME_LENGTH = 200  # characters of each

__all__ = (
    "CannotEncode",
    "ConfigurationError",
    "GuardClosed",
    "InvalidKey",
    "InvalidationPending",
    "LoadCancelled",
    "LoadError",
    "LoadFailed",
    "LoadTimeout",
    "NotCoalescable",
    "Overloaded",
    "RecentFailure",
    "RecursiveLoad",
    "StampedeGuardError",
    "WaitTimeout",
    "WrongAnswer",
    "WrongLoop",
)


class StampedeGuardError(Exception):
    """The base class of all exceptions of this package."""


class ConfigurationError(StampedeGuardError, ValueError):
    """An option has a value that breaks its rule; the message names both."""


class NotCoalescable(StampedeGuardError, TypeError):
    """Only an `async def` function that returns a value can be coalesced."""


class InvalidKey(StampedeGuardError, TypeError):
    """A key is wrong at decoration, or an argument cannot be part of a key."""


class CannotEncode(StampedeGuardError, TypeError):
    """With `isolate=True`, the loader returned a value that cannot be copied."""


class GuardClosed(StampedeGuardError):
    """A guard with a store was used before it was entered, or after it was left."""


class WrongLoop(StampedeGuardError):
    """An object that belongs to one event loop was used from another."""


class InvalidationPending(StampedeGuardError):
    """An invalidation holds in this process, and the store has not confirmed it; it is repeated until it does.

    `refresh` raises it too, when its value could not be stored, and the store has not confirmed that the older value is
    dropped.

    Attributes:
        value: The value that the refresh has loaded; `None` for an invalidation.
        pending: All ops and tags whose invalidation is not confirmed; the message names some of them.
    """

    def __init__(self, message: str = "", *, pending: Sequence[str] = (), value: Any = None) -> None:
        super().__init__(message)
        self.value = value
        self.pending = tuple(pending)


def invalidation_pending(
    pending: Sequence[str], total: int, before: str = "", value: Any = None
) -> InvalidationPending:
    """Return the error for *pending* of *total* ops and tags; its message names a few of them.

    Args:
        pending: The ops and tags that are not confirmed.
        total: How many were invalidated together.
        before: The beginning of the message.
        value: The value that a refresh has loaded.
    """
    named = ", ".join(
        each if len(each) <= _MAX_NAME_LENGTH else f"{each[:_MAX_NAME_LENGTH]}…" for each in pending[:_MAX_NAMES]
    )
    what = named
    if total > 1:
        among = "" if len(pending) <= _MAX_NAMES else "among them "
        what = f"{len(pending):,} of {total:,} invalidations, {among}{named}"
    rest = "not confirmed by the store; holds in this process, and is repeated until it is"
    return InvalidationPending(f"{before}{what}: {rest}", pending=pending, value=value)


class WaitTimeout(StampedeGuardError, TimeoutError):
    """One waiter's `wait_timeout` ran out; the load itself goes on."""


class LoadError(StampedeGuardError):
    """A flight ended without an answer."""


class LoadTimeout(LoadError, TimeoutError):
    """The loader exceeded `load_timeout`; every waiter gets this."""


class LoadCancelled(LoadError):
    """The load was cancelled, though this caller was not."""


class LoadFailed(LoadError):
    """The loader's error could not be copied for a second waiter; the message names its type."""


class Overloaded(LoadError):
    """A load got no slot, or a caller no place among those that wait for one load.

    It is no `TimeoutError`, though `queue_timeout` raises it: the loader has not been called, so nothing is known of
    what it loads from.
    """


class RecentFailure(LoadError):
    """A load of this op failed a moment ago; until the pause is over none begins, in no process.

    The error of that load is its `__cause__`, if the load was this process's.

    Attributes:
        retry_after: Seconds until the next load may begin.
    """

    def __init__(self, message: str = "", *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RecursiveLoad(LoadError):
    """A loader waits, directly or through others, for its own flight."""


class WrongAnswer(LoadError, TypeError):
    """A loader of many ids returned no mapping, or a value for an id that it was not asked for."""
