"""Square roots of small covariances, one per input, without jitter."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ntk_laplace.errors import NumericalError, warn
from ntk_laplace.model.likelihoods.targets import first_bad
from ntk_laplace.runtime.lower_triangle import more_digits


def diagonal_blocks(matrices: Tensor, size: int) -> Tensor:
    """Blocks (..., L, size, size) on the diagonal of matrices (..., L size, L size)."""
    apart = matrices.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # (..., L, size, L, size)
    return apart.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def covariance_root(covariance: Tensor) -> Tensor:
    """Symmetric W with ``W W`` equal to positive semidefinite `covariance` (n, C, C), which may be singular.

    Unlike other square roots it is unique and continuous. Covariances that agree up to rounding therefore give samples
    that agree up to rounding if they are regular, and up to its square root if they are singular. Eigenvalues that are
    negative by rounding count as zero; for larger ones a warning reports the size. NumericalError if a covariance is
    not finite, or has a negative eigenvalue larger than rounding errors.
    """
    if not covariance.isfinite().all():
        raise NumericalError("finite covariances", f"NaN or infinity at input {first_bad(~covariance.isfinite())}",
                             "Check the inputs and the network's outputs there.")
    values, vectors = torch.linalg.eigh(covariance)
    spectrum = values.detach()
    least, largest = float(spectrum.min()), float(spectrum.abs().max())
    eps = torch.finfo(covariance.dtype).eps
    if least < -(eps**0.5) * largest:
        raise NumericalError(
            "positive semidefinite covariances",
            f"an eigenvalue {least:.3g} beside {largest:.3g} at input {first_bad(spectrum == spectrum.min())}",
            more_digits(covariance.dtype),
        )
    if least < -1e3 * eps * largest:
        warn(f"a latent covariance had an eigenvalue {least:.3g} beside {largest:.3g}; it counts as zero")
    return (vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)) @ vectors.mT


def cholesky(covariance: Tensor) -> Tensor:
    """Lower triangular factors of covariances (n, C, C), or a `NumericalError` that names the first bad input."""
    factor, info = torch.linalg.cholesky_ex(covariance)
    if info.any():
        raise NumericalError(
            "a positive definite covariance of the response",
            f"a singular one at input {int((info != 0).int().argmax())}",
            'Predict with method="glm" if class probabilities are saturated; else use dtype=torch.float64.',
        )
    return factor


def require_positive(variance: Tensor) -> None:
    """Raise a `NumericalError` that names the first input whose variance (n,) is not positive."""
    if not (variance > 0).all():
        index = first_bad(~(variance > 0))
        raise NumericalError("positive variances of the response",
                             f"{float(variance.detach()[index]):.3g} at input {index}", more_digits(variance.dtype))


def marginal_factor(covariance: Tensor, there: Tensor) -> Tensor:
    """Cholesky factors of covariances (..., C, C) over observed entries (`there`), of the identity over the others."""
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return cholesky(torch.where(there.unsqueeze(-1) & there.unsqueeze(-2), covariance, eye))


def marginal_log_density(error: Tensor, covariance: Tensor, there: Tensor) -> Tensor:
    """Log density N(error; 0, Σ) over the observed entries (`there`), (..., C) -> (...), nats."""
    factor = marginal_factor(covariance, there)
    scaled = torch.linalg.solve_triangular(factor, error.masked_fill(~there, 0.0).unsqueeze(-1), upper=False)
    log_det = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * (scaled.square().sum((-2, -1)) + log_det + there.sum(-1).to(error) * math.log(2 * math.pi))
