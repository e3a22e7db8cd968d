"""Replicas: read from only while they say themselves that they are connected, and are not far behind.

Nobody else's word counts. During a full resync of seven seconds Sentinel called a replica healthy that
answered old values, and nothing at all for new keys: a miss each, and a load of the database each.

How far behind is measured in time, and on one clock, ours. Whoever has the offset that the primary had
when we asked it, has every write up to that moment; the lag is what has passed since.
"""

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import inf
from random import choice
from typing import Any, NamedTuple

from ... import Refused
from ..._breaker import Breaker
from ..node import Address, Command, Node
from .polling import Poller, Probe

logger = logging.getLogger("stampede_guard")

PERIOD = 0.25  # seconds from probe to probe
_FRESH = 1.0  # seconds that a replica may be behind, and that a node may be silent

_RUN_ID = re.compile(rb"run_id:(\w+)")
_ROLE: Command = (list, "ROLE")
_INFO: Command = (bytes, "INFO", "server")


class _OffsetSample(NamedTuple):
    """What the primary's offset was.

    Attributes:
        at: When it was asked, that is no later than it had the offset.
        offset: Bytes written since the beginning of its history.
    """

    at: float
    offset: int


class _ReplicaStatus:
    """One replica, and whether reads may pass."""

    def __init__(self, node: Node, clock: Callable[[], float]) -> None:
        self.node = node
        self.breaker = Breaker(node.name, clock)
        self.good_until = -inf
        self.offset = -1  # by its last answer, if that was a good one
        self.answered_at = clock()  # when a question was put that it has answered
        self._standing: str | None = None

    def stand(self, standing: str) -> None:
        """Note what it may do now; log it if that has changed."""
        if standing != self._standing:
            self._standing = standing
            level = logging.WARNING if standing else logging.INFO
            logger.log(level, "%s serves %s", self.node.name, f"no reads: {standing}" if standing else "reads")

    def shut(self) -> None:
        """Let no read pass until it has proved itself again."""
        self.good_until = -inf
        self.offset = -1


class Group:
    """A primary and its replicas.

    Args:
        primary: The node that takes the writes.
        clock: Monotonic seconds.
        on_change: Called when the primary was heard to be another than it was: `restarted`, `demoted`, or `silent`.
        source: Where its replicas have to say that they get their copy from; `None` if addresses may differ.
    """

    def __init__(
        self,
        primary: Node,
        clock: Callable[[], float],
        on_change: Callable[["Group", str], None],
        source: Address | None = None,
    ) -> None:
        self.primary = primary
        self.confirmed_at = -inf  # when the primary last said that it is one
        self._clock = clock
        self._on_change = on_change
        self._source = source
        self._gates: list[_ReplicaStatus] = []
        self._marks: deque[_OffsetSample] = deque(maxlen=16)
        self._run_id: bytes | None = None
        self._last_offset = -1
        self._is_demoted = False
        self._is_barred = False

    @property
    def nodes(self) -> list[Node]:
        """The primary and the replicas."""
        return [self.primary, *(gate.node for gate in self._gates)]

    def keep(self, replicas: Sequence[Node]) -> list[Node]:
        """Let these be the replicas; return those that are none any more, for the caller to close."""
        known = {gate.node: gate for gate in self._gates}
        self._gates = [known[node] if node in known else _ReplicaStatus(node, self._clock) for node in replicas]
        return [node for node in known if node not in replicas]

    def good(self) -> Node | None:
        """Return one of the good replicas at random, or `None`."""
        now = self._clock()
        good = [gate.node for gate in self._gates if now < gate.good_until]
        return choice(good) if good else None  # noqa: S311  # no secret

    def failed(self, node: Node) -> None:
        """Note that a replica did not answer somebody's read; other nodes are not this method's concern."""
        for gate in self._gates:
            if gate.node is node:
                self._miss(gate, "no answer")

    def questions(self) -> Iterator[tuple[Node, Probe]]:
        """Yield whom to ask in a round, and how."""
        yield self.primary, self._probe_primary
        if not self._is_barred:
            for gate in self._gates:
                yield gate.node, partial(self._probe, gate)

    async def _probe_primary(self) -> None:
        asked_at = self._clock()
        try:
            role, server = await self.primary.exchange(_ROLE, _INFO)
        except Exception:  # noqa: BLE001  # drivers raise more than they document
            self._on_change(self, "silent")
            return
        if isinstance(role, Refused):
            self.confirmed_at = asked_at  # it is there, and will not say more
            self._bar(self.primary)
        elif role[0] != b"master":
            self._marks.clear()
            if not self._is_demoted:
                self._is_demoted = True
                self._on_change(self, "demoted")
        else:
            self._is_demoted = False
            self._heard_primary(_OffsetSample(asked_at, role[1]), server)

    def _heard_primary(self, mark: _OffsetSample, server: bytes | Refused) -> None:
        found = None if isinstance(server, Refused) else _RUN_ID.search(server)
        run_id = None if found is None else found[1]
        is_another = None not in (self._run_id, run_id) and run_id != self._run_id
        if is_another or mark.offset < self._last_offset:  # the second alone, if INFO is not allowed
            self._marks.clear()
            self._on_change(self, "restarted")
        self._run_id = run_id
        self._last_offset = mark.offset
        self.confirmed_at = mark.at
        self._marks.append(mark)
        for gate in self._gates:
            self._judge(gate)

    async def _probe(self, gate: _ReplicaStatus) -> None:
        """Ask a replica for its role, unless its breaker says that it is too early for that."""
        if not gate.breaker.allows():
            return
        asked_at = self._clock()
        try:
            (role,) = await gate.node.exchange(_ROLE)
        except Exception as error:  # noqa: BLE001  # drivers raise more than they document
            self._miss(gate, type(error).__name__)
            return
        except BaseException:
            gate.breaker.gave_up()
            raise
        gate.breaker.succeeded()
        gate.answered_at = asked_at
        self._heard(gate, role)

    def _heard(self, gate: _ReplicaStatus, role: Any) -> None:
        if isinstance(role, Refused):
            gate.shut()
            self._bar(gate.node)
            return
        standing = self._standing(role)
        if standing:
            gate.shut()
            gate.stand(standing)
            return
        gate.offset = role[4]
        self._judge(gate)
        if self._marks and gate.good_until <= self._clock():
            gate.stand("it lags behind")

    def _standing(self, role: list[Any]) -> str:
        """Return why a replica with this *role* may serve no reads, if it may not."""
        if role[0] != b"slave":
            return "it is no replica"
        _, host, port, state, _ = role
        if self._source is not None and (host.decode(), port) != self._source:
            return "it follows another primary"
        return "" if state == b"connected" else "it is not connected to its primary, or is being filled by it"

    def _judge(self, gate: _ReplicaStatus) -> None:
        """Let reads pass for as long as what the replica has is fresh."""
        if gate.offset < 0:
            return
        had_all_at = max((mark.at for mark in self._marks if mark.offset <= gate.offset), default=-inf)
        gate.good_until = min(had_all_at, gate.answered_at) + _FRESH
        if self._clock() < gate.good_until:
            gate.stand("")

    def _miss(self, gate: _ReplicaStatus, why: str) -> None:
        """Send reads elsewhere at once; give the replica up if this was not the first miss."""
        gate.shut()
        if gate.breaker.state == "closed" and self._clock() - gate.answered_at > _FRESH:
            gate.breaker.trip(why)
        else:
            gate.breaker.failed(why)

    def _bar(self, node: Node) -> None:
        """Read from no replica of this primary, ever: nobody says whether they are any good."""
        if not self._is_barred:
            self._is_barred = True
            logger.warning("%s refuses to tell its ROLE, so no replica serves reads: allow the user +role", node.name)
        for gate in self._gates:
            gate.shut()


