"""Likelihoods whose outputs have a target each, some of which may be missing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import HyperparameterError
from ntk_laplace.likelihoods.base import Likelihood
from ntk_laplace.likelihoods.targets import read_columns

__all__ = ["PerOutput"]


class PerOutput(Likelihood):
    """A likelihood with one target per output, (N, C), that may mark missing targets.

    Parameters
    ----------
    missing : str, optional
        "nan": a target that is NaN is missing, and adds nothing to log p, its gradient and its curvature. By default a
        NaN is an error.

    Raises
    ------
    HyperparameterError
        If it is something else.
    """

    missing: str | None = None

    def __init__(self, missing: str | None = None) -> None:
        super().__init__()
        if missing not in (None, "nan"):
            raise HyperparameterError('missing="nan", or None where no target is missing', repr(missing),
                                      "Leave it out, or write NaN where a target is missing.")
        self.missing = missing

    def observed(self, y: Tensor) -> Tensor | None:
        """Which targets are there, (N, C); None if all are."""
        if self.missing is None:
            return None
        there = ~y.isnan()
        return None if bool(there.all()) else there

    def hidden(self, y: Tensor, observed: Tensor) -> Tensor:
        """Targets with NaN where `observed` is false."""
        return y.masked_fill(~observed, torch.nan)

    def _columns(self, y: Any, num_examples: int, num_outputs: int) -> Tensor:
        """Targets (N, C) as they are read, NaN among them where that is said to be a missing one."""
        remedy = ("Remove or impute examples with missing targets, or say that NaN marks a missing one, "
                  f'{type(self).__name__}(missing="nan").')  # fmt: skip
        return read_columns(y, num_examples, num_outputs, self.missing is not None, remedy)

    def _filled(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """Targets in the type of f, zero where they are missing, and where they are there; None for everywhere."""
        y = y.to(f)
        if self.missing is None:
            return y, None
        there = ~y.isnan()
        return torch.where(there, y, torch.zeros_like(y)), there

    def _known(self, values: Tensor, y: Tensor | None) -> Tensor:
        """Values (N, C), or a diagonal's entries, zero where the target is missing."""
        if self.missing is None or y is None:
            return values
        return values.masked_fill(y.isnan(), 0.0)
