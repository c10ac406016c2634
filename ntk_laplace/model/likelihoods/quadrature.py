"""Expectations over a normal f, output by output, by the trapezoidal rule."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ntk_laplace.model.likelihoods.protocol import ObservationModel
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels

# The rule converges exponentially for functions that are analytic in a strip: with the first singularity at a distance
# d of the real line, in deviations, the error is of order exp(-2πd/h). That of log σ(m + s z) is at d = π/s: below
# 1e-15 for the largest step h up to a deviation s of 4.
_STEP, _LEAST_STEP, _REACH = 0.125, 0.005, 10.0


def expectation_by_output(
    likelihood: ObservationModel, function: Callable[[ObservationModel, Tensor, Tensor], Tensor],
    mean: Tensor, covariance: Tensor, y: Tensor, distance: float = math.inf,
) -> Tensor:
    """E of a function of f ~ N(mean, covariance) that is a sum over outputs, or an array over them, (n, ...).

    The function takes a likelihood, f (m, C) and canonical targets (m, ...), and returns (m, ...). All outputs share a
    node of the rule, because the expectation of each needs its own variance alone: of the covariance (n, C, C) the
    diagonal is read. `distance` is that of the function's first singularity of the real line, in units of f: where
    deviations are larger, the step is smaller.
    """
    deviation = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()
    apart = distance / max(float(deviation.detach().max()), torch.finfo(deviation.dtype).tiny)
    step = max(_LEAST_STEP, min(_STEP, 0.2 * apart))
    z = torch.arange(-_REACH, _REACH + step / 2, step, dtype=torch.float64, device=mean.device)
    weights = torch.softmax(-0.5 * z.square(), 0).to(mean)
    z, found = z.to(mean), []
    for part in panels(len(mean), len(z) * mean.shape[-1], tuning.AVERAGED_OUTPUTS):
        f = mean[part] + z.view(-1, 1, 1) * deviation[part]
        found.append(torch.tensordot(weights, repeated(likelihood, function, f, y, part), 1))
    return torch.cat(found)


def repeated(
    likelihood: ObservationModel, function: Callable[[ObservationModel, Tensor, Tensor], Tensor],
    f: Tensor, y: Tensor, part: slice,
) -> Tensor:
    """A function of f and targets at S values of f (S, m, C) of the examples in `part`, (S, m, ...)."""
    count, n, _ = f.shape
    index = torch.arange(part.start, part.stop, device=f.device).repeat(count)
    values = function(likelihood.at(index), f.flatten(0, 1), y[index])
    return values.unflatten(0, (count, n))
