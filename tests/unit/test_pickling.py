"""What holds connections or passwords is not pickled."""

import pickle
from typing import Any

import pytest

from stampede_guard import Guard
from stampede_guard.stores._redis.urls import parse_url
from stampede_guard.stores.redis import RedisStore

URL = "redis://user:secret@localhost"


@pytest.mark.parametrize(
    "thing", [Guard(URL), RedisStore(URL), parse_url(URL)], ids=["guard", "store", "what a URL says"]
)
def test_is_not_pickled(thing: Any) -> None:
    """Pickling is refused, and the refusal does not show the password."""
    with pytest.raises(TypeError, match="cannot be pickled") as caught:
        pickle.dumps(thing)
    assert "secret" not in str(caught.value)
