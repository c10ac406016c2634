"""Annealed importance sampling of an evidence, of the network and of the linearized model."""

from __future__ import annotations

from torch import Generator, Tensor

from ntk_laplace.errors import UnsupportedError
from ntk_laplace.model.data import InputData
from ntk_laplace.posterior.estimates.gaussians import posterior_gaussian, prior_gaussian
from ntk_laplace.posterior.estimates.hamiltonian import HamiltonianPath
from ntk_laplace.posterior.estimates.importance import center
from ntk_laplace.posterior.estimates.paths import Path, backward, forward, schedule
from ntk_laplace.posterior.estimates.result import AnnealedEvidence, summary
from ntk_laplace.posterior.estimates.slices import SlicedPath
from ntk_laplace.posterior.estimates.symmetry import log_symmetries
from ntk_laplace.runtime.resources import require_memory
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.weight_likelihood import likelihood_of

__all__ = ["annealed_evidence"]

_EFFECTIVE = 0.5  # share of effective chains above which few chains are trusted


def annealed_evidence(
    fitted: FittedModel, temperatures: int, chains: int, start: str, model: str, leapfrog: int, bounds: bool,
    exact_draws: Tensor | None, x: InputData | None, generator: Generator,
) -> AnnealedEvidence:
    """The evidence by chains from the prior, or from the posterior's Gaussian; arguments as those of the verb.

    Raises
    ------
    UnsupportedError
        If bounds need exact draws of the posterior, and there are none.
    """
    if bounds and exact_draws is None and not _conjugate(fitted, model):
        raise UnsupportedError("exact draws of the posterior, for an upper bound",
                               f"the approximate posterior of structure {fitted.structure.name!r}"
                               if model == "glm" and not fitted.exact else "a model whose posterior is not Gaussian",
                               "Pass exact_draws=, which synthetic data have: the weights that made them. Or leave out "
                               "bounds=True.")
    require_memory(8 * temperatures, fitted.model.network.device, f"{temperatures:,} temperatures",
                   "Use fewer; 1,000 is the default.", fitted.settings.memory_budget)
    betas, shown, prior = schedule(temperatures), fitted.settings.progress, prior_gaussian(fitted)
    if model == "glm" and SlicedPath.fits(fitted, chains):
        path: Path = SlicedPath(fitted, start)
    else:
        base = posterior_gaussian(fitted, center(fitted, model), dense=True) if start == "posterior" else prior
        path = HamiltonianPath(likelihood_of(fitted, model, x, chains), prior, base, leapfrog)
    path.adapt(betas, chains, generator, shown)
    log_weights = forward(path, betas, chains, generator, shown)
    told = path.told()
    upper = None
    if bounds:
        draws = exact_draws
        if draws is None:  # the posterior of a conjugate model is known
            draws = posterior_gaussian(fitted, center(fitted, "glm")).draws(chains, generator)
        upper = backward(path, betas, path.at_weights(draws), generator, shown).double().cpu()
    return AnnealedEvidence(**summary(log_weights, path.log_density_error, _EFFECTIVE), model=model, start=start,
                            temperatures=temperatures, symmetry=log_symmetries(fitted.network, fitted.prior),
                            sampler=path.sampler, upper_log_weights=upper, **told)


def _conjugate(fitted: FittedModel, model: str) -> bool:
    """Whether the posterior of the model is Gaussian, and its precision is that of the fit."""
    return model == "glm" and fitted.exact and fitted.likelihood.additive_noise(fitted.points.f) is not None
