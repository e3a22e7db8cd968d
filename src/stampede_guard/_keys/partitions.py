"""Partitions: parts of an operation that share its slots for loads.

The text of a partition is built like a tag: `"merchant:{merchant_id}"` with 7 is `"merchant:7"`.
"""

from collections.abc import Callable
from typing import Any

from ..errors import ConfigurationError, InvalidKey
from .names import qualified_name
from .source import compile_like, parameters_of
from .tags import source_of, write_value
from .template import Template

BuildPartition = Callable[..., str]


def check_partition(owner: str, partition: object, max_loads: object) -> None:
    """Check that *partition* is a text, and that there are slots to share.

    Raises:
        ConfigurationError: it is not, or there are none.
    """
    if not isinstance(partition, str) or not partition:
        message = f"{owner}: partition={partition!r}: give a string that is not empty"
        raise ConfigurationError(message)
    if max_loads is None:
        message = f"{owner}: partition={partition!r} shares the slots of max_loads= evenly: give max_loads= too"
        raise ConfigurationError(message)


def compile_partition(function: Callable[..., Any], partition: str | None, max_loads: object) -> BuildPartition | None:
    """Return how to build the partition of a call of *function*, or `None` if it has none.

    Raises:
        ConfigurationError: *partition* is no text, is the same for all calls, or comes without *max_loads*.
        InvalidKey: it is a malformed template, or names no parameter.
    """
    if partition is None:
        return None
    owner = qualified_name(function)
    check_partition(owner, partition, max_loads)
    template = Template.parse_tag(partition)
    for name in sorted(template.names - {parameter.name for parameter in parameters_of(function)}):
        message = f"{owner}: partition={partition!r} uses {name!r}, which is no parameter of it"
        raise InvalidKey(message)
    if not template.names:
        message = f"{owner}: partition={partition!r} is the same for all calls: name a parameter, as in 'tenant:{{id}}'"
        raise ConfigurationError(message)
    body = f"return {source_of(template)}"
    build: BuildPartition = compile_like(function, (body,), {"_sg_write": write_value})
    return build
