import asyncio
from collections.abc import Callable

import pytest

from stampede_guard import Guard, InvalidationPending
from stampede_guard._l2 import tier as tier_module
from stampede_guard._l2.plain import PlainStoreAdapter
from stampede_guard.stores import AcquireRequest, AcquireResult, Refused, Release, Stored
from stampede_guard.stores._envelope import seal
from stampede_guard.testing import FaultStore, ManualClock

KEY = "sg1:{menus:menu-7}"
ENVELOPE = seal("menus:menu-7", b"soup", "f" * 22)


@pytest.fixture
def plain() -> FaultStore:
    """Return an empty store."""
    return FaultStore(ManualClock())


@pytest.fixture
def store(plain: FaultStore) -> PlainStoreAdapter:
    """Return the empty store behind the other interface."""
    return PlainStoreAdapter(plain)


def test_it_can_do_nothing_special(store: PlainStoreAdapter) -> None:
    """A plain store neither arbitrates nor tells, has one node and no replicas, and is called by its name."""
    assert (frozenset(), False, 0) == (store.capabilities, store.has_replicas, store.generation)
    assert ("FaultStore", "FaultStore", 64) == (store.name, store.node_of(KEY), store.concurrency)


async def acquired(store: PlainStoreAdapter, reject: bytes = b"") -> AcquireResult:
    """Return what a flight is told."""
    return await store.acquire(AcquireRequest(KEY, (), 2, 60, token="t" * 22, reject=reject))


async def test_everybody_may_load_what_is_not_there(store: PlainStoreAdapter) -> None:
    """Each process that finds nothing owns a load."""
    assert [AcquireResult("own")] * 2 == [await acquired(store) for _ in range(2)]


async def test_value_goes_under_the_values_key(store: PlainStoreAdapter, plain: FaultStore) -> None:
    """A fill writes where a flight reads, and an invalidation deletes there."""
    assert await store.fill(KEY, "t" * 22, ENVELOPE, 60, None, b"message", always_publish=True)
    keys = [*plain.contents]
    found = await acquired(store)
    await store.invalidate(KEY, None, b"message")

    assert [f"{KEY}:v"] == keys
    assert AcquireResult("hit", Stored(ENVELOPE, 60)) == found
    assert {} == plain.contents


@pytest.mark.parametrize(
    ("left", "window", "margin", "kind", "is_found"),
    [
        (11, 0, 0, "hit", True),
        (11, 0, 2, "own", True),
        (10, 0, 0, "own", False),
        (10, 5, 0, "own", True),
        (5, 5, 0, "own", False),
        (None, 0, 2, "hit", True),
    ],
)
async def test_value_that_is_not_fresh(  # noqa: PLR0917  # the parts of a case
    left: float | None,
    window: float,
    margin: float,
    kind: str,
    is_found: bool,
    store: PlainStoreAdapter,
    plain: FaultStore,
) -> None:
    """An old value comes with the right to load; where the store cannot tell what it has left, it is fresh."""
    envelope = seal("menus:menu-7", b"soup", "f" * 22, stale=10)
    stored = Stored(envelope, left)

    async def read(_: str) -> Stored:
        return stored

    plain.read = read  # type: ignore[method-assign]

    result = await store.acquire(AcquireRequest(KEY, (), 2, 60, window=window, margin=margin))
    assert AcquireResult(kind, stored if is_found else None) == result  # type: ignore[arg-type]


@pytest.mark.parametrize(("tells_ttl", "life"), [(True, 70), (False, 60)])
async def test_life_of_a_value_with_a_window(tells_ttl: bool, life: float) -> None:
    """It is kept for its window too, unless it would count as fresh for as long."""
    plain = FaultStore(ManualClock())
    plain.tells_ttl = tells_ttl  # type: ignore[attr-defined]
    envelope = seal("menus:menu-7", b"soup", "f" * 22, life=60, stale=10)

    await PlainStoreAdapter(plain).fill(KEY, "t" * 22, envelope, 70, None, b"", always_publish=False)

    assert {f"{KEY}:v": (envelope, 1000 + life)} == plain.contents