class Replicated:
    """A primary and its replicas, as a list of addresses names them; roles do not change.

    Args:
        primary: The node that takes the writes.
        replicas: The others.
        clock: Monotonic seconds.
    """

    has_replicas = True

    def __init__(self, primary: Node, replicas: Sequence[Node], clock: Callable[[], float]) -> None:
        self.generation = 0
        self._group = Group(primary, clock, self._note_change)
        self._group.keep(replicas)
        primary.require_primary(self._note_demotion)
        self._rounds = Poller(PERIOD, self._group.questions)

    async def open(self) -> None:
        """Say PING to the primary, and begin to look after the replicas."""
        self._rounds.start()
        await say_hello(self._group.primary)

    def primary(self, key: str) -> Node:  # noqa: ARG002  # it has them all
        """Return the primary."""
        return self._group.primary

    def replica(self, key: str) -> Node | None:  # noqa: ARG002  # as above
        """Return one of the good replicas at random."""
        return self._group.good()

    async def follow(self, key: str, node: Node, refusal: Refused) -> Node | None:  # noqa: ARG002  # there is no other
        """Learn nothing."""
        return None

    def failed(self, node: Node) -> None:
        """Send reads elsewhere, if it is a replica."""
        self._group.failed(node)

    async def aclose(self) -> None:
        """End the rounds, and close every connection."""
        await self._rounds.aclose()
        await close_all(self._group.nodes)

    def _note_change(self, group: Group, change: str) -> None:  # noqa: ARG002  # there is one
        if change != "silent":
            self.generation += 1

    def _note_demotion(self) -> None:
        self.generation += 1


async def say_hello(node: Node) -> None:
    """Open a connection, log in and say PING.

    Raises:
        Refused: the node is alive and said no.
        Exception: there was no answer.
    """
    (reply,) = await node.exchange((bytes, "PING"))
    if isinstance(reply, Refused):
        raise reply


async def close_all(nodes: Iterable[Node]) -> None:
    """Close *nodes*, every one of them.

    Raises:
        ExceptionGroup: some did not close in time.
    """
    errors: list[Exception] = []
    for node in nodes:
        try:
            await node.aclose()
        except Exception as error:  # noqa: BLE001  # the others are to be closed all the same
            errors.append(error)
    if errors:
        message = "some connections did not close"
        raise ExceptionGroup(message, errors)
