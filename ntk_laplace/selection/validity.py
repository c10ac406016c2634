"""What makes a PAC-Bayes bound no bound: each case that can be seen is refused in its own words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.model.data import Inputs
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.explain.reliability import MOST_DECREMENT, newton_decrement
from ntk_laplace.structures.points import present_values, unmoved

_CHANCE = 5  # points that may equal one of the prior's, beside twice as many as the prior's points suggest
_OTHERS = "Train a network on the first points alone, fit prior_posterior to them, and pass the other points as data."


def require_valid(
    posterior: Posterior, prior_posterior: Posterior | None, parts: list[Inputs], targets: Tensor, model: str,
    by_probability: bool,
) -> tuple[float, int]:
    """Refuse what is no bound; return the divergence from the prior, and how many points repeat one of the prior's.

    The errors are those of `risk_bound`.
    """
    posterior.fitted.settings.reducer.require_one("a bound of the risk", "Save the fit, and load it on one process.")
    if prior_posterior is None:
        if model == "glm":
            raise UnsupportedError(
                'model="nn", or a network linearized before the data were seen', "a linearization at trained weights: "
                "its features J depend on the data, so that it is no fixed class of models",
                'Use model="nn"; or pass prior_posterior= and posterior=prior_posterior.condition(data).refit().')
        _require_fixed_prior(posterior)
    _require_weights(posterior, model)
    if by_probability and prior_posterior is None and not _likelihood_unmoved(posterior):
        raise UnsupportedError("a loss that was fixed before the data", "a likelihood whose hyperparameters, on which "
                               "this loss depends, have changed since the fit", "Fit with the value you chose before.")
    repeated = 0 if prior_posterior is None else _require_other_data(posterior, prior_posterior, parts, targets, model)
    divergence = posterior.kl(prior_posterior)
    if divergence.standard_error or not bool(torch.isfinite(divergence.value)):
        raise UnsupportedError("an exact divergence from the prior", f"an estimate, {divergence}",
                               'Fit with structure="full", "gp", "kfac" or "diag".')
    return max(0.0, float(divergence)), repeated


def _require_fixed_prior(posterior: Posterior) -> None:
    """The prior was fixed before the data, as far as its object can tell."""
    prior, network, theta = posterior.prior, posterior.network, posterior.fitted.theta
    if not prior.as_given:
        raise UnsupportedError(
            "a prior that was fixed before the data", "precisions that were optimized: a search over real numbers has "
            "no finite number of models for a union bound",
            "Fit with one precision of a grid of k values that you fixed before, GaussianPrior(value), and pass "
            "models=k; or pass prior_posterior=, whose own precisions may be tuned on its points.")
    mean = prior.flat_mean().to(theta)
    # in float32 or after rounding, too
    if any(bool((mean - one.to(theta)).norm() <= 1e-5 * mean.norm()) for one in (theta, network.theta)):
        raise UnsupportedError("a prior mean that was fixed before the data", "the trained weights themselves",
                               "Use a mean of 0, or weights that were trained on other points.")
    fixed = [name for name, one in network.module.named_parameters() if name not in network.shapes]
    fixed += [name for name in _buffers(network.module) if name.rpartition(".")[2].startswith("running_")]
    if fixed:
        raise UnsupportedError(
            "a prior over everything that was trained", f"{len(fixed)} tensors of the network that the posterior "
            f"leaves fixed, {fixed[0]!r} among them",
            "Linearize all parameters. If these were fixed before the data, pass the rest of the network as network, "
            "and its inputs as inputs.")


def _require_weights(posterior: Posterior, model: str) -> None:
    """The posterior is a Gaussian around weights of its network, or for "glm" around a refit."""
    at = posterior.fitted.model
    linear = model == "glm" and (at.refitted or not posterior.fitted.structure.spec.laplace)
    if at.displacement is not None and not linear and not posterior.fitted.structure.spec.laplace:
        raise UnsupportedError("a Gaussian around weights of its network", "one around other weights, at which the "
                               "linearization did not move", 'Pass model="glm", or fit with relinearize=True.')
    if at.training_gradient is not None or (at.displacement is not None and not linear):
        raise UnsupportedError("a posterior of unchanged training data", f"one that a what-if changed, {posterior!r}",
                               "Pass the posterior before it"
                               + ("." if model == "glm" else '; a refit of the linearized network is for model="glm".'))


def _require_other_data(
    posterior: Posterior, prior_posterior: Posterior, parts: list[Inputs], targets: Tensor, model: str
) -> int:
    """The prior posterior is of this network and of other points; return how many points equal one of them."""
    own, its = posterior.network, prior_posterior.network
    at = prior_posterior.fitted.model
    if at.displacement is not None or at.training_gradient is not None:
        raise UnsupportedError("a prior_posterior that was fitted to other points", "one that a what-if changed: "
                               f"its weights and features come from a network that saw them, {prior_posterior!r}",
                               _OTHERS)
    if list(own.shapes.items()) != list(its.shapes.items()):
        raise DataError("a prior_posterior of the same parameters", f"{its.num_parameters:,} parameters in "
                        f"{len(its.shapes)} tensors, where the posterior has {own.num_parameters:,} in "
                        f"{len(own.shapes)}", "Fit both with the same architecture and parameters=.")
    there = _fixed(own.module, own.shapes)
    differ = [name for name, value in _fixed(its.module, its.shapes).items()
              if name not in there or not torch.equal(there[name].to(value), value)]
    if differ:
        raise UnsupportedError("networks that agree in all that the posteriors leave fixed",
                               f"{len(differ)} tensors that differ, {differ[0]!r} among them",
                               "Linearize these parameters too, or keep them fixed in both trainings.")
    same = torch.equal(own.theta, its.theta.to(own.theta))
    if model == "glm" and not same:
        raise UnsupportedError(
            "a linearization that prior_posterior shares", "one at weights that were trained on the data",
            "Use posterior=prior_posterior.condition(data).refit(), which keeps the features of the first points.")
    if same and prior_posterior.fitted.structure.spec.laplace:
        _require_trained_apart(posterior, prior_posterior)
    return _require_no_overlap(prior_posterior, parts, targets)


def _require_trained_apart(posterior: Posterior, prior_posterior: Posterior) -> None:
    """Weights that both share are the optimum of the prior's points, not of all."""
    decrement, fitted = newton_decrement(prior_posterior.fitted), posterior.fitted
    comparable = fitted.structure.spec.laplace and fitted.model.displacement is None
    most = newton_decrement(fitted) if comparable else MOST_DECREMENT
    if decrement > most:
        raise DataError(
            "a prior_posterior at weights that were trained on its own points", f"weights with a Newton decrement of "
            f"{decrement:.2g} nats a point on these, above {most:.2g}: they were trained on all points, as those of "
            "subset() are", _OTHERS)


