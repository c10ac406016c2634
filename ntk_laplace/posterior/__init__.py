"""The posterior people hold: one set of verbs, whichever space its algebra lives in."""

from ntk_laplace.posterior.prediction import PredictionVerbs
from ntk_laplace.posterior.selection import SelectionVerbs
from ntk_laplace.posterior.what_if import WhatIfVerbs

__all__ = ["Posterior"]


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
