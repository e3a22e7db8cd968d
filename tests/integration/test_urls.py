import asyncio
import logging
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trustme
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection

from demo_api.servers import HOST, ValkeyServer, valkey_server
from stampede_guard import ConfigurationError, Guard
from stampede_guard.stores._redis.node import ConnectionLimits
from stampede_guard.stores._redis.topology.factory import make_topology
from stampede_guard.stores._redis.urls import parse_url

CANARY = "canary"
PATIENT = ConnectionLimits(5.0, 5.0, 4)


@pytest.mark.parametrize(
    ("url", "kind", "addresses", "options"),
    [
        ("redis://localhost", "single", [("localhost", 6379)], {"db": 0}),
        ("redis://", "single", [("localhost", 6379)], {"db": 0}),
        ("redis://cache:7000/5", "single", [("cache", 7000)], {"db": 5}),
        ("redis://[::1]:7000", "single", [("::1", 7000)], {"db": 0}),
        ("redis://menus@cache", "single", [("cache", 6379)], {"db": 0, "username": "menus"}),
        ("redis://menus:p%40ss@cache", "single", [("cache", 6379)], {"db": 0, "username": "menus", "password": "p@ss"}),
        ("redis://:a,b@cache", "single", [("cache", 6379)], {"db": 0, "password": "a,b"}),
        ("unix:///run/redis%20one.sock", "single", [], {"path": "/run/redis one.sock"}),
        ("unix://:pass@/run/redis.sock", "single", [], {"path": "/run/redis.sock", "password": "pass"}),
        ("redis://one,two:7000,[::1]:7001/2", "replicated", [("one", 6379), ("two", 7000), ("::1", 7001)], {"db": 2}),
        (
            "redis+sentinel://menus:p%2Css@one,two:7000/the%20menus/3",
            "sentinel",
            [("one", 26379), ("two", 7000)],
            {"db": 3, "username": "menus", "password": "p,ss"},
        ),
        ("redis+sentinel://one/menus", "sentinel", [("one", 26379)], {"db": 0}),
        ("redis+cluster://one:7000,two", "cluster", [("one", 7000), ("two", 6379)], {"db": 0}),
        ("redis+cluster://one/0", "cluster", [("one", 6379)], {"db": 0}),
    ],
)
def test_url_says_where_the_servers_are(
    url: str, kind: str, addresses: list[tuple[str, int]], options: dict[str, object]
) -> None:
    """Hosts, ports, database, path and login are taken from the URL, and so is what the servers are to each other."""
    servers = parse_url(url)

    assert (kind, tuple(addresses)) == (servers.kind, servers.addresses)
    assert {"username": None, "password": None} | options == servers.options


def test_sentinel_url_names_the_service() -> None:
    """The first part of the path is what the sentinels call the service."""
    assert "the menus" == parse_url("redis+sentinel://one/the%20menus/3").service


@pytest.mark.parametrize(
    ("url", "connection_class"),
    [
        ("redis://cache", Connection),
        ("redis+cluster://cache", Connection),
        ("unix:///run/redis.sock", UnixDomainSocketConnection),
    ],
)
def test_class_of_the_connections(url: str, connection_class: type[object]) -> None:
    """A `unix://` URL is a path; without a second s there is no TLS."""
    assert parse_url(url).connection_class is connection_class


