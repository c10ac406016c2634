"""Loaders over any inputs of the registry, and data that are interrupted."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import ntk_laplace as ntkl
from reference import num_examples, take
from registry import LIKELIHOODS, problem, targets
from structured_cases import fresh_fit


def loader(x, y, **options) -> DataLoader:
    return DataLoader([(take(x, n), y[n]) for n in range(num_examples(x))], **options)


class Interrupted(Dataset):
    """Raises KeyboardInterrupt, as Ctrl-C does, at the n-th example that is read."""

    def __init__(self, x: Tensor, y: Tensor, at: int) -> None:
        self.x, self.y, self.left = x, y, at

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.x[n], self.y[n]


def interrupted_kfac():
    """The state of a KFAC fit that read two batches of two."""
    case = problem("deep_mlp")
    data = DataLoader(Interrupted(case.x, targets(LIKELIHOODS["categorical"], case), 6), batch_size=2)
    with pytest.raises(ntkl.FitInterrupted) as stop:
        fresh_fit(
            "deep_mlp", "categorical", "layer", "ggn", "kfac", data=data, settings=ntkl.Settings(batch_size=2)
        )
    return ntkl.Settings(batch_size=2, resume=stop.value.state)
