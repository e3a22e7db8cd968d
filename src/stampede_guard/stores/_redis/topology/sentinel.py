"""Sentinel: says who is the primary, which is believed once the primary says so too.

The sentinels are asked all the same, each by itself and again and again: one that is cut off from the
others would name the old primary for ever. Of what they say the newest counts, by the configuration's epoch.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from redis.exceptions import AuthenticationError, NoPermissionError

from ... import Refused
from ..node import Address, Node
from .polling import Poller, Probe, first
from .replicated import PERIOD, Group, close_all

logger = logging.getLogger("stampede_guard")

_PERIOD = 0.8  # seconds between two questions to the same sentinel
_SILENCE = 3.0  # seconds without a word of the primary, after which an older epoch is believed too
_REPLICAS = 32


class MakeNode(Protocol):
    """Makes a node of the store's settings."""

    def __call__(self, name: str, address: Address, greet: Callable[[Any], Any] | None = None) -> Node:
        """Return a node at *address*; each of its connections is passed to *greet* when it has logged in."""
        ...


class _SentinelView(NamedTuple):
    """What a sentinel says.

    Attributes:
        epoch: Of the configuration; rises with each failover.
        primary: Where the primary is.
        replicas: Where the replicas are, whatever the sentinel thinks of their health.
    """

    epoch: int
    primary: Address
    replicas: list[Address]


class Sentinel:
    """The servers of one service that sentinels watch over.

    Args:
        make_node: Makes a node of the service.
        sentinels: The sentinels.
        service: What they call the service.
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
        self._group: Group | None = None  # the primary of the last change and its replicas
        self._address: Address | None = None
        self._epoch = 0
        self._is_demoted = False
        self._replicas: dict[Address, Node] = {}
        self._elections = 0
        self._numbers: dict[Address, int] = {}  # of the replicas, for their names
        self._turn = asyncio.Lock()
        self._found = asyncio.Event()
        self._looks = Poller(_PERIOD, self._whom_to_ask)
        self._probes = Poller(PERIOD, self._whom_to_probe)

    async def open(self) -> None:
        """Begin to look for the primary; return when it is found.

        Raises:
            ConnectionError: every sentinel was asked once, and there is no primary.
        """
        self._probes.start()
        await first(self._found, (partial(self._look, sentinel) for sentinel in self._sentinels))
        self._looks.start()
        if self._group is None:
            message = "no sentinel knows a primary"
            raise ConnectionError(message)

    def primary(self, key: str) -> Node:  # noqa: ARG002  # it has them all
        """Return the primary."""
        if self._group is None or self._is_demoted:
            self._looks.hurry()
            message = "no sentinel knows a primary"
            raise ConnectionError(message)
        return self._group.primary

    def replica(self, key: str) -> Node | None:  # noqa: ARG002  # as above
        """Return one of the good replicas at random."""
        return None if self._group is None else self._group.good()

    async def follow(self, key: str, node: Node, refusal: Refused) -> Node | None:  # noqa: ARG002  # there is one
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
                self._looks.hurry()
            self._group.failed(node)

    async def aclose(self) -> None:
        """End the rounds, and close every connection."""
        await self._looks.aclose()
        await self._probes.aclose()
        await close_all([*self._sentinels, *([] if self._group is None else self._group.nodes)])

    def _whom_to_ask(self) -> Iterator[tuple[Node, Probe]]:
        for sentinel in self._sentinels:
            yield sentinel, partial(self._look, sentinel)

    def _whom_to_probe(self) -> Iterable[tuple[Node, Probe]]:
        return () if self._group is None else self._group.questions()

    def _note_change(self, group: Group, change: str) -> None:
        if group is not self._group:
            return
        self._looks.hurry()
        if change == "restarted":
            self._is_demoted = False
            self.generation += 1
        elif change == "demoted" and not self._is_demoted:
            self._is_demoted = True
            self.generation += 1

    async def _look(self, sentinel: Node) -> None:
        """Ask one sentinel, and do as it says."""
        try:
            word = await _ask(sentinel, self._service)
        except Exception as error:  # noqa: BLE001  # drivers raise more than they document
            logger.debug("%s does not help (%s)", sentinel.name, type(error).__name__)
            return
        async with self._turn:  # the others have been asked too
            if self._is_news(word):
                await self._heed(word)

    def _is_news(self, word: _SentinelView) -> bool:
        confirmed_at = -1e9 if self._group is None else self._group.confirmed_at
        return word.epoch >= self._epoch or self._clock() - confirmed_at > _SILENCE

    async def _heed(self, word: _SentinelView) -> None:
        if self._group is None or self._is_demoted or word.primary != self._address:
            group = await self._elect(word.primary)
            if group is None:
                return
            self._change(group, word.primary)
        assert self._group is not None
        self._epoch = word.epoch
        self._keep(self._group, word.replicas)

    async def _elect(self, address: Address) -> Group | None:
        """Return a group whose primary is at *address*, if that says that it is one."""
        primary = self._make_node(f"Redis primary {self._elections + 1}", address, check_primary)
        try:
            await primary.exchange((bytes, "PING"))
        except BaseException as error:
            self._probes.close([primary])
            if isinstance(error, Exception):
                return None
            raise
        return Group(primary, self._clock, self._note_change, address)

    def _change(self, group: Group, address: Address) -> None:
        if self._group is not None:
            self._probes.close(self._group.nodes)
            self._replicas.clear()
            if not self._is_demoted:  # else this was counted when it was
                self.generation += 1
            logger.info("%s takes over", group.primary.name)
        self._elections += 1
        self._group, self._address, self._is_demoted = group, address, False
        self._probes.hurry()
        self._found.set()

    def _keep(self, group: Group, addresses: list[Address]) -> None:
        replicas = {
            address: self._replicas.get(address) or self._make_node(f"Redis replica {self._number(address)}", address)
            for address in addresses[:_REPLICAS]
        }
        self._replicas = replicas
        self._probes.close(group.keep([*replicas.values()]))

    def _number(self, address: Address) -> int:
        return self._numbers.setdefault(address, len(self._numbers) + 1)


async def _ask(sentinel: Node, service: str) -> _SentinelView:
    """Return what *sentinel* says.

    Raises:
        Refused: it does not know the service, or may not be asked.
        Exception: it does not answer, or not in this form.
    """
    # The address by the first: during a failover the second tells the new epoch with the old address.
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
    """Refuse a connection to a server that is no primary now, whoever said that it is.

    A demoted one would answer reads of what it happens to hold; Sentinel cuts its connections as it demotes it.
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
    """Log in with the password of the servers, or without: sentinels often have none."""
    try:
        await connection.on_connect()
    except AuthenticationError:
        connection.username = connection.password = connection.credential_provider = None
        await connection.disconnect(nowait=True)
        await connection.connect()  # which comes back here
