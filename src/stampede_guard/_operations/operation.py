"""One operation: a policy, a codec and counters under a name."""

import copy
import logging
import re
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar, copy_context
from typing import Any

import msgspec

from .._codecs.codec import Codec, codec_for
from .._codecs.fidelity import Comparison
from .._codecs.fingerprint import describe_codec, fingerprint_of, with_tags
from .._memory.epochs import Lineage
from .._stats import Counters
from ..errors import CannotEncode, ConfigurationError
from .options import version_number
from .policy import Policy

NO_ANNOTATION: Any = object()

_LEASES = (2.0, 10.0)  # seconds, shortest and longest: whoever dies with one is waited for that long
_LEASE_LOADS = 3.0  # in load times
_SMOOTHING = 0.2
_SAMPLED = 64  # one value in so many is compared with its decoded copy, once its type has proved faithful
_KINDS = 64  # types that an operation remembers to have proved faithful, or not
# Texts of errors that name types and places alone. Others quote a part of the value, or are a user's.
_TELLS_TYPES = re.compile(
    r"Expected `[\w|, ]+`( of length [<>=]+ \d+| with (a|no) timezone component)?(, got `\w+`)?( - at [\w`$.\[\] ]+)?"
    r"|Object missing required field `\w+`( - at [\w`$.\[\] ]+)?"
    r"|Encoding objects of type [\w.]+ is unsupported"
    r"|can't serialize ints < -2\*\*63 or > 2\*\*64 - 1"
    r"|expected (bytes|str), got \w+"
)

logger = logging.getLogger("stampede_guard")


def _described(error: Exception) -> str:
    """Return the type of *error*, and its text if that quotes nothing of the value."""
    kind = type(error)
    # An error with a cause has the text of a user's `__post_init__`.
    if kind not in (msgspec.ValidationError, TypeError, OverflowError) or error.__cause__ is not None:
        return kind.__name__
    text = str(error)
    return f"{kind.__name__}: {text}" if _TELLS_TYPES.fullmatch(text) else kind.__name__


class Isolated:
    """A value of which every caller gets a copy, with what makes one: operations of one op may have other options."""

    __slots__ = ("_kept", "_reproduce")

    def __init__(self, kept: Any, reproduce: Callable[[Any], Any]) -> None:
        self._kept = kept
        self._reproduce = reproduce

    def copy(self) -> Any:
        """Return the value, as an object that nobody else has."""
        return self._reproduce(self._kept)


def for_caller(kept: Any) -> Any:
    """Return what one caller gets of what is *kept*: the thing itself, or a copy of their own."""
    return kept.copy() if kept.__class__ is Isolated else kept


