"""The backplane: receives what other processes invalidated and loaded.

Messages can be lost or late: the connection breaks, the server drops a slow subscriber, a link in between hangs or
queues. So every gap counts as "everything may have changed". To tell a dead connection from an idle bus, each process
sends an echo to itself over the bus each second. When an echo arrives, all that was published before it was sent has
arrived too, so L1 trusts the bus for three seconds from then. No other message earns trust: it may have been on its
way for long.
"""

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from random import random
from typing import Protocol

from .._l2.messages import Message, unpack
from .._l2.tier import Tier
from .._tokens import new_token
from ..stores import Echo, KeysChanged

logger = logging.getLogger("stampede_guard")

_ECHO_PERIOD = 1.0  # seconds
_TRUST = 3.0  # seconds from the time at which an echo was sent: two may be lost
_PAUSES = (0.1, 2.0)  # seconds between attempts to connect, first and longest
_MESSAGES_IN_A_ROW = 256  # before other tasks of the event loop have their turn


class BusListener(Protocol):
    """Receives the events of a backplane."""

    def on_invalidated(self, op: str) -> None:
        """Handle the invalidation of *op* by another process."""

    def on_softened(self, op: str) -> None:
        """Handle the soft invalidation of *op* by another process."""

    def on_tag_invalidated(self, tag: str) -> None:
        """Handle the invalidation of *tag*."""

    def on_cleared(self) -> None:
        """Handle the invalidation of everything; also called when messages may have been lost."""

    def on_keys_changed(self, changed: KeysChanged) -> None:
        """Handle the server's notice that keys were written or deleted, by any client."""

    def on_alive(self, trusted_until: float) -> None:
        """Trust the bus until that instant."""

    def on_lost(self) -> None:
        """Handle the loss of the bus connection."""


