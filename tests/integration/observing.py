"""Looking on: at what a real server has, and at what guards say to each other and to it."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Self
from uuid import uuid4

from inside import backplane_of, tier_of
from redis.asyncio import Redis
from waiting import until_there

from stampede_guard import Guard
from stampede_guard.stores._redis import scripts

HOST = "127.0.0.1"


async def until_gone(admin: Redis, *keys: str) -> None:
    """Poll until there is none of *keys*."""

    async def are_gone() -> bool:
        return not await admin.exists(*keys)

    await until_there(are_gone, "keys to be gone")


async def caught_up(guard: Guard, admin: Redis) -> None:
    """Say a word on the bus, and wait until *guard* has dealt with it, and so with whatever was said before."""
    backplane = backplane_of(guard)
    op = uuid4().hex
    with backplane.expecting(op) as wake_up:
        await admin.publish(tier_of(guard).store.channel, f"w{op}")
        async with asyncio.timeout(10):
            await wake_up._event.wait()


class ChannelListener:
    """Hears what is published on a channel, in order and completely."""

    def __init__(self, client: Redis, channel: str) -> None:
        self._client = client
        self._channel = channel
        self._marks = f"{uuid4().hex}:marks"
        self._pubsub = client.pubsub()

    async def __aenter__(self) -> Self:
        """Subscribe."""
        await self._pubsub.subscribe(self._channel, self._marks)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave."""
        await self._pubsub.aclose()

    async def said(self) -> list[bytes]:
        """Return what was published before this call, and since the last one."""
        await self._client.publish(self._marks, "now")
        heard: list[bytes] = []
        async for message in self._pubsub.listen():  # pragma: no branch  # it ends at the mark
            if message["type"] == "message":
                if message["channel"] == self._marks.encode():
                    break
                heard.append(message["data"])
        return heard

    async def next(self) -> bytes:
        """Return the next message of the channel."""
        messages = self._pubsub.listen()
        while (message := await anext(messages))["channel"] != self._channel.encode() or message["type"] != "message":
            pass
        heard: bytes = message["data"]
        return heard


class CountingProxy:
    """A proxy that counts what goes through it.

    Attributes:
        commands: The names of the commands, in order.
        round_trips: How often a client had to wait for the server.
    """

    def __init__(self, port: int) -> None:
        self.commands: list[str] = []
        self.round_trips = 0
        self._upstream = port
        self._deaf_up_to = 0
        self._opened = 0
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The URL of the server by way of this proxy."""
        assert self._server is not None
        return f"redis://{HOST}:{self._server.sockets[0].getsockname()[1]}/0"

    def restart(self) -> None:
        """Count from zero."""
        self.commands.clear()
        self.round_trips = 0

    def deafen(self) -> None:
        """Let no reply through on the connections of now, without closing them."""
        self._deaf_up_to = self._opened

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[Self]:
        """Listen on a free port while the block runs."""
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        try:
            yield self
        finally:
            self._server.close()
            while self._pumps:
                for pump in self._pumps:
                    pump.cancel()
                await asyncio.wait(self._pumps, return_when=asyncio.FIRST_COMPLETED)
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_connection(HOST, self._upstream)
        is_asking = False
        self._opened += 1
        number = self._opened

        def note_request(chunk: bytes) -> bytes:
            nonlocal is_asking
            self.round_trips += not is_asking
            is_asking = True
            self.commands += [name.decode() for name in re.findall(rb"\*\d+\r\n\$\d+\r\n([A-Z]+)\r\n", chunk)]
            return chunk

        def note_reply(chunk: bytes) -> bytes:
            nonlocal is_asking
            is_asking = False
            return b"" if number <= self._deaf_up_to else chunk

        pumps = {
            asyncio.create_task(_pump(reader, upstream, note_request)),
            asyncio.create_task(_pump(upstream_reader, client, note_reply)),
        }
        self._pumps |= pumps
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            upstream.transport.abort()
            client.transport.abort()
            for pump in pumps:
                pump.cancel()
            self._pumps -= pumps


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, note: Callable[[bytes], bytes]) -> None:
    with suppress(ConnectionError):
        while chunk := await source.read(1 << 16):
            sink.write(note(chunk))
            await sink.drain()


async def load_scripts(admin: Redis) -> None:
    """Let the server know every script, as it does a moment after its start."""
    for script in vars(scripts).values():
        if isinstance(script, scripts.Script):
            await admin.script_load(script.text)


async def commands_run(admin: Redis) -> Counter[str]:
    """Return how often the server has run each command, those within scripts included."""
    stats: dict[str, dict[str, Any]] = await admin.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): int(stat["calls"]) for name, stat in stats.items()})
