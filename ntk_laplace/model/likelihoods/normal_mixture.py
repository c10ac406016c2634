"""Single numbers whose distribution is a mixture of normals, and their quantiles."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch import distributions as td

from ntk_laplace.model.likelihoods.number_mixture import NumberMixture
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels

_STEPS = 200  # of which few are taken: each is half of the one before the last at most, or halves the bounds
_LEAST = 1e-20  # weight: less does not change a distribution function, for the lowest of the levels as the unit
_CLOSE, _ROUNDING = 1e-12, 1e-15  # the last step in deviations, and relative to the quantile


class NormalMixture(NumberMixture):
    """Mixtures of K normals with the same weights, one for each number: a distribution of torch with `icdf`.

    Parameters
    ----------
    log_weights : Tensor, (K,)
        Up to a constant: the weights are divided by their sum.
    mean, deviation : Tensor, (..., K) or (..., 1)
        Of the normals; the batch shape is (...). Deviations are positive.

    Raises
    ------
    DataError
        If the shapes are others.
    """

    component_distribution: td.Normal
    _names: ClassVar[str] = "means and deviations"

    def __init__(self, log_weights: Tensor, mean: Tensor, deviation: Tensor) -> None:
        super().__init__(log_weights, mean, deviation)

    def _component(self, *parts: Tensor) -> td.Normal:
        mean, deviation = parts
        return td.Normal(mean, deviation, validate_args=False)

    @classmethod
    def normal(cls, mean: Tensor, variance: Tensor) -> NormalMixture:
        """Of one normal for each number, (...)."""
        return cls(mean.new_zeros(1), mean.unsqueeze(-1), variance.sqrt().unsqueeze(-1))

    def affine(self, scale: Tensor, shift: Tensor) -> NormalMixture:
        """Of ``scale * y + shift``, for a positive scale; both are broadcast to the batch shape."""
        scale, shift = scale.unsqueeze(-1), shift.unsqueeze(-1)
        mean, deviation = self._parts
        return NormalMixture(self.log_weights, scale * mean + shift, scale * deviation)

    def icdf(self, value: Tensor) -> Tensor:
        """Quantiles of the levels `value`, broadcast against the batch shape; NaN outside of (0, 1).

        Those of several normals have no gradient.
        """
        weights = self.log_weights.double().exp()
        q, number = self._levels(value)
        levels, number = q.flatten(), number.flatten()
        found = [q.new_zeros(0)]
        for here in panels(len(levels), len(weights), tuning.AVERAGED_OUTPUTS):
            mean, deviation = self._rows(number[here])
            found.append(mean[:, 0] + deviation[:, 0] * torch.special.ndtri(levels[here]) if len(weights) == 1
                         else _solved(weights, mean, deviation, levels[here]))
        numbers = torch.where((levels > 0) & (levels < 1), torch.cat(found), torch.nan)
        return numbers.reshape(q.shape).to(self.mean.dtype)


class LogNormalMixture(NumberMixture):
    """Mixtures of K log-normal distributions with the same weights, one for each positive number.

    Parameters
    ----------
    log_weights : Tensor, (K,)
        Up to a constant: the weights are divided by their sum.
    mean, deviation : Tensor, (..., K) or (..., 1)
        Of the normals that their logarithms have; the batch shape is (...).

    Raises
    ------
    DataError
        If the shapes are others.
    """

    _names: ClassVar[str] = "means and deviations"

    def __init__(self, log_weights: Tensor, mean: Tensor, deviation: Tensor) -> None:
        self.logarithm = NormalMixture(log_weights, mean, deviation)
        super().__init__(log_weights, mean, deviation)

    def _component(self, *parts: Tensor) -> td.LogNormal:
        mean, deviation = parts
        return td.LogNormal(mean, deviation, validate_args=False)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density, -infinity for numbers that are not positive."""
        logs = torch.where(x > 0, x, 1.0).log()
        return torch.where(x > 0, self.logarithm.log_prob(logs) - logs, -torch.inf)

    def cdf(self, x: Tensor) -> Tensor:
        """Probability of a number of at most x."""
        found = self.logarithm.cdf(torch.where(x > 0, x, 1.0).log())
        return torch.where(x > 0, found, torch.zeros_like(found))

    def icdf(self, value: Tensor) -> Tensor:
        """Quantiles of the levels `value`, broadcast against the batch shape; NaN outside of (0, 1)."""
        return self.logarithm.icdf(value).exp()


@torch.no_grad()
def _solved(weights: Tensor, mean: Tensor, deviation: Tensor, level: Tensor) -> Tensor:
    """Quantiles (n,) of mixtures (n, K), by Newton steps between bounds.

    First they are those of Cantelli's inequality, and the quantiles of the single normals. The equation is
    log P(y) = log q, which is smooth in both tails; an upper quantile is a lower one of -y.
    """
    side = torch.where(level > 0.5, -1.0, 1.0).to(level)
    mean, level = side.unsqueeze(-1) * mean, torch.minimum(level, 1.0 - level)
    center = (weights * mean).sum(-1)
    spread = (weights * (deviation.square() + (mean - center.unsqueeze(-1)).square())).sum(-1).sqrt()
    odds = (level / (1.0 - level)).sqrt()
    few = weights > _LEAST * level.where(level > 0.0, 1.0).min()  # levels that are none may be among them
    mean, deviation = mean if mean.shape[1] == 1 else mean[:, few], deviation.expand(-1, len(few))[:, few]
    weights = weights[few]
    alone = mean + deviation * torch.special.ndtri(level).unsqueeze(-1)
    low = torch.maximum(center - spread / odds, alone.amin(-1))
    high = torch.minimum(center + spread * odds, alone.amax(-1))
    y = center.clamp(low, high)
    last = before = high - low
    for _ in range(_STEPS):
        z = (y.unsqueeze(-1) - mean) / deviation
        below = 0.5 * (torch.special.erfc(-z * 0.5**0.5) @ weights)
        density = (torch.exp(-0.5 * z.square()) / deviation) @ weights / (2.0 * torch.pi) ** 0.5
        low, high = torch.where(below < level, y, low), torch.where(below < level, high, y)
        tried = y - (below / level).log() * below / density
        step, close = (tried - y).abs(), torch.maximum(_CLOSE * spread, _ROUNDING * y.abs())
        done = step <= close  # also where rounding errors put the step outside of the bounds
        newton = (tried > low) & (tried < high) & (step <= 0.5 * before)
        found = torch.where(done | newton, tried, 0.5 * (low + high))
        before, last, y = last, (found - y).abs(), found
        if bool((done | (high - low <= close)).all()):  # between modes no step is Newton's
            break
    return side * y
