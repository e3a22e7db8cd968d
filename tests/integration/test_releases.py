"""Two releases side by side: what the one stored is never an answer of the other's, nor loaded out of the store."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pydantic
import pytest
from redis.asyncio import Redis

from stampede_guard import Guard
from stampede_guard.testing import Gate

MakeGuard = Callable[..., Guard]

OP = "menu-7"
READS = 200


class Number(pydantic.RootModel[int]):
    """A number in a model."""


class Kitchen:
    """A source, and how often it was asked."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.loads = 0

    async def load(self) -> Any:
        self.loads += 1
        await asyncio.sleep(0)
        return self.answer


PAIRS = [
    (dict[str, int], {"a": 1}, bytes, b"x"),
    (int, 0x41, str, "B"),
    (Number, Number(7), int, 8),
    (str, "\x07", int, 8),
    (bytes, b"7", Number, Number(8)),
    (list[int], [1], tuple[int, ...], (2,)),
    (dict[str, int], {"number": 1}, dict[str, float], {"number": 1.5}),
]


@pytest.mark.parametrize(("old", "before", "new", "after"), PAIRS, ids=str)
async def test_value_of_another_shape_is_a_miss(
    old: Any, before: Any, new: Any, after: Any, make_guard: MakeGuard
) -> None:
    """A value never comes back as one of another type, though its bytes may be one; and that is no damage."""
    async with make_guard() as first, make_guard() as second:
        await first.fetch(OP, Kitchen(before).load, l2_ttl=60, returns=old)
        answer = await second.fetch(OP, Kitchen(after).load, l2_ttl=60, returns=new)

    assert (after, type(after)) == (answer, type(answer))
    assert (1, 0) == (second.stats().l2_misses, second.stats().l2_undecodable)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"returns": dict[str, int]}, {"returns": dict[str, float]}),
        ({"returns": dict[str, int], "tags": ["menus"]}, {"returns": dict[str, int], "tags": ["menus", "all"]}),
        ({"returns": dict[str, int], "tags": ["menus"]}, {"returns": dict[str, int], "tags": ["dishes"]}),
    ],
    ids=["shape", "one tag more", "other tags"],
)
async def test_releases_do_not_load_each_other_s_keys(
    old: dict[str, Any], new: dict[str, Any], make_guard: MakeGuard
) -> None:
    """However often two releases read by turns, each loads once; and once again after an invalidation."""
    kitchens = Kitchen({"a": 1}), Kitchen({"a": 1.5 if new["returns"] == dict[str, float] else 2})
    async with make_guard() as first, make_guard() as second:
        for loads in (1, 2):
            for _ in range(READS // 2):
                for guard, kitchen, options in zip((first, second), kitchens, (old, new), strict=True):
                    assert kitchen.answer == await guard.fetch(OP, kitchen.load, l2_ttl=60, **options)
            assert (loads, loads) == (kitchens[0].loads, kitchens[1].loads)
            await first.invalidate(OP)


async def test_invalidation_by_one_release_overtakes_a_load_of_the_other(
    make_guard: MakeGuard, admin: Redis, namespace: str
) -> None:
    """A release that knows nothing of the other's shape drops its value, and fences off what it is loading."""
    gate = Gate()

    async def load_slowly() -> str:
        await gate.passage()
        return "read before"

    async with make_guard() as first, make_guard() as second:
        await first.fetch(OP, Kitchen({"a": 1}).load, l2_ttl=60, returns=dict[str, int])
        slow = asyncio.create_task(second.fetch(OP, load_slowly, ttl=60, l2_ttl=60, returns=str))
        await gate.arrivals(1)

        await first.invalidate(OP)
        gate.open()
        assert await slow == "read before"
        assert not await admin.exists(f"sg1:{{{namespace}:{OP}}}:v", f"sg1:{{{namespace}:{OP}}}:l")
        assert await second.fetch(OP, Kitchen("read after").load, ttl=60, l2_ttl=60, returns=str) == "read after"


async def test_values_of_two_releases_as_large_as_may_be(make_guard: MakeGuard) -> None:
    """Two values of `max_bytes` fit beside each other, and are read whole."""
    kitchens = Kitchen(b"a" * 100_000), Kitchen("b" * 100_000)
    async with make_guard(max_bytes=100_000) as first, make_guard(max_bytes=100_000) as second:
        for _ in range(5):
            assert kitchens[0].answer == await first.fetch(OP, kitchens[0].load, l2_ttl=60, returns=bytes)
            assert kitchens[1].answer == await second.fetch(OP, kitchens[1].load, l2_ttl=60, returns=str)

    assert (1, 1) == (kitchens[0].loads, kitchens[1].loads)


async def test_pipeliner_of_two_releases(make_guard: MakeGuard) -> None:
    """Values of two releases are told apart where many are read together, by plain commands."""
    ops = [f"menu-{number}" for number in range(300)]
    kitchens = Kitchen(b"a"), Kitchen("b")

    async def ask(guard: Guard, kitchen: Kitchen, kind: Any) -> None:
        asking = (guard.fetch(op, kitchen.load, l2_ttl=60, returns=kind) for op in ops)
        assert [kitchen.answer] * len(ops) == await asyncio.gather(*asking)

    async with make_guard(deadline=5) as first, make_guard(deadline=5) as second:
        for _ in range(3):
            await ask(first, kitchens[0], bytes)
            await ask(second, kitchens[1], str)

    assert (len(ops), len(ops)) == (kitchens[0].loads, kitchens[1].loads)


async def test_life_in_memory_is_that_of_the_release_s_own_value(make_guard: MakeGuard) -> None:
    """A value that stands beside one that lives longer does not live longer itself."""
    async with make_guard() as first, make_guard() as second, make_guard() as third:
        await first.fetch(OP, Kitchen("short").load, l2_ttl=30, returns=str)
        await second.fetch(OP, Kitchen(b"long").load, l2_ttl=600, returns=bytes)
        await third.fetch(OP, Kitchen("none").load, ttl=300, l2_ttl=30, returns=str)
        entry = third._states.running().memory.get(OP)

        assert entry is not None
        assert entry.fresh_until - third._clock() <= 33


_RELEASE = """
import asyncio, sys
from dataclasses import dataclass
from typing import Any
from stampede_guard import Guard, coalesce

guard = Guard({url!r}, namespace={namespace!r}, deadline=5)

@dataclass
class Menu:
    {fields}

loads = 0

@coalesce("menu-{{menu_id}}", guard=guard, l2_ttl=60, tags=({tags}))
async def load_menu(menu_id: int) -> Menu:
    global loads
    loads += 1
    return Menu(*range(len(Menu.__dataclass_fields__)))

async def main() -> None:
    async with guard:
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            await load_menu(7)
            print(loads, flush=True)

asyncio.run(main())
"""


async def test_releases_in_two_processes(redis_url: str, namespace: str) -> None:
    """Two processes of one release share a value, one of the next has its own: a load each in 200 reads by turns."""
    texts = [
        _RELEASE.format(url=redis_url, namespace=namespace, fields=fields, tags=tags)
        for fields, tags in (("a: int", "'menus',"), ("a: int", "'menus',"), ("a: int; b: int = 2", "'menus', 'all'"))
    ]
    pipe = asyncio.subprocess.PIPE
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", text, stdin=pipe, stdout=pipe) for text in texts
    ]
    loads = [0, 0, 0]
    async with asyncio.timeout(60):
        for process in processes:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
        for _ in range(READS):
            for position, process in enumerate(processes):
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(b"\n")
                loads[position] = int(await process.stdout.readline())
        for process in processes:
            await process.communicate(b"")  # the end of its input

    assert [1, 0, 1] == loads
