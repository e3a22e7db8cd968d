"""A short run of several processes over a real Redis and a real Postgres, judged by what they wrote down."""

import pytest
from consistency import FAULTS, Places, Plan, run, table
from rich.console import Console

SECONDS = 3.0


@pytest.mark.parametrize(
    "faults",
    [pytest.param((), marks=pytest.mark.long, id="no faults"), pytest.param(("pubsub",), id="bus cut every second")],
)
async def test_no_process_answers_with_what_was_invalidated(
    redis_url: str, admin_url: str, database_url: str, faults: tuple[str, ...]
) -> None:
    """Beyond the bound nothing older than an acknowledged invalidation is read, and the store never holds it."""
    outcome = await run(Plan(seconds=SECONDS, faults=faults), Places(redis_url, database_url, admin_url))

    Console().print(table(outcome))
    assert [] == outcome.verdict.shown
    assert outcome.verdict.counts["read"] > 1_000
    assert outcome.verdict.counts["invalidate"] > 50
    assert outcome.verdict.counts["sample"] > 1_000
    assert all(outcome.faults[fault] > 0 for fault in faults)


def test_faults_that_can_be_asked_for_are_described() -> None:
    """Each fault has its paragraph at the head of the module, which is what the command line prints."""
    import consistency  # noqa: PLC0415  # for its text alone

    assert all(f"\n{fault}\n    " in (consistency.__doc__ or "") for fault in FAULTS)
