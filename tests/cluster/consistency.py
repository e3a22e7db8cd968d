"""Several processes read and write through one store, with faults or without; afterwards their logs are judged.

    python tests/cluster/consistency.py --seconds 60 --processes 4 --faults pubsub,replies

starts servers of its own, prints what happened, and ends with 1 if anything did that must not (see `checker`).
The source of truth is a Postgres that has no faults; what is under test is everything between it and the callers.

Of each three keys two are invalidated by themselves, and the third by a tag that it shares.

With --lag it is the versions' turn: loaders read what is out of date, and yet the store must never hold it.

Faults:

pubsub
    Every second or so the server cuts all connections that listen to the bus.
replies
    Replies are lost after their request was executed, in silence or with an RST.
delays
    Connections are reset, and the server executes the last request up to a second later.
failover
    The primary of two replicas is killed, sentinels choose another, and the old one comes back as a replica; again
    and again. Its last writes are lost with it, until each process has repeated its invalidations.
"""

import argparse
import asyncio
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from statistics import quantiles
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the tests share
sys.path.insert(0, str(Path(__file__).parents[2]))  # demo_api is run from the repository

from checker import Rules, Verdict, check
from processes import Child, children, until
from proxying import LossyProxy
from records import NOTHING, Log, Record, group_of, merged
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table
from truth import Truth

from demo_api.servers import HOST, ValkeyServer, embedded_servers, valkey_server
from demo_api.topologies import SERVICE, Valkeys, follows, leads, valkey_sentinels

T = TypeVar("T")

FAULTS = ("pubsub", "replies", "delays", "failover")
WIRE_FAULTS = {"replies", "delays"}
SILENCE = 3.0  # seconds without a heartbeat until a process no longer trusts the bus
L1_CAP = 1.0  # seconds for which it then remembers
UNHEARD = 0.3  # seconds of a primary's last writes that its replicas never hear of
FAILOVER = 10.0  # seconds until another server has taken over, and recent invalidations have been repeated
BUS_DELAY = 1.0  # seconds that a message may take while all is well: the machine may be busy
REPLICATION = 1.0  # seconds for a copy of all rows, at most, on a busy machine
JITTER = 0.1
SAMPLING = 0.05  # seconds between two looks at the store
FAULT_SHARE = 0.01  # of all replies, or requests
START_SLACK = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does.

    Attributes:
        seconds: How long the processes read and write.
        processes: How many there are.
        faults: Which of `FAULTS` are at work.
        keys: Rows that are read and written, few often and many seldom.
        ttl: Life in each process's memory.
        l2_ttl: Life in the store.
        load_time: Seconds that a load goes on after it has read, at most.
        reads_per_second: Reads of each process.
        writes_per_second: Writes of each process, each followed by an invalidation.
        writers: Tasks that write, in each process.
        lag: Seconds by which loaders are behind, as if they read from a replica. Values and invalidations then have
            versions, and there are no tags.
        bound: Seconds that other processes may be behind; by default what the package states.
        seed: Of all that is random in the run but its timing.
    """

    seconds: float = 60.0
    processes: int = 4
    faults: tuple[str, ...] = ()
    keys: int = 100
    ttl: float = 30.0
    l2_ttl: float = 20.0
    load_time: float = 0.02
    reads_per_second: float = 1_500.0
    writes_per_second: float = 20.0
    writers: int = 4
    lag: float = 0.0
    bound: float | None = None
    seed: int = 0

    @property
    def limit(self) -> float:
        """Seconds that other processes may be behind."""
        if self.bound is not None:
            return self.bound
        limit = self._behind + BUS_DELAY
        if "failover" in self.faults:
            limit += FAILOVER
        if WIRE_FAULTS & {*self.faults}:  # what is cut is noticed at once, what hangs is not
            limit += SILENCE - BUS_DELAY
        return limit + (L1_CAP if self.faults else 0.0)

    @property
    def _behind(self) -> float:
        """Seconds by which what a loader returns may be behind."""
        return self.lag + REPLICATION if self.lag else 0.0

    @property
    def settling(self) -> float:
        """Seconds from the end of all writing and all faults until the last reads."""
        return self.limit + (SILENCE if WIRE_FAULTS & {*self.faults} else 0.0)

    @property
    def rules(self) -> Rules:
        """What the run promises: without faults also few loads."""
        behind = self._behind
        if self.faults or behind:
            store_bound = FAILOVER if "failover" in self.faults else 0.0
            return Rules(bound=self.limit, store_bound=store_bound, home_bound=behind, load_bound=behind)
        expiries = math.ceil((self.seconds + self.settling) / (self.l2_ttl * (1 - JITTER)))
        return Rules(bound=self.limit, spare_loads=expiries)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the servers of a run are.

    Attributes:
        redis: URL of the store.
        database: URL of the source of truth.
        admin: URL of the store, for somebody who may do everything there; not needed with *valkeys*.
        valkeys: The servers behind *redis*, if they are to be killed.
    """

    redis: str
    database: str
    admin: str = ""
    valkeys: Valkeys | None = None


