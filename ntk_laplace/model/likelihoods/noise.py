"""Checks of the noise that a Gaussian likelihood is given; each raises a `HyperparameterError`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Size, Tensor

from ntk_laplace.errors import HyperparameterError

__all__ = ["filled", "numbers", "one_number", "positive", "unit_factors"]


def numbers(noise: Any) -> Tensor:
    """A copy of the noise as a float64 tensor."""
    try:
        return torch.as_tensor(noise, dtype=torch.float64).detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise HyperparameterError(
            "noise as a number or a tensor", repr(noise)[:80], "Pass variances, such as 0.1."
        ) from error


def one_number(values: Tensor) -> Tensor:
    """A 0-d tensor."""
    if values.numel() != 1:
        raise HyperparameterError(
            'one number for kind="scalar"', f"shape {tuple(values.shape)}", 'Pass a float, or kind="auto".'
        )
    return values.reshape(())


def filled(values: Tensor, shape: Size) -> Tensor:
    """Values in the given shape; one number is expanded to it."""
    if values.numel() != 1 and values.shape != shape:
        raise HyperparameterError(
            f"noise of shape {tuple(shape)}, or one number", f"shape {tuple(values.shape)}", "Pass one value for each."
        )
    return values.expand(shape)


def positive(values: Tensor) -> Tensor:
    """The values, if they are positive and finite variances."""
    bad = ~(values.isfinite() & (values > 0))
    if values.numel() == 0 or values.dim() > 2 or bad.any():
        got = f"{float(values[bad][0]):g}" if bad.any() else f"shape {tuple(values.shape)}"
        raise HyperparameterError("noise variances that are positive and finite", got, "Pass variances above 0.")
    return values


def unit_factors(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Log D (C,) and the strict lower triangle of U in ``Σ = U diag(D) Uᵀ``."""
    factor, info = torch.linalg.cholesky_ex(covariance) if covariance.dim() == 2 else (covariance, 1)
    symmetric = covariance.dim() == 2 and torch.allclose(covariance, covariance.mT, rtol=1e-10, atol=0.0)
    if not symmetric or int(info) != 0 or not covariance.isfinite().all():
        shape = f"shape {tuple(covariance.shape)}"
        fault = "one that is not symmetric" if not symmetric else "one that is not positive definite"
        raise HyperparameterError(
            "a noise covariance (C, C) that is symmetric and positive definite",
            fault if covariance.dim() == 2 else shape,
            'Noise of one variance per point and output is Gaussian(noise, kind="point").',
        )
    scale = factor.diagonal()
    rows, columns = torch.tril_indices(len(scale), len(scale), -1)
    return 2.0 * scale.log(), (factor / scale)[rows, columns]
