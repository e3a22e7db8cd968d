"""A process of a consistency run: many callers, a few writers, and a log of what they saw.

`python traffic.py '{"number": 1, "url": …, …}'`; it is told `go`, and after that `finish`.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

from processes import orders, say
from records import NOTHING, Kind, Log, Record, group_of, read_value, write_value
from truth import Truth, pool

from stampede_guard import Guard, InvalidationPending, coalesce

BATCH = 25  # callers that ask at the same time
BACKLOG = 0.1  # seconds of callers that a process makes up for, when it was held up


class Traffic:
    """The callers and writers of one process.

    Args:
        settings: See `consistency.Plan`.
        guard: What is under test.
        truth: Where loaders read, and writers write.
        log: Where everything is written down.
    """

    def __init__(self, settings: dict[str, Any], guard: Guard, truth: Truth, log: Log) -> None:
        self._number: int = settings["number"]
        self._settings = settings
        self._guard = guard
        self._truth = truth
        self._log = log
        self._random = Random(f"{settings['seed']} {self._number}")
        self._replica: dict[int, int] = {}  # all rows as they were a while ago; not used if empty
        self._keys = range(settings["keys"])
        self._weights = list(accumulate(1 / (rank + 1) for rank in self._keys))

        @coalesce(
            "row-{key}",
            guard=guard,
            ttl=settings["ttl"],
            l2_ttl=settings["l2_ttl"],
            version=(lambda value: read_value(value)[1]) if settings["lag"] else None,
        )
        async def load_row(key: int) -> str:
            return await self._load(key)

        @coalesce(
            "tagged-{key}-{group}", guard=guard, ttl=settings["ttl"], l2_ttl=settings["l2_ttl"], tags=("group-{group}",)
        )
        async def load_tagged(key: int, group: int) -> str:
            return await self._load(key)

        self.load_row = load_row
        self.load_tagged = load_tagged

    async def _load(self, key: int) -> str:
        start = monotonic()
        version = self._replica[key] if self._replica else await self._truth.read(key)
        self._note("load", key, start, version)
        # A load that takes its time: writes and invalidations come between what it read and its fill.
        await asyncio.sleep(self._random.random() * self._settings["load_time"])
        return write_value(key, version)

    async def go(self) -> None:
        """Read and write for the length of the run."""
        until = monotonic() + self._settings["seconds"]
        share = 1 / self._settings["writers"]
        async with asyncio.TaskGroup() as group:
            if self._settings["lag"]:
                await self._replicate()
                group.create_task(self._replicate_on(until))
            group.create_task(self._read_on(until))
            for _ in range(self._settings["writers"]):
                group.create_task(self._write_on(until, self._settings["writes_per_second"] * share))
        self._log.flush()

    async def _replicate_on(self, until: float) -> None:
        """Let loaders read what is out of date by up to the run's lag."""
        while monotonic() < until:
            await asyncio.sleep(self._settings["lag"])
            await self._replicate()

    async def _replicate(self) -> None:
        self._replica = await self._truth.read_all()

    async def finish(self) -> None:
        """Read every key once more, now that all is calm."""
        self._replica = {}
        await asyncio.gather(*(self._read("final", key) for key in self._keys))
        self._log.flush()

    async def _read_on(self, until: float) -> None:
        """Send batches of callers, at the rate that the run asks for and with no regard to how they get on."""
        interval = BATCH / self._settings["reads_per_second"]
        next_at = monotonic()
        async with asyncio.TaskGroup() as group:
            while monotonic() < until:
                for key in self._some_keys(BATCH):
                    group.create_task(self._read("read", key))
                next_at = max(next_at + interval, monotonic() - BACKLOG)
                await asyncio.sleep(max(0.0, next_at - monotonic()))

    async def _write_on(self, until: float, rate: float) -> None:
        while monotonic() < until:
            (key,) = self._some_keys(1)
            await self._write(key)
            await asyncio.sleep(self._random.expovariate(rate))

    async def _read(self, kind: Kind, key: int) -> None:
        start = monotonic()
        try:
            group = self._group_of(key)
            value = await (self.load_row(key) if group is None else self.load_tagged(key, group))
            of, version = read_value(value)
        except Exception as error:
            self._note(kind, key, start, NOTHING, trouble=type(error).__name__)
        else:
            self._note(kind, key, start, version, of=of)

    async def _write(self, key: int) -> None:
        start = monotonic()
        version = await self._truth.write(key)
        self._note("write", key, start, version)
        group = self._group_of(key)
        start, trouble = monotonic(), ""
        try:
            if group is not None:
                await self._guard.invalidate_tag(f"group-{group}")
            elif self._replica:
                await self._guard.invalidate(self.load_row.key(key), version=version)
            else:
                await self.load_row.invalidate(key)
        except InvalidationPending:
            trouble = "pending"
        self._note("invalidate", key, start, version, trouble=trouble)
        for other in self._keys if group is not None else ():
            if other != key and self._group_of(other) == group:
                self._note("invalidate", other, start, NOTHING, trouble=trouble)

    def _group_of(self, key: int) -> int | None:
        return None if self._settings["lag"] else group_of(key)  # a tag has no versions

    def _some_keys(self, number: int) -> Iterator[int]:
        """Return keys of which few are asked for often, and many seldom."""
        return iter(self._random.choices(self._keys, cum_weights=self._weights, k=number))

    def _note(  # noqa: PLR0917  # the fields of a record, in their order
        self, kind: Kind, key: int, start: float, version: int, of: int | None = None, trouble: str = ""
    ) -> None:
        of = key if of is None else of
        self._log.add(Record(self._number, kind, key, start, monotonic(), version, of, trouble))


async def main(settings: dict[str, Any]) -> None:
    """Do what is ordered, one thing after the other."""
    guard = Guard(settings["url"], namespace=settings["namespace"], **settings["guard"])
    async with pool(settings["truth"]) as connections:
        truth = Truth(connections, settings["namespace"])
        traffic = Traffic(settings, guard, truth, Log(Path(settings["log"])))
        async with guard:
            say("ready")
            async for order in orders():
                await getattr(traffic, order["do"])()
                say(order["do"], stats=guard.stats().as_dict())


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
