"""Conditional evidence from samples of any posterior."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, NonFiniteError, require_choice
from ntk_laplace.model.data import as_tensor
from ntk_laplace.posterior.estimates import ConditionalEstimate, conditional_estimate, warn_of

if TYPE_CHECKING:
    import numpy as np

_KINDS = ("joint", "marginal")


def conditional_from_samples(log_likelihood: Tensor | np.ndarray, kind: str = "joint") -> ConditionalEstimate:
    """Conditional evidence log p(asked given other points) from samples θ_s of p(θ given the others) ([L22] Eq. 5).

    The samples may come from any sampler: Laplace's Gaussian, SGHMC, Hamiltonian Monte Carlo, an ensemble.

    Parameters
    ----------
    log_likelihood : Tensor or array, (S, N) or (chains, draws, N)
        log p(y_i given θ_s) of the N asked points, nats. With chains, autocorrelation is estimated and enters the
        standard error. Samples (S, N) are taken as independent: thin a single chain, or give it as (1, S, N).
    kind : str
        "joint": log (1/S) Σ_s Π_i p(y_i given θ_s), the conditional evidence. "marginal": Σ_i log (1/S) Σ_s p(y_i given
        θ_s), the log score of Bayesian model averages, point by point ([L22] appendix G has both).

    Returns
    -------
    ConditionalEstimate
        With standard error, effective samples and the variance that rules the bias of the joint form. A warning is
        issued if that exceeds log S and fewer than 100 samples are effective, or if fewer than 10 are independent.

    Raises
    ------
    UnsupportedError
        If the kind is unknown.
    DataError
        If the shape is another one, or there are fewer than 2 samples, or no points.
    NonFiniteError
        If a log likelihood is NaN or +inf; -inf is a density of zero.
    """
    require_choice(kind, _KINDS, 'kind "joint" or "marginal"')
    try:
        values = as_tensor(log_likelihood)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise DataError("log likelihoods as a tensor or an array", f"{log_likelihood!r}"[:80],
                        "Give one row for each sample, and one column for each asked point.") from cause
    if values.is_meta or values.is_nested or values.layout != torch.strided:
        kind_of = "meta" if values.is_meta else "nested" if values.is_nested else f"{values.layout}"
        raise DataError("a dense tensor of log likelihoods, with values", f"one that is {kind_of}",
                        "Pass to_dense() of a sparse one.")
    shape = tuple(values.shape)
    if len(shape) not in (2, 3) or 0 in shape or values.is_complex():
        raise DataError("log likelihoods (S, N), or (chains, draws, N)", f"shape {shape}, {values.dtype}",
                        "Give one row for each sample, and one column for each asked point.")
    chains = values.unsqueeze(1) if len(shape) == 2 else values
    if chains.shape[0] * chains.shape[1] < 2:
        raise DataError("at least 2 samples", "1", "Give more: one sample says nothing of the spread.")
    bad = (values.isnan() | (values == torch.inf)).nonzero()
    if len(bad):
        where = tuple(int(i) for i in bad[0])
        raise NonFiniteError("log likelihoods that are finite, or -inf", f"{float(values[where])} at {where}",
                             "Look at this sample: its chain may have diverged.")
    return warn_of(conditional_estimate(chains, kind))
