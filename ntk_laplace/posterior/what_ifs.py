"""Many what-ifs at once, and cross-validation by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from ntk_laplace.errors import DataError, HyperparameterError, is_whole
from ntk_laplace.model.data import InputData, as_tensor
from ntk_laplace.posterior.chunks import Chunks
from ntk_laplace.posterior.folds import fold_of_each
from ntk_laplace.posterior.what_if import WhatIfVerbs, is_moving
from ntk_laplace.runtime.means import error_of_mean
from ntk_laplace.structures.what_if import (
    Groups,
    Indices,
    at_minimum,
    own_minimum,
    positions,
    require_left,
    tell_unreached,
)

_REFITTED = (
    "training has stopped at no minimum of the objective, so that any change would let the network leave: moving "
    "effects are about the minimum next to its weights",
)


class WhatIfs:
    """The answers of `Posterior.what_ifs`, one for each of G groups.

    Parameters
    ----------
    posterior : Posterior
        Before the changes.
    groups : Groups

    Attributes
    ----------
    linearization : str
        "fixed" or "moving".
    thetas : Tensor, (G, P)
        Weights at each optimum.
    weights : Tensor, (G, N)
        Example weights of each change; 0 where a point is removed.
    converged : Tensor of bool, (G,)
        Whether a further Newton step gains less than the rounding of the objective.
    steps : Tensor, (G,)
        Number of steps, quasi-Newton and Newton.
    """

    def __init__(self, posterior: WhatIfVerbs, groups: Groups) -> None:
        self._posterior, self._groups = posterior, groups
        self.linearization = "moving" if groups.moving else "fixed"
        self.thetas, self.weights = groups.thetas, groups.weights
        self.converged, self.steps = groups.converged, groups.steps

    def __len__(self) -> int:
        return len(self.thetas)

    def __repr__(self) -> str:
        return (f"WhatIfs({len(self)} groups, linearization={self.linearization!r}, "
                f"{int(self.converged.sum())} converged, up to {int(self.steps.max())} steps)")

    def outputs(self, x: InputData) -> Tensor:
        """Outputs after each change, (G, n, C), at inputs of n examples; of the linearized model if it is fixed."""
        chunks = Chunks(self._groups.model, x)
        with torch.inference_mode(False), torch.no_grad():
            if self._groups.moving:
                return torch.cat([self._groups.outputs(part) for _, part in chunks.inputs()], 1)
            return torch.cat([self._groups.linearized_outputs(rows) for rows in chunks.rows()], 1)

    def comes_back(self) -> Tensor:
        """Whether the network returns to the trained one if the points are put back, (G,) of bool.

        False where the minimum has left with the points: from the optimum of the change, the descent leads to
        another minimum of the unchanged objective than that of the trained weights, where the log likelihood of some
        training point differs by more than .01 nats. The effect is then the difference of two minima, and not of the
        points alone. It takes about the time of the what-ifs again. A linearized network has one minimum.

        Raises
        ------
        MemoryBudgetError
            If the weights of all networks do not fit in memory twice.
        """
        with torch.inference_mode(False):
            return self._groups.come_back(self._posterior.fitted)

    def log_prob(self) -> Tensor:
        """log p(y_n | f_n) of every training point after each change, (G, N), nats, each counted once.

        Points of weight 0 are the ones left out.
        """
        with torch.inference_mode(False):
            return self._groups.log_prob()

    def posterior(self, index: int) -> WhatIfVerbs:
        """The posterior of one group, with every verb but `save` and `retrain`.

        Raises
        ------
        DataError
            If there is no such group.
        UnsupportedError
            If the linearization is fixed and the structure or the curvature is not exact.
        """
        if not is_whole(index, 0) or index >= len(self):
            raise DataError(f"a group from 0 to {len(self) - 1}", f"{index!r}"[:80], "Pass the number of a group.")
        own = self._posterior
        if not self._groups.moving:
            own.fitted.require_exact(", for the posterior of a group at a fixed linearization",
                                     'Fit one of them, or ask with linearization="moving".')
            return own.reweight(torch.arange(own.num_examples, device="cpu"), self.weights[index], steps=None)
        with torch.inference_mode(False):
            return own._derived(self._groups.fitted(index, own.fitted))


@dataclass(frozen=True)
class CrossValidation:
    """Predictions of every training point without its fold.

    Attributes
    ----------
    f : Tensor, (N, C)
        Outputs.
    log_density : Tensor, (N,)
        log p(y_n | f_n), nats, each point counted once.
    folds : Tensor of int, (N,)
        The fold of each point.
    converged : Tensor of bool, (K,)
        Of each fold, as in `WhatIfs`.
    counts : Tensor, (N,)
        Example weights, 0 where there is no target: a mean log density over the points is weighted by them.
    """

    f: Tensor
    log_density: Tensor
    folds: Tensor
    converged: Tensor
    counts: Tensor

    @property
    def mean_log_density(self) -> float:
        """Of `log_density`, weighted by `counts`, nats a point."""
        return float(self._terms.sum())

    @property
    def standard_error(self) -> float:
        """Of the mean, as that of all training points; NaN where a single point counts."""
        return error_of_mean(self._terms, self.counts / self.counts.sum())

    @property
    def _terms(self) -> Tensor:
        return self.counts * self.log_density / self.counts.sum()

    def __repr__(self) -> str:
        return (f"CrossValidation({len(self.converged)} folds, {int(self.converged.sum())} converged, mean log density "
                f"{self.mean_log_density:.4f} ± {self.standard_error:.2g} nats)")


class WhatIfsVerbs(WhatIfVerbs):
    """What-ifs of many groups of training points."""

    def what_ifs(self, groups: Sequence[Indices] | Tensor, *, linearization: str = "moving") -> WhatIfs:
        """The network without each of several groups of training points, or with other example weights.

        All groups share the passes over the data, by `torch.func.vmap`; each is `remove(group, linearization=...)`, or
        with "fixed" `remove(group, steps=None)`.

        Parameters
        ----------
        groups : sequence of index sets, or Tensor
            The points that each group removes: numbers or masks; a matrix of booleans (G, N), true where a point is
            removed; or a matrix of floats (G, N), the example weights of each change.
        linearization : str
            "moving": the network's own optimum for each change. "fixed": that of the linearized model.

        Returns
        -------
        WhatIfs
            A warning tells if some of the optima were not reached; its `converged` says which.

        Raises
        ------
        DataError
            If there is no group, an index is out of range or repeated, no point with a target is left in one, or the
            data of the fit cannot be read again.
        HyperparameterError
            If a weight is negative or not finite.
        MemoryBudgetError
            If the weights of all groups do not fit in memory; nothing was computed.

        Examples
        --------
        >>> import torch, ntk_laplace as ntkl
        >>> network, x = torch.nn.Linear(2, 1).double(), torch.randn(8, 2).double()
        >>> posterior = ntkl.laplace(network, (x, x[:, :1]), ntkl.Gaussian(0.1))
        >>> posterior.what_ifs([[0], [1, 2], [5]]).outputs(x[:4]).shape
        torch.Size([3, 4, 1])
        """
        moving = is_moving(linearization, None)
        self._fitted.warn_of_order()
        return self._what_ifs(groups, moving)

    def _what_ifs(self, groups: Sequence[Indices] | Tensor, moving: bool) -> WhatIfs:
        """`what_ifs`, where the order of the training points has been told."""
        points = self._points()
        weights = changed_weights(groups, points.counts.to(self._fitted.theta), points.present(self.likelihood))
        with torch.inference_mode(False):
            found = Groups.of(self._fitted, weights, moving)
            # hyperparameters that change later are not those of the answers
            before = self if moving else self._derived(self._fitted.derived(self._fitted.structure))
        tell_unreached(found.converged, found.falling, found.steps)
        return WhatIfs(before, found)

    def _at_minimum(self) -> tuple[Self, tuple[str, ...]]:
        """Itself, or the moving refit where the network would leave its weights for any change; and words of that."""
        with torch.inference_mode(False):
            if at_minimum(self._fitted):
                return self, ()
            return self._derived(own_minimum(self._fitted)), _REFITTED

    def cross_validate(
        self, folds: int | Any = 5, *, linearization: str = "moving", seed: int = 0
    ) -> CrossValidation:
        """Predict every training point by the network without the point's fold.

        Parameters
        ----------
        folds : int or array of int, (N,)
            Number of folds, drawn at random and of about equal size; or the fold of each point.
        linearization : str
            As in `what_ifs`.
        seed : int
            Of the random folds.

        Returns
        -------
        CrossValidation

        Raises
        ------
        DataError
            If there are less than two folds or more than points, or they are not one number for each point.
        """
        numbers = fold_of_each(folds, self.num_examples, seed)
        names, numbers = numbers.unique(return_inverse=True)
        groups = torch.arange(len(names), device="cpu").unsqueeze(1)
        found = self.what_ifs(numbers == groups, linearization=linearization)
        numbers = numbers.to(self._fitted.theta.device)
        with torch.inference_mode(False), torch.no_grad():
            f = self._fitted.theta.new_empty(self.num_examples, self.num_outputs)
            density = f.new_empty(self.num_examples)
            for some, outputs in found._groups.training_outputs():
                own = ((numbers >= some.start) & (numbers < some.stop)).nonzero().squeeze(1)
                f[own] = outputs[numbers[own] - some.start, own]
                density[own] = found._groups.log_prob_of(outputs)[numbers[own] - some.start, own]
        counts = self._points().observed_counts(self.likelihood)
        return CrossValidation(f, density, names[numbers.cpu()], found.converged, counts)


def require_no_names(groups: object) -> None:
    """Refuse a mapping, which would be the numbers that are its keys (DataError)."""
    if isinstance(groups, Mapping):
        raise DataError("groups of training points", f"a {type(groups).__name__}",
                        "Pass the groups without their names, list(groups.values()).")


def changed_weights(groups: Sequence[Indices] | Tensor, counts: Tensor, present: Tensor | None) -> Tensor:
    """Example weights of each change, (G, N), from those of before, (N,); `present` as in `require_left`.

    DataError or HyperparameterError as `what_ifs`.
    """
    n = len(counts)
    remedy = f"Pass lists of numbers from 0 to {n - 1}, or a matrix with {n} columns."
    require_no_names(groups)
    try:
        given = len(groups)
    except TypeError as error:
        raise DataError("groups of training points", f"{groups!r}"[:80], remedy) from error
    if given == 0:
        raise DataError("at least one group of training points", "none", remedy)
    matrix = getattr(groups, "ndim", None) == 2 and as_tensor(groups)
    if isinstance(matrix, Tensor) and (matrix.is_floating_point() or matrix.dtype == torch.bool):
        if matrix.shape[1] != n:
            raise DataError(f"a matrix of {n} columns, one for each training point", f"shape {tuple(matrix.shape)}",
                            remedy)
        matrix = matrix.detach().to(counts.device)
        found = counts * ~matrix if matrix.dtype == torch.bool else matrix.to(counts)
    else:
        found = counts.repeat(given, 1)
        for own, group in zip(found, groups, strict=True):
            own[positions(group, n).to(own.device)] = 0.0
    if not bool((torch.isfinite(found) & (found >= 0)).all()):
        raise HyperparameterError("finite weights of at least 0", f"{float(found.min()):g} to {float(found.max()):g}",
                                  "Pass 0 to remove a point, 1 to keep it.")
    require_left(found, present)
    return found
