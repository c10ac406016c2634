"""The posterior people hold: one set of verbs, whichever space its algebra lives in."""

import inspect
from typing import TypeVar

from ntk_laplace.network import outside_autocast
from ntk_laplace.posterior.prediction import PredictionVerbs
from ntk_laplace.posterior.selection import SelectionVerbs
from ntk_laplace.posterior.what_if import WhatIfVerbs

__all__ = ["Posterior"]


_Class = TypeVar("_Class", bound=type)


def _outside_autocast(cls: _Class) -> _Class:
    """The class with each public method, and each property, run outside of the caller's `torch.autocast`."""
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if name.startswith("_"):
            continue
        if inspect.isfunction(member):
            setattr(cls, name, outside_autocast()(member))
        elif isinstance(member, property):
            setattr(cls, name, property(outside_autocast()(member.fget), member.fset, member.fdel, member.__doc__))
    return cls


@_outside_autocast
class Posterior(SelectionVerbs, PredictionVerbs, WhatIfVerbs):
    """Laplace-GGN posterior of a trained network.

    Made by `ntk_laplace.laplace`. The network's Jacobians at the training points are computed once; the prior's and
    likelihood's hyperparameters may change at any time and every later answer sees it.

    Attributes
    ----------
    network : Network
        Private copy of the network at its trained weights θ*.
    likelihood : Likelihood
    prior : GaussianPrior
    structure : str
        "gp", "full", "kfac", "ekfac", "inf" or "diag".
    """
