"""Elliptical slice sampling of f at the training points of the linearized model: N C numbers, nothing to tune.

The prior of f is N(m, K) with K = J P0⁻¹ Jᵀ = A Aᵀ. The chains start from it, or from Laplace's Gaussian of the
linearized model, which is the prior times Gaussian sites at the outputs f*:

    log site_n(f_n) = log p(y_n | f*_n) + r_nᵀ(f_n - f*_n) - ½ (f_n - f*_n)ᵀ Λ_n (f_n - f*_n).

With f = m + A z, the Gaussian of z has the precision I + AᵀΛA, and its integral is the evidence with its correction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ntk_laplace.curvature import CurvatureType
from ntk_laplace.jacobian.gram import gram
from ntk_laplace.posterior.estimates.paths import Path, uniform
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import cholesky_log_det, cholesky_of, symmetric_root
from ntk_laplace.runtime.sampling import normal
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.forecast import memory_of
from ntk_laplace.structures.weight_likelihood import ManyPoints, all_rows

_SHRINKS = 200  # of a bracket: it then has the width of rounding, and the chain stays


@dataclass(frozen=True)
class Outputs:
    """States of S chains: f (S, N, C), and Δ (S,) as `gain`."""

    f: Tensor
    gain: Tensor


class SlicedPath(Path[Outputs]):
    """Elliptical slices (Murray, Adams and MacKay 2010) of f under f_β; they start from "prior" or "posterior"."""

    sampler = "elliptical slice sampling of f"

    def __init__(self, fitted: FittedModel, start: str) -> None:
        points, model = fitted.points, fitted.model
        self._points = ManyPoints(fitted.likelihood, points)
        rows, self._known = all_rows(fitted), points.f.detach()
        self._theta, self._shapes, self._rows = model.theta, model.network.shapes, rows
        with torch.no_grad():
            away = rows.jvp(model.network.unflatten(-fitted.from_prior_mean))
        n, c = self._known.shape
        if model.network.num_parameters <= n * c:
            with torch.no_grad():
                root = rows.dense(self._shapes).transpose(0, 1).flatten(0, 1)
                root = root * model.prior.flat_precision().to(root).rsqrt()
        else:
            root = symmetric_root(gram(rows, model.prior.variances()))
        self._base = self._known + away, root
        self._sites: _Sites | None = None
        if start == "posterior":
            self._sites = _Sites(fitted, away)
            mean, half, self._log_evidence = self._sites.posterior(root)
            self._base = self._base[0] + mean.view(n, c), half

    @staticmethod
    def fits(fitted: FittedModel, chains: int) -> bool:
        """Whether the matrices of N C numbers fit in memory, and are of a size whose eigenvalues are computed."""
        size = fitted.points.f.numel()
        rank = min(size, fitted.network.num_parameters)
        needed = (4 * size * rank + 2 * rank**2 + 8 * chains * size) * fitted.points.f.element_size()
        return size <= tuning.SLICED_OUTPUTS and needed <= memory_of(fitted.model)

    def start(self, count: int, generator: Generator) -> Outputs:
        return self._at(self._base[0] + self._noise(self._base[1], count, generator))

    def at_weights(self, thetas: Tensor) -> Outputs:
        return self._at(self._known + self._rows.products(self._shapes.parts(thetas - self._theta)).permute(2, 1, 0))

    def _at(self, f: Tensor) -> Outputs:
        gain = self._points.values(f)
        if self._sites is not None:
            gain = gain - self._sites.values(f - self._known) + self._log_evidence
        return Outputs(f, gain)

    def _noise(self, root: Tensor, count: int, generator: Generator) -> Tensor:
        return (normal((count, root.shape[1]), root, generator) @ root.T).view(count, *self._known.shape)

    def move(self, state: Outputs, number: int, beta: float, generator: Generator) -> Outputs:
        """One slice for each chain."""
        count, mean = len(state.f), self._base[0]
        own, other = state.f - mean, self._noise(self._base[1], count, generator)
        level = beta * state.gain + uniform(count, state.gain, generator).log()
        angle = 2.0 * math.pi * uniform(count, state.gain, generator)
        low, high = angle - 2.0 * math.pi, angle.clone()
        f, gain = state.f.clone(), state.gain.clone()
        left = torch.arange(count, device=f.device)
        for _ in range(_SHRINKS):
            turn = angle[left].view(-1, 1, 1)
            found = self._at(mean + own[left] * turn.cos() + other[left] * turn.sin())
            good = beta * found.gain > level[left]
            f[left[good]], gain[left[good]] = found.f[good], found.gain[good]
            left = left[~good]
            if len(left) == 0:
                break
            here = angle[left]
            low[left], high[left] = torch.where(here < 0, here, low[left]), torch.where(here < 0, high[left], here)
            angle[left] = low[left] + (high[left] - low[left]) * uniform(len(left), gain, generator)
        return Outputs(f, gain)


class _Sites:
    """The Gaussian sites of the likelihood at the known outputs f*."""

    def __init__(self, fitted: FittedModel, away: Tensor) -> None:
        points, likelihood = fitted.points, fitted.likelihood
        with torch.no_grad():
            self._constant = float(points.log_likelihood(likelihood))
            self._residual = points.residual(likelihood).detach()
            self._curvature = points.curvature(CurvatureType("ggn"), likelihood).detach()
        self._away = away  # m - f*, (N, C)

    def values(self, moved: Tensor) -> Tensor:
        """Σ log site_n for f - f* (S, N, C), (S,)."""
        linear = self._residual - 0.5 * torch.einsum("ncd,snd->snc", self._curvature, moved)
        return self._constant + (moved * linear).sum((1, 2))

    def posterior(self, root: Tensor) -> tuple[Tensor, Tensor, float]:
        """Mean of f - m, a root of the covariance of f, and log of the integral of the prior times the sites."""
        n, c = self._residual.shape
        seen = torch.einsum("ncd,ndr->ncr", self._curvature, root.view(n, c, -1)).reshape(n * c, -1)
        precision = root.T @ seen
        precision.diagonal().add_(1.0)
        factor = cholesky_of(precision)
        pull = root.T @ (self._residual - torch.einsum("ncd,nd->nc", self._curvature, self._away)).flatten()
        half = torch.linalg.solve_triangular(factor, pull.unsqueeze(1), upper=False)
        mean = torch.linalg.solve_triangular(factor.mT, half, upper=True).squeeze(1)
        log_integral = float(self.values(self._away.unsqueeze(0))) + 0.5 * float(half.square().sum())
        spread = torch.linalg.solve_triangular(factor, root.T, upper=False).T  # A L⁻ᵀ
        return root @ mean, spread, log_integral - 0.5 * float(cholesky_log_det(factor))
