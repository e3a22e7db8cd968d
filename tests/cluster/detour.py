"""A proxy to a Redis whose bus can be late, and which can lead to another server."""

import asyncio
from contextlib import suppress
from time import monotonic
from typing import Self

HOST = "127.0.0.1"


class Detour:
    """A proxy to the server at *port*.

    Attributes:
        port: Where new connections lead to.
        lateness: Seconds by which all that a server says to its listeners is late; nothing of it is lost.
        flows: Set unless nothing that a server says is to arrive.
        opened: How many connections were made.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.lateness = 0.0
        self.flows = asyncio.Event()
        self.flows.set()
        self.opened = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The URL of the server by way of this proxy."""
        assert self._server is not None
        return f"redis://{HOST}:{self._server.sockets[0].getsockname()[1]}/0"

    async def __aenter__(self) -> Self:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cut everything, and stop listening."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.opened += 1
        serving = asyncio.create_task(self._carry(reader, client))
        self._tasks.add(serving)
        serving.add_done_callback(self._tasks.discard)
        serving.add_done_callback(lambda _: client.transport.abort())

    async def _carry(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            upstream_reader, upstream = await asyncio.open_connection(HOST, self.port)
            listens = asyncio.Event()
            due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
            pumps = [
                asyncio.create_task(_requests(reader, upstream, listens)),
                asyncio.create_task(self._replies(upstream_reader, due, listens)),
                asyncio.create_task(_deliver(due, client)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                upstream.transport.abort()
                for pump in pumps:
                    pump.cancel()
                await asyncio.wait(pumps)

    async def _replies(
        self, source: asyncio.StreamReader, due: asyncio.Queue[tuple[float, bytes]], listens: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while chunk := await source.read(1 << 16):
                await self.flows.wait()
                due.put_nowait((monotonic() + (self.lateness if listens.is_set() else 0.0), chunk))


async def _requests(source: asyncio.StreamReader, sink: asyncio.StreamWriter, listens: asyncio.Event) -> None:
    with suppress(OSError):
        while chunk := await source.read(1 << 16):
            if b"SUBSCRIBE" in chunk:
                listens.set()
            sink.write(chunk)
            await sink.drain()


async def _deliver(due: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while True:
            at, chunk = await due.get()
            await asyncio.sleep(max(0.0, at - monotonic()))
            sink.write(chunk)
            await sink.drain()
