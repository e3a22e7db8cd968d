"""What guards tell each other, and what they make of silence, gaps and restarts."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from inside import backplane_of, echoed, instance_of, is_up, tier_of, untyped
from loaders import Kitchen, returning
from observing import ChannelListener, caught_up, until_gone
from proxying import CountingProxy
from redis.asyncio import Redis
from waiting import until, until_there

from demo_api.servers import ValkeyServer
from stampede_guard import Guard, InvalidationPending, _loops, coalesce
from stampede_guard._bus import backplane
from stampede_guard.stores import Subscription
from stampede_guard.stores.redis import RedisStore
from stampede_guard.testing import Gate, ManualClock

MakeGuard = Callable[..., Guard]
Logged = Callable[[], list[str]]
Invalidate = Callable[..., Awaitable[None]]

OP = "menu-7"
TAG = "menus"
SILENT = "the bus connection is lost ({}); until it is back, L1 keeps values for a second at most"
HEARD = "the bus connection is back"


async def by_op(guard: Guard, **options: Any) -> None:
    """Invalidate the op."""
    await guard.invalidate(OP, **options)


async def by_tag(guard: Guard, **options: Any) -> None:
    """Invalidate its tag."""
    await guard.invalidate_tag(TAG, **options)


async def by_clearing(guard: Guard, **options: Any) -> None:
    """Invalidate everything."""
    await guard.clear(**options)


WAYS = pytest.mark.parametrize("invalidate", [by_op, by_tag, by_clearing])


class Instrumented(RedisStore):
    """A store over a real server whose bus can be reached, and whose invalidations can be made to fail.

    Attributes:
        connections: Those that the bus was heard on, the present one last.
        fails: Whether invalidations fail before they are sent.
        on_invalidated: Called once, when the server has carried out an invalidation and before that is known.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, deadline=5, connect_timeout=5)
        self.connections: list[Any] = []
        self.fails = False
        self.on_invalidated: Callable[[], Awaitable[object]] | None = None

    @asynccontextmanager
    async def listen(self) -> AsyncGenerator[Subscription]:
        """Remember the connection."""
        async with super().listen() as subscription:
            self.connections.append(untyped(subscription)._connection)
            yield subscription

    async def invalidate(self, *args: Any, **options: Any) -> None:
        """Fail, if asked to."""
        self._fail()
        await super().invalidate(*args, **options)
        if self.on_invalidated is not None:
            on_invalidated, self.on_invalidated = self.on_invalidated, None
            await on_invalidated()

    async def invalidate_tag(self, *args: Any, **options: Any) -> None:
        """Fail, if asked to."""
        self._fail()
        await super().invalidate_tag(*args, **options)

    def _fail(self) -> None:
        if self.fails:
            raise ConnectionError


@pytest.fixture
def channel(namespace: str) -> str:
    """Return the bus."""
    return f"sg1:{namespace}:bus"


@pytest.fixture
def store(redis_url: str) -> Instrumented:
    """Return a store for one guard."""
    return Instrumented(redis_url)


@pytest.fixture
def no_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody who has lost the bus come back to it."""
    monkeypatch.setattr(backplane, "_PAUSES", (600.0, 600.0))


@pytest.fixture
def fast_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second pass in a twentieth."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 0.05)
    monkeypatch.setattr(backplane, "_TRUST", 0.15)


async def ask(guard: Guard, answer: str, op: str = OP, **options: Any) -> str:
    """Call for what has a tag, is remembered by both tiers, and would be loaded as *answer*."""
    options = {"ttl": 60, "l2_ttl": 60, "returns": str, "tags": (TAG,), **options}
    return await guard.fetch(op, returning(answer), **options)


def remembers(guard: Guard, op: str = OP) -> bool:
    """Whether *guard* has a fresh entry, trusted or not."""
    return guard.peek(op) is not None


async def cut(admin: Redis, *guards: Guard) -> None:
    """Close every subscriber's connection, and wait until *guards* have noticed."""
    await admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    await until(lambda: not any(is_up(guard) for guard in guards), "the loss to be noticed")


