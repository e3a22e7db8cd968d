"""All candidates at a time, each around its function."""

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks.families import NOT_INSTALLED
from benchmarks.peers import is_installed
from benchmarks.peers.peer import Peer
from benchmarks.subjects import Function, Subject, Terms
from benchmarks.timing import described


@asynccontextmanager
async def all_wrapped(
    peers: Iterable[Peer], subject: Callable[[str], Subject], terms: Terms, failures: dict[str, str]
) -> AsyncGenerator[dict[str, Function]]:
    """Put each candidate around the subject made for its name; note in *failures* if that fails."""
    async with AsyncExitStack() as stack:
        functions: dict[str, Function] = {}
        for peer in peers:
            if not is_installed(peer):
                failures[peer.name] = NOT_INSTALLED
                continue
            try:
                functions[peer.name] = await stack.enter_async_context(peer.wrap(subject(peer.name), terms))
            except Exception as error:  # noqa: BLE001  # installed, and unfit for this Python
                failures[peer.name] = described(error)
        yield functions
