"""Batches, over a node that does not exist."""

import asyncio
from functools import partial
from typing import Any

import pytest

from stampede_guard._codecs.fingerprint import NO_FINGERPRINT
from stampede_guard.stores import LOST_TOGETHER, AcquireRequest, AcquireResult, Stored, StoreOverloaded
from stampede_guard.stores._envelope import COUNT_AT, single_value_head
from stampede_guard.stores._redis import pipeline
from stampede_guard.stores._redis.pipeline import Pipeliner
from stampede_guard.stores._redis.requests import CommandRequest, Pipeline, ValueRequest
from stampede_guard.testing import Gate


class Peculiar(Exception):  # noqa: N818
    """Cannot be made again from its arguments."""

    def __init__(self, code: int, /, *, text: str) -> None:
        super().__init__()
        self.code = code
        self.text = text


class Node:
    """Answers each command with `PONG`, or not at all.

    Args:
        gate: What a conversation has to pass.
        error: What ends it.
    """

    name = "Redis"

    def __init__(self, gate: Gate | None = None, error: Exception | None = None) -> None:
        self._gate = gate
        self.error = error
        self.sizes: list[int] = []

    async def exchange_many(self, said: Any, go_on: Any) -> None:
        """Answer, again and again."""
        while said is not None:
            if self._gate is not None:
                await self._gate.passage()
            if self.error is not None:
                raise self.error
            self.sizes.append(len(said[1]))
            said = await go_on([b"PONG"] * len(said[1]))


def make(node: Any, concurrency: int = 1) -> tuple[Pipeliner, list[str]]:
    """Return batches for *node*, and the list of their failures."""
    failures: list[str] = []
    return Pipeliner(node, concurrency, lambda: failures.append("failed")), failures


def asks(key: str, token: str = "") -> ValueRequest:
    """Return a flight's request."""
    node: Any = Node()
    asked = AcquireRequest(key, (), 0.001, 0.001, token=token)
    return ValueRequest(node, key, 100, (), 1, NO_FINGERPRINT, asked)


def ping() -> CommandRequest:
    """Return a question."""
    return CommandRequest((bytes, "PING"))


def test_callback_of_a_request_that_is_done() -> None:
    """A callback that comes after the reply is called at once, as with a future; the second reply changes nothing."""
    request = ping()
    called: list[CommandRequest] = []
    request.finish(b"PONG")
    request.finish(b"late")
    request.add_done_callback(called.append)

    assert ([request], b"PONG") == (called, request.result())


async def test_error_that_cannot_be_copied() -> None:
    """Each still gets one of their own, which names it; the node has failed once."""
    batches, failures = make(Node(error=Peculiar(7, text="soup")))

    errors = await asyncio.gather(*(batches.submit(ping()) for _ in range(3)), return_exceptions=True)

    assert ["Peculiar"] * 3 == [str(error) for error in errors]
    assert 3 == len({id(error) for error in errors})
    assert failures == ["failed"]


async def test_failure_that_is_shared() -> None:
    """All but one of those who travelled together learn that it was theirs together, whatever else is noted on it."""
    error = ConnectionError("cut")
    error.add_note("what the driver noted")
    batches, _ = make(Node(error=error))

    errors = await asyncio.gather(*(batches.submit(ping()) for _ in range(3)), return_exceptions=True)

    assert [False, True, True] == [LOST_TOGETHER in getattr(each, "__notes__", ()) for each in errors]


async def test_those_who_ask_again_at_once_need_no_other_connection() -> None:
    """Whoever has been answered and asks anew travels with the others who do, in the same conversation."""
    node = Node()
    batches, _ = make(node, concurrency=8)

    async def ask() -> None:
        for _ in range(3):
            await batches.submit(ping())

    await asyncio.gather(*(ask() for _ in range(5)))

    assert node.sizes == [5, 5, 5]


async def test_what_is_asked_while_all_connections_are_busy_makes_the_next_batch() -> None:
    """Nothing is lost, and nothing travels before it can."""
    gate = Gate()
    node = Node(gate)
    batches, _ = make(node)

    first = batches.submit(ping())
    await gate.arrivals(1)
    later = [batches.submit(ping()) for _ in range(4)]
    gate.open()
    answers = await asyncio.gather(first, *later)

    assert [[b"PONG"]] * 5 == answers
    assert node.sizes == [1, 4]


