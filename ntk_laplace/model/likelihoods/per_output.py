"""Likelihoods with one target per response, some of which may be missing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Size, Tensor

from ntk_laplace.errors import HyperparameterError, require_choice
from ntk_laplace.model.likelihoods.base import Likelihood
from ntk_laplace.model.likelihoods.targets import read_columns, require_columns


class PerOutput(Likelihood):
    """A likelihood with one target per response, (N, D), that may mark missing targets.

    Parameters
    ----------
    missing : str, optional
        "nan": a NaN target is missing and contributes nothing to log p, its gradient and its curvature. By default a
        NaN is an error.

    Raises
    ------
    HyperparameterError
        If `missing` has another value.
    """

    missing: str | None = None

    def __init__(self, missing: str | None = None) -> None:
        super().__init__()
        require_choice(missing, (None, "nan"), 'missing="nan", or None where no target is missing',
                       "Leave it out, or write NaN where a target is missing.", error=HyperparameterError)
        self.missing = missing

    def targets(self, y: Any, num_examples: int, num_outputs: int) -> Tensor:
        """Check real targets, (N, D), or (N,) for one response; NaN is allowed if it marks a missing one."""
        remedy = ("Remove or impute examples with missing targets, or say that NaN marks a missing one, "
                  f'{type(self).__name__}(missing="nan").')
        return read_columns(y, num_examples, self.num_responses(num_outputs), self.missing is not None, remedy)

    def observed(self, y: Tensor) -> Tensor | None:
        """Mask of observed targets, (N, D); None if all are observed."""
        if self.missing is None:
            return None
        there = ~y.isnan()
        return None if bool(there.all()) else there

    def event_shape(self, num_outputs: int) -> Size:
        """(D,)."""
        return Size((self.num_responses(num_outputs),))

    def hidden(self, y: Tensor, observed: Tensor) -> Tensor:
        """Targets with NaN where `observed` is false."""
        return y.masked_fill(~observed, torch.nan)

    def response_covariance(self, f: Tensor) -> Tensor:
        """`response_variance` on the diagonal, (N, D, D): the responses are independent given f."""
        return torch.diag_embed(self.response_variance(f))

    def record(self) -> dict[str, Any]:
        """The mark of missing targets."""
        return {"missing": self.missing}

    def _filled(self, like: Tensor, y: Tensor) -> Tensor:
        """Targets in the dtype of `like`, which has one column per response, zero where missing."""
        require_columns(like, y)
        return self._known(y.to(like), y)

    def _known(self, values: Tensor, y: Tensor | None) -> Tensor:
        """Values (N, D), such as diagonal entries, set to zero where the target is missing."""
        if self.missing is None or y is None:
            return values
        return values.masked_fill(y.isnan(), 0.0)
