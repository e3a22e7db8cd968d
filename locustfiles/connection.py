"""Keep-alive HTTP connections that cost the generator little.

Generator and server share a small machine, so the generator's time for a request is missing from
the server. `FastHttpUser.client` takes about 230 µs (URL parsing, cookie jar, response objects); a
socket and a C parser take about 90 µs.
"""

from functools import cache
from typing import Any
from urllib.parse import urlsplit

from gevent import socket
from gevent.monkey import get_original
from httptools import HttpParserError, HttpResponseParser

# Larger than a menu, so that one read takes the whole answer; every read allocates this much.
READ_BYTES = 64 * 1024

# What a request can fail with; anything else is a mistake in the scenario and must be seen.
FAILURES = (OSError, HttpParserError)


@cache
def resolve(host: str, port: int) -> tuple[Any, ...]:
    """Return the first result of `getaddrinfo`, with the family and the address among others.

    Cached and blocking, because gevent looks names up in threads: hundreds of users that start
    together would wait seconds for these threads to get a turn.
    """
    found: list[tuple[Any, ...]] = get_original("socket", "getaddrinfo")(host, port, type=socket.SOCK_STREAM)
    return found[0]


class Connection:
    """One keep-alive connection; it reconnects when the server has closed it."""

    __slots__ = ("_address", "_head", "_is_complete", "_is_kept", "_parser", "_path", "_socket", "_timeout")

    def __init__(self, host: str, timeout: float) -> None:
        """Prepare a connection; nothing is opened yet.

        Args:
            host: Base URL of the service, like `http://127.0.0.1:8000`.
            timeout: Seconds that connecting, and each read or write, may take.

        Raises:
            ValueError: If *host* is not an `http://` URL.
        """
        url = urlsplit(host)
        if url.scheme != "http" or url.hostname is None:
            raise ValueError(f"the host must look like http://127.0.0.1:8000, got {host!r}")
        self._address = (url.hostname, url.port or 80)
        self._path = url.path.rstrip("/")
        self._head = f" HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n"
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._is_complete = self._is_kept = False

    def get(self, path: str) -> tuple[int, int]:
        """Send a GET and read the whole answer.

        Args:
            path: Path below the host, starting with a slash.

        Returns:
            The status code and the bytes received.

        Raises:
            OSError: If the server refuses, hangs up or does not answer in time.
            HttpParserError: If the answer is not HTTP.
        """
        was_idle = self._socket is not None
        try:
            return self._exchange(path)
        except ConnectionError:
            if not was_idle:
                raise
        # A server may close an idle connection at any time (a restart does), and RFC 9110 lets a
        # client repeat a GET then: once, on a fresh connection.
        return self._exchange(path)

    def close(self) -> None:
        """Close the connection; the next `get` opens it again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def on_message_complete(self) -> None:
        """Note the end of an answer; the parser calls this."""
        self._is_complete = True
        # The parser forgets this after the callback.
        self._is_kept = self._parser.should_keep_alive()

    def _exchange(self, path: str) -> tuple[int, int]:
        if self._socket is None:
            self._socket = self._connect()
            # One parser takes all answers of a connection.
            self._parser = HttpResponseParser(self)
        try:
            return self._send_and_read(self._socket, path)
        except BaseException:
            # Also when a user is stopped half-way: the rest would be taken for the next answer.
            self.close()
            raise

    def _connect(self) -> socket.socket:
        family, kind, protocol, _, address = resolve(*self._address)
        opened = socket.socket(family, kind, protocol)
        opened.settimeout(self._timeout)
        try:
            opened.connect(address)
        except BaseException:
            opened.close()
            raise
        return opened

    def _send_and_read(self, opened: socket.socket, path: str) -> tuple[int, int]:
        opened.sendall(f"GET {self._path}{path}{self._head}".encode("ascii"))
        size = 0
        self._is_complete = False
        while not self._is_complete:
            received = opened.recv(READ_BYTES)
            if not received:
                raise ConnectionResetError("the server hung up before it had answered")
            size += len(received)
            self._parser.feed_data(received)
        if not self._is_kept:
            self.close()
        return self._parser.get_status_code(), size
