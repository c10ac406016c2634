"""The result of a predictive fit: the calibration, what it gains, and whether it can be trusted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ntk_laplace.model.calibration import Calibration
from ntk_laplace.posterior.explain import Reliability


@dataclass(frozen=True)
class PredictiveFit:
    """A fitted calibration, with mean log densities of left-out or held-out points, in nats per point.

    Attributes
    ----------
    calibration : Calibration
        Scale c of the covariance of f, temperature T of classes, factor of additive noise.
    objective : str
        "loo", "folds", or "held-out data".
    before : float
        Of the posterior as it is.
    after : float
        With the calibration; never below `network` if the scale is fitted.
    network : float
        Of the network alone: c = 0, T = 1.
    num_points : int
        Points in these means.
    at_bounds : tuple of str
        What ended at a bound of its search. An upper one (of the scale 20, or a thousandth of the examples of the fit,
        if that is more) is a symptom of a prior that is too weak, or of noise that is too small, and not to be trusted.
        A lower one is told: noise that vanishes, or a temperature without a scale where no left-out label is wrong.
    standard_error : float
        Of `after`: how far the mean of these points may be from that of more points; NaN for a single one.
    gain_error : float
        Of `gain`, from the differences point by point.
    reliability : Reliability or None
        Whether leave-one-out approximates retraining; None for others.
    """

    calibration: Calibration
    objective: str
    before: float
    after: float
    network: float
    num_points: int
    standard_error: float = math.nan
    gain_error: float = math.nan
    at_bounds: tuple[str, ...] = ()
    reliability: Reliability | None = None

    @property
    def scale(self) -> float:
        """c, the factor of the covariance of f; 0 is the network alone."""
        return self.calibration.scale

    @property
    def temperature(self) -> float:
        """T of each draw of f."""
        return self.calibration.temperature

    @property
    def noise(self) -> float:
        """Factor of the noise covariance."""
        return self.calibration.noise

    @property
    def gain(self) -> float:
        """`after` - `network`, nats per point."""
        return self.after - self.network

    @property
    def trusted(self) -> bool:
        """Whether nothing speaks against the numbers."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the numbers are not trusted, each reason a clause."""
        found = () if self.reliability is None else self.reliability.reasons
        if self.reliability is not None and self.reliability.moved and not self.reliability.additive:
            found = (*found, "hyperparameters have changed since the fit, and labels that the weights were trained on "
                     "look sure under a stronger prior")
        upper = tuple(name for name in self.at_bounds if getattr(self.calibration, name) > 1.0)
        words = " and ".join(name.replace("_", " ") for name in upper)
        lie = "lies" if len(upper) == 1 else "lie"
        bound = (f"the best {words} {lie} at the bound of the search",) if upper else ()
        return (*found, *bound)

    def shifted(self, nats: float) -> PredictiveFit:
        """The same of responses in other units, whose log densities are higher by so much."""
        before, after, network = self.before + nats, self.after + nats, self.network + nats
        reliability = None if self.reliability is None else self.reliability.shifted(nats)
        return replace(self, before=before, after=after, network=network, reliability=reliability)

    def __str__(self) -> str:
        doubt = "" if self.trusted else f"; not to be trusted: {'; '.join(self.reasons)}"
        what = "held-out" if self.objective == "held-out data" else "left-out training"
        bounds = f" ({' and '.join(self.at_bounds).replace('_', ' ')} at a bound)" if self.at_bounds else ""
        return (
            f"{self.calibration}{bounds}: mean log density of {self.num_points} {what} points {self.after:.4f} ± "
            f"{self.standard_error:.2g} nats (posterior as it is {self.before:.4f}, network alone {self.network:.4f}, "
            f"gain over it {self.gain:.2g} ± {self.gain_error:.2g}){doubt}"
        )
