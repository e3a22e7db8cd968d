"""Cluster: which node has which slot, by the word of any node, and by the redirections of those who were asked.

Nodes that were cut off keep telling an old map. Of two maps the newer one counts, by the epoch of whoever told it.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from ipaddress import ip_address
from itertools import chain
from random import sample
from typing import Any, NamedTuple

from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

from ... import Refused
from ..node import Address, Node, Redirected
from .polling import Poller, Probe, first
from .replicated import PERIOD, Group, close_all
from .sentinel import MakeNode

logger = logging.getLogger("stampede_guard")

_PERIOD = 2.0  # seconds between two looks at the map, if nothing asks for one sooner
_ASKED = 3  # nodes that are asked in one look
_SILENCE = 5.0  # seconds without a map that was accepted, after which an older one is believed too
_EPOCH = re.compile(rb"cluster_current_epoch:(\d+)")
_UNKNOWN = ("", "?")  # hosts that stand for the host that was asked


class _Shard(NamedTuple):
    """What CLUSTER SLOTS says of a range of slots."""

    first: int
    last: int
    primary: Address
    replicas: tuple[Address, ...]


class Cluster:
    """The nodes of a cluster.

    Args:
        make_node: Makes a node of the cluster.
        seeds: Addresses of some nodes, to be asked for the others.
        clock: Monotonic seconds.
        translate: Turns an address that the cluster tells into one to connect to; `None` if they are the same.
        is_literal: Whether replicas call their primary by the address that the cluster tells us.
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
        self._translate = translate
        self._is_literal = is_literal and translate is None
        self._groups: dict[Address, Group] = {}  # by their primaries
        self._slots: list[Address | None] = [None] * SLOTS
        self._shards: list[tuple[_Shard, str]] = []  # the map as it was told, unless a redirection changed it since
        self._replicas: dict[Address, Node] = {}
        self._numbers: dict[Address, int] = {}
        self._epoch = 0
        self._accepted_at = clock()
        self._found = asyncio.Event()
        self._looks = Poller(_PERIOD, self._whom_to_ask)
        self._probes = Poller(PERIOD, self._whom_to_probe)

    async def open(self) -> None:
        """Ask for the map, and go on asking.

        Raises:
            ConnectionError: no node had one.
        """
        self._probes.start()
        await first(self._found, (partial(self._look, node, seed) for node, seed in self._seeds.items()))
        self._looks.start()
        if not self._groups:
            message = "no node of the cluster knows who has which slot"
            raise ConnectionError(message)

    def primary(self, key: str) -> Node:
        """Return the node that has the slot of *key*."""
        group = self._group(key)
        if group is None:
            self._looks.hurry()
            message = "nobody is known to have the slot"
            raise ConnectionError(message)
        return group.primary

    def replica(self, key: str) -> Node | None:
        """Return one of the good replicas for the slot of *key* at random."""
        group = self._group(key)
        return None if group is None else group.good()

    async def follow(self, key: str, node: Node, refusal: Refused) -> Node | None:
        """Go where MOVED and ASK point to; look at the map after any other word about the cluster."""
        if isinstance(refusal, Redirected):
            return self._redirect(key, node, refusal).primary
        if str(refusal) in {"ClusterDownError", "MasterDownError", "ReadOnlyError"}:
            self._looks.hurry()
        return None

    def failed(self, node: Node) -> None:
        """Look at the map at once if *node* is a primary, else send reads elsewhere."""
        for group in self._groups.values():
            group.failed(node)
            if group.primary is node:
                self._looks.hurry()

    async def aclose(self) -> None:
        """End the rounds, and close every connection."""
        await self._looks.aclose()
        await self._probes.aclose()
        await close_all([*self._seeds, *chain.from_iterable(group.nodes for group in self._groups.values())])

    def _group(self, key: str) -> Group | None:
        address = self._slots[key_slot(key.encode())]
        return None if address is None else self._groups.get(address)

    def _redirect(self, key: str, node: Node, refusal: Redirected) -> Group:
        known = next((address for address, group in self._groups.items() if group.primary is node), None)
        host = known[0] if known is not None and refusal.host in _UNKNOWN else refusal.host
        address = self._reach((host, refusal.port))
        group = self._ensure(address, host=refusal.host)
        if refusal.is_moved:
            slot = key_slot(key.encode())
            if self._slots[slot] != address:
                self._slots[slot] = address
                self._shards = []
                self.generation += 1
            self._looks.hurry()
        return group

    def _reach(self, address: Address) -> Address:
        return address if self._translate is None else self._translate(address)

    def _ensure(self, address: Address, *, host: str) -> Group:
        """Return the group with the primary at *address*; a new one has no replicas until the map says so.

        *host* is what the cluster calls it.
        """
        group = self._groups.get(address)
        if group is None:
            node = self._make_node(f"Redis primary {self._number(address)}", address)
            source = address if self._is_literal and _is_literal(host) else None
            group = self._groups[address] = Group(node, self._clock, self._note_change, source)
        return group

    def _number(self, address: Address) -> int:
        return self._numbers.setdefault(address, len(self._numbers) + 1)

    def _whom_to_ask(self) -> Iterator[tuple[Node, Probe]]:
        known = {group.primary: address for address, group in self._groups.items()} | self._seeds
        for node in sample([*known], min(_ASKED, len(known))):
            yield node, partial(self._look, node, known[node])

    def _whom_to_probe(self) -> Iterator[tuple[Node, Probe]]:
        for group in tuple(self._groups.values()):
            yield from group.questions()

    def _note_change(self, group: Group, change: str) -> None:  # noqa: ARG002  # the map will tell more
        self._looks.hurry()
        if change == "restarted":
            self.generation += 1

    async def _look(self, node: Node, address: Address) -> None:
        """Ask *node* for the map; take it over unless a newer one is known."""
        try:
            told, slots = await node.exchange((bytes, "CLUSTER", "INFO"), (list, "CLUSTER", "SLOTS"))
        except Exception as error:  # noqa: BLE001  # drivers raise more than they document
            logger.debug("%s does not help (%s)", node.name, type(error).__name__)
            return
        found = None if isinstance(told, Refused) else _EPOCH.search(told)
        epoch = 0 if found is None else int(found[1])
        is_old = epoch < self._epoch and self._clock() - self._accepted_at < _SILENCE
        if slots and not isinstance(slots, Refused) and not is_old:
            self._epoch = epoch
            self._accepted_at = self._clock()
            self._take_over([self._read(words, address[0]) for words in slots])
            self._found.set()

    def _read(self, words: list[Any], asked: str) -> tuple[_Shard, str]:
        """Return one line of CLUSTER SLOTS, and what it calls the primary's host."""
        first_slot, last_slot, *nodes = words
        hosts = [(node[0] or b"").decode() for node in nodes]
        primary, *replicas = (
            self._reach((asked if host in _UNKNOWN else host, node[1])) for host, node in zip(hosts, nodes, strict=True)
        )
        return _Shard(first_slot, last_slot, primary, tuple(replicas)), hosts[0]

    def _take_over(self, shards: list[tuple[_Shard, str]]) -> None:
        if shards == self._shards:
            return
        self._shards = shards
        slots: list[Address | None] = [None] * SLOTS
        followers: dict[Address, dict[Address, None]] = {}
        for shard, host in shards:
            self._ensure(shard.primary, host=host)
            slots[shard.first : shard.last + 1] = [shard.primary] * (shard.last + 1 - shard.first)
            followers.setdefault(shard.primary, {}).update(dict.fromkeys(shard.replicas))
        if any(old is not None and old != new for old, new in zip(self._slots, slots, strict=True)):
            self.generation += 1
        self._slots = slots
        self._keep(followers)

    def _keep(self, followers: dict[Address, dict[Address, None]]) -> None:
        """Let these be the primaries and their replicas; close the nodes of the others."""
        before = {*chain.from_iterable(group.nodes for group in self._groups.values())}
        wanted = {*chain.from_iterable(followers.values())}
        self._replicas = {address: self._replicas.get(address) or self._follower(address) for address in wanted}
        self._groups = {address: group for address, group in self._groups.items() if address in followers}
        for address, group in self._groups.items():
            group.keep([self._replicas[replica] for replica in followers[address]])
        self._probes.close(before.difference(*(group.nodes for group in self._groups.values())))

    def _follower(self, address: Address) -> Node:
        return self._make_node(f"Redis replica {self._number(address)}", address, allow_reads)


async def allow_reads(connection: Any) -> None:
    """Let a replica answer reads itself; it would redirect them to its primary."""
    await connection.send_command("READONLY", check_health=False)
    await connection.read_response()


def _is_literal(host: str) -> bool:
    """Return whether *host* is an address and not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
