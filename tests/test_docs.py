"""The documentation holds: every Python block runs, every option, error and counter is described.

The blocks of a page share one namespace and run in order. A block in an HTML comment,
`<!--- invisible-code-block: python`, checks what a reader need not see.
"""

import gc
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from redis import Redis
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser

from stampede_guard import Guard, Scoreboard, Stats, _loops, _path, coalesce, coalesce_many, errors
from stampede_guard._bus import backplane
from stampede_guard._decorators import coalesce as coalesce_module
from stampede_guard._keys import tags
from stampede_guard._l2 import messages, recent, sender, tier, unconfirmed
from stampede_guard._memory import l1
from stampede_guard._operations import operation
from stampede_guard._operations.policy import Policy
from stampede_guard.stores import _envelope
from stampede_guard.stores import redis as redis_store
from stampede_guard.stores._redis import pipeline, requests
from stampede_guard.stores._redis.topology import health, sentinel
from stampede_guard.stores.redis import RedisStore

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md")]
DOCUMENTED_URL = re.compile(r"redis://localhost:6379(/0)?")  # what readers see; the test's own server takes its place

parse_blocks = PythonCodeBlockParser()


def name_of(page: Path) -> str:
    """Return the page's path, for test ids."""
    return str(page.relative_to(ROOT))


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """Return the module that a page's blocks make up: annotations and pickles look it up by name."""
    module = sys.modules["example"] = ModuleType("example")
    yield module
    del sys.modules["example"]
    vars(module).clear()
    gc.collect()  # the functions' op ids are free again, for a page with the same template


@pytest.fixture
def store_url(redis_url: str, admin_url: str) -> str:
    """Return the URL of a store that remembers no earlier run of a page."""
    with Redis.from_url(admin_url) as client:
        for key in client.scan_iter("sg1:*"):
            client.delete(key)
    return redis_url


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=name_of)
def test_every_block_runs(page: Path, module: ModuleType, store_url: str) -> None:
    """Each Python block of a page runs, and what it asserts is true."""
    document = Document(DOCUMENTED_URL.sub(store_url, page.read_text()), str(page))
    for region in parse_blocks(document):
        document.add(region)
    document.namespace = vars(module)

    for example in document.examples():
        example.evaluate()


@pytest.mark.parametrize("page", [*OUTSIDE, *PAGES], ids=name_of)
def test_no_block_escapes(page: Path) -> None:
    """Each block names a language that is run, or one that is not Python."""
    opened = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)[::2]

    assert set(opened) <= {"python", "console", "text"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_page_opens_with_its_gist(page: Path) -> None:
    """Below its title, each page says in a sentence what it is about."""
    title, _, gist, *_ = page.read_text().splitlines()

    assert title.startswith("# ")
    assert gist.startswith("**TL;DR** ")


def defaults_of(*makers: Callable[..., Any]) -> dict[str, str]:
    """Return the parameters of *makers* that have a default and a name, and how the last one reads."""
    return {
        parameter.name: getattr(parameter.default, "__name__", repr(parameter.default))
        for maker in makers
        for parameter in inspect.signature(maker).parameters.values()
        if parameter.default is not parameter.empty and parameter.kind is not parameter.POSITIONAL_ONLY
    }


@pytest.mark.parametrize(
    ("title", "makers"),
    [
        ("@coalesce", (coalesce, Policy)),
        ("@coalesce_many", (coalesce_many,)),
        ("Guard", (Guard, RedisStore)),
        ("Scoreboard", (Scoreboard,)),
    ],
)
def test_every_option_is_documented(title: str, makers: tuple[Callable[..., Any], ...]) -> None:
    """The options page has a row for each option, with the default that it has."""
    section = (DOCS / "reference/options.md").read_text().partition(f"## `{title}`\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section, re.MULTILINE))

    assert defaults_of(*makers) == rows


def test_every_error_is_documented() -> None:
    """The errors page shows the tree as the module draws it, and names each error below it."""
    page = (DOCS / "reference/errors.md").read_text()
    tree = re.search(r"```\n(.+?)```", errors.__doc__ or "", re.DOTALL)

    assert tree is not None
    assert tree[1] in page
    assert [name for name in errors.__all__ if f"`{name}`" not in page] == []


def test_every_counter_is_documented() -> None:
    """The stats page has a row for each counter."""
    page = (DOCS / "reference/stats.md").read_text()
    counters = {field.name for field in fields(Stats)} | {"calls", "l2_reads"}

    assert counters == set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))


def test_every_invariant_is_explained() -> None:
    """The invariants page has a section for each invariant that a property test is named after."""
    page = (DOCS / "explanation/invariants.md").read_text()
    tested = re.findall(r"def test_(i\d+)_", "".join(path.read_text() for path in Path(ROOT / "tests").rglob("*.py")))

    assert {name.upper() for name in tested} <= set(re.findall(r"^## (I\d+)", page, re.MULTILINE))


WORDS = {0.25: "a quarter of a second", 1: "a second", 3: "three seconds", 5: "five seconds", 60: "a minute"}

