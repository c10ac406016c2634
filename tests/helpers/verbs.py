"""The verbs of a posterior, each as one tensor, asked on any device; and how far two devices are apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import ntk_laplace as ntkl
from minima import parts, trained
from ntk_laplace.model.data import to_device
from refusals import inputs
from registry import LIKELIHOODS

Verb = Callable[[ntkl.Posterior, Any, Tensor], Any]


def slope(posterior: ntkl.Posterior) -> Tensor:
    """Of the evidence in the prior's log precisions."""
    return torch.autograd.grad(posterior.log_marginal_likelihood(), next(posterior.prior.parameters()))[0]


def tuned(posterior: ntkl.Posterior) -> Tensor:
    """The evidence after a step."""
    posterior.fit_hyperparameters("adam", steps=1)
    return posterior.log_marginal_likelihood()


def there_and_back(posterior: ntkl.Posterior) -> Tensor:
    """The evidence in float32 of a posterior in float64, which it is again afterwards."""
    posterior.to(dtype=torch.float32)
    value = posterior.log_marginal_likelihood().float()
    posterior.to(dtype=torch.float64)
    return value


def explained(posterior: ntkl.Posterior, x: Any) -> Tensor:
    """Effects of the training points: all of them, or the largest where the structure ranks them."""
    found = posterior.explain(x)
    return torch.cat(list(found.effects.values())) if isinstance(found, ntkl.Ranking) else found.effect


def shape_of_draws(posterior: ntkl.Posterior, x: Any) -> Tensor:
    """Of weights and of outputs; the draws themselves belong to the device."""
    weights, outputs = posterior.sample(3), posterior.sample(3, x)
    assert bool(weights.isfinite().all()) and bool(outputs.isfinite().all())
    assert weights.device == outputs.device == posterior.f.device
    return torch.tensor([*weights.shape, *outputs.shape])


def given(posterior: ntkl.Posterior, x: Any, y: Tensor) -> ntkl.Posterior:
    """A Gaussian whose diagonal precision is given on the CPU."""
    diagonal = torch.linspace(1, 2, posterior.num_parameters)
    return ntkl.gaussian_posterior(posterior.network.module, (x, y), posterior.likelihood, posterior.prior,
                                   precision=diagonal)


VERBS: dict[str, Verb] = {
    "evidence": lambda p, x, y: p.log_marginal_likelihood(),
    "correction": lambda p, x, y: p.log_marginal_likelihood(correction=True),
    "slope": lambda p, x, y: slope(p),
    "variances": lambda p, x, y: p.latent_moments(x)[1],
    "glm": lambda p, x, y: p.predict(x).mean,
    "probit": lambda p, x, y: p.predict(x, method="probit").mean,
    "removal": lambda p, x, y: p.removal_effects(x),
    "conditional": lambda p, x, y: p.conditional_log_marginal_likelihood(3, 1, method="average").item(),
    "subset": lambda p, x, y: p.subset(torch.arange(3)).log_marginal_likelihood(),
    "condition": lambda p, x, y: p.condition((x, y)).log_marginal_likelihood(),
    "reweight": lambda p, x, y: p.reweight([0, 1], [0.5, 2.0]).log_marginal_likelihood(),
    "tuned": lambda p, x, y: tuned(p),
}
"""Those that every device is asked; the last one moves the hyperparameters."""

MORE: dict[str, Verb] = {
    "bound": lambda p, x, y: p.elbo(samples=64).value,
    "divergence": lambda p, x, y: p.kl().value,
    "given": lambda p, x, y: given(p, x, y).latent_moments(x)[1],
    "joint": lambda p, x, y: p.latent(x).covariance_matrix,
    "prior": lambda p, x, y: p.prior_latent(x).covariance_matrix,
    "posterior mean": lambda p, x, y: p.latent_moments(x, mean="posterior")[0],
    "used": lambda p, x, y: p.effective_parameters(),
    "curve": lambda p, x, y: p.evidence_curve(torch.tensor([0.3, 1.0, 4.0])),
    "learning curve": lambda p, x, y: p.learning_curve(2).terms,
    "explanation": lambda p, x, y: explained(p, x),
    "left out": lambda p, x, y: p.leave_one_out().mean,
    "left out density": lambda p, x, y: p.leave_one_out().log_density,
    "some left out": lambda p, x, y: p.leave_one_out(points=[0, 2]).mean,
    "sets": lambda p, x, y: p.predict_set(x).probabilities,
    "removed": lambda p, x, y: p.remove([1]).latent_moments(x)[0],
    "added": lambda p, x, y: p.add(x, y).log_marginal_likelihood(),
    "relabeled": lambda p, x, y: p.relabel([0], y[:1]).latent_moments(x)[0],
    "merged": lambda p, x, y: p.merge(copy.deepcopy(p)).log_det(),
    "criteria": lambda p, x, y: p.aic() + p.bic(),
    "draws": lambda p, x, y: shape_of_draws(p, x),
    "annealed": lambda p, x, y: p.annealed_evidence(50, 60, model="glm").value,
    "float32": lambda p, x, y: there_and_back(p),
}
"""The others, for a real device."""


def answers(
    case: Any, y: Tensor, structure: str, device: torch.device, verbs: Mapping[str, Verb] = VERBS
) -> dict[str, Tensor | str]:
    """Of the verbs on that device; errors in words."""
    network, x, x_new = copy.deepcopy(case.network).to(device), to_device(case.x, device), to_device(case.x_new, device)
    prior = ntkl.GaussianPrior(1.3, groups="layer")
    posterior = ntkl.laplace(network, (x, y.to(device)), LIKELIHOODS["categorical"].build(), prior, structure)
    found: dict[str, Tensor | str] = {}
    for verb, ask in verbs.items():
        try:
            value = torch.as_tensor(ask(posterior, x_new, y[:4].to(device)))
            found[verb] = value.detach().cpu().double()
        except Exception as error:
            found[verb] = f"{type(error).__name__}: {error}"
    return found


def moved(likelihood: str, device: torch.device) -> Tensor:
    """Means of f on that device at the network's own optimum without a training point."""
    x, (y, own) = inputs().to(device), parts(likelihood)
    network = copy.deepcopy(trained(likelihood)).to(device)
    posterior = ntkl.laplace(network, (x, y.to(device)), own, ntkl.GaussianPrior(3.0))
    return posterior.remove([1], linearization="moving").latent_moments(x[:4])[0].detach().cpu()


def gap(here: Tensor | str, there: Tensor | str) -> float | str:
    """Largest difference over the largest entry; or what went wrong there."""
    if isinstance(here, str) or isinstance(there, str):
        refused = isinstance(here, str) and here == there and here.startswith("UnsupportedError: ")
        return 0.0 if refused else f"{there}"
    return float((here - there).abs().max() / here.abs().max().clamp_min(1e-12))
