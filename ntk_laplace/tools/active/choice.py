"""A batch of inputs to label: greedy, with what the labels tell together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ntk_laplace.errors import HyperparameterError, require_whole
from ntk_laplace.model.data import InputData
from ntk_laplace.posterior import Posterior
from ntk_laplace.tools.active.pool import Pool, log_det_half
from ntk_laplace.tools.active.scores import require_method, require_posterior, score

if TYPE_CHECKING:
    import pandas

__all__ = ["Selection", "select"]


@dataclass(frozen=True)
class Selection:
    """Inputs chosen from a pool.

    Attributes
    ----------
    indices : Tensor, (k,)
        Their numbers in the pool, in the order in which they were chosen.
    gains : Tensor, (k,)
        "information": what each label tells about the weights beyond those chosen before it, nats; else the scores.
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
    posterior: Posterior, pool: InputData, k: int, method: str = "information", *, targets: InputData | None = None,
    samples: int = 256,
) -> Selection:  # fmt: skip
    """Choose k inputs of a pool to be labeled next.

    "information" is greedy: each input adds the most to ½ log det(I + A) of those chosen, A = SᵀVS over all of them,
    so that no two tell the same. The result tells at least 1 - 1/e of what the best k inputs do, because the
    information is submodular. The other methods take the k largest scores, each on its own.

    Parameters
    ----------
    posterior : Posterior
    pool : tensor, tuple or dict of tensors
        n unlabeled inputs. Their rows of J are kept in memory, in factors.
    k : int
    method, targets, samples
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
    """
    require_posterior(posterior)
    require_whole("k", k, 1, "Pass how many inputs you can label.")
    require_method(method, targets)
    if method == "information":
        with torch.inference_mode(False), torch.no_grad():
            candidates = Pool(posterior, posterior.jacobian(pool))
            _require_enough(k, len(candidates))
            return Selection(*_greedy(candidates, k), method)
    scores = score(posterior, pool, method, targets=targets, samples=samples)
    _require_enough(k, len(scores))
    best = scores.topk(k)
    return Selection(best.indices, best.values, method)


def _greedy(pool: Pool, k: int) -> tuple[Tensor, Tensor]:
    """Indices and gains: blocks of A given the labels of those chosen, by Schur complements."""
    blocks = pool.blocks()
    chosen: list[int] = []
    gains: list[Tensor] = []
    halves: list[Tensor] = []  # (I + A_ii)^-½ A_in of each chosen i, given those before it, (n, R, R)
    eye = torch.eye(pool.rank).to(blocks)
    for _ in range(k):
        found = log_det_half(blocks)
        found[chosen] = -torch.inf
        best = int(found.argmax())
        gains.append(found[best])
        cross = pool.cross(pool, torch.tensor([best], device=blocks.device))[:, 0].mT  # A_in, (n, R, R)
        for half in halves:
            cross = cross - half[best].mT @ half
        factor = torch.linalg.cholesky(blocks[best] + eye)
        half = torch.linalg.solve_triangular(factor, cross, upper=False)
        blocks = blocks - half.mT @ half
        halves.append(half)
        chosen.append(best)
    return torch.tensor(chosen, device=blocks.device), torch.stack(gains)


def _require_enough(k: int, count: int) -> None:
    if k > count:
        raise HyperparameterError(f"k of at most {count}, the inputs of the pool", f"{k}", "Ask for fewer.")
