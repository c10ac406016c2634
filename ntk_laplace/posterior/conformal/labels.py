"""Prediction sets of classes: leave-one-out conformal sets of [Romano et al. 2020] and split conformal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import torch
from torch import Size, Tensor

from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.likelihoods.targets import read_labels
from ntk_laplace.posterior.conformal.quantiles import rank_of
from ntk_laplace.posterior.explain import Reliability

if TYPE_CHECKING:
    import pandas

_Name = TypeVar("_Name")
SET_SCORES = ("probability", "cumulative", "randomized")


@dataclass(frozen=True, repr=False)
class PredictionSets:
    """A set of labels for each input.

    Attributes
    ----------
    mask : Tensor of bool, (n, C)
        Which labels belong to the set.
    probabilities : Tensor, (n, C)
        Class probabilities of the network, or of the linearized network after a what-if.
    level : float
        Nominal coverage.
    method : str
        "jackknife+" or "split".
    score : str
        "probability", "cumulative" or "randomized".
    count : int
        Points that were scored.
    guarantees : tuple of str
        What is guaranteed, and what is not.
    reliability : Reliability or None
        Of leave-one-out; None for "split".
    """

    mask: Tensor
    probabilities: Tensor
    level: float
    method: str
    score: str
    count: int
    guarantees: tuple[str, ...]
    reliability: Reliability | None

    AXES: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(("mask", "probabilities"), ("input", "class")) | {
        "size": ("input",)
    }

    @property
    def size(self) -> Tensor:
        """Number of labels in each set, (n,); 0 where no label fits as well as the points' own labels do."""
        return self.mask.sum(1)

    @overload
    def labels(self, names: None = None) -> list[list[int]]: ...

    @overload
    def labels(self, names: Sequence[_Name]) -> list[list[_Name]]: ...

    def labels(self, names: Sequence[Any] | None = None) -> list[list[Any]]:
        """Labels of each set, most probable first; by name if `names` of the classes are given."""
        if names is not None and len(names) != self.probabilities.shape[1]:
            raise DataError(f"names of {self.probabilities.shape[1]} classes", f"{len(names)}", "Pass one for each.")
        order = self.probabilities.argsort(dim=1, descending=True, stable=True)
        rows = zip(order.tolist(), self.mask.gather(1, order).tolist(), strict=True)
        found = [[label for label, inside in zip(*row, strict=True) if inside] for row in rows]
        return [[label if names is None else names[label] for label in row] for row in found]

    def contains(self, y: Any) -> Tensor:
        """Whether each label of `y` (n,) is in its set, bool, (n,); false for a missing label, -100.

        Raises
        ------
        TargetError
            If there is not one label for each input.
        """
        y = self._targets(y)
        return self.mask.gather(1, y.clamp_min(0).unsqueeze(1)).squeeze(1) & (y >= 0)

    def coverage(self, y: Any) -> float:
        """Fraction of the labels `y` (n,) that are in their sets; missing labels, -100, are left out.

        Raises
        ------
        TargetError
            If there is not one label for each input.
        """
        return float(self.contains(y)[self._targets(y) >= 0].double().mean())

    def to_dataframe(self, names: Sequence[object] | None = None) -> pandas.DataFrame:
        """One row per input: labels, most probable first, and their number; ``attrs`` has level and guarantees."""
        import pandas

        frame = pandas.DataFrame({
            "input": range(len(self.mask)), "labels": self.labels(names), "size": self.size.tolist(),
        })
        frame.attrs |= {"level": self.level, "method": self.method, "guarantees": list(self.guarantees)}
        return frame

    def _targets(self, y: Any) -> Tensor:
        y = y.reshape(-1) if isinstance(y, Tensor) and y.shape == (len(self.mask), 1) else y
        return read_labels(y, *self.mask.shape).to(self.mask.device)

    def __repr__(self) -> str:
        size = self.size
        trusted = self.reliability is None or self.reliability.trusted
        return (
            f"PredictionSets({len(size)} inputs, {self.mask.shape[1]} classes; level {self.level:g}, {self.method} "
            f"with {self.score} scores of {self.count} points; mean size {float(size.double().mean()):.3g}, "
            f"{int((size == 1).sum())} of one label, {int((size == 0).sum())} empty"
            f"{'' if trusted else f'; {self.reliability}'})"
        )


def has_one_label(likelihood: Likelihood, num_outputs: int) -> bool:
    """Whether a target is one label: `predict_set` has sets of them."""
    return likelihood.classifies and likelihood.event_shape(num_outputs) in (Size(), Size((1,)))


def require_classes(likelihood: Likelihood, num_outputs: int) -> None:
    """Refuse a likelihood without one label per example (UnsupportedError)."""
    if not has_one_label(likelihood, num_outputs):
        raise UnsupportedError(
            "a likelihood of one label per example for sets of labels: Categorical(), or Bernoulli() of one output",
            f"{type(likelihood).__name__} of {num_outputs} output(s)",
            "Use predict(x).probs for several labels an example, and predict_interval for real responses.",
        )


def class_probabilities(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Probabilities of the labels for f (..., C), (..., C); of 0 and 1 for one output, (..., 2)."""
    p = likelihood.mean(f.reshape(-1, f.shape[-1])).view(*f.shape[:-1], -1)
    return torch.cat([1 - p, p], -1) if p.shape[-1] == 1 else p


def hard_labels(likelihood: Likelihood, targets: Tensor) -> Tensor:
    """Labels (N,) of canonical targets, -100 where missing. UnsupportedError if a target is a soft label."""
    there = likelihood.observed(targets)
    soft = targets.flatten(1) if targets.ndim > 1 else targets.unsqueeze(1)
    if targets.is_floating_point():
        known = soft if there is None else soft[there.reshape(len(soft), -1).all(1)]
        if not bool(((known == 0) | (known == 1)).all()):
            raise UnsupportedError("one label for each point", "soft labels",
                                   "Pass held-out data with hard labels, data=(X, y).")
        label = soft.argmax(1) if soft.shape[1] > 1 else soft.squeeze(1).nan_to_num(0.0).long()
    else:
        label = soft.squeeze(1)
    return label if there is None else label.masked_fill(~there.reshape(len(label), -1).all(1), -100)


def label_scores(p: Tensor, score: str, u: Tensor) -> Tensor:
    """Score of every label, larger where it fits worse, like p (..., C).

    "probability": 1 - p. "cumulative": the sum of all probabilities from the largest to the label's own.
    "randomized": that sum, with the label's own probability times u (..., 1), uniform in [0, 1).
    """
    if score == "probability":
        return 1 - p
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    total = ordered.cumsum(-1)
    total[..., -1] = 1.0  # without rounding: the scores of least probable labels are equal
    total = total if score == "cumulative" else total - ordered * (1 - u)
    return torch.empty_like(total).scatter_(-1, order, total)


def members(scores: Tensor, own: Tensor, level: float) -> Tensor:
    """Labels y with #{i: s_i < s_-i(x, y)} < level (m + 1), bool, (n, C).

    s_-i(x, y) are the `scores` of each label without each point, (n, m, C), or (n, 1, C) if they are the same for all
    points; s_i (m,) is each point's score of its own label, without the point.
    """
    worse = (own.view(1, -1, 1) < scores).sum(1)
    return worse < rank_of(level, len(own))
