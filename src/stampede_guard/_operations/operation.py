"""One operation: a policy, a codec and counters under a name."""

import copy
import logging
import re
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar, copy_context
from math import log
from random import random
from typing import Any, Literal, cast

import msgspec

from .._codecs.codec import Codec, codec_for
from .._codecs.fidelity import Comparison
from .._codecs.fingerprint import describe_codec, fingerprint_of, with_tags
from .._memory.entity_tags import EntityTags
from .._memory.epochs import Lineage
from .._stats import Counters
from ..errors import CannotEncode, ConfigurationError
from .options import LONGEST_LIFE, Duration, seconds, version_number
from .policy import Policy

NO_ANNOTATION: Any = object()

# Seconds of the shortest and the longest lease. For so long others wait for a process that died.
_LEASES = (2.0, 10.0)
_LEASE_FACTOR = 3.0  # length of a lease, in load times
_NEW_LOAD_WEIGHT = 0.2  # in the smoothed load time
_SAMPLING = 64  # values of a type that survived a round trip, for each one that is tried again
_MAX_TYPES = 64  # whose round trip an operation remembers
# Texts of errors that name only types and places. Others quote a part of the value, or are a user's.
_TELLS_TYPES = re.compile(
    r"Expected `[\w|, ]+`( of length [<>=]+ \d+| with (a|no) timezone component)?(, got `\w+`)?( - at [\w`$.\[\] ]+)?"
    r"|Object missing required field `\w+`( - at [\w`$.\[\] ]+)?"
    r"|Encoding objects of type [\w.]+ is unsupported"
    r"|can't serialize ints < -2\*\*63 or > 2\*\*64 - 1"
    r"|expected (bytes|str), got \w+"
)

logger = logging.getLogger("stampede_guard")


def _describe_error(error: Exception) -> str:
    """Return the type of *error*, and its text if that quotes nothing of the value."""
    kind = type(error)
    # An error with a cause has the text of a user's `__post_init__`.
    if kind not in (msgspec.ValidationError, TypeError, OverflowError) or error.__cause__ is not None:
        return kind.__name__
    text = str(error)
    return f"{kind.__name__}: {text}" if _TELLS_TYPES.fullmatch(text) else kind.__name__


class IsolatedValue:
    """A value of which each caller gets a copy, and how to copy it: two operations of one op may differ in that."""

    __slots__ = ("_make_copy", "cached")

    def __init__(self, cached: Any, make_copy: Callable[[Any], Any]) -> None:
        self.cached = cached
        self._make_copy = make_copy

    def copy(self) -> Any:
        """Return a new copy of the value."""
        return self._make_copy(self.cached)


def for_caller(cached: Any) -> Any:
    """Return the *cached* value, or a copy of it if it is isolated."""
    return cached.copy() if cached.__class__ is IsolatedValue else cached


