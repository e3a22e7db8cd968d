"""The command line: `python -m demo_api serve | seed | compare | cluster`."""

import argparse
import asyncio
import logging
import os
import sys
from typing import Final

import uvicorn
from pydantic import ValidationError

from stampede_guard import Guard, StampedeGuardError

from . import cluster, compare
from .app import sample
from .database import DatabaseError, open_pool
from .menus import MenuRepository
from .seeding import seed
from .servers import ServerError, embedded_servers
from .settings import Settings, explain

SHUTDOWN_TIMEOUT: Final = 5


def main() -> int:
    """Run the command that the arguments name; return the exit status."""
    logging.basicConfig(format="%(levelname)s: %(name)s: %(message)s")
    arguments = _parser().parse_args()
    try:
        status: int = arguments.run(arguments)
    except ValidationError as error:
        return _fail(explain(error))
    except (DatabaseError, ServerError, StampedeGuardError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m demo_api", description=__doc__)
    commands = parser.add_subparsers(required=True)

    serve = commands.add_parser("serve", help="run the service, with servers of its own where no URL is set")
    serve.add_argument("--host", help="address to listen on (default: HOST, or 127.0.0.1)")
    serve.add_argument("--port", help="port to listen on (default: PORT, or 8000)")
    serve.add_argument("--workers", help="processes that share the port (default: WORKERS, or 1)")
    serve.set_defaults(run=_serve)

    fill = commands.add_parser("seed", help="fill the Postgres of DATABASE_URL with menus")
    fill.add_argument("--force", action="store_true", help="drop the menus that are there, and start afresh")
    fill.set_defaults(run=_seed)

    race = commands.add_parser("compare", help="put load on the service in each mode, and report")
    compare.add_arguments(race)
    race.set_defaults(run=compare.run)

    fleet = commands.add_parser("cluster", help="put load on several processes that share one Redis, and report")
    cluster.add_arguments(fleet)
    fleet.set_defaults(run=cluster.run)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    given = {name: value for name in ("host", "port", "workers") if (value := getattr(arguments, name)) is not None}
    settings = Settings(**given)
    own_redis = "redis_url" not in settings.model_fields_set
    own_postgres = "database_url" not in settings.model_fields_set
    with embedded_servers(redis=own_redis, postgres=own_postgres) as urls:
        if own_redis:
            settings = settings.model_copy(update={"redis_url": urls.redis})
        if own_postgres:
            settings = settings.model_copy(update={"database_url": urls.postgres})
            asyncio.run(seed(settings.database_url))
        asyncio.run(_check(settings))
        # Workers are separate processes, and read these URLs from their environment.
        os.environ |= {"DATABASE_URL": settings.database_url, "REDIS_URL": settings.redis_url}
        uvicorn.run(
            "demo_api.app:create_app",
            factory=True,
            workers=settings.workers,
            host=settings.host,
            port=settings.port,
            loop="uvloop",
            http="httptools",
            access_log=False,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
        )
    return 0


async def _check(settings: Settings) -> None:
    """Check that the service can start: here an error is one line, in a worker a traceback."""
    Guard(settings.redis_url)
    async with open_pool(settings.database_url, size=1) as pool:
        await sample(MenuRepository(pool))


def _seed(arguments: argparse.Namespace) -> int:
    rows = asyncio.run(seed(Settings().database_url, force=arguments.force))
    print(f"{rows:,} rows written" if rows else "The menus are there already; --force starts afresh")
    return 0


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
