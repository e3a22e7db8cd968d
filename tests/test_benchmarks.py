"""The candidates of the benchmarks do what their rows say: a figure of something else is worth nothing."""

import asyncio
import subprocess
import sys

import pytest

from benchmarks import capacity, merchants
from benchmarks.families.probes import in_pairs
from benchmarks.model import Column, Figure, Report, Row, Table, Target, shortfalls
from benchmarks.peers import all_peers, is_installed, named
from benchmarks.peers.peer import BOUND, COALESCING, MEMORY, OWN_TASK, Peer
from benchmarks.show import BEGIN, END, updated
from benchmarks.subjects import VALUE, Slow, Terms, subject_of, three_arguments
from benchmarks.timing import interleaved

INSTALLED = [peer for peer in all_peers().values() if is_installed(peer)]
KEEPING = [peer for peer in INSTALLED if MEMORY not in peer.lacks]

pytestmark = pytest.mark.filterwarnings("ignore")  # the others' code warns of what it likes


def name_of(peer: Peer) -> str:
    """Return the peer's name, for test ids."""
    return peer.name


@pytest.mark.parametrize("peer", INSTALLED, ids=name_of)
async def test_candidate_coalesces_as_it_says(peer: Peer) -> None:
    """Twenty callers of a cold key all get the value; the loader runs once, unless coalescing is lacking."""
    slow = Slow()
    async with peer.wrap(slow.subject(), Terms()) as call:

        async def caller() -> str:
            return await call(1)

        values = await asyncio.gather(*[caller() for _ in range(20)])

    assert values == [VALUE] * 20
    assert slow.runs == (20 if COALESCING in peer.lacks else 1)


@pytest.mark.parametrize("peer", INSTALLED, ids=name_of)
async def test_candidate_keeps_values_as_it_says(peer: Peer) -> None:
    """A second call runs no loader, unless nothing is kept."""
    slow = Slow()
    async with peer.wrap(slow.subject(), Terms()) as call:
        await call(1)
        await call(1)

    assert slow.runs == (2 if MEMORY in peer.lacks else 1)


@pytest.mark.parametrize("peer", INSTALLED, ids=name_of)
async def test_candidate_runs_the_loader_where_it_says(peer: Peer) -> None:
    """The loader runs in a task of its own, unless that is lacking."""
    tasks = []

    async def menu(restaurant_id: int) -> str:
        tasks.append(asyncio.current_task())
        return VALUE

    async with peer.wrap(subject_of(menu), Terms()) as call:
        await call(1)

    assert (tasks[0] is asyncio.current_task()) == (OWN_TASK in peer.lacks)


@pytest.mark.parametrize("peer", KEEPING, ids=name_of)
async def test_candidate_is_bounded_as_it_says(peer: Peer) -> None:
    """Three hundred keys do not fit into a cache of ten, unless it has no bound."""
    runs = 0

    async def menu(restaurant_id: int) -> str:
        nonlocal runs
        runs += 1
        return VALUE

    async with peer.wrap(subject_of(menu), Terms(maxsize=10)) as call:
        for _ in range(2):
            for key in range(300):
                await call(key)

    assert (runs == 300) == (BOUND in peer.lacks)


@pytest.mark.parametrize("peer", [peer for peer in KEEPING if peer.role != "baseline"], ids=name_of)
async def test_candidate_takes_three_arguments(peer: Peer) -> None:
    """A call with three arguments, one by keyword, is answered, and answered again."""
    async with peer.wrap(three_arguments(), Terms()) as call:
        values = [await call(7, "en", currency="EUR") for _ in range(2)]

    assert values == [VALUE, VALUE]


def test_candidates_are_found_by_their_names() -> None:
    """A process that measures one candidate has the very one that the table names."""
    assert {name: named(name) for name in all_peers()} == all_peers()


