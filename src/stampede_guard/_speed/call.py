"""The source of a decorated call: the argument caches first, then the data path.

A wrapper with `*args` and `**kwargs` would pack and unpack them in each call, and a call that the caches answer needs
neither. So each decorated function gets a wrapper of its own signature, which is written as source and compiled.
"""

from collections.abc import Sequence


def call_lines(
    forwarded: str, args: str, kwargs: str, shown: str, plain: Sequence[str] | None, *, has_answers: bool
) -> list[str]:
    """Return the body of the coroutine function that stands in for a decorated one.

    For `async def load_menu(menu_id, lang="en")` the whole reads:

        async def load_menu(menu_id, lang=_sg_default_lang):
            _sg_answer = _sg_answers(menu_id, lang)
            if _sg_answer is not _sg_miss:
                return _sg_answer
            _sg_answer = _sg_flights(menu_id, lang)
            if _sg_answer is _sg_miss or (_sg_answer := _sg_answer()) is None:
                _sg_answer = _sg_lookup_or_launch(_sg_build(menu_id, lang), (menu_id, lang), {}, (menu_id, lang))
            else:
                _sg_counters.joins += 1
            if _sg_answer.__class__ is _sg_flight:
                _sg_answer = await _sg_answer.wait(_sg_timeout)
            return _sg_for_caller(_sg_answer)

    Args:
        forwarded: The arguments, passed on as they came.
        args: The positional ones, as a tuple.
        kwargs: The others, as a dict.
        shown: Those that the op is made of, as a tuple.
        plain: Their names; `None` if the op is made of something else too, which no cache of arguments can tell apart.
        has_answers: Whether there is a cache of answers by arguments.
    """
    lookup = f"_sg_answer = _sg_lookup_or_launch(_sg_build({forwarded}), {args}, {kwargs}, {shown})"
    lines: list[str] = []
    if plain is None:
        lines += [lookup]
    else:
        names = ", ".join(plain)
        if has_answers:
            lines += [f"_sg_answer = _sg_answers({names})", "if _sg_answer is not _sg_miss:", "    return _sg_answer"]
        lines += [
            f"_sg_answer = _sg_flights({names})",
            "if _sg_answer is _sg_miss or (_sg_answer := _sg_answer()) is None:",
            f"    {lookup}",
            "else:",
            "    _sg_counters.joins += 1",
        ]
    lines += [
        "if _sg_answer.__class__ is _sg_flight:",
        "    _sg_answer = await _sg_answer.wait(_sg_timeout)",
        "return _sg_for_caller(_sg_answer)",
    ]
    return lines