@dataclass(slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        plan: Of the run.
        verdict: The checker's.
        took: Seconds of reading and writing.
        faults: How often each fault struck.
        stats: The sums of the processes' counters.
    """

    plan: Plan
    verdict: Verdict
    took: float
    faults: Counter[str] = field(default_factory=Counter)
    stats: Counter[str] = field(default_factory=Counter)

    @property
    def operations(self) -> int:
        """Everything that was logged but the looks at the store."""
        return self.verdict.counts.total() - self.verdict.counts["sample"]


class Run:
    """One run over servers that are there.

    Args:
        plan: What to do.
        places: Where.
        folder: Where the logs go.
    """

    def __init__(self, plan: Plan, places: Places, folder: Path) -> None:
        self._plan = plan
        self._places = places
        self._folder = folder
        self._namespace = uuid4().hex
        self._faults: Counter[str] = Counter()
        self._random = Random(plan.seed)
        self._is_over = False

    async def outcome(self) -> Outcome:
        """Start the processes, let them read and write, and judge."""
        plan = self._plan
        async with AsyncExitStack() as stack:
            admin = await stack.enter_async_context(self._admin())
            wire = await stack.enter_async_context(self._wire())
            await Truth.create(self._places.database, self._namespace, plan.keys)
            stack.push_async_callback(Truth.drop, self._places.database, self._namespace)
            workers = await stack.enter_async_context(children("traffic.py", self._settings(wire)))
            sampling = asyncio.create_task(self._sample(admin))
            took = await self._let_go(workers, admin, wire)
            await asyncio.sleep(plan.settling)
            said = await asyncio.gather(*(worker.ask("finish") for worker in workers))
            sampling.cancel()
            await asyncio.wait([sampling])
            for worker in workers:
                await worker.stop()
        verdict = check(merged(sorted(self._folder.glob("*.log"))), plan.rules)
        stats: Counter[str] = Counter()
        for each in said:
            stats.update({name: number for name, number in each["stats"].items() if isinstance(number, int)})
        return Outcome(plan, verdict, took, self._faults, stats)

    async def _let_go(self, workers: Sequence[Child], admin: Redis, wire: LossyProxy) -> float:
        """Let the processes read and write to the end, with faults until then; return the seconds it took."""
        disturbing = asyncio.gather(self._cut_the_bus(admin), self._kill_primaries())
        wire.loss = FAULT_SHARE if "replies" in self._plan.faults else 0.0
        wire.delay = FAULT_SHARE if "delays" in self._plan.faults else 0.0
        start = monotonic()
        await asyncio.gather(*(worker.tell("go") for worker in workers))
        patience = self._plan.seconds + START_SLACK
        await asyncio.gather(*(worker.hears("go", patience) for worker in workers))
        took = monotonic() - start
        self._is_over = True
        await disturbing
        wire.loss = wire.delay = 0.0
        self._faults.update(replies=wire.losses, delays=wire.delays)
        return took

    async def _cut_the_bus(self, admin: Redis) -> None:
        while "pubsub" in self._plan.faults and not self._is_over:
            await asyncio.sleep(0.5 + self._random.random())
            with suppress(RedisError, OSError):  # while there is no primary
                self._faults["pubsub"] += int(await admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub") or 0)

    async def _kill_primaries(self) -> None:
        """Kill whoever is the primary, let it come back as a replica, and begin again."""
        while self._places.valkeys is not None and not self._is_over:
            await asyncio.sleep(2 + 2 * self._random.random())
            everybody = [*self._places.valkeys.primaries, *self._places.valkeys.replicas]
            killed = next(server for server in everybody if leads(server))
            others = [server for server in everybody if server is not killed]
            for other in others:
                other.freeze()
            await asyncio.sleep(UNHEARD)
            await asyncio.to_thread(killed.kill)
            for other in others:
                other.thaw()
            self._faults["failover"] += 1
            await until(partial(in_thread, any_leads, others), "another primary")
            await asyncio.sleep(2 + 2 * self._random.random())
            await asyncio.to_thread(killed.revive)
            await until(partial(in_thread, follows, killed), "the old primary to be a replica")

    async def _sample(self, admin: Redis) -> None:
        """Look at everything in the store, again and again, past all that is under test."""
        log = Log(self._folder / "samples.log")
        # A tag leaves its values in the store: there they do no harm.
        alone = [key for key in range(self._plan.keys) if self._plan.lag or group_of(key) is None]
        names = [f"sg1:{{{self._namespace}:row-{key}}}:v" for key in alone]
        try:
            while True:
                start = monotonic()
                with suppress(RedisError, OSError):
                    async with admin.pipeline(transaction=True) as both:
                        both.execute_command("ROLE")
                        both.mget(names)
                        role, envelopes = await both.execute()
                    end = monotonic()
                    for key, envelope in zip(alone, envelopes, strict=True) if role[0] == b"master" else ():
                        log.add(sample(key, envelope, start, end))
                    if role[0] != b"master":  # demoted, and connected all the same: look for the next
                        await admin.connection_pool.disconnect()
                await asyncio.sleep(SAMPLING)
        finally:
            log.flush()

    def _admin(self) -> Redis:
        """Return a client of whichever server is the primary."""
        if self._places.valkeys is None:
            return Redis.from_url(self._places.admin)
        sentinels = Sentinel([(HOST, sentinel.port) for sentinel in self._places.valkeys.sentinels])
        return sentinels.master_for(SERVICE, retry=Retry(NoBackoff(), 0))

    def _wire(self) -> LossyProxy:  # not used, unless there are faults
        port = None if self._places.valkeys is not None else urlsplit(self._places.redis).port
        return LossyProxy(port or 6379, f"wire {self._plan.seed}")

    def _settings(self, wire: LossyProxy) -> list[dict[str, Any]]:
        faulty, patient = WIRE_FAULTS & {*self._plan.faults}, {"deadline": 3, "connect_timeout": 3}
        shared = {
            **asdict(self._plan),
            "url": wire.url if faulty else self._places.redis,
            # Patient where nothing is lost: a busy machine is no fault.
            "guard": {} if faulty or self._places.valkeys is not None else patient,
            "truth": self._places.database,
            "namespace": self._namespace,
        }
        return [
            {**shared, "number": number, "log": str(self._folder / f"{number}.log")}
            for number in range(1, self._plan.processes + 1)
        ]


def any_leads(servers: Sequence[ValkeyServer]) -> bool:
    """Return whether one of *servers* says that it is a primary."""
    return any(map(leads, servers))


async def in_thread(check: Callable[[T], bool], subject: T) -> bool:
    """Return what *check*, which blocks, says of *subject*."""
    return await asyncio.to_thread(check, subject)


def sample(key: int, envelope: bytes | None, start: float, end: float) -> Record:
    """Return a record of what the store held."""
    found = re.search(rb"<(\d+)@(\d+)>$", envelope or b"")
    of, version = (int(found[1]), int(found[2])) if found else (key, NOTHING)
    return Record(0, "sample", key, start, end, version, of)


async def run(plan: Plan, places: Places) -> Outcome:
    """Run *plan* over servers that are there."""
    with TemporaryDirectory(prefix="stampede-guard-") as folder:
        return await Run(plan, places, Path(folder)).outcome()


def table(outcome: Outcome) -> Table:
    """Return the figures of a run."""
    plan, verdict, stats = outcome.plan, outcome.verdict, outcome.stats
    faults = ", ".join(plan.faults) or "no faults"
    lag = f", replicas {plan.lag:g} s behind" if plan.lag else ""
    shown = Table(title=f"{plan.processes} processes, {plan.keys} keys, {outcome.took:.1f} s, {faults}{lag}")
    shown.add_column("figure")
    shown.add_column("value", justify="right")
    invalidations = verdict.counts["invalidate"]
    loads = verdict.loads.total()
    rows = {
        "operations": f"{outcome.operations:,}",
        "operations per second": f"{outcome.operations / outcome.took:,.0f}",
        "reads": f"{verdict.counts['read'] + verdict.counts['final']:,}",
        "writes": f"{verdict.counts['write']:,}",
        "invalidations, of which pending": f"{invalidations:,}, {verdict.pending:,}",
        "loads": f"{loads:,}",
        "loads after a key's first, per invalidation": f"{(loads - len(verdict.loads)) / (invalidations or 1):.2f}",
        "answers of memory, joins, answers of the store": ", ".join(
            f"{stats[name]:,}" for name in ("l1_hits", "joins", "l2_hits")
        ),
        "the store did not answer, was not asked": f"{stats['l2_errors']:,}, {stats['l2_skips']:,}",
        "time of a read": spread(verdict.waits),
        "reads behind an acknowledged invalidation": staleness(verdict.stale),
        "bound of that": f"{plan.limit:g} s",
        "looks at the store": f"{verdict.counts['sample']:,}",
        "looks that found an old version": staleness(verdict.store_stale),
        "reads that went back": f"{verdict.backwards:,}",
        **{f"fault: {name}": f"{times:,}" for name, times in outcome.faults.items() if times},
        **{f"VIOLATION: {rule}": f"{times:,}" for rule, times in verdict.found.items()},
        "violations": f"{verdict.found.total():,}",
    }
    for row in rows.items():
        shown.add_row(*row)
    return shown


def staleness(seconds: list[float]) -> str:
    """Return how many were stale and by how much, in words."""
    return f"{len(seconds):,}: {spread(seconds)}" if seconds else "none"


def spread(seconds: list[float]) -> str:
    """Return two figures of at least one duration."""
    p99 = quantiles(seconds, n=100, method="inclusive")[98] if len(seconds) > 1 else seconds[0]
    return f"p99 {p99 * 1000:,.1f} ms, max {max(seconds) * 1000:,.1f} ms"


def planned() -> Plan:
    """Return what the command line asks for."""
    default = Plan()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default="", help=f"some of {','.join(FAULTS)}")
    for name, kind in (("seconds", float), ("processes", int), ("keys", int), ("seed", int), ("ttl", float)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(default, name))
    for name in ("l2_ttl", "lag", "load_time", "reads_per_second", "writes_per_second", "bound"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(default, name))
    given = vars(parser.parse_args())
    faults = tuple(filter(None, given.pop("faults").split(",")))
    if not {*faults} <= {*FAULTS}:
        parser.error(f"--faults: some of {','.join(FAULTS)}")
    if "failover" in faults and WIRE_FAULTS & {*faults}:
        parser.error("--faults: failover is not to be had through a proxy, which replies and delays need")
    return Plan(faults=faults, **given)


def main() -> int:
    """Run, print, and return 1 if something happened that must not."""
    plan, console = planned(), Console()
    with ExitStack() as servers:
        valkeys = servers.enter_context(valkey_sentinels()) if "failover" in plan.faults else None
        redis = servers.enter_context(valkey_server()) if valkeys is None else valkeys
        database = servers.enter_context(embedded_servers(redis=False)).postgres
        outcome = asyncio.run(run(plan, Places(redis.url, database, admin=redis.url, valkeys=valkeys)))
    console.print(table(outcome))
    for violation in outcome.verdict.shown:
        console.print(violation, highlight=False, soft_wrap=True)
    return 1 if outcome.verdict.found else 0


if __name__ == "__main__":
    sys.exit(main())
