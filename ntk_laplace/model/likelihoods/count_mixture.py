"""Single counts whose distribution is a mixture of Poisson or negative binomial ones, and their quantiles."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch import distributions as td

from ntk_laplace.model.likelihoods.count_mass import log_mass
from ntk_laplace.model.likelihoods.number_mixture import NumberMixture
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.runtime.panels import panels

_STEPS = 64  # halvings of the bounds of a quantile, or of their logarithms
_INFINITE = 1e300  # an upper bound where there is none
_SUMMED = 2**10  # counts that are added up for a quantile; a level near 1 has more


class CountMixture(NumberMixture):
    """Mixtures of K Poisson or negative binomial distributions with the same weights, one for each count.

    A distribution of torch with `cdf` and `icdf`, which have no gradient.

    Parameters
    ----------
    log_weights : Tensor, (K,)
        Up to a constant: the weights are divided by their sum.
    log_rate : Tensor, (..., K) or (..., 1)
        Logarithms of their means μ; the batch shape is (...).
    dispersion : Tensor, ()
        α of the variances μ + α μ², 0 for Poisson.

    Raises
    ------
    DataError
        If the shapes are others.
    """

    _names: ClassVar[str] = "logarithms of rates"

    def __init__(self, log_weights: Tensor, log_rate: Tensor, dispersion: Tensor) -> None:
        self._dispersion = dispersion.detach().to(log_rate)
        super().__init__(log_weights, log_rate)

    @classmethod
    def single(cls, rate: Tensor, dispersion: Tensor) -> CountMixture:
        """Of one distribution for each number, (...)."""
        return cls(rate.new_zeros(1), rate.log().unsqueeze(-1), dispersion)

    def _with(self, log_weights: Tensor, *parts: Tensor) -> CountMixture:
        (log_rate,) = parts
        return CountMixture(log_weights, log_rate, self._dispersion)

    def _component(self, *parts: Tensor) -> td.Distribution:
        (log_rate,), dispersion = parts, self._dispersion
        if not float(dispersion) > 0:
            return td.Poisson(log_rate.exp(), validate_args=False)
        return td.NegativeBinomial(1.0 / dispersion, logits=log_rate + dispersion.log(), validate_args=False)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log probability of counts x, broadcast against the batch shape."""
        each = log_mass(x.unsqueeze(-1).to(self._parts[0]), self._parts[0], self._dispersion.log())
        return (each + self.log_weights).logsumexp(-1)

    def cdf(self, x: Tensor) -> Tensor:
        """Probability of a count of at most x, broadcast against the batch shape."""
        like = self.mean
        x = torch.as_tensor(x, device=like.device).double()
        x = x.expand(torch.broadcast_shapes(x.shape, like.shape))
        number = torch.arange(like.numel(), device=like.device).view(like.shape).expand_as(x).flatten()
        found = [self._below(x.flatten()[here], number[here], tail=False)
                 for here in panels(len(number), len(self.log_weights), tuning.AVERAGED_OUTPUTS)]
        return torch.cat([x.new_zeros(0), *found]).reshape(x.shape).to(like.dtype)

    def icdf(self, value: Tensor) -> Tensor:
        """The least counts that are reached with the probabilities `value`; NaN outside of (0, 1)."""
        q, number = self._levels(value)
        levels, number = q.flatten(), number.flatten()
        found = [self._quantiles(levels[here], number[here])
                 for here in panels(len(levels), len(self.log_weights), tuning.AVERAGED_OUTPUTS)]
        counts = torch.cat([levels.new_zeros(0), *found])
        return torch.where((levels > 0) & (levels < 1), counts, torch.nan).reshape(q.shape).to(self.mean.dtype)

    @torch.no_grad()
    def _below(self, count: Tensor, number: Tensor, tail: bool) -> Tensor:
        """P(y <= count) of these counts (m,), or P(y > count), which keeps its digits in the upper tail."""
        from scipy import special  # installed with scikit-learn; its import changes warning filters

        (log_rate,), dispersion = (part.detach().cpu().numpy() for part in self._rows(number)), float(self._dispersion)
        k = np.floor(count.cpu().numpy())[:, None]
        at = np.maximum(k, 0.0) + 1.0
        if not dispersion > 0:
            found = (special.gammainc if tail else special.gammaincc)(at, np.exp(log_rate))
        else:  # the share of αμ, or of 1, in 1 + αμ: the smaller one has all its digits
            size, odds = 1.0 / dispersion, log_rate + np.log(dispersion)
            of_few, of_many = (special.betainc, special.betaincc) if tail else (special.betaincc, special.betainc)
            found = np.where(odds < 0, of_few(at, size, special.expit(np.minimum(odds, 0.0))),
                             of_many(size, at, special.expit(-np.maximum(odds, 0.0))))
        found = np.where(k < 0, float(tail), np.broadcast_to(found, (len(k), found.shape[1])))
        weights = self.log_weights.double().exp()
        each = to_tensor(found).to(weights.device).expand(-1, len(weights))
        return each @ weights

    @torch.no_grad()
    def _quantiles(self, levels: Tensor, number: Tensor) -> Tensor:
        """Quantiles of these numbers (m,), between bounds, those of Cantelli's inequality."""
        center, spread = (part.reshape(-1)[number].double() for part in (self.mean, self.stddev))
        inside = levels.clamp(1e-300, 1.0 - 1e-16)
        odds = (inside / (1.0 - inside)).sqrt()
        # not reached at `low`, and reached at `high`; moments of a wide f may be beyond the numbers
        low = (center - spread / odds).nan_to_num(0.0).floor().clamp_min(0.0) - 1.0
        high = (center + spread * odds).nan_to_num(_INFINITE, posinf=_INFINITE).ceil()
        found, few = torch.empty_like(levels), high < _SUMMED
        ordered = high.argsort()  # so that the counts that are added up are about as many as each needs
        ordered, each = ordered[few[ordered]], len(self.log_weights) * _SUMMED
        for rows in panels(len(ordered), each, tuning.AVERAGED_OUTPUTS):
            here = ordered[rows]
            found[here] = self._summed(levels[here], number[here], int(high[here].max()))
        rest = ~few
        found[rest] = self._halved(levels[rest], number[rest], low[rest], high[rest])
        return found

    def _summed(self, levels: Tensor, number: Tensor, most: int) -> Tensor:
        """Quantiles, by sums over all counts up to `most`."""
        (log_rate,), y = self._rows(number), torch.arange(most + 1, device=levels.device).double()
        each = log_mass(y, log_rate.unsqueeze(-1), self._dispersion.double().log()).exp()  # (m, K, y)
        weights = self.log_weights.double().exp().expand(log_rate.shape[-1])
        below = torch.einsum("k,mky->my", weights, each).cumsum(-1)
        return (below < levels.unsqueeze(-1)).sum(-1).to(levels)

    def _halved(self, levels: Tensor, number: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Quantiles, by halving bounds."""
        upper = levels > 0.5
        for _ in range(_STEPS):
            if not len(levels) or bool((high - low <= 1.0).all()):
                break
            middle = torch.where(high > 4.0 * (low + 2.0), ((low + 2.0) * high).sqrt(), (low + high) / 2).floor()
            reached = torch.where(upper, self._below(middle, number, True) <= 1.0 - levels,
                                  self._below(middle, number, False) >= levels)
            low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
        return high
