"""The noise that a Gaussian likelihood is given: its checks, each a `HyperparameterError`, and what its shape means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Size, Tensor

from ntk_laplace.errors import HyperparameterError
from ntk_laplace.runtime.conversion import to_tensor

KINDS = ("auto", "scalar", "output", "point", "covariance")


def numbers(noise: Any) -> Tensor:
    """A copy of the noise as a float64 tensor."""
    try:
        return to_tensor(noise, dtype=torch.float64).detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise HyperparameterError("noise as a number or a tensor", repr(noise)[:80],
                                  "Pass variances, such as 0.1.") from error


def one_number(values: Tensor) -> Tensor:
    """A 0-d tensor."""
    if values.numel() != 1:
        raise HyperparameterError('one number for kind="scalar"', f"shape {tuple(values.shape)}",
                                  'Pass a float, or kind="auto".')
    return values.reshape(())


def filled(values: Tensor, shape: Size) -> Tensor:
    """Values in the given shape; one number is expanded to it."""
    if values.numel() != 1 and values.shape != shape:
        raise HyperparameterError(f"noise of shape {tuple(shape)}, or one number", f"shape {tuple(values.shape)}",
                                  "Pass one value for each.")
    return values.expand(shape)


def positive(values: Tensor) -> Tensor:
    """The values, if they are positive and finite variances."""
    if values.numel() == 0 or values.dim() > 2:
        raise HyperparameterError("noise as a number, or of shape (C,), (N,), (N, C), or (C, C) for a covariance",
                                  f"shape {tuple(values.shape)}", "Pass variances, or one covariance for all points.")
    bad = ~(values.isfinite() & (values > 0))
    if bad.any():
        raise HyperparameterError("noise variances that are positive and finite", f"{float(values[bad][0]):g}",
                                  "Pass variances above 0.")
    return values


def unit_factors(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Log D (C,) and the strict lower triangle of U in ``Σ = U diag(D) Uᵀ``."""
    factor, info = torch.linalg.cholesky_ex(covariance) if covariance.dim() == 2 else (covariance, 1)
    symmetric = covariance.dim() == 2 and torch.allclose(covariance, covariance.mT, rtol=1e-10, atol=0.0)
    if not symmetric or int(info) != 0 or not covariance.isfinite().all():
        shape = f"shape {tuple(covariance.shape)}"
        fault = "one that is not symmetric" if not symmetric else "one that is not positive definite"
        raise HyperparameterError("a noise covariance (C, C) that is symmetric and positive definite",
                                  fault if covariance.dim() == 2 else shape,
                                  'Noise of one variance per point and output is Gaussian(noise, kind="point").')
    scale = factor.diagonal()
    rows, columns = torch.tril_indices(len(scale), len(scale), -1, device="cpu")
    return 2.0 * scale.log(), (factor / scale)[rows, columns]


def possible_kinds(values: Tensor) -> tuple[str, ...]:
    """What noise of this shape may mean; N and C decide between two."""
    if values.numel() == 1:
        return ("scalar",)
    if values.dim() < 2:
        return "output", "point"
    return ("covariance", "point") if values.dim() == 2 and values.shape[0] == values.shape[1] else ("point",)


def kind_of(shape: tuple[int, ...], kinds: tuple[str, ...], num_examples: int, num_outputs: int) -> str:
    """What noise of this shape means for N examples and C outputs: the only one of `kinds` that the shape fits."""
    n, c = num_examples, num_outputs
    allowed: dict[str, list[tuple[int, ...]]] = {
        "scalar": [()], "output": [(c,)], "point": [(n,), (n, c)], "covariance": [(c, c)],
    }
    kinds = tuple(kind for kind in kinds if shape in allowed[kind])
    if not kinds:
        raise HyperparameterError(
            f"noise of shape (), ({c},), ({n},), ({n}, {c}) or ({c}, {c}) for {n} examples of {c} outputs",
            f"shape {shape}",
            "Pass one variance, one per output, one per point, or a covariance of the outputs.",
        )
    if len(kinds) > 1:
        raise HyperparameterError(f"noise of an unambiguous shape for {n} examples of {c} outputs",
                                  f"shape {shape}, which could be one per point or of kind {kinds[0]!r}",
                                  f'Say which: Gaussian(noise, kind="{kinds[0]}") or Gaussian(noise, kind="point").')
    return kinds[0]
