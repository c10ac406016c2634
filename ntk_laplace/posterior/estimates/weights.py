"""Importance weights: their mean with its standard error, the effective sample size and the Pareto shape k̂."""

from __future__ import annotations

import math

import torch
from torch import Tensor

RELIABLE = 0.7
"""k̂ above which the mean of the weights is not an estimate (Vehtari, Simpson, Gelman, Yao and Gabry 2024)."""

_EQUAL, _ROUNDINGS = 1e-9, 100  # spread of equal log weights, relative to their size, and in roundings of their dtype
_FEWEST_TAIL = 5  # weights from which the shape of their tail is estimated
_PRIOR_DRAWS, _PRIOR_SHAPE = 10, 0.5  # of the weakly informative prior of the shape, as in PSIS


def log_mean(log_weights: Tensor) -> float:
    """log (1/S) Σ w_s."""
    return float(torch.logsumexp(log_weights, 0)) - math.log(len(log_weights))


def effective_samples(log_weights: Tensor) -> float:
    """(Σ w)² / Σ w², between 1 and S; 0 if all weights are zero."""
    top = log_weights.max()
    if not bool(torch.isfinite(top)):
        return 0.0
    weights = (log_weights - top).exp()
    return float(weights.sum().square() / weights.square().sum())


def standard_error(log_weights: Tensor) -> float:
    """Standard error of `log_mean` by the delta method: that of the mean of w, over the mean; infinite for one weight.

    Var(w)/(S mean²) = (S/ESS - 1)/(S - 1).
    """
    count, effective = len(log_weights), effective_samples(log_weights)
    if count < 2 or effective == 0.0:
        return math.inf
    return math.sqrt(max(0.0, count / effective - 1.0) / (count - 1))


def pareto_shape(log_weights: Tensor) -> float:
    """Shape k̂ of the generalized Pareto distribution of the largest weights, as in Pareto smoothed importance sampling.

    The tail has min(S/5, 3 √S) weights. The fit is that of Zhang and Stephens (2009), with the weakly informative prior
    of PSIS. -inf where the weights are equal up to rounding, and NaN where there are too few to tell.
    """
    ordered, rounding = log_weights.double().sort().values, torch.finfo(log_weights.dtype).eps
    count = len(ordered)
    # a log weight is a difference of larger numbers, each with its rounding
    equal = max(_EQUAL, _ROUNDINGS * rounding) * (1.0 + float(ordered[-1].abs()))
    if count > 1 and float(ordered[-1] - ordered[0]) <= equal:
        return -math.inf
    size = math.ceil(min(0.2 * count, 3 * math.sqrt(count)))
    if size < _FEWEST_TAIL or not bool(torch.isfinite(ordered[-1])):
        return math.nan
    weights = (ordered - ordered[-1]).exp()
    above = weights[-size:] - weights[-size - 1]
    if float(above[0]) <= 0.0:  # ties at the cutoff
        above = above[above > 0]
    if len(above) < _FEWEST_TAIL:
        return math.nan
    return _generalized_pareto(above)


def _generalized_pareto(x: Tensor) -> float:
    """Shape of a generalized Pareto distribution of ascending positive x (n,): the mean over a profile posterior."""
    n = len(x)
    quartile = x[int(n / 4 + 0.5) - 1]
    points = 30 + int(math.sqrt(n))
    grid = torch.arange(1, points + 1, dtype=x.dtype, device=x.device)
    # candidates of b = -k/σ ([Zhang and Stephens 2009] Eq. 9)
    b = 1.0 / x[-1] + (1.0 - torch.sqrt(points / (grid - 0.5))) / (3.0 * quartile)
    shapes = torch.log1p(-b.unsqueeze(1) * x).mean(1)
    profile = n * (torch.log(-b / shapes) - shapes - 1.0)
    mean = (torch.softmax(profile, 0) * b).sum()
    shape = float(torch.log1p(-mean * x).mean())
    return (n * shape + _PRIOR_DRAWS * _PRIOR_SHAPE) / (n + _PRIOR_DRAWS)
