"""The backplane: what other processes invalidated and loaded, as one event loop hears it.

Messages can be lost or late: the connection breaks, the server drops a slow listener, a link in between hangs or
queues. So every gap counts as "everything may have changed". And each process sends itself an echo over the bus each
second. When an echo is heard, everything that was said before it was sent has been heard too, so L1 trusts the bus
for three seconds from then. No other message earns trust: it may have been on its way for long.
"""

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from random import random
from typing import Protocol

from .._l2.messages import Message, unpack
from .._l2.tier import Tier
from .._stats import Counters
from .._tokens import new_token
from ..stores import Echo, KeysChanged

logger = logging.getLogger("stampede_guard")

_BEAT = 1.0  # seconds from echo to echo
_TRUST = 3.0  # seconds from when an echo was sent: two may be lost
_PAUSES = (0.1, 2.0)  # seconds between attempts to connect, first and longest
_AT_ONCE = 256  # messages heard before others on the event loop have their turn

_UNCOUNTED = Counters()  # for upkeep, which is nobody's call


class BusListener(Protocol):
    """Who is told."""

    def hear_invalidated(self, op: str) -> None:
        """Take note that *op* was invalidated elsewhere."""

    def hear_tag_invalidated(self, tag: str) -> None:
        """Take note that everything with *tag* was."""

    def hear_cleared(self) -> None:
        """Take note that everything was, or may have been."""

    def hear_touched(self, touched: KeysChanged) -> None:
        """Take note that the server saw keys change, through us or others."""

    def hear_sound(self, trusted_until: float) -> None:
        """Take note that all is heard in time: trust the bus until that instant."""

    def hear_nothing(self) -> None:
        """Take note that the bus is not."""


class WakeUp:
    """What one flight waits for: that the load of its op is over somewhere."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def say(self) -> None:
        """Wake who waits."""
        self._event.set()

    async def heard(self, timeout: float) -> None:  # noqa: ASYNC109  # in silence, polling goes on
        """Wait for the word, at most *timeout* seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._event.wait()
        self._event.clear()


