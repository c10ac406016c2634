"""Diagnostics of leave-one-out's assumptions: weights at an optimum, and a prior that determines them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ntk_laplace.errors import NTKLaplaceError
from ntk_laplace.model.network import linear_at
from ntk_laplace.runtime.random_state import preserved_rng
from ntk_laplace.structures import FittedModel, LinearizedModel
from ntk_laplace.structures.evidence import evidence
from ntk_laplace.structures.points import present_values
from ntk_laplace.structures.what_if import HIGH_LEVERAGE

# measured against retraining: examples/selection/leave_one_out.py
MOST_DECREMENT = 0.02  # nats per point
MOST_FROM_OPTIMUM = 0.1  # nats per point, where points are left out of the linearized model at its optimum
LEAST_RATIO = 0.03  # of δ‖θ-μ0‖² to γ
MOST_FLAGGED = 0.5  # of the points
MOST_LEFT = 0.1  # of a Newton step
MOST_SPREAD = 1e3  # of precisions that the network was not optimized with
MOST_SHARE = 0.65  # of γ to N, Gaussian: examples/predictions/guards.py
LEAST_GAIN = -0.1  # nats per point, of the evidence over one prediction for all: examples/predictions/guards.py
LEAST_CLAIM = 0.05  # nats per point, of leave-one-out over one prediction for all
LEARNED_SHARE = 0.2  # of γ to N, without which no targets can have been learned by heart
FEWEST_POINTS = 50  # with fewer, evidences this close are no contradiction: 5 nats in all

_TRAIN = "train on at these hyperparameters, for instance with train_with_evidence"
_OFTEN = "train anew and compute the evidence more often, with a smaller EvidenceSchedule(frequency=)"
_FIT = 'fit with structure="gp", "full" or "iterative" and curvature="ggn", or leave out some points with points='


@dataclass(frozen=True)
class Reliability:
    """Whether leave-one-out numbers approximate retraining without each point.

    Attributes
    ----------
    decrement : float
        ½ gᵀH⁻¹g/N, nats per point: the gain of one more Newton step, with g the gradient of the negative log joint and
        N the sum of the example weights, times w under `Tempered`; points without any target are not counted.
        Zero at the optimum. Leave-one-out keeps g fixed, so part of the effect of a point's label remains.
    prior_ratio : float
        ρ = Σ_g δ_g‖θ_g-μ0‖²/Σ_g γ_g, 1 at MacKay's fixed point. Far below 1 the prior hardly determines the weights,
        and one Newton step without a point overshoots.
    high_leverage : float
        Fraction of the points that count with a leverage above 0.9.
    largest_leverage : float
        Below 1 for an exact curvature.
    precision_spread : float
        Ratio of the largest to the smallest group precision.
    moved : bool
        Whether hyperparameters have changed since the posterior was fitted.
    exact : bool
        Whether the curvature is exact for the linearized model.
    effective_share : float
        γ/NC, effective parameters per training output that is observed, N as above.
    additive : bool
        Whether the likelihood is Gaussian noise.
    refitted : bool
        Whether the weights are a refit of the linearized model.
    unfinished : float, optional
        If the structure was fitted without the points, so that none is subtracted from an approximation: the share of
        the Newton steps without them that their last passes over the data still added.
    learned_share : float
        γ over the number of labels or responses, effective parameters for each.
    noise_share : float, optional
        Of normal noise: its average variance over the variance of the responses, the largest of them.
    without_inputs : float, optional
        Of classes and normal noise: mean log likelihood of the same prediction for all inputs, nats per point.
    gain : float, optional
        Log evidence, without correction, per point, less `without_inputs`, of an exact curvature that is a matrix and
        at least 50 points.
    density : float, optional
        Mean log density of the points by leave-one-out, nats.
    linear : bool
        Whether the network is linear in its weights, the noise Gaussian and the curvature exact: one Newton step from
        the optimum is then exact under every prior. Looked at only where the prior is vague or `gain` negative.
    at_optimum : bool
        Whether points were left out of the linearized model at its own optimum, and not at the weights, as
        `fit_predictive` does for normal noise where these are at no optimum.
    """

    decrement: float
    prior_ratio: float
    high_leverage: float
    largest_leverage: float
    precision_spread: float
    moved: bool
    exact: bool
    effective_share: float
    additive: bool
    refitted: bool
    unfinished: float | None = None
    learned_share: float = 0.0
    noise_share: float | None = None
    without_inputs: float | None = None
    gain: float | None = None
    density: float | None = None
    linear: bool = False
    at_optimum: bool = False

    def shifted(self, nats: float) -> Reliability:
        """The same of responses in other units, whose log densities are higher by so much."""
        alone, density = (None if one is None else one + nats for one in (self.without_inputs, self.density))
        return replace(self, without_inputs=alone, density=density)

    @property
    def trusted(self) -> bool:
        """Whether all diagnostics pass."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the numbers are not trusted, each reason a clause in plain words."""
        found = []
        if self._subtracted:
            above = f", with leverages up to {self.largest_leverage:.3g}" if self.largest_leverage > 1.0 else ""
            found.append(f"points are subtracted from an approximate curvature{above}, which ranks them and is no "
                         "score")
        if self.unfinished is not None and self.unfinished > MOST_LEFT:
            found.append(
                f"the means without the points were still moving, with {self.unfinished:.2g} of a Newton step in the "
                f"last passes over the data (at most {MOST_LEFT:g})"
            )
        if self.at_optimum and not self.decrement <= MOST_FROM_OPTIMUM:
            found.append(
                "the weights are far from the optimum of the linearized model, of which points were left out: the "
                f"Newton decrement is {self.decrement:.2g} nats a point (at most {MOST_FROM_OPTIMUM:g}), and its "
                "errors may not be the network's"
            )
        elif not self.at_optimum and not self.decrement <= MOST_DECREMENT:
            since = ", as hyperparameters have changed since the fit" if self.moved else ""
            found.append(
                f"the weights are not at the optimum of this model{since}: the Newton decrement is "
                f"{self.decrement:.2g} nats a point (at most {MOST_DECREMENT:g}), and each point keeps part of what "
                "its own label did"
            )
        if self.prior_ratio < LEAST_RATIO and not self.linear:
            found.append(
                f"the prior is vague, with δ‖θ-μ0‖²/γ of {self.prior_ratio:.2g} (at least {LEAST_RATIO:g}): one Newton "
                "step without a point goes too far"
            )
        if self.high_leverage > MOST_FLAGGED:
            found.append(
                f"{self.high_leverage:.0%} of the points have a leverage above {HIGH_LEVERAGE:g}: one Newton step "
                "without such a point goes too far"
            )
        if self.moved and self.precision_spread > MOST_SPREAD:
            found.append(
                f"the precisions differ by a factor of {self.precision_spread:.2g} and training did not use them: "
                "layers that hardly count in them have seen all labels"
            )
        if self.additive and self.exact and self.effective_share > MOST_SHARE:
            found.append(
                f"the model has {self.effective_share:.2g} effective parameters for each training output (at most "
                f"{MOST_SHARE:g}): little is left to judge it by"
            )
        if self.gain is not None and self.learned_targets:
            found.append(
                f"the points are {self._claim:.2g} nats likelier than under one prediction for all inputs, and by the "
                f"evidence {-self.gain:.2g} less likely: the network has learned its targets rather than what "
                "predicts them, and each point keeps what its own did"
            )
        if self.refitted and not self.additive:
            found.append("the linearized model was refitted, with features that have seen all labels")
        return tuple(found)

    @property
    def learned_targets(self) -> bool:
        """Whether the evidence is clearly below that of one prediction for all inputs, and leave-one-out above it.

        By 0.1 and 0.05 nats a point, with at least 0.2 effective parameters for each label or response, and less noise
        than responses vary.
        """
        if not self.below_one_prediction or self.learned_share < LEARNED_SHARE or (self.noise_share or 0.0) >= 1.0:
            return False
        return self.gain is not None and self.gain < LEAST_GAIN and self._claim > LEAST_CLAIM

    @property
    def below_one_prediction(self) -> bool:
        """Whether the evidence is below the likelihood of one prediction for all inputs: a poor optimum, or noise."""
        return not self.linear and self.gain is not None and self.gain < 0.0

    @property
    def _claim(self) -> float:
        return math.nan if self.density is None or self.without_inputs is None else self.density - self.without_inputs

    @property
    def _subtracted(self) -> bool:
        return not self.exact and self.unfinished is None

    def __str__(self) -> str:
        """One sentence of reasons; empty if all diagnostics pass."""
        others = len(self.reasons) - self._subtracted - self.learned_targets
        wanted = {_FIT: self._subtracted, _TRAIN: others > 0, _OFTEN: self.learned_targets}
        remedies = [remedy for remedy, needed in wanted.items() if needed]
        todo = "; ".join([*remedies, "or score the model on other data"])
        return "" if self.trusted else f"leave-one-out is not to be trusted here: {'; '.join(self.reasons)}; {todo}"


