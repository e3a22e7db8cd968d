"""The health of a primary and its replicas, by their own ROLE.

A replica serves reads only while its own ROLE says that it is connected, and its lag is short. Sentinel's view is not
enough: during a 7 s full resync it reported a replica as healthy while that replica returned old values, and none for
new keys, so each read of those became a database load.

The lag is measured in time, on the clock of this process. A replica that has the offset that the primary had when it
was asked has every write up to that moment; the lag is the time that has passed since.
"""

import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from random import choice
from typing import Any, Literal, NamedTuple

from ... import Refused
from ..._breaker import Breaker
from ..node import Address, Command, Node
from .polling import Probe

logger = logging.getLogger("stampede_guard")

PROBE_PERIOD = 0.25  # seconds
_MAX_LAG = 1.0  # seconds that a fresh replica may lag, and that a node may be silent

_RUN_ID = re.compile(rb"run_id:(\w+)")
_ROLE: Command = (list, "ROLE")
_INFO: Command = (bytes, "INFO", "server")

Change = Literal["restarted", "demoted", "silent"]


class _OffsetSample(NamedTuple):
    """The primary's offset at one time.

    Attributes:
        at: When the primary was asked: it had the offset then or later.
        offset: Bytes written since the beginning of its history.
    """

    at: float
    offset: int


class _ReplicaStatus:
    """One replica, and until when it may serve reads."""

    def __init__(self, node: Node, clock: Callable[[], float]) -> None:
        self.node = node
        self.breaker = Breaker(node.name, clock)
        self.fresh_until = -inf
        self.offset = -1  # by its last answer, if that was a good one
        self.answered_at = clock()  # when the last probe that it answered was sent
        self._status: str | None = None  # why it serves no reads; empty if it does

    def set_status(self, status: str) -> None:
        """Note why the replica serves no reads, if it does not; log a change."""
        if status != self._status:
            self._status = status
            level = logging.WARNING if status else logging.INFO
            logger.log(level, "%s serves %s", self.node.name, f"no reads: {status}" if status else "reads")

    def disable(self) -> None:
        """Serve no read until a probe shows that the replica is fresh."""
        self.fresh_until = -inf
        self.offset = -1