def test_candidate_imports_nothing_of_another_one() -> None:
    """What another candidate needs is no part of a process that measures this one."""
    script = "import sys; from benchmarks.peers import named; named('cachebox'); print('stampede_guard' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert ended.stdout == "False\n"


async def test_slow_candidate_sits_out_later_rounds() -> None:
    """Whoever has had its seconds has the least number of rounds, and who failed has no figure."""
    taken: list[str] = []

    async def round_of(name: str) -> float:
        taken.append(name)
        if name == "failing":
            raise ValueError
        return float(taken.count(name))

    async def slow() -> float:
        return await round_of("slow")

    async def failing() -> float:
        return await round_of("failing")

    failures: dict[str, str] = {}
    found = await interleaved(
        {"slow": slow, "failing": failing}, 5, lambda _done, _said: None, failures, seconds=0.0, least=3
    )

    assert (taken.count("slow"), taken.count("failing")) == (3, 1)
    assert (found["slow"].median, set(found), set(failures)) == (2.0, {"slow"}, {"failing"})


def test_pairs_come_back_in_order() -> None:
    """What was found, two at a time, stands in the order of the candidates; all of them are told of."""
    peers = list(all_peers().values())
    told: list[str] = []

    found = in_pairs(name_of, peers, lambda _done, said: told.append(said))

    assert found == [peer.name for peer in peers]
    assert sorted(told) == sorted(found)


@pytest.fixture
def report() -> Report:
    """Return a run in which one of two figures misses its target."""
    columns = [Column("one", "ns", target=Target(2.5)), Column("many", "reads/s", target=Target(8, sense="at least"))]
    rows = [
        Row("bare await", [Figure(100, 90, 110), Figure(1_000, 900, 1_100)], "baseline"),
        Row("stampede_guard", [Figure(240, 230, 250), Figure(7_900, 7_000, 8_500)], "guard"),
        Row("another", [None, Figure(500, 400, 600)], "peer", ["TTL"], "not installed"),
    ]
    return Report(
        "2026-01-01", "3.11.7", "a machine", is_quick=False, versions={}, tables=[Table("hits", "A hit", columns, rows)]
    )


def test_missed_targets_are_named(report: Report) -> None:
    """A figure is held against its target by its ratio to the baseline, in the sense that the target has."""
    assert shortfalls(report) == ["hits, asyncio: stampede_guard, many: 7.90× 7,900 reads/s, target ≥ 8×"]


def test_page_shows_figures_beside_their_targets(report: Report) -> None:
    """The tables take the place of what stood between the marks; a missed target is beside its figure."""
    page = updated(f"before\n{BEGIN}\nold\n{END}\nafter\n", [report])

    assert page.startswith("before\n")
    assert page.endswith(f"{END}\nafter\n")
    assert "old" not in page
    assert (
        "| **stampede_guard** | 240 (230–250) | 2.40 (target ≤ 2.5×) | 7,900 (7,000–8,500) | 7.90 (target ≥ 8×) |  |"
        in page
    )
    assert "| another | – | – | 500 (400–600) | 0.50 | not installed; TTL |" in page
    assert "| A hit: stampede_guard, many | 3.11.7 | asyncio | ≥ 8× | 7.90×, short of it |" in page


async def test_slow_merchant(database_url: str) -> None:
    """The table has a row for each variant; with partitions no caller of the other merchants is refused."""
    table = await merchants.measure(database_url, 0.3)
    refused = list(table.columns[4].cells)

    assert [*merchants.VARIANTS] == list(table.columns[0].cells)
    assert "0" == refused[-1]


async def test_falling_capacity(database_url: str) -> None:
    """The table has a row for each phase, and callers were answered."""
    name, options = next(reversed(capacity.VARIANTS.items()))
    table = await capacity.measure(database_url, 0.3, {name: options})

    assert [str(locks) for locks in capacity.PHASES] == list(table.columns[1].cells)
    assert sum(int(str(answered)) for answered in table.columns[2].cells)
