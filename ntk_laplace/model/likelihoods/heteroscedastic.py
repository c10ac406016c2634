"""Heteroscedastic Gaussian: the network predicts a mean and a noise variance for each response."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td
from torch.nn.functional import logsigmoid

from ntk_laplace.errors import HyperparameterError, NetworkError, NonFiniteError, require_choice
from ntk_laplace.model.likelihoods.number_mixture import NumberMixture
from ntk_laplace.model.likelihoods.one_number import NumberResponse
from ntk_laplace.model.likelihoods.per_output import PerOutput
from ntk_laplace.model.likelihoods.registry import register_likelihood
from ntk_laplace.model.likelihoods.responses import FactorizedResponse, Response
from ntk_laplace.model.likelihoods.targets import first_bad

_PARAMETRIZATIONS = ("natural", "log variance")
# of t, where z = sinh(t/10)/0.1 goes to 40 deviations: outliers are explained by a z that is far from 0. The density
# is singular at a distance of π/√(Var s) of the real line, so a step of 1/8 is exact to 1e-13 for deviations of s below
# 4; above, steps are smaller, as they are where means are far apart beside the deviations of normals, at z = -4 too
_REACH, _STEP, _LEAST_STEP, _WIDER, _NARROW = 21.0, 0.125, 0.02, 0.1, -4.0
_FAR = -20.0  # below, log softplus(s) equals s - exp(s)/2 up to rounding in float64


@register_likelihood
class HeteroscedasticGaussian(PerOutput):
    r"""Gaussian likelihood ``y_d = μ_d + ε_d`` whose noise variances ``σ_d²`` are predicted too ([Immer et al. 2023]).

    A network with C = 2D outputs models D independent responses. Output d and output D + d, written u and s, are the
    parameters of response d. Targets are real numbers of shape (N, D), or (N,) for one response.

    Parameters
    ----------
    parametrization : {"log variance", "natural"}
        The default, "log variance", has moments of the predictive that stay moderate where the network is uncertain.

        * ``"natural"``: ``η1 = μ/σ² = u`` and ``η2 = -1/(2σ²) = -softplus(s)/2``, so that
          ``log p = η1 y + η2 y² + η1²/(4 η2) + ½ log(-2 η2) - ½ log 2π``. The precision is ``λ = softplus(s)`` and the
          mean is ``u/λ``.
        * ``"log variance"``: ``μ = u`` and ``log σ² = s``.
    missing : str, optional
        "nan": a NaN target is missing and contributes nothing to log p, its gradient and its curvature. By default a
        NaN is an error.

    Raises
    ------
    HyperparameterError
        If the parametrization is unknown, or `missing` has another value.

    Notes
    -----
    `curvature` is the Fisher information in f. In ``(μ, log σ²)`` it is ``diag(1/σ², ½)``, hence ``Gᵀ diag(1/σ², ½) G``
    with G the derivative of these two in ``(u, s)``. The log density is concave in ``(η1, η2)``, where the Fisher
    information is minus its second derivative. So for ``"natural"`` the Gauss-Newton matrix is that of the network
    followed by softplus, as in [Immer et al. 2023].

    In f the log density is not concave, so minus its second derivative is no curvature of a Gaussian. For ``"natural"``
    its determinant is ``(λ'' (y² - μ² - σ²) + λ'² σ⁴) / (2λ)``, with derivatives in s. A positive function on the whole
    line that is not constant has ``λ'' > 0`` somewhere, because a concave function that is bounded below is constant.
    There the determinant is negative for ``y = 0`` and large ``|μ|``. This holds for softplus, for exp, and for every
    other map to positive precisions. For ``"log variance"`` the determinant is ``-(y - μ)²/(2σ⁴)``.

    Newton steps with the Fisher information (Fisher scoring) find the optimum for ``mean="posterior"`` and
    ``steps=None``; changes of the gradient correct the steps that would converge linearly. With a weak prior they may
    end in a `NumericalError`, because the objective is not convex.

    ``predict(method="glm")`` has one response of ``"log variance"`` in closed form: given s it is normal. Densities of
    others are averaged over quasi-Monte-Carlo points of f, half of them given the target, and so are mean and variance
    under ``"natural"``.

    Examples
    --------
    >>> import torch
    >>> likelihood = HeteroscedasticGaussian("log variance")
    >>> f = torch.tensor([[1.0, 0.0]])  # mean 1, variance 1
    >>> likelihood.log_prob(f, torch.tensor([[1.0]]))
    tensor([-0.9189])
    """

    is_density = True

    def __init__(self, parametrization: str = "log variance", missing: str | None = None) -> None:
        super().__init__(missing)
        require_choice(parametrization, _PARAMETRIZATIONS, f"a parametrization among {_PARAMETRIZATIONS}",
                       error=HyperparameterError)
        self.parametrization = parametrization

    def extra_repr(self) -> str:
        """The parametrization."""
        return f"parametrization={self.parametrization!r}"

    # --- validation

    def bind(self, num_examples: int, num_outputs: int) -> None:
        """Check that the number of outputs is even."""
        self.num_responses(num_outputs)

    def num_responses(self, num_outputs: int) -> int:
        """D = C/2.

        Raises
        ------
        NetworkError
            If C is odd.
        """
        if num_outputs % 2:
            raise NetworkError("a network with two outputs per response for HeteroscedasticGaussian(), (N, 2D)",
                               f"{num_outputs} output" + "s" * (num_outputs > 1),
                               "Let the last layer return the first parameters of all responses, then the second ones.")
        return num_outputs // 2

    # --- the density and its derivatives in f

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log density of each example's observed targets, (N,), nats."""
        mean, log_variance, _ = self._moments(f)
        error = (self._filled(mean, y) - mean) * (-0.5 * log_variance).exp()
        return self._known(-0.5 * (error.square() + log_variance + math.log(2 * math.pi)), y).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """``Gᵀ ((y - μ)/σ², ((y - μ)²/σ² - 1)/2)`` with G = ∂(μ, log σ²)/∂f, 0 where a target is missing, (N, 2D)."""
        mean, log_variance, (mean_by_u, mean_by_s, log_by_s) = self._moments(f)
        precision = (-log_variance).exp()
        filled = self._filled(mean, y)
        by_mean = (filled - mean) * precision
        by_log = 0.5 * ((filled - mean).square() * precision - 1)
        rows = by_mean * mean_by_u, by_mean * mean_by_s + by_log * log_by_s
        return torch.cat([self._known(row, y) for row in rows], -1)

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """The Fisher information ``Gᵀ diag(1/σ², ½) G``, 0 where a target is missing, (N, 2D, 2D)."""
        root = self.root(f, y)
        return root @ root.mT

    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """``Gᵀ diag(1/σ, 1/√2)``, 0 where a target is missing, (N, 2D, 2D)."""
        _, log_variance, (mean_by_u, mean_by_s, log_by_s) = self._moments(f)
        scale = (-0.5 * log_variance).exp()
        entries = scale * mean_by_u, torch.zeros_like(scale), scale * mean_by_s, log_by_s * 0.5**0.5
        a, b, c, d = (torch.diag_embed(self._known(entry, y)) for entry in entries)
        return torch.cat([torch.cat([a, b], -1), torch.cat([c, d], -1)], -2)

    # --- the response

    def mean(self, f: Tensor) -> Tensor:
        """μ, (N, D)."""
        return self._moments(f)[0]

    def mean_jacobian(self, f: Tensor) -> Tensor:
        """∂μ/∂f, (N, D, 2D)."""
        _, _, (mean_by_u, mean_by_s, _) = self._moments(f)
        return torch.cat([torch.diag_embed(mean_by_u), torch.diag_embed(mean_by_s)], -1)

    def response_variance(self, f: Tensor) -> Tensor:
        """σ², (N, D)."""
        return self._moments(f)[1].exp()

    def distribution(self, f: Tensor, scalar: bool = False) -> Response:
        """Independent normal responses given f."""
        mean, log_variance, _ = self._moments(f)
        base = td.Normal(mean, (0.5 * log_variance).exp(), validate_args=False)
        variance = log_variance.exp()
        return FactorizedResponse(self, base, torch.zeros_like(mean), variance, False, num_outputs=f.shape[-1])

    def integrates(self, num_outputs: int) -> bool:
        """Whether there is one response of "log variance", which is a mixture of normals."""
        return num_outputs == 2 and type(self) is HeteroscedasticGaussian and self.parametrization == "log variance"

    def integrate(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response | None:
        """One response of "log variance" for f ~ N(mean, covariance): given s it is normal."""
        moments = self.response_moments(mean, covariance)
        if not self.integrates(mean.shape[-1]) or moments is None:
            return None
        kept = mean[:, :1], mean[:, 1:], covariance[:, :1, 0], covariance[:, :1, 1], covariance[:, 1:, 1]
        step = HeteroscedasticResponse.step(*(part.detach() for part in kept))
        t = _WIDER * torch.arange(-_REACH, _REACH + step / 2, step, dtype=mean.dtype, device=mean.device)
        z = t.sinh() / _WIDER
        return HeteroscedasticResponse(self, moments, kept, t.cosh().log() - 0.5 * z.square(), z, num_outputs=2)

    def univariate_of(self, mean: Tensor, covariance: Tensor) -> NumberMixture | None:
        """Under "log variance", of each response from its two outputs."""
        if type(self) is not HeteroscedasticGaussian or self.parametrization != "log variance":
            return None
        responses = self.num_responses(mean.shape[-1])
        pair = torch.stack([torch.arange(responses, device=mean.device) + part for part in (0, responses)], 1)  # (D, 2)
        blocks = covariance[:, pair.unsqueeze(2), pair.unsqueeze(1)]  # (n, D, 2, 2)
        each = self.integrate(mean[:, pair].flatten(0, 1), blocks.flatten(0, 1))
        return None if each is None else each.univariate().reshaped(len(mean), responses)

    def response_moments(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """For "log variance", where the mean is u, and the noise variance exp(s) lognormal."""
        if type(self) is not HeteroscedasticGaussian or self.parametrization != "log variance":
            return None
        d, variance = self.num_responses(mean.shape[-1]), covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0.0)
        return mean[:, :d], variance[:, :d], (mean[:, d:] + 0.5 * variance[:, d:]).exp()

    def expected(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """In closed form for "log variance", where each (u, s) is normal and 1/σ² = exp(-s) tilts its mean."""
        if type(self) is not HeteroscedasticGaussian or self.parametrization != "log variance":
            return None
        d = self.num_responses(mean.shape[-1])
        filled = self._filled(mean[:, :d], y)
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        both = covariance[:, :d, d:].diagonal(dim1=-2, dim2=-1)  # Cov(u, s)
        log_precision = 0.5 * variance[:, d:] - mean[:, d:]
        _require_range(log_precision)
        precision = log_precision.exp()  # E exp(-s); under the weight exp(-s), u has the mean E u - Cov(u, s)
        error = filled - mean[:, :d] + both
        square = precision * (error.square() + variance[:, :d])
        values = self._known(-0.5 * (square + mean[:, d:] + math.log(2 * math.pi)), y).sum(-1)
        residual = torch.cat([self._known(precision * error, y), self._known(0.5 * (square - 1), y)], -1)
        diagonal = [self._known(precision, y), self._known(torch.full_like(precision, 0.5), y)]
        return values, residual, torch.diag_embed(torch.cat(diagonal, -1))

    # --- saving

    def record(self) -> dict[str, Any]:
        """The parametrization and the mark of missing targets."""
        return {"parametrization": self.parametrization, **super().record()}

    def _moments(self, f: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """μ and log σ², (..., D), and the slopes ∂μ/∂u, ∂μ/∂s, ∂log σ²/∂s; log σ² does not depend on u."""
        responses = self.num_responses(f.shape[-1])
        u, s = f[..., :responses], f[..., responses:]
        if self.parametrization == "log variance":
            _require_range(s)
            return u, s, (torch.ones_like(u), torch.zeros_like(u), torch.ones_like(u))
        log_precision = _log_softplus(s)
        _require_range(-log_precision)
        variance, slope = (-log_precision).exp(), (logsigmoid(s) - log_precision).exp()  # slope = λ'/λ
        return u * variance, -log_precision, (variance, -u * variance * slope, -slope)


class HeteroscedasticResponse(NumberResponse):
    """Response ``y = u + exp(s/2) ε`` for normal (u, s), of which it keeps means, variances and the covariance.

    With ``s = E s + √(Var s) z`` the response is normal given z; points are those of z.
    """

    @staticmethod
    def normals(points: Tensor, *kept: Tensor) -> tuple[Tensor, Tensor]:
        """``N(E[u given s], Var[u given s] + exp s)``."""
        u, s, variance_u, both, variance_s = kept
        finite = torch.finfo(u.dtype)
        deviation, slope = _deviation_and_slope(variance_u, both, variance_s)
        # far away an exponential may overflow; its weight vanishes
        noise = (s + deviation * points).clamp(math.log(finite.tiny), math.log(finite.max) - 1.0).exp()
        return u + slope * points, (variance_u - slope.square()).clamp_min(0.0) + noise

    @classmethod
    def step(cls, *kept: Tensor) -> float:
        """Step of the quadrature that is small enough for all inputs."""
        deviation, slope = _deviation_and_slope(*kept[2:])
        _, narrow = cls.normals(deviation.new_full((1,), _NARROW), *kept)
        most = torch.minimum(4.0 * _STEP / deviation, 0.8 * narrow.sqrt() / slope.abs())
        return max(_LEAST_STEP, min(_STEP, float(most.min()))) if len(most) else _STEP


def _deviation_and_slope(variance_u: Tensor, both: Tensor, variance_s: Tensor) -> tuple[Tensor, Tensor]:
    """√(Var s), and the slope of E[u given s] in z, (n, 1) each."""
    deviation, most = (part.clamp_min(torch.finfo(part.dtype).tiny).sqrt() for part in (variance_s, variance_u))
    return deviation, (both / deviation).clamp(-most, most)


def _log_softplus(s: Tensor) -> Tensor:
    """``log log(1 + exp(s))``, without underflow where exp(s) is small."""
    near = torch.logaddexp(s.clamp_min(_FAR), torch.zeros_like(s)).log()
    low = s.clamp_max(_FAR)
    return torch.where(s < _FAR, low - 0.5 * low.exp(), near)


def _require_range(log_variance: Tensor) -> None:
    """Raise a `NonFiniteError` that names the first example whose variance or precision is not finite."""
    bad = ~(log_variance.detach().abs() < math.log(torch.finfo(log_variance.dtype).max))
    if bad.any():
        index = first_bad(bad.reshape(-1, bad.shape[-1]))
        value = float(log_variance.detach().reshape(-1, bad.shape[-1])[index].abs().max())
        raise NonFiniteError(f"noise variances within {log_variance.dtype}",
                             f"a log variance of size {value:.3g} at example {index}",
                             "Scale the network's output, use float64, or regularize the outputs of the variance.")
