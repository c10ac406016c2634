"""Orders of the data over which conditional evidences are averaged."""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, is_whole, require_whole
from ntk_laplace.runtime.resources import require_memory


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
        return [torch.arange(num_examples)]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(num_examples, generator=generator) for _ in range(permutations)]
