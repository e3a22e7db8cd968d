"""Random names: of flights, of event loops, of tags' marks."""

import secrets


def new_token() -> str:
    """Return 128 random bits as 22 characters, from the system's source: a forked process gets other ones."""
    return secrets.token_urlsafe(16)


def new_mark() -> bytes:
    """Return random bytes for a tag's mark; a counter that is lost would repeat old marks."""
    return secrets.token_urlsafe(8).encode()