@WAYS
@pytest.mark.parametrize("options", [{}, {"l2_ttl": None}], ids=["both tiers", "memory alone"])
async def test_invalidation_reaches_every_memory(
    invalidate: Invalidate, options: dict[str, Any], pair: tuple[Guard, Guard]
) -> None:
    """What one guard invalidates, others forget, be it stored or not, and nothing else."""
    first, second = pair
    for guard in pair:
        await ask(guard, "old", **options)
        await ask(guard, "other", "menu-8", tags=("desserts",), **options)

    await invalidate(first)

    assert not remembers(first)
    await until(lambda: not remembers(second), "the other to be told")
    others = [remembers(guard, "menu-8") for guard in pair]
    assert [invalidate is not by_clearing] * 2 == others
    assert ["new", "new"] == [await ask(guard, "new", **options) for guard in pair]


@pytest.mark.usefixtures("no_echoes")
async def test_what_is_said(make_guard: MakeGuard, admin: Redis, channel: str) -> None:
    """An invalidation is one message with its sender; loads that nobody waits for say nothing."""
    async with make_guard() as guard, ChannelListener(admin, channel) as listener:
        me = instance_of(guard).encode()

        @coalesce(OP, guard=guard, l2_ttl=60)
        async def load() -> str:
            return "soup"

        await load()
        assert await listener.said() == []
        await load.invalidate()
        await guard.invalidate(OP, version=7)
        assert await listener.said() == [b"i" + me + b"menu-7"] * 2
        await guard.invalidate_tag(TAG)
        assert await listener.said() == [b"t" + me + b"menus"]
        await guard.clear()
        assert await listener.said() == [b"c" + me]
        await load.refresh()
        assert await listener.said() == [b"i" + me + b"menu-7"]


@WAYS
@pytest.mark.usefixtures("no_echoes")
async def test_own_messages_are_ignored(
    invalidate: Invalidate, make_guard: MakeGuard, admin: Redis, channel: str
) -> None:
    """The echo of one's own invalidation, however late, does not drop what was loaded since."""
    async with make_guard() as guard, ChannelListener(admin, channel) as listener:
        await invalidate(guard)
        (echo,) = await listener.said()
        await ask(guard, "new")

        await admin.publish(channel, echo)
        await caught_up(guard, admin)

        assert remembers(guard)


@pytest.mark.usefixtures("no_echoes")
async def test_many_messages_are_all_heard(make_guard: MakeGuard, admin: Redis, channel: str) -> None:
    """However fast they come, none is passed over."""
    async with make_guard() as guard:
        for number in range(600):
            await ask(guard, "old", f"menu-{number}", l2_ttl=None)

        async with admin.pipeline(transaction=False) as pipeline:
            for number in range(600):
                pipeline.publish(channel, b"i" + b"s" * 22 + f"menu-{number}".encode())
            await pipeline.execute()
        await caught_up(guard, admin)

        assert not any(remembers(guard, f"menu-{number}") for number in range(600))


async def test_gap_flushes(pair: tuple[Guard, Guard], admin: Redis, logged: Logged) -> None:
    """When the bus was lost for a moment, anything may have been said: all is forgotten; then trust is back."""
    first, second = pair
    await ask(first, "old")
    await ask(second, "old")
    backplanes = [backplane_of(guard) for guard in pair]

    await cut(admin, *pair)
    assert [False, False] == [remembers(guard) for guard in pair]
    await until(lambda: all(backplane._is_up for backplane in backplanes), "the bus to be back")

    assert await ask(first, "not asked for") == "old"
    await second.invalidate(OP)
    await until(lambda: not remembers(first), "the first to be told")
    assert sorted([SILENT.format("ConnectionError"), HEARD] * 2) == sorted(logged())


@pytest.mark.parametrize("how", ["gap", "silence"])
@pytest.mark.usefixtures("no_echoes")
async def test_load_across_a_gap_is_not_remembered(how: str, make_guard: MakeGuard, admin: Redis) -> None:
    """A load that began before a gap, or before a long silence, may have been overtaken; an echo does not vouch."""
    clock, kitchen = ManualClock(), Kitchen(is_open=False)
    async with make_guard(clock=clock) as guard:
        call = asyncio.create_task(guard.fetch(OP, kitchen.load, ttl=60, returns=str))
        await kitchen.gate.arrivals(1)
        if how == "gap":
            await cut(admin, guard)
        else:
            clock.advance(3)
            await echoed(guard)
        kitchen.gate.open()

        assert await call == "soup 1"
        assert not remembers(guard)


