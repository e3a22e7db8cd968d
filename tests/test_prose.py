"""Comments, docstrings, error texts and pages name the thing they speak of; modules open with a short line.

The rules hold for the package, the documentation, the demo, the locustfiles and the benchmarks.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("src", "docs", "demo_api", "locustfiles", "benchmarks")
PAGES_AND_SCRIPTS = ("README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md", "noxfile.py")

# Words that hide what a sentence is about, and what to write instead. They are patterns, so that a
# search of the tree for the words finds none of them here.
VAGUE = {
    "who(?:m|ever)?": "name it: 'the caller that …', 'a process that …'",
    "no(?:body)": "say what there is none of: 'no caller …', 'no process …', 'not … anywhere'",
    "(?:some|any)(?:body)": "name one: 'a caller', 'another process', 'a user'",
    "every(?:body|one)": "name them all: 'all waiters', 'every process', 'all users'",
    "what(?:ever)": "say which: 'any value', 'all that', 'each … that', or leave the clause out",
}
VAGUE_WORD = re.compile(rf"\b(?:{'|'.join(f'({pattern})' for pattern in VAGUE)})\b", re.IGNORECASE)

# A page may say "who" and "whom" of people: of these, named in the same sentence.
OF_PEOPLE = re.compile("who(?:m)?", re.IGNORECASE)
PEOPLE = re.compile(
    r"\b(?:people|person|(?:author|contributor|developer|engineer|maintainer|operator|reviewer|team|user)s?)\b",
    re.IGNORECASE,
)

LONGEST_OPENING = 12
SENTENCE = re.compile(r".+?(?:[.!?](?=\s)|\n(?=\s*(?:\n|[-*#>] |\d+\. |:   ))|\||\Z)", re.DOTALL)
# What a page shows without being prose: code, comments, figures that a command writes, and addresses.
NO_PROSE = re.compile(
    r"^ *```.*?^ *```|<!-- figures.*?<!-- end of figures -->|<!--.*?-->|`[^`\n]+`|\]\([^)\s]*\)",
    re.DOTALL | re.MULTILINE,
)
C_PROSE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)

Piece = tuple[int, str]


def in_python(source: str) -> Iterator[Piece]:
    """Yield each comment and each string of *source*, with the line where it begins."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def in_c(source: str) -> Iterator[Piece]:
    """Yield each comment and each string of *source*, with the line where it begins."""
    for found in C_PROSE.finditer(source):
        yield 1 + source.count("\n", 0, found.start()), found[0]


def in_markdown(page: str) -> Iterator[Piece]:
    """Yield *page* with blanks in place of all that is no prose."""
    yield 1, NO_PROSE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), page)


PROSE: dict[str, Callable[[str], Iterator[Piece]]] = {".py": in_python, ".c": in_c, ".md": in_markdown}


def is_of_people(word: str, sentence: str) -> bool:
    """Return whether *word* may stand in *sentence* of a page: it is said of people, and the sentence names them."""
    return OF_PEOPLE.fullmatch(word) is not None and PEOPLE.search(sentence) is not None


def vague_words(name: str, source: str) -> list[str]:
    """Return a complaint for each vague word in the file *name*: where it stands, in which sentence, and a remedy."""
    complaints: list[str] = []
    suffix = Path(name).suffix
    for first, prose in sorted(PROSE[suffix](source)):
        for sentence in SENTENCE.finditer(prose):
            for found in VAGUE_WORD.finditer(sentence[0]):
                if suffix == ".md" and is_of_people(found[0], sentence[0]):
                    continue
                line = first + prose.count("\n", 0, sentence.start() + found.start())
                text = " ".join(sentence[0].split())
                remedy = list(VAGUE.values())[(found.lastindex or 1) - 1]
                complaints.append(f"{name}:{line}: “{found[0]}” in: {text}\n    {remedy}")
    return complaints


def long_openings(name: str, source: str) -> list[str]:
    """Return a complaint if the module *name* opens with a line of too many words; a span of code counts as one."""
    opening = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    words = len(re.findall(r"\S*\w\S*", re.sub(r"`[^`]*`", "code", opening)))
    if words <= LONGEST_OPENING:
        return []
    remedy = f"keep the subject, within {LONGEST_OPENING} words; the rest goes into a second paragraph"
    return [f"{name}:1: {words} words in: {opening}\n    {remedy}"]


def in_force() -> list[str]:
    """Return the files for which the rules hold, as paths from the root."""
    found = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*")) if path.suffix in PROSE]
    return [path.relative_to(ROOT).as_posix() for path in found] + list(PAGES_AND_SCRIPTS)


FILES = in_force()


