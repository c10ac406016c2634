"""Changes of the training data: which points, and their new weights and targets, validated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, HyperparameterError, TargetError, is_whole, require_whole
from ntk_laplace.model.data import as_tensor
from ntk_laplace.structures import LinearizedModel
from ntk_laplace.structures.points import TrainingPoints

Indices = int | Sequence[int] | Tensor
"""Training points: their numbers from 0, or a mask of all of them."""


def positions(indices: Indices, count: int) -> Tensor:
    """Validated indices of training points, (m,).

    Raises
    ------
    DataError
        If they are out of range, repeated, or not integers.
    """
    remedy = f"Pass numbers from 0 to {count - 1}, each once, or a mask of {count} booleans."
    try:
        chosen = as_tensor(indices).detach().cpu().reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError("numbers of training points", f"{indices!r}"[:80], remedy) from error
    if chosen.numel() == 0:
        return chosen.long()
    if chosen.dtype == torch.bool:
        if len(chosen) != count:
            raise DataError(f"a mask of {count} training points", f"{len(chosen)} booleans", remedy)
        return chosen.nonzero().squeeze(1)
    if chosen.is_floating_point() or chosen.is_complex():
        raise DataError("whole numbers of training points", f"dtype {chosen.dtype}", remedy)
    chosen = chosen.long()
    outside = chosen[(chosen < 0) | (chosen >= count)]
    if len(outside):
        raise DataError(f"training points from 0 to {count - 1}", f"{int(outside[0])}", remedy)
    unique, times = chosen.unique(return_counts=True)
    if len(unique) != len(chosen):
        raise DataError("each training point once", f"{int(unique[times > 1][0])} more than once", remedy)
    return chosen


def drawn(points: Indices, count: int, seed: int) -> Tensor:
    """Validated indices of training points: the given ones, or so many at random.

    Raises
    ------
    DataError
        As `positions`, or if the number is not one from 1 to `count`.
    HyperparameterError
        If the seed is not an integer.
    """
    if not isinstance(points, Integral) or isinstance(points, bool):
        return positions(points, count)
    if not 1 <= int(points) <= count:
        raise DataError(f"1 to {count:,} training points", f"points={points}",
                        "Pass how many to draw, or a list of their numbers.")
    require_whole("seed", seed, 0, "Pass for example seed=0.")
    return torch.randperm(count, generator=torch.Generator().manual_seed(int(seed)), device="cpu")[: int(points)]


def reweighted(points: TrainingPoints, indices: Tensor, weights: Tensor | float) -> TrainingPoints:
    """Points with other weights.

    Raises
    ------
    HyperparameterError
        If a weight is negative or not finite, or their number is not that of the indices.
    """
    wrong = HyperparameterError(f"one finite weight of at least 0, or {len(indices)}", f"{weights!r}"[:80],
                                "Pass 0 to remove a point, 1 to keep it, 2 to count it twice.")
    f = points.f
    try:
        new = as_tensor(weights, f.dtype).detach().to(f.device).reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise wrong from error
    if new.numel() not in (1, len(indices)) or not bool((torch.isfinite(new) & (new >= 0)).all()):
        raise wrong
    counts = points.counts.clone()
    counts[indices.to(counts.device)] = new
    return replace(points, weights=counts)


def relabeled(model: LinearizedModel, points: TrainingPoints, indices: Tensor, y: object) -> TrainingPoints:
    """Points with other targets.

    Raises
    ------
    TargetError, NonFiniteError
        If the targets do not fit the likelihood.
    """
    try:
        new = as_tensor(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TargetError("targets as a number or an array of numbers", f"{y!r}"[:80],
                          "Pass one target per point, or one for all.") from error
    if len(indices) == 0:
        if new.ndim and len(new):
            raise TargetError("no target for no points", f"{len(new)}", "Say which points they belong to.")
        return points
    if new.ndim == 0:
        new = new.expand(len(indices))
    elif len(indices) == 1 and (new.shape == points.targets.shape[1:] or _is_soft(new, points)):
        new = new.unsqueeze(0)
    new = model.likelihood.targets(new, len(indices), points.num_outputs)
    new = new.to(points.targets.device)
    targets = model.likelihood.in_form_of(points.targets, new).clone()
    targets[indices.to(targets.device)] = model.likelihood.in_form_of(new, targets).to(targets)
    return replace(points, targets=targets)


def require_left(left: Tensor, present: Tensor | None) -> None:
    """Refuse changes after which no training point with a target is left.

    Parameters
    ----------
    left : Tensor, (N,) or (G, N)
        Example weights after the change, or after each of several.
    present : Tensor of bool, (N,), optional
        Which points have a target; all by default.

    Raises
    ------
    DataError
    """
    empty = ((left if present is None else left * present) > 0).any(-1).logical_not().reshape(-1).nonzero()
    if len(empty):
        which = "none" if left.ndim == 1 else f"none in group {int(empty[0])}"
        raise DataError("at least one training point with a target that is left", which, "Change fewer points.")


def _is_soft(new: Tensor, points: TrainingPoints) -> bool:
    """Whether `new` is one soft label, (C,), while the targets are class indices."""
    return new.is_floating_point() and points.targets.ndim == 1 and new.shape == points.f.shape[1:]


def require_steps(steps: int | None) -> None:
    """Validate a number of Newton steps.

    Raises
    ------
    HyperparameterError
        If it is neither an integer of at least 1 nor None.
    """
    if steps is not None and not is_whole(steps, 1):
        raise HyperparameterError("steps of at least 1, or None for the optimum", f"{steps!r}",
                                  "Use steps=1 for one Newton step.")
