"""Importance sampling of an evidence from the posterior's Gaussian ([L22] Eq. 12, 13)."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ntk_laplace.model.data import InputData
from ntk_laplace.posterior.estimates.gaussians import posterior_gaussian, prior_gaussian
from ntk_laplace.posterior.estimates.result import EvidenceEstimate, summary
from ntk_laplace.posterior.estimates.symmetry import log_symmetries
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.progress import track
from ntk_laplace.runtime.sampling import draw_sizes
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.weight_likelihood import likelihood_of


def importance_evidence(
    fitted: FittedModel, samples: int, inflation: float, model: str, x: InputData | None, generator: Generator
) -> EvidenceEstimate:
    """log (1/S) Σ p(D, θ_s)/q(θ_s) for θ_s ~ q = N(m, c H⁻¹); arguments as those of the verb."""
    fitted.model.require_memory(16 * samples, f"{samples:,} weights of importance sampling", "Take fewer samples.")
    sizes = draw_sizes(samples, len(fitted.theta), fitted.theta, tuning.SAMPLED_OUTPUTS // fitted.points.f.numel())
    likelihood, prior = likelihood_of(fitted, model, x, sizes[0]), prior_gaussian(fitted)
    proposal = posterior_gaussian(fitted, center(fitted, model), inflation)
    parts: list[Tensor] = []
    for size in track(sizes, "ntk_laplace: importance samples", samples, fitted.settings.progress, lambda size: size):
        thetas = proposal.draws(size, generator)
        parts.append(likelihood.values(thetas) + prior.log_density(thetas) - proposal.log_density(thetas))
    found = summary(torch.cat(parts), 0.5 * proposal.log_det_error)
    return EvidenceEstimate(**found, model=model, symmetry=log_symmetries(fitted.network, fitted.prior))


def center(fitted: FittedModel, model: str) -> Tensor:
    """Mean of the posterior's Gaussian, (P,): the weights, or one Newton step further for the linearized model.

    The step reaches the optimum of a Gaussian likelihood. Where the network is trained to its optimum it is zero. A
    Gaussian that was found elsewhere keeps its mean.
    """
    if model == "nn" or not fitted.structure.spec.laplace:
        return fitted.theta
    return fitted.theta - fitted.newton_step()
