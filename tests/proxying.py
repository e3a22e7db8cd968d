"""Proxies between guards and their server: traffic is held, changed, counted, late, lost or cut."""

import asyncio
import re
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from random import Random
from typing import Self

from stampede_guard.stores._redis.scripts import Script

HOST = "127.0.0.1"
LATENESS = 1.0  # seconds that a late request is late, at most

Hook = Callable[[bytes], Awaitable[bytes]]


async def passes(chunk: bytes) -> bytes:
    """Let a chunk through as it is."""
    return chunk


def runs(script: Script, request: bytes) -> bool:
    """Return whether *request* asks for *script*, whether the server knows it yet or not."""
    return script.digest.encode() in request or script.text.encode() in request


class Connection:
    """A client's connection through a proxy.

    Attributes:
        is_silent: Whether no reply passes any more.
        listens: Whether the client has subscribed to a channel.
        is_asking: Whether the client waits for the server.
    """

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.is_silent = False
        self.listens = False
        self.is_asking = False

    def say(self, reply: bytes) -> None:
        """Send the client *reply*, if it is still there, and the connection is not silent."""
        if not self.is_silent and not self.client.is_closing():
            self.client.write(reply)

    def reset(self) -> None:
        """Answer the client with an RST."""
        if not self.client.is_closing():
            on_close = struct.pack("ii", 1, 0)
            self.client.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, on_close)
            self.client.transport.abort()