def _require_no_overlap(prior_posterior: Posterior, parts: Iterable[Inputs], targets: Tensor) -> int:
    """The points are not those of the prior: rows of outputs and targets are compared."""
    points, network = prior_posterior.fitted.points, prior_posterior.network
    scale = 1.0 + float(points.f.abs().max())
    f = torch.cat([network.without_grad(x) for x in parts]).to(points.f)
    step = scale * torch.finfo(network.precision).eps ** 0.5
    seen, given = Counter(_keys(points.f, points.targets, step)), _keys(f, targets, step)
    repeated = sum(key in seen for key in given)
    among = sum(count for count in seen.values() if count > 1) / points.num_examples  # of discrete data
    if repeated > _CHANCE + 2 * among * len(given):
        raise DataError("data that prior_posterior has not seen", f"{repeated:,} of {len(given):,} points that equal "
                        f"one of its {points.num_examples:,}", _OTHERS)
    return repeated


def _keys(f: Tensor, targets: Tensor, step: float) -> list[bytes]:
    rows = [torch.round(f / step).long(), torch.round(targets.reshape(len(f), -1).double() / 1e-6).long()]
    return [row.tobytes() for row in torch.cat([one.cpu() for one in rows], 1).numpy()]


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: one for name, one in module.named_buffers() if one.is_floating_point()}


def _fixed(module: nn.Module, chosen: Iterable[str]) -> dict[str, Tensor]:
    """What a posterior leaves fixed: other parameters, and buffers."""
    names = set(chosen)
    own = {name: one.detach() for name, one in module.named_parameters() if name not in names}
    return own | _buffers(module)


def _likelihood_unmoved(posterior: Posterior) -> bool:
    """Whether the likelihood has the hyperparameters of the fit, as `LinearizedModel.fitted_at` lists them."""
    before = posterior.fitted.model.fitted_at
    return before is None or unmoved(before[len(present_values(posterior.prior)) :], posterior.likelihood)
