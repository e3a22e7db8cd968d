"""HTTP caching of answers in FastAPI: a dependency of routes."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar, overload

from ._memory.answer import Answer
from .http import CacheChoice, is_not_modified, response_headers

try:
    from fastapi import Depends, Request, Response
except ImportError as error:  # pragma: no cover  # the test environment has FastAPI
    message = "stampede_guard.fastapi needs FastAPI: pip install 'stampede-guard[fastapi]'"
    raise ImportError(message) from error

__all__ = ("AnswerInfo", "Responder")

R = TypeVar("R")
T = TypeVar("T")


class Responder:
    """Answers one request with an answer, its headers, and `304 Not Modified` where the client has it already."""

    __slots__ = ("_request", "_response")

    def __init__(self, request: Request, response: Response) -> None:
        self._request = request
        self._response = response

    @overload
    def respond(self, answer: Answer[T], *, cache: CacheChoice = "private", variant: str = "") -> T: ...
    @overload
    def respond(
        self, answer: Answer[T], render: Callable[[T], R], *, cache: CacheChoice = "private", variant: str = ""
    ) -> R: ...
    def respond(
        self,
        answer: Answer[Any],
        render: Callable[[Any], Any] | None = None,
        *,
        cache: CacheChoice = "private",
        variant: str = "",
    ) -> Any:
        """Return what the route is to return: the value, what *render* makes of it, or a response with status 304.

        The last is a `Response`, although type checkers see a value: return it as it is. With it the value is
        neither decoded nor rendered. It has the headers that the route has set so far, such as `Vary`. A route
        that has set a status other than 2xx, such as 404, is never answered with 304.

        Args:
            answer: From `await function.answer(…)`.
            render: Makes a response, or what FastAPI makes one of.
            cache: Which caches may keep the response: see `response_headers`.
            variant: Becomes part of the entity tag: see `response_headers`.

        Raises:
            ConfigurationError: as for `response_headers`.
            CannotEncode: *answer* has no value that can be copied, with `isolate=True`.
        """
        headers = response_headers(answer, cache=cache, variant=variant)
        if self._may_be_unchanged() and is_not_modified(
            self._request.method, self._if_none_match(), headers.get("ETag")
        ):
            return self._not_modified(headers)
        made = answer.value if render is None else render(answer.value)
        # FastAPI does not add what a route has set to a response that the route returns itself.
        response = made if isinstance(made, Response) else self._response
        response.headers.update(headers)
        return made

    def _may_be_unchanged(self) -> bool:
        status: int | None = self._response.status_code  # FastAPI's own default is `None`
        return status is None or 200 <= status < 300  # noqa: PLR2004

    def _if_none_match(self) -> str | None:
        return ",".join(self._request.headers.getlist("If-None-Match")) or None

    def _not_modified(self, headers: dict[str, str]) -> Response:
        response = Response(status_code=304)
        response.headers.raw.extend(self._response.headers.raw)
        response.headers.update(headers)
        return response


async def _responder(request: Request, response: Response) -> Responder:
    """Return the responder of a request. A class as a dependency would be called in a thread."""
    return Responder(request, response)


AnswerInfo = Annotated[Responder, Depends(_responder)]
"""The parameter of a route that answers with an answer: `info: AnswerInfo`."""