def reliability(
    fitted: FittedModel, index: Tensor, leverage: Tensor, unfinished: float | None = None
) -> Reliability:
    """Compute the diagnostics; `leverage` (m,) is that of the points `index`, `unfinished` is as in `Reliability`."""
    points, likelihood = fitted.points, fitted.likelihood
    counting = int((points.observed_counts(likelihood)[index] > 0).sum())
    prior, precision = fitted.prior, fitted.precision
    with torch.inference_mode(False), torch.no_grad():
        by_group = prior.precision.flatten().double()
        energy = float((by_group * prior.group_distances(fitted.theta).double()).sum())
        used = max(float(precision.information_gained()), torch.finfo(torch.float64).tiny)
    ratio, additive = energy / used, likelihood.additive_noise(points.f) is not None
    targets = fitted.total * (points.num_outputs if additive else 1)
    alone, noise = _without_inputs(fitted) if fitted.total >= FEWEST_POINTS else (None, None)
    gain = None if alone is None else _gain(fitted, alone)
    doubted = ratio < LEAST_RATIO or (gain is not None and gain < 0.0)
    return Reliability(decrement=newton_decrement(fitted), prior_ratio=ratio,
                       high_leverage=float((leverage > HIGH_LEVERAGE).sum()) / max(1, counting),
                       largest_leverage=float(leverage.max()), precision_spread=float(by_group.max() / by_group.min()),
                       moved=_moved(fitted.model), exact=fitted.exact, unfinished=unfinished,
                       effective_share=used / (likelihood.weight * points.observed_outputs(likelihood)),
                       additive=additive, refitted=fitted.model.refitted, learned_share=used / targets,
                       noise_share=noise, without_inputs=alone, gain=gain,
                       linear=doubted and additive and fitted.exact and _linear(fitted))


