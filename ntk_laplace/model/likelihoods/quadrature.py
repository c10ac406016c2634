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
# of the points of a gamma distribution: nats below the maximum of its density where it ends, at the outermost; and
# log λ of an outlier at 10,000 deviations
_LOST, _FURTHEST, _OUTLIERS = 37.0, 5000.0, -2.0 * math.log(1e4)
_RARE, _MISSING = 1e-17, 1e-9  # a weight that changes no distribution function; a part of a variance that counts


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


def expected_by_output(
    likelihood: ObservationModel, mean: Tensor, covariance: Tensor, y: Tensor, distance: float = math.inf
) -> tuple[Tensor, Tensor, Tensor]:
    """E log p (n,), E r (n, C) and E Λ (n, C, C), by `expectation_by_output`."""
    functions = (lambda own, f, y: own.log_prob(f, y), lambda own, f, y: own.residual(f, y),
                 lambda own, f, y: own.curvature(f, y))
    log_prob, residual, curvature = (
        expectation_by_output(likelihood, function, mean, covariance, y, distance) for function in functions
    )
    return log_prob, residual, curvature


def gamma_points(df: Tensor) -> tuple[Tensor, Tensor]:
    """Log weights and points (K,) of λ ~ Γ(ν/2, ν/2), the precision of Student's t as a mixture of normals.

    The density of u = log λ is proportional to exp(a (u - e^u)) with a = ν/2. The error of the rule with step h is of
    order Γ(a + 2πi/h)/Γ(a). The range is that where the density is above e^-37 of its maximum; below it goes on to
    where λ determines the density of t at 10,000 deviations, if that is above e^-5000. The last point has what is
    missing of E 1/λ, and so of the variance of t, for ν near 2.
    """
    df = df.double()
    shape = 0.5 * float(df.detach())
    step = 2.0 * math.pi / (25.0 + math.sqrt(2.0 * _LOST * shape))
    low, high = _below(_LOST / shape), math.log1p(2.0 * (_LOST / shape + math.sqrt(_LOST / shape)))
    low = min(low, max(_OUTLIERS, _below(_FURTHEST / shape)))
    u = torch.arange(low, high + step, step, dtype=torch.float64, device=df.device)
    log_weights, points = torch.log_softmax(0.5 * df * (u - u.exp()), 0), u.exp()
    missing = float((df / (df - 2.0) - (log_weights.exp() / points).sum()).detach())
    if missing > _MISSING:
        log_weights = torch.cat([log_weights, u.new_tensor([math.log(_RARE)])])
        points = torch.cat([points, u.new_tensor([_RARE / missing])])
    return log_weights, points


def _below(ratio: float) -> float:
    """u at which ``u - e^u + 1`` is below minus the ratio."""
    return -(ratio + 2.0 * math.sqrt(ratio))


def repeated(
    likelihood: ObservationModel, function: Callable[[ObservationModel, Tensor, Tensor], Tensor],
    f: Tensor, y: Tensor, part: slice,
) -> Tensor:
    """A function of f and targets at S values of f (S, m, C) of the examples in `part`, (S, m, ...)."""
    count, n, _ = f.shape
    index = torch.arange(part.start, part.stop, device=f.device).repeat(count)
    values = function(likelihood.at(index), f.flatten(0, 1), y[index])
    return values.unflatten(0, (count, n))