FACTS = [
    ("explanation/backplane.md", f"for {WORDS[backplane._TRUST]} from the time at which the last echo"),
    ("explanation/backplane.md", f"hears up to {backplane._MESSAGES_IN_A_ROW} messages"),
    ("explanation/backplane.md", "come after {0:g} s, then {2:g}, up to {1:g} s".format(*backplane._PAUSES, 0.2)),
    ("explanation/backplane.md", f"remembers up to {unconfirmed._MAX_UNCONFIRMED:,} that wait"),
    ("explanation/backplane.md", f"For {WORDS[unconfirmed._REPEAT_WINDOW]} after the confirmation"),
    ("explanation/backplane.md", f"For {WORDS[recent._REPLICA_LAG]} reads of that key bypass the replicas"),
    ("explanation/data-path.md", f"It knows {coalesce_module._ROOM:,} calls of a function"),
    ("explanation/decisions.md", f"by one sender: {sender._MAX_WORKERS} are under way at once"),
    ("explanation/decisions.md", f"a set of changes that are still to be made, {_loops._NEWS:,} at most"),
    (
        "explanation/leases.md",
        "after {:g} ms, then 50, and so on up to {:g} ms".format(*(1_000 * pause for pause in _path._POLLS)),
    ),
    ("explanation/leases.md", f"({_path._WAIT:g} s if there is none)"),
    ("explanation/leases.md", "but at least {:g} s and at most {:g} s".format(*operation._LEASES)),
    ("explanation/leases.md", f"its last minute, at most {unconfirmed._MAX_UNCONFIRMED:,} for each event loop"),
    ("explanation/limits.md", f"lives for {WORDS[l1.UNTRUSTED_TTL].replace('a ', 'one ')} at most"),
    ("how-to/invalidate.md", f"may have {tags._MAX_TAGS} tags"),
    ("how-to/redis-topologies.md", f"asked every {WORDS[health.PROBE_PERIOD].removeprefix('a ')}"),
    ("how-to/redis-topologies.md", f"every {sentinel._VIEW_PERIOD:g} s"),
    (
        "how-to/redis-topologies.md",
        f"within the last {WORDS[recent._REPLICA_LAG].replace('seconds', 'seconds is read')}",
    ),
    ("reference/options.md", f"share one, {pipeline._MAX_REQUESTS} at most"),
    ("reference/redis-keys.md", f"`{_envelope._MAGIC.decode()}`"),
    ("reference/redis-keys.md", f"the marks, {_envelope._MARK_SIZE} bytes each"),
    ("reference/redis-keys.md", "{:g} to {:g} s".format(*operation._LEASES)),
    ("reference/redis-keys.md", f"| {redis_store._VERSION_TTL / 60:g} min |"),
    ("reference/redis-keys.md", f"{tier._MARKS_TTL / 86_400:g} day, or twice"),
    ("reference/redis-keys.md", f"at most {pipeline._MAX_REQUESTS} operations and {pipeline._MAX_BYTES >> 10} KB"),
    ("reference/redis-keys.md", f"of more than {requests._SHORT >> 10} KB does not travel with others"),
]


@pytest.mark.parametrize(("page", "words"), FACTS, ids=[f"{page}: {words}" for page, words in FACTS])
def test_limits_are_those_of_the_code(page: str, words: str) -> None:
    """What a page says of a limit, a size or a time is what the code has."""
    assert words in (DOCS / page).read_text()


def test_messages_are_those_of_the_code() -> None:
    """The reference shows the messages of the bus as the module that packs them does."""
    shown = re.search(r"```\n(.+?)```", messages.__doc__ or "", re.DOTALL)

    assert shown is not None
    assert shown[1] in (DOCS / "reference/redis-keys.md").read_text()


def test_reference_lists_what_a_guard_has() -> None:
    """A guard's public attributes are those that the reference lists, and no others."""
    page = (DOCS / "reference/api.md").read_text()
    listed = re.search(r"::: stampede_guard\.Guard\n    options:\n      members: \[(.*)\]", page)

    assert listed is not None
    assert {name for name in dir(Guard()) if not name.startswith("_")} == set(listed[1].split(", "))


def test_every_room_is_described() -> None:
    """CONTRIBUTING has a row for each layer of the package, in the order of the layers."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| room | holds |\n")[2].partition("\n\n")[0]

    assert [room for layer in layers for room in layer.split(" | ")] == re.findall(
        r"^\| `(\w+)` \|", table, re.MULTILINE
    )


def test_every_file_of_the_first_hour_exists() -> None:
    """The modules that CONTRIBUTING tells newcomers to read are there."""
    first_hour = (ROOT / "CONTRIBUTING.md").read_text().partition("## The first hour\n")[2].partition("\n## ")[0]
    modules = re.findall(r"`([\w/]+\.py)`", first_hour)

    assert modules
    assert [path for path in modules if not (ROOT / "src/stampede_guard" / path).is_file()] == []


@pytest.mark.parametrize("page", OUTSIDE, ids=name_of)
def test_links_from_outside_the_docs_lead_somewhere(page: Path) -> None:
    """Each relative link of a page that mkdocs does not check names a file, and a heading of it."""
    lost = []
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        target = ROOT / path if path else page
        titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if anchor and target.is_file() else []
        anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
        if not target.is_file() or (anchor and anchor not in anchors):
            lost.append(f"{path}#{anchor}")

    assert lost == []


def test_every_session_is_described() -> None:
    """CONTRIBUTING has a row for each session of nox."""
    sessions = re.findall(r"^@nox.session\ndef (\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE)

    assert [] == [name for name in sessions if f"| `nox -s {name}" not in (ROOT / "CONTRIBUTING.md").read_text()]
