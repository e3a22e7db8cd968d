"""Names of functions, classes and instances, for keys."""

import itertools
import pathlib
import sys
import weakref
from functools import lru_cache
from typing import Any

from ..errors import InvalidKey

REMEDY = "pass a key template that names what matters, such as '…-{user.id}', or key=, or leave it out with ignore="
_MAIN = ("__main__", "__mp_main__")
_serials: dict[int, tuple[weakref.ref[Any], int]] = {}
_next_serial = itertools.count(1)


def qualified_name(thing: Any) -> str:
    """Return the module and qualified name of a function or class."""
    return f"{module_name(thing.__module__)}.{thing.__qualname__}"


def module_name(name: str) -> str:
    """Return the name that the module *name* is imported by: `__main__` is the module that was started."""
    if name not in _MAIN:
        return name
    main = sys.modules.get(name)
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None)  # none in a notebook
    return name if file is None else _imported_as(file)


@lru_cache(maxsize=16)
def _imported_as(file: str) -> str:
    """Return the name of the module in *file*, packages included."""
    path = pathlib.Path(file).absolute()
    packages = itertools.takewhile(lambda folder: (folder / "__init__.py").is_file(), path.parents)
    return ".".join(reversed([path.stem, *(folder.name for folder in packages)]))


def lasting_name(kind: type) -> str:
    """Return the name of *kind*, under which its module has it: another class may have the same name.

    Raises:
        InvalidKey: it is not there, as with a class that a function makes.
    """
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is kind:
        return qualified_name(kind)
    why = "is made inside a function" if "<locals>" in kind.__qualname__ else "cannot be found under its name"
    message = f"{qualified_name(kind)} {why}, so it may have namesakes, and no key can be derived from it: "
    raise InvalidKey(message + REMEDY)


def identity(instance: Any) -> str:
    """Return a text for this very object, unique in this process for good.

    `id()` is reused, so that a new object would get the answers of a dead one.

    Raises:
        InvalidKey: the object allows no weak reference.
    """
    known = _serials.get(id(instance))
    if known is not None and known[0]() is instance:
        return f"~{known[1]}"
    address = id(instance)
    try:
        reference = weakref.ref(instance, lambda dead: _forget(address, dead))
    except TypeError:
        message = (
            f"{qualified_name(type(instance))} allows no weak reference, so its methods cannot be told apart by "
            f"instance: {_how_to_allow(type(instance))}put {{self.attribute}} into the key template"
        )
        raise InvalidKey(message) from None
    serial = next(_next_serial)
    _serials[address] = (reference, serial)
    return f"~{serial}"


def _how_to_allow(kind: type) -> str:
    """Return what makes instances of *kind* allow weak references, if anything does."""
    if hasattr(kind, "__struct_fields__"):
        return "give its class weakref=True, or "
    own = vars(kind)
    is_slotted_dataclass = "__dataclass_params__" in own and getattr(own["__dataclass_params__"], "slots", True)
    if is_slotted_dataclass or "__attrs_attrs__" in own:
        return "give its class weakref_slot=True, or "
    if kind.__itemsize__:  # a tuple's or an int's subclass cannot have the slot
        return ""
    return "add '__weakref__' to its __slots__, or "


def _forget(address: int, dead: weakref.ref[Any]) -> None:
    # A new object may have the address by now.
    if address in _serials and _serials[address][0] is dead:
        del _serials[address]
