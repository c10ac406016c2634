"""Calibration of a predictive distribution: covariance scale, temperature and noise, fitted to left-out predictions."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import torch
from torch import Generator, Tensor

from ntk_laplace.errors import HyperparameterError, is_number
from ntk_laplace.model.likelihoods import Likelihood, Response
from ntk_laplace.model.predictive import Predictive


@dataclass(frozen=True)
class Calibration:
    """Numbers that turn moments of f into a calibrated response; all 1 is the posterior as it is.

    The response is that of f/T for f ~ N(m, c V), with the noise covariance multiplied by `noise`, and then, for
    classes, with averaged probabilities to the power 1/T_a. Scale 0 is the network alone.

    Attributes
    ----------
    scale : float
        c, at least 0, factor of the covariance of f.
    temperature : float
        T of each draw of f: class probabilities are E softmax(f/T).
    average_temperature : float
        T_a of the averaged class probabilities.
    noise : float
        Factor of the noise covariance, of `Gaussian` and `StudentT`.
    """

    scale: float = 1.0
    temperature: float = 1.0
    average_temperature: float = 1.0
    noise: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not is_number(value) or value < 0 or (value == 0 and name != "scale"):
                raise HyperparameterError(f"a finite {name} {'of at least' if name == 'scale' else 'above'} 0",
                                          f"{value!r}", "Leave it out for 1.")

    def moments(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """m/T and c V/T²."""
        return mean / self.temperature, covariance * (self.scale / self.temperature**2)

    def likelihood(self, likelihood: Likelihood) -> Likelihood:
        """The likelihood with this noise."""
        return likelihood if self.noise == 1.0 else likelihood.scaled_noise(self.noise)

    def response(self, response: Response) -> Response:
        """The response at the temperature of the average."""
        return response if self.average_temperature == 1.0 else response.tempered(self.average_temperature)

    def __str__(self) -> str:
        """The numbers that are not 1."""
        words = {"scale": "covariance times", "noise": "noise times"}  # factors, and no values of their own
        found = ((field.name, getattr(self, field.name)) for field in fields(self))
        told = [f"{words.get(name, name.replace('_', ' '))} {value:.3g}" for name, value in found if value != 1.0]
        return ", ".join(told) or "the posterior as it is"


class CalibratedPredictive:
    """`Predictive` of calibrated moments.

    Parameters
    ----------
    calibration : Calibration
    likelihood, method, samples, generator, scalar
        As in `predictive`, with the same errors.
    """

    def __init__(
        self, calibration: Calibration, likelihood: Likelihood, method: str = "glm", samples: int = 1000,
        generator: Generator | None = None, scalar: bool = False,
    ) -> None:
        self._calibration = calibration
        certain = calibration.scale == 0.0 and method != "blr"
        own = calibration.likelihood(likelihood)
        self._respond = Predictive(own, "map" if certain else method, samples, generator, scalar)

    def __call__(self, mean: Tensor, covariance: Tensor) -> Response:
        """Distribution of the response for f ~ N(mean (n, C), covariance (n, C, C)) before calibration."""
        with torch.no_grad():
            return self._calibration.response(self._respond(*self._calibration.moments(mean, covariance)))
