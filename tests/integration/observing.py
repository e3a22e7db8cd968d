"""Looking on: at what a real server has, and at what guards say to each other and to it."""

import asyncio
from collections import Counter
from typing import Any, Self
from uuid import uuid4

from inside import backplane_of, tier_of
from redis.asyncio import Redis
from waiting import until_there

from stampede_guard import Guard
from stampede_guard.stores._redis import scripts


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


async def load_scripts(admin: Redis) -> None:
    """Let the server know every script, as it does a moment after its start."""
    for script in vars(scripts).values():
        if isinstance(script, scripts.Script):
            await admin.script_load(script.text)


async def commands_run(admin: Redis) -> Counter[str]:
    """Return how often the server has run each command, those within scripts included."""
    stats: dict[str, dict[str, Any]] = await admin.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): int(stat["calls"]) for name, stat in stats.items()})