@pytest.mark.parametrize(
    "url", ["rediss://cache", "rediss://cache,replica", "rediss+sentinel://one/menus", "rediss+cluster://one"]
)
def test_rediss_checks_certificates(url: str) -> None:
    """Every `rediss` form gets TLS 1.2 or later, with certificates and host names checked."""
    servers = parse_url(url)
    context = servers.connection_class(**servers.options).ssl_context.get()

    assert servers.connection_class is SSLConnection
    assert (ssl.CERT_REQUIRED, True) == (context.verify_mode, context.check_hostname)
    assert ssl.TLSVersion.TLSv1_2 == context.minimum_version


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"http://{CANARY}", "redis://"),
        (f"{CANARY}", "redis://"),
        (f"unix+sentinel://{CANARY}", "redis://"),
        (f"redis+{CANARY}://cache", "redis://"),
        (f"redis://:{CANARY}@cache:port", "port"),
        (f"redis://:{CANARY}@cache:70000", "port"),
        (f"redis://:{CANARY}@cache,replica:port", "port"),
        (f"redis+cluster://:{CANARY}@cache,replica:70000", "port"),
        (f"redis://:pass/{CANARY}@cache:6379/0", "port"),
        (f"redis://:12/{CANARY}@cache:6379/0", "database"),
        (f"redis://cache/{CANARY}", "database"),
        (f"redis://cache/-1{CANARY}", "database"),
        (f"redis+sentinel://cache/menus/{CANARY}", "database"),
        (f"redis+cluster://:{CANARY}@cache/1", "a cluster has only the first"),
        (f"redis+sentinel://:{CANARY}@cache", "service"),
        (f"redis+sentinel://:{CANARY}@cache/", "service"),
        ("redis://cache?ssl_cert_reqs=none", "option"),
        ("redis+sentinel://cache/menus?ssl_cert_reqs=none", "option"),
        (f"redis://cache/0?{CANARY}=10", "option"),
        (f"redis://:pa?{CANARY}@cache", "option"),
        (f"redis://:pa#{CANARY}=@cache", "option"),
        (f"redis://[{CANARY}", "the form is"),
        (f"redis://cache\N{FULLWIDTH NUMBER SIGN}{CANARY}", "the form is"),
        (f"unix://?{CANARY}", "option"),
        ("unix://", "path"),
    ],
)
def test_bad_url_is_refused_without_quoting_it(url: str, reason: str) -> None:
    """A wrong URL is an error that says what is wrong, and shows no part that could be a password."""
    with pytest.raises(ConfigurationError, match=reason) as refusal:
        Guard(url)

    error: BaseException | None = refusal.value
    while error is not None:
        assert CANARY not in f"{error!r} {error}"
        error = None if error.__suppress_context__ else error.__cause__ or error.__context__


@pytest.mark.parametrize(
    "form", ["redis://{0}", "rediss+cluster://{0}", "redis+sentinel://{0}/canary", "redis://{0},a"]
)
async def test_reprs_show_nothing(form: str) -> None:
    """Neither the description nor the topology shows a password, a host or the name of a service."""
    servers = parse_url(form.format(f"{CANARY}:{CANARY}@{CANARY}"))
    topology = make_topology(servers, PATIENT, time.monotonic)

    assert CANARY not in repr(servers) + repr(topology)


async def test_unix_socket(tmp_path: Path) -> None:
    """A `unix://` URL reaches a server without a port."""
    socket = tmp_path / "valkey.sock"
    with valkey_server("--unixsocket", str(socket)):
        topology = make_topology(parse_url(f"unix://{socket}"), PATIENT, time.monotonic)
        await topology.open()
        replies = await topology.primary("menu").exchange((bytes, "PING"))
        await topology.aclose()

    assert [b"PONG"] == replies


class Certificates:
    """A certificate authority of the test's own, and a certificate for `localhost`."""

    def __init__(self, folder: Path) -> None:
        issuer = trustme.CA()
        self.authority = folder / "authority.pem"
        issuer.cert_pem.write_to_path(str(self.authority))
        self.of_localhost = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        issuer.issue_cert("localhost").configure_cert(self.of_localhost)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Return certificates, made on the spot."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def encrypted(server: ValkeyServer, context: ssl.SSLContext) -> AsyncGenerator[int]:
    """Put TLS in front of *server*; yield the port."""
    connections: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
        writer.transport.abort()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        upstream_reader, upstream = await asyncio.open_connection(HOST, server.port)
        await asyncio.gather(pump(reader, upstream), pump(upstream_reader, writer))

    front = await asyncio.start_server(serve, HOST, 0, ssl=context)
    try:
        yield front.sockets[0].getsockname()[1]
    finally:
        front.close()
        if connections:
            await asyncio.wait(connections)


async def test_certificate_of_the_right_host_is_accepted(certificates: Certificates) -> None:
    """With the authority given, a certificate for the URL's host is good, and the server is reached."""
    with valkey_server() as server:
        async with encrypted(server, certificates.of_localhost) as port:
            servers = parse_url(f"rediss://localhost:{port}")
            topology = make_topology(servers, PATIENT, time.monotonic, ssl_ca_certs=str(certificates.authority))
            await topology.open()
            await topology.aclose()


@pytest.mark.parametrize("host", [HOST, "localhost"])
async def test_certificate_that_proves_nothing_is_refused(
    certificates: Certificates, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate for another host, or of an authority that nobody knows, ends the connection."""
    caplog.set_level(logging.CRITICAL, logger="asyncio")  # its server complains of the client's hanging up
    known = {"ssl_ca_certs": str(certificates.authority)} if host == HOST else {}
    with valkey_server() as server:
        async with encrypted(server, certificates.of_localhost) as port:
            topology = make_topology(parse_url(f"rediss://{host}:{port}"), PATIENT, time.monotonic, **known)
            with pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
                await topology.open()
            await topology.aclose()
