"""Concurrent identical calls cost one call."""

from ._codecs.codec import Codec
from ._decorators.coalesce import Coalesced, coalesce
from ._decorators.many import CoalescedMany, CoalescedManyMethod, coalesce_many
from ._flights.scoreboard import Scoreboard
from ._freshness import previous
from ._guard import Guard
from ._memory.answer import Answer, Previous
from ._memory.entry import Entry
from ._operations.options import AdaptiveLimit
from ._readiness.health import Health, Reason
from ._readiness.hot import HotKey
from ._readiness.warming import WarmUp
from ._speed.forms import is_compiled
from ._stats import Stats
from .errors import (
    CannotEncode,
    ConfigurationError,
    GuardClosed,
    InvalidationPending,
    InvalidKey,
    LoadCancelled,
    LoadError,
    LoadFailed,
    LoadTimeout,
    NotCoalescable,
    Overloaded,
    RecentFailure,
    RecursiveLoad,
    StampedeGuardError,
    WaitTimeout,
    WrongAnswer,
    WrongLoop,
)

__all__ = (
    "AdaptiveLimit",
    "Answer",
    "CannotEncode",
    "Coalesced",
    "CoalescedMany",
    "CoalescedManyMethod",
    "Codec",
    "ConfigurationError",
    "Entry",
    "Guard",
    "GuardClosed",
    "Health",
    "HotKey",
    "InvalidKey",
    "InvalidationPending",
    "LoadCancelled",
    "LoadError",
    "LoadFailed",
    "LoadTimeout",
    "NotCoalescable",
    "Overloaded",
    "Previous",
    "Reason",
    "RecentFailure",
    "RecursiveLoad",
    "Scoreboard",
    "StampedeGuardError",
    "Stats",
    "WaitTimeout",
    "WarmUp",
    "WrongAnswer",
    "WrongLoop",
    "coalesce",
    "coalesce_many",
    "is_compiled",
    "previous",
)
