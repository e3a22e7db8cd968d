import gc
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from benchmarks import profile_route
from benchmarks.children import REPOSITORY
from benchmarks.flame import Layer, flame_graph, layers, parse
from benchmarks.growing import QUESTIONS, Curve, Picture, Question
from benchmarks.growing.page import END, begin
from benchmarks.growth import DOCS, PAGE, Report, main
from benchmarks.model import Figure
from demo_api.app import create_app
from demo_api.servers import ServerUrls
from demo_api.settings import Settings

STACKS = """\
<module> (/x/__main__.py:1);run (/lib/asyncio/runners.py:118) 5
run (/lib/asyncio/runners.py:118);run_asgi (/v/site-packages/uvicorn/http.py:9);app (/v/site-packages/fastapi/a.py:1) 10
run (/lib/asyncio/runners.py:118);run_asgi (/v/site-packages/uvicorn/http.py:9);load (<stampede_guard load 1>:1) 5
"""


def curve(name: str, *values: float) -> Curve:
    """Return a curve over 1, 10, 100, …."""
    made = Curve(name)
    for power, value in enumerate(values):
        made.add(10**power, [value])
    return made


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A file with one question's figures."""
    pictures = [Picture("keys-time", "Time", "time", "µs", [curve("hit", 0.25, 0.5), curve("insert", 12345.0, 7.0)])]
    path = tmp_path / "report.json"
    question = Question("keys", "Keys", "keys in memory", "What it is.", pictures)
    path.write_bytes(msgspec.json.encode(Report("2026-01-01", "a machine", is_quick=False, questions=[question])))
    return path


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A copy of the page."""
    copy = tmp_path / "docs"
    (copy / PAGE).parent.mkdir(parents=True)
    (copy / PAGE).write_text((REPOSITORY / DOCS / PAGE).read_text())
    return copy


def test_page_has_a_place_for_everything() -> None:
    """The page has marks for each question, for the machine and for the route."""
    page = (REPOSITORY / DOCS / PAGE).read_text()

    assert all(1 == page.count(begin(name)) for name in (*QUESTIONS, "machine", "route"))
    assert len(QUESTIONS) + 2 == page.count(END)


def test_figures_stand_between_the_marks(report: Path, docs: Path) -> None:
    """Figures that were measured go into the page and the pictures; doing so twice changes nothing."""
    arguments = ["--read", str(report), "--docs", str(docs)]

    assert 0 == main(arguments)
    page, picture = (docs / PAGE).read_text(), (docs / "assets/growth-keys-time.svg").read_text()
    assert 0 == main(arguments)

    assert "| keys in memory | hit, µs | insert, µs |" in page
    assert "| 10 | 0.5 | 7 |" in page
    assert "| 1 | 0.25 | 12,345 |" in page
    assert "on a machine." in page
    assert picture.startswith("<svg")
    assert all(name in picture for name in ("hit", "insert", "keys in memory", "10"))
    assert (page, picture) == ((docs / PAGE).read_text(), (docs / "assets/growth-keys-time.svg").read_text())


def test_page_without_marks_is_refused(report: Path, docs: Path) -> None:
    """A page that has lost its marks is left as it is."""
    (docs / PAGE).write_text("# Growth\n")

    with pytest.raises(ValueError, match="the page has no"):
        main(["--read", str(report), "--docs", str(docs)])

    assert "# Growth\n" == (docs / PAGE).read_text()


def test_question_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command measures a question in a process of its own, prints it, and keeps it."""
    path = tmp_path / "report.json"

    status = main(["--quick", "--only", "waiters", "--json", str(path)])

    measured = msgspec.json.decode(path.read_bytes(), type=Report)
    assert 0 == status
    assert ["waiters"] == [question.name for question in measured.questions]
    curves = [curve for picture in measured.questions[0].pictures for curve in picture.curves]
    assert all(figure.median > 0 for curve in curves for figure in curve.figures)
    assert "A smoke test" in capsys.readouterr().out


