"""A load's request for slots."""

from typing import Any

from .._operations.operation import Operation
from ..errors import Overloaded
from .deadlines import Deadlines
from .flight import Flight
from .lines import Place


class SlotRequest:
    """A load's request for slots, and the time that it may wait for them.

    Args:
        flight: The flight that is to load.
        operation: Whose load it is, if that is known.
        partition: Its partition of the operation.
        timeout: Seconds that it may wait in all; `None` sets no limit.
    """

    __slots__ = ("_deadlines", "_is_late", "_operation", "_slots", "_timeout", "flight", "loop", "partition")

    def __init__(
        self, flight: Flight[Any], operation: Operation | None, partition: str | None, timeout: float | None
    ) -> None:
        self.flight = flight
        self.loop = flight.loop
        self.partition = partition or ""
        self._is_late = False
        self._operation = operation
        self._timeout = timeout
        self._deadlines: Deadlines | None = None
        self._slots = ""  # that it waits for, or waited for last

    @property
    def name(self) -> str:
        """The operation's name."""
        return "" if self._operation is None else self._operation.name

    def begin_waiting(self, slots: str) -> Place:
        """Return the flight's place in the queue for *slots*; its time begins with the first such place.

        Raises:
            Overloaded: that time is over.
        """
        self._slots = slots
        if self._is_late:
            raise self.refuse(self._lateness)
        if self._timeout is not None and self._deadlines is None:
            self._deadlines = self.flight.board.budgets.of(self.loop, self._timeout)
            self._deadlines.add(self)
        place: Place = self.loop.create_future()
        self.flight.queue_slot = place
        return place

    def end_waiting(self) -> None:
        """Let the time run no more."""
        if self._deadlines is not None:
            self._deadlines.drop(self)

    def run_out(self, budget: float) -> None:  # noqa: ARG002  # that is the timeout
        """Refuse the flight: its time is over."""
        self._is_late = True
        place = self.flight.queue_slot
        if place is not None and not place.done():
            place.set_result(self._lateness)

    @property
    def _lateness(self) -> str:
        return f"its load got none of the {self._slots} within queue_timeout={self._timeout:g} s"

    def refuse(self, why: str) -> Overloaded:
        """Return the error of a flight that gets no slot, and count it."""
        counters = self.flight.counters if self._operation is None else self._operation.counters
        counters.overloaded += 1
        return Overloaded(f"{self.flight.op}: {why}; try again later, or raise max_loads if its backend bears more")
