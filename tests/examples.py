"""How many examples a property is tried with: some in each run, five times as many in `nox -s fuzz`."""

import os

TIMES = int(os.environ.get("TIMES_EXAMPLES", "1"))


def examples(number: int) -> int:
    """Return how many examples a property has in this run, which has *number* of them in a run of all tests."""
    return number * TIMES
