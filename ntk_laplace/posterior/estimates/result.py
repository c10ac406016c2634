"""Estimates of an evidence from weighted samples, with what says whether they are to be trusted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ntk_laplace.posterior.estimates.weights import (
    RELIABLE,
    effective_samples,
    log_mean,
    pareto_shape,
    standard_error,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_TOLD = 0.01  # share of diverged trajectories from which words tell them
_FEWEST = 10.0  # effective samples below which their own spread is not known


@dataclass(frozen=True)
class EvidenceEstimate:
    """An evidence estimated from weighted samples: log of their mean weight, nats ([L22] Eq. 12, 13).

    ``float(estimate)`` is its value.

    Attributes
    ----------
    value : float
        log (1/S) Σ w_s.
    standard_error : float
        Of `value`, by the delta method; where the density of the samples contains a log determinant that is itself an
        estimate, with its error.
    ess : float
        Effective sample size (Σ w)²/Σ w².
    khat : float
        Pareto shape k̂ of the largest weights. The mean of the weights has a finite variance below 0.5, and is of no
        use above 0.7. -inf where all weights are equal, NaN where there are too few to tell.
    trusted : bool
        Whether k̂ is at most 0.7 and the effective sample size at least 10, or all weights are equal.
    model : str
        "nn": the network; "glm": the linearized model.
    symmetry : float or None
        log 2^M M! of a perceptron: its posterior has as many equal modes. A sampler that knows one of them misses at
        most this many nats. It is never added to `value`. None if the network is of another kind.
    log_weights : Tensor, (S,)
        In double precision.
    """

    value: float
    standard_error: float
    ess: float
    khat: float
    trusted: bool
    model: str
    symmetry: float | None
    log_weights: Tensor = field(repr=False)

    def __float__(self) -> float:
        return self.value

    @property
    def samples(self) -> int:
        """S, the number of weights."""
        return len(self.log_weights)

    @property
    def words(self) -> str:
        """Whether to trust the value, and why."""
        if self.khat == -math.inf:
            return "all weights are equal: the value is exact up to rounding"
        effective = f"{self.ess:,.0f} effective of {self.samples:,} samples"
        if math.isnan(self.khat):
            few = f"{self.samples} weights are too few to see their tail"
            return f"{few}, {effective}" if self.trusted else f"not to be trusted: {few}"
        shape = f"Pareto k̂ = {self.khat:.2f}"
        if self.trusted:
            return f"{shape}, {effective}"
        why = f"above {RELIABLE}, so that the mean of the weights is not an estimate" if self.khat > RELIABLE else (
            "too few for a standard error")
        return f"not to be trusted: {shape}, {effective}; {why}"

    def __str__(self) -> str:
        what = {"nn": "of the network", "glm": "of the linearized model"}[self.model]
        several = self.symmetry and self.model == "nn"
        modes = f"; {self.symmetry:.3f} nats of symmetric modes (log of their number) are not added" if several else ""
        return f"evidence {what} {self.value:,.3f} ± {self.standard_error:.3g} nats ({self.words}{modes})"


def summary(log_weights: Tensor, other_error: float = 0.0, share: float = 1.0) -> dict[str, Any]:
    """The common fields of an estimate, from its log weights and an independent error of all of them.

    If more than `share` of few weights are effective, they are trusted at any k̂: it is then that of very few weights.
    """
    khat = pareto_shape(log_weights)
    log_weights = log_weights.double().cpu()
    effective = effective_samples(log_weights)
    equal = khat == -math.inf
    trusted = equal or (effective >= _FEWEST and (khat <= RELIABLE or effective > share * len(log_weights)))
    error = math.hypot(0.0 if equal else standard_error(log_weights), other_error)
    return {"value": log_mean(log_weights), "standard_error": error, "ess": effective, "khat": khat,
            "trusted": trusted, "log_weights": log_weights}


@dataclass(frozen=True)
class AnnealedEvidence(EvidenceEstimate):
    """An evidence by annealed importance sampling (Neal 2001), nats; one weight for each chain.

    k̂ of a few chains rests on a dozen weights. `trusted` therefore also holds where more than half of the chains are
    effective.

    Attributes
    ----------
    start : str
        "posterior" or "prior": where the chains start.
    temperatures : int
        Steps from there to the model.
    sampler : str
        "elliptical slice sampling of f" or "Hamiltonian Monte Carlo of the weights".
    acceptance : float or None
        Mean rate over temperatures and chains; None for slices, which reject nothing, and without a transition.
    lowest_acceptance : float or None
        Lowest mean over the chains at a temperature.
    diverged : float
        Share of the trajectories whose energy grew by 1,000 or without bound; they are rejected.
    stuck : int
        Chains that accepted fewer than a tenth of their trajectories.
    upper_log_weights : Tensor, (chains,), or None
        Of the chains from exact draws back to the start (Grosse, Ghahramani and Adams 2015), with ``bounds=True``.
    """

    start: str = "posterior"
    temperatures: int = 1
    sampler: str = ""
    acceptance: float | None = None
    lowest_acceptance: float | None = None
    diverged: float = 0.0
    stuck: int = 0
    upper_log_weights: Tensor | None = field(default=None, repr=False)

    @property
    def lower(self) -> float:
        """E log w, at most the evidence: its mean over the chains."""
        return float(self.log_weights.mean())

    @property
    def lower_error(self) -> float:
        """Standard error of `lower`; NaN for one chain."""
        return _error_of_mean(self.log_weights)

    @property
    def upper(self) -> float | None:
        """-E log w of the reverse, at least the evidence: its mean over the chains; None without ``bounds=True``."""
        return None if self.upper_log_weights is None else float(self.upper_log_weights.mean())

    @property
    def upper_error(self) -> float | None:
        """Standard error of `upper`; NaN for one chain."""
        return None if self.upper_log_weights is None else _error_of_mean(self.upper_log_weights)

    @property
    def words(self) -> str:
        found = [super().words]
        if self.stuck:
            found.append(f"{self.stuck} of {self.samples} chains were stuck")
        if self.diverged >= _TOLD:
            found.append(f"{self.diverged:.0%} of the trajectories diverged")
        if self.acceptance is not None:
            found.append(f"acceptance {self.acceptance:.2f}, at least {self.lowest_acceptance:.2f} at each temperature")
        if self.upper is not None:
            found.append(f"bounds {self.lower:,.3f} ± {self.lower_error:.2g} and {self.upper:,.3f} ± "
                         f"{self.upper_error:.2g}")
        return "; ".join(found)


@dataclass(frozen=True)
class ApproximationErrors:
    """What each approximation of an evidence costs: Laplace's, and the linearization of the network. All in nats.

    Attributes
    ----------
    laplace : float
        Evidence of the posterior's structure, with its correction unless that was left out.
    laplace_error : float
        Its standard error; 0 without sampling.
    linearized : AnnealedEvidence
        Of the linearized model.
    network : AnnealedEvidence
        Of the network.
    """

    laplace: float
    laplace_error: float
    linearized: AnnealedEvidence
    network: AnnealedEvidence

    @property
    def gaussian(self) -> tuple[float, float]:
        """What the Gaussian in place of the linearized model's posterior hides: linearized - laplace, and its error."""
        return self.linearized.value - self.laplace, math.hypot(self.linearized.standard_error, self.laplace_error)

    @property
    def linearization(self) -> tuple[float, float]:
        """What the linearization hides: network - linearized, and its standard error."""
        error = math.hypot(self.network.standard_error, self.linearized.standard_error)
        return self.network.value - self.linearized.value, error

    @property
    def trusted(self) -> bool:
        """Whether both sampled evidences are."""
        return self.linearized.trusted and self.network.trusted

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each evidence: its standard error, what the step to it adds, and whether it is trusted."""
        import pandas as pd

        (gauss, gauss_error), (line, line_error) = self.gaussian, self.linearization
        return pd.DataFrame({
            "evidence": ["Laplace", "linearized model", "network"],
            "value": [self.laplace, self.linearized.value, self.network.value],
            "standard_error": [self.laplace_error, self.linearized.standard_error, self.network.standard_error],
            "step": [math.nan, gauss, line],
            "step_error": [math.nan, gauss_error, line_error],
            "trusted": [True, self.linearized.trusted, self.network.trusted],
        })

    def plot(self) -> Figure:
        """Plot the three evidences with bars of two standard errors, and the steps between them."""
        from ntk_laplace.plotting import approximation_errors

        return approximation_errors(self)

    def __str__(self) -> str:
        (gauss, gauss_error), (line, line_error) = self.gaussian, self.linearization
        error = f" ± {self.laplace_error:.3g}" if self.laplace_error else ""
        return "\n".join([
            f"Laplace evidence {self.laplace:,.3f}{error} nats",
            f"  {round(gauss, 3) + 0.0:+,.3f} ± {gauss_error:.3g}: the Gaussian",
            str(self.linearized),
            f"  {round(line, 3) + 0.0:+,.3f} ± {line_error:.3g}: the linearization",
            str(self.network),
        ])


def _error_of_mean(values: Tensor) -> float:
    return float(values.std()) / len(values) ** 0.5 if len(values) > 1 else math.nan