def test_processes_share_a_load(tmp_path: Path) -> None:
    """Of two processes with leases one loads for an expiry; without them, it may be both."""
    path = tmp_path / "question.json"

    subprocess.run(
        [sys.executable, "-m", "benchmarks.growing", "processes", path, "--quick"], cwd=REPOSITORY, check=True
    )

    loads, _, reads = msgspec.json.decode(path.read_bytes(), type=Question).pictures
    with_leases, without = ([figure.median for figure in each.figures] for each in loads.curves)
    assert [1, 1] == with_leases
    assert 1 == without[0] <= without[1] <= 2
    assert all(figure.median > 0 for figure in reads.curves[0].figures)


def test_question_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with status 1 and says what the process said last."""
    monkeypatch.setattr("benchmarks.growth.QUESTIONS", ("page",))  # a module that measures nothing

    status = main(["--only", "page"])

    assert 1 == status
    assert "has no attribute 'measure'" in capsys.readouterr().out


def test_layers_share_the_samples() -> None:
    """What is below the event loop's callbacks is left out; each layer has its own share, and that of its callees."""
    found = {layer.name: (layer.own, layer.inclusive) for layer in layers(parse(STACKS))}

    assert {
        "fastapi": (0.5, 0.5),
        "uvicorn": (0.0, 0.75),
        "stampede_guard": (0.25, 0.25),
        "uvloop": (0.25, 0.25),
    } == found


def test_flame_graph_is_as_wide_as_its_samples() -> None:
    """A frame's rectangle is as wide as its share, and stands where its caller's does."""
    stacks = {"uvicorn|run;fastapi|app": 30, "uvicorn|run": 10, "asyncio|step": 40}

    picture = ET.fromstring(flame_graph(stacks))  # noqa: S314  # made here

    boxes = {}
    for group in picture.iter("{http://www.w3.org/2000/svg}g"):
        title, rectangle = group[0].text, group[1]
        assert title is not None
        boxes[title] = float(rectangle.attrib["x"]), float(rectangle.attrib["width"])
    assert {
        "asyncio: step, 50.0%": (0.0, 499.5),
        "uvicorn: run, 50.0%": (500.0, 499.5),
        "fastapi: app, 37.5%": (500.0, 374.5),
    } == boxes


def test_route_is_shown(tmp_path: Path, docs: Path) -> None:
    """What was sampled goes into the page as a picture, a table and a ratio."""
    path, ratio = tmp_path / "route.json", Figure(0.98, 0.97, 0.99)
    shares = [Layer("uvicorn", 0.25, 0.75), Layer("stampede_guard", 0.005, 0.01)]
    found = profile_route.Found(False, 200, shares, {"uvicorn|run;fastapi|app": 200}, ratio, ratio)  # noqa: FBT003  # is_quick
    path.write_bytes(msgspec.json.encode(found))

    assert 0 == profile_route.main(["--read", str(path), "--docs", str(docs)])

    page = (docs / PAGE).read_text()
    assert "| uvicorn | 25.0% | 75.0% |\n| stampede_guard | 0.5% | 1.0% |" in page
    assert "0.98 (0.97–0.99) in one process" in page
    assert "fastapi: app" in (docs / profile_route.PICTURE).read_text()


async def test_ratio_of_the_routes(menus_url: str, redis_url: str) -> None:
    """Both routes answer within one process, and leave the garbage collector as they found it."""
    before = gc.get_threshold()

    ratio = await profile_route.in_process(ServerUrls(redis=redis_url, postgres=menus_url), 2)

    assert 0 < ratio.low <= ratio.median <= ratio.high
    assert before == gc.get_threshold()


@pytest.mark.parametrize(("ceiling_first", "first"), [(False, "restaurants"), (True, "prebuilt")])
def test_route_under_load_is_tried_first(ceiling_first: bool, first: str) -> None:
    """Neither of the two routes that are compared pays for the other's place."""
    paths = create_app(Settings(ceiling_first=ceiling_first)).openapi()["paths"]

    assert f"/{first}/{{restaurant_id}}/menu" == next(iter(paths))
