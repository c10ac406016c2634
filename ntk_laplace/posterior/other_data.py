"""Verbs of other data: the posterior of more points, or of some of them, at the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from typing_extensions import Self

from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.model.likelihoods import Likelihood, difference
from ntk_laplace.model.network import Network
from ntk_laplace.posterior.fitted import Fitted
from ntk_laplace.structures.what_if import Indices, positions


class OtherDataVerbs(Fitted):
    """Posteriors of other data, from what is stored of these."""

    def merge(self, other: Fitted) -> Self:
        """Posterior given the data of both posteriors of one network, with the hyperparameters of this one.

        Structured posteriors add their sums, so several processes can share the data; "ekfac" and "inf" need a common
        eigenbasis, ``EKFAC(basis=...)``. Exact ones concatenate their rows, or add their JᵀΛJ.

        Raises
        ------
        UnsupportedError
            If the two posteriors are incompatible.
        """
        if not isinstance(other, Fitted):
            raise UnsupportedError("another posterior", f"a {type(other).__name__}",
                                   "Fit the other data with the same arguments; condition(data) takes data themselves.")
        moved = [one for one in (self, other) if one.fitted.model.displacement is not None]
        if moved:
            raise UnsupportedError("two posteriors of unchanged training data", f"{moved[0]!r}",
                                   "Merge first, and ask what if afterwards.")
        differ = difference(self.likelihood, other.likelihood)
        if differ:
            raise UnsupportedError("two posteriors of one likelihood, whose hyperparameters alone may differ", differ,
                                   "Fit both with the same likelihood.")
        for one in (self, other):
            require_noise_of_new_points(one.likelihood)
        _require_one_network(self.network, other.network)
        kinds, theirs = ((one.structure, one.curvature_type, one.fitted.model.jacobian_pass.dtype)
                         for one in (self, other))
        if kinds != theirs:
            raise UnsupportedError("two posteriors of one structure, curvature and dtype", f"{self!r} and {other!r}",
                                   "Fit both with the same arguments but the data.")
        with torch.inference_mode(False):
            merged = self._fitted.structure.merged(self._fitted.model, other.fitted.structure)
            return self._derived(self._fitted.derived(merged))

    def condition(self, data: Any) -> Self:
        """Posterior given new data as well, at the same weights; the results for the old data are reused.

        Parameters
        ----------
        data : DataLoader, Dataset, (X, y), or a mapping
            As for `laplace`.
        """
        model, structure = self._fitted.model, self._fitted.structure
        require_noise_of_new_points(model.likelihood)
        settings = model.settings
        batches = settings.own(self.network.batches(data, settings.batch_size))
        with torch.inference_mode(False):
            count = self.num_examples
            new = structure.refit_on(replace(model, curvature_type=model.curvature_type.after(count)), batches)
            vars(new)["points"] = replace(new.points, drawn=new.points.drawn_after(count))  # some structures are frozen
            return self._derived(self._fitted.derived(structure.merged(model, new)))

    def subset(self, index: Indices) -> Self:
        """Posterior given only some of the training points, at the same weights and hyperparameters.

        Parameters
        ----------
        index : sequence of int, or Tensor
            Indices of the points to keep, each once, or a mask of all; the order of the data is kept. "gp" selects
            stored rows, the others read the data again, "ekfac" and "inf" in the eigenbasis of all points.

        Raises
        ------
        DataError
            If they are not training points, none of them has a target, or the data cannot be read again.
        """
        self._fitted.warn_of_order()
        kept = positions(index, self.num_examples).sort().values.to(self.network.device)
        if len(kept) == 0:
            raise DataError(f"training points to keep, 0 to {self.num_examples - 1}, each once", "0 of them",
                            "Pass for example torch.arange(10).")
        with torch.inference_mode(False):
            found = self._fitted.subset(kept)
            found.points.require_information(found.likelihood)
            return self._derived(found)


def _require_one_network(network: Network, other: Network) -> None:
    """Refuse two networks that differ in a weight, a frozen parameter, a buffer or the output that is read."""
    same = network.shapes == other.shapes and network.output == other.output
    own, theirs = ([one.theta, *one.fixed] for one in (network, other))
    if not (same and len(own) == len(theirs) and all(map(torch.equal, own, theirs))):
        raise UnsupportedError("two posteriors of one trained network, with equal parameters and buffers",
                               "two networks", "Fit both with the same network, and arguments that differ in the data.")


def require_noise_of_new_points(likelihood: Likelihood) -> None:
    """Refuse to add points to a fit whose noise is that of each training point (UnsupportedError)."""
    try:
        likelihood.for_new_points()
    except UnsupportedError as error:
        raise UnsupportedError(error.expected, error.got, "Fit all points together, with the noise of each.") from error
