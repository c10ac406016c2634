"""Residual, hessian and root of a log density, by automatic differentiation in f."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ntk_laplace.errors import NonFiniteError, UnsupportedError
from ntk_laplace.model.likelihoods.targets import first_bad


def gradient(log_density: Callable[[Tensor], Tensor], f: Tensor) -> Tensor:
    """Per-example gradient in f of ``log_density(f)`` (N,), (N, C).

    If gradients are enabled, it is differentiable in all other tensors that the density depends on.
    """
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        f = _leaf(f)
        return _rows(_differentiable(log_density(f), "log density"), f, create_graph=keep)


def jacobian(function: Callable[[Tensor], Tensor], f: Tensor) -> Tensor:
    """Per-example Jacobian in f of ``function(f)`` (N, K), which must not mix examples, (N, K, C)."""
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        f = _leaf(f)
        values = _differentiable(function(f), "mean response")
        return _columns(values, f, keep)


def negative_hessian(log_density: Callable[[Tensor], Tensor], f: Tensor) -> Tensor:
    """Minus the second derivative in f of ``log_density(f)`` (N,), (N, C, C)."""
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        f = _leaf(f)
        slope = _rows(_differentiable(log_density(f), "log density"), f, create_graph=True)
        hessian = -_columns(slope, f, keep)
    return 0.5 * (hessian + hessian.mT)  # symmetric up to rounding before this line


def root_of_hessian(hessian: Tensor) -> Tensor:
    """S (N, C, C) with ``S Sᵀ`` equal to positive semidefinite `curvature`, which may be singular.

    NonFiniteError if a hessian contains NaN or infinity. UnsupportedError if a hessian has a negative eigenvalue beyond
    rounding: the log density is not concave there.
    """
    if not hessian.isfinite().all():
        index = first_bad(~hessian.isfinite())
        raise NonFiniteError(
            "a finite second derivative of the log density",
            f"NaN or infinity at example {index}",
            "Write the log density with functions that are smooth there, such as logsigmoid or logaddexp.",
        )
    values, vectors = torch.linalg.eigh(hessian)
    eps = torch.finfo(hessian.dtype).eps
    # rounding of second derivatives is relative to the batch's largest value and to log p, which is of order one
    spectrum = values.detach()
    tolerance = eps * max(10.0, 1e3 * hessian.shape[-1] * float(spectrum.abs().max()))
    if float(spectrum.min()) < -tolerance:
        index = first_bad(spectrum < -tolerance)
        raise UnsupportedError(
            "a log density that is concave in f",
            f"a second derivative with eigenvalue {-float(spectrum[index].min()):+.3g} at example {index}",
            "Choose a log-concave likelihood, override `curvature` with the Fisher information, or take "
            'curvature="ef", which needs no second derivative.',
        )
    return vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)


def _differentiable(outputs: Tensor, what: str) -> Tensor:
    """Outputs that have a gradient in f (UnsupportedError): a derivative of zero would be wrong without a word."""
    if not outputs.requires_grad:
        raise UnsupportedError(f"a {what} that autograd can differentiate in f", "one without a gradient",
                               "Compute it from f by torch operations, without numpy, item() or detach(); or override "
                               "its derivatives too.")
    return outputs


def _columns(values: Tensor, f: Tensor, keep: bool) -> Tensor:
    """Per-example derivatives in f of values (N, K), (N, K, C): one backward pass for each of the K.

    vmap would not do, because some differentiable functions do not support it.
    """
    return torch.stack([_rows(column, f, create_graph=keep, retain_graph=True) for column in values.unbind(1)], 1)


def _leaf(f: Tensor) -> Tensor:
    return f if f.requires_grad else f.detach().requires_grad_()


def _rows(outputs: Tensor, f: Tensor, create_graph: bool, retain_graph: bool | None = None) -> Tensor:
    """Gradient of the sum of outputs, which is the per-example gradient if examples do not mix."""
    if not outputs.requires_grad:
        return torch.zeros_like(f)
    (rows,) = torch.autograd.grad(outputs.sum(), f, create_graph=create_graph, retain_graph=retain_graph,
                                  materialize_grads=True)
    return rows
