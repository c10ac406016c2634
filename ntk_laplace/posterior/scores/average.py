"""Conditional evidence of [L22] appendix B: fit to part of the data, set a scale on part, predict the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ntk_laplace.errors import HyperparameterError
from ntk_laplace.model.predictive import predictive
from ntk_laplace.structures import FittedModel

__all__ = ["average_score"]

_TUNED = 17  # one of 17 conditioned points is held out: 5 % of all data if 85 % are conditioned on
SCALES = torch.logspace(-3, 1, 17, dtype=torch.float64)


def average_score(fitted: FittedModel, order: Tensor, m: int, scale: float | None, samples: int) -> Tensor:
    """Σ log p(y_i | first m of the order) over the other points, each averaged over the posterior, nats.

    Parameters
    ----------
    fitted : FittedModel
        To all points.
    order : Tensor, (N,)
    m : int
    scale : float, optional
        Factor of the latent covariance. None: the one of `SCALES` that best predicts a held-out seventeenth of the
        first m points.
    samples : int
        Number of points of f, if the predictive has no closed form.

    Raises
    ------
    HyperparameterError
        If the scale is negative or not finite.
    """
    if scale is not None and not (isinstance(scale, (int, float)) and 0 <= scale < math.inf):
        raise HyperparameterError("a scale of the covariance, finite and at least 0", f"{scale!r}",
                                  "Leave it out, to have it chosen by held-out points.")  # fmt: skip
    held_out = 0 if scale is not None else max(1, round(m / _TUNED))
    given, tuned, rest = (part.sort().values for part in order.split([m - held_out, held_out, len(order) - m]))
    fit = _Fit(fitted, given)
    if scale is not None:
        return fit.score(rest, [scale], samples)[0]
    scores = fit.score(tuned, SCALES.tolist(), samples)
    return fit.score(rest, [float(SCALES[int(scores.argmax())])], samples)[0]


class _Fit:
    """The linearized network fitted to some of the points, with its mean refitted to them."""

    def __init__(self, whole: FittedModel, index: Tensor) -> None:
        self.whole, part = whole, whole.subset(index)
        self.precision = part.precision
        self.step = part.network.unflatten(self.precision.solve(part.joint_gradient()))  # θ* - θ̄

    def score(self, index: Tensor, scales: list[float], samples: int) -> Tensor:
        """Σ log density at unseen points, for each factor of the covariance."""
        total, seen = torch.zeros(len(scales), dtype=torch.float64), 0
        points, model = self.whole.points, self.whole.model
        for rows in self.whole.rows_at(index):
            here = index[seen : seen + rows.num_examples].to(points.f.device)
            seen += rows.num_examples
            mean, covariance = model.outputs(rows) - rows.jvp(self.step), self.precision.covariance_blocks(rows)
            targets, counts = points.targets[here], points.counts[here]
            with torch.no_grad():
                likelihood = model.likelihood.at(here)
                for number, scale in enumerate(scales):
                    found = predictive(likelihood, mean, scale * covariance, "glm", samples)
                    total[number] += (counts * found.log_prob(targets)).sum().double().cpu()
        return total
