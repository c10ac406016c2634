"""A network of random Fourier features, with a length scale for each input that the evidence chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_FREQUENCIES = 512  # K
_SCALE = math.log(2.0) + 0.5  # mean of log s + ½ log d: the length scale is then about 0.3 √d in a unit cube
_LOG_NOISE = -4.0  # mean of the log noise variance of standardized outcomes, as in BoTorch's Gaussian processes
_PRECISION_DEVIATION = 10.0  # of the log prior precision: bounds it where the data are constant
_LEAST_NOISE = 1e-5
_FIRST_NOISES = 1e-3, 0.03, 0.3  # starts of the search: there are optima with much noise and with little
_STEPS = 30
_MOST_LOG = 30.0  # of a hyperparameter in the kernel: steps of the search may be so long that numbers overflow


class FourierFeatures(nn.Module):
    """Random features of norm 1, φ(x) = K^-½ (sin W s x, cos W s x) with W_kj ~ N(0, 1).

    φ(x)ᵀφ(x') is an estimate, from K frequencies, of exp(-½ Σ_j s_j² (x_j - x'_j)²), for d inputs.
    """

    frequencies: Tensor  # W, (K, d), the same for the same sizes
    scale: Tensor  # s, (d,), the reciprocal length scale of each input

    def __init__(self, inputs: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        frequencies = torch.randn(_FREQUENCIES, inputs, generator=generator, dtype=torch.float64, device="cpu")
        self.register_buffer("frequencies", frequencies)
        self.register_buffer("scale", torch.full_like(frequencies[0], math.exp(_SCALE) / math.sqrt(inputs)))

    def at(self, x: Tensor, scale: Tensor) -> Tensor:
        """φ at another scale, (n, 2K)."""
        angles = x @ (self.frequencies * scale).T
        return torch.cat([angles.sin(), angles.cos()], -1) / math.sqrt(len(self.frequencies))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 2K)."""
        return self.at(x, self.scale)


class FourierNetwork(nn.Module):
    """Fourier features and a linear layer for each output: f_k(x) = a_k · φ(x) + b_k."""

    precision: Tensor  # (m,), of the prior of a_k and b_k, after `train_with_evidence`
    noise: Tensor  # (m,), of the outcomes

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.features = FourierFeatures(inputs)
        size = 2 * len(self.features.frequencies)
        self.last = nn.ModuleList(nn.Linear(size, 1).double() for _ in range(outputs))  # a_k and b_k
        self.register_buffer("precision", torch.ones(outputs, dtype=torch.float64, device="cpu"))
        self.register_buffer("noise", torch.full((outputs,), _FIRST_NOISES[0], dtype=torch.float64, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """(n, m)."""
        phi = self.features(x)
        return torch.cat([last(phi) for last in self.last], -1)

    def train_with_evidence(self, x: Tensor, y: Tensor, noise: Tensor | None, warm: bool = False) -> None:
        """Maximize the evidence over scales, prior precisions and noises, then the log joint over the a_k and b_k.

        The network is linear in a_k and b_k, so that both are exact: with K_k = (ΦΦᵀ + 1)/p_k and independent outputs,
        y_k ~ N(0, K_k + diag(noise_k)). All outputs have the same scales. The density has several optima, with much
        noise and with little. So the search begins at several noises, and the best optimum is taken. Hyperpriors:
        log s_j ~ N(0.5 + log 2 - ½ log d, 1), log noise_k ~ N(-4, 1), log p_k ~ N(0, 100).

        The inputs are (n, d), the outcomes (n, m), and known variances of the noise () or (n, m). Without these, one
        number for each output is learned, at least 1e-5. If `warm`, another search begins at the present
        hyperparameters.
        """
        first = FourierFeatures(x.shape[1]).scale.to(x), torch.ones_like(y[0])
        noises = _FIRST_NOISES if noise is None else _FIRST_NOISES[:1]
        starts = [(*first, torch.full_like(y[0], value)) for value in noises]
        starts += [(self.features.scale, self.precision, self.noise)] if warm else []
        found = [self._optimum(x, y, noise, *start) for start in starts]
        logs = max(found, key=lambda one: float(self.log_density(x, y, noise, one)))
        with torch.no_grad():
            self.features.scale.copy_(logs[0].exp())
            self.precision.copy_(logs[1].exp())
            if noise is None:
                self.noise.copy_(logs[2].exp() + _LEAST_NOISE)
            phi, factor = self._factor(x, noise, logs)
            weights = torch.cholesky_solve(y.T.unsqueeze(-1), factor).squeeze(-1) / self.precision.unsqueeze(-1)
            for last, own in zip(self.last, weights, strict=True):
                for parameter, value in zip(last.parameters(), (own @ phi, own.sum()), strict=True):
                    parameter.copy_(value)

    def _optimum(
        self, x: Tensor, y: Tensor, noise: Tensor | None, scale: Tensor, precision: Tensor, variance: Tensor
    ) -> list[Tensor]:
        """log s, log p and, if no noise is given, the log of the noise less 1e-5, after a descent by L-BFGS."""
        logs = [scale.log(), precision.log()]
        logs += [] if noise is not None else [(variance - _LEAST_NOISE).clamp_min(_LEAST_NOISE).log()]
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
        value = -0.5 * white.square().sum() - factor.diagonal(dim1=-2, dim2=-1).log().sum()
        deviations = [logs[0] - (_SCALE - 0.5 * math.log(x.shape[1])), logs[1] / _PRECISION_DEVIATION]
        deviations += [] if noise is not None else [logs[2] - _LOG_NOISE]
        return value - 0.5 * sum(one.square().sum() for one in deviations)

    def _factor(self, x: Tensor, noise: Tensor | None, logs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Φ, and L with L Lᵀ = K_k + diag(noise_k) for each output, (m, n, n)."""
        scale, precision, *own = (one.clamp(-_MOST_LOG, _MOST_LOG).exp() for one in logs)
        phi = self.features.at(x, scale)
        joint = (phi @ phi.T + 1.0) / precision.view(-1, 1, 1)
        variances = own[0] + _LEAST_NOISE if noise is None else noise
        variances = variances.T if variances.ndim == 2 else variances.view(-1, 1)
        rounding = 256 * torch.finfo(x.dtype).eps * joint.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
        return phi, torch.linalg.cholesky(joint + torch.diag_embed((variances + rounding).expand(-1, len(x))))
