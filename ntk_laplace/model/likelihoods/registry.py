"""The registered likelihood classes: found by name in checkpoints and on the command line.

A checkpoint contains a class's name, the arguments of its constructor and its hyperparameters, as plain data. The name
is looked up among the classes that this process has registered. Nothing is imported because a file names it.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, TypeVar

from torch import Tensor, nn

from ntk_laplace.errors import UnsupportedError
from ntk_laplace.model.likelihoods.base import Likelihood

_REGISTERED: dict[str, type[Likelihood]] = {}
_Class = TypeVar("_Class", bound=type[Likelihood])


def register_likelihood(cls: _Class) -> _Class:
    """Register a likelihood class by its name, so that `load` and the command line find it. Use it as a decorator.

    `load` builds the likelihood from what its `Likelihood.record` returned. Register the class before you load: a
    checkpoint contains no code, and its names are never imported. A class that is defined again in the same place, as
    in a notebook, replaces the earlier one.

    Parameters
    ----------
    cls : type
        A subclass of `Likelihood`.

    Returns
    -------
    type
        The same class.

    Raises
    ------
    UnsupportedError
        If it is not a likelihood class, or another class is registered under its name.

    Examples
    --------
    >>> import ntk_laplace as ntkl
    >>> @ntkl.register_likelihood
    ... class Laplacian(ntkl.Likelihood):
    ...     def log_prob(self, f, y):
    ...         return -(y - f).abs().sum(1)
    """
    if not (isinstance(cls, type) and issubclass(cls, Likelihood)):
        raise UnsupportedError("a subclass of ntk_laplace.Likelihood", f"{cls!r}", "Register the class itself.")
    for name, other in _REGISTERED.items():
        same = name == cls.__name__ or command_name(other) == command_name(cls)
        if same and _place(other) != _place(cls):
            raise UnsupportedError(f"a unique name for the likelihood {cls.__module__}.{cls.__qualname__}",
                                   f"{name}, which is {other.__module__}.{other.__qualname__}", "Rename the class.")
    _REGISTERED[cls.__name__] = cls
    return cls


def _place(cls: type) -> tuple[str, str]:
    """Where a class is defined: its file, or its module if it has none, and its name there."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file or cls.__module__, cls.__qualname__


def registered_likelihoods() -> dict[str, type[Likelihood]]:
    """The registered classes by their names on the command line."""
    return {command_name(cls): cls for cls in _REGISTERED.values()}


def command_name(cls: type[Likelihood]) -> str:
    """Name of a class on the command line: ``HeteroscedasticGaussian`` is "heteroscedastic-gaussian"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cls.__name__).lower()


def likelihood_record(likelihood: Likelihood) -> dict[str, Any]:
    """A likelihood as plain containers of tensors: class name, `Likelihood.record` and hyperparameters.

    UnsupportedError if `Likelihood.record` contains other objects, which a checkpoint cannot hold.
    """
    return {**record_to_build(likelihood), "state": dict(likelihood.state_dict())}


def record_to_build(likelihood: Likelihood) -> dict[str, Any]:
    """The arguments of `built`: class name and `Likelihood.record`. UnsupportedError as `likelihood_record`."""
    name, options = type(likelihood).__name__, likelihood.record()
    if not isinstance(options, dict) or not _is_plain(options):
        raise UnsupportedError(f"a record of {name} with numbers, strings, tensors, dicts, lists", repr(options)[:200],
                               "Return plain values from record(), and build objects in from_record().")
    return {"name": name, "options": options}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def likelihood_from_record(record: Mapping[str, Any], given: Likelihood | None = None) -> Likelihood:
    """The likelihood of a `likelihood_record`, with its hyperparameters; the given one takes them, if there is one.

    UnsupportedError if the class is not registered and none is given, or the given one has another class, other
    options or other hyperparameters.
    """
    name = record["name"]
    if given is not None:
        differ = type(given).__name__ if type(given).__name__ != name else None
        with contextlib.suppress(UnsupportedError):  # a class that is not registered has only its name
            differ = differ or difference(built(name, record["options"]), given)
        if differ:
            raise UnsupportedError(f"a likelihood {name}, as in the fit", differ,
                                   "Pass the likelihood of the fit, or leave it out.")
    found = built(name, record["options"]) if given is None else given
    try:
        found.load_state_dict(record["state"])
    except RuntimeError as error:
        raise UnsupportedError(f"a {name} with the hyperparameters of the fit", str(error).splitlines()[-1].strip(),
                               "Return all arguments of the constructor from record(), or pass likelihood= to load()."
                               ) from error
    return found


def difference(own: Likelihood, other: Likelihood) -> str | None:
    """In what two likelihoods differ beside the values of hyperparameters: a class, or an option; None if in nothing.

    Options are public attributes that are numbers, words or tuples. Functions are not compared.
    """
    for one, two in zip_longest(own.modules(), other.modules()):
        first, second = type(one).__name__, type(two).__name__
        if first != second:
            return f"{first} and {second}"
        options, others = _options(one), _options(two)
        for name in sorted(options.keys() | others.keys()):
            if options.get(name) != others.get(name):
                return f"{first} with {name}={options.get(name)!r} and with {name}={others.get(name)!r}"
    return None


def _options(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"
            and (value is None or isinstance(value, (bool, int, float, str, tuple)))}


def built(name: str, options: Mapping[str, Any]) -> Likelihood:
    """A likelihood of a registered class, from what its `Likelihood.record` returned.

    UnsupportedError if the class is not registered.
    """
    if name not in _REGISTERED:
        raise UnsupportedError(
            f"likelihood= the {name} of the fit", "none",
            "A checkpoint contains no code: register the class with ntk_laplace.register_likelihood, or pass it to "
            "load().",
        )
    return _REGISTERED[name].from_record(options)
