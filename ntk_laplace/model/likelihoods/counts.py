"""Likelihoods of counts whose mean is exp(f)."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from ntk_laplace.errors import NonFiniteError
from ntk_laplace.model.likelihoods.count_mixture import CountMixture
from ntk_laplace.model.likelihoods.per_output import PerOutput
from ntk_laplace.model.likelihoods.responses import FactorizedResponse
from ntk_laplace.model.likelihoods.targets import first_bad, require

# The trapezoidal rule for a count under f ~ N(m, s²). As a function of f its distribution has the width 1/√Λ, and the
# error of a step of h deviations is of order exp(-2π²/(h² (1 + s² Λ))), with Λ at the largest f that counts: e^-40 for
# h √(1 + s² Λ) = 0.7. That of small counts, and of r below 1, is exp(-π²/(h s)): e^-30 for h s = 0.33. The step has an
# end, where the count is narrower than the points are apart, and an error of 2 % of s in a quantile's logarithm.
_STEP, _STEP_OF_FEW, _LEAST_STEP, _REACH, _LARGEST = 0.7, 0.33, 0.02, 8.4, 5.0


class Counts(PerOutput):
    """A likelihood of counts with mean ``exp(f)``, independent over outputs.

    Targets are nonnegative whole numbers of shape (N, C), or (N,) for one output.
    """

    is_density = False

    @property
    def dispersion(self) -> Tensor:
        """α of the variance μ + α μ² of a count with mean μ, ()."""
        raise NotImplementedError

    def targets(self, y: Any, num_examples: int, num_outputs: int) -> Tensor:
        """Check counts, (N, C), or (N,) for one output."""
        y = super().targets(y, num_examples, num_outputs)
        remedy = (f"{type(self).__name__}() is for counts; continuous targets want another likelihood, such as "
                  "Gaussian().")
        good = ((y >= 0) & (y == y.floor())) | y.isnan()
        require(good, y, "targets that are whole numbers from 0", remedy)
        return y

    def mean(self, f: Tensor) -> Tensor:
        """Mean count, ``exp(f)``, (N, C)."""
        return f.exp()

    def mean_jacobian(self, f: Tensor) -> Tensor:
        """``exp(f)`` on the diagonal, (N, C, C)."""
        return torch.diag_embed(f.exp())

    def response_variance(self, f: Tensor) -> Tensor:
        """``μ + α μ²`` for μ = exp(f), (N, C)."""
        return f.exp() + (2 * f + self.dispersion.to(f).log()).exp()

    def response_moments(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The mean count is lognormal: ``E μ = exp(m + v/2)``, and ``E μ² = exp(2 m + 2 v)`` for f ~ N(m, v).

        So its variance is ``exp(2 m + v) (exp(v) - 1)``, and the mean of the variance given f is E μ + α E μ².
        """
        if not self._is_known:
            return None
        variance = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0.0)
        rate, log_square = (mean + 0.5 * variance).exp(), 2 * (mean + variance)
        epistemic = (log_square + (-torch.expm1(-variance)).log()).exp()
        return rate, epistemic, rate + (log_square + self.dispersion.to(rate).log()).exp()

    def univariate_of(self, mean: Tensor, covariance: Tensor) -> CountMixture | None:
        """Mixtures of the counts of f ~ N(m, v), output by output, (n, C), by the trapezoidal rule in f."""
        if not self._is_known:
            return None
        deviation = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()
        size = (-self.dispersion.detach().to(mean).log()).exp()  # r = 1/α, which may be infinite
        largest = (mean + _LARGEST * deviation).exp()
        widths = (deviation.square() / (1.0 / largest + 1.0 / size)).detach()  # s² Λ
        wide, far = (float(part.detach().max()) if part.numel() else 0.0 for part in (widths, deviation))
        step = max(_LEAST_STEP, min(_STEP / math.sqrt(1.0 + wide), _STEP_OF_FEW / max(far, _STEP_OF_FEW)))
        ends = math.ceil(_REACH / step)
        z = step * torch.arange(-ends, ends + 1, dtype=mean.dtype, device=mean.device)
        log_rate = mean.unsqueeze(-1) + deviation.unsqueeze(-1) * z
        return CountMixture(-0.5 * z.square(), log_rate, self.dispersion)

    @property
    def _is_known(self) -> bool:
        """Whether this is a class of the library: a subclass of one may override the density."""
        return Counts in type(self).__bases__

    def _rate(self, f: Tensor) -> Tensor:
        """``exp(f)``; NonFiniteError if it is infinite."""
        rate = f.exp()
        if not rate.isfinite().all():
            index = first_bad(~rate.isfinite())
            raise NonFiniteError(f"rates exp(f) within {f.dtype}",
                                 f"f = {float(f.detach()[index].max()):.3g} at example {index}",
                                 "Scale the network's output, or use float64.")
        return rate


class CountResponse(FactorizedResponse):
    """Independent counts, given f."""

    def univariate(self) -> CountMixture:
        """The counts themselves."""
        return CountMixture.single(self.mean, cast(Counts, self.likelihood).dispersion)