def _gain(fitted: FittedModel, alone: float) -> float:
    """As `Reliability.gain`."""
    with torch.inference_mode(False), torch.no_grad():
        return float(evidence(fitted).value) / fitted.total - alone


def _without_inputs(fitted: FittedModel) -> tuple[float | None, float | None]:
    """As `Reliability.without_inputs`: by the frequencies of classes, or mean and variance of each response.

    And `noise_share`. None for other likelihoods, and where the evidence is no number to rely on.
    """
    if not fitted.exact or fitted.precision.reads_data:
        return None, None
    points, likelihood = fitted.points, fitted.likelihood
    counts, y = points.observed_counts(likelihood).double(), points.targets
    noise = likelihood.additive_noise(points.f)
    if noise is None:
        labels = likelihood.classifies and y.ndim == 1 and not y.is_floating_point()
        if not labels:
            return None, None
        each = torch.bincount(y.clamp_min(0).cpu(), counts.cpu())  # CUDA's is not deterministic
        return -float(torch.special.entr(each / each.sum()).sum()), None
    y = y.double()
    if bool(y[counts > 0].isnan().any()):
        return None, None
    shares = (counts / counts.sum()).unsqueeze(1)
    y = y.nan_to_num()
    variance = (shares * (y - (shares * y).sum(0)).square()).sum(0)
    if not bool((variance > 0).all()):
        return None, None
    average = (shares * noise.detach().diagonal(dim1=1, dim2=2)).sum(0)
    return -0.5 * float((1.0 + (2.0 * math.pi * variance).log()).sum()), float((average / variance).max())


def newton_decrement(fitted: FittedModel) -> float:
    """½ gᵀH⁻¹g/N, nats per point, with g the gradient of the negative log joint."""
    with torch.inference_mode(False), torch.no_grad():
        gradient = fitted.joint_gradient()
        decrement = 0.5 * float(gradient @ fitted.precision.solve(gradient))
    return decrement / fitted.total


def _linear(fitted: FittedModel) -> bool:
    """Whether the network is linear in its weights, as far as the first batch of the data shows; False without data.

    All processes say what the first one finds.
    """
    source, network = fitted.structure.source, fitted.network
    if source is None:
        return False
    try:
        with preserved_rng(network.device):
            x, _ = next(iter(source))
        found = linear_at(network, x)
    except (NTKLaplaceError, StopIteration):
        found = False
    return fitted.settings.reducer.gather(found)[0]


def _moved(model: LinearizedModel) -> bool:
    """Whether a precision, noise or temperature has changed since the fit; the model of a subset has fewer noises."""
    if model.fitted_at is None:
        return False
    now = present_values(model.prior, model.likelihood)
    pairs = zip(model.fitted_at, now, strict=False)
    return any(one.shape == other.shape and not torch.equal(one.to(other), other) for one, other in pairs)
