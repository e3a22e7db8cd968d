from collections import OrderedDict

import pytest

from stampede_guard._memory.queues import Queues
from stampede_guard._speed.forms import Slot


class Op(str):
    """An op whose mark is the same in each run, and has a place of its own."""

    __slots__ = ()

    def __hash__(self) -> int:
        return (number := sum(map(ord, self))) | number << 32


class Shelf:
    """Queues with the slots that they are of, as a memory has them."""

    def __init__(self, maxsize: int) -> None:
        self.slots: OrderedDict[str, Slot] = OrderedDict()
        self.queues = Queues(self.slots)
        self._maxsize = maxsize

    def put(self, *ops: str) -> list[str]:
        """Put *ops*, and return what was evicted for them."""
        gone = []
        for op in map(Op, ops):
            if len(self.slots) == self._maxsize:
                gone.append(self.queues.evict())
                del self.slots[gone[-1]]
            self.slots[op] = Slot(op, 5.0)
            self.queues.add(op)
        return gone

    def use(self, *ops: str) -> None:
        """Be answered by *ops*."""
        for op in map(Op, ops):
            self.slots[op].used = True

    def drop(self, op: str) -> None:
        """Remove *op* without evicting it."""
        self.queues.discard(Op(op))
        del self.slots[Op(op)]


@pytest.fixture
def shelf() -> Shelf:
    """Return a full shelf of ten, of which a and b were used."""
    shelf = Shelf(10)
    shelf.put(*"abcdefghij")
    shelf.use("a", "b")
    return shelf


def test_what_was_not_used_goes_in_the_order_in_which_it_came(shelf: Shelf) -> None:
    """New entries that no caller asks for again evict one another, and not what was used."""
    assert [*"cdefghij", "k", "l"] == shelf.put(*"klmnopqrst")


def test_used_once_more(shelf: Shelf) -> None:
    """In the main queue, too, what was used gets another round, and what was not does not."""
    shelf.put(*"klmnopqr")  # a and b are in the main queue now
    shelf.use(*"klmnopqr")
    shelf.use("a")

    assert ["b"] == shelf.put("s")


def test_op_that_comes_again_soon_goes_into_the_main_queue(shelf: Shelf) -> None:
    """What comes back after a short time is not evicted by what comes for the first time."""
    shelf.put("k")  # evicts c
    shelf.put("c")  # evicts d

    assert "c" not in shelf.put(*"lmnopqrstuvwxyz")


def test_op_that_comes_again_late_is_new(shelf: Shelf) -> None:
    """What comes back after many others is like any other."""
    shelf.put(*(f"new-{number}" for number in range(200)))
    shelf.put("c")

    assert "c" in shelf.put(*(f"other-{number}" for number in range(12)))


@pytest.mark.parametrize(("op", "stays"), [("a", True), ("j", False)])
def test_what_was_dropped_comes_back_to_its_place(op: str, stays: object, shelf: Shelf) -> None:
    """A used entry that expires or is replaced is not new when it comes again; one that was never used is."""
    shelf.put("k")
    shelf.drop(op)
    shelf.put(op)

    assert stays == (op not in shelf.put(*"lmnopqrstuvwxyz"))


def test_main_entry_that_was_dropped_comes_back_to_the_main_queue(shelf: Shelf) -> None:
    """Being in the main queue is enough to return there."""
    shelf.put("k", "l")
    shelf.drop("a")
    shelf.put("a")

    assert "a" not in shelf.put(*"mnopqrstuvwxyz")


def test_all_used(shelf: Shelf) -> None:
    """However many entries were used, an eviction passes a few of them and then takes one."""
    large = Shelf(40)
    large.put(*map(str, range(40)))
    large.use(*map(str, range(40)))

    assert ["16"] == large.put("more")
    assert sum(slot.used for slot in large.slots.values()) == 23


def test_room_grows_with_the_entries() -> None:
    """A shelf that has become much larger remembers more of what was evicted."""
    shelf = Shelf(2)
    shelf.put("a", "b", "c")
    shelf._maxsize = 100
    shelf.put(*map(str, range(98)))
    shelf.put(*map(str, range(98, 150)))

    assert "7" not in shelf.put("7", *map(str, range(200, 260)))
