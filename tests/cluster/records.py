"""What a run writes down: one record for each thing that a process did, in files that are read when it is over."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal["read", "final", "write", "invalidate", "load", "sample"]

NOTHING = -1  # the version of a value that is not there
CHUNK = 4_096


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One operation of one process.

    Attributes:
        process: Which process; a sampler is one too.
        kind: A caller's `read` (`final`: after all writing has ended and settled), a committed `write`, an
            `invalidate` that follows a write, a loader's run, or a `sample`: a look at what the store holds.
        key: What was asked for.
        start: The monotonic clock of the machine before it, one for all its processes.
        end: And after it.
        version: Seen, committed, or made known; `NOTHING` if there was no value.
        of: The key that the value itself names.
        trouble: Empty, or the error's name; `pending` for an invalidation that the store did not confirm.
    """

    process: int
    kind: Kind
    key: int
    start: float
    end: float
    version: int
    of: int
    trouble: str = ""


def write_value(key: int, version: int) -> str:
    """Return a value that says whose it is and how old."""
    return f"<{key}@{version}>"


def read_value(value: str) -> tuple[int, int]:
    """Return the key and the version that *value* names."""
    key, _, version = value.strip("<>").partition("@")
    return int(key), int(version)


def group_of(key: int) -> int | None:
    """Return which keys *key* is invalidated together with, by their tag; `None` if it is invalidated by itself."""
    return key % 12 if key % 3 == 2 else None


class Log:
    """Records on their way into a file, some thousands at a time.

    Args:
        path: The file, which is made anew.
    """

    def __init__(self, path: Path) -> None:
        self.written = 0
        self._path = path
        self._pending: list[Record] = []
        self._path.write_bytes(b"")

    def add(self, record: Record) -> None:
        """Write *record* down."""
        self._pending.append(record)
        if len(self._pending) >= CHUNK:
            self.flush()

    def flush(self) -> None:
        """Put into the file what is not there yet."""
        self.written += len(self._pending)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(self._pending) + b"\n")
        self._pending.clear()


def merged(paths: Iterable[Path]) -> Iterator[Record]:
    """Yield the records of all logs, file after file."""
    decoder = msgspec.json.Decoder(list[Record])
    for path in paths:
        with path.open("rb") as file:
            for line in file:
                yield from decoder.decode(line)
