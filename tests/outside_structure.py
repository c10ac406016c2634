"""A structure from outside the library, by eigendecomposition, written against public names only.

The command line loads this file too, as the file of a network: `build` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

import ntk_laplace as ntkl


class EigenPrecision(ntkl.PosteriorPrecision):
    """H = P0^½ U (1 + λ) Uᵀ P0^½ with U λ Uᵀ = P0^-½ JᵀΛJ P0^-½."""

    def __init__(self, ggn: Tensor, prior: ntkl.GaussianPrior) -> None:
        super().__init__(prior, ggn)
        scale = self.prior_precision.rsqrt()
        values, self._vectors = torch.linalg.eigh(scale.unsqueeze(1) * ggn * scale)
        self._values, self._scale = values.clamp_min(0.0), scale

    def log_det(self) -> Tensor:
        """log det B = Σ log(1 + λ)."""
        return self._values.log1p().sum()

    def solve(self, vectors: Tensor) -> Tensor:
        """H⁻¹ v."""
        turned = (vectors * self._scale) @ self._vectors
        return (turned / (1.0 + self._values)) @ self._vectors.T * self._scale

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from N(0, H⁻¹)."""
        noise = torch.randn(count, len(self._values), dtype=self._values.dtype, device=self._values.device,
                            generator=generator)
        return noise * (1.0 + self._values).rsqrt() @ self._vectors.T * self._scale

    def spectrum(self) -> Tensor:
        """λ."""
        return self._values


@ntkl.register_structure
@dataclass(frozen=True)
class Eigen(ntkl.SummedSpec):
    """Exact weight space by eigendecomposition."""

    name: ClassVar[str] = "eigh"
    exact: ClassVar[bool] = True

    def zeros(self, model: ntkl.LinearizedModel) -> dict[str, Tensor]:
        """JᵀΛJ of no points."""
        p = model.network.num_parameters
        return {"ggn": torch.zeros(p, p, dtype=model.jacobian_pass.dtype, device=model.network.device)}

    def add(self, sums: dict[str, Tensor], rows: ntkl.Jacobian, model: ntkl.LinearizedModel) -> None:
        """JᵀΛJ += Σ rows of SᵀJ, squared."""
        dense = rows.dense(model.network.shapes).flatten(0, 1)
        sums["ggn"] += dense.T @ dense

    def precision(self, sums: dict[str, Tensor], model: ntkl.LinearizedModel) -> EigenPrecision:
        """Eigendecompose at the prior's present precisions."""
        return EigenPrecision(sums["ggn"], model.prior)


def build() -> nn.Module:
    """The network of the command line's test."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
