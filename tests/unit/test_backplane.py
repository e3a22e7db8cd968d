import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from leasing import LeasingDouble, Server
from waiting import eventually

from stampede_guard._bus import backplane
from stampede_guard._bus.backplane import Backplane
from stampede_guard._l2.messages import Kind, Message, woken
from stampede_guard._l2.tier import Tier
from stampede_guard.stores import Echo, KeysChanged
from stampede_guard.testing import ManualClock

Pause = Callable[[], Awaitable[None]]
Logged = Callable[[], list[str]]

HERE, THERE = "h" * 22, "t" * 22
NEVER = 3_600.0  # seconds
WARNING = "the bus connection is lost ({}); until it is back, L1 keeps values for a second at most"


class Listener:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.trusted_until = 0.0

    def on_invalidated(self, op: str) -> None:
        self.heard.append(f"op {op}")

    def on_softened(self, op: str) -> None:
        self.heard.append(f"old {op}")

    def on_tag_invalidated(self, tag: str) -> None:
        self.heard.append(f"tag {tag}")

    def on_cleared(self) -> None:
        self.heard.append("everything")

    def on_keys_changed(self, changed: KeysChanged) -> None:
        self.heard.append(f"touched {changed.keys}")

    def on_alive(self, trusted_until: float) -> None:
        self.heard.append("sound")
        self.trusted_until = trusted_until

    def on_lost(self) -> None:
        self.heard.append("nothing")

    @property
    def news(self) -> list[str]:
        """What was heard, but for sounds."""
        return [what for what in self.heard if what != "sound"]


