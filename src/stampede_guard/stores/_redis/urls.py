"""Parses Redis URLs.

The forms:

```
redis://[user:password@]host[:6379][,replica[:6379]…][/database]   the first of several takes the writes
redis+sentinel://[user:password@]host[:26379][,host…]/service[/database]
redis+cluster://[user:password@]host[:6379][,host…]
unix://[user:password@]/path
```

`rediss` instead of `redis` means TLS, with certificates and host names checked.
"""

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection

from ...errors import ConfigurationError
from .node import Address

Kind: TypeAlias = Literal["single", "replicated", "sentinel", "cluster"]

_SCHEME: Final = re.compile(r"(redis|rediss)(?:\+(sentinel|cluster))?|unix")
_PORTS: Final[dict[Kind, int]] = {"single": 6379, "replicated": 6379, "sentinel": 26379, "cluster": 6379}
_TLS: Final = {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_min_version": ssl.TLSVersion.TLSv1_2}


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the servers are, and how to connect.

    Attributes:
        kind: Their topology.
        addresses: Of the server; of the primary and its replicas; of the sentinels; of some nodes.
        connection_class: redis-py's.
        options: Of the connections to all of them: login, database, certificates; the path of a socket.
        service: The service's name at the sentinels.
        translate: Turns an address of the cluster's map into one to connect to.
        sentinel_way: The class and the options of connections to the sentinels, if they differ.
    """

    kind: Kind
    addresses: tuple[Address, ...] = field(repr=False)
    connection_class: type[Any]
    options: dict[str, Any] = field(repr=False)
    service: str = field(default="", repr=False)
    translate: Callable[[Address], Address] | None = field(default=None, repr=False)
    sentinel_way: tuple[type[Any], dict[str, Any]] | None = field(default=None, repr=False)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, because the options include passwords."""
        message = "Servers cannot be pickled: their options include passwords"
        raise TypeError(message)

    @property
    def is_tls(self) -> bool:
        """Whether connections are encrypted."""
        return issubclass(self.connection_class, SSLConnection)


def parse_url(url: str) -> Servers:
    """Return the servers of *url*.

    Raises:
        ConfigurationError: the URL is malformed, or has options, with which redis-py would override settings that
            correctness needs, `?ssl_cert_reqs=none` for one. The message quotes nothing, because any part may belong
            to a password that was not escaped.
    """
    if "?" in url or "#" in url:
        message = (
            "the Redis URL carries options, which would override the guard's own; "
            "leave out what follows the ? or #, and write these two in a password as %3F and %23"
        )
        raise ConfigurationError(message)
    parts = _split(url)
    scheme = _SCHEME.fullmatch(parts.scheme)
    if scheme is None:
        message = (
            "the store's URL has another scheme than redis://, rediss:// and unix://, "
            "or redis+sentinel:// and redis+cluster:// with and without a second s; "
            "write it like redis://localhost:6379"
        )
        raise ConfigurationError(message)
    login_words, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login_words.partition(":")
    login = {
        "username": unquote(user) if user else None,
        "password": unquote(password) if password else None,
    }
    if parts.scheme == "unix":
        return _parse_unix(parts, login)
    kind: Kind = scheme[2] or ("replicated" if "," in hosts else "single")  # type: ignore[assignment]
    addresses = tuple(_parse_host(host, _PORTS[kind]) for host in hosts.split(","))
    service, database = _parse_path(kind, parts.path)
    connection_class, tls = (SSLConnection, _TLS) if scheme[1] == "rediss" else (Connection, {})
    return Servers(kind, addresses, connection_class, {**login, "db": database, **tls}, service)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = [urlsplit(f"//{host}").port for host in parts.netloc.rpartition("@")[2].split(",")]
    except ValueError:  # its text may quote the password
        message = (
            "the Redis URL has a port that is not a number from 0 to 65535, or a character out of place; "
            "the form is redis://user:password@host:6379/0, where a / in the password is written %2F"
        )
        raise ConfigurationError(message) from None
    return parts


def _parse_unix(parts: SplitResult, login: dict[str, Any]) -> Servers:
    if not parts.path:
        message = "the Redis URL has no path; the form is unix:///run/redis.sock"
        raise ConfigurationError(message)
    return Servers("single", (), UnixDomainSocketConnection, {**login, "path": unquote(parts.path)})


def _parse_host(host: str, port: int) -> Address:
    """Return the address; the default host is `localhost`, as in redis-py."""
    parts = urlsplit(f"//{host}")
    return parts.hostname or "localhost", parts.port or port


def _parse_path(kind: Kind, path: str) -> tuple[str, int]:
    """Return the name of the service and the number of the database."""
    service, database = "", path.strip("/")
    if kind == "sentinel":
        service, _, database = database.partition("/")
        if not service:
            message = "the Redis URL names no service; the form is redis+sentinel://host:26379,host:26379/service/0"
            raise ConfigurationError(message)
    if not re.fullmatch("[0-9]*", database):
        message = "the Redis URL names a database that is not a number; the form is redis://host:6379/0"
        raise ConfigurationError(message)
    if kind == "cluster" and int(database or 0):
        message = "the Redis URL names a database, but a cluster has only the first; leave out what follows the hosts"
        raise ConfigurationError(message)
    return unquote(service), int(database or 0)
