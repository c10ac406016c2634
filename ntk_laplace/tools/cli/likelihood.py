"""The likelihood of a command: a registered class by name, or one of a Python file, with options of its constructor."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from ntk_laplace.model.likelihoods import Likelihood, registered_likelihoods
from ntk_laplace.tools.cli.python_files import load_likelihood


def build_likelihood(options: argparse.Namespace) -> Likelihood:
    """The likelihood with its options (NTKLaplaceError if the file gives none, or an option has an invalid value)."""
    (path, name), given = options.likelihood, given_options(options)
    return likelihood_choices()[name](**given) if path is None else load_likelihood(path, name, given)


def likelihood_choices() -> dict[str, type[Likelihood]]:
    """Registered classes that need no argument."""
    found = registered_likelihoods()
    return {
        name: cls for name, cls in sorted(found.items())
        if all(p.default is not p.empty for p in inspect.signature(cls).parameters.values())
    }


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the likelihood's class."""
    noise = {} if options.noise is None else {"noise": options.noise}
    return noise | dict(options.likelihood_option)
