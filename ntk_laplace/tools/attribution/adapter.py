"""A posterior with the interface of data attribution benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ntk_laplace.errors import DataError, is_whole
from ntk_laplace.model.data import Inputs, as_tensors, num_examples, take
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.explain import SPREADS
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.runtime.panels import panels


@dataclass(frozen=True)
class Attributor:
    """Scores of all training points at test points: ``explain(test) -> (test, train)``.

    Parameters
    ----------
    posterior : Posterior
        A posterior of any structure.
    by : str
        The quantity, as in `Posterior.explain`.
    batch_size : int
        Number of test points at a time.
    """

    posterior: Posterior
    by: str = "log_likelihood"
    batch_size: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.posterior, Posterior):
            raise DataError("a Posterior", type(self.posterior).__name__, "Make one with ntk_laplace.laplace.")
        if not is_whole(self.batch_size, 1):
            raise DataError("at least one test point at a time", f"batch_size={self.batch_size!r}", "Leave it out.")

    def explain(self, test: Inputs, targets: Any = None) -> Tensor:
        """Scores, (n, N): the decrease of the quantity if the training point were removed.

        A positive score means that the training point helps; for a variance, that it makes the prediction more certain.

        Parameters
        ----------
        test : tensor, tuple or dict of tensors
            n inputs.
        targets : optional
            Their targets, for the log likelihood; for classes the predicted classes by default.
        """
        test = as_tensors(test)
        count, found = num_examples(test), []
        if count == 0:
            raise DataError("at least one test point", "none", "Pass one or more inputs.")
        sign = 1.0 if self.by in SPREADS else -1.0
        for part in panels(count, 1, self.batch_size):
            y = None if targets is None else to_tensor(targets)[part]
            found.append(sign * self.posterior.removal_effects(take(test, part), by=self.by, y=y))
        return torch.cat(found)

    def __call__(self, test: Inputs, targets: Any = None) -> Tensor:
        """As `explain`."""
        return self.explain(test, targets)


def predicted(
    posterior: Posterior, kept: ArrayLike, measure: Callable[[Posterior], Tensor], steps: int | None = 1
) -> NDArray[np.float64]:
    """Predictions of the linearized model for training on subsets, with all other points removed together.

    Parameters
    ----------
    posterior : Posterior
        A posterior with structure "gp".
    kept : array_like of bool, (M, N)
        Which training points are in each subset.
    measure : callable
        Maps a posterior to a tensor of outcomes, such as the loss at each test point.
    steps : int or None
        Newton steps, as in `Posterior.remove`.

    Returns
    -------
    array, (M, ...)
    """
    kept = to_tensor(np.asarray(kept, dtype=bool))
    if kept.ndim != 2 or kept.shape[1] != posterior.num_examples:
        raise DataError(f"masks of subsets (M, {posterior.num_examples})", f"shape {tuple(kept.shape)}",
                        "Give every subset one boolean per training point.")
    with torch.no_grad():
        return np.stack([measure(posterior.remove(~one, steps=steps)).detach().cpu().double().numpy() for one in kept])
