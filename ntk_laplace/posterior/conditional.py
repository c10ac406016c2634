"""Conditional evidence of [L22] appendix B: fit to part of the data, calibrate on part, predict the rest."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from ntk_laplace.curvature.posterior_precision import checked_form
from ntk_laplace.errors import DataError, HyperparameterError, is_number, require_choice
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.calibration import CalibratedPredictive, Calibration
from ntk_laplace.posterior.calibrate import LeftOut, densities, fit_calibration
from ntk_laplace.runtime.sampling import draw_sizes
from ntk_laplace.structures import FittedModel

_TUNED = 17  # one of 17 conditioned points is held out: 5 % of all data if 85 % are conditioned on
SCALES = torch.logspace(-3, 1, 17, dtype=torch.float64, device="cpu")
TEMPERATURES = {"draws": "temperature", "average": "average_temperature"}
"""Which number of a calibration a temperature is."""


def rest_given(
    fitted: FittedModel, order: Tensor, m: int, scale: float | None, temperature: str | None, samples: int
) -> tuple[LinearRefit, Tensor, Calibration]:
    """The linearized network given the first m points of the order (N,), the other points, and its calibration.

    If no scale is given, it is the one of `SCALES` that best predicts a held-out seventeenth of the first m points; a
    temperature, by its name in `TEMPERATURES`, is fitted to these too. The samples are points of f, if the predictive
    has no closed form. The other points, (N - m,), are ascending.

    HyperparameterError if the scale is negative or not finite; UnsupportedError if the temperature is unknown, or the
    likelihood has none.
    """
    if scale is not None and not (is_number(scale) and scale >= 0):
        raise HyperparameterError("a scale of the covariance, finite and at least 0", f"{scale!r}",
                                  "Leave it out, to have it chosen by held-out points.")
    require_choice(temperature, (None, *TEMPERATURES), 'temperature "draws" or "average", or None')
    tuned = scale is None or temperature is not None
    first, rest = order[:m], order[m:].sort().values
    informs = fitted.points.observed_counts(fitted.likelihood).to(order.device)[first] > 0
    held_out, count = torch.zeros_like(informs), int(informs.sum())
    if tuned and count < 2:
        raise DataError(f"two points with targets among the first {m}, to choose the scale by one", f"{count}",
                        "Give scale=1.0, or take more points first.")
    held_out[informs.nonzero().squeeze(1)[-max(1, round(count / _TUNED)) :]] = tuned
    given, seen = (first[some].sort().values for some in (~held_out, held_out))
    fit = LinearRefit(fitted, given)
    if temperature is not None:
        calibration = fit.calibrated(seen, scale, TEMPERATURES[temperature])
    elif scale is None:
        found = fit.scores(seen, [Calibration(scale=one) for one in SCALES.tolist()], samples)
        calibration = Calibration(scale=float(SCALES[int(found.argmax())]))
    else:
        calibration = Calibration(scale=float(scale))
    return fit, rest, calibration


class LinearRefit:
    """The linearized network fitted to some of the points, with its mean refitted to them."""

    def __init__(self, whole: FittedModel, index: Tensor) -> None:
        self.whole, part = whole, whole.subset(index)
        self.precision = part.precision
        self.step = part.network.unflatten(part.newton_step())  # θ* - θ̄

    def scores(self, index: Tensor, calibrations: list[Calibration], samples: int) -> Tensor:
        """Σ log density at unseen points, as often as the evidence counts each, for each calibration."""
        total, points = torch.zeros(len(calibrations), dtype=torch.float64, device="cpu"), self.whole.points
        for here, rows, mean in self._rows(index):
            covariance = self.precision.covariance_blocks(rows)
            targets, counts = points.targets[here], self.whole.likelihood.weight * points.counts[here]
            with torch.no_grad():
                likelihood = self.whole.likelihood.at(here).counted_once()
                for number, calibration in enumerate(calibrations):
                    found = CalibratedPredictive(calibration, likelihood, samples=samples)(mean, covariance)
                    total[number] += (counts * found.log_prob(targets)).sum().double().cpu()
        return torch.stack(self.whole.row_reducer.gather(total)).sum(0)

    def calibrated(self, index: Tensor, scale: float | None, temperature: str) -> Calibration:
        """The temperature that best predicts unseen points, and the scale unless it is given."""
        points, likelihood = self.whole.points.subset(index), self.whole.likelihood.at(index).counted_once()
        parts = [(mean, self.precision.covariance_blocks(rows)) for _, rows, mean in self._rows(index)]
        mean, covariance = (self.whole.collected(index, [part[number] for part in parts]) for number in range(2))
        found = densities(likelihood, LeftOut.of(points, likelihood, mean, covariance))
        if scale is None:
            return fit_calibration(found, ["scale", temperature])[0]
        return fit_calibration(found, [temperature], {"scale": float(scale)})[0]

    def log_likelihood(self, index: Tensor, draws: int, calibration: Calibration, seed: int) -> Tensor:
        """log p(y_i given f_i/T) of unseen points for draws of the weights, (draws, n), times the example weights."""
        like, points = self.whole.theta, self.whole.points
        generator, shapes = Generator(like.device).manual_seed(seed), self.whole.network.shapes
        found = []
        for count in draw_sizes(draws, len(like), like):
            moves = self.precision.sample(count, generator)
            moves = checked_form(self.precision, "sample", moves, (count, len(like)), like)
            parts = []
            for here, rows, mean in self._rows(index):
                away = rows.products(shapes.parts(moves)).permute(2, 1, 0)  # (S, n, C)
                f = (mean + calibration.scale**0.5 * away) / calibration.temperature
                repeated = here.repeat(count)
                with torch.no_grad():
                    values = self.whole.likelihood.at(repeated).log_prob(f.flatten(0, 1), points.targets[repeated])
                parts.append((points.counts[here] * values.view(count, -1)).T)
            found.append(self.whole.collected(index, parts).T)
        return torch.cat(found)

    def _rows(self, index: Tensor) -> Iterator[tuple[Tensor, Jacobian, Tensor]]:
        """Points, their rows of J, and the mean of f there."""
        device = self.whole.points.f.device
        for here, rows in self.whole.own_rows(index):
            yield index[here].to(device), rows, self.whole.model.outputs(rows) - rows.jvp(self.step)
