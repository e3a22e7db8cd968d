"""One operation: a policy, a codec and counters under a name."""

from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar, copy_context
from typing import Any

from ._codec import Codec, codec_for
from ._epochs import Lineage
from ._policy import Policy, version_number
from ._stats import Counters
from .errors import CannotEncode, ConfigurationError

NO_ANNOTATION: Any = object()

_LEASES = (2.0, 10.0)  # seconds, shortest and longest: whoever dies with one is waited for that long
_LEASE_LOADS = 3.0  # in load times
_SMOOTHING = 0.2


class Isolated:
    """An encoded value, with what decodes it: an op may be asked for by operations with different options."""

    __slots__ = ("_codec", "_payload")

    def __init__(self, payload: bytes, codec: Codec) -> None:
        self._payload = payload
        self._codec = codec

    def copy(self) -> Any:
        """Return the value, as an object that nobody else has."""
        return self._codec.decode(self._payload)


def hand_out(kept: Any) -> Any:
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
        longest_life: Seconds that its values are in L2 at most.
    """

    __slots__ = (
        "__weakref__",
        "_annotation",
        "_codec",
        "_load_time",
        "_proven",
        "counters",
        "is_batched",
        "is_local",
        "lease_length",
        "lineage",
        "longest_life",
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
        self._proven: set[type] = set()
        self._load_time = 0.0
        self.lease_length = _LEASES[0]
        self.longest_life = (policy.l2_ttl or 0.0) * (1 + policy.jitter)

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
            try:
                annotation = self._annotation()
            except NameError as error:
                message = f"{self.name}: its return annotation is not defined ({error}); or pass codec="
                raise ConfigurationError(message) from error
            if annotation is NO_ANNOTATION:
                message = f"{self.name}: its values are stored as bytes; annotate the return type, or pass codec="
                raise ConfigurationError(message)
            try:
                self._codec = codec_for(annotation)
            except ConfigurationError as error:
                message = f"{self.name}: its return annotation {error}"
                raise ConfigurationError(message) from error.__cause__
        return self._codec

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

    def encode(self, value: object) -> bytes:
        """Return *value* as bytes; make sure that they can be read back, once for each type of values.

        Raises:
            CannotEncode: the codec cannot, or could not decode the result.
        """
        codec = self.codec
        try:
            payload = codec.encode(value)
            if self.policy.isolate or type(value) not in self._proven:  # isolated, its callers will get it decoded
                codec.decode(payload)
                self._proven.add(type(value))
        except Exception as error:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            message = f"{self.name}: the loader returned a {kind}, which its codec cannot store and read back: {error}"
            raise CannotEncode(message) from error
        return payload

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

    def isolate(self, payload: bytes) -> "Isolated":
        """Return what is kept so that every caller gets a copy of their own."""
        return Isolated(payload, self.codec)

    def hand_out(self, kept: Any) -> Any:
        """Return what a caller of this operation gets of what is *kept*, by this or by another operation of the op.

        Raises:
            CannotEncode: it was kept as it is, callers of this one get copies, and there is no making one.
        """
        if kept.__class__ is Isolated or not self.policy.isolate:
            return hand_out(kept)
        return self.isolate(self.encode(kept)).copy()

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
