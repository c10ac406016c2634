"""Annealed importance sampling of an evidence, of the network and of the linearized model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, Tensor

from ntk_laplace.errors import UnsupportedError, require_choice, require_whole
from ntk_laplace.model.data import InputData
from ntk_laplace.posterior.estimates.gaussians import posterior_gaussian, prior_gaussian
from ntk_laplace.posterior.estimates.hamiltonian import HamiltonianPath
from ntk_laplace.posterior.estimates.importance import center
from ntk_laplace.posterior.estimates.paths import Path, backward, forward, schedule
from ntk_laplace.posterior.estimates.result import AnnealedEvidence, summary
from ntk_laplace.posterior.estimates.slices import SlicedPath
from ntk_laplace.posterior.estimates.symmetry import log_symmetries
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.weight_likelihood import likelihood_of

_STARTS = ("posterior", "prior")
_EFFECTIVE = 0.5  # share of effective chains above which few chains are trusted


@dataclass(frozen=True)
class Chains:
    """How the chains run; as the arguments of the verb `annealed_evidence`.

    HyperparameterError or UnsupportedError if a number is not positive, or the start is unknown.
    """

    temperatures: int
    number: int
    start: str
    leapfrog: int

    def __post_init__(self) -> None:
        require_whole("temperatures", self.temperatures, 1, "Leave it out for 1,000.")
        require_whole("chains", self.number, 1, "Leave it out for 64.")
        require_whole("leapfrog", self.leapfrog, 1, "Leave it out for 8.")
        require_choice(self.start, _STARTS, f"start among {', '.join(map(repr, _STARTS))}")


def annealed_evidence(
    fitted: FittedModel, chains: Chains, model: str, x: InputData | None, generator: Generator, bounds: bool = False,
    exact_draws: Tensor | None = None,
) -> AnnealedEvidence:
    """The evidence by chains from the prior, or from the posterior's Gaussian; arguments as those of the verb.

    UnsupportedError if bounds need exact draws of the posterior, and there are none.
    """
    if bounds and exact_draws is None and not _conjugate(fitted, model):
        raise UnsupportedError("exact draws of the posterior, for an upper bound",
                               f"the approximate posterior of structure {fitted.structure.name!r}"
                               if model == "glm" and not fitted.exact else "a model whose posterior is not Gaussian",
                               "Pass exact_draws=, which synthetic data have: the weights that made them. Or leave out "
                               "bounds=True.")
    count, shown = chains.number, fitted.settings.progress
    fitted.model.require_memory(8 * chains.temperatures, f"{chains.temperatures:,} temperatures",
                                "Use fewer; 1,000 is the default.")
    betas, path = schedule(chains.temperatures), _path(fitted, chains, model, x)
    path.adapt(betas, count, generator, shown)
    log_weights = forward(path, betas, count, generator, shown)
    told, upper = path.told(), None
    if bounds:
        draws = exact_draws
        if draws is None:  # the posterior of a conjugate model is known
            draws = posterior_gaussian(fitted, center(fitted, "glm")).draws(count, generator)
        upper = backward(path, betas, path.at_weights(draws), generator, shown).double().cpu()
    return AnnealedEvidence(**summary(log_weights, path.log_density_error, _EFFECTIVE), model=model,
                            start=chains.start, temperatures=chains.temperatures, sampler=path.sampler,
                            symmetry=log_symmetries(fitted.network, fitted.prior), upper_log_weights=upper, **told)


def _path(fitted: FittedModel, chains: Chains, model: str, x: InputData | None) -> Path:
    """The transitions of the model, from its start."""
    if model == "glm" and SlicedPath.fits(fitted, chains.number):
        return SlicedPath(fitted, chains.start)
    prior = prior_gaussian(fitted)
    at_posterior = chains.start == "posterior"
    base = posterior_gaussian(fitted, center(fitted, model), dense=True) if at_posterior else prior
    return HamiltonianPath(likelihood_of(fitted, model, x, chains.number), prior, base, chains.leapfrog)


def _conjugate(fitted: FittedModel, model: str) -> bool:
    """Whether the posterior of the model is Gaussian, and its precision is that of the fit."""
    return model == "glm" and fitted.exact and fitted.likelihood.additive_noise(fitted.points.f) is not None