async def test_those_who_waited_behind_a_failure_travel_all_the_same() -> None:
    """A conversation that breaks off takes those along who were in it, and leaves room for the next."""
    gate = Gate()
    node = Node(gate, ConnectionError("cut"))
    batches, failures = make(node)

    first, left = batches.submit(ping()), batches.submit(ping())
    await gate.arrivals(1)
    later = batches.submit(ping())
    left.cancel()
    gate.open()
    with pytest.raises(ConnectionError, match="cut"):
        await first
    node.error = None

    assert [b"PONG"] == await later
    assert failures == ["failed"]


async def test_requests_that_wait_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are given up when no connection becomes free in time; those behind them are sent when one does."""
    monkeypatch.setattr(pipeline, "_QUEUE_TIMEOUT", 0.05)
    gate = Gate()
    node = Node(gate)
    batches, failures = make(node)
    first = batches.submit(ping())
    await gate.arrivals(1)

    late = [batches.submit(ping()) for _ in range(2)]
    for each in late:
        with pytest.raises(StoreOverloaded):
            await each
    monkeypatch.setattr(pipeline, "_QUEUE_TIMEOUT", 60)
    left, last = batches.submit(ping()), batches.submit(ping())
    left.cancel()
    gate.open()

    assert [[b"PONG"]] * 2 == [await first, await last]
    assert ([1, 1], []) == (node.sizes, failures)
    await batches.aclose()


async def test_queue_that_moves_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as pipelines are sent, requests wait for theirs; with nothing left to wait for there is no timer."""
    monkeypatch.setattr(pipeline, "_MAX_REQUESTS", 1)
    gate = Gate()
    batches, _ = make(Node(gate))
    calls = [batches.submit(ping()) for _ in range(3)]
    await gate.arrivals(1)
    batches.submit(calls.pop())
    batches._watch_queue(pipeline._QUEUE_LOOKS, batches._sent - 1)
    gate.open()

    assert [[b"PONG"]] * 2 == [await each for each in calls]
    await batches.aclose()


async def test_nobody_is_told_twice() -> None:
    """Who was answered before the conversation broke off keeps the answer, and that is no failure of theirs."""

    class Fickle(Node):
        async def exchange_many(self, said: Any, go_on: Any) -> None:
            await go_on([b"PONG"] * len(said[1]))
            raise ConnectionError

    batches, failures = make(Fickle())

    assert [b"PONG"] == await batches.submit(ping())
    async with asyncio.timeout(10):
        while not batches.is_idle:
            await asyncio.sleep(0)
    assert failures == []


async def test_question_that_cannot_be_packed() -> None:
    """Whoever travels with it is told, at once; those after them are answered."""
    batches, _ = make(Node())
    nonsense = asks("\udc80", "t" * 22)

    errors = await asyncio.gather(batches.submit(ping()), batches.submit(nonsense), return_exceptions=True)

    assert [UnicodeEncodeError] * 2 == [type(error) for error in errors]
    assert [b"PONG"] == await batches.submit(ping())


async def test_batch_that_is_cancelled_before_it_sets_out() -> None:
    """As a loop does with every task when it is about to end; whoever asks while they clean up is answered."""
    batches, _ = make(Node())

    before = batches.submit(ping())
    (task,) = batches._running
    task.cancel()
    await asyncio.wait([task])
    after = batches.submit(ping())

    assert [[b"PONG"]] * 2 == await asyncio.gather(before, after)


async def test_question_that_is_given_up_before_it_is_sent() -> None:
    """It is not sent, and if there is no other, nothing is."""
    node = Node()
    batches, _ = make(node)

    batches.submit(ping()).cancel()
    async with asyncio.timeout(10):
        while not batches.is_idle:
            await asyncio.sleep(0)

    assert node.sizes == []


