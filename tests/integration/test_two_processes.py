import asyncio
import json
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")


async def run_worker(*arguments: str) -> Any:
    """Run a process that calls once, and return what it printed."""
    process = await asyncio.create_subprocess_exec(sys.executable, WORKER, *arguments, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return json.loads(output)


async def test_second_process_reads_what_the_first_loaded(redis_url: str, namespace: str) -> None:
    """Process B gets A's value from the store, and loads nothing."""
    await run_worker(redis_url, namespace, "A")

    second = await run_worker(redis_url, namespace, "B")

    assert {"menu": {"loaded by": "A"}, "loads": 0} == second


async def test_processes_that_start_together_load_once(redis_url: str, namespace: str) -> None:
    """Of four processes that call at once, one loads; the others get its value, and so does a fifth."""
    answers = await asyncio.gather(*(run_worker(redis_url, namespace, f"{number}") for number in range(4)))

    answers.append(await run_worker(redis_url, namespace, "late"))

    assert 1 == sum(answer["loads"] for answer in answers)
    assert [answers[0]["menu"]] * 5 == [answer["menu"] for answer in answers]
