"""The project's commands: `nox -l` lists them, `nox -s NAME` runs one.

A session runs on the Python that runs nox; `nox -s tests -P 3.12 3.13` runs it on others.
"""

from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2"
nox.options.sessions = ["tests", "lint", "types", "docs"]
# A session fails if the Python that was asked for is missing.
nox.options.error_on_missing_interpreters = True
nox.options.reuse_venv = "yes"

PYPROJECT = nox.project.load_toml("pyproject.toml")
# Wheels only, because building these packages takes a Rust or C toolchain.
PREBUILT = ("--prefer-binary", "--only-binary=cachebox,theine-core,pendulum,orjson,zstandard")
CODE = ("src", "demo_api", "locustfiles", "benchmarks", "tests", "noxfile.py")
WORKFLOWS = (".github/workflows/ci.yml", ".github/workflows/release.yml")
SHOW = "import stampede_guard as it; print(it.__file__, 'compiled' if it.is_compiled else 'pure')"


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group."""
    return list(nox.project.dependency_groups(PYPROJECT, name))


@nox.session
def demo(session: nox.Session) -> None:
    """Compare guarded and unguarded under load; arguments go to `demo_api compare`."""
    session.install("-e", ".[demo]")
    session.run("python", "-m", "demo_api", "compare", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests with a coverage gate; with arguments, run those tests without the gate."""
    session.install("-e", ".[dev]")
    coverage = () if session.posargs else ("--cov", "--cov-report=term-missing:skip-covered")
    # Whole modules in random order, so that a long one begins early as often as late.
    # One process more than CI has cores, because many tests wait for servers.
    in_parallel = ("--numprocesses=3", "--dist=loadscope", "--no-loadscope-reorder")
    session.run("pytest", *in_parallel, *coverage, *session.posargs)


@nox.session
def plain(session: nox.Session) -> None:
    """Run the unit tests with everything that exists only for speed switched off."""
    session.install("-e", ".[dev]")
    in_parallel = ("--numprocesses=3", "--dist=loadscope")
    session.run("pytest", "-p", "plain", *in_parallel, "tests/unit", *session.posargs, env={"PYTHONPATH": "tests"})


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format, layers and workflows; `nox -s lint -- fix` applies the automatic fixes."""
    session.install("--no-deps", "-e", ".")
    session.install(*group("lint"))
    fixes = session.posargs == ["fix"]
    session.run("ruff", "check", *(["--fix"] if fixes else []), *CODE)
    session.run("ruff", "format", *([] if fixes else ["--check"]), *CODE)
    session.run("lint-imports")
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    session.run("zizmor", "--offline", "--quiet", *WORKFLOWS)


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy and pyright."""
    session.install("-e", ".[dev]", *group("types"))
    session.run("mypy", "src", "demo_api", "locustfiles", "benchmarks", "tests/typing/api.py")
    session.run("pyright")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation, strictly; `nox -s docs -- serve` shows it while you write."""
    session.install("-e", ".[redis,aiocache,fastapi]", *group("docs"))
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def faults(session: nox.Session) -> None:
    """Look for stale values, undisturbed and under faults, and time wake-ups: 7 minutes."""
    session.install("-e", ".[dev]")
    for disturbance in ([], ["--faults", "pubsub"], ["--faults", "replies"], ["--faults", "failover"]):
        session.run("python", "tests/cluster/consistency.py", "--seconds", "60", *disturbance)
    session.run("python", "tests/cluster/wake_up.py")
    session.run("pytest", "-m", "long")
    session.run("pytest", "tests/faults/test_connections.py", "-k", "cancelled", env={"CANCELLATIONS": "20000"})


@nox.session
def fuzz(session: nox.Session) -> None:
    """Compare both forms of the hot path by random steps, `-- --seconds 600`; and try the properties for longer."""
    session.install("-e", ".[dev]")
    session.run("python", "tests/fuzz_forms.py", *session.posargs)
    in_parallel = ("--numprocesses=3", "--dist=load")
    session.run("pytest", "tests/property", *in_parallel, "--timeout=600", env={"TIMES_EXAMPLES": "5"})


@nox.session
def asan(session: nox.Session) -> None:
    """Run the unit tests with the C under AddressSanitizer and UBSan: 6 minutes, gcc or clang."""
    session.install("-e", ".[dev]")
    session.run("python", "tests/asan.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the package beside comparable ones: 12 minutes; `-- --quick` for a smoke test."""
    session.install("-e", ".[redis]", *group("bench"))
    install_peers(session)
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def growth(session: nox.Session) -> None:
    """Measure cost against size: 6 minutes; `-- route` profiles a request, `-- --quick` tries."""
    session.install("-e", ".[demo]", *group("growth"))
    is_route = session.posargs[:1] == ["route"]
    module, arguments = ("profile_route", session.posargs[1:]) if is_route else ("growth", session.posargs)
    session.run("python", "-m", f"benchmarks.{module}", *arguments)


@nox.session
def dist(session: nox.Session) -> None:
    """Build the sdist and a wheel for this machine, check them, and import each from an environment of its own."""
    session.install(*group("dist"))
    folder = Path(session.create_tmp())
    for old in folder.glob("stampede_guard-*"):
        old.unlink()
    session.run("python", "-m", "build", "--outdir", str(folder))
    built = sorted(map(str, folder.glob("stampede_guard-*")))
    session.run("twine", "check", "--strict", *built)
    for path in built:
        session.run("python", "-m", "venv", "--clear", str(folder / "venv"))
        python = str(folder / "venv/bin/python")
        session.run(python, "-m", "pip", "install", "--quiet", path, external=True)
        session.run(python, "-I", "-c", SHOW, external=True)


def install_peers(session: nox.Session) -> None:
    """Install the packages to compare with; one that this Python cannot install is left out."""
    peers = group("peers")
    try:
        session.install(*PREBUILT, *peers)
    except CommandFailed:
        for peer in peers:
            session.run_install("pip", "install", *PREBUILT, peer, success_codes=(0, 1))
    # asyncache requires an older cachetools than the others do, and works with the newer one.
    session.run_install("pip", "install", "--no-deps", "asyncache>=0.3", success_codes=(0, 1))
