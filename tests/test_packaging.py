"""What is shipped: the public names, the type marker, the version, and nothing else; and what it is checked with."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import metadata, version
from inspect import isclass, isfunction, ismodule
from pathlib import Path
from tarfile import TarFile
from zipfile import ZipFile

import pytest

import stampede_guard
from stampede_guard import errors

ROOT = Path(__file__).parent.parent
WORKFLOWS = ROOT / ".github/workflows"


class Recorder:
    """A session of nox that notes what it is to install and to run."""

    posargs = ()

    def __init__(self) -> None:
        self.installed: list[str] = []
        self.commands: list[str] = []

    def install(self, *words: str) -> None:
        self.installed += words

    def run(self, *words: str) -> None:
        self.commands.append(" ".join(words))


@pytest.fixture
def lint(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Return what `nox -s lint` installs and runs."""
    monkeypatch.chdir(ROOT)
    import noxfile  # noqa: PLC0415  # it reads pyproject.toml where it stands

    recorder = Recorder()
    noxfile.lint(recorder)
    return recorder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """Return the wheel, built as an installer builds it."""
    folder, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "*.so", "__pycache__"))
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return ZipFile(path)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names of the files in the sdist, built where tests lie beside the package."""
    folder, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    for name in ("src", "tests"):
        ignored = shutil.ignore_patterns("*.egg-info", "*.so", "*.pyd", "__pycache__", ".*")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True)
    (path,) = folder.glob("*.tar.gz")
    with TarFile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def test_exported_names_are_the_public_ones() -> None:
    """`__all__` is sorted, and holds each public name of the package's own and no other."""
    public = sorted(
        name for name, value in vars(stampede_guard).items() if not name.startswith("_") and not ismodule(value)
    )

    assert tuple(public) == stampede_guard.__all__


def test_every_error_is_exported() -> None:
    """Whatever the package raises by itself can be caught by a name from its front."""
    assert set(errors.__all__) <= set(stampede_guard.__all__)


def test_exported_names_are_documented() -> None:
    """Each exported class and function has a docstring."""
    exported = [getattr(stampede_guard, name) for name in stampede_guard.__all__]

    assert [thing for thing in exported if (isclass(thing) or isfunction(thing)) and not thing.__doc__] == []


def test_wheel_holds_the_package_alone(wheel: ZipFile) -> None:
    """The wheel has every module of the package, the type marker and the metadata, and no more but what is compiled."""
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name and not name.endswith((".so", ".pyd"))}
    package = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/stampede_guard").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }

    assert package == shipped
    assert "stampede_guard/py.typed" in shipped


def test_sdist_holds_what_a_build_needs_and_the_changelog(sdist: set[str]) -> None:
    """The sdist has the sources, what describes them, and no tests, which need the whole repository."""
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src/stampede_guard").rglob("*")
        if path.suffix in {".py", ".c", ".h"} or path.name == "py.typed"
    }
    described = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "SECURITY.md", "pyproject.toml"}
    written = {"PKG-INFO", "setup.cfg"}

    assert sources | described | written == {name for name in sdist if ".egg-info/" not in name}


def test_wheel_carries_the_license(wheel: ZipFile) -> None:
    """The licence goes where the package goes."""
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_changelog_knows_the_version() -> None:
    """The changelog has a section for what is being released."""
    assert f"## [{version('stampede-guard')}]" in (ROOT / "CHANGELOG.md").read_text()


def test_core_needs_two_packages() -> None:
    """Whoever installs the package without extras gets cachetools and msgspec besides, and nothing else."""
    required = [line for line in metadata("stampede-guard").get_all("Requires-Dist", []) if "extra ==" not in line]

    assert [requirement.partition(">")[0] for requirement in sorted(required)] == ["cachetools", "msgspec"]


def test_hooks_before_a_commit_are_those_of_lint(lint: Recorder) -> None:
    """The hooks run the commands of `nox -s lint`, in its order, with the versions that it installs."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    pins = re.findall(r'additional_dependencies: \["(.+)"\]', hooks)

    assert lint.commands == re.findall(r"entry: (?:env PYTHONPATH=src )?(.+)", hooks)
    assert {*lint.installed} - {"--no-deps", "-e", "."} == {*pins}
    assert [pin for pin in pins if "==" not in pin] == []


def test_every_workflow_is_linted(lint: Recorder) -> None:
    """`nox -s lint` looks at each workflow of the hosted CI."""
    checks = [command for command in lint.commands if command.startswith(("check-jsonschema", "zizmor"))]
    workflows = [str(path.relative_to(ROOT)) for path in WORKFLOWS.iterdir()]

    assert len(checks) == 2
    assert [path for path in workflows if not all(path in check for check in checks)] == []


def test_supported_pythons_are_tested_and_released() -> None:
    """The classifiers name the Pythons that `.ci/run` tests, that hosted CI installs, and that wheels are built for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    classifiers = project["project"]["classifiers"]
    supported = {word for line in classifiers if (word := line.rpartition(" :: ")[2]).startswith("3.")}
    in_script = re.search(r"for version in ([\d. ]+);", (ROOT / ".ci/run").read_text())
    hosted = re.search(r"python-version: \|\n((?: +3\.\d+\n)+)", (WORKFLOWS / "ci.yml").read_text())

    assert in_script is not None
    assert hosted is not None
    assert supported == {*in_script[1].split()} == {*hosted[1].split()}
    assert [f"cp{each.replace('.', '')}-*" for each in sorted(supported)] == project["tool"]["cibuildwheel"]["build"]
