"""Reads the servers from a user's redis-py client.

The store opens its own connections to the client's servers, of the client's class and with its options. It does not
use the client's pool: the retries and maintenance notifications there cannot be switched off without a change for
the client's own calls, and the pool may belong to another event loop.
"""

import logging
import ssl
import sys
from collections.abc import Iterator
from typing import Any, Final

import redis
import redis.asyncio
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.sentinel import SentinelConnectionPool

from ...errors import ConfigurationError
from .urls import Servers, parse_url

logger = logging.getLogger("stampede_guard")

# Options that `connection_settings` sets, that change the type of the replies, or that link a connection to its client.
_NOT_TAKEN: Final = frozenset(
    {
        "connection_class",
        "connection_pool",
        "decode_responses",
        "encoder_class",
        "encoding",
        "encoding_errors",
        "event_dispatcher",
        "health_check_interval",
        "himport_registry",
        "host",
        "legacy_responses",
        "maint_notifications_config",
        "maint_notifications_pool_handler",
        "maintenance_notification_hash",
        "maintenance_state",
        "max_connections",
        "orig_host_address",
        "orig_socket_connect_timeout",
        "orig_socket_timeout",
        "oss_cluster_maint_notifications_handler",
        "parser_class",
        "port",
        "protocol",
        "response_callbacks",
        "retry",
        "retry_on_error",
        "retry_on_timeout",
        "socket_connect_timeout",
        "socket_timeout",
    }
)
_UNSET: Final = {"socket_timeout": 5, "protocol": 3}  # redis-py's defaults since 8.0
_REMEDY: Final = "the guard's own connections to the same servers have it off"


def describe(store: object) -> Servers:
    """Return the servers of a URL or of an asyncio redis-py client; log harmful settings of the client.

    Raises:
        ConfigurationError: *store* is neither, or malformed.
    """
    if isinstance(store, str):
        return parse_url(store)
    if type(store).__module__.partition(".")[0] in ("pydantic", "pydantic_core"):  # a `RedisDsn`, or a secret one
        secret = getattr(store, "get_secret_value", None)
        return describe(str(store) if secret is None else secret())
    options: dict[str, Any]
    if isinstance(store, redis.asyncio.RedisCluster):
        servers, options = _describe_cluster(store), store.connection_kwargs
        retry: Any = store.retry
        config = store.maint_notifications_config
        is_told = bool(config and config.enabled)
    elif isinstance(store, redis.asyncio.Redis):
        pool: Any = store.connection_pool
        servers, options = _describe_pool(pool), pool.connection_kwargs
        retry = options.get("retry")
        is_told = bool(pool.maint_notifications_enabled())
    else:
        raise ConfigurationError(_refusal(store))
    for setting, harm, remedy in _faults(servers, options, retry, is_told=is_told):
        logger.warning("the Redis client has %s: %s; %s", setting, harm, remedy)
    return servers


def _refusal(store: object) -> str:
    if isinstance(store, redis.Redis | redis.RedisCluster):
        return "the store is a synchronous Redis client, which would block the event loop; give one of redis.asyncio"
    return (
        f"the store is a {type(store).__name__}; give a URL, a redis.asyncio client, or a function that makes a store"
    )


def _describe_pool(pool: Any) -> Servers:
    options = pool.connection_kwargs
    taken = _taken(options)
    if isinstance(pool, SentinelConnectionPool):
        sentinels = [sentinel.connection_pool for sentinel in pool.sentinel_manager.sentinels]
        addresses = tuple(_address(each.connection_kwargs) for each in sentinels)
        connection_class = SSLConnection if issubclass(pool.connection_class, SSLConnection) else Connection
        way = sentinels[0].connection_class, _taken(sentinels[0].connection_kwargs)
        return Servers("sentinel", addresses, connection_class, taken, pool.service_name, sentinel_way=way)
    addresses = () if "path" in options else (_address(options),)
    return Servers("single", addresses, pool.connection_class, taken)


def _describe_cluster(client: Any) -> Servers:
    options = client.connection_kwargs
    taken = _taken(options)
    taken.pop("redis_connect_func", None)  # sends READONLY to primaries too
    addresses = tuple((node.host, int(node.port)) for node in client.startup_nodes)
    translate = client.nodes_manager.address_remap
    return Servers("cluster", addresses, options.get("connection_class", Connection), taken, translate=translate)


def _taken(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _NOT_TAKEN}


def _address(options: dict[str, Any]) -> tuple[str, int]:
    return options.get("host", "localhost"), int(options.get("port", 6379))


def _faults(servers: Servers, options: dict[str, Any], retry: Any, *, is_told: bool) -> Iterator[tuple[str, str, str]]:
    """Yield each harmful setting, its harm, and the remedy."""
    if is_told:
        yield "maintenance notifications on", "the next caller gets a pooled connection's unread reply", _REMEDY
    if retry is not None and retry.get_retries() != 0:
        yield "retries on", "they execute commands twice and multiply every deadline", _REMEDY
    if sys.version_info < (3, 12) and options.get("socket_timeout", _UNSET["socket_timeout"]) is not None:
        yield "a socket_timeout", "under Python 3.11 redis-py loses cancellations with it", _REMEDY
    if options.get("decode_responses"):
        yield "decode_responses on", "stored values are no text", _REMEDY
    if str(options.get("protocol") or _UNSET["protocol"]) == "3":
        yield "protocol 3", "it switches maintenance notifications on", "the guard's own connections use 2"
    if servers.is_tls and not _is_checked(options):
        remedy = "the guard's own connections do not check them either; configure certificates"
        yield "the check of certificates or host names off", "another machine can pose as the server", remedy


def _is_checked(options: dict[str, Any]) -> bool:
    return options.get("ssl_cert_reqs", "required") in {"required", ssl.CERT_REQUIRED} and options.get(
        "ssl_check_hostname", True
    )
