"""Flights that ask a real server before they have a task."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from inside import tier_of
from observing import load_scripts
from proxying import CountingProxy
from redis.asyncio import Redis
from waiting import until

from stampede_guard import Guard, LoadCancelled
from stampede_guard._operations import operation
from stampede_guard.stores import AcquireRequest, AcquireResult, Refused
from stampede_guard.stores._redis.requests import ValueRequest
from stampede_guard.stores.redis import RedisStore

MakeGuard = Callable[..., Guard]

OP = "menu-7"
LIFE: dict[str, Any] = {"l2_ttl": 60, "returns": str}


@pytest.fixture(autouse=True)
def _long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no lease end by itself before the test is over."""
    monkeypatch.setattr(operation, "_LEASES", (60.0, 60.0))


@pytest.fixture
async def guard(make_guard: MakeGuard, admin: Redis) -> AsyncIterator[Guard]:
    """Return an open guard over a server that knows the scripts."""
    await load_scripts(admin)
    async with make_guard() as guard:
        yield guard


@pytest.fixture
async def store(redis_url: str, namespace: str, admin: Redis) -> AsyncIterator[RedisStore]:
    """Return a store of the test's own, over a server that knows the scripts."""
    await load_scripts(admin)
    store = RedisStore(redis_url, deadline=5, connect_timeout=5)
    store.channel = f"sg1:{namespace}:bus"
    yield store
    await store.aclose()


class Kitchen:
    """Loads and counts."""

    def __init__(self) -> None:
        self.loads = 0

    async def load(self) -> str:
        """Load."""
        self.loads += 1
        return "soup"


def counted(guard: Guard, method: str) -> list[Any]:
    """Return the list to which what each call of the store's *method* returned is added."""
    store: Any = tier_of(guard).store
    call, made = getattr(store, method), []

    def counting(*args: Any) -> Any:
        made.append(call(*args))
        return made[-1]

    setattr(store, method, counting)
    return made


def acquisitions(guard: Guard) -> tuple[list[Any], list[Any]]:
    """Return two lists to which each acquisition is added: those outside, and those inside of a flight's task."""
    store: Any = tier_of(guard).store
    acquire, without, within = store.acquire, [], []

    def counting(request: AcquireRequest) -> Any:
        task = asyncio.current_task()
        assert task is not None
        made = within if task.get_name().startswith("load") else without
        made.append(acquire(request))
        return made[-1]

    store.acquire = counting
    return without, within


def is_at_rest(guard: Guard) -> bool:
    """Whether *guard* has nothing left to do."""
    tier = tier_of(guard)
    return not (guard._states.running().board.up or tier.upkeep or tier.access._in_use)


async def test_hit_is_read_without_a_task(guard: Guard) -> None:
    """A value that is there costs a question that is begun, and nothing else."""
    await guard.fetch(OP, Kitchen().load, **LIFE)
    begun, asked = acquisitions(guard)
    names: set[str] = set()

    def watch() -> None:
        names.update(task.get_name() for task in asyncio.all_tasks())
        if flights:
            asyncio.get_running_loop().call_soon(watch)

    flights = guard._states.running().board.up
    asyncio.get_running_loop().call_soon(watch)
    answer = await guard.fetch(OP, Kitchen().load, **LIFE)

    assert ("soup", 1, []) == (answer, len(begun), asked)
    assert [] == [name for name in names if name.startswith("load")]
    assert 1 == guard.stats().l2_hits


async def test_everybody_leaves_at_any_moment(guard: Guard, admin: Redis, key: str) -> None:
    """Wherever a question is when everybody leaves: the right that it brings, if any, is not kept."""
    (begun, _), given = acquisitions(guard), counted(guard, "release")
    kitchen = Kitchen()
    for when in range(12):
        call = asyncio.create_task(guard.fetch(OP, kitchen.load, on_abandon="cancel", **LIFE))
        for _ in range(when):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        await until(lambda: is_at_rest(guard), "the flight to be over")
        assert not await admin.exists(f"{key}:l"), when
        await admin.delete(f"{key}:v")

    assert len(begun) > 6
    assert len(given) > 3
    assert 0 == guard.stats().in_flight


