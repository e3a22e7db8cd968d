"""A proxy in front of a Redis that loses what a network loses: the end of a connection, never its middle.

A reply that is lost takes its connection along, in silence or with an RST, after the server has executed the
request. A request can also be late: its connection is cut at once, and the server executes it nevertheless.
"""

import asyncio
import socket
import struct
from contextlib import suppress
from random import Random

HOST = "127.0.0.1"
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
LATENESS = 1.0  # seconds that a late request is late, at most


class LossyWire:
    """A proxy to one server.

    Attributes:
        loss: The chance of a reply to be lost, from 0 to 1.
        delay: The chance of a request to be late.
        losses: How many replies were.
        delays: How many requests were.
    """

    def __init__(self, port: int, seed: str) -> None:
        self.loss = 0.0
        self.delay = 0.0
        self.losses = 0
        self.delays = 0
        self._random = Random(seed)
        self._upstream = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The URL of the server by way of this proxy."""
        assert self._server is not None
        return f"redis://{HOST}:{self._server.sockets[0].getsockname()[1]}/0"

    def is_late(self, request: bytes) -> bool:  # a test may choose by it
        """Return whether to let *request* be late."""
        return self._random.random() < self.delay

    async def lateness(self) -> None:
        """Wait for as long as a late request is late."""
        await asyncio.sleep(self._random.random() * LATENESS)

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, HOST, 0)

    async def aclose(self) -> None:
        """Cut everything, and stop listening."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        serving = asyncio.create_task(self._carry(reader, client))
        self._tasks.add(serving)
        serving.add_done_callback(self._tasks.discard)
        serving.add_done_callback(lambda _: client.transport.abort())

    async def _carry(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            upstream_reader, upstream = await asyncio.open_connection(HOST, self._upstream)
            try:
                await self._pump(reader, client, upstream_reader, upstream)
            finally:
                upstream.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        client: asyncio.StreamWriter,
        upstream_reader: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
    ) -> None:
        pumps = [
            asyncio.create_task(self._carry_requests(reader, upstream, client)),
            asyncio.create_task(self._carry_replies(upstream_reader, client)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)

    async def _carry_requests(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        with suppress(ConnectionError):
            while chunk := await source.read(1 << 16):
                if self.is_late(chunk):
                    self.delays += 1
                    reset(client)
                    await self.lateness()
                    sink.write(chunk)
                    await sink.drain()
                    await asyncio.sleep(LATENESS)  # the server is to read it before the end of the connection
                    return
                sink.write(chunk)
                await sink.drain()

    async def _carry_replies(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while chunk := await source.read(1 << 16):
                if self._random.random() < self.loss:
                    self.losses += 1
                    if self._random.random() < 0.5:
                        reset(sink)
                        return
                    await swallow(source)
                    return
                if sink.is_closing():  # cut, because its request was late
                    await swallow(source)
                    return
                sink.write(chunk)
                await sink.drain()


def reset(client: asyncio.StreamWriter) -> None:
    """Answer with an RST."""
    if not client.transport.is_closing():
        client.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        client.transport.abort()


async def swallow(source: asyncio.StreamReader) -> None:
    """Read on, so that the other side does not notice, and let nothing through."""
    while await source.read(1 << 16):
        pass
