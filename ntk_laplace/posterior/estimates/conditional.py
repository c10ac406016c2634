"""Conditional evidence from samples of p(θ given the first points): joint density and sum of marginals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.errors import warn
from ntk_laplace.posterior.estimates.weights import effective_samples, log_mean

_FEWEST = 10.0  # independent samples below which their own spread is not known
_EFFECTIVE = 100.0  # effective samples whose average is trusted at any variance: the logs may have a tail to the left
_LEVEL = 0.9  # of the interval
_HUGE = 1e100  # standard error beyond which its square is not computed


@dataclass(frozen=True)
class ConditionalEstimate:
    """Log density of asked points given others, averaged over samples of their posterior; ``float()`` is its value.

    Attributes
    ----------
    value : float
        log (1/S) Σ_s Π_i p(y_i given θ_s) ("joint") or Σ_i log (1/S) Σ_s p(y_i given θ_s) ("marginal"), nats.
    standard_error : float
        Of `value`, by the delta method. For the joint density, that of the gamma distribution which has the first
        three moments of the log densities, if it is larger: weights that were not drawn have no spread.
    bias : float
        Of `value`, to first order: half the sum of the relative variances of the averages, negative. It is not
        subtracted.
    kind : str
        "joint" or "marginal".
    samples, asked : int
        S and N.
    independent : float
        S, or as many independent samples as the chains are worth.
    ess : float
        Effective sample size (Σ w)²/Σ w² of the densities w that are averaged, times `independent` / S. "marginal":
        the smallest of the points.
    variance : float
        Sample variance of the log of the density that is averaged, nats²: of Σ_i log p ("joint"), or the largest of a
        point ("marginal"). An average of e^L over S samples of a normal L needs the variance to be below log S.
    """

    value: float
    standard_error: float
    bias: float
    kind: str
    samples: int
    asked: int
    independent: float
    ess: float
    variance: float

    def __float__(self) -> float:
        return self.value

    @property
    def trusted(self) -> bool:
        """Whether `variance` is at most log of `independent`, or `ess` at least 100; and `independent` at least 10."""
        few = not self.variance <= math.log(self.independent) and self.ess < _EFFECTIVE  # NaN after an overflow, too
        return self.independent >= _FEWEST and not few

    @property
    def interval(self) -> tuple[float, float]:
        """90 % interval of the exact value, nats; (-inf, inf) if the estimate is not to be trusted.

        ``value - bias`` ± t `standard_error`, with Student's t of `independent` - 1 degrees of freedom.
        """
        if not self.trusted:
            return -math.inf, math.inf
        from scipy.stats import t  # installed with scikit-learn

        center, width = self.value - self.bias, float(t.ppf(0.5 + _LEVEL / 2, self.independent - 1))
        return center - width * self.standard_error, center + width * self.standard_error

    @property
    def words(self) -> str:
        """Whether to trust the value, and why."""
        count = f"{self.samples:,} samples"
        if self.independent < self.samples - 0.5:
            count += f", worth {self.independent:,.0f} independent ones"
        if self.independent < _FEWEST:
            return f"not to be trusted: {count}, fewer than {_FEWEST:.0f}, do not show their own spread"
        what = "the log density" if self.kind == "joint" else "a point's log density"
        limit = f"log {self.independent:,.0f} = {math.log(self.independent):.2f}"
        spread = f"variance of {what} {self.variance:,.2f}, "
        if self.trusted:
            relation = "at most" if self.variance <= math.log(self.independent) else "above"
            return f"{count}, {self.ess:,.0f} effective; {spread}{relation} {limit}"
        few = f"{count}, {self.ess:,.1f} effective"
        return f"not to be trusted: {spread}above {limit} ({few}): the average rests on a few"

    def __str__(self) -> str:
        title = "joint log density" if self.kind == "joint" else "sum of marginal log densities"
        error = f" ± {self.standard_error:.3g}" if self.trusted else ""
        return f"{title} of {self.asked:,} points {self.value:,.3f}{error} nats ({self.words})"


def conditional_estimate(log_likelihood: Tensor, kind: str) -> ConditionalEstimate:
    """The estimate from log likelihoods (chains, draws, N), nats; one draw of each chain if they are independent."""
    values = log_likelihood.detach().double().cpu()
    chains, rows = values.shape[:2], values.flatten(0, 1)
    count, asked = rows.shape
    terms = rows.sum(1, keepdim=True) if kind == "joint" else rows  # logs of what is averaged, (S, 1) or (S, N)
    averages = [log_mean(term) for term in terms.T]
    if not all(map(math.isfinite, averages)):  # a density of zero in every sample
        return ConditionalEstimate(sum(averages), math.inf, -math.inf, kind, count, asked, float(count), 0.0, math.inf)
    effective = min(effective_samples(term) for term in terms.T)
    weights = (terms - torch.tensor(averages, dtype=terms.dtype, device="cpu")).exp()  # of mean 1
    positive = bool(torch.isfinite(terms).all())
    # the spread of the logs is seen where a few weights hide theirs; those of densities of zero have none
    seen = (weights.sum(1), terms.sum(1)) if positive else (weights.sum(1),)
    time = max(autocorrelation_time(one.reshape(chains)) for one in seen)
    variances = weights.var(0) / count
    error, bias = float(weights.sum(1).std()) / count**0.5, -0.5 * float(variances.sum())
    if kind == "joint" and positive:
        error = max(error, math.sqrt(_gamma_variance(terms[:, 0]) / count))
        bias = -0.5 * error**2 if error < _HUGE else -math.inf
    return ConditionalEstimate(sum(averages), error * time**0.5, bias * time, kind, count, asked, count / time,
                               effective / time, float(terms.var(0).max()) if positive else math.inf)


def _gamma_variance(logs: Tensor) -> float:
    """Relative variance of e^L for L = a - bG with G of a gamma distribution, from the first three moments of L.

    It is [(1 + b)²/(1 + 2b)]^k - 1 for shape k. Without skewness to the left it is that of a normal L, e^V - 1. In a
    linear-Gaussian model -L is a sum of squares.
    """
    away = logs - logs.mean()
    variance, count = float(away.square().sum()) / (len(logs) - 1), len(logs)
    if variance == 0.0:
        return 0.0
    skewness = float(away.pow(3).mean()) / float(away.square().mean()) ** 1.5
    skewness *= math.sqrt(count * (count - 1)) / (count - 2) if count > 2 else 0.0
    if skewness > -1e-3:
        exponent = variance
    else:
        shape = 4.0 / skewness**2
        b = math.sqrt(variance / shape)
        exponent = shape * (2.0 * math.log1p(b) - math.log1p(2.0 * b))
    return math.expm1(exponent) if exponent < 700.0 else math.inf


def autocorrelation_time(series: Tensor) -> float:
    """Draws of chains (chains, draws) that are worth one independent draw, at least 1 (Vehtari et al. 2021, Eq. 10-12).

    1 + 2 Σ ρ_t, over pairs of lags as long as they are positive, and decreasing (Geyer 1992); chains that do not agree
    make ρ_t large at all lags.
    """
    chains, draws = series.shape
    if draws < 4:
        return 1.0
    centered = series - series.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centered, n=2 * draws)
    covariance = torch.fft.irfft(spectrum.abs().square(), n=2 * draws)[:, :draws].mean(0) / draws
    within = float(covariance[0]) * draws / (draws - 1)
    between = float(series.mean(1).var()) if chains > 1 else 0.0
    total = within * (draws - 1) / draws + between
    if total <= 0.0:
        return 1.0
    correlation = 1.0 - (within - covariance * draws / (draws - 1)) / total
    correlation[0] = 1.0
    pairs = correlation[: draws // 2 * 2].reshape(-1, 2).sum(1)
    negative = (pairs <= 0.0).nonzero()
    pairs = pairs[: int(negative[0]) if len(negative) else len(pairs)].cummin(0).values
    return min(max(1.0, 2.0 * float(pairs.sum()) - 1.0), float(series.numel()))


def warn_of(found: ConditionalEstimate) -> ConditionalEstimate:
    """The estimate, with a warning if it is not to be trusted."""
    if not found.trusted:
        remedy = "more samples" if found.independent < _FEWEST else (
            'the sum of marginals, kind="marginal", fewer points, or method="evidence" of a posterior, which needs no '
            "samples" if found.kind == "joint" else "more samples")
        warn(f"the {found}. Ask for {remedy}")
    return found
