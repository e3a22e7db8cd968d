"""Whether one task waits for another, as far as asyncio shows.

A context is copied into every task that a load starts, also into those that it never waits for. So the context does
not tell whether a load would wait for itself. The callbacks of a task do: each task that waits for it is reached from
these, either at once, or through what `gather`, `wait`, `shield` and task groups put between the two.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any


def is_awaited_by(task: Any, other: "asyncio.Task[Any]") -> bool:
    """Whether the end of *task* is what *other* waits for, directly or through others.

    It is not seen where they are tied together by other means, such as an `asyncio.Event`.
    """
    ahead: list[Any] = [task]
    seen: dict[int, Any] = {}  # by identity: not all that can be waited for has a hash
    while ahead:
        each = ahead.pop()
        if each is other:
            return True
        if id(each) not in seen:
            seen[id(each)] = each
            ahead += _woken_by(each)
    return False


def _woken_by(future: Any) -> Iterator[Any]:
    """Yield the futures and tasks that the end of *future* reaches."""
    for callback, _ in getattr(future, "_callbacks", None) or ():
        for part in _parts_of(callback):
            if asyncio.isfuture(part):
                yield part
            elif isinstance(part, asyncio.TaskGroup):
                yield getattr(part, "_parent_task", None)
            elif isinstance(part, asyncio.Queue):  # of `as_completed`
                yield from getattr(part, "_getters", ())
            elif asyncio.isfuture(end := getattr(part, "_on_completed_fut", None)):
                yield end  # of AnyIO's task group, while its block ends


def _parts_of(callback: Any) -> Iterator[Any]:
    """Yield what *callback* was made with: its object, its arguments, the variables around it."""
    if isinstance(callback, partial):
        yield from callback.args
        callback = callback.func
    held = getattr(callback, "__self__", None)
    yield held
    yield getattr(held, "_done", None)  # `as_completed` is an object since 3.13
    variables = _variables_of(callback)
    if not any(isinstance(each, str) and each == "FIRST_COMPLETED" for each in variables):
        yield from variables  # but not those of such a `wait`, which others may end


def _variables_of(callback: Any) -> list[Any]:
    found: list[Any] = []
    for cell in getattr(callback, "__closure__", None) or ():
        with suppress(ValueError):  # it is empty
            found.append(cell.cell_contents)
    return found
