"""The source of a decorated call: argument cache first, then data path.

A wrapper with `*args` and `**kwargs` would pack and unpack them in each call, and a call that the cache answers needs
neither. So each decorated function gets a wrapper of its own signature, which is written as source and compiled.
"""

from collections.abc import Sequence


def call_lines(forwarded: str, args: str, kwargs: str, cached_by: Sequence[str] | None) -> list[str]:
    """Return the body of the coroutine function that stands in for a decorated one.

    For `async def load_menu(menu_id, lang="en")` the whole reads:

        async def load_menu(menu_id, lang=_sg_default_lang):
            _sg_answer = _sg_answers(menu_id, lang)
            if _sg_answer is not _sg_miss:
                return _sg_answer
            _sg_answer = _sg_lookup_or_launch(_sg_build(menu_id, lang), (menu_id, lang), {}, (menu_id, lang))
            if _sg_answer.__class__ is _sg_flight:
                _sg_answer = await _sg_wait(_sg_answer, _sg_timeout)
            return _sg_for_caller(_sg_answer)

    Args:
        forwarded: The arguments, passed on as they came.
        args: The positional ones, as a tuple.
        kwargs: The others, as a dict.
        cached_by: Names of the arguments that the op is made of; `None` if there is no argument cache.
    """
    lines: list[str] = []
    names = ""
    if cached_by is not None:
        names = "".join(f"{name}, " for name in cached_by)
        lines += [f"_sg_answer = _sg_answers({names})", "if _sg_answer is not _sg_miss:", "    return _sg_answer"]
    lines += [
        f"_sg_answer = _sg_lookup_or_launch(_sg_build({forwarded}), {args}, {kwargs}, ({names}))",
        "if _sg_answer.__class__ is _sg_flight:",
        "    _sg_answer = await _sg_wait(_sg_answer, _sg_timeout)",
        "return _sg_for_caller(_sg_answer)",
    ]
    return lines
