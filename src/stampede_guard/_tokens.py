"""Random names: of flights, of event loops, of tag versions."""

import secrets


def new_token() -> str:
    """Return 128 random bits as 22 characters; from the system's source, so that a forked child draws others."""
    return secrets.token_urlsafe(16)


def new_mark() -> bytes:
    """Return random bytes for a tag's mark: a count, once lost, would begin again at an old one."""
    return secrets.token_urlsafe(8).encode()
