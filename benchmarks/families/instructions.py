"""Instructions of a hit in memory, counted by callgrind.

The count is the same on a busy machine as on an idle one.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor

from benchmarks.families import NOT_INSTALLED, Setting, row_of
from benchmarks.model import Column, Figure, Row, Table, Target
from benchmarks.peers import all_peers, is_installed
from benchmarks.peers.references import BARE, BY_HAND, DICT

TITLE = "Instructions of a hit in memory"
HITS = (500, 2_500)  # of two runs; the difference of their counts is the figure
OTHERS = ("cachebox", "async-lru")
TIMEOUT = 120.0  # seconds of a run, most of them for the interpreter's start


def instructions(valgrind: str, name: str, hits: int) -> int:
    """Return the instructions of a whole run with so many hits."""
    command = [valgrind, "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable]
    ended = subprocess.run(  # noqa: S603  # a module of this package
        [*command, "-m", "benchmarks.hitting", name, str(hits)],
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )
    found = re.search(r"Collected : (\d+)", ended.stderr)
    if found is None:
        message = ended.stderr[-200:]
        raise RuntimeError(message)
    return int(found[1])


def measure(setting: Setting) -> list[Table]:
    """Return one table; without valgrind, or in a smoke test, one that says so."""
    columns = [Column("1 argument", "instructions", target=Target(2.5))]
    valgrind = shutil.which("valgrind")
    peers = [BARE, DICT, BY_HAND, *(peer for peer in all_peers().values() if peer.role == "guard")]
    peers += [all_peers()[name] for name in OTHERS]
    few, many = HITS
    caption = f"Difference of two runs under callgrind, of {few:,} and {many:,} hits, divided by {many - few:,}."
    if valgrind is None or setting.is_quick:
        why = "not counted in a smoke test" if valgrind else "valgrind is not installed"
        return [Table("instructions", TITLE, columns, [], f"{caption} {why.capitalize()}.", setting.loop)]
    rows: list[Row] = []
    # Two at a time: another process on the machine changes no count.
    with ThreadPoolExecutor(2) as pool:
        runs: dict[str, list[Future[int]]] = {
            peer.name: [pool.submit(instructions, valgrind, peer.name, hits) for hits in HITS]
            for peer in peers
            if is_installed(peer)
        }
        for number, peer in enumerate(peers):
            setting.tell(number / len(peers), peer.name)
            if peer.name not in runs:
                rows.append(row_of(peer, [None], NOT_INSTALLED))
                continue
            try:
                fewer, more = (run.result() for run in runs[peer.name])
            except (subprocess.SubprocessError, RuntimeError) as error:
                rows.append(row_of(peer, [None], f"failed: {error}"[:120]))
            else:
                rows.append(row_of(peer, [Figure.of([(more - fewer) / (HITS[1] - HITS[0])])]))
    return [Table("instructions", TITLE, columns, rows, caption, setting.loop)]
