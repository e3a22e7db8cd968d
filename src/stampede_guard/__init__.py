"""Concurrent identical calls cost one call."""

from ._coalesce import Coalesced, coalesce
from ._codec import Codec
from ._entry import Entry
from ._front import is_compiled
from ._guard import Guard
from ._many import CoalescedMany, CoalescedManyMethod, coalesce_many
from ._scoreboard import Scoreboard
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
    RecursiveLoad,
    StampedeGuardError,
    WaitTimeout,
    WrongAnswer,
    WrongLoop,
)

__all__ = (
    "CannotEncode",
    "Coalesced",
    "CoalescedMany",
    "CoalescedManyMethod",
    "Codec",
    "ConfigurationError",
    "Entry",
    "Guard",
    "GuardClosed",
    "InvalidKey",
    "InvalidationPending",
    "LoadCancelled",
    "LoadError",
    "LoadFailed",
    "LoadTimeout",
    "NotCoalescable",
    "RecursiveLoad",
    "Scoreboard",
    "StampedeGuardError",
    "Stats",
    "WaitTimeout",
    "WrongAnswer",
    "WrongLoop",
    "coalesce",
    "coalesce_many",
    "is_compiled",
)
