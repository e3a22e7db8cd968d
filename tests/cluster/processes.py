"""Child processes that are told what to do, and say what happened, in lines of JSON."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATIENCE = 45.0
LONGEST_LINE = 1 << 24
POLL_INTERVAL = 0.005


class ChildGoneError(Exception):
    """The process has ended, and will not say what it was to say."""


class Child:
    """A running script of this folder."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._heard: defaultdict[str, asyncio.Queue[dict[str, Any]]] = defaultdict(asyncio.Queue)
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, script: str, settings: dict[str, Any]) -> "Child":
        """Run *script* with *settings*; it says `ready` when it is."""
        command = (sys.executable, HERE / script, json.dumps(settings))
        return cls(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=LONGEST_LINE))

    async def tell(self, what: str, **details: Any) -> None:
        """Give an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **details}).encode() + b"\n")
        await self._process.stdin.drain()

    async def hears(self, kind: str, patience: float = PATIENCE) -> dict[str, Any]:
        """Return the next thing of this *kind* that the process says.

        Raises:
            ChildGoneError: it ended instead.
            TimeoutError: it says nothing of the kind.
        """
        hearing = asyncio.create_task(self._heard[kind].get())
        try:
            async with asyncio.timeout(patience):
                await asyncio.wait({hearing, self._listening}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not hearing.done():
                hearing.cancel()
        if hearing.cancelled() or hearing.cancelling():
            message = f"the process ended before it said {kind!r}; it was {self._process}"
            raise ChildGoneError(message)
        return hearing.result()

    async def ask(self, what: str, **details: Any) -> dict[str, Any]:
        """Give an order whose answer is called as the order is."""
        await self.tell(what, **details)
        return await self.hears(what)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def stop(self) -> None:
        """Let the process end in order: its orders end, and so does it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(ConnectionError):
            await self._process.stdin.wait_closed()
        await self._gone()

    async def kill(self) -> None:
        """End the process in the middle of whatever it does."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._gone()

    async def _gone(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self._process.wait()
            await self._listening

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            message = json.loads(line)
            self._heard[message["said"]].put_nowait(message)


@asynccontextmanager
async def children(script: str, settings: list[dict[str, Any]]) -> AsyncGenerator[list[Child]]:
    """Run a process for each of *settings*, all at once; yield them when they are ready, and leave none behind."""
    running: list[Child] = []
    try:
        for each in settings:
            running.append(await Child.start(script, each))  # noqa: PERF401  # those that started are to be ended
        await asyncio.gather(*(child.hears("ready") for child in running))
        yield running
    finally:
        await asyncio.gather(*(child.kill() for child in running))


async def until(is_so: Callable[[], Awaitable[Any]], what: str, patience: float = PATIENCE) -> None:
    """Poll the state of a real server until *is_so*.

    Raises:
        TimeoutError: it does not come to be; the text says *what* was waited for.
    """
    try:
        async with asyncio.timeout(patience):
            while not await is_so():
                await asyncio.sleep(POLL_INTERVAL)
    except TimeoutError:
        message = f"waited {patience:g} s in vain for {what}"
        raise TimeoutError(message) from None


async def orders() -> AsyncIterator[dict[str, Any]]:
    """Yield what a child is told, until there is no more."""
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async for line in reader:
        yield json.loads(line)
    transport.close()


def say(kind: str, **details: Any) -> None:
    """Say something to the parent."""
    sys.stdout.write(json.dumps({"said": kind, **details}) + "\n")
    sys.stdout.flush()
