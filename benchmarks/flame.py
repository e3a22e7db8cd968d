"""A flame graph of sampled stacks, and the share of each layer.

Drawn here, because py-spy's own picture needs scripts to show its text, and a browser runs none in
the picture of a page.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import msgspec

# Distinct for colour-blind readers too, on white and on dark pages; the text of frames is dark.
COLOURS: Final = {
    "uvicorn": "#8fa8d6",
    "starlette": "#d9a45b",
    "fastapi": "#c9c06a",
    "pydantic": "#b98fc4",
    "demo_api": "#e39a8b",
    "stampede_guard": "#2fb59f",
    "opentelemetry": "#d18aa0",
}
OTHER: Final = "#b8bcc2"
INK: Final = "#777d86"
WIDTH, HEIGHT, LETTER = 1000.0, 17, 6.2
NARROWEST = 0.8  # the smallest width that is drawn
FEWEST = 4  # letters: the shortest text that is drawn
LINE = re.compile(r"^(?P<stack>.*) (?P<count>\d+)$")
FRAME = re.compile(r"^(?P<name>.*?) \((?P<path>.*?)(?::\d+)?\)$")
PACKAGE = re.compile(r"site-packages/([A-Za-z0-9_]+)")


RUNNER = "asyncio/runners.py"  # its `run` is below all callbacks


@dataclass(frozen=True, slots=True)
class Frame:
    """A function, and the package that it belongs to."""

    name: str
    layer: str


EVENT_LOOP = Frame("the loop itself", "uvloop")


class Layer(msgspec.Struct, frozen=True):
    """One package: the share of samples with it on top of the stack, and anywhere on the stack."""

    name: str
    own: float
    inclusive: float


Stacks = list[tuple[list[Frame], int]]


def layer_of(path: str) -> str:
    """Return the package that the file at *path* belongs to."""
    for name in ("stampede_guard", "demo_api"):
        if f"/{name}/" in path or path.startswith((f"<{name}", f"{name}/")):
            return name
    package = PACKAGE.search(path)
    if package:
        return package[1].removesuffix("_core")
    return "asyncio" if "asyncio/" in path else "standard library"


def frame_of(text: str) -> Frame:
    """Return the frame that py-spy writes as in `load (/path/to/file.py:12)`."""
    found = FRAME.match(text)
    return Frame(found["name"], layer_of(found["path"])) if found else Frame(text, "standard library")


def parse(samples: str) -> Stacks:
    """Return the stacks of py-spy's raw format, from the event loop's callbacks upwards."""
    stacks: Stacks = []
    for line in samples.splitlines():
        found = LINE.match(line)
        if found:
            texts = found["stack"].split(";")
            below = max((at for at, text in enumerate(texts, 1) if RUNNER in text), default=0)
            frames = [frame_of(text) for text in texts[below:]]
            stacks.append((frames or [EVENT_LOOP], int(found["count"])))
    return stacks


def layers(stacks: Stacks) -> list[Layer]:
    """Return each layer's shares, the largest first."""
    own: Counter[str] = Counter()
    inclusive: Counter[str] = Counter()
    for stack, count in stacks:
        own[stack[-1].layer] += count
        for layer in {frame.layer for frame in stack}:
            inclusive[layer] += count
    total = own.total() or 1
    # The guard has a row even if no sample contains it.
    names = {*inclusive, "stampede_guard"}
    found = [Layer(name, own[name] / total, inclusive[name] / total) for name in names]
    return sorted(found, key=lambda each: (-each.own, -each.inclusive, each.name))


class _Box:
    """A frame in the picture, and those above it."""

    def __init__(self) -> None:
        self.count = 0
        self.above: dict[str, _Box] = {}

    def add(self, frames: Sequence[str], count: int) -> None:
        self.count += count
        if frames:
            self.above.setdefault(frames[0], _Box()).add(frames[1:], count)

    def depth(self, least: float) -> int:
        return 1 + max((box.depth(least) for box in self.above.values() if box.count >= least), default=0)


def flame_graph(stacks: dict[str, int]) -> str:
    """Return the picture; a stack is its frames as `layer|name`, joined by `;`."""
    root = _Box()
    for line, count in stacks.items():
        root.add(line.split(";"), count)
    per_sample = WIDTH / max(root.count, 1)
    top = root.depth(NARROWEST / per_sample) * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {top + 2 * HEIGHT}"',
        ' font-family="system-ui, sans-serif" font-size="11">',
    ]

    def place(box: _Box, left: float, level: int) -> None:
        for text, above in sorted(box.above.items()):
            width = above.count * per_sample
            if width >= NARROWEST:
                layer, _, name = text.partition("|")
                parts.append(_rectangle(layer, name, left, top - level * HEIGHT, width, above.count / root.count))
                place(above, left, level + 1)
            left += width

    place(root, 0.0, 1)
    return "\n".join([*parts, *_legend(stacks, top + HEIGHT), "</svg>\n"])


def _rectangle(layer: str, name: str, left: float, at: float, width: float, share: float) -> str:  # noqa: PLR0917
    said = f"{layer}: {name}" if layer not in name else name
    letters = int((width - 4) / LETTER)
    shown = said if len(said) <= letters else name if len(name) <= letters else f"{name[: letters - 1]}…"
    text = f'<text x="{left + 3:.1f}" y="{at + HEIGHT - 5}" fill="#15181c">{escape(shown)}</text>'
    return (
        f"<g><title>{escape(said)}, {share:.1%}</title>"
        f'<rect x="{left:.1f}" y="{at}" width="{max(width - 0.5, 0.3):.1f}" height="{HEIGHT - 1}" rx="1"'
        f' fill="{COLOURS.get(layer, OTHER)}"/>{text if letters >= FEWEST else ""}</g>'
    )


def _legend(stacks: dict[str, int], at: float) -> list[str]:
    layers_shown = {frame.partition("|")[0] for line in stacks for frame in line.split(";")}
    names = [name for name in COLOURS if name in layers_shown]
    colours = [*((name, COLOURS[name]) for name in names), ("others", OTHER)]
    return [
        f'<rect x="{number * 120}" y="{at}" width="11" height="11" fill="{colour}"/>'
        f'<text x="{number * 120 + 16}" y="{at + 10}" fill="{INK}">{name}</text>'
        for number, (name, colour) in enumerate(colours)
    ]