@pytest.mark.parametrize("leaves", [False, True])
async def test_script_that_the_server_does_not_know(leaves: bool, guard: Guard, admin: Redis, key: str) -> None:
    """Such an answer is followed up in the flight's task, with the script's text, unless everybody has left."""
    concluded = counted(guard, "_follow_up")
    kitchen = Kitchen()
    await admin.script_flush()
    call = asyncio.create_task(guard.fetch(OP, kitchen.load, on_abandon="cancel", **LIFE))
    await asyncio.sleep(0)
    if leaves:
        call.cancel()
    (answer,) = await asyncio.gather(call, return_exceptions=True)
    await until(lambda: is_at_rest(guard), "the flight to be over")

    if leaves:
        assert ([], 0) == (concluded, kitchen.loads)
    else:
        assert ("soup", 1, 1) == (answer, len(concluded), kitchen.loads)
    assert [0, int(not leaves)] == [await admin.exists(f"{key}:{part}") for part in "lv"]
    assert 0 == guard.stats().l2_errors


async def test_right_that_came_with_a_refused_mark(guard: Guard, admin: Redis, key: str, namespace: str) -> None:
    """Who leaves before such an answer is followed up leaves no right behind either."""
    mark = f"sg1:{{{namespace}:soups}}:t"
    await admin.rpush(mark, "no mark")
    call = asyncio.create_task(guard.fetch(OP, Kitchen().load, on_abandon="cancel", tags=["soups"], **LIFE))
    await asyncio.sleep(0)
    call.cancel()
    given = counted(guard, "release")
    await until(lambda: is_at_rest(guard), "the flight to be over")

    assert 1 == len(given)
    assert not await admin.exists(f"{key}:l")


async def test_one_connection_for_all(make_guard: MakeGuard) -> None:
    """When no pipeline can start a flight waits until one can, without a task; all callers are answered."""
    kitchen = Kitchen()
    async with make_guard(max_connections=1) as guard:
        begun, asked = acquisitions(guard)
        calls = []
        for number in range(20):
            calls.append(asyncio.create_task(guard.fetch(f"menu-{number}", kitchen.load, **LIFE)))
            await asyncio.sleep(0)
        answers = await asyncio.gather(*calls)

    assert (["soup"] * 20, 20) == (answers, kitchen.loads)
    assert (20, []) == (len(begun), asked)


class Grumpy:
    """A codec that decodes nothing."""

    def encode(self, value: str) -> bytes:
        return value.encode()

    def decode(self, payload: bytes) -> str:
        raise asyncio.CancelledError


async def test_codec_that_cancels_ends_its_own_flight_alone(proxy: CountingProxy, namespace: str) -> None:
    """What came with the same answer is delivered, though the decoder of one of the values raises anything at all."""
    async with Guard(proxy.url, namespace=namespace, deadline=5, connect_timeout=5) as guard:
        for number in range(3):
            await guard.fetch(f"menu-{number}", Kitchen().load, **LIFE)
        _, asked = acquisitions(guard)
        proxy.restart()
        codecs: list[dict[str, Any]] = [{"returns": str}, {"codec": Grumpy()}, {"returns": str}]
        answers = await asyncio.gather(
            *(guard.fetch(f"menu-{number}", Kitchen().load, l2_ttl=60, **codec) for number, codec in enumerate(codecs)),
            return_exceptions=True,
        )

        assert ["str", "LoadCancelled", "str"] == [type(answer).__name__ for answer in answers]
        assert ([], 1) == (asked, proxy.round_trips)