class Proxy:
    """A proxy to a server on this machine; an async context manager, which listens within its block.

    Args:
        port: The server's.
        login: User and password for the URL.

    Attributes:
        port: Where new connections lead; those of now stay where they are.
        opened: How many connections were made.
    """

    def __init__(self, port: int, login: str = "") -> None:
        self.port = port
        self.opened = 0
        self._login = f"{login}@" if login else ""
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cut everything, and stop listening."""
        assert self._server is not None
        self._server.close()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    @property
    def listens_at(self) -> int:
        """The port of this proxy."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The URL of the server by way of this proxy."""
        return f"redis://{self._login}{HOST}:{self.listens_at}/0"

    async def request(self, connection: Connection, chunk: bytes) -> bytes:
        """Return what the server is sent in place of *chunk*."""
        return chunk

    async def reply(self, connection: Connection, chunk: bytes) -> bytes:
        """Return what the client is sent in place of *chunk*."""
        return chunk

    def say(self, reply: bytes) -> None:
        """Send each client a reply that it did not ask for."""
        for connection in self._connections:
            connection.say(reply)

    def forward(self, request: bytes) -> None:
        """Send the server *request* now, on each connection."""
        for connection in self._connections:
            connection.server.write(request)

    def silence(self) -> None:
        """Let no reply through on the connections of now, without closing them."""
        for connection in self._connections:
            connection.is_silent = True

    def hang_up(self) -> None:
        """Close each client's connection in the orderly way."""
        for connection in self._connections:
            connection.client.close()

    def reset(self) -> None:
        """Answer on each connection with an RST."""
        for connection in self._connections:
            connection.reset()

    def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.opened += 1
        serving = asyncio.create_task(self._carry(reader, client))
        self._tasks.add(serving)
        serving.add_done_callback(self._tasks.discard)
        serving.add_done_callback(lambda _: client.transport.abort())

    async def _carry(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            upstream, server = await asyncio.open_connection(HOST, self.port)
            connection = Connection(client, server)
            self._connections.add(connection)
            pumps = [
                asyncio.create_task(_pump(reader, partial(self._ask, connection))),
                asyncio.create_task(_pump(upstream, partial(self._answer, connection))),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._connections.discard(connection)
                server.transport.abort()
                for pump in pumps:
                    pump.cancel()
                await asyncio.wait(pumps)

    async def _ask(self, connection: Connection, chunk: bytes) -> None:
        connection.server.write(await self.request(connection, chunk))
        await connection.server.drain()

    async def _answer(self, connection: Connection, chunk: bytes) -> None:
        connection.say(await self.reply(connection, chunk))
        if not connection.client.is_closing():
            await connection.client.drain()


async def _pump(source: asyncio.StreamReader, carry: Callable[[bytes], Awaitable[None]]) -> None:
    with suppress(OSError):
        while chunk := await source.read(1 << 16):
            await carry(chunk)


class Wire(Proxy):
    """A proxy whose traffic a test can hold and change.

    Attributes:
        on_request: Applied to each chunk on its way to the server; what it returns is sent.
        on_reply: Applied to each chunk on its way back.
    """

    on_request: Hook = staticmethod(passes)
    on_reply: Hook = staticmethod(passes)

    async def request(self, connection: Connection, chunk: bytes) -> bytes:
        return await self.on_request(chunk)

    async def reply(self, connection: Connection, chunk: bytes) -> bytes:
        return await self.on_reply(chunk)


class CountingProxy(Proxy):
    """A proxy that counts what goes through it.

    Attributes:
        commands: The names of the commands, in order.
        round_trips: How often a client had to wait for the server.
    """

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.commands: list[str] = []
        self.round_trips = 0

    def restart(self) -> None:
        """Count from zero."""
        self.commands.clear()
        self.round_trips = 0

    async def request(self, connection: Connection, chunk: bytes) -> bytes:
        self.round_trips += not connection.is_asking
        connection.is_asking = True
        self.commands += [name.decode() for name in re.findall(rb"\*\d+\r\n\$\d+\r\n([A-Z]+)\r\n", chunk)]
        return chunk

    async def reply(self, connection: Connection, chunk: bytes) -> bytes:
        connection.is_asking = False
        return chunk


class LossyProxy(Proxy):
    """A proxy that loses what a network loses: the end of a connection, never its middle.

    A reply that is lost takes its connection along, in silence or with an RST, after the server has executed the
    request. A request can also be late: its connection is cut at once, and the server executes it nevertheless.

    Attributes:
        loss: The chance of a reply to be lost, from 0 to 1.
        delay: The chance of a request to be late.
        losses: How many replies were.
        delays: How many requests were.
    """

    def __init__(self, port: int, seed: str) -> None:
        super().__init__(port)
        self.loss = 0.0
        self.delay = 0.0
        self.losses = 0
        self.delays = 0
        self._random = Random(seed)

    def is_late(self, request: bytes) -> bool:  # a test may choose by it
        """Return whether to let *request* be late."""
        return self._random.random() < self.delay

    async def lateness(self) -> None:
        """Wait for as long as a late request is late."""
        await asyncio.sleep(self._random.random() * LATENESS)

    async def request(self, connection: Connection, chunk: bytes) -> bytes:
        if not self.is_late(chunk):
            return chunk
        self.delays += 1
        connection.reset()
        await self.lateness()
        connection.server.write(chunk)
        await connection.server.drain()
        await asyncio.sleep(LATENESS)  # the server is to read it before the end of the connection
        return b""

    async def reply(self, connection: Connection, chunk: bytes) -> bytes:
        if not connection.is_silent and self._random.random() < self.loss:
            self.losses += 1
            if self._random.random() < 0.5:
                connection.reset()
            connection.is_silent = True
        return chunk


class Detour(Proxy):
    """A proxy whose bus can be late.

    Attributes:
        lateness: Seconds by which all that a server says to its listeners is late; nothing of it is lost.
        flows: Set unless nothing that a server says is to arrive.
    """

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.lateness = 0.0
        self.flows = asyncio.Event()
        self.flows.set()

    async def request(self, connection: Connection, chunk: bytes) -> bytes:
        connection.listens |= b"SUBSCRIBE" in chunk
        return chunk

    async def reply(self, connection: Connection, chunk: bytes) -> bytes:
        await self.flows.wait()
        if not (connection.listens and self.lateness):
            return chunk
        asyncio.get_running_loop().call_later(self.lateness, connection.say, chunk)
        return b""


@asynccontextmanager
async def babbling(nonsense: bytes) -> AsyncGenerator[str]:
    """Run a server that answers each request with *nonsense*; yield its URL."""

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                writer.write(nonsense)
                await writer.drain()
        writer.transport.abort()

    server = await asyncio.start_server(babble, HOST, 0)
    try:
        yield f"redis://{HOST}:{server.sockets[0].getsockname()[1]}/0"
    finally:
        server.close()
