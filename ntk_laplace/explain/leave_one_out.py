"""The training set seen from within: every point predicted from the others, from one factorization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ntk_laplace.curvature import FunctionSpace
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.explain.algebra import leverage_blocks, leverages, without_each
from ntk_laplace.predictive import predictive
from ntk_laplace.structures import Structure, Trained

if TYPE_CHECKING:
    import pandas

__all__ = ["LeaveOneOut", "leave_one_out"]


@dataclass(frozen=True, repr=False)
class LeaveOneOut:
    """Predictions at each training point from all the others, and what the point does to the fit.

    Attributes
    ----------
    mean : Tensor, (N, C)
        Mean of f_i without point i.
    covariance : Tensor, (N, C, C)
        Covariance of f_i without point i.
    log_density : Tensor, (N,)
        log p(y_i | the others), f_i integrated out, in nats.
    plug_in_log_density : Tensor, (N,)
        log p(y_i | mean).
    leverage : Tensor, (N,)
        Largest eigenvalue of SᵀVS, in [0, 1): how much the fit at i rests on i.
    self_influence : Tensor, (N,)
        Nats of log p(y_i | f_i) that the point owes to itself: what it would lose without it.
    effective_parameters : Tensor, (N,)
        tr Λ_iV_ii; their sum is the effective number of parameters.
    information : Tensor, (N,)
        -½ log det(I - Λ_iV_ii): nats that the point adds to what the others say of the weights, its part in how
        sure the posterior is.
    importance : Tensor, (N,)
        Length of the residual r_i ([T20] 5.2).
    targets : Tensor
        Training targets.
    """

    mean: Tensor
    covariance: Tensor
    log_density: Tensor
    plug_in_log_density: Tensor
    leverage: Tensor
    self_influence: Tensor
    effective_parameters: Tensor
    information: Tensor
    importance: Tensor
    targets: Tensor

    @property
    def suspicion(self) -> Tensor:
        """-log p(y_i | the others), (N,): large where the others do not believe the label."""
        return -self.log_density

    def ranked(self, by: str = "suspicion", k: int | None = None) -> Tensor:
        """Training points by any of the columns, the largest first, (k,): "suspicion" lists likely wrong labels.

        Raises
        ------
        UnsupportedError
            If there is no such column.
        """
        columns = self._columns()
        if by not in columns:
            raise UnsupportedError(f"one of {', '.join(columns)}", repr(by), 'Leave it out for "suspicion".')
        return columns[by].argsort(descending=True, stable=True)[:k]

    def to_dataframe(self, by: str | None = None, k: int | None = None) -> pandas.DataFrame:
        """One row per training point, in the order of the data, or by one of the columns, the largest first."""
        import pandas

        count = len(self.mean)
        chosen = torch.arange(count)[:k] if by is None else self.ranked(by, k).cpu()
        numbers = {name: values.cpu()[chosen].tolist() for name, values in self._columns().items()}
        return pandas.DataFrame({
            "training_index": chosen.tolist(),
            "target": [t.item() if t.numel() == 1 else t.tolist() for t in self.targets.cpu()[chosen]],
            "most_likely": self.mean.argmax(1).cpu()[chosen].tolist(),
        } | numbers).drop(columns=[] if self.targets.ndim == 1 else ["most_likely"])  # fmt: skip

    def _columns(self) -> dict[str, Tensor]:
        names = ("suspicion", "log_density", "plug_in_log_density", "self_influence", "leverage",
                 "effective_parameters", "information", "importance")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        n, c = self.mean.shape
        return (
            f"LeaveOneOut({n} training points, {c} output(s); log density {float(self.log_density.sum()):.4g} nats; "
            f"{float(self.effective_parameters.sum()):.3g} effective parameters; largest leverage "
            f"{float(self.leverage.max()):.3g})"
        )


def leave_one_out(trained: Trained, structure: Structure, space: FunctionSpace, samples: int = 1000) -> LeaveOneOut:
    """Compute means, covariances, log densities and leverages."""
    points, likelihood = structure.points, trained.likelihood
    mean, covariance = without_each(space, points, likelihood)
    targets = points.targets.squeeze(-1) if trained.network.scalar and points.targets.ndim == 2 else points.targets
    generator = torch.Generator(device=mean.device).manual_seed(0)
    blocks = leverage_blocks(space)
    with torch.no_grad():
        plug_in = likelihood.log_prob(mean, points.targets)
        integrated = predictive(likelihood, mean, covariance, "glm", samples, generator, trained.network.scalar)
        log_density = integrated.log_prob(targets)
        own = likelihood.log_prob(points.f, points.targets)
        importance = likelihood.residual(points.f, points.targets).norm(dim=1)
    # SᵀV_iiS = I - [B⁻¹]_ii
    used = blocks.shape[1] - blocks.diagonal(dim1=1, dim2=2).sum(1)
    information = -0.5 * torch.linalg.slogdet(blocks).logabsdet
    return LeaveOneOut(mean, covariance, log_density, plug_in, leverages(blocks)[:, -1], own - plug_in, used,
                       information, importance, points.targets)