async def test_load_that_began_in_a_gap_is_not_remembered(valkey: ValkeyServer) -> None:
    """A load that began while nobody listened may have been overtaken before somebody did."""
    gate = Gate()

    async def load() -> str:
        await gate.passage()
        return "old"

    async with Guard(valkey.url) as guard:
        valkey.kill()
        await until(lambda: not is_up(guard), "the loss to be noticed")
        call = asyncio.create_task(guard.fetch(OP, load, ttl=60, returns=str))
        await gate.arrivals(1)
        valkey.revive()
        await until(lambda: is_up(guard), "the bus to be back")
        gate.open()

        assert await call == "old"
        assert not remembers(guard)


@pytest.mark.usefixtures("no_echoes")
async def test_second_confirmation_flushes(store: Instrumented, namespace: str, channel: str, logged: Logged) -> None:
    """A confirmation that nobody asked for means that the subscription was made anew, behind one's back."""
    async with Guard(lambda: store, namespace=namespace) as guard:
        await ask(guard, "old")
        (connection,) = store.connections

        await connection.send_packed_command(connection.pack_command("SUBSCRIBE", channel))

        await until(lambda: len(store.connections) == 2 and is_up(guard), "a new subscription")
        assert not remembers(guard)
    assert [SILENT.format("UnexpectedReply"), HEARD] == logged()


@pytest.mark.parametrize(
    "message", [b"", b"x" + b"s" * 22, b"i", b"i" + b"s" * 21, b"t\xff" + b"s" * 22, b"c" + b"s" * 21]
)
@pytest.mark.usefixtures("no_echoes")
async def test_unknown_message_flushes(message: bytes, make_guard: MakeGuard, admin: Redis, channel: str) -> None:
    """What a newer version says may be about anything; it is forgotten, and trust goes on."""
    async with make_guard() as guard:
        await ask(guard, "old")

        await admin.publish(channel, message)
        await caught_up(guard, admin)

        assert not remembers(guard)
        await ask(guard, "old")
        assert remembers(guard)
        assert is_up(guard)


@pytest.mark.parametrize("message", [b"w", b"wmenu-7", b"i" + b"s" * 22 + b"menu-8"])
@pytest.mark.usefixtures("no_echoes")
async def test_known_message_about_something_else_does_not_flush(
    message: bytes, make_guard: MakeGuard, admin: Redis, channel: str
) -> None:
    """Wake-ups and others' ops leave what is remembered alone."""
    async with make_guard() as guard:
        await ask(guard, "old")

        await admin.publish(channel, message)
        await caught_up(guard, admin)

        assert remembers(guard)


@pytest.mark.usefixtures("no_echoes")
async def test_silence_flushes(make_guard: MakeGuard) -> None:
    """What was remembered is believed for three seconds after the last echo, and no longer."""
    clock = ManualClock()
    async with make_guard(clock=clock) as guard:
        await ask(guard, "old")
        clock.advance(2.9)
        assert remembers(guard)
        await echoed(guard)
        clock.advance(2.9)
        assert remembers(guard)
        clock.advance(0.1)
        assert not remembers(guard)

        await ask(guard, "new")  # from now on for a second at most
        clock.advance(0.9)
        assert remembers(guard)
        clock.advance(0.1)
        assert not remembers(guard)

        await echoed(guard)
        await ask(guard, "new")
        clock.advance(2.9)
        assert remembers(guard)


@pytest.mark.usefixtures("no_return", "no_echoes")
async def test_without_the_bus_memory_lasts_a_second(make_guard: MakeGuard, admin: Redis) -> None:
    """While nobody would say that an entry is invalid, it is kept for a second at most, though the store answers."""
    clock = ManualClock()
    async with make_guard(clock=clock) as guard:
        await cut(admin, guard)

        await ask(guard, "old")
        clock.advance(0.99)
        assert remembers(guard)
        clock.advance(0.01)
        assert not remembers(guard)
        assert guard.stats().l2_errors == 0


@pytest.mark.usefixtures("fast_beats")
async def test_beats_are_heard_by_their_own_guard_alone(
    make_guard: MakeGuard, admin: Redis, channel: str, logged: Logged
) -> None:
    """Each guard hears its own echo about once a second, trusts the bus by it, and tells others nothing."""
    async with make_guard() as guard, make_guard() as other, ChannelListener(admin, channel) as listener:
        seconds = seconds_of(guard)
        await ask(guard, "old")
        await ask(other, "old")
        await until(lambda: len(seconds) == 12, "twelve seconds")

        assert [] == await listener.said()
        assert all(each._states.running().memory.trusted_until > each._clock() for each in (guard, other))
        assert all(remembers(each) for each in (guard, other))
    assert logged() == []


