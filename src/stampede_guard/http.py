"""HTTP caching of answers, for any framework: response headers, conditional requests.

The headers are those of RFC 9111 (caching), RFC 5861 (stale content) and RFC 9110 (entity tags). A guard is a cache in
front of the loader: `max-age` is the whole life of the value, and `Age` says how much of it has passed.
"""

import re
from math import ceil
from typing import Any, Literal, get_args

from ._memory.answer import Answer
from .errors import ConfigurationError

__all__ = ("CacheChoice", "is_not_modified", "response_headers")

CacheChoice = Literal["private", "public", "no-cache", "no-store"]

_CHOICES = get_args(CacheChoice)
_ENTITY_TAG = re.compile(r'"[!#-~\x80-\xff]*"')  # weak or strong: the comparison is the weak one
_VARIANT = re.compile(r"[!#-~]*")


def response_headers(answer: Answer[Any], *, cache: CacheChoice = "private", variant: str = "") -> dict[str, str]:
    """Return the headers `Age`, `Cache-Control` and `ETag` for a response that shows *answer*.

    Args:
        answer: From `await function.answer(…)`.
        cache: Which caches may keep the response: `"private"`, the client alone; `"public"`, also a proxy or CDN;
            `"no-cache"`, all of these, and they ask before each use whether it has changed; `"no-store"`, none.
        variant: Becomes part of the entity tag. It has to differ between responses that show one value in different
            ways: a language, a format, a release that changes the representation.

    Raises:
        ConfigurationError: *cache* is none of these; *variant* has characters that an entity tag cannot have; or the
            operation has neither `codec=` nor a return annotation that says how to encode its values.
    """
    if cache not in _CHOICES:
        message = f"cache={cache!r}: give one of {', '.join(map(repr, _CHOICES))}"
        raise ConfigurationError(message)
    if cache == "no-store":
        return {"Cache-Control": cache}
    # Each number is rounded so that no cache keeps the response for longer than the guard keeps the value.
    overdue = ceil(answer.overdue)
    age = max(int(answer.age or 0.0), overdue)
    headers: dict[str, str] = {"Cache-Control": cache}
    if answer.age is not None or overdue:
        headers["Age"] = str(age)
    if cache != "no-cache":
        directives = [cache, f"max-age={age - overdue + int(answer.fresh_for)}"]
        windows = {"stale-while-revalidate": int(answer.stale_for), "stale-if-error": int(answer.error_for)}
        directives += [f"{name}={seconds}" for name, seconds in windows.items() if seconds]
        headers["Cache-Control"] = ", ".join(directives)
    etag = answer.etag
    if etag is not None:
        headers["ETag"] = _with_variant(etag, variant) if variant else etag
    return headers


def is_not_modified(method: str, if_none_match: str | None, etag: str | None) -> bool:
    """Whether the response is `304 Not Modified`, without a body and with the same headers.

    Args:
        method: The request's; only `GET` and `HEAD` can be answered so.
        if_none_match: Its header `If-None-Match`, all lines of it joined by commas; `None` without one.
        etag: The entity tag of the response; `None` without one.
    """
    if not if_none_match or method not in ("GET", "HEAD"):
        return False
    return if_none_match.strip() == "*" or etag in _ENTITY_TAG.findall(if_none_match)


def _with_variant(etag: str, variant: str) -> str:
    if not _VARIANT.fullmatch(variant):
        message = f"variant={variant!r}: give visible ASCII characters, and no double quotes"
        raise ConfigurationError(message)
    return f'{etag[:-1]}-{variant}"'