class Operation:
    """What the data path needs to know of a decorated function.

    Args:
        name: How errors and statistics call it.
        policy: Its options.
        counters: Where its calls are counted.
        codec: Given by the user; otherwise the annotation decides.
        annotation: Returns the loader's return annotation; raises `NameError` while a name in it is not defined yet.
        vary: Context variables that are part of the key, and the only ones that the loader sees.
        tags: Templates of the tags by which its answers are invalidated too.

    Attributes:
        lease_length: Seconds that the right to load lasts unless it is renewed: long enough not to be, most of the
            time.
        lineage: Its function's definitions, if it is one of several.
        max_l2_ttl: Seconds that its values are in L2 at most.
    """

    __slots__ = (
        "__weakref__",
        "_annotation",
        "_codec",
        "_encoded",
        "_fingerprint",
        "_is_faithful",
        "_load_time",
        "counters",
        "is_batched",
        "is_local",
        "lease_length",
        "lineage",
        "max_l2_ttl",
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
        self.counters = counters
        self.vary = tuple(vary)
        self.tags = tuple(tags)
        self.lineage = Lineage()
        self.is_local = False  # its ops mean nothing to other processes
        self.is_batched = False  # its flights load in batches, and those are what is counted and limited
        self._codec = codec
        self._annotation = annotation
        self._fingerprint = b""  # until it is asked for
        self._is_faithful: dict[type, bool] = {}  # whether values of a type come back as what they were
        self._encoded = 0
        self._load_time = 0.0
        self.lease_length = _LEASES[0]
        self.max_l2_ttl = (policy.l2_ttl or 0.0) * (1 + policy.jitter)

    @property
    def needs_codec(self) -> bool:
        """Whether its values are ever turned into bytes."""
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
            ConfigurationError: as `codec`; a name that is not defined yet only when the check *is_final*.
        """
        if not self.needs_codec:
            return
        try:
            _ = self.codec
        except ConfigurationError as error:
            if is_final or not isinstance(error.__cause__, NameError):
                raise

    def fingerprint(self, tags: Sequence[str]) -> bytes:
        """Return what tells an op's value from those of another release: of codec, schema and *tags*.

        Of the tags, since a value carries a mark of each: a release that adds one cannot use what is stored without it.
        """
        if not self._fingerprint:
            self._fingerprint = fingerprint_of(describe_codec(self.codec, self._annotation))
        return with_tags(self._fingerprint, tags) if tags else self._fingerprint

    def encode(self, value: object) -> bytes | None:
        """Return *value* as bytes; `None` if there are none that it could be decoded from, as it is.

        That is tried for each type of values, and then now and then; always if callers get the decoded copy, or the
        annotation allows anything.
        """
        codec, kind = self.codec, type(value)
        self._encoded += 1
        try:
            payload = codec.encode(value)
            why = self._changed(value, payload) if self._has_to_prove(kind) else None
        except Exception as error:  # noqa: BLE001  # any error of a codec leaves the value the loader's answer
            payload, why = b"", f"its codec cannot store it and read it back ({_described(error)})"
        if why is None:
            return payload
        self._refuse(kind, why)
        return None

    def _has_to_prove(self, kind: type) -> bool:
        if self.policy.isolate or getattr(self.codec, "is_loose", False):
            return True
        return not self._is_faithful.get(kind) or self._encoded % _SAMPLED == 0

    def _changed(self, value: object, payload: bytes) -> str | None:
        """Return in what the decoded copy of *value* differs."""
        copied = self.codec.decode(payload)
        comparison = Comparison(value, copied)
        if comparison.difference is None and not comparison.is_certain and self.codec.encode(copied) != payload:
            return "a copy of it is encoded as something else"
        if comparison.difference is None:
            self._note(type(value), self._is_faithful.get(type(value), True))
        return comparison.difference

    def _note(self, kind: type, is_faithful: bool) -> None:  # noqa: FBT001
        if len(self._is_faithful) >= _KINDS:
            self._is_faithful.clear()
        self._is_faithful[kind] = is_faithful

    def _refuse(self, kind: type, why: str) -> None:
        """Count a value that is not stored, and log it once for each type."""
        if self.policy.l2_ttl is not None:
            self.counters.l2_unstorable += 1
        if self._is_faithful.get(kind, True):
            logger.warning(
                "%s: the loader returned a %s.%s, which is not stored: %s; callers get it all the same. "
                "Annotate a type that brings it back unchanged, or pass codec=",
                self.name,
                kind.__module__,
                kind.__qualname__,
                why,
            )
        self._note(kind, is_faithful=False)

    def decode(self, payload: bytes) -> tuple[Any] | None:
        """Return the value in a tuple of one (any value is a value), or `None` if *payload* is not one."""
        try:
            return (self.codec.decode(payload),)
        except Exception:  # noqa: BLE001  # whatever a codec makes of foreign bytes, they are a miss
            self.counters.l2_undecodable += 1
            return None

    def version_of(self, value: object) -> int | None:
        """Return the version of *value*, if the operation's values have versions.

        Raises:
            ConfigurationError: `version=` returned something else.
        """
        if self.policy.version is None:
            return None
        try:
            return version_number(self.policy.version(value))
        except ConfigurationError as error:
            message = f"{self.name}: its version= function returned {error}"
            raise ConfigurationError(message) from None

    def note_load(self, duration: float) -> None:
        """Learn from a load that took *duration* seconds."""
        self._load_time += (duration - self._load_time) * _SMOOTHING
        shortest, longest = _LEASES
        self.lease_length = min(max(_LEASE_LOADS * self._load_time, shortest), longest)

    def isolate(self, payload: bytes) -> Isolated:
        """Return what is kept so that every caller gets a copy of their own."""
        return Isolated(payload, self.codec.decode)

    def isolate_value(self, value: object, payload: bytes | None) -> Isolated:
        """Do so for a loader's *value*; from *payload*, unless its copies would be something else.

        Raises:
            CannotEncode: there is no other way to copy it either.
        """
        if payload is not None:
            return self.isolate(payload)
        try:
            return Isolated(copy.deepcopy(value), copy.deepcopy)
        except Exception as error:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            message = (
                f"{self.name}: isolate=True promises every caller a copy, and the loader returned a {kind}, which "
                f"neither its codec nor copy.deepcopy can copy ({type(error).__name__}); "
                "leave isolate out, or pass codec="
            )
            raise CannotEncode(message) from error

    def for_caller(self, kept: Any) -> Any:
        """Return what a caller of this operation gets of what is *kept*, by this or by another operation of the op.

        Raises:
            CannotEncode: it was kept as it is, callers of this one get copies, and there is no making one.
        """
        if kept.__class__ is Isolated or not self.policy.isolate:
            return for_caller(kept)
        return self.isolate_value(kept, self.encode(kept)).copy()

    def context(self) -> Context:
        """Return the context for a load launched by the running code.

        A shared load belongs to no caller, so it sees none of their context variables but `vary`.
        """
        if self.policy.inherit_context:
            return copy_context()
        context = Context()
        for variable in self.vary:
            context.run(variable.set, variable.get())
        return context

    def __repr__(self) -> str:
        return f"<Operation {self.name}>"
