"""Curvature types: the root S for the GGN, the empirical Fisher and the Monte-Carlo Fisher."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ntk_laplace.errors import require_choice, require_whole
from ntk_laplace.model.likelihoods import DiagonalForm, Likelihood
from ntk_laplace.runtime.random_state import seeded_rng

CURVATURES = ("ggn", "ef", "mc")
Draws = tuple[tuple[int, int], ...]  # of points in turn: what is added to the seed, how many are drawn together


@dataclass(frozen=True)
class CurvatureType:
    """Curvature type, which defines the root S of the output curvature Λ.

    Attributes
    ----------
    kind : str
        "ggn": S Sᵀ = Λ. "ef": S = r, the empirical Fisher. "mc": M gradients at labels drawn from the model,
        over √M, whose S Sᵀ has expectation Λ.
    samples : int
        Number M of drawn labels per example.
    seed : int
        Random seed of the drawn labels, which stay the same when a hyperparameter changes.
    """

    kind: str = "ggn"
    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice(self.kind, CURVATURES, f"curvature among {', '.join(CURVATURES)}",
                       "Use 'ggn' for the exact Laplace-GGN.")
        samples = require_whole("samples", self.samples, 1, "Pass for instance CurvatureType('mc', 1).")
        seed = require_whole("seed", self.seed, 0, "Pass for instance CurvatureType('mc', 1, seed=0).")
        vars(self).update(samples=samples, seed=seed)  # the class is frozen

    @classmethod
    def of(cls, curvature: str | CurvatureType) -> CurvatureType:
        """Return a curvature type from its name; a `CurvatureType` is returned unchanged."""
        return curvature if isinstance(curvature, CurvatureType) else cls(curvature)

    def columns(self, likelihood: Likelihood, num_outputs: int) -> int:
        """Number of columns R of S."""
        return {"ggn": likelihood.rank(num_outputs), "ef": 1, "mc": self.samples}[self.kind]

    def root(self, likelihood: Likelihood, f: Tensor, targets: Tensor, draws: Draws | None = None) -> Tensor:
        """S, (N, C, R); labels of all points are drawn together, or as `draws` says."""
        if self.kind == "ggn":
            return likelihood.root(f, targets)
        return self._gradients(likelihood, f, targets, draws)

    def left_inverse(self, likelihood: Likelihood, f: Tensor) -> Tensor | None:
        """L (N, R, C) with L S = I, if the range of S Sᵀ is the same for all hyperparameters; else None."""
        with torch.no_grad():
            return likelihood.left_inverse(f) if self.kind == "ggn" else None

    def curvature(self, likelihood: Likelihood, f: Tensor, targets: Tensor, draws: Draws | None = None) -> Tensor:
        """S Sᵀ, (N, C, C), differentiable in the likelihood's hyperparameters; `draws` as for `root`."""
        if self.kind == "ggn":
            return likelihood.curvature(f, targets)
        root = self._gradients(likelihood, f, targets, draws)
        return root @ root.mT

    def diagonal_form(self, likelihood: Likelihood, f: Tensor, targets: Tensor | None = None) -> DiagonalForm | None:
        """S Sᵀ in O(C) numbers per example; None if it has no such form."""
        return likelihood.diagonal_form(f, targets) if self.kind == "ggn" else None

    def log_scale(self, likelihood: Likelihood) -> Tensor | None:
        """Return log c if the likelihood's hyperparameters only multiply S Sᵀ by a number c; else None."""
        if self.kind == "ggn":
            return likelihood.log_curvature_scale()
        scale = likelihood.log_residual_scale()
        # a drawn y - f grows with the noise, so that its r rᵀ scales as r does
        return 2.0 * scale if scale is not None and self.kind == "ef" else scale

    def after(self, count: int) -> CurvatureType:
        """That of points which follow so many others: with labels of their own."""
        return replace(self, seed=self.seed + count)

    def _gradients(self, likelihood: Likelihood, f: Tensor, targets: Tensor, draws: Draws | None) -> Tensor:
        # an example of weight w has the gradient w r, and contributes w r rᵀ
        share = likelihood.weight**0.5
        if self.kind == "ef":
            return likelihood.residual(f, targets).unsqueeze(-1) / share
        if draws is None:
            drawn = self._drawn(likelihood, f, 0)
        else:
            ends = list(accumulate(count for _, count in draws))
            parts = [(slice(end - count, end), after) for end, (after, count) in zip(ends, draws, strict=True)]
            drawn = torch.cat([self._drawn(likelihood.at(here), f[here], after) for here, after in parts], 1)
        observed = likelihood.observed(targets)
        labels = drawn if observed is None else (likelihood.hidden(y, observed) for y in drawn)
        columns = [likelihood.residual(f, y) for y in labels]
        return torch.stack(columns, -1) / (share * self.samples**0.5)  # E[S Sᵀ] = Λ

    def _drawn(self, likelihood: Likelihood, f: Tensor, after: int) -> Tensor:
        """Labels of points that are drawn together, (M, n, ...)."""
        with seeded_rng(f.device, self.seed + after):
            # the same labels for f in another type, where the likelihood's own numbers allow it
            whole = all(p.dtype == torch.float64 for p in likelihood.parameters() if p.is_floating_point())
            response = likelihood.distribution(f.double() if whole else f)
            # reparametrized samples: real labels, and so S, are differentiable in the noise
            drawn = (response.rsample if response.has_rsample else response.sample)((self.samples,))
        return drawn.to(f.dtype) if drawn.is_floating_point() else drawn
