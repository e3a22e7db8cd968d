"""The operations of `Guard.fetch`: one for each name and set of options."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._codecs.codec import Codec
from .._keys.partitions import check_partition
from .._keys.spec import shortened
from .._keys.tags import check_tags
from ..errors import ConfigurationError, InvalidKey
from .operation import Operation
from .options import Options
from .policy import Policy

_MOST = 256  # sets of options that are remembered


def checked_op(op: str, load: object) -> str:
    """Return *op*, digested if it is long.

    Raises:
        InvalidKey: *op* is not a string, or empty.
        ConfigurationError: *load* is no function.
    """
    if not isinstance(op, str) or not op:
        message = f"op={op!r}: an op id is a string, and not empty"
        raise InvalidKey(message)
    if not callable(load):
        message = f"{op}: give fetch a function that starts the load, as in `lambda: load(7)`, not {load!r}"
        raise ConfigurationError(message)
    return shortened(op)


def abilities_for(
    operation: Operation, op: str, tags: Sequence[str], partition: str | None
) -> Iterator[tuple[str, str]]:
    """Check a call of `fetch`, and yield what it asks of a store: the words for an error, and the ability.

    Raises:
        ConfigurationError: *partition* is none, or there is no limit for it to share.
        InvalidKey: *tags* are no tags.
    """
    if operation.policy.version is not None:
        yield f"{op}: version=", "versions"
    if partition is not None:
        check_partition(op, partition, operation.policy.max_loads)
    if tags:
        check_tags("fetch", tags)
        yield f"{op}: tags={tags!r}", "tags"


class FetchOperations:
    """The operations that calls of `fetch` have made, remembered by what they were called with.

    Args:
        add: Makes an operation of the guard, of a name, a policy and a codec or an annotation.
        defaults: The guard's options for operations that do not give them.
    """

    def __init__(self, add: Callable[..., Operation], defaults: Options) -> None:
        self._add = add
        self._defaults = defaults
        self._known: dict[tuple[Any, ...], Operation] = {}

    def of(self, name: str, options: Options, returns: Any, codec: Codec | None) -> Operation:
        """Return the operation of calls under *name* with these options, remembered from the last time.

        Raises:
            ConfigurationError: *name* is no name, or an option breaks its rule.
        """
        known_as: tuple[Any, ...] | None
        try:
            known_as = (name, frozenset(options.items()), returns, codec)
            operation = self._known.get(known_as)
        except TypeError:  # a codec, say, that has no hash
            known_as = operation = None
        if operation is None:
            if not isinstance(name, str) or not name:
                message = f"name={name!r}: give a string that is not empty"
                raise ConfigurationError(message)
            policy = Policy.from_options(options, self._defaults)
            operation = self._add(name, policy, codec=codec, annotation=lambda: returns)
            if len(self._known) >= _MOST:
                self._known.clear()
            if known_as is not None:
                self._known[known_as] = operation
        return operation

    def __len__(self) -> int:
        return len(self._known)
