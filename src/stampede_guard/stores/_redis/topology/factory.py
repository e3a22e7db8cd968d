"""Makes the topology that a URL or a client describes."""

from collections.abc import Callable
from typing import Any

from ..node import Address, ConnectionLimits, Node
from ..urls import Servers
from .base import MakeNode, Single, Topology
from .cluster import Cluster
from .replicated import Replicated
from .sentinel import Sentinel, log_in_to_sentinel


def make_topology(servers: Servers, limits: ConnectionLimits, clock: Callable[[], float], **tls: Any) -> Topology:
    """Return one event loop's view of *servers*; nothing is connected.

    Args:
        servers: As a URL or a client describes them.
        limits: Deadlines, and the number of connections.
        clock: Monotonic seconds.
        tls: redis-py's options for TLS in addition, such as `ssl_ca_certs`.
    """
    if not servers.is_tls:
        tls = {}
    make = _node_maker(servers.connection_class, {**servers.options, **tls}, limits)
    if not servers.addresses:
        return Single(Node("Redis", servers.connection_class, servers.options, limits))
    if servers.kind == "single":
        return Single(make("Redis", servers.addresses[0]))
    if servers.kind == "cluster":
        return Cluster(make, servers.addresses, clock, translate=servers.translate, is_literal=not servers.is_tls)
    if servers.kind == "sentinel":
        connection_class, options = servers.sentinel_way or (servers.connection_class, servers.options)
        options = {**options, **tls, "db": 0, "redis_connect_func": log_in_to_sentinel}
        make_sentinel = _node_maker(connection_class, options, limits)
        sentinels = [make_sentinel(f"Redis sentinel {at}", address) for at, address in enumerate(servers.addresses, 1)]
        return Sentinel(make, sentinels, servers.service, clock)
    primary, *replicas = servers.addresses
    following = [make(f"Redis replica {number}", address) for number, address in enumerate(replicas, 1)]
    return Replicated(make("Redis primary", primary), following, clock)


def _node_maker(connection_class: type[Any], shared: dict[str, Any], limits: ConnectionLimits) -> MakeNode:
    def make_node(name: str, address: Address, greet: Callable[[Any], Any] | None = None) -> Node:
        host, port = address
        options = {**shared, "host": host, "port": port}
        if greet is not None:
            options["redis_connect_func"] = _then(greet, shared.get("redis_connect_func"))
        return Node(name, connection_class, options, limits)

    return make_node


def _then(greet: Callable[[Any], Any], log_in: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """Return a function that logs a new connection in and then calls *greet* with it."""

    async def introduce(connection: Any) -> None:
        if log_in is None:
            await connection.on_connect()
        else:
            answer = log_in(connection)
            if answer is not None:
                await answer
        await greet(connection)

    return introduce
