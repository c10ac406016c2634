"""Registered specifications of structures, by the names that ``structure=``, checkpoints and the command line take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ntk_laplace.errors import UnsupportedError
from ntk_laplace.structures.structure import StructureSpec

_Spec = TypeVar("_Spec", bound=type[StructureSpec])
REGISTERED: dict[str, type[StructureSpec]] = {}
"""Specification classes by name."""

_ELSEWHERE = {  # what people who know laplace-torch write
    "kron": 'This structure is called "kfac" here. ', "lowrank": 'The nearest is "nystrom" here. ',
    "last_layer": 'Which weights count is another argument, parameters="last_layer". ',
}


def register_structure(spec: _Spec) -> _Spec:
    """Class decorator: make a specification available under its name, for `structure=`, `load` and the command line.

    Raises
    ------
    UnsupportedError
        If it is no such class, is not complete, has no name, or its name belongs to another class.
    """
    if not (isinstance(spec, type) and issubclass(spec, StructureSpec)):
        raise UnsupportedError("a subclass of ntk_laplace.StructureSpec", f"{spec!r}"[:80],
                               "Register the class itself.")
    missing = sorted(getattr(spec, "__abstractmethods__", ()))
    if missing:
        raise UnsupportedError(f"the methods {', '.join(missing)} of the structure {spec.__qualname__}",
                               "a class without them", "Define them, then register the class.")
    require_name(spec)
    known = REGISTERED.get(spec.name)
    # a class may be defined again: in a notebook's cell, or by a file that is run once more
    if known is not None and (known.__qualname__ != spec.__qualname__ or known.__module__.startswith("ntk_laplace.")):
        raise UnsupportedError("a structure name that is free", f"{spec.name!r} of {known.__qualname__}",
                               "Give the class another name.")
    REGISTERED[spec.name] = spec
    return spec


def require_name(spec: StructureSpec | type[StructureSpec]) -> None:
    """Refuse a specification that is without a name, or has one of another meaning.

    Raises
    ------
    UnsupportedError
        If the name is not a string, is empty or is "auto".
    """
    name = getattr(spec, "name", None)
    if not isinstance(name, str) or name in ("", "auto"):
        cls = spec if isinstance(spec, type) else type(spec)
        raise UnsupportedError(f'a name of the structure {cls.__qualname__} that is a string other than "auto"',
                               "none" if name is None else repr(name), 'Set it in the class, name = "...".')


def structure_names() -> tuple[str, ...]:
    """Names of all registered structures that `structure=` takes, in the order of registration."""
    return tuple(name for name, spec in REGISTERED.items() if spec.offered)


def structure_of(name: str, options: Mapping[str, Any]) -> StructureSpec:
    """The specification of a name, with options.

    Raises
    ------
    UnsupportedError
        If the name is unknown, or the options are not those of the class.
    """
    cls = structure_named(name)
    try:
        return cls(**options)
    except TypeError as error:
        raise UnsupportedError(f"options of the structure {name!r}", f"{', '.join(options) or 'none'} ({error})",
                               f"Pass structure={cls.__qualname__}(...) with its options.") from error


def structure_named(name: str) -> type[StructureSpec]:
    """The specification class of a name.

    Raises
    ------
    UnsupportedError
        If the name is unknown.
    """
    if isinstance(name, type) and issubclass(name, StructureSpec):
        raise UnsupportedError("a structure's name or an object", f"the class {name.__qualname__}",
                               f"Write {name.__qualname__}(), with its options.")
    if not isinstance(name, str) or name not in REGISTERED:
        here = _ELSEWHERE.get(name, "") if isinstance(name, str) else ""
        raise UnsupportedError(f'structure among {", ".join([*structure_names(), "auto"])}', repr(name),
                               f'{here}Use "gp" for small data, "full" for small networks, "kfac" for large ones, '
                               '"auto" to let cost choose an exact one; register_structure adds your own.')
    return REGISTERED[name]