class Backplane:
    """One event loop's ear on the bus.

    Args:
        tier: How to get there.
        instance: Whose messages are our own, and already known.
        audience: Who is told.
        clock: Monotonic seconds.
    """

    def __init__(self, tier: Tier, instance: str, audience: BusListener, clock: Callable[[], float]) -> None:
        self._tier = tier
        self._instance = instance
        self._audience = audience
        self._clock = clock
        self._waiting: dict[str, set[WakeUp]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._was_tried = asyncio.Event()
        self._echoes: dict[bytes, float] = {}  # those under way, by their words: when each was sent
        self._silent = 0.0  # seconds since an echo was heard in time
        self._is_up: bool | None = None
        self._node = ""  # where the bus is heard

    async def open(self, timeout: float) -> None:  # noqa: ASYNC109  # going on without the bus is no error
        """Begin to listen; wait at most *timeout* seconds until it is so, or cannot be now."""
        self._audience.hear_nothing()
        loop = asyncio.get_running_loop()
        upkeep = {"listen": self._listen, "beat": self._beat, "settle": self._settle}
        self._tasks = [loop.create_task(run(), name=name) for name, run in upkeep.items()]
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._was_tried.wait()

    async def aclose(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []

    @contextmanager
    def expecting(self, op: str) -> Generator[WakeUp]:
        """Listen for the end of the load of *op* while the block runs."""
        word = WakeUp()
        self._waiting.setdefault(op, set()).add(word)
        try:
            yield word
        finally:
            words = self._waiting[op]
            words.discard(word)
            if not words:
                del self._waiting[op]

    async def _listen(self) -> None:
        pause = _PAUSES[0]
        while True:
            try:
                self._node = self._tier.bus_node
                asked_at = self._clock()
                async with self._tier.listen() as subscription:
                    self._begin(asked_at)
                    pause = _PAUSES[0]
                    heard = 0
                    while True:
                        self._hear(await subscription.next())
                        heard += 1
                        if heard % _AT_ONCE == 0:
                            await asyncio.sleep(0)
            except Exception as error:  # noqa: BLE001  # drivers raise more than they document
                self._end(type(error).__name__)
            await asyncio.sleep(pause * (1 - random() / 2))  # noqa: S311  # no secret
            pause = min(2 * pause, _PAUSES[1])

    def _begin(self, asked_at: float) -> None:
        if self._is_up is False:
            logger.info("the bus is heard again")
        self._is_up = True
        self._was_tried.set()
        self._miss_a_message()
        self._echoes.clear()  # of the last subscription: what it missed, this one has not heard either
        self._trust(asked_at)  # the confirmation is an echo of the request

    def _end(self, reason: str) -> None:
        if self._is_up is not False:
            logger.warning(
                "the bus is not heard (%s); until it is, nothing is remembered for longer than a second", reason
            )
            self._audience.hear_nothing()  # once: what is remembered after that knows that it was not told of anything
        self._is_up = False
        self._was_tried.set()
        self._wake_all()

    def _trust(self, sent_at: float) -> None:
        """Take note that everything that was said before *sent_at* has been heard."""
        self._silent = 0.0
        self._audience.hear_sound(sent_at + _TRUST)

    def _hear(self, payload: bytes | KeysChanged | Echo) -> None:
        if isinstance(payload, Echo):
            self._hear_echo(payload.payload)
            return
        if isinstance(payload, KeysChanged):
            self._audience.hear_touched(payload)
            return
        message = unpack(payload)
        if message is None:  # of a newer release
            self._miss_a_message()
            return
        if message.sender != self._instance:
            self._take(message)
        # Whoever waits for a load that was overtaken may load: our own flights too, if the word is our own.
        if message.kind in ("w", "i"):
            self._wake(message.subject)
        else:
            self._wake_all()

    def _hear_echo(self, word: bytes) -> None:
        """Trust the bus for as long as the time at which *word* was sent allows; another's word says nothing."""
        sent_at = self._echoes.get(word)
        if sent_at is None or self._clock() >= sent_at + _TRUST:
            return
        # One that was sent earlier, and is heard later by way of another node, must not shorten the trust.
        self._echoes = {other: at for other, at in self._echoes.items() if at > sent_at}
        self._trust(sent_at)

    def _take(self, message: Message) -> None:
        if message.kind == "i":
            self._note(self._tier.key, message.subject)
            self._audience.hear_invalidated(message.subject)
        elif message.kind == "t":
            self._note(self._tier.tag_key, message.subject)
            self._audience.hear_tag_invalidated(message.subject)
        elif message.kind == "c":
            self._tier.recent.note_all()
            self._audience.hear_cleared()

    def _miss_a_message(self) -> None:
        """Act on a message that may have been about anything."""
        self._tier.recent.note_all()
        self._audience.hear_cleared()
        self._wake_all()

    def _note(self, key_of: Callable[[str], str], subject: str) -> None:
        if self._tier.store.has_replicas:  # who may not have heard of it
            self._tier.recent.note(key_of(subject))

    def _wake(self, op: str) -> None:
        for word in self._waiting.get(op, ()):
            word.say()

    def _wake_all(self) -> None:
        for op in self._waiting:
            self._wake(op)

    async def _beat(self) -> None:
        """Send an echo each second; listen anew where none comes back in time."""
        while True:
            pause = _pause()
            await asyncio.sleep(pause)
            self._silent += pause  # not the time that has passed: this process may have been stuck
            await self._send_echo()
            if self._is_up and (self._silent >= _TRUST or self._tier.bus_node != self._node):
                # A connection that says nothing may be dead without knowing, and one that is late queues ever more;
                # and there may be another primary.
                await self._listen_anew("silence" if self._silent >= _TRUST else "there is another primary")

    async def _send_echo(self) -> None:
        word, now = new_token().encode(), self._clock()
        self._echoes = {each: at for each, at in self._echoes.items() if now < at + _TRUST}
        self._echoes[word] = now
        await self._tier.echo(word, _UNCOUNTED)

    async def _settle(self) -> None:
        """Try again each second what the store has not confirmed; apart from the echoes, since it may take longer."""
        while True:
            await asyncio.sleep(_pause())
            await self._tier.settle_all()

    async def _listen_anew(self, reason: str) -> None:
        self._tasks[0].cancel()
        await asyncio.wait(self._tasks[:1])
        self._end(reason)
        self._tasks[0] = asyncio.get_running_loop().create_task(self._listen(), name="listen")


def _pause() -> float:
    return _BEAT * (1 - random() / 4)  # noqa: S311  # no secret; the fleet must not beat in time
