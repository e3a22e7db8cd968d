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

from stampede_guard import Guard, Scoreboard, Stats, coalesce, coalesce_many, errors
from stampede_guard._policy import Policy
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
