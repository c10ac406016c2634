"""The likelihood of a command: a registered class by name, or one of a Python file, with options of its constructor."""

from __future__ import annotations

import argparse
import ast
import inspect
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ntk_laplace.model.likelihoods import Likelihood, registered_likelihoods
from ntk_laplace.tools.cli.python_files import load_likelihood


@dataclass(frozen=True)
class LikelihoodName:
    """What follows ``--likelihood``: the name of a registered class, or of a class or function in a file."""

    name: str
    path: Path | None = None

    def __str__(self) -> str:
        return self.name if self.path is None else f"{self.path}:{self.name}"


def add_likelihood_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the likelihood to a parser, in a group of their own."""
    group = parser.add_argument_group("the likelihood")
    group.add_argument("--likelihood", type=_likelihood, metavar="NAME",
                        help=f"of the targets y: {', '.join(_choices())}, or FILE.py:CLASS for your own; the file is "
                        "run")
    group.add_argument("--noise", type=positive, metavar="VARIANCE",
                        help="of gaussian targets, in squared units of y (default: 1)")
    group.add_argument("--likelihood-option", type=_option, action="append", default=[], metavar="NAME=VALUE",
                        help="an argument of the likelihood's class, such as missing=nan or \"parametrization=log "
                        "variance\"; may be repeated")


def likelihood_fault(options: argparse.Namespace) -> str:
    """What is wrong with the likelihood's options; empty if nothing is."""
    chosen, given = options.likelihood, _given(options)
    if chosen.path is not None:
        return ""
    takes = list(inspect.signature(_choices()[chosen.name]).parameters)
    wrong = [name for name in given if name not in takes]
    if not wrong:
        return ""
    among = f"one of {', '.join(takes)}" if takes else "none"
    return f"expected options of --likelihood {chosen}: {among}; got {wrong[0]}."


def build_likelihood(options: argparse.Namespace) -> Likelihood:
    """The likelihood, built with its options.

    Raises
    ------
    NTKLaplaceError
        If the file does not give a likelihood, or an option has an invalid value.
    """
    chosen, given = options.likelihood, _given(options)
    if chosen.path is not None:
        return load_likelihood(chosen.path, chosen.name, given)
    return _choices()[chosen.name](**given)


def _choices() -> dict[str, type[Likelihood]]:
    """Registered classes that need no argument."""
    found = registered_likelihoods()
    return {
        name: cls for name, cls in sorted(found.items())
        if all(p.default is not p.empty for p in inspect.signature(cls).parameters.values())
    }


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the likelihood's class."""
    noise = {} if options.noise is None else {"noise": options.noise}
    return noise | dict(options.likelihood_option)


def _likelihood(text: str) -> LikelihoodName:
    file, colon, name = text.rpartition(":")
    if colon and file.endswith(".py") and name.isidentifier():
        return LikelihoodName(name, Path(file).expanduser())
    if text not in _choices():
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(_choices())}, "
                                         "or name a class as FILE.py:CLASS)")
    return LikelihoodName(text)


def _option(text: str) -> tuple[str, Any]:
    """``NAME=VALUE`` as a name and a Python literal; other values are text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE; got {text!r}.")
    try:
        return name.strip(), ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):
        return name.strip(), value.strip()


def positive(text: str, below: float = math.inf, expected: str = "a positive number") -> float:
    """A positive number below a bound."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < below:
        raise argparse.ArgumentTypeError(f"expected {expected}; got {text!r}.")
    return value
