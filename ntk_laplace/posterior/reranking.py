"""Re-ranking: the strongest training points of a ranking by what the network itself does without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, UnsupportedError, require_whole
from ntk_laplace.model.data import InputData
from ntk_laplace.posterior.explain import SPREADS
from ntk_laplace.posterior.explain.quantity import Output, quantity_of, require_quantity
from ntk_laplace.posterior.explain.ranked import strongest
from ntk_laplace.posterior.explain.reranking import Reranking
from ntk_laplace.posterior.explanation import ExplanationVerbs
from ntk_laplace.posterior.what_ifs import WhatIfsVerbs, changed_weights, require_no_names
from ntk_laplace.structures.what_if import Indices, positions

_GUARANTEES = (
    "moving effects are those of the network at its own optimum next to its weights, where converged",
    "linear effects of single points are those of explain(); of groups, those of the optimum of the linearized network",
    "where a point does not come back, its effect is the difference of two minima, and not of the point alone",
    "points that are not among the candidates keep their linear effects, and may rank higher than they do here",
)


class RerankingVerbs(WhatIfsVerbs, ExplanationVerbs):
    """Rankings by the effects on the network itself."""

    def rerank(
        self, x: InputData, candidates: int = 50, output: Output = None, *, by: str = "output", y: Any = None,
        groups: Sequence[Indices] = (),
    ) -> Reranking:
        """Rank the strongest training points of each prediction by what the network itself does without them.

        The candidates of an input are the points of the largest linear effects, `removal_effects`. The network goes to
        its own optimum without each of them, as in `what_ifs`, and from there back with the point. The networks of all
        inputs' candidates share the passes over the data. Where the network is at no minimum, it goes to one first, as
        in ``refit(linearization="moving")``, and `f` and the moving effects are about that one.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors, DataLoader or Dataset
            n inputs.
        candidates : int
            Training points of each input.
        output, by, y
            The explained quantity, as in `explain`; not a variance.
        groups : sequence of index sets, optional
            Groups of training points whose joint removal is computed too, for all inputs.

        Returns
        -------
        Reranking

        Raises
        ------
        DataError
            If there is no such output or point, or as `what_ifs` and `explain`.
        MemoryBudgetError
            As `what_ifs`; no network was moved.
        HyperparameterError
            If `candidates` is no whole number of at least 1.
        UnsupportedError
            For a variance.

        Examples
        --------
        >>> import torch, ntk_laplace as ntkl
        >>> network, x = torch.nn.Linear(2, 1).double(), torch.randn(8, 2).double()
        >>> posterior = ntkl.laplace(network, (x, x[:, :1]), ntkl.Gaussian(0.1))
        >>> posterior.rerank(x[:2], candidates=3, groups=[[0, 1]]).moving.shape
        torch.Size([2, 3])
        """
        require_whole("candidates", candidates, 1, "Pass how many points of each input are left out in turn.")
        require_quantity(by)
        if by in SPREADS:
            raise UnsupportedError("a quantity of the outputs, to rank by the network's own changes", repr(by),
                                   'Use by="output", "probability" or "log_likelihood", or explain(x, by="variance").')
        require_no_names(groups)
        try:
            groups = list(groups)
        except TypeError as cause:
            raise DataError("groups, each of training points", f"{groups!r}"[:80],
                            "Pass for instance groups=[[0, 1], [2]].") from cause
        count, chosen = self.num_examples, tuple(positions(group, self.num_examples) for group in groups)
        linear = self.removal_effects(x, output, by=by, y=y)
        indices = strongest(linear.abs(), min(candidates, count))
        points = indices.unique()  # of all inputs
        self._require_outputs(len(linear), len(points) + len(chosen))
        weights = self._without(points.unsqueeze(1), chosen)
        base, refitted = self._at_minimum()
        found = base._what_ifs(weights, True)
        back, outputs = found.comes_back()[1:], found.outputs(x)  # before, and after each change
        f, after = outputs[0], outputs[1:].transpose(0, 1)
        joint_weights = torch.cat([weights[:1], weights[1 + len(points) :]])
        fixed = self._what_ifs(joint_weights, False).outputs(x) if chosen else outputs[:1]
        joint_outputs = f.unsqueeze(1) + (fixed[1:] - fixed[0]).transpose(0, 1)
        quantity = quantity_of(self._fitted.model.likelihood, f, by, output, y)
        moving, joint = quantity.change(f, after).split([len(points), len(chosen)], 1)
        slot = torch.searchsorted(points, indices.contiguous())
        order = moving.gather(1, slot).abs().argsort(dim=1, descending=True, stable=True)
        slot, indices = slot.gather(1, order), indices.gather(1, order)
        converged, joint_converged = found.converged[1:].split([len(points), len(chosen)])
        single_back, joint_back = back.split([len(points), len(chosen)])
        return Reranking(f=f, quantity=quantity, indices=indices, linear=linear.gather(1, indices),
                         moving=moving.gather(1, slot), places=order, converged=converged[slot],
                         comes_back=single_back[slot], groups=chosen,
                         group_linear=quantity.change(f, joint_outputs) if chosen else joint, group_moving=joint,
                         group_converged=joint_converged, group_comes_back=joint_back,
                         group_outputs=after[:, len(points) :], targets=self._points().targets,
                         guarantees=_GUARANTEES + refitted)

    def _without(self, points: Tensor, groups: Sequence[Tensor]) -> Tensor:
        """Example weights (1 + m + G, N): first all points, then without each of m, then without each group."""
        counts, present = self._points().counts, self._points().present(self.likelihood)
        found = [counts[None], changed_weights(points, counts, present)]
        return torch.cat([*found, changed_weights(groups, counts, present)] if groups else found)

    def _require_outputs(self, inputs: int, networks: int) -> None:
        self._fitted.model.require_memory(3 * networks * inputs * self.num_outputs * self.dtype.itemsize,
                                          f"outputs of {networks:,} networks at {inputs:,} inputs",
                                          "Pass fewer inputs at a time, or ask for fewer candidates.")
