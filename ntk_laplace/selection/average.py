"""Conditional evidence of [L22] appendix B: fit to part of the data, set a scale on part, predict the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ntk_laplace.errors import HyperparameterError
from ntk_laplace.evidence import PosteriorPrecision, joint_gradient
from ntk_laplace.predictive import predictive
from ntk_laplace.structures import LinearizedModel, Structure

__all__ = ["average_score"]

_TUNED = 17  # one of 17 conditioned points is held out: 5 % of all data if 85 % are conditioned on
SCALES = torch.logspace(-3, 1, 17, dtype=torch.float64)


def average_score(
    model: LinearizedModel, structure: Structure, order: Tensor, m: int, scale: float | None, samples: int
) -> Tensor:
    """Σ log p(y_i | first m of the order) over the other points, each averaged over the posterior, nats.

    Parameters
    ----------
    model : LinearizedModel
    structure : Structure
        Fitted to all points.
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
    held = 0 if scale is not None else max(1, round(m / _TUNED))
    fitted, tuned, rest = (part.sort().values for part in order.split([m - held, held, len(order) - m]))
    fit = _Fit(model, structure, fitted)
    if scale is not None:
        return fit.score(rest, [scale], samples)[0]
    scores = fit.score(tuned, SCALES.tolist(), samples)
    return fit.score(rest, [float(SCALES[int(scores.argmax())])], samples)[0]


class _Fit:
    """The linearized network fitted to some of the points, with its mean refitted to them."""

    def __init__(self, model: LinearizedModel, structure: Structure, index: Tensor) -> None:
        self.model, self.structure = model, structure
        own, part = model.at(index), structure.subset(model.at(index), index)
        self.precision: PosteriorPrecision = part.posterior_precision(own)
        with torch.no_grad():
            residual = part.points.residual(own.likelihood)
        gradient = joint_gradient(part.vjp(own, residual), own.prior, own.theta)
        self.step = model.network.unflatten(self.precision.solve(gradient))  # θ* - θ̄

    def score(self, index: Tensor, scales: list[float], samples: int) -> Tensor:
        """Σ log density at unseen points, for each factor of the covariance."""
        total, seen = torch.zeros(len(scales), dtype=torch.float64), 0
        points = self.structure.points
        for rows in self.structure.rows_at(self.model, index):
            here = index[seen : seen + rows.num_examples].to(points.f.device)
            seen += rows.num_examples
            mean, covariance = self.model.outputs(rows) - rows.jvp(self.step), self.precision.covariance_blocks(rows)
            targets, counts = points.targets[here], points.counts[here]
            with torch.no_grad():
                likelihood = self.model.likelihood.at(here)
                for number, scale in enumerate(scales):
                    found = predictive(likelihood, mean, scale * covariance, "glm", samples)
                    total[number] += (counts * found.log_prob(targets)).sum().double().cpu()
        return total