async def test_exit_over_a_server_that_says_nothing(
    proxy: CountingProxy, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A guard that waits for nobody is left soon, though a question was not answered; nothing remains."""
    guard = Guard(proxy.url, namespace=namespace, deadline=60, connect_timeout=5, drain_timeout=0)
    await guard.__aenter__()
    await guard.fetch("menu-8", Kitchen().load, **LIFE)
    state = guard._states.running()
    proxy.silence()
    proxy.restart()
    call = asyncio.create_task(guard.fetch(OP, Kitchen().load, **LIFE))
    await until(lambda: proxy.commands, "the question to be sent")
    caplog.clear()
    await guard.__aexit__(None, None, None)
    names = [task.get_name() for task in asyncio.all_tasks()]

    with pytest.raises(LoadCancelled):
        await call
    assert [] == [name for name in names if name.startswith(("load", "batch", "upkeep"))]
    assert (set(), 0, []) == (state.board.up, guard.stats().in_flight, caplog.messages)


async def test_question_whose_batch_is_cancelled(proxy: CountingProxy, namespace: str) -> None:
    """Whoever cancels all tasks, as the end of an event loop does, ends the flights that look: nothing new begins."""
    kitchen = Kitchen()
    async with Guard(proxy.url, namespace=namespace, deadline=60, connect_timeout=5) as guard:
        await guard.fetch("menu-8", kitchen.load, **LIFE)
        proxy.silence()
        proxy.restart()
        calls = [asyncio.create_task(guard.fetch(f"{OP}{number}", kitchen.load, **LIFE)) for number in range(3)]
        await until(lambda: proxy.commands, "the question to be sent")
        for task in asyncio.all_tasks():
            if task.get_name().startswith("batch"):
                task.cancel()
        told = [type(outcome) for outcome in await asyncio.gather(*calls, return_exceptions=True)]

        assert ([LoadCancelled] * 3, 1) == (told, kitchen.loads)
        assert is_at_rest(guard)


async def test_value_that_was_found_is_let_go(guard: Guard) -> None:
    """What has brought it lets go of it at once, and not when the garbage is collected."""
    kitchen = Kitchen()
    await guard.fetch(OP, kitchen.load, **LIFE)

    def there() -> int:
        return sum(isinstance(each, ValueRequest | AcquireRequest | AcquireResult) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = there()
        for _ in range(10):
            await guard.fetch(OP, kitchen.load, **LIFE)
        after = there()
    finally:
        gc.enable()

    assert (before, 10, 1) == (after, guard.stats().l2_hits, kitchen.loads)


# The store by itself


def begin(store: RedisStore, key: str, *tags: str) -> tuple[Any, AcquireRequest, asyncio.Event]:
    """Begin to acquire; return the future, its request, and what is set once it is answered."""
    answered, request = asyncio.Event(), AcquireRequest(key, tags, 60, 60, bytes(8))
    future: Any = store.acquire(request)
    future.add_done_callback(lambda _: answered.set())
    return future, request, answered


async def test_token_is_drawn_when_a_right_is_asked_for(store: RedisStore, key: str, admin: Redis) -> None:
    """Until then there is none; it is the one under which the server gives the right."""
    begun, request, answered = begin(store, key)
    before = request.drawn_token, begun.done()
    await answered.wait()

    assert ("", False) == before
    assert ("own", request.drawn_token.encode() + b"0") == (begun.result().kind, await admin.get(f"{key}:l"))
    assert begun.result() == await begun


async def test_question_that_cannot_be_begun(
    store: RedisStore, key: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flight needs a task where the marks are elsewhere, and when the store is closed."""
    primary, tag = store._topology.primary, f"sg1:{{{namespace}:soups}}:t"
    other: Any = object()
    with monkeypatch.context() as patch:
        patch.setattr(store._topology, "primary", lambda key: other if key == tag else primary(key))
        elsewhere: Any = store.acquire(AcquireRequest(key, (tag,), 60, 60))
        elsewhere.close()
        here: Any = store.acquire(AcquireRequest(key, (), 60, 60))
    await store.aclose()
    closed: Any = store.acquire(AcquireRequest(key, (), 60, 60))

    has_callbacks = [hasattr(each, "add_done_callback") for each in (elsewhere, here)]
    assert ([False, True], True) == (has_callbacks, closed.done())
    with pytest.raises(ConnectionError, match="closed"):
        await closed


async def test_store_that_is_closed_over_a_question(store: RedisStore, key: str) -> None:
    """Whoever began is told once that there will be no answer, which is nobody's fault."""
    begun, _, answered = begin(store, key)
    await store.aclose()

    assert answered.is_set()
    assert begun.cancelled()


async def test_refusal_is_raised_when_it_is_concluded(store: RedisStore, key: str, admin: Redis) -> None:
    """A key that is none of ours is refused to whoever concludes."""
    await admin.rpush(f"{key}:l", "no lease")
    begun, _, answered = begin(store, key)
    await answered.wait()

    with pytest.raises(asyncio.InvalidStateError):
        begun.result()
    with pytest.raises(Refused, match="WRONGTYPE"):
        await begun


async def test_refusal_is_dealt_with_as_the_asked_node_s(
    store: RedisStore, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should another server have taken over meanwhile, it is not the one that has refused."""
    topology: Any = store._topology
    node, followed = topology.primary(key), []
    begun, _, _ = begin(store, key)
    begun.finish((Refused("ReadOnlyError"), ()))

    async def follow(*args: Any) -> None:
        followed.append(args[:2])

    monkeypatch.setattr(topology, "follow", follow)
    monkeypatch.setattr(topology, "primary", lambda _: None)
    with pytest.raises(Refused, match="ReadOnlyError"):
        await begun

    assert [node] == [asked for _, asked in followed]
