"""log p(D | f + J(θ - θ*)) of the linearized model, from rows of J at all training points."""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_laplace.jacobian import Jacobian
from ntk_laplace.runtime import tuning
from ntk_laplace.structures.fitted_model import FittedModel
from ntk_laplace.structures.weight_likelihood.base import (
    REMEDY,
    GradientGraph,
    LocalCurvature,
    WeightedLikelihood,
    WeightLikelihood,
    differentiated,
)
from ntk_laplace.structures.weight_likelihood.many_points import ManyPoints


class LinearizedLikelihood(WeightLikelihood):
    """log p(D | f + J(θ - θ*)) of the linearized model, from rows of J at all training points.

    Parameters
    ----------
    fitted : FittedModel
    count : int
        Weights at a time, at most, for the prediction of the memory.

    Raises
    ------
    MemoryBudgetError
        If the rows, or outputs at so many weights, do not fit in memory.
    """

    def __init__(self, fitted: FittedModel, count: int) -> None:
        model, points = fitted.model, fitted.points
        self._f, self._theta, self._shapes = points.f.detach(), model.theta, model.network.shapes
        self._points = ManyPoints(fitted.likelihood, points)
        held = 4 * count * (model.network.num_parameters + points.f.numel()) * points.f.element_size()
        model.require_memory(held, f"outputs and gradients at {count:,} weights", REMEDY)
        self._rows = all_rows(fitted)

    def outputs(self, thetas: Tensor) -> Tensor:
        """f + J(θ_s - θ*), (S, N, C)."""
        return self._f + self._rows.products(self._shapes.parts(thetas - self._theta)).permute(2, 1, 0)

    def values(self, thetas: Tensor) -> Tensor:
        return self._points.values(self.outputs(thetas))

    def weighted(self, weights: Tensor) -> WeightedLikelihood:
        return _WeightedLinear(self, weights)

    def at_once(self) -> int:
        return max(1, tuning.CHAIN_BYTES // (8 * self._f.nbytes))

    def _pulled(self, cotangents: Tensor) -> Tensor:
        """Jᵀv, (S, P), for v (S, N, C)."""
        return self._rows.transposed_products(cotangents.permute(2, 1, 0), self._shapes)

    def values_and_gradients(self, thetas: Tensor) -> tuple[Tensor, Tensor]:
        values, residual = self._points.values_and_residuals(self.outputs(thetas))
        return values, self._pulled(residual)


class _WeightedLinear(WeightedLikelihood):
    def __init__(self, of: LinearizedLikelihood, weights: Tensor) -> None:
        self._of, self._weights = of, weights

    def values_and_gradients(self, thetas: Tensor) -> tuple[Tensor, Tensor]:
        of = self._of
        values, residual = of._points.values_and_residuals(of.outputs(thetas), weights=self._weights)
        return values, of._pulled(residual)

    def curvature(self, thetas: Tensor) -> LocalCurvature:
        """Gradients and exact Hessians, JᵀΛJ with minus the second derivative of log p."""
        of = self._of
        with torch.enable_grad():
            f = of.outputs(thetas).requires_grad_()
            residual = differentiated(of._points.log_prob(f, slice(None), self._weights).sum(), f, None)
        graph = GradientGraph(slice(None), f, residual)

        def products(vectors: Tensor) -> Tensor:
            moved = of._rows.products(of._shapes.parts(vectors)).permute(2, 1, 0)
            return of._pulled(graph.product(moved))

        return LocalCurvature(of._pulled(residual.detach()), products)


def all_rows(fitted: FittedModel) -> Jacobian:
    """Rows of J at all training points, in blocks, as `FittedModel.gathered_rows`."""
    n = fitted.num_examples
    return fitted.gathered_rows(torch.arange(n, device="cpu"), f"rows of J at {n:,} training points", REMEDY, 2)
