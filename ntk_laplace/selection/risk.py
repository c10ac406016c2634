"""A bound of the expected loss of a random network, drawn from a posterior, on new data (PAC-Bayes)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from ntk_laplace.errors import (
    DataError,
    HyperparameterError,
    UnsupportedError,
    is_number,
    require_choice,
    require_number,
    require_whole,
)
from ntk_laplace.model.data import Inputs, num_examples
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.network import ManyWeights, outside_autocast
from ntk_laplace.posterior import Posterior
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.sampling import draw_sizes, require_generator
from ntk_laplace.selection import pac_bayes
from ntk_laplace.selection.losses import BoundedLoss, CustomLoss, bounded_loss
from ntk_laplace.selection.validity import require_valid
from ntk_laplace.structures import merged_batches

_KINDS = ("seeger", "mcallester", "catoni", "germain")
_BETAS = tuple(2.0**power for power in range(-3, 5))  # values of β in Catoni's bound, fixed before any data


@dataclass(frozen=True, repr=False)
class RiskBound:
    """A bound of the expected loss of a random network on new data of the same distribution.

    Attributes
    ----------
    value : float
        With probability 1 - δ, the expected loss is at most this, in units of the loss.
    risk : float
        Mean loss on the data, over the draws of the network: the empirical Gibbs risk.
    sampled_risk : float
        What the mean over all networks of the posterior is at most, given that of the draws.
    kl : float
        Divergence of the posterior from the prior, or from the prior posterior, nats.
    n : int
        Points of the data.
    draws : int
        Weight samples K.
    delta : float
        δ, the probability that the statement is wrong: for the data, the draws and all `models` together.
    models : int
        Number of models that the statement holds for at once.
    kind : str
        Which bound.
    loss : str
        Which loss.
    low, high : float
        Bounds of the loss.
    chance : float, optional
        Loss of a guess with equal probabilities, for classes.
    prior_points : int
        Points that the prior posterior has seen; 0 for a prior that was fixed before all data.
    repeated : int
        Points of the data that equal one of these.
    """

    value: float
    risk: float
    sampled_risk: float
    kl: float
    n: int
    draws: int
    delta: float
    models: int
    kind: str
    loss: str
    low: float
    high: float
    chance: float | None = None
    prior_points: int = 0
    repeated: int = 0

    @property
    def vacuous(self) -> bool:
        """Whether it says nothing: it is the largest value of the loss, or not below a guess."""
        least = self.high if self.chance is None else min(self.chance, self.high)
        return self.value >= least - 1e-6 * (self.high - self.low)

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        return (f"RiskBound({self.value:.4f}, loss={self.loss!r}, kind={self.kind!r}, risk={self.risk:.4f}, "
                f"kl={self.kl:.1f}, n={self.n:,}, delta={self.delta:g}{', vacuous' * self.vacuous})")

    def __str__(self) -> str:
        what = "error" if self.loss == "zero-one" else f"{self.loss} loss"
        says = [f"the expected {what} of a random network of this posterior on new data is at most {self.value:.3f}, "
                f"with probability {1 - self.delta:.4g}"]
        if self.models > 1:
            says[0] += f", for each of {self.models:,} models"
        if self.vacuous:
            least = "a guess has" if self.chance is not None and self.value < self.high else "the loss can have"
            says.append(f"this is vacuous: it is no less than {least}")
        given = f"prior given {self.prior_points:,} other points" if self.prior_points else "fixed prior"
        says.append(f"{what} on {self.n:,} points {self.risk:.3f}, from {self.draws:,} draws; divergence "
                    f"{self.kl:.1f} nats from the {given}; {self.kind}")
        if self.repeated:
            says.append(f"{self.repeated:,} of the points equal one of the prior's")
        return "; ".join(says)


def risk_bound(
    posterior: Posterior, data: Any, prior_posterior: Posterior | None = None, loss: str | CustomLoss = "zero-one",
    kind: str = "seeger", *, delta: float = 0.05, draws: int = 2000, models: int = 1, model: str = "nn",
    p_min: float = 0.01, bounds: tuple[float, float] | None = None, beta: float | Sequence[float] | None = None,
    generator: Generator | None = None,
) -> RiskBound:
    """Bound the expected loss on new data of a random network that is drawn from a posterior (PAC-Bayes).

    For a prior fixed before the n points of `data` were seen, the bound holds for any posterior with probability 1 - δ.
    It is about one random network (the Gibbs classifier), not about the average prediction. Half of δ pays for the
    data, and half for K draws of weights, by which the mean loss R on the data is at most kl⁻¹(R̂, log(4k/δ)/K) for k
    models. With R scaled to [0, 1] and δ' = δ/2k:

    * "seeger": kl⁻¹(R, (KL + log(2√n/δ'))/n), always below "mcallester" (Maurer 2004).
    * "mcallester": R + √((KL + log(n/δ') + 2)/(2n - 1)) ([L22] Eq. 15).
    * "catoni": (1 - exp(-βR - (KL + log 1/δ')/n))/(1 - exp(-β)).
    * "germain": [L22] Eq. 17 and 18 with log Z replaced by its lower bound -nR - KL: Catoni's at β = b - a for a loss
      in [a, b]. It does not tend to the risk.

    Parameters
    ----------
    posterior : Posterior
        Any Gaussian over the weights, in any structure with an exact divergence: it may depend on all data. A
        `Calibration` does not enter.
    data : DataLoader, Dataset, (X, y), or a mapping
        n independent points. For a prior that is fixed, the training data; with `prior_posterior`, those training
        points that it has not seen.
    prior_posterior : Posterior, optional
        Posterior of the same parameters from *other* points: of a network that was trained on them alone. It takes the
        place of the prior.
    loss : str or callable
        "zero-one": whether the most probable class is wrong; for several labels, or positions, the share that is wrong.
        "log": -log p(y given f), clipped at ``-log p_min``, for targets with probabilities. "brier": squared distance
        of the probabilities from the label, 0 to 2. Or a function of outputs f (n, C) and canonical targets with
        values (n,) within `bounds`.
    kind : str
        "seeger", "mcallester", "catoni" or "germain".
    delta : float
        δ, in all.
    draws : int
        K.
    models : int
        k, the number of models, priors or hyperparameters among which you choose by the data: δ/k for each, which adds
        log k to KL. A search over real numbers has no k.
    model : str
        "nn": the network at each draw. "glm": the network linearized where `prior_posterior` is, f + J(θ - θ'), which
        is then a class of models that was fixed before `data`.
    p_min : float
        Of the log loss; fixed before the data.
    bounds : (float, float), optional
        Least and largest value of a loss that is a function.
    beta : float or sequence of floats, optional
        Of "catoni", fixed before the data: one, or several, among which the best is taken for δ/(their number). By
        default eight powers of 2.
    generator : torch.Generator, optional
        Of the draws, on the device of the network; by default they are always the same.

    Returns
    -------
    RiskBound
        ``float(bound)`` is its value, ``print(bound)`` says what it means.

    Raises
    ------
    UnsupportedError
        If the number would be no bound: the loss has no bounds; precisions or temperatures were optimized; the prior's
        mean is at the trained weights; a part of the network outside the posterior was trained; the linearization saw
        the data; the posteriors were changed by a what-if; the divergence is an estimate. Or an option is unknown, or
        several processes share the fit.
    DataError
        If `data` contain points of `prior_posterior`, weights or missing targets, or `prior_posterior` is one of other
        parameters, or at weights that were trained on `data`.
    HyperparameterError
        If a number is out of range.

    Examples
    --------
    >>> import torch, ntk_laplace as ntkl
    >>> network = torch.nn.Linear(2, 1).double()
    >>> x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)).double()
    >>> data = x, (x[:, :1] > 0).double()
    >>> posterior = ntkl.laplace(network, data, ntkl.Bernoulli(), ntkl.GaussianPrior(1.0), structure="full")
    >>> bound = ntkl.risk_bound(posterior, data, draws=200)
    >>> bound.risk < bound.sampled_risk < bound.value
    True
    """
    own = posterior if prior_posterior is None else prior_posterior
    for what, given in (("posterior", posterior), ("prior_posterior", own)):
        if not isinstance(given, Posterior):
            raise UnsupportedError(f"a Posterior as {what}", f"a {type(given).__name__}", "Fit it with laplace(...).")
    for what, option, known in (("kind", kind, _KINDS), ("model", model, ("nn", "glm"))):
        require_choice(option, known, f"{what} among {', '.join(map(repr, known))}")
    require_generator(generator)
    delta = require_number("a probability delta between 0 and 1", delta, "Leave it out for 0.05.", above=0, below=1)
    draws = require_whole("draws", draws, 1, "Leave it out for 2,000.")
    models = require_whole("models", models, 1, "Pass how many models you choose among.")
    betas = _betas(beta, kind)
    with torch.inference_mode(False), torch.no_grad(), outside_autocast():
        likelihood = own.likelihood.for_new_points()
        parts, targets = _points(posterior, data, likelihood)
        bounded = bounded_loss(loss, bounds, p_min, likelihood, posterior.num_outputs, targets)
        if kind == "germain" and bounded.name != "log":
            raise UnsupportedError('loss="log" for kind="germain", which bounds -log p(y given θ)',
                                   f"loss={bounded.name!r}", 'Use kind="catoni", or "seeger".')
        kl, repeated = require_valid(posterior, prior_posterior, parts, targets, model, bounded.by_probability)
        risk = _gibbs_risk(posterior, parts, targets, bounded, model, draws, generator)
    n, span = len(targets), bounded.high - bounded.low
    scaled = (risk - bounded.low) / span
    share = delta / (2 * models)  # half for the draws of weights, half for the data
    sampled = pac_bayes.inverse_divergence(scaled, math.log(2.0 / share) / draws)
    if kind == "germain":
        betas = (span,)
    if kind in ("catoni", "germain"):
        value = min(pac_bayes.catoni(sampled, kl, n, share / len(betas), one) for one in betas)
    else:
        value = getattr(pac_bayes, kind)(sampled, kl, n, share)
    return RiskBound(value=bounded.low + span * min(value, 1.0), risk=risk, sampled_risk=bounded.low + span * sampled,
                     kl=kl, n=n, draws=draws, delta=delta, models=models, kind=kind, loss=bounded.name, low=bounded.low,
                     high=bounded.high, chance=bounded.chance,
                     prior_points=0 if prior_posterior is None else prior_posterior.num_examples, repeated=repeated)


def _points(posterior: Posterior, data: Any, likelihood: Likelihood) -> tuple[list[Inputs], Tensor]:
    """The points of the risk, read once: inputs in batches, and canonical targets, none of them missing."""
    batches = posterior.network.batches(data, posterior.fitted.settings.batch_size)
    parts = list(merged_batches(batches, posterior.network))
    if batches.weights is not None:
        raise DataError("independent points that count once, for a bound of the risk", "points with weights",
                        "Pass (X, y) without weights.")
    y = torch.cat([y for _, y in parts])
    targets = likelihood.targets(y, len(y), posterior.num_outputs)
    if likelihood.observed(targets) is not None:
        raise DataError("points that all have a target", "missing targets",
                        "Leave these points out: a bound of the risk needs an independent sample.")
    return [x for x, _ in parts], targets


def _gibbs_risk(
    posterior: Posterior, parts: list[Inputs], targets: Tensor, loss: BoundedLoss, model: str, draws: int,
    generator: Generator | None,
) -> float:
    """Mean loss over independent draws of the weights and all points."""
    theta = posterior.fitted.theta
    if generator is None:
        generator = Generator(theta.device).manual_seed(0)
    outputs, budget = _linearized if model == "glm" else _networks, posterior.fitted.settings.memory_budget
    most = draws if budget is None else max(1, int(budget) // (2 * theta.nbytes))
    total = 0.0
    for size in draw_sizes(draws, len(theta), theta, most):
        thetas, seen = posterior.sample(size, generator=generator), 0
        for x in parts:
            y = targets[seen : seen + num_examples(x)]
            for f, part in outputs(posterior, thetas, x):
                total += float(loss.of(f, y[part]).sum())
            seen += len(y)
    return total / (draws * len(targets))


def _networks(posterior: Posterior, thetas: Tensor, x: Inputs) -> Iterator[tuple[Tensor, slice]]:
    """Outputs (S, n, C) of the network at some of the weights and of the inputs."""
    budget = posterior.fitted.settings.memory_budget
    room = tuning.CHAIN_BYTES if budget is None else min(tuning.CHAIN_BYTES, int(budget))
    for _, part, f in ManyWeights(posterior.network, x).passes(thetas, x, room):
        yield f, part


def _linearized(posterior: Posterior, thetas: Tensor, x: Inputs) -> Iterator[tuple[Tensor, slice]]:
    """Outputs (S, n, C) of the linearized network."""
    rows, shapes = posterior.jacobian(x), posterior.network.shapes
    for part in panels(len(thetas), 3 * rows.f.numel() * rows.f.element_size(), tuning.CHAIN_BYTES):
        moves = shapes.parts(thetas[part] - posterior.fitted.theta)
        yield rows.f + rows.products(moves).permute(2, 1, 0), slice(None)


def _betas(beta: object, kind: str) -> tuple[float, ...]:
    if beta is None:
        return _BETAS
    if kind != "catoni":
        raise UnsupportedError('beta= for kind="catoni"', f"kind={kind!r}", "Leave beta= out.")
    values = beta.tolist() if isinstance(beta, (Tensor, np.ndarray)) else beta
    found = tuple(values) if isinstance(values, Iterable) else (values,)
    if not found or not all(is_number(one, above=0) for one in found):
        raise HyperparameterError("a positive finite beta, or several", f"{beta!r}"[:80], "Leave it out for a grid.")
    return tuple(float(one) for one in found)
