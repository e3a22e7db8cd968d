"""The project's verbs: `nox -s demo`, `tests`, `lint`, `types`, `docs`, `bench`, `faults`.

A session runs on the Python that runs nox; `nox -s tests -P 3.12 3.13` runs it on others.
"""

import nox

nox.needs_version = ">=2025.2"
nox.options.sessions = ["tests", "lint", "types", "docs"]
nox.options.error_on_missing_interpreters = True  # a Python that was asked for and is not there is no success
nox.options.reuse_venv = "yes"

PYPROJECT = nox.project.load_toml("pyproject.toml")
CODE = ("src", "demo_api", "locustfiles", "benchmarks", "tests", "noxfile.py")


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group."""
    return list(nox.project.dependency_groups(PYPROJECT, name))


@nox.session
def demo(session: nox.Session) -> None:
    """Compare guarded and unguarded under load, on real servers; arguments go to `demo_api compare`."""
    session.install("-e", ".[demo]")
    session.run("python", "-m", "demo_api", "compare", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests, with the coverage of `src` as a gate; with arguments, run those tests, without it."""
    session.install("-e", ".[dev]")
    coverage = () if session.posargs else ("--cov", "--cov-report=term-missing:skip-covered")
    # Two at a time, whole modules: half of the time is spent on waiting for servers.
    session.run("pytest", "--numprocesses=2", "--dist=loadscope", *coverage, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format and layers; `nox -s lint -- fix` mends what can be mended."""
    session.install("--no-deps", "-e", ".")
    session.install(*group("lint"))
    fixes = session.posargs == ["fix"]
    session.run("ruff", "check", *(["--fix"] if fixes else []), *CODE)
    session.run("ruff", "format", *([] if fixes else ["--check"]), *CODE)
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy and pyright."""
    session.install("-e", ".[dev]", *group("types"))
    session.run("mypy", "src", "demo_api", "locustfiles", "benchmarks", "tests/typing/api.py")
    session.run("pyright")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation, strictly; `nox -s docs -- serve` shows it while you write."""
    session.install("-e", ".[redis,aiocache]", *group("docs"))
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def faults(session: nox.Session) -> None:
    """Look for stale values at length, undisturbed and under faults; measure how fast a cluster wakes up: 6 minutes."""
    session.install("-e", ".[dev]")
    for disturbance in ([], ["--faults", "pubsub"], ["--faults", "replies"], ["--faults", "failover"]):
        session.run("python", "tests/cluster/consistency.py", "--seconds", "60", *disturbance)
    session.run("python", "tests/cluster/wake_up.py")
    session.run("pytest", "-m", "long")
    session.run("pytest", "tests/faults/test_connections.py", "-k", "cancelled", env={"CANCELLATIONS": "20000"})


@nox.session
def bench(session: nox.Session) -> None:
    """Measure a hit in memory beside its alternatives; `-- --quick` for a smoke run."""
    session.install("-e", ".", *group("bench"))
    session.run("python", "benchmarks/hit_path.py", *session.posargs)
