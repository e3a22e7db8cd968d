"""The cost of a hit and a fill, by the value's size."""

import itertools
from collections.abc import Awaitable, Callable
from time import perf_counter

from redis.asyncio import Redis

from benchmarks.growing import Curve, Picture, Question, Setting, settle_memory
from demo_api.servers import embedded_servers
from stampede_guard import Guard, coalesce

LIFE = 600.0
ROOM = 2 << 20  # bytes: the largest value, and what is stored beside it
PATIENCE = 5.0  # seconds: a busy machine makes Redis slow here, and not unavailable
# Fills take so many keys in turn, so that Redis holds a bounded number.
KEYS = 32

Do = Callable[[], Awaitable[object]]


async def time_of(do: Do, count: int) -> float:
    """Return the µs of a call, of *count* calls one after the other."""
    begun_at = perf_counter()
    for _ in range(count):
        await do()
    return (perf_counter() - begun_at) / count * 1e6


def operations(guard: Guard, client: Redis, size: int) -> dict[str, Do]:
    """Return the measured operations, for values of *size* bytes."""
    value = bytes(size)
    numbers = itertools.count()

    @coalesce(f"kept-{size}", guard=guard, ttl=LIFE, l2_ttl=LIFE)
    async def kept() -> bytes:
        return value

    @coalesce(f"shared-{size}", guard=guard, l2_ttl=LIFE)
    async def shared() -> bytes:
        return value

    @coalesce(f"filled-{size}-{{number}}", guard=guard, l2_ttl=LIFE)
    async def filled(number: int) -> bytes:
        return value if number is not None else b""

    async def get() -> object:
        return await client.get(f"plain-{size}")

    async def set_() -> object:
        return await client.set(f"plain-{size}", value)

    return {
        "hit in memory": kept,
        "hit in Redis": shared,
        "fill": lambda: filled.refresh(next(numbers) % KEYS),
        "redis-py SET": set_,
        "redis-py GET": get,
    }


async def measure(setting: Setting) -> Question:
    """Measure on an embedded server, all operations in turn."""
    curves: dict[str, Curve] = {}
    sizes = setting.sizes(1_000_000, 100_000, first=100)
    with embedded_servers(postgres=False) as urls:
        guard = Guard(urls.redis, namespace="growth", max_bytes=ROOM, deadline=PATIENCE)
        async with guard, Redis.from_url(urls.redis) as client:
            for number, size in enumerate(sizes):
                dos = operations(guard, client, size)
                found: dict[str, list[float]] = {name: [] for name in dos}
                for do in dos.values():
                    await time_of(do, 3)
                settle_memory()
                rounds = setting.rounds(15)
                for round_ in range(rounds):
                    setting.tell((number + round_ / rounds) / len(sizes), f"{size:,} bytes")
                    for name, do in dos.items():
                        count = 2_000 if name == "hit in memory" else 100 if size < ROOM // 10 else 30
                        found[name].append(await time_of(do, count // 4 if setting.is_quick else count))
                for name, figures in found.items():
                    curve = curves.setdefault(name, Curve(name, is_reference=name.startswith("redis-py")))
                    curve.add(size, figures)
            trouble = guard.stats().l2_errors
    caption = (
        "One caller, one operation at a time, values of type `bytes`. "
        "A fill is a refresh: a lease, a loader that returns at once, and the write. "
        "The time of redis-py alone for the same bytes stands beside it."
    )
    if trouble:
        caption += f" Redis failed {trouble:,} times meanwhile."
    picture = Picture("sizes-time", "What an operation takes", "time", "µs", list(curves.values()))
    return Question("sizes", "Size of a value", "size of the value", caption, [picture], unit="bytes")
