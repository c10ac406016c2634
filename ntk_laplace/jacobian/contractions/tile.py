"""A tile of K, to which products of rows are added, and the prior variances that scale them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ntk_laplace.runtime import tuning

Variance = Tensor | float
"""Prior variance (one over precision) of a parameter: a number, or a tensor with one entry or one per entry of it."""

Variances = Mapping[str, Variance]
"""Prior variance of each parameter. Absent parameters contribute nothing."""


class Tile:
    """Entries of K between n1 and n2 examples, to which contractions add in place.

    Parameters
    ----------
    values : Tensor, (n1*K1, n2*K2)
        A part of a larger matrix, with interleaved rows and columns.
    cotangents : tuple of int
        K1 and K2.
    fresh : bool
        The values are uninitialized: the first product overwrites them.
    """

    def __init__(self, values: Tensor, cotangents: tuple[int, int], fresh: bool) -> None:
        self.values, self.fresh, self._cotangents = values, fresh, cotangents

    def add_product(self, left: Tensor, right: Tensor, variance: Variance) -> None:
        """Add left diag(variance) rightᵀ for rows (n*K, p) and a variance that is a number or has p entries."""
        scale = variance if isinstance(variance, float) else 1.0
        left = scaled(left, variance) if isinstance(variance, Tensor) else left
        self.values.addmm_(left, right.T, beta=0.0 if self.fresh else 1.0, alpha=scale)
        self.fresh = False

    def started(self) -> Tensor:
        """The values as (n1, K1, n2, K2), zero where nothing was added yet."""
        if self.fresh:
            self.values.zero_()
            self.fresh = False
        k1, k2 = self._cotangents
        return self.values.unflatten(0, (-1, k1)).unflatten(2, (-1, k2))


def read_once(variances: Variances) -> Variances:
    """The same variances, those of one entry as numbers; all of them come from the device together."""
    single = {name: v for name, v in variances.items() if isinstance(v, Tensor) and v.numel() == 1}
    if not single:
        return variances
    numbers = torch.stack([v.flatten()[0] for v in single.values()]).tolist()
    return {**variances, **dict(zip(single, numbers, strict=True))}


def tile_rows(like: Tensor) -> int:
    """Rows of a tile on the device of `like`."""
    return tuning.TILE_ROWS if like.device.type == "cpu" else tuning.TILE_DEVICE_ROWS


def scaled(rows: Tensor, variance: Variance) -> Tensor:
    """Rows (..., p) times a variance that is a number or has p entries."""
    return rows * (variance.to(rows).flatten() if isinstance(variance, Tensor) else variance)


def interleaved(b: Tensor) -> Tensor:
    """(K, n, o) -> (n*K, o)."""
    return b.transpose(0, 1).flatten(0, 1)
