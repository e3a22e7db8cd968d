"""The nodes of a cluster: which of them has which slot.

The map of slots comes from any node, and from redirections. A node that was cut off keeps an old map, so of two maps
the newer one counts, by the epoch of the node that it comes from.
"""

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from ipaddress import ip_address
from itertools import chain, count
from random import sample
from typing import Any, NamedTuple

from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

from ... import Refused
from ..node import Address, Node, Redirected
from .base import MakeNode, close_all
from .health import PROBE_PERIOD, Change, Group
from .polling import Poller, Probe, first

logger = logging.getLogger("stampede_guard")

_MAP_PERIOD = 2.0  # seconds between two requests for the map, if nothing asks for it sooner
_NODES_IN_A_ROUND = 3
_MAX_MAP_AGE = 5.0  # seconds without an accepted map, after which an older epoch is accepted too
_EPOCH = re.compile(rb"cluster_current_epoch:(\d+)")
_SAME_HOST = ("", "?")  # hosts that stand for the host that was asked


class _Shard(NamedTuple):
    """A range of slots in the reply to CLUSTER SLOTS."""

    first: int
    last: int
    primary: Address
    replicas: tuple[Address, ...]


class Cluster:
    """The nodes of a cluster.

    Args:
        make_node: Makes a node of the cluster.
        seeds: Addresses of some nodes, which know the others.
        clock: Monotonic seconds.
        translate: Turns an address of the map into one to connect to; `None` if they are the same.
        is_literal: Whether replicas name their primary by its address in the map.
    """

    has_replicas = True

    def __init__(
        self,
        make_node: MakeNode,
        seeds: Sequence[Address],
        clock: Callable[[], float],
        *,
        translate: Callable[[Address], Address] | None = None,
        is_literal: bool = True,
    ) -> None:
        self.generation = 0
        self._make_node = make_node
        self._seeds = {make_node(f"Redis seed {number}", seed): seed for number, seed in enumerate(seeds, 1)}
        self._clock = clock
        self._translate: Callable[[Address], Address] = translate or (lambda address: address)
        self._is_literal = is_literal and translate is None
        self._groups: dict[Address, Group] = {}  # by the addresses of their primaries
        self._slots: list[Address | None] = [None] * SLOTS
        self._shards: list[tuple[_Shard, str]] = []  # the last map, unless a redirection has changed it since
        self._replicas: dict[Address, Node] = {}
        self._numbers: defaultdict[Address, int] = defaultdict(count(1).__next__)  # of the nodes, for their names
        self._epoch = 0
        self._accepted_at = clock()
        self._found = asyncio.Event()
        self._map = Poller(_MAP_PERIOD, self._map_probes)
        self._health = Poller(PROBE_PERIOD, self._health_probes)

    async def open(self) -> None:
        """Ask for the map, and go on polling it.

        Raises:
            ConnectionError: no node had one.
        """
        self._health.start()
        await first(self._found, (partial(self._poll, node, seed) for node, seed in self._seeds.items()))
        self._map.start()
        if not self._groups:
            message = "no node of the cluster has a map of the slots"
            raise ConnectionError(message)

    def primary(self, key: str) -> Node:
        """Return the node that has the slot of *key*."""
        group = self._group(key)
        if group is None:
            self._map.poll_now()
            message = "no node is known to have the slot"
            raise ConnectionError(message)
        return group.primary

    def replica(self, key: str) -> Node | None:
        """Return one of the fresh replicas for the slot of *key* at random."""
        group = self._group(key)
        return None if group is None else group.fresh_replica()

    async def follow(self, key: str, node: Node, refusal: Refused) -> Node | None:
        """Return the node that MOVED or ASK names; poll the map after any other refusal by the cluster."""
        if isinstance(refusal, Redirected):
            return self._redirect(key, node, refusal).primary
        if str(refusal) in {"ClusterDownError", "MasterDownError", "ReadOnlyError"}:
            self._map.poll_now()
        return None

    def failed(self, node: Node) -> None:
        """Poll the map at once if *node* is a primary, else send reads elsewhere."""
        for group in self._groups.values():
            group.failed(node)
            if group.primary is node:
                self._map.poll_now()

    async def aclose(self) -> None:
        """End the probes, and close every connection."""
        await self._map.aclose()
        await self._health.aclose()
        await close_all([*self._seeds, *chain.from_iterable(group.nodes for group in self._groups.values())])

    def _group(self, key: str) -> Group | None:
        address = self._slots[key_slot(key.encode())]
        return None if address is None else self._groups.get(address)

    def _redirect(self, key: str, node: Node, refusal: Redirected) -> Group:
        known = next((address for address, group in self._groups.items() if group.primary is node), None)
        host = known[0] if known is not None and refusal.host in _SAME_HOST else refusal.host
        address = self._translate((host, refusal.port))
        group = self._ensure_group(address, host=refusal.host)
        if refusal.is_moved:
            slot = key_slot(key.encode())
            if self._slots[slot] != address:
                self._slots[slot] = address
                self._shards = []
                self.generation += 1
            self._map.poll_now()
        return group

    def _ensure_group(self, address: Address, *, host: str) -> Group:
        """Return the group with the primary at *address*; a new one has no replicas before the next map.

        *host* is the primary's in the map.
        """
        group = self._groups.get(address)
        if group is None:
            node = self._make_node(f"Redis primary {self._numbers[address]}", address)
            source = address if self._is_literal and _is_literal(host) else None
            group = self._groups[address] = Group(node, self._clock, self._note_change, source)
        return group

    def _map_probes(self) -> Iterator[tuple[Node, Probe]]:
        known = {group.primary: address for address, group in self._groups.items()} | self._seeds
        for node in sample([*known], min(_NODES_IN_A_ROUND, len(known))):
            yield node, partial(self._poll, node, known[node])

    def _health_probes(self) -> Iterator[tuple[Node, Probe]]:
        for group in tuple(self._groups.values()):
            yield from group.probes()

    def _note_change(self, group: Group, change: Change) -> None:  # noqa: ARG002  # the next map has more
        self._map.poll_now()
        if change == "restarted":
            self.generation += 1

    async def _poll(self, node: Node, address: Address) -> None:
        """Ask *node* for the map; apply it unless a newer one is known."""
        try:
            info, slots = await node.exchange((bytes, "CLUSTER", "INFO"), (list, "CLUSTER", "SLOTS"))
        except Exception as error:  # noqa: BLE001  # drivers raise more than they document
            logger.debug("%s has no map (%s)", node.name, type(error).__name__)
            return
        found = None if isinstance(info, Refused) else _EPOCH.search(info)
        epoch = 0 if found is None else int(found[1])
        is_old = epoch < self._epoch and self._clock() - self._accepted_at < _MAX_MAP_AGE
        if slots and not isinstance(slots, Refused) and not is_old:
            self._epoch = epoch
            self._accepted_at = self._clock()
            self._apply_map([self._parse_shard(words, address[0]) for words in slots])
            self._found.set()

    def _parse_shard(self, words: list[Any], asked: str) -> tuple[_Shard, str]:
        """Return one line of CLUSTER SLOTS, and its name of the primary's host."""
        first_slot, last_slot, *nodes = words
        hosts = [(node[0] or b"").decode() for node in nodes]
        primary, *replicas = (
            self._translate((asked if host in _SAME_HOST else host, node[1]))
            for host, node in zip(hosts, nodes, strict=True)
        )
        return _Shard(first_slot, last_slot, primary, tuple(replicas)), hosts[0]

    def _apply_map(self, shards: list[tuple[_Shard, str]]) -> None:
        if shards == self._shards:
            return
        self._shards = shards
        slots: list[Address | None] = [None] * SLOTS
        replicas_of: dict[Address, dict[Address, None]] = {}
        for shard, host in shards:
            self._ensure_group(shard.primary, host=host)
            slots[shard.first : shard.last + 1] = [shard.primary] * (shard.last + 1 - shard.first)
            replicas_of.setdefault(shard.primary, {}).update(dict.fromkeys(shard.replicas))
        if any(old is not None and old != new for old, new in zip(self._slots, slots, strict=True)):
            self.generation += 1
        self._slots = slots
        self._set_groups(replicas_of)

    def _set_groups(self, replicas_of: dict[Address, dict[Address, None]]) -> None:
        """Make these the primaries and their replicas; close the other nodes."""
        before = {*chain.from_iterable(group.nodes for group in self._groups.values())}
        wanted = {*chain.from_iterable(replicas_of.values())}
        self._replicas = {address: self._replicas.get(address) or self._make_replica(address) for address in wanted}
        self._groups = {address: group for address, group in self._groups.items() if address in replicas_of}
        for address, group in self._groups.items():
            group.set_replicas([self._replicas[replica] for replica in replicas_of[address]])
        self._health.close_nodes(before.difference(*(group.nodes for group in self._groups.values())))

    def _make_replica(self, address: Address) -> Node:
        return self._make_node(f"Redis replica {self._numbers[address]}", address, allow_reads)


async def allow_reads(connection: Any) -> None:
    """Let a replica answer reads; without READONLY it redirects them to its primary."""
    await connection.send_command("READONLY", check_health=False)
    await connection.read_response()


def _is_literal(host: str) -> bool:
    """Return whether *host* is an address and not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
