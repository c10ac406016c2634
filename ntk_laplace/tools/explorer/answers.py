"""What a posterior says of inputs and of its training points, in the digits of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.model.data import as_tensor
from ntk_laplace.model.likelihoods import HeteroscedasticGaussian
from ntk_laplace.model.likelihoods.counts import Counts
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.explain import LeaveOneOut
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.tools.explorer.display import rounded, rounded_each, spread_of
from ntk_laplace.tools.explorer.naming import Units

_ENDS = 0.05, 0.95  # of the intervals


class Answers:
    """Predictions and targets of a posterior, rounded; probabilities of two classes where it has one logit.

    `units` are those of `Naming`.
    """

    def __init__(self, posterior: Posterior, units: Units | None = None) -> None:
        self.posterior, self._likelihood = posterior, posterior.likelihood.for_new_points()
        self.kind = "values"  # of the targets: numbers; or "classes", one output each; or "binary", one logit
        if self._likelihood.classifies and self._likelihood.event_shape(posterior.num_outputs) == ():
            self.kind = "classes"
        elif self._likelihood.classifies and posterior.num_outputs == 1:
            self.kind = "binary"
        f = posterior.f.detach()
        # in double precision: the means of targets may be far from 0
        self.units, self._mean = torch.ones(posterior.num_outputs, dtype=torch.float64, device=f.device), None
        if units is not None:
            self.units, self._mean = _scale_and_mean(units, posterior).to(self.units)
        # ranges in the training data, which decide the digits of numbers beside each other; empty for classes
        self.outputs, self.responses = (
            [spread_of(column) for column in self.shown(table).reshape(len(table), -1).T.tolist()]
            if self.kind == "values" else [] for table in (f, posterior.targets)
        )
        # of each output, where bars begin
        self.origins = None if self._mean is None else rounded_each(self._mean, self.outputs)

    def shown(self, values: Tensor) -> Tensor:
        """Outputs, (..., C), or means or targets, (..., D), in the units of the page; those of D are the first."""
        if self._mean is None:
            return values
        count = values.shape[-1] if values.ndim else 1
        return self.units[:count] * values.to(self.units) + self._mean[:count]

    def output_spread(self, number: int) -> float:
        """The range of one output; 0 for classes."""
        return self.outputs[number] if self.outputs else 0.0

    def names(self, target: str) -> list[str]:
        """Names of the classes or outputs where the caller gives none; that of regression's `target` with a number."""
        c = self.posterior.num_outputs
        if self.kind == "values":
            what = target if self.posterior.likelihood.num_responses(c) == c else "output"
            if isinstance(self.posterior.likelihood, Counts):
                what = f"log {target}"
            return [what if c == 1 else f"{what} {i}" for i in range(c)]
        return [str(i) for i in range(2 if self.kind == "binary" else c)]

    def summary(self) -> str:
        """The sentence on the fit below the title."""
        posterior, likelihood = self.posterior, type(self.posterior.likelihood).__name__
        kept = "" if posterior.fitted.structure.spec.keeps_jacobian else f"structure {posterior.structure}, "
        return (f"{posterior.num_examples:,} training points, {posterior.num_parameters:,} parameters, "
                f"{kept}{likelihood} likelihood")

    def signs(self, f: Tensor) -> Tensor:
        """(n,), -1 where a binary logit is negative: effects are then shown on the negative logit, that of class 0."""
        turned = (f[:, 0] < 0) & (self.kind == "binary")
        return torch.where(turned, -1.0, 1.0).to(f)

    def intervals(self, prediction: Any) -> list[list[list[float]]]:
        """Both ends (D,) of intervals of 90 % for each input, of numbers that are not normal; else an empty list."""
        if self.kind != "values" or not hasattr(prediction, "univariate"):
            return []
        try:
            each = prediction.univariate()
        except UnsupportedError:
            return []
        if len(each.log_weights) == 1:
            return []  # mean and standard deviation say all
        ends = [each.icdf(to_tensor(level, dtype=torch.float64)) for level in _ENDS]
        return [[rounded_each(self.shown(end[i].reshape(-1)), self.responses) for end in ends]
                for i in range(len(prediction.mean))]

    def said(self, prediction: Any, i: int, intervals: Sequence[list[list[float]]] = ()) -> dict[str, Any]:
        """A prediction of input i: class probabilities, or mean and standard deviations, and the interval if any."""
        if self.kind != "values":
            return self._answer(prediction.probs[i])
        said = self._answer(prediction.mean[i]) | ({"interval": intervals[i]} if intervals else {})
        parts = {"deviation": prediction.variance} | {
            name: getattr(prediction, name) for name in ("epistemic", "aleatoric") if hasattr(prediction, name)}
        found = {name: part[i].sqrt().reshape(-1) for name, part in parts.items()}
        return said | {name: rounded(self.units[: len(part)] * part if self._mean is not None else part)
                       for name, part in found.items()}  # a response may have several outputs

    def at(self, f: Tensor, sign: Tensor) -> dict[str, Any]:
        """The network's prediction of one input at changed outputs f (C,)."""
        with torch.no_grad():
            mean = self._likelihood.mean(f[None])[0]
        return {"f": rounded_each(self.shown(f) * sign, self.outputs)} | self._answer(mean)

    def _answer(self, mean: Tensor) -> dict[str, Any]:
        """Probabilities of all classes, or the mean of each output, from the mean response to one input."""
        mean = mean.reshape(-1)
        if self.kind == "values":
            return {"mean": rounded_each(self.shown(mean), self.responses)}
        return {"probabilities": rounded(mean if self.kind == "classes" else torch.cat([1 - mean, mean]))}

    def truths(self, targets: Any, n: int) -> list[Any]:
        """Targets of n inputs: a class (for a soft label the most probable one), a number, or one number per output.

        None for an input without a target, NaN for one of several that is missing.
        """
        likelihood, gaps = self._likelihood, torch.zeros(n, 1, dtype=torch.bool, device="cpu")
        if isinstance(targets, np.ndarray) and targets.dtype.kind == "f":
            targets = as_tensor(targets)
        if isinstance(targets, Tensor) and targets.is_floating_point() and targets.shape[:1] == (n,):
            gaps = targets.isnan().reshape(n, -1)
            targets = targets.masked_fill(gaps.view_as(targets), 0)  # any that the likelihood takes, whatever its marks
        y = likelihood.targets(targets, n, self.posterior.num_outputs)
        observed = likelihood.observed(y)
        there = ~gaps.to(y.device) if observed is None else ~gaps.to(y.device) & observed.reshape(n, -1)
        y = y.argmax(1) if self.kind == "classes" and y.ndim == 2 else y.flatten() if y.numel() == n else y
        found = y if self.kind == "values" else (y > 0.5).long() if self.kind == "binary" else y.long()
        if self.kind == "values" and y.ndim == 2:
            found = found.masked_fill(~there, torch.nan)
        found = self.shown(found.reshape(n, -1)).reshape(found.shape) if self.kind == "values" else found
        return [rounded_each(truth, self.responses) if known else None
                for truth, known in zip(found.tolist(), there.any(1).tolist(), strict=True)]

    def training_set(self, left_out: LeaveOneOut) -> dict[str, list[Any]]:
        """Columns of the table of training points."""
        mean, targets = left_out.mean, self.posterior.targets
        without = self.shown(mean)[..., : max(1, len(self.responses))].squeeze(-1)
        if self.kind != "values":
            without = (mean[:, 0] >= 0).long() if self.kind == "binary" else mean.argmax(1)
        observed = self.posterior.likelihood.observed(targets)
        targets = self.shown(targets) if self.kind == "values" else targets
        shown = [rounded_each(target, self.responses)
                 for target in (targets.squeeze(-1) if targets.ndim == 2 and targets.shape[1] == 1 else targets)]
        if observed is not None and observed.ndim == 1:  # missing labels and missing numbers are null
            shown = [target if known else None for target, known in zip(shown, observed.tolist(), strict=True)]
        return {
            "target": shown,
            "without": [rounded_each(value, self.responses) for value in without],
            "logDensity": rounded(left_out.log_density - self.units.log().sum()),
            "leverage": rounded(left_out.leverage),
            "selfInfluence": rounded(left_out.self_influence),
            "information": rounded(left_out.information),
        }


def _scale_and_mean(units: Units, posterior: Posterior) -> Tensor:
    """Units as numbers, (2, C); refuse others than positive scales and means of outputs with additive noise."""
    try:
        found = np.asarray(units, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.zeros(0)
    fits = found.shape == (2, posterior.num_outputs) and np.isfinite(found).all() and (found[0] > 0).all()
    likelihood = posterior.likelihood
    scaled = likelihood.scales_noise or (isinstance(likelihood, HeteroscedasticGaussian)
                                         and likelihood.parametrization == "log variance")
    if not fits or not (scaled or likelihood.additive_noise(posterior.f.detach()) is not None):
        raise DataError(f"a positive scale and a mean of each of {posterior.num_outputs} numbers, as units",
                        f"{units!r} under {type(likelihood).__name__}"[:80],
                        "Pass Naming(units=(scale, mean)), or leave units out.")
    return to_tensor(found)
