"""What a caller gives as a posterior precision, checked and factorized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature.full import FullPrecision
from ntk_laplace.curvature.given import BlockwisePrecision, GivenPrecision
from ntk_laplace.curvature.posterior_precision import PosteriorPrecision
from ntk_laplace.curvature.structured import BlockDiagonalPrecision
from ntk_laplace.errors import HyperparameterError, NumericalError, UnsupportedError
from ntk_laplace.runtime.linalg import cholesky_
from ntk_laplace.runtime.parameter_layout import ParameterLayout
from ntk_laplace.runtime.resources import require_memory

_FORMS = "a tensor (P, P), a diagonal (P,), a mapping from parameter names to these, or a PosteriorPrecision"


def given_precision(
    given: object, shapes: Mapping[str, torch.Size], like: Tensor, budget: int | None = None
) -> PosteriorPrecision:
    """H from what a caller gives, checked and factorized.

    Parameters
    ----------
    given : Tensor, mapping or PosteriorPrecision
        (P, P), symmetric; (P,), a diagonal; for every parameter a diagonal of its shape or a dense block (p, p); or a
        factorized precision of these parameters.
    shapes : mapping of str to torch.Size
        The parameters, in order.
    like : Tensor
        Gives dtype and device.
    budget : int, optional
        Bytes that may be used.

    Raises
    ------
    HyperparameterError
        If shapes, names or values do not fit.
    NumericalError
        If it is not positive definite.
    MemoryBudgetError
        If the factors do not fit in memory; nothing was allocated.
    UnsupportedError
        If it is something else.
    """
    layout = ParameterLayout.of(shapes)
    if isinstance(given, PosteriorPrecision):
        return _factorized_already(given, layout, like)
    if isinstance(given, Tensor):
        p = layout.num_parameters
        _require_form("precision", given, given.shape == (p,) or given.shape == (p, p), f"({p}, {p}) or ({p},)")
        if given.shape == (p, p) and p > 1:
            return BlockwisePrecision({}, [(tuple(layout), _factor("precision", given, like, budget))], layout)
        return BlockwisePrecision(layout.parts(_diagonal("precision", given.reshape(-1), like)), [], layout)
    if isinstance(given, Mapping):
        return _by_name(given, layout, like, budget)
    posterior = hasattr(given, "posterior_precision")
    raise UnsupportedError(_FORMS, f"a {type(given).__name__}",
                           "Pass its posterior_precision." if posterior else "Pass one of these.")


def _by_name(
    given: Mapping[Any, Any], layout: ParameterLayout, like: Tensor, budget: int | None
) -> BlockwisePrecision:
    """Diagonals and dense blocks by parameter name."""
    missing = [name for name in layout if name not in given]
    unknown = [name for name in given if name not in layout]
    if missing or unknown:
        raise HyperparameterError(f"a precision for each of the parameters {', '.join(layout)}",
                                  f"none for {', '.join(missing)}" if missing else f"{', '.join(map(str, unknown))}",
                                  "Name the parameters of the posterior, all of them.")
    diagonals, factors = {}, []
    for name, shape in layout.items():
        value, p = given[name], shape.numel()
        if not isinstance(value, Tensor):
            raise UnsupportedError(f"a tensor for {name!r}", f"a {type(value).__name__}", "Pass torch tensors.")
        form = f"{tuple(shape)}, a diagonal, or ({p}, {p}), a dense block"
        _require_form(f"precision[{name!r}]", value, value.shape in (shape, (p, p)), form)
        if value.shape == shape:
            diagonals[name] = _diagonal(f"precision[{name!r}]", value.reshape(-1), like)
        else:
            factors.append(((name,), _factor(f"precision[{name!r}]", value, like, budget)))
    return BlockwisePrecision(diagonals, factors, layout)


def _require_form(what: str, value: Tensor, fits: bool, form: str) -> None:
    if not fits:
        raise HyperparameterError(f"{what} of shape {form}", f"shape {tuple(value.shape)}",
                                  "Order its entries as the network's parameters are flattened.")
    if value.layout != torch.strided or value.is_meta:
        raise HyperparameterError(f"{what} as a dense tensor with values",
                                  f"{'a meta tensor' if value.is_meta else value.layout}", "Call its to_dense().")
    if value.dtype not in (torch.float32, torch.float64):
        raise HyperparameterError(f"{what} in torch.float64 or torch.float32", f"{value.dtype}", "Convert it.")


def _diagonal(what: str, value: Tensor, like: Tensor) -> Tensor:
    value = value.detach().to(like)
    bad = (~(value.isfinite() & (value > 0))).nonzero()
    if len(bad):
        first = int(bad[0])
        raise HyperparameterError(f"positive finite numbers in {what}", f"{float(value[first]):.4g} at entry {first}",
                                  "Pass precisions, one over variances.")
    return value.clone()


def _factor(what: str, value: Tensor, like: Tensor, budget: int | None) -> Tensor:
    """L with H = L Lᵀ, of a symmetric matrix."""
    p = len(value)
    require_memory(p * p * like.element_size(), like.device, f"the factor of {what}, {p:,} x {p:,}",
                   "Give a diagonal, or dense blocks by parameter.", budget)
    value = value.detach()
    size, step = float(value.abs().max()), 512
    if not bool(torch.isfinite(value).all()):
        raise HyperparameterError(f"finite numbers in {what}", "NaN or infinity", "Check how it was computed.")
    gap = max(float((value[i : i + step] - value[:, i : i + step].T).abs().max()) for i in range(0, p, step))
    if gap > torch.finfo(value.dtype).eps ** 0.5 * size:
        raise HyperparameterError(f"a symmetric {what}", f"entries that differ by {gap:.3g} from their mirror images",
                                  "Pass (H + H.T) / 2 if the difference is rounding.")
    try:
        return cholesky_(value.to(like, copy=True).contiguous())
    except NumericalError as error:
        raise NumericalError(f"a positive definite {what}", f"a matrix without a Cholesky factor ({error.got})",
                             "Pass a precision, the inverse of a covariance.") from error


def _factorized_already(given: PosteriorPrecision, layout: ParameterLayout, like: Tensor) -> PosteriorPrecision:
    if isinstance(given, GivenPrecision):
        given = given.inner
    if list(given.shapes.items()) != list(layout.items()):
        raise HyperparameterError(f"a precision of the parameters {dict(layout)!r}"[:200],
                                  f"one of {dict(given.shapes)!r}"[:200],
                                  "Linearize the same parameters of the same network, parameters=....")
    own = given.prior_precision
    if (own.dtype, own.device) != (like.dtype, like.device):
        raise HyperparameterError(f"a precision in {like.dtype} on {like.device}", f"{own.dtype} on {own.device}",
                                  "Move the posterior that it is from, posterior.to(device, dtype).")
    if isinstance(given, FullPrecision):
        return BlockwisePrecision({}, [(tuple(layout), given.factor)], layout)
    if isinstance(given, BlockDiagonalPrecision) and all(part.block.kind == "diagonal" for part in given.algebras):
        return BlockwisePrecision(layout.parts(given.multiply(torch.ones_like(own))), [], layout)
    return given
