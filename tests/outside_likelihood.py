"""A likelihood as a user would write it, from public names alone: positive responses with two outputs each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Size, Tensor

import ntk_laplace as ntkl


@ntkl.register_likelihood
class Gamma(ntkl.Likelihood):
    """Gamma responses y > 0 of mean exp(u) and shape exp(s + shift), with f = (u, s) of shape (N, 2D).

    In (log mean, log shape) the Fisher information is diag(a, a² ψ'(a) - a). The log density is not concave.
    """

    is_density = True

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.log_shift = torch.nn.Parameter(torch.tensor(float(shift), dtype=torch.float64))
        self.shift = float(shift)

    def _parameters_of(self, f: Tensor) -> tuple[Tensor, Tensor]:
        log_mean, s = f.chunk(2, -1)
        return log_mean.exp(), (s + self.log_shift.to(f)).exp()

    def num_responses(self, num_outputs: int) -> int:
        return num_outputs // 2

    def event_shape(self, num_outputs: int) -> Size:
        return Size((num_outputs // 2,))

    def targets(self, y: Any, num_examples: int, num_outputs: int) -> Tensor:
        y = super().targets(y, num_examples, num_outputs)
        if y.shape != (num_examples, num_outputs // 2) or not (y > 0).all():
            raise ntkl.TargetError(f"positive targets of shape ({num_examples}, {num_outputs // 2})",
                                   f"shape {tuple(y.shape)}, smallest {float(y.min()):g}", "Check the targets.")
        return y

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mean, shape = self._parameters_of(f)
        terms = shape * (shape / mean).log() + (shape - 1) * y.log() - shape * y / mean - torch.lgamma(shape)
        return terms.sum(1)

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        _, shape = self._parameters_of(f)
        return torch.diag_embed(torch.cat([shape, shape**2 * torch.polygamma(1, shape) - shape], 1))

    def mean(self, f: Tensor) -> Tensor:
        return self._parameters_of(f)[0]

    def response_covariance(self, f: Tensor) -> Tensor:
        mean, shape = self._parameters_of(f)
        return torch.diag_embed(mean**2 / shape)

    def record(self) -> dict[str, Any]:
        return {"shift": self.shift}
