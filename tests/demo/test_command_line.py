import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from urllib.parse import urlsplit

import asyncpg
import httpx
import psutil
import pytest

from demo_api.__main__ import main
from demo_api.servers import free_port, is_listening, wait_until

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command with these arguments and variables; gives the exit status and both outputs."""

    def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
        for variable in ("GUARD", "DATABASE_URL", "REDIS_URL", "L1_TTL", "L2_TTL", "LEASE", "WORKERS", "HOST", "PORT"):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(sys, "argv", ["demo_api", *arguments])
        status = main()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("variable", "value", "rule"),
    [
        ("GUARD", "maybe", "'off', 'aiocache' or 'on'"),
        ("L1_TTL", "0", "greater than 0"),
        ("L2_TTL", "inf", "finite"),
        ("POOL_SIZE", "0", "greater than or equal to 1"),
        ("WORKERS", "0", "greater than or equal to 1"),
        ("LEASE", "maybe", "valid boolean"),
        ("PORT", "eighty", "valid integer"),
    ],
)
def test_a_bad_variable_is_one_clear_line(run: Run, variable: str, value: str, rule: str) -> None:
    """The message names the variable, its value and the rule, before anything is started."""
    status, _, said = run("serve", **{variable: value})

    assert 2 == status
    assert said.startswith(f"{variable}={value!r}: ")
    assert rule in said
    assert 1 == said.count("\n")


def test_a_bad_flag_is_as_clear(run: Run) -> None:
    """A flag is checked as its variable is."""
    status, _, said = run("serve", "--port", "70000")

    assert 2 == status
    assert "PORT='70000': " in said


def test_an_unreachable_postgres_is_named_without_its_password(run: Run) -> None:
    """The message names host and port, and keeps the password to itself."""
    port = free_port()
    url = f"postgresql://menus:sesame@127.0.0.1:{port}/menus"

    status, _, said = run("serve", DATABASE_URL=url, REDIS_URL="redis://127.0.0.1:1/0")

    assert 2 == status
    assert f"Postgres at 127.0.0.1:{port} cannot be used" in said
    assert "sesame" not in said
    assert 1 == said.count("\n")


@pytest.mark.parametrize(
    "url",
    [
        "menus",
        "postgresql://menus:sesame@[localhost/menus",
        "mysql://menus:sesame@localhost/menus",
        "postgresql://menus:ses/ame@localhost/menus",
    ],
)
def test_a_url_that_is_none_shows_no_password(run: Run, url: str) -> None:
    """What cannot be parsed is not repeated."""
    status, _, said = run("seed", DATABASE_URL=url)

    assert 2 == status
    assert "DATABASE_URL is not of the form" in said
    assert "ses" not in said


def test_a_bad_redis_url_is_refused(run: Run, menus_url: str) -> None:
    """A URL that the guard would refuse is refused in one line."""
    status, _, said = run("serve", DATABASE_URL=menus_url, REDIS_URL="http://localhost")

    assert 2 == status
    assert "redis://" in said
    assert 1 == said.count("\n")


@pytest.mark.parametrize("url", ["redis+sentinel://:sesame@one,two/menus", "redis://:sesame@one,two"])
def test_aiocache_with_several_servers_is_refused(run: Run, url: str) -> None:
    """What aiocache cannot connect to is refused before anything is started, without the password."""
    status, _, said = run("serve", GUARD="aiocache", REDIS_URL=url, DATABASE_URL="postgresql://127.0.0.1:1/none")

    assert (2, "REDIS_URL: Value error, aiocache knows a single server: redis://host:6379/0\n") == (status, said)


def test_seeding_is_done_once(run: Run, menus_url: str) -> None:
    """Where the menus are, they are left alone."""
    assert (0, "The menus are there already; --force starts afresh\n", "") == run("seed", DATABASE_URL=menus_url)


def test_a_postgres_without_menus_is_filled_by_the_command_that_the_error_names(run: Run, empty_url: str) -> None:
    """Serving an empty Postgres fails with the command to run; having run it, the menus are the same as everywhere."""
    refused, _, said = run("serve", DATABASE_URL=empty_url, REDIS_URL="redis://127.0.0.1:1/0")
    filled, printed, _ = run("seed", DATABASE_URL=empty_url)
    filled_again, printed_again, _ = run("seed", "--force", DATABASE_URL=empty_url)

    assert 2 == refused
    assert "python -m demo_api seed" in said
    assert (0, "58,197 rows written\n") == (filled, printed)
    assert (0, "58,197 rows written\n") == (filled_again, printed_again)


def test_menus_of_another_release_are_named(run: Run, empty_url: str) -> None:
    """Tables that lack a column are refused with the command that makes them afresh."""
    run("seed", DATABASE_URL=empty_url)
    asyncio.run(execute(empty_url, "ALTER TABLE stampede_demo.restaurants DROP COLUMN version"))

    status, _, said = run("serve", DATABASE_URL=empty_url, REDIS_URL="redis://127.0.0.1:1/0")

    assert 2 == status
    assert "python -m demo_api seed --force" in said


@pytest.fixture
def empty_url(database_url: str) -> Generator[str]:
    """A database without tables."""
    asyncio.run(execute(database_url, "CREATE DATABASE without_menus"))
    yield urlsplit(database_url)._replace(path="/without_menus").geturl()
    asyncio.run(execute(database_url, "DROP DATABASE without_menus"))


async def execute(database_url: str, statement: str) -> None:
    """Run *statement*."""
    connection = await asyncpg.connect(database_url)
    await connection.execute(statement)
    await connection.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serving_needs_nothing_but_python(number: signal.Signals) -> None:
    """Without URLs the service brings its servers along, and takes them with it."""
    port = free_port()
    environment = {
        name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL", "GUARD")
    }
    command = [sys.executable, "-m", "demo_api", "serve", "--port", str(port)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as service:
        wait_until(lambda: is_listening(port) or service.poll() is not None, "the service to start", deadline=30)
        assert service.poll() is None, service.communicate()[1]
        ready = httpx.get(f"http://127.0.0.1:{port}/readyz")
        menu = httpx.get(f"http://127.0.0.1:{port}/restaurants/1/menu")
        processes = psutil.Process(service.pid).children(recursive=True)
        service.send_signal(number)
        _, said = service.communicate()

    assert "ready" == ready.json()["status"]
    assert 200 == menu.status_code
    assert "Traceback" not in said
    assert processes
    assert [] == psutil.wait_procs(processes, timeout=30)[1]
