"""Fault injectors: a proxy whose traffic a test can hold, change and cut, and a server that talks nonsense."""

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from stampede_guard.stores._redis.scripts import Script

HOST = "127.0.0.1"
RESET_ON_CLOSE = struct.pack("ii", 1, 0)

Hook = Callable[[bytes], Awaitable[bytes]]


async def passes(chunk: bytes) -> bytes:
    """Let a chunk through as it is."""
    return chunk


def runs(script: Script, request: bytes) -> bool:
    """Return whether *request* asks for *script*, whether the server knows it yet or not."""
    return script.digest.encode() in request or script.text.encode() in request


class Wire:
    """A proxy between a store and its server.

    Args:
        port: The server's.
        login: User and password for the URL.

    Attributes:
        on_request: Applied to each chunk on its way to the server; what it returns is sent.
        on_reply: Applied to each chunk on its way back.
        opened: How many connections were made through it.
    """

    def __init__(self, port: int, login: str = "") -> None:
        self.on_request: Hook = passes
        self.on_reply: Hook = passes
        self.opened = 0
        self._upstream = port
        self._login = f"{login}@" if login else ""
        self._deaf_up_to = 0
        self._clients: set[asyncio.StreamWriter] = set()
        self._servers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, HOST, 0)

    async def aclose(self) -> None:
        """Cut everything, and stop listening."""
        assert self._server is not None
        self._server.close()
        while self._serving:
            for pumping in self._pumps:
                pumping.cancel()
            await asyncio.wait(self._serving, return_when=asyncio.FIRST_COMPLETED)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        """The URL of the server by way of this wire."""
        assert self._server is not None
        return f"redis://{self._login}{HOST}:{self._server.sockets[0].getsockname()[1]}/0"

    def switch(self, port: int) -> None:
        """Lead to the server at *port* from now on; connections of now stay where they are."""
        self._upstream = port

    def say(self, reply: bytes) -> None:
        """Send the store a reply that it did not ask for, on each connection."""
        for client in self._clients:
            client.write(reply)

    def forward(self, request: bytes) -> None:
        """Send the server *request* now, on each connection."""
        for server in self._servers:
            server.write(request)

    def deafen(self) -> None:
        """Let no more through on the connections of now, without closing them; later ones are not affected."""
        self._deaf_up_to = self.opened

    def hang_up(self) -> None:
        """Close each connection in the orderly way."""
        for client in tuple(self._clients):
            client.close()

    def reset(self) -> None:
        """Answer on each connection with an RST."""
        for client in tuple(self._clients):
            if not client.transport.is_closing():
                client.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                client.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        self._clients.add(client)
        self.opened += 1
        try:
            with suppress(OSError):
                await self._carry(reader, client)
        finally:
            client.transport.abort()
            self._clients.discard(client)
            self._serving.discard(serving)

    async def _carry(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        number = self.opened
        upstream_reader, upstream = await asyncio.open_connection(HOST, self._upstream)

        async def to_server(request: bytes) -> bytes:
            request = await self.on_request(request)
            return b"" if number <= self._deaf_up_to else request

        async def to_client(reply: bytes) -> bytes:
            return await self.on_reply(reply)

        pumps = {
            asyncio.create_task(pump(reader, upstream, to_server)),
            asyncio.create_task(pump(upstream_reader, client, to_client)),
        }
        self._pumps |= pumps
        self._servers.add(upstream)
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pumping in pumps:
            pumping.cancel()
        await asyncio.wait(pumps)
        upstream.transport.abort()
        self._pumps -= pumps
        self._servers.discard(upstream)


async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, hook: Hook) -> None:
    """Carry chunks from *source* to *sink* until one of them is gone."""
    with suppress(ConnectionError):
        while chunk := await source.read(1 << 16):
            sink.write(await hook(chunk))
            await sink.drain()


@asynccontextmanager
async def babbling(nonsense: bytes) -> AsyncGenerator[str]:
    """Run a server that answers whatever it hears with *nonsense*; yield its URL."""

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