class Group:
    """A primary and its replicas.

    Args:
        primary: The node that takes the writes.
        clock: Monotonic seconds.
        on_change: Called when a probe shows that the primary was restarted or demoted, or does not answer.
        source: The address that its replicas have to name as their primary's; `None` if addresses may differ.

    Attributes:
        confirmed_at: When the last probe was sent that the node answered as a primary.
    """

    def __init__(
        self,
        primary: Node,
        clock: Callable[[], float],
        on_change: Callable[["Group", Change], None],
        source: Address | None = None,
    ) -> None:
        self.primary = primary
        self.confirmed_at = -inf
        self._clock = clock
        self._on_change = on_change
        self._source = source
        self._replicas: list[_ReplicaStatus] = []
        self._samples: deque[_OffsetSample] = deque(maxlen=16)
        self._run_id: bytes | None = None
        self._last_offset = -1
        self._is_demoted = False
        self._is_disabled = False

    @property
    def nodes(self) -> list[Node]:
        """The primary and the replicas."""
        return [self.primary, *(replica.node for replica in self._replicas)]

    def set_replicas(self, nodes: Sequence[Node]) -> list[Node]:
        """Make *nodes* the replicas; return those that are replicas no more, for the caller to close."""
        known = {replica.node: replica for replica in self._replicas}
        self._replicas = [known[node] if node in known else _ReplicaStatus(node, self._clock) for node in nodes]
        return [node for node in known if node not in nodes]

    def fresh_replica(self) -> Node | None:
        """Return one of the fresh replicas at random, or `None`."""
        now = self._clock()
        fresh = [replica.node for replica in self._replicas if now < replica.fresh_until]
        return choice(fresh) if fresh else None  # noqa: S311  # no secret

    def failed(self, node: Node) -> None:
        """Note that *node* did not answer a read, if it is a replica."""
        for replica in self._replicas:
            if replica.node is node:
                self._record_failure(replica, "no answer")

    def probes(self) -> Iterator[tuple[Node, Probe]]:
        """Yield each node that is to be probed in a round, and its probe."""
        yield self.primary, self._probe_primary
        if not self._is_disabled:
            for replica in self._replicas:
                yield replica.node, partial(self._probe, replica)

    async def _probe_primary(self) -> None:
        asked_at = self._clock()
        try:
            role, server = await self.primary.exchange(_ROLE, _INFO)
        except Exception:  # noqa: BLE001  # drivers raise more than they document
            self._on_change(self, "silent")
            return
        if isinstance(role, Refused):
            self.confirmed_at = asked_at  # it is alive, and may not say more
            self._disable_all(self.primary)
        elif role[0] != b"master":
            self._samples.clear()
            if not self._is_demoted:
                self._is_demoted = True
                self._on_change(self, "demoted")
        else:
            self._is_demoted = False
            self._apply_primary_role(_OffsetSample(asked_at, role[1]), server)

    def _apply_primary_role(self, sample: _OffsetSample, server: bytes | Refused) -> None:
        found = None if isinstance(server, Refused) else _RUN_ID.search(server)
        run_id = None if found is None else found[1]
        is_another = None not in (self._run_id, run_id) and run_id != self._run_id
        if is_another or sample.offset < self._last_offset:  # the second alone, if INFO is not permitted
            self._samples.clear()
            self._on_change(self, "restarted")
        self._run_id = run_id
        self._last_offset = sample.offset
        self.confirmed_at = sample.at
        self._samples.append(sample)
        for replica in self._replicas:
            self._update_freshness(replica)

    async def _probe(self, replica: _ReplicaStatus) -> None:
        """Ask a replica for its role, unless its breaker is open."""
        if not replica.breaker.allows():
            return
        asked_at = self._clock()
        try:
            (role,) = await replica.node.exchange(_ROLE)
        except Exception as error:  # noqa: BLE001  # drivers raise more than they document
            self._record_failure(replica, type(error).__name__)
            return
        except BaseException:
            replica.breaker.gave_up()
            raise
        replica.breaker.succeeded()
        replica.answered_at = asked_at
        self._apply_role(replica, role)

    def _apply_role(self, replica: _ReplicaStatus, role: Any) -> None:
        if isinstance(role, Refused):
            self._disable_all(replica.node)
            return
        status = self._status_of(role)
        if status:
            replica.disable()
            replica.set_status(status)
            return
        replica.offset = role[4]
        self._update_freshness(replica)
        if self._samples and replica.fresh_until <= self._clock():
            replica.set_status("it lags behind")

    def _status_of(self, role: list[Any]) -> str:
        """Return why a replica with this *role* may serve no reads; empty if it may."""
        if role[0] != b"slave":
            return "it is no replica"
        _, host, port, state, _ = role
        if self._source is not None and (host.decode(), port) != self._source:
            return "it follows another primary"
        return "" if state == b"connected" else "it is not connected to its primary, or is in a full resync"

    def _update_freshness(self, replica: _ReplicaStatus) -> None:
        """Let the replica serve reads for as long as its lag is short."""
        if replica.offset < 0:
            return
        had_all_at = max((sample.at for sample in self._samples if sample.offset <= replica.offset), default=-inf)
        replica.fresh_until = min(had_all_at, replica.answered_at) + _MAX_LAG
        if self._clock() < replica.fresh_until:
            replica.set_status("")

    def _record_failure(self, replica: _ReplicaStatus, why: str) -> None:
        """Send reads elsewhere at once; open the breaker if the replica has been silent for a second."""
        replica.disable()
        if replica.breaker.state == "closed" and self._clock() - replica.answered_at > _MAX_LAG:
            replica.breaker.trip(why)
        else:
            replica.breaker.failed(why)

    def _disable_all(self, node: Node) -> None:
        """Stop reading from this primary's replicas for good: without ROLE their lag is unknown."""
        if not self._is_disabled:
            self._is_disabled = True
            logger.warning("%s refuses to tell its ROLE, so no replica serves reads: allow the user +role", node.name)
        for replica in self._replicas:
            replica.disable()
