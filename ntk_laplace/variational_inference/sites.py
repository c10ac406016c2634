"""Anchored LGVA: the network is linearized once, at θ*, and q maximizes the ELBO of that model ([T20] 4.2, 4.3).

f_n = f(x_n; θ*) + J_n (θ - θ*). Under q = N(μ, H⁻¹) the outputs are f_n ~ N(m_n, V_nn), and all that a step needs of
the data are expectations over f_n, C numbers. In function space a step of size γ changes the site of each point,

    l_n ← (1-γ) l_n + γ E[r + Λ (m_n - f(x_n; θ*))],    L_n ← (1-γ) L_n + γ E[Λ],

and then H = D + Jᵀ L J and H (μ - θ*) = c P0 (μ0 - θ*) + Jᵀ l. The diagonal D goes from that of the start to P0, and
the share c from 0 to 1. All matrices are N R x N R, for any number of steps, and no row of an earlier step is kept.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import FunctionSpacePrecision, PosteriorPrecision, accumulate_ggn
from ntk_laplace.errors import NumericalError, UnsupportedError
from ntk_laplace.jacobian import Jacobian, placed
from ntk_laplace.model.expectations import Expectation
from ntk_laplace.model.likelihoods.differentiation import root_of_hessian
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.linalg import symmetric_root
from ntk_laplace.structures import FittedModel
from ntk_laplace.variational_inference.iteration import Iteration
from ntk_laplace.variational_inference.states import DataTerms, DenseState


class _Anchored(Iteration):
    """The network linearized once, with its training data: of a Laplace posterior at θ*, which keeps them or its rows.

    H at the start is the number `start` times the identity; by default it is that of the Laplace posterior. The
    expectations of each training point take so many samples of f, where they are needed.
    """

    def __init__(self, fitted: FittedModel, start: float | None = None, samples: int = 256) -> None:
        self._fitted = FittedModel(fitted.model, fitted.structure)  # without its factorization
        self._start, self._expectation = start, Expectation(fitted.likelihood, samples)
        self._theta, self._prior, self._shapes = fitted.theta, fitted.prior, fitted.network.shapes

    @abstractmethod
    def moments(self) -> tuple[Tensor, Tensor]:
        """m (N, C) and V_nn (N, C, C)."""

    def _batches(self) -> Iterator[Jacobian]:
        """J, in batches of consecutive training points."""
        return self._fitted.rows_at(torch.arange(self._fitted.num_examples, device="cpu"))

    def _curvature_at_anchor(self) -> Tensor:
        """Λ at θ*, (N, C, C)."""
        return self._fitted.points.curvature(self._fitted.curvature_type, self._fitted.likelihood).detach()

    def _derivatives(self) -> tuple[Tensor, Tensor]:
        """E r (N, C) and E Λ (N, C, C) at the present moments, times the example weights.

        UnsupportedError if an E Λ_n is not positive semidefinite: the likelihood is not log-concave there.
        """
        points = self._fitted.points
        residual, curvature = self._expectation.derivatives(*self.moments(), points.targets)
        root_of_hessian(curvature)  # refuses what is not positive semidefinite
        if points.weights is None:
            return residual, curvature
        return residual * points.weights.unsqueeze(1), curvature * points.weights.view(-1, 1, 1)

    def _require_anchor(self, record: Mapping[str, Any]) -> None:
        """Refuse a record of a network that was linearized at other weights (UnsupportedError)."""
        own, theta = self._theta, record["anchor"].to(self._theta)
        if own.shape != theta.shape or not torch.allclose(own, theta, rtol=1e-6, atol=1e-6 * float(theta.abs().max())):
            raise UnsupportedError("to resume with the network linearized at the weights of the interrupted run",
                                   "other weights", "Pass the same network and start=, or start anew without resume=.")


class AnchoredWeights(_Anchored):
    """Anchored LGVA in weight space, where H is a P x P matrix."""

    def __init__(self, fitted: FittedModel, start: float | None = None, samples: int = 256) -> None:
        super().__init__(fitted, start, samples)
        theta = self._theta
        if start is not None:
            self._state = DenseState.isotropic(theta, start, self._prior)
            return
        excess = theta.new_zeros(len(theta), len(theta))
        for terms in self._terms(torch.zeros_like(fitted.points.f), self._curvature_at_anchor()):
            accumulate_ggn(excess, terms.rows, self._shapes)
        self._state = DenseState(theta, excess, self._prior)

    @property
    def mean(self) -> Tensor:
        return self._state.mean

    @property
    def precision(self) -> PosteriorPrecision:
        return self._state.precision

    def moments(self) -> tuple[Tensor, Tensor]:
        """m (N, C) and V_nn (N, C, C)."""
        moved = self._shapes.named(self.mean - self._theta)
        parts = [(rows.f + rows.jvp(moved), self._state.covariance_blocks(rows)) for rows in self._batches()]
        mean, covariance = (torch.cat(same) for same in zip(*parts, strict=True))
        return mean, covariance

    def step(self, step_size: float) -> float:
        """Take one step, with two passes over the data."""
        return self._state.update(step_size, self._terms(*self._derivatives()))

    def _terms(self, residual: Tensor, curvature: Tensor) -> Iterator[DataTerms]:
        """Shares of the batches in Jᵀ E r and Jᵀ E[Λ] J."""
        root = symmetric_root(curvature)
        for part, rows in placed(self._batches()):
            yield DataTerms(rows.vjp(residual[part], self._shapes), rows.weighted(root[part]))

    def record(self) -> dict[str, Any]:
        """Copies of the state's tensors, and θ*."""
        return self._state.record() | {"anchor": self._theta.clone()}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Continue from a record of the same θ*."""
        self._require_anchor(record)
        self._state.restore(record)


class AnchoredSites(_Anchored):
    """Anchored LGVA in function space, with one site per training point; the Laplace posterior keeps rows of J."""

    def __init__(self, fitted: FittedModel, start: float | None = None, samples: int = 256) -> None:
        super().__init__(fitted, start, samples)
        self._rows, self._share = Jacobian.concatenate(list(self._batches())), 0.0
        self._held: FunctionSpacePrecision | None = None
        f, theta, prior = self._rows.f, self._theta, self._prior
        self._linear = torch.zeros_like(f)
        self._curvature = self._curvature_at_anchor() if start is None else f.new_zeros(*f.shape, f.shape[1])
        basis = fitted.likelihood.identified(f.shape[1])
        self._identified = None if basis is None else basis.to(f)
        self._pull = prior.flat_precision().detach().to(theta) * (prior.flat_mean().to(theta) - theta)
        self._factorize()

    # --- moments

    @property
    def mean(self) -> Tensor:
        return self._theta + self._displacement

    @property
    def precision(self) -> FunctionSpacePrecision:
        """H of the present q; `log_det` is relative to D."""
        if self._held is None:
            raise NumericalError("sites with a precision", "those of a step that failed", "Restore an earlier record.")
        return self._held

    def moments(self) -> tuple[Tensor, Tensor]:
        """m (N, C), and V_nn (N, C, C) in the directions on which the likelihood depends.

        In these, Sᵀ V_nn S = I - [B⁻¹]_nn with S Sᵀ = L. The right side is a difference of numbers close to 1 where a
        site hardly changes V; there V_nn is solved for.
        """
        precision = self.precision
        seen = torch.eye(self._root.shape[2], dtype=self._root.dtype, device=self._root.device) - self._blocks
        covariance = self._left_inverse.mT @ seen @ self._left_inverse
        least = seen.diagonal(dim1=1, dim2=2).min(1).values
        solved = (least < torch.finfo(seen.dtype).eps ** (1 / 3)).nonzero().squeeze(1)
        if len(solved):
            blocks = precision.covariance_blocks(self._rows.subset(solved))
            if self._identified is not None:
                projector = self._identified @ self._identified.mT
                blocks = projector @ blocks @ projector
            covariance[solved] = blocks
        return self._outputs, covariance

    # --- steps

    def step(self, step_size: float) -> float:
        """Take one step: one factorization of B, and the diagonal blocks of its inverse."""
        mean, displacement = self._outputs, self._displacement
        residual, curvature = self._derivatives()
        self._linear = torch.lerp(self._linear, residual + _times(curvature, mean - self._rows.f), step_size)
        self._curvature = torch.lerp(self._curvature, curvature, step_size)
        self._share += step_size * (1.0 - self._share)
        self._factorize()
        # μ ← μ + γ H⁻¹g, so that gᵀH⁻¹g is the square of the move in the metric of H, over γ²
        moved, pushed = self._displacement - displacement, self._outputs - mean
        square = (self.precision.prior_precision * moved.square()).sum()
        square += (pushed * _times(self._curvature, pushed)).sum()
        return float(square.sqrt()) / step_size

    def _factorize(self) -> None:
        """Everything that follows from the sites."""
        within, basis = self._curvature, self._identified
        if basis is not None:
            within = basis.mT @ within @ basis
        values, vectors = torch.linalg.eigh(within)
        roots = values.clamp_min(0.0).sqrt().unsqueeze(1)  # rounding makes an eigenvalue that is zero negative
        vectors = vectors if basis is None else basis @ vectors
        self._root = vectors * roots
        self._left_inverse = (vectors * torch.where(roots > 0, 1.0 / roots, 0.0)).mT
        self._held = None  # free the old B before the new one is allocated
        self._held = FunctionSpacePrecision(self._rows, self._root, self._diagonal())
        # now, before an ELBO asks for effective parameters: they come with the same blocks, rounded otherwise
        self._blocks = self._held.inverse_blocks
        natural = self._rows.vjp(self._linear, self._shapes).add_(self._pull, alpha=self._share)
        self._displacement = self.precision.solve(natural)
        self._outputs = self._rows.f + self._rows.jvp(self._shapes.named(self._displacement))

    def _diagonal(self) -> GaussianPrior:
        """The prior, with the precisions D."""
        prior = self._prior
        if self._start is None or self._share == 1.0:
            return prior
        found = copy.deepcopy(prior)
        with torch.no_grad():
            found.log_precision.copy_(torch.lerp(torch.full_like(prior.precision, self._start), prior.precision,
                                                 self._share).log())
        return found

    # --- storage

    def record(self) -> dict[str, Any]:
        """Copies of the sites, the share of the prior, the start and θ*."""
        return {"linear": self._linear.clone(), "curvature": self._curvature.clone(), "share": self._share,
                "start": self._start, "anchor": self._theta.clone()}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Continue from a record of the same θ*."""
        self._require_anchor(record)
        self._linear, self._curvature = (record[name].to(self._linear) for name in ("linear", "curvature"))
        self._share, self._start = float(record["share"]), record["start"]
        self._factorize()


def _times(blocks: Tensor, vectors: Tensor) -> Tensor:
    """Products of blocks (N, C, C) with vectors (N, C)."""
    return (blocks @ vectors.unsqueeze(-1)).squeeze(-1)
