"""Whether Redis answers, in any topology that `REDIS_URL` can name."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

PROBE_TIMEOUT: Final = 1.0
SENTINEL_PORT: Final = 26379


@asynccontextmanager
async def probe(redis_url: str) -> AsyncGenerator[Callable[[], Awaitable[bool]]]:
    """Yield a function that returns whether Redis answers a ping, with a short timeout.

    Behind sentinels it asks the primary; of replicas or the nodes of a cluster, one has to answer.

    Args:
        redis_url: What a `Guard` accepts.
    """
    async with AsyncExitStack() as opened:
        clients = [await opened.enter_async_context(client) for client in _clients(redis_url, opened)]

        async def answers() -> bool:
            for client in clients:
                try:
                    await client.ping()
                except RedisError:
                    continue
                return True
            return False

        yield answers


def _clients(redis_url: str, opened: AsyncExitStack) -> list[Redis]:
    limits: dict[str, Any] = {
        "socket_timeout": PROBE_TIMEOUT,
        "socket_connect_timeout": PROBE_TIMEOUT,
        "retry": Retry(NoBackoff(), 0),
    }
    parts = urlsplit(redis_url)
    scheme, _, kind = parts.scheme.partition("+")
    if kind == "sentinel":
        return [_primary(parts, limits, opened)]
    login, at, hosts = parts.netloc.rpartition("@")
    urls = [parts._replace(scheme=scheme, netloc=f"{login}{at}{host}").geturl() for host in hosts.split(",")]
    return [Redis.from_url(url, **limits) for url in urls]


def _primary(parts: SplitResult, limits: dict[str, Any], opened: AsyncExitStack) -> Redis:
    """Return a client of the primary that the sentinels name."""
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    places = [host.partition(":") for host in hosts.split(",")]
    options = {**limits, "ssl": parts.scheme.startswith("rediss")}
    # redis-py's types do not cover this constructor.
    make_sentinels: Any = Sentinel
    sentinels = make_sentinels(
        [(host, int(port or SENTINEL_PORT)) for host, _, port in places],
        sentinel_kwargs=options,
        **options,
    )
    for sentinel in sentinels.sentinels:
        opened.push_async_callback(sentinel.aclose)
    service = parts.path.split("/")[1]
    primary: Redis = sentinels.master_for(service, username=user or None, password=password or None)
    return primary