class Ear:
    """A backplane, what is on its two ends, and the time."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.server = Server(self.clock)
        self.store = LeasingDouble(self.server)
        self.tier = Tier(self.store, "menus", 100, self.clock, HERE)
        self.audience = Listener()
        self.backplane = Backplane(self.tier, HERE, self.audience, self.clock)

    def say(self, kind: Kind, subject: str = "", sender: str = THERE) -> None:
        """Publish a message."""
        self.server.publish(Message(kind, sender, subject).pack())

    async def echo(self) -> None:
        """Send an echo, and wait until it is heard."""
        self.audience.heard.clear()
        await self.backplane._send_echo()
        await eventually(lambda: "sound" in self.audience.heard)

    async def heard(self, *news: str) -> None:
        """Wait until this, and nothing else, was heard since the last time, sounds aside."""
        await eventually(lambda: len(self.audience.news) >= len(news))
        assert [*news] == self.audience.news
        self.audience.heard.clear()


@pytest.fixture(autouse=True)
def _at_their_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing happen by itself, and no pause take long."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", NEVER)
    monkeypatch.setattr(backplane, "_PAUSES", (0.0, 0.0))


@pytest.fixture
async def ear() -> AsyncIterator[Ear]:
    """Return a backplane that listens, and has told of its beginning."""
    ear = Ear()
    await ear.backplane.open(10)
    await ear.heard("nothing", "everything")
    yield ear
    await ear.backplane.aclose()


@pytest.fixture
async def fresh() -> AsyncIterator[Ear]:
    """Return a backplane that does not listen yet."""
    ear = Ear()
    yield ear
    await ear.backplane.aclose()


# What is said


@pytest.mark.parametrize(
    ("kind", "subject", "news"),
    [("i", "menu-7", "op menu-7"), ("t", "soups", "tag soups"), ("c", "", "everything")],
)
async def test_news_of_others(kind: Kind, subject: str, news: str, ear: Ear) -> None:
    """What others invalidated is passed on."""
    ear.say(kind, subject)

    await ear.heard(news)


async def test_news_of_our_own(ear: Ear) -> None:
    """What this guard said itself is known already."""
    kinds: tuple[Kind, ...] = ("i", "t", "c")
    for kind in kinds:
        ear.say(kind, "menu-7", HERE)
    await ear.echo()

    assert ["sound"] == ear.audience.heard


async def test_echo(ear: Ear) -> None:
    """An echo proves that everything was heard that was said before it was sent, and no more than that."""
    sent_at = ear.clock()
    ear.store.holds_echoes = True
    await ear.backplane._send_echo()
    ear.clock.advance(2)
    ear.store.let_echoes_go()
    await eventually(lambda: ear.audience.heard)

    assert (["sound"], sent_at + 3) == (ear.audience.heard, ear.audience.trusted_until)


async def test_late_bus(ear: Ear) -> None:
    """A bus on which all messages come late is not trusted, also when others send many."""
    trusted_until = ear.audience.trusted_until
    ear.store.holds_echoes = True
    for number in range(20):
        await ear.backplane._send_echo()
        ear.clock.advance(1)
        ear.say("i", f"menu-{number}")
        await ear.heard(f"op menu-{number}")
        if number >= 10:  # as late as that
            ear.store.let_echoes_go(1)
    await eventually(lambda: all(inbox.queue.empty() for inbox in ear.store.inboxes))

    assert trusted_until == ear.audience.trusted_until
    assert len(ear.backplane._echoes) <= 3


@pytest.mark.parametrize("word", [b"", b"inf", b"nan", b"1e300", b"9" * 400, b"x" * 22])
async def test_forged_echo(word: bytes, ear: Ear) -> None:
    """An echo that was not sent, a time that is far ahead for one, earns no trust."""
    await ear.backplane._send_echo()
    await eventually(lambda: ear.audience.heard)
    ear.audience.heard.clear()
    ear.server.inboxes[0].queue.put_nowait(Echo(word))
    ear.say("i", "menu-7")

    await ear.heard("op menu-7")
    assert ear.clock() + 3 == ear.audience.trusted_until


async def test_echo_that_comes_twice(ear: Ear) -> None:
    """An echo is heard once; the second time it proves nothing that was not known."""
    await ear.echo()
    ear.clock.advance(1)
    (word,) = ear.store.echoes
    ear.server.inboxes[0].queue.put_nowait(Echo(word))
    ear.say("i", "menu-7")

    await eventually(lambda: len(ear.audience.heard) > 1)
    assert ["sound", "op menu-7"] == ear.audience.heard


async def test_echoes_that_overtake_each_other(ear: Ear) -> None:
    """One that was sent before the last that was heard, and comes after it, takes no trust away."""
    ear.store.holds_echoes = True
    for _ in range(2):
        await ear.backplane._send_echo()
        ear.clock.advance(1)
    for word in reversed(ear.store.echoes):
        ear.server.inboxes[0].queue.put_nowait(Echo(word))
    ear.say("i", "menu-7")
    await ear.heard("op menu-7")

    assert ear.clock() - 1 + 3 == ear.audience.trusted_until


async def test_echo_of_the_last_subscription(ear: Ear) -> None:
    """What was sent before a gap proves nothing after it."""
    ear.store.holds_echoes = True
    await ear.backplane._send_echo()
    ear.server.cut()
    await ear.heard("nothing", "everything")
    ear.clock.advance(1)
    ear.store.let_echoes_go()
    ear.say("i", "menu-7")
    await ear.heard("op menu-7")

    assert ear.clock() - 1 + 3 == ear.audience.trusted_until


@pytest.mark.parametrize("message", [b"", b"x" + b"t" * 22 + b"menu-7", b"garbage"])
async def test_unknown_message(message: bytes, ear: Ear) -> None:
    """A word of a newer version's may be about anything that we hold."""
    ear.server.publish(message)

    await ear.heard("everything")


async def test_what_the_server_saw(ear: Ear) -> None:
    """Keys that the server saw change are passed on as they are."""
    ear.server.inboxes[0].queue.put_nowait(KeysChanged(("a", "b")))

    await ear.heard("touched ('a', 'b')")


@pytest.mark.parametrize("has_replicas", [True, False])
async def test_replicas_may_not_have_heard(has_replicas: bool, ear: Ear) -> None:
    """What others invalidated is recent for this process's replicas too, if it has any."""
    ear.clock.advance(5)  # since the beginning, when anything was
    ear.store.has_replicas = has_replicas
    ear.say("i", "menu-7")
    ear.say("t", "soups")
    await ear.heard("op menu-7", "tag soups")
    keys = [ear.tier.key("menu-7"), ear.tier.tag_key("soups"), ear.tier.key("menu-8")]

    assert [has_replicas, has_replicas, False] == [ear.tier.recent.has_any((key,)) for key in keys]


@pytest.mark.parametrize("payload", [Message("c", THERE, "").pack(), b"?"], ids=["all", "unknown"])
async def test_everything_is_recent_when_everything_was_invalidated(payload: bytes, ear: Ear) -> None:
    """Everything is recent when everything was invalidated, or something that cannot be read."""
    ear.clock.advance(5)
    ear.server.publish(payload)
    await ear.heard("everything")

    assert ear.tier.recent.has_any(("anything",))


