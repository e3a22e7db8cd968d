import asyncio
import sys
from pathlib import Path

import pytest

PROGRAM = """
import enum
import multiprocessing
import sys

from stampede_guard import coalesce


class Colour(enum.Enum):
    RED = 1


@coalesce
async def load(item, colour=Colour.RED): ...


@coalesce("menu-{item}")
async def load_menu(item): ...


def show():
    import served

    print(__name__, load.key(7), served.load.key(7), load_menu.key(7), served.load_menu.key(7), flush=True)


if __name__ == "__main__":
    show()
    child = multiprocessing.get_context("spawn").Process(target=show)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("how", [["served.py"], ["-m", "served"]], ids=["script", "module"])
async def test_program_and_its_processes_have_the_same_keys(how: list[str], tmp_path: Path) -> None:
    """A program, its worker process, and both when they import the program by its name, are one module."""
    (tmp_path / "served.py").write_text(PROGRAM)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *how, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await process.communicate()
    keys = ["served.load(7,served.Colour.RED)"] * 2 + ["menu-7"] * 2

    assert (0, b"") == (process.returncode, errors)
    assert [["__main__", *keys], ["__mp_main__", *keys]] == [line.split() for line in out.decode().splitlines()]
