"""The learning curve: the predictive density of each point given the earlier points, over orders of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, is_whole, require_whole
from ntk_laplace.runtime.resources import require_memory

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LearningCurve:
    """log p(D_n given D_1 ... D_n-1) for n = 1 ... N over orders of the data ([L22] Eq. 4).

    Attributes
    ----------
    terms : Tensor, (orders, N)
        Nats; each row sums to the evidence with correction, which is the same for every order.
    """

    terms: Tensor

    @property
    def mean(self) -> Tensor:
        """Average over the orders, (N,)."""
        return self.terms.mean(0)

    @property
    def standard_error(self) -> Tensor:
        """Standard error of `mean`, (N,); NaN for one order."""
        if len(self.terms) == 1:  # torch would warn
            return torch.full_like(self.terms[0], float("nan"))
        return self.terms.std(0) / len(self.terms) ** 0.5

    @property
    def evidence(self) -> float:
        """Sum of all terms, nats."""
        return float(self.terms.sum(1).mean())

    def conditional(self, m: int) -> float:
        """Conditional evidence given the first m points: the sum of the later terms, averaged over orders, nats."""
        return float(self.terms[:, require_beginning(m, self.terms.shape[1], 0) :].sum(1).mean())

    def to_dataframe(self) -> pd.DataFrame:
        """One row per n: mean over the orders, its standard error, and the evidence of the first n points."""
        import pandas as pd

        return pd.DataFrame({
            "n": range(1, self.terms.shape[1] + 1),
            "log_density": self.mean.cpu().numpy(),
            "standard_error": self.standard_error.cpu().numpy(),
            "evidence_so_far": self.mean.cumsum(0).cpu().numpy(),
        })

    def plot(self) -> Figure:
        """Plot the terms, and their cumulative sum, the evidence, below ([L22] Fig. 4)."""
        from ntk_laplace.plotting import learning_curve

        return learning_curve(self)


def require_beginning(m: int, num_examples: int, least: int) -> int:
    """Validate m: at least `least`, and fewer than all points. DataError otherwise."""
    if num_examples <= least:
        raise DataError(f"at least {least + 1} training points, to condition on {least} and predict one",
                        f"{num_examples}", 'Fit structure="gp", whose closed form conditions on any number.')
    if not is_whole(m, least) or m >= num_examples:
        raise DataError(f"a number m of points to condition on, {least} to {num_examples - 1}", repr(m),
                        "Pass a whole number that leaves points to predict, such as 80 % of N.")
    return int(m)


def orders(num_examples: int, permutations: int, seed: int) -> list[Tensor]:
    """Random orders of N examples, reproducible from the seed on every machine; the identity if ``permutations=0``.

    DataError if the number of permutations is not an integer of at least 0. HyperparameterError if the seed is not an
    integer of at least 0. MemoryBudgetError if the orders do not fit in memory.
    """
    if not is_whole(permutations, 0):
        raise DataError("a number of permutations, 0 or more", repr(permutations), "0 keeps the data's own order.")
    seed = require_whole("seed", seed, 0, "Pass for instance seed=0.")
    require_memory(8 * int(permutations) * num_examples, torch.device("cpu"),
                   f"{permutations:,} orders of {num_examples:,} points", "Take fewer permutations.")
    if permutations == 0:
        return [torch.arange(num_examples, device="cpu")]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(num_examples, generator=generator, device="cpu") for _ in range(permutations)]
