"""What is shipped: the public names, the type marker, the version, and nothing else."""

import shutil
import subprocess
import sys
from importlib.metadata import metadata, version
from inspect import isclass, isfunction, ismodule
from pathlib import Path
from zipfile import ZipFile

import pytest

import stampede_guard
from stampede_guard import errors

ROOT = Path(__file__).parent.parent


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
