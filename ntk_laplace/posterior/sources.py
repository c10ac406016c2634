"""Attribution by source: what-ifs without each file, annotator or month of the training data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.model.data import InputData
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.posterior.explain import SPREADS, ExplanationRequest, SourceEffects, Sources, numbered
from ntk_laplace.posterior.explain.quantity import Output, Quantity, quantity_of, require_quantity
from ntk_laplace.posterior.explanation import ExplanationVerbs
from ntk_laplace.posterior.latent import LatentVerbs
from ntk_laplace.posterior.what_if import is_moving
from ntk_laplace.posterior.what_ifs import WhatIfs, WhatIfsVerbs
from ntk_laplace.structures.points import TrainingPoints

_GUARANTEES = {
    "fixed": "each source leaves as a whole, and the answer is the exact optimum of the linearized network without it",
    "moving": "each source leaves as a whole, and the answer is the network at its own optimum without it, next to its "
    "weights",
}
_SUMS = (
    "the sum of single effects adds the effects of leaving out one point at a time, with the others of its source "
    "still there; points that repeat each other have small single effects and a large joint one"
)


class SourceVerbs(WhatIfsVerbs, ExplanationVerbs, LatentVerbs):
    """Effects of sources of training points."""

    def source_effects(
        self, x: InputData, sources: Sources, output: Output = None, *, by: str = "output", y: Any = None,
        linearization: str = "fixed",
    ) -> SourceEffects:
        """What changes at `x` if all training points of one source are left out together, for each source.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors, DataLoader or Dataset
            n inputs.
        sources : sequence, array, Series or Tensor, (N,)
            The label of each training point in the order of the fit: a file, an annotator, a month.
        output, by
            The explained quantity, as in `explain`.
        y : optional
            Targets at `x`: the result then has the change of their log density, whatever `by` is.
        linearization : str
            "fixed": the optimum of the linearized network without the source, for every structure, as
            ``remove(points, steps=None)`` of "gp". "moving": that of the network, as in `what_ifs`. If the network is
            at no minimum, it goes to one first, as in ``refit(linearization="moving")``, and effects are about that.

        Returns
        -------
        SourceEffects

        Raises
        ------
        DataError
            If the labels are not one for each training point, a label is missing, there is one source alone or one for
            each point; if the data of the fit were shuffled by a loader; or as `what_ifs` and `explain`.
        MemoryBudgetError
            As `what_ifs`; nothing was computed.
        UnsupportedError
            As `explain`; for a variance, if the linearization is fixed and the structure or the curvature not exact.

        Examples
        --------
        >>> import torch, ntk_laplace as ntkl
        >>> network, x = torch.nn.Linear(2, 1).double(), torch.randn(8, 2).double()
        >>> posterior = ntkl.laplace(network, (x, x[:, :1]), ntkl.Gaussian(0.1))
        >>> found = posterior.source_effects(x[:3], ["anna", "anna", "ben", "ben", "ben", "carl", "carl", "carl"])
        >>> found.names, found.effect.shape
        (('anna', 'ben', 'carl'), torch.Size([3, 3]))
        """
        if self._fitted.shuffled:
            raise DataError("a fit to data in a known order, to give each training point its label",
                            "a DataLoader that shuffles", "Fit with shuffle=False, or with the data set itself.")
        points = self._points()
        counts = points.counts
        names, number = numbered(sources, points.observed_counts(self.likelihood))
        require_quantity(by)
        if by in SPREADS and not is_moving(linearization, None):
            self._fitted.require_exact(f" for by={by!r} without a source",
                                       'Use linearization="moving", which fits the structure again.')
        left = number == torch.arange(-1, len(names), device=number.device).unsqueeze(1)  # first nothing is left out
        base, refitted = self._at_minimum() if is_moving(linearization, None) else (self, ())
        found = base.what_ifs(counts * ~left, linearization=linearization)
        f, after = (part.transpose(0, 1) for part in found.outputs(x).split([1, len(names)]))
        f = f.squeeze(1)
        likelihood = self._fitted.model.likelihood
        quantity = quantity_of(likelihood, f, by, output, y)
        own, own_without = _own_log_probs(points, likelihood, found, number)
        return SourceEffects(
            names=names, num_points=number[counts > 0].bincount(minlength=len(names)), f=f, outputs=after,
            quantity=quantity,
            effect=_of_variances(quantity, f, base._covariances_without(found, x)) if by in SPREADS else
            quantity.change(f, after),
            single=self._single_effects(x, number, len(names), ExplanationRequest(1, output, by, y)),
            log_prob_change=None if y is None else
            quantity_of(likelihood, f, "log_likelihood", output, y).change(f, after),
            own_log_prob=own, own_log_prob_without=own_without, converged=found.converged[1:],
            linearization=linearization, guarantees=(_GUARANTEES[linearization], _SUMS, *refitted),
        )

    def _covariances_without(self, found: WhatIfs, x: InputData) -> Sequence[Tensor]:
        """Covariance blocks (n, C, C) of each posterior, the first without a change."""
        changed = [cast(SourceVerbs, found.posterior(index)) for index in range(1, len(found))]
        still = self if self._fitted.model.displacement is None else cast(SourceVerbs, found.posterior(0))
        return [one.latent_moments(x)[1] for one in (still, *changed)]

    def _single_effects(self, x: InputData, number: Tensor, count: int, request: ExplanationRequest) -> Tensor:
        """Sums of the removal effects of single points over each source, (n, S)."""
        parts = [effect.new_zeros(len(effect), count).index_add_(1, number.to(effect.device), effect)
                 for effect in self._removal_effects(self._chunks(x), request)]
        return torch.cat(parts)


def _of_variances(quantity: Quantity, f: Tensor, covariances: Sequence[Tensor]) -> Tensor:
    """Change of a variance, (n, S), from covariance blocks (n, C, C), the first before the changes."""
    widened = torch.stack(list(covariances[1:]), 1) - covariances[0].unsqueeze(1)  # (n, S, C, C)
    if quantity.by == "probability_variance":
        with torch.no_grad():
            slope = quantity.direction(f)
        widened = torch.einsum("nc,nscd,nd->ns", slope, widened, slope).unsqueeze(-1)
    else:
        widened = widened.diagonal(dim1=2, dim2=3)
    return quantity.effect(f, widened, widened)


def _own_log_probs(
    points: TrainingPoints, likelihood: Likelihood, found: WhatIfs, number: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean log p of each source's points, with it and without it, (S,), from what-ifs of which the first is none."""
    density, count = found.log_prob(), len(found) - 1
    known = points.observed_counts(likelihood) > 0
    often, before, after = (
        density.new_zeros(count).index_add_(0, number[known], values[known])
        for values in (torch.ones_like(density[0]), density[0], density[1:].gather(0, number.unsqueeze(0))[0])
    )
    return before / often, after / often