@pytest.mark.usefixtures("no_echoes")
async def test_late_bus_is_not_trusted(redis_url: str, namespace: str, admin: Redis, channel: str) -> None:
    """While a listener hears others' words, and its own echo late, memory is not believed for longer than that."""
    clock = ManualClock()
    store = Instrumented(redis_url)
    async with Guard(lambda: store, namespace=namespace, clock=clock) as guard:
        await ask(guard, "old")
        await backplane_of(guard)._send_echo()
        clock.advance(10)  # until it is heard: as if it had been on its way for so long
        await admin.publish(channel, b"i" + b"s" * 22 + b"menu-8")
        await caught_up(guard, admin)

        assert not remembers(guard)


async def test_databases_have_a_bus_each(valkey: ValkeyServer) -> None:
    """What is invalidated in one database is none of the business of a guard over another one, nor are loads."""
    url = valkey.url.removesuffix("/0")
    async with (
        Redis(host="127.0.0.1", port=valkey.port) as admin,
        Redis(host="127.0.0.1", port=valkey.port, db=1) as client,
        Guard(f"{url}/0") as zero,
        Guard(f"{url}/1") as one,
        Guard(client) as other,
    ):
        channels = {channel for channel in await admin.pubsub_channels() if len(channel) < 22}
        for guard in (zero, one, other):
            await ask(guard, "old")
        await one.invalidate(OP)
        await until(lambda: not remembers(other), "the other of the same database to be told")
        await caught_up(zero, admin)

        assert remembers(zero)
        assert {b"sg1:default:bus", b"sg1:default:bus:1"} == channels


def seconds_of(guard: Guard) -> list[object]:
    """Return the list that grows by one with each second of the upkeep of *guard*."""
    tier = tier_of(guard)
    repeat_invalidations = tier.repeat_invalidations
    seconds: list[object] = []

    async def note(*args: Any) -> None:
        seconds.append(args)
        await repeat_invalidations(*args)

    tier.repeat_invalidations = note
    return seconds


@pytest.mark.usefixtures("fast_beats")
async def test_connection_that_went_dead_is_replaced(
    redis_url: str, namespace: str, admin: Redis, logged: Logged
) -> None:
    """A connection on which nothing comes any more, not even one's own voice, is given up for a new one."""
    proxy = CountingProxy(urlsplit(redis_url).port or 6379)
    async with proxy, Guard(proxy.url, namespace=namespace, deadline=0.05, connect_timeout=5) as guard:
        await ask(guard, "old")

        proxy.silence()
        await until(lambda: SILENT.format("silence") in logged(), "the silence to be noticed")
        assert not remembers(guard)
        await until(lambda: HEARD in logged(), "the bus to be back")

        await caught_up(guard, admin)


