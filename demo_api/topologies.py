"""Several throwaway Valkeys that belong together: replicas, sentinels, a cluster.

Each server has a guardian of its own, and is killed, frozen and revived like a lone one.
"""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from demo_api.servers import HOST, ValkeyServer, free_port, wait_until

SERVICE: Final = "menus"
SLOTS: Final = 16_384
# A resync starts at once; by default a primary waits for further replicas.
REPLICATION: Final = ("--repl-diskless-sync-delay", "0")
SENTINEL: Final = f"""
sentinel monitor {SERVICE} {HOST} {{port}} 2
sentinel down-after-milliseconds {SERVICE} {{down_after}}
sentinel failover-timeout {SERVICE} 2000
sentinel parallel-syncs {SERVICE} 2
"""


@dataclass(frozen=True)
class Valkeys:
    """Servers that belong together.

    Attributes:
        url: For a `Guard`.
        primaries: The servers that take writes at first.
        replicas: Their replicas, in the same order.
        sentinels: The sentinels that monitor them.
    """

    url: str
    primaries: list[ValkeyServer]
    replicas: list[ValkeyServer]
    sentinels: list[ValkeyServer] = field(default_factory=list)

    @property
    def primary(self) -> ValkeyServer:
        """The only primary, or the first."""
        return self.primaries[0]


@contextmanager
def valkey_replicated(*arguments: str, replicas: int = 2) -> Generator[Valkeys]:
    """Run a primary, and replicas that are connected to it.

    Args:
        arguments: Command-line options of the primary.
        replicas: How many replicas.
    """
    with ExitStack() as running:
        primary = _start(running, *REPLICATION, *arguments)
        following = [_start(running, *_follow(primary)) for _ in range(replicas)]
        for replica in following:
            wait_until(partial(follows, replica), "a replica to be connected")
        yield Valkeys(f"redis://{_hosts([primary, *following])}/0", [primary], following)


@contextmanager
def valkey_sentinels(
    *, replicas: int = 2, sentinels: int = 3, down_after: int = 700, arguments: tuple[str, ...] = ()
) -> Generator[Valkeys]:
    """Run a primary, its replicas, and sentinels that know each other and all of them.

    Args:
        replicas: How many replicas.
        sentinels: How many sentinels; two have to agree.
        down_after: Milliseconds of silence after which a server is taken for dead.
        arguments: Command-line options of the primary and the replicas.
    """
    with valkey_replicated(*arguments, replicas=replicas) as servers, ExitStack() as running:
        config = SENTINEL.format(port=servers.primary.port, down_after=down_after)
        watching = [_start(running, "--sentinel", config=config) for _ in range(sentinels)]

        def is_known(sentinel: ValkeyServer) -> bool:
            words = ask(sentinel, "SENTINEL", "MASTER", SERVICE)
            master = dict(zip(words[::2], words[1::2], strict=True))
            known = master[b"num-slaves"], master[b"num-other-sentinels"], master[b"flags"]
            return bool(known == (b"%d" % replicas, b"%d" % (sentinels - 1), b"master"))

        for sentinel in watching:
            wait_until(partial(is_known, sentinel), "a sentinel to know all servers", deadline=20)
        url = f"redis+sentinel://{_hosts(watching)}/{SERVICE}/0"
        yield Valkeys(url, servers.primaries, servers.replicas, watching)


@contextmanager
def valkey_cluster(*arguments: str, nodes: int = 6) -> Generator[Valkeys]:
    """Run a cluster with all slots assigned, half primaries and half replicas.

    Args:
        arguments: Command-line options of every node.
        nodes: How many nodes.
    """
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-replica-validity-factor", "0")
    with ExitStack() as running:
        # The default, the port plus 10,000, may be beyond the highest port.
        buses = [free_port() for _ in range(nodes)]
        servers = [_start(running, *options, "--cluster-port", str(bus), *REPLICATION, *arguments) for bus in buses]
        primaries, replicas = servers[: nodes // 2], servers[nodes // 2 :]
        for server in servers[1:]:
            ask(server, "CLUSTER", "MEET", HOST, servers[0].port, buses[0])
        for number, primary in enumerate(primaries):
            first, end = (SLOTS * at // len(primaries) for at in (number, number + 1))
            ask(primary, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for server in servers:
            wait_until(partial(_knows, server, nodes), "the nodes to know each other", deadline=20)
        for primary, replica in zip(primaries, replicas, strict=True):
            ask(replica, "CLUSTER", "REPLICATE", ask(primary, "CLUSTER", "MYID").decode())
        for server in servers:
            wait_until(partial(_is_whole, server, len(primaries)), "the cluster to be whole", deadline=20)
        for replica in replicas:
            wait_until(partial(follows, replica), "a replica to be connected")
        yield Valkeys(f"redis+cluster://{_hosts(servers)}", primaries, replicas)


def ask(server: ValkeyServer, *command: Any) -> Any:
    """Return the reply to *command*, on a connection of its own."""
    with Redis(host=HOST, port=server.port, socket_timeout=2, retry=Retry(NoBackoff(), 0), protocol=2) as client:
        # Replies stay as the server sends them.
        client.response_callbacks.clear()
        return client.execute_command(*command)


def answer(server: ValkeyServer, *command: Any) -> Any:
    """Return the reply to *command*, or `None` if there was none, for use in polling."""
    try:
        return ask(server, *command)
    except RedisError:
        return None


def follows(replica: ValkeyServer) -> bool:
    """Return whether the replica itself says that it is connected to its primary."""
    role = answer(replica, "ROLE")
    return bool(role and role[0] == b"slave" and role[3] == b"connected")


def leads(server: ValkeyServer) -> bool:
    """Return whether the server itself says that it is a primary."""
    role = answer(server, "ROLE")
    return bool(role and role[0] == b"master")


def _start(running: ExitStack, *arguments: str, config: str | None = None) -> ValkeyServer:
    server = ValkeyServer(*arguments, config=config)
    running.callback(server.stop)
    server.start()
    return server


def _follow(primary: ValkeyServer) -> tuple[str, ...]:
    return (*REPLICATION, "--replicaof", f"{HOST} {primary.port}")


def _hosts(servers: list[ValkeyServer]) -> str:
    return ",".join(f"{HOST}:{server.port}" for server in servers)


def _knows(server: ValkeyServer, nodes: int) -> bool:
    lines = (answer(server, "CLUSTER", "INFO") or b"").splitlines()
    return b"cluster_known_nodes:%d" % nodes in lines and b"cluster_state:ok" in lines


def _is_whole(server: ValkeyServer, primaries: int) -> bool:
    """Return whether the node sees every primary with its replica."""
    slots = answer(server, "CLUSTER", "SLOTS")
    return bool(slots) and len(slots) == primaries and all(len(shard) == 4 for shard in slots)
