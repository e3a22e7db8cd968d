"""Real servers for the tests that need them, started once, and only when the first such test runs."""

import os
from collections.abc import Generator
from urllib.parse import urlsplit

import acl
import pytest
from redis import Redis

from demo_api.servers import embedded_servers

LOGIN = "menus:pass"  # of the user who may do no more than is needed


@pytest.fixture(scope="session")
def admin_url() -> Generator[str]:
    """The Redis of `REDIS_URL`, or an embedded Valkey, for somebody who may do everything there."""
    given = os.environ.get("REDIS_URL")
    if given:
        yield given
        return
    with embedded_servers(postgres=False) as urls:
        yield urls.redis


@pytest.fixture(scope="session")
def redis_url(admin_url: str) -> str:
    """The same Redis; with `STAMPEDE_GUARD_ACL=1`, for a user who may do no more there than the package needs."""
    if not os.environ.get("STAMPEDE_GUARD_ACL"):
        return admin_url
    name, password = LOGIN.split(":")
    with Redis.from_url(admin_url) as admin:
        admin.execute_command("ACL", "SETUSER", name, "reset", f">{password}", *acl.rule("*"))
    parts = urlsplit(admin_url)
    return parts._replace(netloc=f"{LOGIN}@{parts.netloc.rpartition('@')[2]}").geturl()


@pytest.fixture(scope="session")
def database_url() -> Generator[str]:
    """The Postgres of `DATABASE_URL`, or an embedded one."""
    given = os.environ.get("DATABASE_URL")
    if given:
        yield given
        return
    with embedded_servers(redis=False) as urls:
        yield urls.postgres
