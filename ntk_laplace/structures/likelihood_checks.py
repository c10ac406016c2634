"""Checks of a likelihood at the training points of a fit: its methods must agree with each other and among examples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import CurvatureType
from ntk_laplace.errors import UnsupportedError, warn
from ntk_laplace.model.likelihoods import Bernoulli, Categorical, Likelihood
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.structures.points import BRANCH, TrainingPoints

_CHECKED = 4  # points at which the methods of a likelihood are compared
_NORMALIZED = 1e-4  # error of a sum of probabilities in float32
_LIKELIER = 3.0  # nats by which outputs that are probabilities explain the labels better than as logits
_AGREEMENT = 1e-3  # relative difference of a residual and the derivative: float32 likelihoods differ by rounding


def require_consistent(points: TrainingPoints, likelihood: Likelihood, curvature_type: CurvatureType) -> None:
    """Refuse a likelihood whose methods contradict each other at the first points, or that is NaN at any.

    Raises
    ------
    UnsupportedError
        If a shape or dtype is wrong, a value is not finite, examples mix, targets are changed, the residual is not
        the derivative of the log density, the curvature is not symmetric or not that of the root, or a missing
        target has a log density.
    NonFiniteError
        If the log density of a point is NaN.
    """
    part = slice(0, min(_CHECKED, points.num_examples))
    whole, name = likelihood.at(part), type(likelihood).__name__
    own, (f, y) = whole.at_position(), whole.apart(points.f[part].detach(), points.targets[part])
    if own is not whole:
        f, y = f[:_CHECKED], y[:_CHECKED]
    y, given = y.clone(), y
    with torch.enable_grad():
        f_graph = f.clone().requires_grad_()
        log_prob = own.log_prob(f_graph, y)
        differentiable = isinstance(log_prob, Tensor) and log_prob.requires_grad
        slope = torch.autograd.grad(log_prob.sum(), f_graph, allow_unused=True)[0] if differentiable else None
    if not torch.equal(y.nan_to_num(), given.nan_to_num()):
        raise UnsupportedError(f"{name}.log_prob(f, y) to leave y as it is", "a change in place",
                               "Compute new tensors, such as 2 * y in place of y.mul_(2).")
    (n, c), d = f.shape, own.num_responses(f.shape[1])
    methods: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
        "log_prob": (lambda: log_prob, (n,)), "residual": (lambda: own.residual(f, y), (n, c)),
        "curvature": (lambda: own.curvature(f, y), (n, c, c)),
    }
    found: dict[str, Tensor] = {}
    for method, (compute, shape) in methods.items():  # one after the other: a default uses those before it
        value = found[method] = _of_shape(f"{name}.{method}", compute(), shape)
        if not bool(torch.isfinite(value).all()):
            raise UnsupportedError(f"finite values from {name}.{method}", "values that are not finite",
                                   f"Look at log_prob for the first targets. {BRANCH}")
        if method == "log_prob":
            own.require_apart(f, y)
        elif value.dtype != f.dtype:
            raise UnsupportedError(f"{name}.{method} in {f.dtype}, as f", f"{value.dtype}",
                                   "Convert what it is computed from, with .to(f).")
    if slope is not None and bool(torch.isfinite(slope).all()):
        _require_equal(f"{name}.residual, the derivative of its log_prob in f", found["residual"], slope,
                       "Correct one of the two, or leave out `residual`, which is then differentiated.")
    curvature = found["curvature"].detach()
    _require_equal(f"{name}.curvature that is symmetric", curvature, curvature.mT, "Correct the method.")
    if type(own).root is not Likelihood.root:
        root = _of_shape(f"{name}.root", own.root(f, y), (n, c, own.rank(c)))
        _require_equal(f"{name}.root, S with S Sᵀ equal to its curvature", root @ root.mT, curvature,
                       "Correct one of the two, or write root = Likelihood.root, which uses the curvature.")
    for method, shape in {"mean": (n, d), "response_covariance": (n, d, d)}.items():
        if method == "mean" or own.diagonal_form(f, y) is None:  # many outputs have no room for matrices
            with contextlib.suppress(Exception):  # there may be no mean; it is told where one is asked for
                found[method] = getattr(own, method)(f)
            if method in found:
                _of_shape(f"{name}.{method}, of {d} responses", found[method], shape,
                          "Correct the method, or let num_responses(C) return the number of responses.")
    _require_absent(points, likelihood)
    likelihood.require_apart(points.f.detach(), points.targets)
    points.log_likelihood(likelihood)
    if curvature_type.kind == "ggn" and not curvature.any():
        _tell_flat(points, likelihood)
    counted = likelihood.at_position().counted_once()
    if isinstance(counted, Categorical):
        _tell_probabilities(points, likelihood.num_positions(points.num_outputs))
    elif isinstance(counted, Bernoulli):
        _tell_probabilities_of_one(points, likelihood)


def _require_absent(points: TrainingPoints, likelihood: Likelihood) -> None:
    """Refuse a log density of examples that have no target at all."""
    present = points.present(likelihood)
    if present is None or bool(present.all()):
        return
    index = (~present).nonzero().squeeze(1)[:_CHECKED]
    if bool(likelihood.at(index).log_prob(points.f[index], points.targets[index]).any()):
        raise UnsupportedError(f"{type(likelihood).__name__}.log_prob of 0 where its `observed` is False",
                               f"another at example {int(index[0])}", "Correct one of the two.")


def _tell_flat(points: TrainingPoints, likelihood: Likelihood) -> None:
    """Warn where the curvature is zero at all points."""
    present, c = points.present(likelihood), points.num_outputs
    there = torch.arange(points.num_examples, device=points.f.device) if present is None else present.nonzero()[:, 0]
    each = c * c // likelihood.num_positions(c) * points.f.element_size()  # of matrices of each position
    for part in panels(len(there), each, tuning.HESSIAN_BYTES):
        index = there[part]
        some = likelihood.at(index)
        if some.at_position().curvature(*some.apart(points.f[index].detach(), points.targets[index])).any():
            return
    warn(f"the log density of {type(likelihood).__name__} has no curvature at any point, so the posterior is the "
         "prior; round off its kinks, override `curvature`, or take curvature=\"ef\"")


def _tell_probabilities(points: TrainingPoints, positions: int) -> None:
    """Warn where the outputs are probabilities of classes at all points."""
    n, c = points.f.shape
    for part in (slice(0, _CHECKED), slice(n)):  # few points tell logits
        f = points.f[part].detach().reshape(-1, c // positions)
        if bool((f < 0.0).any()) or bool(((f.sum(1) - 1.0).abs() > _NORMALIZED).any()):
            return
    warn("the outputs of the network are probabilities: rows that sum to 1, none negative. Categorical takes them for "
         "logits, and takes their softmax again; leave out the softmax at the end of the network")


def _tell_probabilities_of_one(points: TrainingPoints, likelihood: Likelihood) -> None:
    """Warn where the outputs are probabilities at all points, which the labels alone tell from small logits."""
    f = points.f.detach()
    for part in (f[:_CHECKED], f):  # few points tell logits
        if bool(((part < 0.0) | (part > 1.0)).any()):
            return
    with torch.no_grad():
        log_odds = torch.logit(f, eps=torch.finfo(points.precision).eps)
        gain = (points.log_prob_at(likelihood, log_odds) - points.log_prob(likelihood)).sum()
    if float(gain) > _LIKELIER:
        warn("the outputs of the network are probabilities: all are in [0, 1], and the labels are likelier by "
             f"{float(gain):.3g} nats if they are taken for such. Bernoulli takes them for logits, and takes their "
             "sigmoid again; leave out the sigmoid at the end of the network")


def _of_shape(
    method: str, value: Any, shape: tuple[int, ...],
    remedy: str = "Correct the method: one row per example; examples must not mix.",
) -> Tensor:
    """What a method returned, a tensor of this shape."""
    if not isinstance(value, Tensor) or value.shape != shape:
        got = f"{tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"[:80]
        raise UnsupportedError(f"values of shape {shape} from {method}", got, remedy)
    return value


def _require_equal(expected: str, one: Tensor, other: Tensor, remedy: str) -> None:
    """Refuse two results that differ beyond the rounding of float32."""
    difference = float((one.detach() - other.detach()).abs().max())
    if difference > _AGREEMENT * (1.0 + float(other.detach().abs().max())):
        raise UnsupportedError(expected, f"a difference of {difference:.3g}", remedy)
