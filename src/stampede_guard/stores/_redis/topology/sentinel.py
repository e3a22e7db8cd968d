"""The servers of one service, as its sentinels report them.

A sentinel's report counts once the primary confirms it. All sentinels are asked, each by itself and periodically: one
that is cut off from the others would report the old primary for ever. Of their reports the newest counts, by the
configuration's epoch.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from redis.exceptions import AuthenticationError, NoPermissionError

from ... import Refused
from ..node import Address, Node
from .base import MakeNode, close_all
from .health import PROBE_PERIOD, Change, Group
from .polling import Poller, Probe, first

logger = logging.getLogger("stampede_guard")

_VIEW_PERIOD = 0.8  # seconds between two requests to the same sentinel
_MAX_SILENCE = 3.0  # seconds without an answer of the primary, after which an older epoch is accepted too
_MAX_REPLICAS = 32


class _SentinelView(NamedTuple):
    """What one sentinel reports.

    Attributes:
        epoch: Of the configuration; rises with each failover.
        primary: Address of the primary.
        replicas: Addresses of all replicas, the unhealthy included.
    """

    epoch: int
    primary: Address
    replicas: list[Address]


class Sentinel:
    """The servers of one service that sentinels watch over.

    Args:
        make_node: Makes a node of the service.
        sentinels: The sentinels.
        service: The service's name.
        clock: Monotonic seconds.
    """

    has_replicas = True

    def __init__(
        self, make_node: MakeNode, sentinels: Sequence[Node], service: str, clock: Callable[[], float]
    ) -> None:
        self.generation = 0
        self._make_node = make_node
        self._sentinels = sentinels
        self._service = service
        self._clock = clock
        self._group: Group | None = None  # the last confirmed primary and its replicas
        self._address: Address | None = None
        self._epoch = 0
        self._is_demoted = False
        self._replicas: dict[Address, Node] = {}
        self._primaries = 0
        self._numbers: defaultdict[Address, int] = defaultdict(count(1).__next__)  # of the replicas, for their names
        self._turn = asyncio.Lock()
        self._found = asyncio.Event()
        self._views = Poller(_VIEW_PERIOD, self._view_probes)
        self._health = Poller(PROBE_PERIOD, self._health_probes)

    async def open(self) -> None:
        """Begin to ask the sentinels; return when the primary is found.

        Raises:
            ConnectionError: every sentinel was asked once, and there is no primary.
        """
        self._health.start()
        await first(self._found, (partial(self._poll, sentinel) for sentinel in self._sentinels))
        self._views.start()
        if self._group is None:
            message = "no sentinel knows a primary"
            raise ConnectionError(message)

    def primary(self, key: str) -> Node:  # noqa: ARG002  # one node has all keys
        """Return the primary."""
        if self._group is None or self._is_demoted:
            self._views.poll_now()
            message = "no sentinel knows a primary"
            raise ConnectionError(message)
        return self._group.primary

    def replica(self, key: str) -> Node | None:  # noqa: ARG002  # as above
        """Return one of the fresh replicas at random."""
        return None if self._group is None else self._group.fresh_replica()

    async def follow(self, key: str, node: Node, refusal: Refused) -> Node | None:  # noqa: ARG002  # as above
        """Learn from READONLY that *node* is the primary no more; return the new one if it is known already."""
        if str(refusal) != "ReadOnlyError":
            return None
        if self._group is not None and self._group.primary is node:
            self._note_change(self._group, "demoted")
            return None
        return None if self._group is None or self._is_demoted else self._group.primary

    def failed(self, node: Node) -> None:
        """Ask the sentinels at once if *node* is the primary, else send reads elsewhere."""
        if self._group is not None:
            if node is self._group.primary:
                self._views.poll_now()
            self._group.failed(node)

    async def aclose(self) -> None:
        """End the probes, and close every connection."""
        await self._views.aclose()
        await self._health.aclose()
        await close_all([*self._sentinels, *([] if self._group is None else self._group.nodes)])

    def _view_probes(self) -> Iterator[tuple[Node, Probe]]:
        for sentinel in self._sentinels:
            yield sentinel, partial(self._poll, sentinel)

    def _health_probes(self) -> Iterable[tuple[Node, Probe]]:
        return () if self._group is None else self._group.probes()

    def _note_change(self, group: Group, change: Change) -> None:
        if group is not self._group:
            return
        self._views.poll_now()
        if change == "restarted":
            self._is_demoted = False
            self.generation += 1
        elif change == "demoted" and not self._is_demoted:
            self._is_demoted = True
            self.generation += 1

    async def _poll(self, sentinel: Node) -> None:
        """Ask one sentinel for its view, and apply that if it is new."""
        try:
            view = await _fetch_view(sentinel, self._service)
        except Exception as error:  # noqa: BLE001  # drivers raise more than they document
            logger.debug("%s has no view (%s)", sentinel.name, type(error).__name__)
            return
        async with self._turn:  # the other sentinels have been asked too
            if self._is_new(view):
                await self._apply_view(view)

    def _is_new(self, view: _SentinelView) -> bool:
        confirmed_at = -1e9 if self._group is None else self._group.confirmed_at
        return view.epoch >= self._epoch or self._clock() - confirmed_at > _MAX_SILENCE

    async def _apply_view(self, view: _SentinelView) -> None:
        if self._group is None or self._is_demoted or view.primary != self._address:
            group = await self._confirm_primary(view.primary)
            if group is None:
                return
            self._switch_to(group, view.primary)
        assert self._group is not None
        self._epoch = view.epoch
        self._set_replicas(self._group, view.replicas)

    async def _confirm_primary(self, address: Address) -> Group | None:
        """Return a group with the server at *address* as its primary; `None` if that does not say that it is one."""
        primary = self._make_node(f"Redis primary {self._primaries + 1}", address, check_primary)
        try:
            await primary.exchange((bytes, "PING"))
        except BaseException as error:
            self._health.close_nodes([primary])
            if isinstance(error, Exception):
                return None
            raise
        return Group(primary, self._clock, self._note_change, address)

    def _switch_to(self, group: Group, address: Address) -> None:
        if self._group is not None:
            self._health.close_nodes(self._group.nodes)
            self._replicas.clear()
            if not self._is_demoted:  # else the generation has risen already
                self.generation += 1
            logger.info("%s takes over", group.primary.name)
        self._primaries += 1
        self._group, self._address, self._is_demoted = group, address, False
        self._health.poll_now()
        self._found.set()

    def _set_replicas(self, group: Group, addresses: list[Address]) -> None:
        self._replicas = {
            address: self._replicas.get(address) or self._make_node(f"Redis replica {self._numbers[address]}", address)
            for address in addresses[:_MAX_REPLICAS]
        }
        self._health.close_nodes(group.set_replicas([*self._replicas.values()]))


async def _fetch_view(sentinel: Node, service: str) -> _SentinelView:
    """Return the view of *sentinel*.

    Raises:
        Refused: the service is unknown to it, or it refuses the commands.
        Exception: it does not answer, or not in this form.
    """
    # The address by the first: during a failover the second has the new epoch with the old address.
    address, master, replicas = await sentinel.exchange(
        (list, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service),
        (list, "SENTINEL", "MASTER", service),
        (list, "SENTINEL", "REPLICAS", service),
    )
    for reply in (address, master, replicas):
        if isinstance(reply, Refused):
            raise reply
    host, port = address
    others = sorted((fields[b"ip"].decode(), int(fields[b"port"])) for fields in map(_fields, replicas))
    return _SentinelView(int(_fields(master).get(b"config-epoch", 0)), (host.decode(), int(port)), others)


def _fields(words: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(words[::2], words[1::2], strict=True))


async def check_primary(connection: Any) -> None:
    """Refuse a connection to a server with another ROLE than a primary's.

    A demoted primary would answer reads with the values that it still holds. Sentinel closes its connections as it
    demotes it.
    """
    await connection.send_command("ROLE", check_health=False)
    try:
        role = await connection.read_response()
    except NoPermissionError:
        return
    if role[0] != b"master":
        message = "no primary"
        raise ConnectionError(message)


async def log_in_to_sentinel(connection: Any) -> None:
    """Log in with the password of the servers, or without one, as sentinels often have none."""
    try:
        await connection.on_connect()
    except AuthenticationError:
        connection.username = connection.password = connection.credential_provider = None
        await connection.disconnect(nowait=True)
        await connection.connect()  # which calls this function again
