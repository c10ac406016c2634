"""A batch of inputs to label: greedy, with what the labels tell together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ntk_laplace.errors import HyperparameterError, require_whole
from ntk_laplace.model.data import InputData
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.posterior import Posterior
from ntk_laplace.tools.active.pool import Pool
from ntk_laplace.tools.active.scores import about, of_labels, part_score, require_options, target_pool

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Selection:
    """Inputs chosen from a pool.

    Attributes
    ----------
    indices : Tensor, (k,)
        Their numbers in the pool, in the order in which they were chosen.
    gains : Tensor, (k,)
        The score of each, given the labels of those chosen before it.
    method : str
    """

    indices: Tensor
    gains: Tensor
    method: str

    def to_dataframe(self) -> pandas.DataFrame:
        """One row for each input."""
        import pandas

        return pandas.DataFrame({"index": self.indices.cpu().numpy(), "gain": self.gains.cpu().numpy()})


def select(
    posterior: Posterior, pool: InputData, k: int, method: str = "epig", *, targets: InputData | None = None,
    samples: int = 256, likelihood: Likelihood | None = None,
) -> Selection:
    """Choose k inputs of a pool to be labeled next, so that no two tell the same.

    The choice is greedy: each input has the largest score given the labels of those chosen before it. These labels are
    not known yet. They lower the covariance V, by Λ at the network's outputs, and leave the mean. This is exact for a
    Gaussian likelihood, and to second order in f otherwise.

    The gains of "information" add up to ½ log det(I + A) of those chosen, A = SᵀVS over all of them. That is at least
    1 - 1/e of what the best k inputs tell, because the information is submodular. The gains of "epig" add up to what
    the labels together tell about a label at `targets`.

    Parameters
    ----------
    posterior : Posterior
    pool : tensor, tuple or dict of tensors
        n unlabeled inputs. Their rows of J are kept in memory, in factors, and for "epig" n m R² numbers for m targets.
    k : int
    method, targets, samples, likelihood
        As in `score`.

    Returns
    -------
    Selection

    Raises
    ------
    HyperparameterError
        If k is not between 1 and n.
    UnsupportedError
        As `score`.
    NumericalError
        If the rounding of the covariances is larger than the noise of the labels.
    MemoryBudgetError
        If the covariances with `targets`, or with the k inputs, do not fit in memory.
    """
    require_options(posterior, method, targets, samples)
    require_whole("k", k, 1, "Pass how many inputs you can label.")
    with torch.inference_mode(False), torch.no_grad():
        own = of_labels(posterior, likelihood)
        candidates = Pool(posterior, posterior.jacobian(pool), own)
        if k > len(candidates):
            raise HyperparameterError(f"k of at most {len(candidates)}, the inputs of the pool", f"{k}",
                                      "Ask for fewer.")
        there = target_pool(posterior, pool, targets, own) if method == "epig" else None
        numbers = k * candidates.root[0].numel() * (len(candidates) + (0 if there is None else len(there)))
        posterior.fitted.model.require_memory(
            numbers * candidates.root.element_size(), f"covariances of {len(candidates):,} inputs and {k:,} of them",
            "Ask for fewer, or pass a part of the pool.")
        return Selection(*_greedy(candidates, there, k, method, samples), method)


def _greedy(pool: Pool, targets: Pool | None, k: int, method: str, samples: int) -> tuple[Tensor, Tensor]:
    both = pool.mean if targets is None else pool.crossed(targets)
    chosen: list[int] = []
    gains: list[Tensor] = []
    while True:
        found = part_score(pool, method, samples) if targets is None else about(pool, targets, both)
        found[chosen] = -torch.inf
        chosen.append(int(found.argmax()))
        gains.append(found[chosen[-1]])
        if len(chosen) == k:
            return torch.tensor(chosen, device=found.device), torch.stack(gains)
        if targets is not None:
            targets.observe(pool, chosen[-1])
        pool.observe(pool, chosen[-1])
        if targets is not None:
            left, right = pool.whitened_half(), targets.whitened_half()
            both.view(len(left), len(right)).addmm_(left, right.T, alpha=-1.0)