@pytest.mark.parametrize("name", FILES)
def test_prose_names_the_thing(name: str) -> None:
    """Sentences have a caller, a process or a value for a subject, and no pronoun that the reader has to resolve."""
    if complaints := vague_words(name, (ROOT / name).read_text()):
        pytest.fail("\n".join(complaints), pytrace=False)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".py")])
def test_module_opens_with_a_short_line(name: str) -> None:
    """The first line of a module's docstring can be taken in at a glance."""
    if complaints := long_openings(name, (ROOT / name).read_text()):
        pytest.fail("\n".join(complaints), pytrace=False)


MODULE = '''\
"""A module.

It is for everyone.
"""

who = 1  # for whom it is


def fail(name: str) -> None:
    """Do as told."""
    raise ValueError(
        f"{who} is not anyone "
        f"who asked: {name}"
    )
'''


def test_checker_reads_comments_docstrings_and_errors() -> None:
    """In Python a docstring, a comment and an error's text are prose, and a variable's name is none."""
    found = [complaint.partition(": ")[0] for complaint in vague_words("a.py", MODULE)]

    assert found == ["a.py:3", "a.py:6", "a.py:12"]


def test_checker_says_where_what_and_what_instead() -> None:
    """A complaint has the file, the line, the word, the sentence alone, and a remedy."""
    (complaint,) = vague_words("docs/a.md", "# A page\n\nIt is fast.\nIt wakes\neveryone at once. It ends.\n")

    assert complaint.startswith("docs/a.md:5: “everyone” in: It wakes everyone at once.\n    name them all: ")


def test_checker_reads_comments_of_c() -> None:
    """In C a comment of either kind and a string are prose."""
    source = '/* One\n   for whom. */\nint who; // who asks\nchar *url = "a//b who", *no_comment = "/*";\nint whose;\n'

    found = [complaint.partition(": ")[0] for complaint in vague_words("a.c", source)]

    assert found == ["a.c:2", "a.c:3", "a.c:4"]


@pytest.mark.parametrize(
    "page",
    [
        "Text.\n\n```console\nwho\n```\n",
        "- Text.\n\n  ```python\n  who = 1\n  ```\n",
        "<!--- invisible-code-block: python\nwho = 1\n-->\n",
        "The command `who`, and [a page](who.md).\n",
        "<!-- figures: keys -->\n\n| who |\n\n<!-- end of figures -->\n",
        "Wholly, whoop, whatsoever.\n",
    ],
)
def test_checker_passes_over_what_is_no_prose(page: str) -> None:
    """Code, comments, written figures, addresses, and words that only begin alike are left alone in a page."""
    assert vague_words("a.md", page) == []


@pytest.mark.parametrize(
    ("sentence", "complaints"),
    [
        ("Operators who see this restart it.", 0),
        ("It is for a team with users who wait.", 0),
        ("It is for users. The caller who waits is woken.", 1),
        ("- for users\n- a caller who waits", 1),
        ("| users | a caller who waits |", 1),
        ("It wakes every caller who waits.", 1),
        ("Every user is woken, and everyone reads.", 1),
        ("Users are not just anybody.", 1),
    ],
)
def test_checker_lets_pages_speak_of_people(sentence: str, complaints: int) -> None:
    """A page may say "who" where the same sentence names people; other vague words have no exception."""
    assert len(vague_words("a.md", f"{sentence}\n")) == complaints
    assert len(vague_words("a.py", f'"""{sentence}"""\n')) >= 1


@pytest.mark.parametrize(
    ("beginning", "endings", "remedy"),
    [
        ("who", ("", "m", "ever"), "name it: "),
        ("no", ("body",), "say what there is none of: "),
        ("some", ("body",), "name one: "),
        ("any", ("body",), "name one: "),
        ("every", ("body", "one"), "name them all: "),
        ("what", ("ever",), "say which: "),
    ],
)
def test_checker_knows_each_word(beginning: str, endings: tuple[str, ...], remedy: str) -> None:
    """Each word is found, in any case, and is told with its own remedy."""
    for ending in endings:
        for word in (beginning + ending, (beginning + ending).capitalize()):
            (complaint,) = vague_words("a.md", f"{word} asks.\n")
            assert f"“{word}” in: {word} asks.\n    {remedy}" in complaint


def test_checker_counts_the_words_of_an_opening() -> None:
    """Twelve words pass and thirteen do not; a span of code is one word, and a dash none."""
    twelve = "One two three four – five six seven eight nine ten eleven `a b c`."
    more = "More of it, in a second paragraph, which may have as many words as it takes."

    assert long_openings("a.py", f'"""{twelve}\n\n{more}\n"""\n') == []
    assert long_openings("a.py", "x = 1\n") == []
    (complaint,) = long_openings("a.py", f'"""Zero {twelve}"""\n')
    assert complaint.startswith("a.py:1: 13 words in: Zero One two")