class WakeUp:
    """An event that one flight waits for: a load of its op has ended somewhere."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake the flight."""
        self._event.set()

    async def wait(self, timeout: float) -> None:  # noqa: ASYNC109  # a timeout is no error: the caller polls
        """Wait until it is set, at most *timeout* seconds; clear it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._event.wait()
        self._event.clear()


class Backplane:
    """One event loop's subscription to the bus.

    Args:
        tier: The L2 with the bus.
        instance: Sender of this event loop's own messages, which are skipped.
        listener: Receives the events.
        clock: Monotonic seconds.
    """

    def __init__(self, tier: Tier, instance: str, listener: BusListener, clock: Callable[[], float]) -> None:
        self._tier = tier
        self._instance = instance
        self._listener = listener
        self._clock = clock
        self._wake_ups: dict[str, set[WakeUp]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._was_tried = asyncio.Event()
        self._echoes: dict[bytes, float] = {}  # those under way, by payload: when each was sent
        self._trusted_until = 0.0  # instant
        self._silence = 0.0  # seconds since an echo arrived in time
        self._is_up: bool | None = None
        self._node = ""  # name of the subscription's server

    async def open(self, timeout: float) -> None:  # noqa: ASYNC109  # a timeout is no error: the bus may come later
        """Begin to listen; wait at most *timeout* seconds until the first attempt has succeeded or failed."""
        self._listener.on_lost()
        self._trusted_until = self._clock()
        loop = asyncio.get_running_loop()
        upkeep = {"listen": self._listen, "echo": self._send_echoes, "repeat": self._repeat_invalidations}
        self._tasks = [loop.create_task(run(), name=name) for name, run in upkeep.items()]
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._was_tried.wait()

    @property
    def untrusted_for(self) -> float | None:
        """Seconds for which no message would have told of an invalidation; `None` while the bus is trusted."""
        silence = self._clock() - self._trusted_until
        return None if silence < 0 else silence

    async def aclose(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []

    @contextmanager
    def expecting(self, op: str) -> Generator[WakeUp]:
        """Register a wake-up for *op* while the block runs."""
        wake_up = WakeUp()
        self._wake_ups.setdefault(op, set()).add(wake_up)
        try:
            yield wake_up
        finally:
            others = self._wake_ups[op]
            others.discard(wake_up)
            if not others:
                del self._wake_ups[op]

    async def _listen(self) -> None:
        pause = _PAUSES[0]
        while True:
            try:
                self._node = self._tier.bus_node
                asked_at = self._clock()
                async with self._tier.store.listen() as subscription:
                    self._on_connected(asked_at)
                    pause = _PAUSES[0]
                    count = 0
                    while True:
                        self._handle(await subscription.next())
                        count += 1
                        if count % _MESSAGES_IN_A_ROW == 0:
                            await asyncio.sleep(0)
            except Exception as error:  # noqa: BLE001  # drivers raise more than they document
                self._on_disconnected(type(error).__name__)
            await asyncio.sleep(pause * (1 - random() / 2))  # noqa: S311  # no secret
            pause = min(2 * pause, _PAUSES[1])

    def _on_connected(self, asked_at: float) -> None:
        if self._is_up is False:
            logger.info("the bus connection is back")
        self._is_up = True
        self._was_tried.set()
        # Messages were published before, and echoes sent, that this subscription has not received.
        self._on_gap()
        self._echoes.clear()
        # The confirmation is an echo of the request to subscribe.
        self._trust(asked_at)

    def _on_disconnected(self, reason: str) -> None:
        if self._is_up is not False:
            logger.warning(
                "the bus connection is lost (%s); until it is back, L1 keeps values for a second at most", reason
            )
            # Once is enough: values that L1 gets from now on have the short life of those without a bus.
            self._listener.on_lost()
        self._is_up = False
        self._trusted_until = min(self._trusted_until, self._clock())
        self._was_tried.set()
        self._wake_all()

    def _trust(self, sent_at: float) -> None:
        """Note that all that was published before *sent_at* has arrived."""
        self._silence = 0.0
        self._trusted_until = sent_at + _TRUST
        self._listener.on_alive(self._trusted_until)

    def _handle(self, received: bytes | KeysChanged | Echo) -> None:
        if isinstance(received, Echo):
            self._on_echo(received.payload)
            return
        if isinstance(received, KeysChanged):
            self._listener.on_keys_changed(received)
            return
        message = unpack(received)
        if message is None:  # of a newer release
            self._on_gap()
            return
        if message.sender != self._instance:
            self._invalidate(message)
        # A flight with an overtaken load may load again now: in this process too, after its own message.
        if message.kind in ("w", "i", "s"):
            self._wake(message.subject)
        else:
            self._wake_all()

    def _on_echo(self, payload: bytes) -> None:
        """Trust the bus for as long as the time at which the echo was sent allows."""
        sent_at = self._echoes.get(payload)
        if sent_at is None or self._clock() >= sent_at + _TRUST:
            return
        # An echo that was sent earlier, and arrives later by way of another node, must not shorten the trust.
        self._echoes = {other: at for other, at in self._echoes.items() if at > sent_at}
        self._trust(sent_at)

    def _invalidate(self, message: Message) -> None:
        if message.kind in ("i", "s"):
            self._note_recent(self._tier.key(message.subject))
            forget = self._listener.on_softened if message.kind == "s" else self._listener.on_invalidated
            forget(message.subject)
        elif message.kind == "t":
            self._note_recent(self._tier.tag_key(message.subject))
            self._listener.on_tag_invalidated(message.subject)
        elif message.kind == "c":
            self._tier.recent.note_all()
            self._listener.on_cleared()

    def _on_gap(self) -> None:
        """Handle the loss of a message, which may have been about anything."""
        self._tier.recent.note_all()
        self._listener.on_cleared()
        self._wake_all()

    def _note_recent(self, key: str) -> None:
        if self._tier.store.has_replicas:  # which may lag behind the message
            self._tier.recent.note(key)

    def _wake(self, op: str) -> None:
        for wake_up in self._wake_ups.get(op, ()):
            wake_up.set()

    def _wake_all(self) -> None:
        for op in self._wake_ups:
            self._wake(op)

    async def _send_echoes(self) -> None:
        """Send an echo each second; subscribe again if none comes back in time."""
        while True:
            pause = _pause()
            await asyncio.sleep(pause)
            # Not the time that has passed, because this process may have been suspended.
            self._silence += pause
            await self._send_echo()
            # A silent connection may be dead without an error, and a late one gets later. Or the primary has changed.
            if self._is_up and (self._silence >= _TRUST or self._tier.bus_node != self._node):
                await self._resubscribe("silence" if self._silence >= _TRUST else "there is another primary")

    async def _send_echo(self) -> None:
        payload, now = new_token().encode(), self._clock()
        self._echoes = {each: at for each, at in self._echoes.items() if now < at + _TRUST}
        self._echoes[payload] = now
        await self._tier.echo(payload)

    async def _repeat_invalidations(self) -> None:
        """Repeat unconfirmed invalidations each second; in a task of its own, as it may take longer than an echo."""
        while True:
            await asyncio.sleep(_pause())
            await self._tier.repeat_invalidations()

    async def _resubscribe(self, reason: str) -> None:
        self._tasks[0].cancel()
        await asyncio.wait(self._tasks[:1])
        self._on_disconnected(reason)
        self._tasks[0] = asyncio.get_running_loop().create_task(self._listen(), name="listen")


def _pause() -> float:
    # Random, so that the processes of a fleet do not send at the same time.
    return _ECHO_PERIOD * (1 - random() / 4)  # noqa: S311  # no secret
