"""Folds of the training points, and the part of the data that is in some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from ntk_laplace.errors import DataError, is_whole, require_whole
from ntk_laplace.model.data import as_tensor, as_tensors, example_weights, num_examples, take


def fold_of_each(folds: Any, count: int, seed: int) -> Tensor:
    """The fold of each point, (N,): so many random folds of about equal size, or as they are given.

    DataError if there are less than two folds or more than points, or they are not one whole number for each point.
    """
    if count < 2:
        raise DataError("two or more training points, for folds", f"{count}", "Fit more points.")
    remedy = f"Pass a number from 2 to {count}, or {count} integers."
    if is_whole(folds, 2) and folds <= count:
        require_whole("seed", seed, 0, "Pass for example seed=0.")
        order = torch.randperm(count, generator=torch.Generator().manual_seed(int(seed)), device="cpu")
        return order.argsort() % int(folds)
    wrong = DataError(f"2 to {count} folds, or the fold of each of {count} points", f"{folds!r}"[:80], remedy)
    if isinstance(folds, (int, float, str)):
        raise wrong
    try:
        found = as_tensor(folds).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise wrong from error
    if found.shape != (count,) or found.is_floating_point() or len(found.unique()) < 2:
        raise wrong
    return found.long()


def parts_of(data: Any) -> tuple[int, Callable[[Tensor], Any]]:
    """Number of examples, and what makes data of the same form from some of them, by their numbers (m,).

    DataError if the data cannot be split.
    """
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return len(cast(Any, data)), lambda index: Subset(data, index.tolist())
    pair, weights = example_weights(data)
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        whose = "a DataLoader" if isinstance(data, DataLoader) else f"a {type(data).__name__}"
        raise DataError("data that can be split: (X, y), (X, y, w), or a Dataset", whose,
                        "Pass the tensors, or the dataset of the loader.")
    x, y = as_tensors(pair[0]), as_tensor(pair[1])
    if len(y) != num_examples(x):
        raise DataError("one target for each example", f"{num_examples(x):,} examples and {len(y):,} targets",
                        "Look at how the two were made.")
    columns = (x, y) if weights is None else (x, y, weights)
    return num_examples(x), lambda index: tuple(take(column, index) for column in columns)
