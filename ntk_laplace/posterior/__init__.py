"""The posterior: one public interface for function space and weight space."""

import inspect
from typing import TypeVar

from ntk_laplace.model.network import outside_autocast
from ntk_laplace.posterior.compression import CompressionVerbs
from ntk_laplace.posterior.coverage import CoverageVerbs
from ntk_laplace.posterior.retraining import RetrainingVerbs
from ntk_laplace.posterior.sampled_evidence import SampledEvidenceVerbs
from ntk_laplace.posterior.selection import SelectionVerbs
from ntk_laplace.posterior.what_if import WhatIfVerbs

__all__ = ["Posterior"]


_Class = TypeVar("_Class", bound=type)


def _outside_autocast(cls: _Class) -> _Class:
    """Class decorator: run each public method and property outside the caller's `torch.autocast`."""
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if name.startswith("_"):
            continue
        if inspect.isfunction(member):
            setattr(cls, name, outside_autocast()(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(cls, name, property(outside_autocast()(member.fget), member.fset, member.fdel, member.__doc__))
    return cls


@_outside_autocast
class Posterior(SelectionVerbs, SampledEvidenceVerbs, RetrainingVerbs, CoverageVerbs, CompressionVerbs, WhatIfVerbs):
    """Laplace-GGN posterior of a trained network.

    Made by `ntk_laplace.laplace`. The hyperparameters of the prior and the likelihood may change at any time; every
    later result uses the current values.

    Attributes
    ----------
    network : Network
        Private copy of the network at its trained weights θ*.
    likelihood : Likelihood
    prior : GaussianPrior
    structure : str
        "gp", "full", "iterative", "nystrom", "kfac", "ekfac", "inf", "diag", or one of your own.
    predictive : Calibration or None
        The fitted calibration that `predict` uses.
    """
