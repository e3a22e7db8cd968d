"""The source of a decorated call: argument caches first, then data path.

A wrapper with `*args` and `**kwargs` would pack and unpack them in each call, and a call that the caches answer needs
neither. So each decorated function gets a wrapper of its own signature, which is written as source and compiled.
"""

from collections.abc import Sequence


def call_lines(forwarded: str, args: str, kwargs: str, plain: Sequence[str] | None, *, has_answers: bool) -> list[str]:
    """Return the body of the coroutine function that stands in for a decorated one.

    For `async def load_menu(menu_id, lang="en")` the whole reads:

        async def load_menu(menu_id, lang=_sg_default_lang):
            _sg_answer = _sg_answers(menu_id, lang)
            if _sg_answer is not _sg_miss:
                return _sg_answer
            _sg_answer = _sg_flights(menu_id, lang)
            if _sg_answer is _sg_miss or (_sg_answer := _sg_rejoin(_sg_answer)) is None:
                _sg_answer = _sg_lookup_or_launch(_sg_build(menu_id, lang), (menu_id, lang), {}, (menu_id, lang))
            if _sg_answer.__class__ is _sg_flight:
                _sg_answer = await _sg_wait(_sg_answer, _sg_timeout)
            return _sg_for_caller(_sg_answer)

    Args:
        forwarded: The arguments, passed on as they came.
        args: The positional ones, as a tuple.
        kwargs: The others, as a dict.
        plain: Names of the arguments that the op is made of; `None` if it is made of something else too, which no
            argument cache can tell apart.
        has_answers: Whether there is an argument cache of L1.
    """
    lines: list[str] = []
    names = "" if plain is None else "".join(f"{name}, " for name in plain)
    lookup = f"_sg_answer = _sg_lookup_or_launch(_sg_build({forwarded}), {args}, {kwargs}, ({names}))"
    if has_answers:
        lines += [f"_sg_answer = _sg_answers({names})", "if _sg_answer is not _sg_miss:", "    return _sg_answer"]
    if plain is None:
        lines += [lookup]
    else:
        lines += [
            f"_sg_answer = _sg_flights({names})",
            "if _sg_answer is _sg_miss or (_sg_answer := _sg_rejoin(_sg_answer)) is None:",
            f"    {lookup}",
        ]
    lines += [
        "if _sg_answer.__class__ is _sg_flight:",
        "    _sg_answer = await _sg_wait(_sg_answer, _sg_timeout)",
        "return _sg_for_caller(_sg_answer)",
    ]
    return lines