async def test_soft_invalidation_deletes(store: PlainStoreAdapter, plain: FaultStore) -> None:
    """A plain store cannot change what a value has left."""
    await store.fill(
        KEY, "t" * 22, seal("menus:menu-7", b"soup", "f" * 22, stale=9), 60, None, b"", always_publish=False
    )
    await store.invalidate(KEY, None, b"", is_soft=True)

    assert {} == plain.contents


@pytest.mark.parametrize("reject", [b"*", b"=", b"=" + b"f" * 22])
async def test_value_that_is_not_wanted_is_not_read(reject: bytes, store: PlainStoreAdapter, plain: FaultStore) -> None:
    """Who has seen the value, or wants none, may load."""
    await store.fill(KEY, "t" * 22, ENVELOPE, 60, None, b"", always_publish=False)
    plain.error = OSError("down")

    assert AcquireResult("own") == await acquired(store, reject)


async def test_there_is_nothing_to_keep_up(store: PlainStoreAdapter, plain: FaultStore) -> None:
    """A lease that no store granted does not expire; no process is told of anything, and no replica is asked."""
    plain.error = OSError("down")

    assert [True] == await store.renew([(KEY, "t" * 22, 2)])
    assert [False] == await store.release([Release(KEY, "t" * 22, b"message")])
    await store.echo(b"word")
    assert await store.read_replica(KEY, ()) is None


async def test_what_it_cannot_do(store: PlainStoreAdapter) -> None:
    """Tags, the bus and tracking are never asked of it."""
    with pytest.raises(Refused):
        await store.invalidate_tag(f"{KEY}:t", b"mark", 60, b"message")
    with pytest.raises(Refused):
        store.listen()
    with pytest.raises(Refused):
        await store.stored_by(f"{KEY}:v")


async def test_opening_and_closing(store: PlainStoreAdapter, plain: FaultStore) -> None:
    """It opens and closes what is behind it."""
    plain.error = OSError("down")

    with pytest.raises(OSError, match="down"):
        await store.open()
    await store.aclose()


async def test_it_takes_a_task(store: PlainStoreAdapter) -> None:
    """A plain store is asked in a flight's task: what it returns is no future."""
    acquisition = store.acquire(AcquireRequest(KEY, (), 2, 60))
    assert not hasattr(acquisition, "add_done_callback")
    await acquisition


class ConfirmingStore(FaultStore):
    """A store that tells of each deletion, tried or done."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.tries = 0
        self.is_tried_again = asyncio.Event()
        self.is_deleted = asyncio.Event()

    async def delete(self, key: str) -> None:
        self.tries += 1
        if self.tries > 1:
            self.is_tried_again.set()
        await super().delete(key)
        self.is_deleted.set()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def test_unconfirmed_invalidation_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bus too, an unconfirmed invalidation is repeated in the background until the store confirms it."""
    monkeypatch.setattr(tier_module, "_REPEAT_PERIOD", 0.0)
    store = ConfirmingStore()
    async with Guard(lambda: store, namespace="menus") as guard:
        tasks = asyncio.all_tasks()
        store.contents[f"{KEY}:v"] = ENVELOPE, 60.0
        store.error = OSError("down")
        with pytest.raises(InvalidationPending):
            await guard.invalidate("menu-7")
        await store.is_tried_again.wait()
        was_there = bool(store.contents)
        store.error = None
        await store.is_deleted.wait()
        await _until(lambda: asyncio.all_tasks() == tasks)

    assert (True, {}) == (was_there, store.contents)


@pytest.mark.parametrize("is_repeated", [False, True])
async def test_nothing_is_repeated_after_the_guard_was_left(is_repeated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that repeats an invalidation ends with the guard, though the store has not confirmed."""
    monkeypatch.setattr(tier_module, "_REPEAT_PERIOD", 0.0)
    store, tasks = ConfirmingStore(), asyncio.all_tasks()
    async with Guard(lambda: store, namespace="menus") as guard:
        store.error = OSError("down")
        await guard.invalidate("menu-7", wait=False)
        if is_repeated:
            await store.is_tried_again.wait()

    assert asyncio.all_tasks() == tasks
    assert store.tries
