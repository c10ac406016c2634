"""A network of random Fourier features, with a length scale for each input that the evidence chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["FourierFeatures", "FourierNetwork"]

FREQUENCIES = 512
_SCALE = math.log(2.0) + 0.5  # mean of log s + ½ log d: the length scale is then about 0.3 √d in a unit cube
_LOG_NOISE = -4.0  # mean of the log noise variance of standardized outcomes, as in BoTorch's Gaussian processes
_PRECISION_DEVIATION = 10.0  # of the log prior precision: bounds it where the data are constant
_FIRST_NOISE, _LEAST_NOISE = 1e-3, 1e-5
_STEPS = 30


class FourierFeatures(nn.Module):
    """Random features of norm 1, φ(x) = K^-½ (sin W s x, cos W s x) with W_kj ~ N(0, 1).

    φ(x)ᵀφ(x') is an estimate, from K frequencies, of exp(-½ Σ_j s_j² (x_j - x'_j)²).

    Parameters
    ----------
    inputs, count : int
        d and K.

    Attributes
    ----------
    frequencies : Tensor, (K, d)
        W, the same for the same sizes.
    scale : Tensor, (d,)
        s, the reciprocal length scale of each input.
    """

    frequencies: Tensor
    scale: Tensor

    def __init__(self, inputs: int, count: int = FREQUENCIES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("frequencies", torch.randn(count, inputs, generator=generator, dtype=torch.float64))
        self.register_buffer("scale", torch.full((inputs,), math.exp(_SCALE) / math.sqrt(inputs), dtype=torch.float64))

    def at(self, x: Tensor, scale: Tensor) -> Tensor:
        """φ at another scale, (n, 2K)."""
        angles = (scale * x) @ self.frequencies.T
        return torch.cat([angles.sin(), angles.cos()], -1) / math.sqrt(len(self.frequencies))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 2K)."""
        return self.at(x, self.scale)


class FourierNetwork(nn.Module):
    """Fourier features and a linear layer: f(x) = A φ(x) + b.

    Attributes
    ----------
    precision, noise : float
        Of the prior of A and b, and of the outcomes, after `train_with_evidence`.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.features = FourierFeatures(inputs)
        self.last = nn.Linear(2 * len(self.features.frequencies), outputs).double()
        self.precision, self.noise = 1.0, _FIRST_NOISE

    def forward(self, x: Tensor) -> Tensor:
        """(n, m)."""
        found: Tensor = self.last(self.features(x))
        return found

    def train_with_evidence(self, x: Tensor, y: Tensor, noise: Tensor | None) -> None:
        """Maximize the evidence over the scales, the prior precision and the noise, then the log joint over A and b.

        The network is linear in A and b, so that both are exact: with K = (ΦΦᵀ + 1)/p, y ~ N(0, K + diag(noise)).
        The search begins at the present hyperparameters and at those of a new network: where the present ones call a
        function noise, there is another optimum. Hyperpriors: log s_j ~ N(0.5 + log 2 - ½ log d, 1), log noise ~
        N(-4, 1), log p ~ N(0, 100).

        Parameters
        ----------
        x : Tensor, (n, d)
        y : Tensor, (n, m)
        noise : Tensor, () or (n, m), optional
            Known variances; None: one number is learned, at least 1e-5.
        """
        present = self.features.scale, self.precision, self.noise
        first = FourierFeatures(x.shape[1]).scale.to(x), 1.0, _FIRST_NOISE
        found = [self._optimum(x, y, noise, *start) for start in (present, first)]
        logs = max(found, key=lambda one: float(self.log_density(x, y, noise, one)))
        with torch.no_grad():
            self.features.scale.copy_(logs[0].exp())
            self.precision = float(logs[1].exp())
            self.noise = self.noise if noise is not None else float(logs[2].exp()) + _LEAST_NOISE
            phi, factor = self._factor(x, noise, logs)
            weights = torch.cholesky_solve(y.T.unsqueeze(-1), factor.expand(y.shape[1], -1, -1)).squeeze(-1)
            self.last.weight.copy_(weights @ phi / self.precision)
            self.last.bias.copy_(weights.sum(1) / self.precision)

    def _optimum(
        self, x: Tensor, y: Tensor, noise: Tensor | None, scale: Tensor, precision: float, variance: float
    ) -> list[Tensor]:
        """log s, log p and, if no noise is given, the log of the noise less 1e-5, after a descent by L-BFGS."""
        logs = [scale.log(), x.new_tensor(math.log(precision))]
        logs += [] if noise is not None else [x.new_tensor(math.log(max(variance - _LEAST_NOISE, _LEAST_NOISE)))]
        logs = [value.detach().clone().requires_grad_() for value in logs]
        optimizer = torch.optim.LBFGS(logs, max_iter=_STEPS, tolerance_change=1e-4, line_search_fn="strong_wolfe")

        def objective() -> Tensor:
            optimizer.zero_grad()
            value = -self.log_density(x, y, noise, logs)
            value.backward(inputs=logs)
            return value.detach()

        optimizer.step(objective)
        return [value.detach() for value in logs]

    def log_density(self, x: Tensor, y: Tensor, noise: Tensor | None, logs: Sequence[Tensor]) -> Tensor:
        """Evidence and log density of the hyperparameters (log s, log p, log noise), up to a constant."""
        _, factor = self._factor(x, noise, logs)
        white = torch.linalg.solve_triangular(factor, y.T.unsqueeze(-1), upper=False)
        copies = y.shape[1] / len(factor)  # of one factor for all outputs
        value = -0.5 * white.square().sum() - copies * factor.diagonal(dim1=-2, dim2=-1).log().sum()
        deviations = [logs[0] - (_SCALE - 0.5 * math.log(x.shape[1])), logs[1] / _PRECISION_DEVIATION]
        deviations += [] if noise is not None else [logs[2] - _LOG_NOISE]
        return value - 0.5 * sum(one.square().sum() for one in deviations)

    def _factor(self, x: Tensor, noise: Tensor | None, logs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Φ, and L with L Lᵀ = K + diag(noise), (1, n, n) or (m, n, n)."""
        phi = self.features.at(x, logs[0].exp())
        joint = (phi @ phi.T + 1.0) * (-logs[1]).exp()
        variances = noise if noise is not None else logs[2].exp() + _LEAST_NOISE
        rounding = 256 * torch.finfo(x.dtype).eps * joint.diagonal().mean()
        variances = (variances.T if variances.ndim else variances.view(1, 1)) + rounding
        return phi, torch.linalg.cholesky(joint + torch.diag_embed(variances.expand(-1, len(x))))
