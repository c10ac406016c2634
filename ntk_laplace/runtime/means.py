"""Standard errors of means over the points of a data set."""

from __future__ import annotations

import math

from torch import Tensor


def error_of_mean(terms: Tensor, shares: Tensor) -> float:
    """Standard error of the mean Σ s_n v_n, as that of more such points; NaN where a single point counts.

    Parameters
    ----------
    terms : Tensor, (N,)
        s_n v_n.
    shares : Tensor, (N,)
        s_n, the weights of the mean, with sum 1.
    """
    count = int((shares > 0).sum())
    return float((terms - shares * terms.sum()).norm()) * (count / (count - 1)) ** 0.5 if count > 1 else math.nan
