"""Calibration by examples that a training does not see, where leave-one-out is not possible or not to be trusted."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ntk_laplace.errors import NumericalError, untold
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.calibrate import PredictiveFit

_MOST = 5_000  # examples that are kept apart
_STEPS, _TOLERANCE = 160, 0.2  # of L-BFGS at the optimum of a posterior that is not exact; the aim is a tenth of it


def held_out(y: Tensor, classes: bool, seed: int) -> NDArray[np.intp]:
    """A tenth of the examples at random, not too many; of classes the others have each that there is."""
    order = np.random.default_rng(seed).permutation(len(y))
    found, rest = np.split(order, [min(len(y) // 10, _MOST)])
    return np.sort(found[np.isin(y[found], y[rest])] if classes else found)


def calibrated(
    posterior: Posterior, module: nn.Module, data: tuple[Tensor, ...], held: tuple[Tensor, ...]
) -> tuple[Posterior, PredictiveFit]:
    """The posterior, calibrated with held-out data, or that at the optimum of its log joint if that predicts better.

    The weights of the best evidence may fit too little, as of many images, and those of the optimum too much, as of a
    table with many columns. The module gets the weights of the result.
    """
    with untold(True):
        fit = posterior.calibrate(held)
        try:
            further = posterior.retrain(data, groups=None, evidence_steps=0, steps=_STEPS, tolerance=_TOLERANCE,
                                        predictive=None)
        except NumericalError:  # no step decreases the objective
            return posterior, fit
        found = further.calibrate(held)
    if found.after <= fit.after:
        return posterior, fit
    with torch.no_grad():
        for own, other in zip(module.parameters(), further.network.module.parameters(), strict=True):
            own.copy_(other)
    return further, found