async def test_slow_listener_lets_others_go_on(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has very much to hear hears some of it at a time."""
    monkeypatch.setattr(backplane, "_MESSAGES_IN_A_ROW", 10)
    for number in range(100):
        ear.say("i", f"menu-{number}")
    most = before = 0
    while before < 100:
        await asyncio.sleep(0)
        most = max(most, len(ear.audience.news) - before)
        before = len(ear.audience.news)

    assert 0 < most <= 20


# Wake-ups


async def woken_by(ear: Ear, say: Callable[[], None]) -> bool:
    """Return whether somebody who waits for the end of a load of menu-7 is woken."""
    with ear.backplane.expecting("menu-7") as wake_up:
        waiting = asyncio.create_task(wake_up.wait(NEVER))
        await asyncio.sleep(0)
        ear.audience.heard.clear()
        say()
        await ear.backplane._send_echo()  # which is heard after it
        await eventually(lambda: ear.audience.heard)
        for _ in range(5):
            await asyncio.sleep(0)
        was_woken = waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])
    return was_woken


@pytest.mark.parametrize(
    ("is_woken", "message"),
    [
        (True, woken("menu-7")),
        (False, woken("menu-8")),
        (True, Message("i", THERE, "menu-7")),
        (True, Message("s", THERE, "menu-7")),
        (False, Message("i", THERE, "menu-8")),
        (True, Message("t", THERE, "soups")),
        (True, Message("c", THERE, "")),
        (True, Message("i", HERE, "menu-7")),
        (True, Message("t", HERE, "soups")),
    ],
    ids=lambda value: value.kind + value.subject if isinstance(value, Message) else "",
)
async def test_wake_ups(is_woken: bool, message: Message, ear: Ear) -> None:
    """Who waits is woken by the end of the load, and by what may have ended it, our own words too."""
    assert is_woken == await woken_by(ear, lambda: ear.server.publish(message.pack()))


@pytest.mark.parametrize("comes_back", [True, False])
async def test_gap_wakes_everybody(comes_back: bool, ear: Ear) -> None:
    """When the bus breaks, and when it is back, waiting flights read again: the wake-up may have been lost."""
    ear.store.deaf = None if comes_back else OSError("down")

    assert await woken_by(ear, ear.server.cut)


async def test_beginning_wakes_everybody(fresh: Ear) -> None:
    """Who began to wait before there was a bus looks again when there is one."""
    with fresh.backplane.expecting("menu-7") as wake_up:
        await fresh.backplane.open(10)
        await wake_up.wait(NEVER)


async def test_everybody_who_waits_is_woken(ear: Ear) -> None:
    """Several may wait for one op, and leave at different times; nothing remains of them."""
    with ear.backplane.expecting("menu-7") as first:
        with ear.backplane.expecting("menu-7") as second:
            ear.server.publish(woken("menu-7").pack())
            await first.wait(NEVER)
            await second.wait(NEVER)
        ear.server.publish(woken("menu-7").pack())
        await first.wait(NEVER)

    assert {} == ear.backplane._wake_ups


async def test_word_that_came_before_anybody_waited(ear: Ear) -> None:
    """A word that is said while its flight is busy asking is heard when it waits next, once."""
    with ear.backplane.expecting("menu-7") as wake_up:
        wake_up.set()
        await wake_up.wait(NEVER)
        await wake_up.wait(0.001)


# Gaps and silence


async def test_gap(ear: Ear, logged: Logged) -> None:
    """A connection that broke is told at once, and when there is another one everything may have changed."""
    ear.clock.advance(2)
    ear.server.cut(ConnectionResetError("redis://user:password@host"))

    await ear.heard("nothing", "everything")
    assert ear.clock() + 3 == ear.audience.trusted_until
    assert ear.tier.recent.has_any(("anything",))
    assert [WARNING.format("ConnectionResetError"), "the bus connection is back"] == logged()


async def test_long_gap(ear: Ear, logged: Logged) -> None:
    """While there is no bus it is sought again and again, with one line in the log, and forgetting once is enough."""
    ear.store.deaf = OSError("down")
    ear.server.cut()
    await eventually(lambda: ear.store.asked.count("listen") > 5)
    while_deaf = [*ear.audience.news]
    ear.store.deaf = None
    await eventually(lambda: "everything" in ear.audience.news)

    assert ["nothing"] == while_deaf
    assert [WARNING.format("ConnectionError"), "the bus connection is back"] == logged()


async def test_bus_that_is_not_there(logged: Logged) -> None:
    """Opening goes on without a bus as soon as that is known."""
    ear = Ear()
    ear.store.deaf = OSError("down")
    await ear.backplane.open(NEVER)
    heard = [*ear.audience.heard]
    await ear.backplane.aclose()

    assert ["nothing", "nothing"] == heard[:2]
    assert [WARNING.format("OSError")] == logged()


async def test_bus_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening waits for the bus no longer than it may."""
    ear, left = Ear(), []

    class Hanging:
        async def __aenter__(self) -> None:
            await asyncio.get_running_loop().create_future()

        async def __aexit__(self, *_: object) -> None:
            left.append("left")

    monkeypatch.setattr(ear.store, "listen", Hanging)
    await ear.backplane.open(0.001)
    await ear.backplane.aclose()

    assert (["nothing"], []) == (ear.audience.heard, left)


async def test_closing(ear: Ear) -> None:
    """A backplane that was closed, or never opened, listens to nothing."""
    await Ear().backplane.aclose()
    await ear.backplane.aclose()
    await ear.backplane.aclose()

    assert [] == ear.server.inboxes


async def test_beats(fresh: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    """An echo is sent each second, and heard, beside all other messages; it reaches no other process."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 0.001)
    await fresh.backplane.open(10)
    fresh.audience.heard.clear()
    await eventually(lambda: len(fresh.audience.heard) >= 3)

    assert ["sound"] * 3 == fresh.audience.heard[:3]
    assert len({*fresh.store.echoes}) >= 3
    assert [] == fresh.server.published


async def test_beats_go_on_while_the_store_is_told(fresh: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the store's confirmation, however much and for how long, keeps no echo back."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 0.0)
    hanging: list[asyncio.Future[None]] = []

    async def repeat_invalidations() -> None:
        hanging.append(asyncio.get_running_loop().create_future())
        await hanging[-1]

    monkeypatch.setattr(fresh.tier, "repeat_invalidations", repeat_invalidations)
    await fresh.backplane.open(10)
    await eventually(lambda: hanging and len(fresh.store.echoes) > 3)

    assert 1 == len(hanging)


async def test_another_primary(fresh: Ear, monkeypatch: pytest.MonkeyPatch, logged: Logged) -> None:
    """When the bus is to be heard elsewhere, the old connection is given up, though it is alive."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 0.0)
    await fresh.backplane.open(10)
    await fresh.heard("nothing", "everything")
    monkeypatch.setattr(fresh.store, "name", "another")

    await fresh.heard("nothing", "everything")
    assert [WARNING.format("there is another primary"), "the bus connection is back"] == logged()
    assert 1 == len(fresh.server.inboxes)


async def test_silence(fresh: Ear, monkeypatch: pytest.MonkeyPatch, logged: Logged) -> None:
    """A connection on which not even our own words come back is given up for another one, and that is a gap."""
    fresh.server.is_mute = True
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 0.001)
    monkeypatch.setattr(backplane, "_TRUST", 0.002)
    await fresh.backplane.open(10)
    await fresh.heard("nothing", "everything")
    asked = fresh.store.asked.count("listen")
    await eventually(lambda: fresh.store.asked.count("listen") > asked)
    await eventually(lambda: "everything" in fresh.audience.news)

    assert ["nothing", "everything"] == fresh.audience.news[:2]
    assert WARNING.format("silence") == logged()[0]
    assert 1 == len(fresh.server.inboxes)


async def test_silence_of_a_bus_that_is_known_to_be_gone(
    fresh: Ear, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    """Who seeks the bus does not take its silence for another loss."""
    fresh.store.deaf = OSError("down")
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 0.0001)
    monkeypatch.setattr(backplane, "_TRUST", 0.0)
    await fresh.backplane.open(10)
    listener = fresh.backplane._tasks[0]
    await eventually(lambda: fresh.store.asked.count("echo") > 20)

    assert listener is fresh.backplane._tasks[0]
    assert [WARNING.format("OSError")] == logged()


async def test_beat_settles_what_is_pending(fresh: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalidation that the store did not confirm is repeated until it does."""
    monkeypatch.setattr(backplane, "_ECHO_PERIOD", 0.0)
    fresh.tier.announce(fresh.tier.invalidation("menu-7"))
    fresh.store.error = OSError("down")
    await fresh.backplane.open(10)
    await eventually(lambda: fresh.store.asked.count("invalidate") > 3)
    before = fresh.tier.pending.all()
    fresh.store.error = None
    await eventually(lambda: not fresh.tier.pending.all())

    assert 1 == len(before)
    assert Message("i", HERE, "menu-7").pack() in fresh.server.published