class Operation:
    """What the data path needs to know of a decorated function.

    Args:
        name: Its name in errors and statistics.
        policy: Its options.
        counters: The counters of its calls.
        codec: The user's codec; without one, the annotation decides.
        annotation: Returns the loader's return annotation; raises `NameError` while a name in it is not defined yet.
        vary: Context variables that are part of the key, and the only ones that the loader sees.
        tags: Templates of the tags that invalidate its values.

    Attributes:
        entity_tags: The tags of its values in L1, for HTTP.
        is_local: Whether its ops are valid in this process only.
        failing: Ops whose last load failed because of unavailability, as far as they are known.
        is_batched: Whether its flights load in batches; then the batches are counted and limited.
        lease_length: Seconds until its leases expire unless they are renewed; most loads are shorter.
        lineage: The generations of its function.
        may_answer_old: As of its policy.
        max_l2_ttl: Seconds that a value of it is in L2 at most.
    """

    __slots__ = (
        "__weakref__",
        "_annotation",
        "_codec",
        "_encoded",
        "_fingerprint",
        "_load_time",
        "_loads_noted",
        "_survives",
        "counters",
        "entity_tags",
        "failing",
        "is_batched",
        "is_local",
        "lease_length",
        "lineage",
        "max_l2_ttl",
        "may_answer_old",
        "name",
        "policy",
        "tags",
        "vary",
    )

    def __init__(
        self,
        name: str,
        policy: Policy,
        counters: Counters,
        *,
        codec: Codec | None = None,
        annotation: Callable[[], Any] = lambda: NO_ANNOTATION,
        vary: Sequence[ContextVar[Any]] = (),
        tags: Sequence[str] = (),
    ) -> None:
        if codec is not None and (isinstance(codec, type) or not isinstance(codec, Codec)):
            message = f"{name}: codec={codec!r}; give an object with encode(value) and decode(payload)"
            raise ConfigurationError(message)
        self.name = name
        self.policy = policy
        self.may_answer_old = policy.may_answer_old
        self.counters = counters
        self.vary = tuple(vary)
        self.tags = tuple(tags)
        self.lineage = Lineage(counters)
        self.entity_tags = EntityTags()
        self.is_local = False
        self.is_batched = False
        self.failing: set[str] = set()
        self._codec = codec
        self._annotation = annotation
        self._fingerprint = b""  # computed at first use
        self._survives: dict[type, bool] = {}  # a round trip through the codec
        self._encoded = 0
        self._load_time = 0.0
        self._loads_noted = 0
        self.lease_length = _LEASES[0]
        longest = LONGEST_LIFE if callable(policy.l2_ttl) else policy.l2_ttl or 0.0
        self.max_l2_ttl = longest * (1 + policy.jitter) + policy.window

    @property
    def needs_codec(self) -> bool:
        """Whether its values are encoded at all."""
        return self.policy.l2_ttl is not None or self.policy.isolate

    @property
    def codec(self) -> Codec:
        """The user's codec, or the one that the return annotation asks for.

        Raises:
            ConfigurationError: there is no annotation, it is not defined, or not precise enough.
        """
        if self._codec is None:
            self._codec = self._find_codec()
        return self._codec

    def _find_codec(self) -> Codec:
        try:
            annotation = self._annotation()
            if annotation is not NO_ANNOTATION:
                return codec_for(annotation)
        except NameError as error:
            message = f"{self.name}: its return annotation is not defined ({error}); or pass codec="
            raise ConfigurationError(message) from error
        except ConfigurationError as error:
            message = f"{self.name}: its return annotation {error}"
            raise ConfigurationError(message) from error.__cause__
        message = f"{self.name}: its values are stored as bytes; annotate the return type, or pass codec="
        raise ConfigurationError(message)

    def check_codec(self, *, is_final: bool) -> None:
        """Find the codec now, so that a mistake shows before the first call.

        Raises:
            ConfigurationError: as `codec`; for a name that is not defined yet, only if the check *is_final*.
        """
        if not self.needs_codec:
            return
        try:
            _ = self.codec
        except ConfigurationError as error:
            if is_final or not isinstance(error.__cause__, NameError):
                raise

    def fingerprint(self, tags: Sequence[str]) -> bytes:
        """Return the fingerprint of codec, schema and *tags*, which tells values from those of other releases.

        A value carries a mark for each of its tags. So a release that adds a tag cannot use values stored without it.
        """
        if not self._fingerprint:
            self._fingerprint = fingerprint_of(describe_codec(self.codec, self._annotation))
        return with_tags(self._fingerprint, tags) if tags else self._fingerprint

    def encode(self, value: object) -> bytes | None:
        """Return *value* as bytes; `None` if it does not survive a round trip through the codec.

        The round trip is tried for each type of values, and then for a sample. It is always tried if callers get the
        decoded copy, or if the annotation allows anything.
        """
        codec, kind = self.codec, type(value)
        self._encoded += 1
        try:
            payload = codec.encode(value)
            why = self._difference(value, payload) if self._needs_round_trip(kind) else None
        except Exception as error:  # noqa: BLE001  # callers get the value all the same
            payload, why = b"", f"its codec cannot store it and read it back ({_describe_error(error)})"
        if why is None:
            return payload
        self._refuse(kind, why)
        return None

    def bytes_of(self, kept: Any) -> bytes | None:
        """Return the bytes of a value that L1 has *kept*; `None` if it cannot be encoded."""
        if kept.__class__ is IsolatedValue and isinstance(payload := kept.cached, bytes):
            return payload
        return self.encode(for_caller(kept))

    def _needs_round_trip(self, kind: type) -> bool:
        if self.policy.isolate or getattr(self.codec, "allows_any", False):
            return True
        return not self._survives.get(kind) or self._encoded % _SAMPLING == 0

    def _difference(self, value: object, payload: bytes) -> str | None:
        """Return in what the decoded copy of *value* differs, if it does."""
        copied = self.codec.decode(payload)
        comparison = Comparison(value, copied)
        if comparison.difference is None and not comparison.is_certain and self.codec.encode(copied) != payload:
            return "a copy of it is encoded as something else"
        if comparison.difference is None:
            self._note(type(value), self._survives.get(type(value), True))
        return comparison.difference

    def _note(self, kind: type, survives: bool) -> None:  # noqa: FBT001
        if len(self._survives) >= _MAX_TYPES:
            self._survives.clear()
        self._survives[kind] = survives

    def _refuse(self, kind: type, why: str) -> None:
        """Count a value that cannot be stored, and log it once for each type."""
        if self.policy.l2_ttl is not None:
            self.counters.l2_unstorable += 1
        if self._survives.get(kind, True):
            logger.warning(
                "%s: the loader returned a %s.%s, which is not stored: %s; callers get it all the same. "
                "Annotate a type that brings it back unchanged, or pass codec=",
                self.name,
                kind.__module__,
                kind.__qualname__,
                why,
            )
        self._note(kind, survives=False)

    def decode(self, payload: bytes) -> tuple[Any] | None:
        """Return the value in a tuple of one, since it may be `None`; or `None` if *payload* cannot be decoded."""
        try:
            return (self.codec.decode(payload),)
        except Exception:  # noqa: BLE001  # any error of a codec is a miss
            self.counters.l2_undecodable += 1
            return None

    def version_of(self, value: object) -> int | None:
        """Return the version of *value*, if the operation has `version=`.

        Raises:
            ConfigurationError: `version=` returned something else than a version.
        """
        if self.policy.version is None:
            return None
        try:
            return version_number(self.policy.version(value))
        except ConfigurationError as error:
            message = f"{self.name}: its version= function returned {error}"
            raise ConfigurationError(message) from None

    def life(self, name: Literal["ttl", "l2_ttl"], value: object) -> float | None:
        """Return for how many seconds *value* is fresh in the tier of the option *name*; `None` to keep nothing there.

        What was kept together must not expire together, so *jitter* lengthens or shortens the life at random.

        Raises:
            ConfigurationError: the option is a function, and returned something else.
        """
        policy = self.policy
        life: Any = policy.ttl if name == "ttl" else policy.l2_ttl
        if life.__class__ is not float and life is not None:
            life = self._checked_life(name, cast("Duration | None", life(value)))
        return None if life is None else life * (1 + policy.jitter * (2 * random() - 1))  # noqa: S311  # no secret

    def _checked_life(self, name: str, life: Duration | None) -> float | None:
        if life is None:
            return None
        try:
            life = seconds(name, life)
        except ConfigurationError as error:
            message = f"{self.name}: its {name}= function returned {error}"
            raise ConfigurationError(message) from None
        if life > LONGEST_LIFE:
            message = (
                f"{self.name}: its {name}= function returned {life:g}; give at most {LONGEST_LIFE:,.0f} s, 30 days"
            )
            raise ConfigurationError(message)
        return life

    def early_margin(self) -> float:
        """Return how many seconds before the end of its life a value is to be refreshed, drawn anew for each value.

        Optimal Probabilistic Cache Stampede Prevention (Vattani, Chierichetti, Lowenstein, PVLDB 8(8), 2015): the
        margin is exponential with the mean β · load time. There each request draws one. Here each process draws one
        for each value, and adds β · load time, so that the refresh ends before the life does.
        """
        beta = self.policy.early
        if beta is None or not self._loads_noted:
            return 0.0
        mean = self._load_time / (1 - (1 - _NEW_LOAD_WEIGHT) ** self._loads_noted)  # it began at zero
        return beta * mean * (1 - log(1 - random()))  # noqa: S311  # no secret

    def note_load(self, duration: float) -> None:
        """Adapt `lease_length` to a load that took *duration* seconds."""
        self._load_time += (duration - self._load_time) * _NEW_LOAD_WEIGHT
        self._loads_noted += 1
        shortest, longest = _LEASES
        self.lease_length = min(max(_LEASE_FACTOR * self._load_time, shortest), longest)

    def isolate(self, payload: bytes) -> IsolatedValue:
        """Return what to cache, so that each caller gets a copy decoded from *payload*."""
        return IsolatedValue(payload, self.codec.decode)

    def isolate_value(self, value: object, payload: bytes | None) -> IsolatedValue:
        """Return the same for a loader's *value*; without a *payload*, callers get deep copies.

        Raises:
            CannotEncode: `copy.deepcopy` cannot copy it.
        """
        if payload is not None:
            return self.isolate(payload)
        try:
            return IsolatedValue(copy.deepcopy(value), copy.deepcopy)
        except Exception as error:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            message = (
                f"{self.name}: isolate=True promises every caller a copy, and the loader returned a {kind}, which "
                f"neither its codec nor copy.deepcopy can copy ({type(error).__name__}); "
                "leave isolate out, or pass codec="
            )
            raise CannotEncode(message) from error

    def for_caller(self, cached: Any) -> Any:
        """Return what a caller of this operation gets of a *cached* value, which another operation may have cached.

        Raises:
            CannotEncode: this operation isolates its values, the other does not, and the value cannot be copied.
        """
        if cached.__class__ is IsolatedValue or not self.policy.isolate:
            return for_caller(cached)
        return self.isolate_value(cached, self.encode(cached)).copy()

    def context(self) -> Context | None:
        """Return the context for a load that the running code launches; `None` for an empty one.

        A shared load belongs to no caller, so it sees no context variables of callers except those in `vary`.
        """
        if self.policy.inherit_context:
            return copy_context()
        if not self.vary:
            return None
        context = Context()
        for variable in self.vary:
            context.run(variable.set, variable.get())
        return context

    def __repr__(self) -> str:
        return f"<Operation {self.name}>"
