"""Precision and noise of a Gaussian linear model by leave-one-out at its own optimum, from one eigendecomposition.

With S Sᵀ = Λ, the whitened rows A = SᵀJ P0^-½ (N R, P) have A Aᵀ = U diag(k) Uᵀ. With all precisions multiplied by a
and the noise by s, the whitened targets z = Sᵀ(y - f + J(θ-μ0)) have the covariance G = A Aᵀ/a + s I. Leaving point n
out, its error and the covariance of its target are [G⁻¹]_nn⁻¹ [G⁻¹z]_n and [G⁻¹]_nn⁻¹, with

    G⁻¹ = (I - U diag(h) Uᵀ)/s,   h = k/(k + a s).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ntk_laplace.errors import UnsupportedError, warn
from ntk_laplace.jacobian.gram import gram
from ntk_laplace.model.likelihoods import Gaussian
from ntk_laplace.posterior.calibrate.densities import Setting
from ntk_laplace.posterior.calibrate.search import Axis, climb
from ntk_laplace.runtime import tuning
from ntk_laplace.structures import FittedModel

_AXES = {"precision": Axis(1e-10, 1e10, 1e-6, 1e6, 13), "noise": Axis(1e-6, 1e6, 1e-4, 1e4, 13)}


class LinearLeaveOneOut:
    """Mean log density of each training point given all others, as a function of the two factors.

    The fit is exact, with a Gaussian likelihood.
    """

    samples: tuple[int | None, ...] = None, None

    def __init__(self, fitted: FittedModel) -> None:
        points, likelihood = fitted.points, fitted.likelihood
        with torch.no_grad():
            root = fitted.root()
            observed = likelihood.observed(points.targets)
            error = points.targets.reshape(points.f.shape).to(points.f) - points.f
            error = error if observed is None else error.masked_fill(~observed.reshape(error.shape), 0.0)
            self._z = ((error + fitted.jvp(fitted.from_prior_mean)).unsqueeze(1) @ root).squeeze(1)  # (N, R)
            self._values, self._vectors = _decomposed(fitted, root)  # k (r,), U (N, R, r)
            kept = torch.ones_like(error) if observed is None else observed.reshape(error.shape).to(error)
            present = points.observed_counts(likelihood)
            self._share = present / present.sum()
            often = points.counts * likelihood.weight
            self._often = torch.where(present > 0, often, 1.0)
            self._missing = kept.shape[1] - kept.sum(1)
            # log N(y - m; Σ_y) = log N(Sᵀ(y - m); SᵀΣ_yS) + log det S, over the observed outputs
            square = root + torch.diag_embed(1.0 - kept * (present > 0).unsqueeze(1))
            self._constant = torch.linalg.slogdet(square).logabsdet - 0.5 * kept.sum(1) * math.log(2 * math.pi)
            self._rotated = torch.einsum("nrj,nr->j", self._vectors, self._z)

    def parts(self, setting: Setting, samples: int | None = None) -> Iterator[Tensor]:
        """All terms of the mean, in one part."""
        a, s = setting["precision"].to(self._z), setting["noise"].to(self._z)
        shrunk = self._values / (self._values + a * s)  # h
        eye = torch.eye(self._z.shape[1], dtype=self._z.dtype, device=self._z.device)
        # [G⁻¹]_nn; it stays regular at a leverage of 1, where nothing predicts the point
        slack = 1.0 + 1e3 * torch.finfo(eye.dtype).eps
        blocks = (slack * eye - torch.einsum("nrj,j,nqj->nrq", self._vectors, shrunk, self._vectors)) / s
        solved = (self._z - torch.einsum("nrj,j->nr", self._vectors, shrunk * self._rotated)) / s  # [G⁻¹z]_n
        covariance = torch.linalg.inv(blocks)
        error = covariance @ solved.unsqueeze(-1)
        # the left-out target counts once, whatever its weight: in units of Σ/weight its noise is s · weight
        covariance = covariance + (s * (self._often - 1.0)).view(-1, 1, 1) * eye
        distance = (error * torch.linalg.solve(covariance, error)).sum((-2, -1))
        log_det = torch.linalg.slogdet(covariance).logabsdet - self._missing * (s * self._often).log()
        yield self._share * (self._constant - 0.5 * (distance + log_det))


def with_left_out_hyperparameters(fitted: FittedModel) -> FittedModel:
    """The model with the precisions and the noise of the best mean leave-one-out density of its linear refit.

    UnsupportedError if the likelihood is not Gaussian, or if the matrix has more rows than `tuning.LARGEST_SPECTRUM`;
    MemoryBudgetError if the eigenvectors do not fit in memory.
    """
    plain = fitted.likelihood.counted_once()
    if type(plain) is not Gaussian:
        raise UnsupportedError('a Gaussian likelihood for refit("loo"), where leave-one-out of a refit is exact',
                               type(plain).__name__, "Leave the objective out, or train with evidence.")
    value, found = climb(LinearLeaveOneOut(fitted), _AXES)
    limits = [name for name, axis in _AXES.items() if axis.at_low(found[name]) or axis.at_high(found[name])]
    if limits:
        warn(f"the leave-one-out density of the refit, {value:.4g} nats a point, still grows beyond the "
             f"bounds of {' and '.join(limits)}")
    moved = fitted.derived(fitted.structure)
    own = moved.likelihood.counted_once()
    assert isinstance(own, Gaussian)
    with torch.no_grad():
        moved.prior.log_precision.add_(math.log(found["precision"]))
        own.log_noise.add_(math.log(found["noise"]))
    return moved


def _decomposed(fitted: FittedModel, root: Tensor) -> tuple[Tensor, Tensor]:
    """k (r,) and U (N, R, r) of A Aᵀ = U diag(k) Uᵀ, from A Aᵀ where rows of J are kept, else from AᵀA, A (N R, P)."""
    n, size = len(root), root.shape[0] * root.shape[2]
    element = fitted.theta.element_size()
    if fitted.structure.spec.keeps_jacobian:
        _require_order(size, 'Use fewer points, or structure="full" with fewer parameters.')
        _require(3 * size * size * element, fitted)
        space = fitted.function_space
        values, vectors = torch.linalg.eigh(gram(space.weighted, space.variances))
        return values.clamp_min(0.0), vectors.view(n, root.shape[2], -1)
    shapes, p = fitted.network.shapes, len(fitted.theta)
    _require_order(p, 'Use structure="gp" with fewer points, or parameters="last_layer".')
    _require((2 * size * p + 2 * p * p) * element, fitted)
    index = torch.arange(n, device=root.device)
    parts = [rows.weighted(root[here]).dense(shapes).transpose(0, 1)  # (m, R, P)
             for here, rows in fitted.own_rows(index)] or [root.new_empty(0, root.shape[2], p)]
    scaled = torch.cat(parts) * fitted.prior.flat_precision().detach().to(fitted.theta).rsqrt()
    square = scaled.flatten(0, 1).T @ scaled.flatten(0, 1)
    fitted.row_reducer.sum_(square)
    values, vectors = torch.linalg.eigh(square)
    kept = values > values[-1] * torch.finfo(values.dtype).eps * p
    values, vectors = values[kept], vectors[:, kept]
    return values, fitted.collected(index, [scaled @ vectors]) / values.sqrt()


def _require_order(order: int, remedy: str) -> None:
    if order > tuning.LARGEST_SPECTRUM:
        raise UnsupportedError(f'a linear model of at most {tuning.LARGEST_SPECTRUM:,} eigenvectors for refit("loo")',
                               f"a matrix of {order:,} rows", remedy)


def _require(needed: int, fitted: FittedModel) -> None:
    fitted.model.require_memory(needed, "the eigenvectors of the linear model",
                                "Use fewer points, or train with evidence.")
