import pytest

from stampede_guard import Entry


@pytest.mark.parametrize("value", [None, 0, "", "menu"])
def test_entry_holds_any_value(value: object) -> None:
    """An entry holds a value, falsy or not, and the instant until which it is fresh."""
    entry = Entry(value, 12.5)

    assert (value, 12.5) == (entry.value, entry.fresh_until)


def test_repr_shows_no_value() -> None:
    """A repr ends up in logs, so it tells the value's type and not the value."""
    assert "<Entry str fresh until 12.500>" == repr(Entry("secret", 12.5))


def test_entry_is_small() -> None:
    """There may be many entries, so none has a dict."""
    assert not hasattr(Entry("menu", 0.0), "__dict__")