async def test_question_that_comes_too_late() -> None:
    """Whoever asks when there is nobody left to answer is told so, and nothing is begun for them."""
    node = Node()
    batches, _ = make(node)

    await batches.aclose()
    with pytest.raises(ConnectionError, match="closed"):
        await batches.submit(ping())

    assert batches.is_idle
    assert node.sizes == []


@pytest.mark.parametrize("head", [b"", bytes(COUNT_AT) + single_value_head(NO_FINGERPRINT)])
async def test_look_that_was_given_up_after_it_was_sent(head: bytes) -> None:
    """A value for a request that was given up counts as a hit all the same, and the other requests get theirs."""
    looks = [asks(f"menu-{number}", "t" * 22) for number in range(2)]
    parcel = Pipeline(looks, is_hit_likely=True)
    left, waiting = looks
    left.cancel()

    assert [] == parcel.dispatch([7_000, head + b"soup", 8_000, head + b"salad"])
    assert (AcquireResult("hit", Stored(head + b"salad", 8.0)), 2, 2) == (waiting.result(), parcel.reads, parcel.hits)


def _note(told: list[int], number: int, _: object) -> None:
    told.append(number)


async def test_who_is_told_is_told_once_and_later() -> None:
    """A look's answer is told when it is there; whoever looks then finds it, or why there is none."""
    node = Node()
    batches, _ = make(node)
    told: list[str] = []
    begun = batches.submit(asks("menu-7"))
    asked = begun.asked
    assert asked is not None
    begun.add_done_callback(lambda _: told.append(asked.drawn_token))
    early = begun.done(), [*told]
    async with asyncio.timeout(10):
        while not told:
            await asyncio.sleep(0)

    assert ((False, []), True, [asked.token]) == (early, begun.done(), told)
    assert (22, (b"PONG", ())) == (len(asked.token), begun.result())


async def test_who_is_told_that_there_is_no_answer() -> None:
    """That comes as it does to others: each has an exception of their own, and it is raised when they look."""
    batches, _ = make(Node(error=ConnectionError("cut")))
    told: list[int] = []
    looks = [asks(f"menu-{number}") for number in range(2)]
    begun = [batches.submit(look) for look in looks]
    for number, each in enumerate(begun):
        each.add_done_callback(partial(_note, told, number))
    async with asyncio.timeout(10):
        while len(told) < 2:
            await asyncio.sleep(0)
    errors = []
    for each in begun:
        with pytest.raises(ConnectionError, match="cut") as raised:
            each.result()
        errors.append(raised.value)

    assert ([0, 1], [False, False]) == (told, [each.cancelled() for each in begun])
    assert errors == [each.exception() for each in begun]
    assert errors[0] is not errors[1]
    assert [False, True] == [LOST_TOGETHER in getattr(error, "__notes__", ()) for error in errors]


@pytest.mark.parametrize("is_sent", [False, True])
async def test_who_is_told_that_there_will_be_none(is_sent: bool) -> None:
    """Closing cuts what was asked, sent or not, which is no error; each is told once."""
    gate = Gate()
    batches, failures = make(Node(gate))
    told: list[int] = []
    looks = [asks(f"menu-{number}") for number in range(2)]
    begun = [batches.submit(look) for look in looks]
    for number, each in enumerate(begun):
        each.add_done_callback(partial(_note, told, number))
    if is_sent:
        await gate.arrivals(1)
    await batches.aclose()

    assert ([0, 1], [True, True], []) == (told, [each.cancelled() for each in begun], failures)
    for each in begun:
        with pytest.raises(ConnectionError, match="closed"):
            await each


def test_loop_that_is_closed_over_a_batch() -> None:
    """Whoever asked there is not told anything: nobody is left."""
    told: list[str] = []
    loop = asyncio.new_event_loop()

    async def begin() -> asyncio.Task[None]:
        gate = Gate()
        batches, _ = make(Node(gate))
        batches.submit(asks("menu-7")).add_done_callback(lambda _: told.append("told"))
        await gate.arrivals(1)
        (task,) = batches._running
        return task

    task: Any = loop.run_until_complete(begin())
    loop.close()
    task._log_destroy_pending = False
    task.get_coro().close()

    assert [] == told