async def test_guard_opens_without_the_bus_and_finds_it_later(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is not there is no reason not to start; when it comes, so do trust and the store."""
    monkeypatch.setattr(_loops, "_BUS_TIMEOUT", 0.1)
    server = ValkeyServer()
    try:
        async with Guard(server.url) as guard:
            assert not is_up(guard)
            assert await ask(guard, "old") == "old"
            server.start()
            await until(lambda: is_up(guard), "the bus")
            await until(lambda: guard._states.running().memory.trusted_until < float("inf"), "trust")
            assert HEARD in logged()
    finally:
        server.stop()


async def test_server_that_does_not_allow_to_listen(valkey: ValkeyServer, logged: Logged) -> None:
    """Without the permission to subscribe, leases work all the same, and memory lasts for a second at most."""
    async with Redis.from_url(valkey.url) as admin:
        await admin.acl_setuser(
            "deaf", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", "-subscribe"]
        )
        clock = ManualClock()
        url = valkey.url.replace("//", "//deaf:secret@")
        async with Guard(url, clock=clock) as first, Guard(url) as second:
            await ask(first, "old")
            assert await ask(second, "not asked for") == "old"
            clock.advance(1)
            assert not remembers(first)
    assert SILENT.format("NoPermissionError") in logged()


@pytest.mark.usefixtures("fast_beats")
async def test_server_that_does_not_allow_to_publish(valkey: ValkeyServer, logged: Logged) -> None:
    """Without channels, which is what users have by default, one load still serves all; invalidations are reported."""
    gate = Gate()
    loads = 0

    async def load() -> str:
        nonlocal loads
        loads += 1
        await gate.passage()
        return "old"

    async with Redis.from_url(valkey.url) as admin:
        await admin.acl_setuser("mute", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all"])
        url = valkey.url.replace("//", "//mute:secret@")
        async with Guard(url) as first, Guard(url) as second:
            calls = [asyncio.create_task(guard.fetch(OP, load, l2_ttl=60, returns=str)) for guard in (first, second)]
            await until(lambda: first.stats().l2_waits + second.stats().l2_waits, "one to wait")
            gate.open()
            assert ["old", "old"] == [await call for call in calls]
            assert loads == 1

            with pytest.raises(InvalidationPending):
                await first.invalidate(OP)
            assert not await admin.exists(f"sg1:{{default:{OP}}}:v")
            await until(lambda: any(line.startswith("Redis refuses to publish") for line in logged()), "a beat")


async def test_server_that_does_not_say_who_it_is(valkey: ValkeyServer) -> None:
    """Without INFO, each gap counts as a restart: invalidations are said again."""
    async with Redis.from_url(valkey.url) as admin:
        channels = ["*"]
        await admin.acl_setuser(
            "shy", enabled=True, passwords=["+secret"], keys=["*"], channels=channels, commands=["+@all", "-info"]
        )
        async with Guard(valkey.url.replace("//", "//shy:secret@")) as guard:
            await guard.invalidate(OP)
            await admin.set(f"sg1:{{default:{OP}}}:v", "left over")
            await cut(admin, guard)
            await until_gone(admin, f"sg1:{{default:{OP}}}:v")


async def test_gap_alone_repeats_nothing(make_guard: MakeGuard, admin: Redis, key: str) -> None:
    """When the same server is heard again, it has what it confirmed, and nobody says it again."""
    async with make_guard() as guard:
        await guard.invalidate(OP)
        await admin.set(f"{key}:v", "not touched")
        await cut(admin, guard)
        await until(lambda: is_up(guard), "the bus to be back")
        await tier_of(guard).repeat_invalidations()

        assert await admin.exists(f"{key}:v")
        assert tier_of(guard).pending.all() == []


@WAYS
async def test_server_that_restarts_with_old_files_is_told_again(invalidate: Invalidate, valkey: ValkeyServer) -> None:
    """What a server confirmed and then lost is repeated; nobody gets the value that came back, in either guard."""
    async with Guard(valkey.url) as first, Guard(valkey.url) as second, Redis.from_url(valkey.url) as admin:
        await ask(first, "old")
        await admin.save()
        await invalidate(first)
        valkey.kill()
        await until(lambda: not is_up(first) and not is_up(second), "both to notice")
        valkey.revive()
        await until(lambda: is_up(first) and is_up(second), "the bus to be back")

        assert await ask(first, "new") == "new"
        await until_there(lambda: _answers(second, "new"), "the other to be told")
        assert remembers(first)


async def _answers(guard: Guard, answer: str) -> bool:
    return await ask(guard, answer) == answer


@pytest.mark.usefixtures("no_echoes")
async def test_confirmation_of_a_server_that_is_replaced_does_not_count(
    store: Instrumented, namespace: str, admin: Redis, key: str
) -> None:
    """While the answer was under way, another server took over, which may not have heard of it: it is told, too."""
    async with Guard(lambda: store, namespace=namespace) as guard:

        async def fail_over() -> None:
            await admin.set(f"{key}:v", "left over")
            store._restarts += 1

        store.on_invalidated = fail_over

        await guard.invalidate(OP)

        assert not await admin.exists(f"{key}:v")
        assert tier_of(guard).pending.all() == []


@WAYS
@pytest.mark.usefixtures("no_echoes")
async def test_unconfirmed_invalidation_is_reported(
    invalidate: Invalidate, store: Instrumented, make_guard: MakeGuard, namespace: str
) -> None:
    """The caller learns that others may see the old value; in this process it is gone, in both tiers."""
    async with Guard(lambda: store, namespace=namespace) as guard, make_guard() as other:
        await ask(other, "old")
        assert await ask(guard, "not asked for") == "old"
        store.fails = True

        with pytest.raises(InvalidationPending, match="not confirmed by the store"):
            await invalidate(guard)

        assert not remembers(guard)
        assert ["new", "new"] == [await ask(guard, "new", ttl=None), await ask(guard, "new", ttl=None)]
        assert await ask(other, "not asked for", ttl=None) == "old"
        assert guard.stats().l2_errors >= 1


@WAYS
@pytest.mark.usefixtures("no_echoes")
async def test_nothing_is_read_or_stored_meanwhile(
    invalidate: Invalidate, store: Instrumented, namespace: str, admin: Redis, key: str
) -> None:
    """Until it is confirmed, the store is neither asked for what it concerns nor given any; loads are short-lived."""
    clock = ManualClock()
    async with Guard(lambda: store, namespace=namespace, clock=clock) as guard:
        store.fails = True
        with pytest.raises(InvalidationPending):
            await invalidate(guard)
        await admin.set(f"{key}:v", "left over")

        assert await ask(guard, "new") == "new"
        assert await admin.get(f"{key}:v") == b"left over"
        assert not await admin.exists(f"{key}:l")
        clock.advance(1)
        assert not remembers(guard)

        if invalidate is not by_clearing:
            await ask(guard, "other", "menu-8", tags=())
            assert await admin.exists(f"{key}:v".replace("-7", "-8"))


@WAYS
async def test_next_call_settles_what_is_pending(
    invalidate: Invalidate, store: Instrumented, make_guard: MakeGuard, namespace: str
) -> None:
    """When the store is back, the first call that is concerned has the invalidation confirmed, then goes on."""
    async with Guard(lambda: store, namespace=namespace) as guard, make_guard() as other:
        await ask(other, "old")
        store.fails = True
        with pytest.raises(InvalidationPending):
            await invalidate(guard)
        store.fails = False

        assert await ask(guard, "new") == "new"
        assert tier_of(guard).pending.all() == []
        await until(lambda: not remembers(other), "the other to be told")
        assert await ask(other, "not asked for") == "new"


@WAYS
@pytest.mark.usefixtures("fast_beats")
async def test_pending_invalidation_is_tried_again_of_itself(invalidate: Invalidate, valkey: ValkeyServer) -> None:
    """With nobody calling, an invalidation that a frozen server did not confirm is repeated until it does."""
    async with Guard(valkey.url, deadline=0.05) as guard, Guard(valkey.url, deadline=5) as other:
        await ask(other, "old")
        valkey.freeze()
        with pytest.raises(InvalidationPending):
            await invalidate(guard)
        assert tier_of(guard).pending.all() != []
        valkey.thaw()

        await until(lambda: not tier_of(guard).pending.all(), "the confirmation")
        await until(lambda: not remembers(other), "the other to be told")
        assert await ask(other, "new") == "new"


@WAYS
@pytest.mark.usefixtures("no_echoes")
async def test_without_waiting_nothing_is_raised(
    invalidate: Invalidate, store: Instrumented, namespace: str, admin: Redis, key: str
) -> None:
    """With `wait=False` the local part is done at once, and the rest without the caller, be it confirmed or not."""
    async with Guard(lambda: store, namespace=namespace) as guard:
        await ask(guard, "old")
        store.fails = True
        await invalidate(guard, wait=False)
        assert not remembers(guard)
        assert len(tier_of(guard).pending.all()) == 1
        await until(lambda: guard.stats().in_flight == 0, "the attempt")
        assert await ask(guard, "new", ttl=None) == "new"

        store.fails = False
        await invalidate(guard, wait=False)
        await until(lambda: not tier_of(guard).pending.all(), "the confirmation")
        assert await ask(guard, "newer") == "newer"


@pytest.mark.usefixtures("no_echoes")
async def test_cancelled_invalidation_goes_on(make_guard: MakeGuard, namespace: str, admin: Redis, key: str) -> None:
    """Whoever cancels the call has invalidated all the same."""
    async with make_guard() as guard:
        await ask(guard, "old")
        call = asyncio.create_task(guard.invalidate(OP))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])

        await until_gone(admin, f"{key}:v")
        assert call.cancelled()


@pytest.mark.usefixtures("no_echoes")
async def test_pending_version_is_not_forgotten(store: Instrumented, namespace: str, admin: Redis, key: str) -> None:
    """Of several invalidations that wait for the store, the highest version is the one that counts."""
    async with Guard(lambda: store, namespace=namespace) as guard:
        store.fails = True
        for version in (7, 3, None):
            await guard.invalidate(OP, version=version, wait=False)
        store.fails = False
        await tier_of(guard).repeat_invalidations()

    assert await admin.get(f"{key}:g") == b"7"
