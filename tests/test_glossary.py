"""The glossary has the words that classes are named by."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Words that an engineer of this field knows already. Others belong in the glossary.
FIELD = """
    access adapter buffer call clock cluster comparison connection counter decorator description gate generator group
    invalidator keeper limit limiter listener message method name node option path pipeliner poller proxy registry
    replicated reply request result sample script sender sentinel server shard single state stats status store
    subscription timeout transaction value view
"""
# Names that end in no noun, as a whole.
WHOLE = {
    "after commit",
    "class level",
    "coalesced",
    "coalesced many",
    "delivered",
    "found",
    "keys changed",
    "of class",
    "one of many",
    "or none",
    "remembered",
    "stored",
    "timed",
    "warmable",
}


def heads() -> list[str]:
    """Return the terms of the glossary, in its order."""
    page = (ROOT / "docs/glossary.md").read_text()
    return re.findall(r"^([^\n:]+)\n: ", page, re.MULTILINE)


def terms() -> set[str]:
    """Return the words and phrases that the glossary explains, in lower case."""
    return {term.strip(" `").lower().replace("-", " ") for head in heads() for term in head.split(",")}


def classes() -> dict[str, tuple[str, list[str]]]:
    """Return where each class of the package stands, and the names of its bases."""
    found: dict[str, tuple[str, list[str]]] = {}
    for module in sorted((ROOT / "src/stampede_guard").rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
                found[node.name] = f"{module.relative_to(ROOT)}:{node.lineno}", bases
    return found


def is_exception(name: str, known: dict[str, tuple[str, list[str]]]) -> bool:
    """Whether *name* is an exception: it says what went wrong, and need not end in a noun."""
    if name not in known:
        return name.endswith(("Exception", "Error"))
    return any(is_exception(base, known) for base in known[name][1])


def test_classes_are_named_by_words_of_the_glossary() -> None:
    """The last word of a class name, or the whole name, is in the glossary or a term of the field."""
    known, allowed = classes(), terms() | {*FIELD.split()}
    unknown = []
    for name, (place, _) in known.items():
        words = [word.lower() for word in re.findall(r"[A-Z][a-z0-9]*", name)]
        head, whole = words[-1], " ".join(words)
        forms = {head, head.removesuffix("s"), re.sub("ies$", "y", head), whole}
        if not (forms & allowed or whole in WHOLE or is_exception(name, known)):
            unknown.append(f"{place}: {name} ends in {head!r}")

    assert [] == unknown, (
        "name each class by a word of docs/glossary.md; or explain the word there; or, if any engineer knows it, "
        "add it to FIELD in tests/test_glossary.py"
    )


def test_the_glossary_is_in_order() -> None:
    """The terms stand in alphabetical order, each once."""
    assert sorted({*heads()}, key=str.lower) == heads()
