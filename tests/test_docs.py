"""The documentation holds: every Python block runs, every option, error and counter is described.

The blocks of a page share one namespace and run in order. A block in an HTML comment,
`<!--- invisible-code-block: python`, checks what a reader need not see.
"""

import gc
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from redis import Redis
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser

from stampede_guard import (
    Guard,
    Scoreboard,
    Stats,
    _backplane,
    _coalesce,
    _codec,
    _course,
    _memory,
    _messages,
    _operation,
    _site,
    _tags,
    coalesce,
    coalesce_many,
    errors,
)
from stampede_guard._policy import Policy
from stampede_guard.stores import _batch, _parcel, _pending, _recent, _replicas, _sender, _sentinel, _tier
from stampede_guard.stores import redis as redis_store
from stampede_guard.stores.redis import RedisStore

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
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


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=name_of)
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
    ("explanation/backplane.md", f"for {WORDS[_backplane._TRUST]} from the time at which the last echo"),
    ("explanation/backplane.md", f"hears up to {_backplane._AT_ONCE} messages"),
    ("explanation/backplane.md", "come after {0:g} s, then {2:g}, up to {1:g} s".format(*_backplane._PAUSES, 0.2)),
    ("explanation/backplane.md", f"remembers up to {_pending._LIMIT:,} that wait"),
    ("explanation/backplane.md", f"For {WORDS[_pending._MEMORY]} after the confirmation"),
    ("explanation/backplane.md", f"For {WORDS[_recent._LAG]} it keeps reads of that op away from replicas"),
    ("explanation/data-path.md", f"It knows {_coalesce._ROOM:,} calls of a function"),
    ("explanation/decisions.md", f"by one sender: {_sender._AT_ONCE} are under way at once"),
    ("explanation/decisions.md", f"a set of changes that are still to be made, {_site._NEWS:,} at most"),
    (
        "explanation/leases.md",
        "after {:g} ms, then 50, and so on up to {:g} ms".format(*(1_000 * pause for pause in _course._POLLS)),
    ),
    ("explanation/leases.md", f"({_course._WAIT:g} s if there is none)"),
    ("explanation/leases.md", "but at least {:g} s and at most {:g} s".format(*_operation._LEASES)),
    ("explanation/leases.md", f"its last minute, at most {_pending._LIMIT:,} for each event loop"),
    ("explanation/limits.md", f"lives for {WORDS[_memory.UNTRUSTED_LIFE].replace('a ', 'one ')} at most"),
    ("how-to/invalidate.md", f"may have {_tags._MOST} tags"),
    ("how-to/redis-topologies.md", f"asked every {WORDS[_replicas.PERIOD].removeprefix('a ')}"),
    ("how-to/redis-topologies.md", f"every {_sentinel._PERIOD:g} s"),
    ("how-to/redis-topologies.md", f"within the last {WORDS[_recent._LAG].replace('seconds', 'seconds is read')}"),
    ("reference/options.md", f"share one, {_batch._QUESTIONS} at most"),
    ("reference/redis-keys.md", f"`{_codec._MAGIC.decode()}`"),
    ("reference/redis-keys.md", f"the marks, {_codec._MARK} bytes each"),
    ("reference/redis-keys.md", "{:g} to {:g} s".format(*_operation._LEASES)),
    ("reference/redis-keys.md", f"| {redis_store._VERSION_LIFE / 60:g} min |"),
    ("reference/redis-keys.md", f"{_tier._MARKS_LIFE / 86_400:g} day, or twice"),
    ("reference/redis-keys.md", f"at most {_batch._QUESTIONS} operations and {_batch._BYTES >> 10} KB"),
    ("reference/redis-keys.md", f"of more than {_parcel._SHORT >> 10} KB does not travel with others"),
]


@pytest.mark.parametrize(("page", "words"), FACTS, ids=[f"{page}: {words}" for page, words in FACTS])
def test_limits_are_those_of_the_code(page: str, words: str) -> None:
    """What a page says of a limit, a size or a time is what the code has."""
    assert words in (DOCS / page).read_text()


def test_messages_are_those_of_the_code() -> None:
    """The reference shows the messages of the bus as the module that packs them does."""
    messages = re.search(r"```\n(.+?)```", _messages.__doc__ or "", re.DOTALL)

    assert messages is not None
    assert messages[1] in (DOCS / "reference/redis-keys.md").read_text()


def test_every_session_is_described() -> None:
    """CONTRIBUTING has a row for each session of nox."""
    sessions = re.findall(r"^@nox.session\ndef (\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE)

    assert [] == [name for name in sessions if f"| `nox -s {name}" not in (ROOT / "CONTRIBUTING.md").read_text()]
